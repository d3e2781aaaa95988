"""Files of pairs: what is read of them, and that a run that was cut short submits nothing twice."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from db import runs
from db.engine import make_engine
from db.runs import Run
from db.verdicts import count_into_runs
from tasks import pairs_file
from tasks.high_water import HighWater
from tasks.pairs_file import LeftOut, PairsFile, begin, noting, once, read_rows, run_again, run_of, submit_file
from tasks.pairs_formats import FileWrong, Row
from tests.conftest import Database
from tests.shared import emptied_database
from worker.errors import ErrorCode, PairRejected

database = emptied_database

ID = "0199c0de-0000-7000-8000-0000000000aa"


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pairs_in(folder: Path, number: int) -> Path:
    lines = [json.dumps({"ref": f"sku-{n}", "image": "s3://shop/1.jpg", "text": f"shoe {n}"}) for n in range(number)]
    return write(folder, "pairs.jsonl", "\n".join(lines))


def submitted(engine: Engine) -> list[dict[str, Any]]:
    """All pairs in the outbox, by their place in the file."""
    with engine.connect() as connection:
        bodies = [json.loads(body) for body in connection.execute(text("select body from outbox")).scalars()]
    return sorted((pair for body in bodies for pair in body["pairs"]), key=lambda pair: int(pair["ref"][4:]))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_jsonl_is_read_line_by_line_and_a_bad_line_comes_as_an_error_with_its_number(tmp_path: Path, mark: str) -> None:
    good = {"image": "s3://shop/1.jpg", "text": "a red shoe \u2028", "attributes": {"a": 1}}
    lines = [
        mark + json.dumps(good, ensure_ascii=False),
        "",
        "{not json",
        "   ",
        "[1]",
        "5",
        '"text"',
        json.dumps(good),
    ]
    rows = list(read_rows(write(tmp_path, "pairs.jsonl", "\r\n".join(lines))))
    assert [rows[0], rows[-1]] == [good, good]
    bad = [row for row in rows if isinstance(row, PairRejected)]
    assert [row.detail.split(" is ")[0] for row in bad] == ["line 3", "line 5", "line 6", "line 7"]
    assert {row.code for row in bad} == {ErrorCode.INVALID_PAIR}
    assert "{not json" in bad[0].detail


def test_a_line_that_is_nested_without_end_is_one_bad_line(tmp_path: Path) -> None:
    rows = list(read_rows(write(tmp_path, "pairs.jsonl", "[" * 100_000 + '\n{"text": "next"}')))
    assert isinstance(rows[0], PairRejected)
    assert len(rows[0].detail) < 300
    assert rows[1:] == [{"text": "next"}]


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_jsonl_has_no_pairs(tmp_path: Path, content: str) -> None:
    assert list(read_rows(write(tmp_path, "pairs.jsonl", content))) == []


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_in_csv_other_columns_become_attributes_and_empty_cells_are_not_given(tmp_path: Path, mark: str) -> None:
    content = (
        f"{mark}image,text,ref,policy,category\n"
        's3://shop/1.jpg,"a ""red"", shoe\nsize 9",sku-1,prohibited,shoes\n'
        "s3://shop/2.jpg,,,,\n"
        "s3://shop/3.jpg,a hat,sku-3,,,too,many\n"
    )
    assert list(read_rows(write(tmp_path, "pairs.CSV", content))) == [
        {
            "image": "s3://shop/1.jpg",
            "text": 'a "red", shoe\nsize 9',
            "ref": "sku-1",
            "policy": "prohibited",
            "attributes": {"category": "shoes"},
        },
        {"image": "s3://shop/2.jpg", "text": "", "attributes": {}},
        {"image": "s3://shop/3.jpg", "text": "a hat", "ref": "sku-3", "attributes": {"more columns": ["too", "many"]}},
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "missing: image, text"),
        ("image,words\n", "missing: text"),
        ("ref;image;text\n", "missing: image, text"),
        ('image,"text\n', "is not CSV"),
        ('image,text\ns3://b/k,"no end\n', "is not CSV"),
        ('image,text\ns3://b/k,"a"b\n', "line 2 is not CSV"),
    ],
)
def test_a_csv_that_is_none_is_refused_with_a_sentence(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(FileWrong, match=says):
        list(read_rows(write(tmp_path, "pairs.csv", content)))


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path, engine: Engine) -> None:
    missing = tmp_path / "nowhere.jsonl"
    with pytest.raises(FileWrong, match=r"nowhere\.jsonl: No such file"):
        list(read_rows(missing))
    with pytest.raises(FileWrong, match=r"nowhere\.jsonl"):
        begin(engine, missing, lane="bulk", source="default")


def test_an_id_that_stands_twice_in_a_file_is_one_pair() -> None:
    left_out = LeftOut()
    rows: list[Row] = [
        {"id": ID},
        {"id": None},
        {"id": ID.upper()},
        {"id": None},
        {"id": "sku"},
        {"id": "sku"},
        {"id": 5},
    ]
    kept = list(noting(once(iter(rows)), left_out))
    assert [row for row in kept if not isinstance(row, PairRejected)] == [row for n, row in enumerate(rows) if n != 2]
    assert [row.code for row in left_out.first] == [ErrorCode.DUPLICATE_ID]


@pytest.fixture
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_file, "PAIRS_PER_MESSAGE", 2)
    monkeypatch.setattr(pairs_file, "MESSAGES_PER_COMMIT", 2)


def start(engine: Engine, path: Path, **options: Any) -> Run:
    return begin(engine, path, lane=options.pop("lane", "bulk"), source="default", **options)


def state(engine: Engine, run: Run) -> Run:
    with engine.connect() as connection:
        return runs.read(connection, run.id)


def test_a_file_becomes_a_run_whose_pairs_share_its_key(tmp_path: Path, engine: Engine, small_commits: None) -> None:
    path = pairs_in(tmp_path, 5)
    run = start(engine, path, lane="live")
    assert list(submit_file(engine, run, read_rows(path))) == [4, 1]
    done = state(engine, run)
    assert (done.state, done.planned, done.name, done.lane) == ("running", 5, "pairs.jsonl", "live")
    assert [pair["ref"] for pair in submitted(engine)] == [f"sku-{n}" for n in range(5)]
    with engine.connect() as connection:
        bodies = [json.loads(body) for body in connection.execute(text("select body from outbox")).scalars()]
        lanes = set(connection.execute(text("select lane from outbox where published_at is null")).scalars())
    assert {(body["run_id"], body["submitted_at"]) for body in bodies} == {(str(run.id), run.submitted_at.isoformat())}
    assert lanes == {"live"}


def test_a_run_that_was_cut_short_goes_on_where_it_stopped(tmp_path: Path, engine: Engine, small_commits: None) -> None:
    path = pairs_in(tmp_path, 11)
    whole = start(engine, path)
    cut = submit_file(engine, whole, read_rows(path))
    assert next(cut) == 4
    del cut
    first = submitted(engine)
    with engine.begin() as connection:
        # Meanwhile a worker settles what was accepted, so that the outbox no longer knows of it.
        connection.execute(text("delete from outbox"))
    again = start(engine, path)
    assert (again.id, again.submitted_at, again.planned, again.state) == (whole.id, whole.submitted_at, 4, "planning")
    assert list(submit_file(engine, again, read_rows(path))) == [4, 3]
    everything = first + submitted(engine)
    assert [pair["ref"] for pair in everything] == [f"sku-{n}" for n in range(11)]
    assert len({pair["id"] for pair in everything}) == 11
    assert (state(engine, again).planned, state(engine, again).state) == (11, "running")


def test_a_file_that_was_submitted_whole_is_not_submitted_again(
    tmp_path: Path, engine: Engine, small_commits: None
) -> None:
    path = pairs_in(tmp_path, 3)
    assert sum(submit_file(engine, start(engine, path), read_rows(path))) == 3
    assert list(submit_file(engine, start(engine, path), read_rows(path))) == []
    assert len(submitted(engine)) == 3


@pytest.mark.parametrize("change", [{"lane": "live"}, {"again": "2026-01-01"}, {"content": True}])
def test_another_file_lane_or_day_is_another_run(tmp_path: Path, engine: Engine, change: dict[str, Any]) -> None:
    first = start(engine, pairs_in(tmp_path, 3))
    path = pairs_in(tmp_path, 4 if change.pop("content", False) else 3)
    assert start(engine, path, **change).id != first.id


def test_again_makes_another_run_each_time_but_goes_on_with_one_that_was_cut_short(
    tmp_path: Path, engine: Engine, small_commits: None
) -> None:
    path, found = pairs_in(tmp_path, 9), []
    for taken in (1, 99, 99):
        with PairsFile(path) as file:
            run = run_again(engine, file, lane="bulk", source="default")
            batches = submit_file(engine, run, file.rows())
            assert sum(accepted for _, accepted in zip(range(taken), batches, strict=False))
        found.append(run.id)
    assert found[0] == found[1] != found[2]
    assert start(engine, path).id not in found
    assert [one["ref"] for one in submitted(engine)] == [f"sku-{n}" for n in range(9) for _ in range(2)]


def test_two_calls_at_once_do_not_count_a_pair_twice(tmp_path: Path, engine: Engine, small_commits: None) -> None:
    path = pairs_in(tmp_path, 9)
    one = submit_file(engine, start(engine, path), read_rows(path))
    other = submit_file(engine, start(engine, path), read_rows(path))
    next(one)
    with pytest.raises(FileWrong, match="another process"):
        next(other)
    assert list(one) == [4, 1]
    assert state(engine, start(engine, path)).planned == len(submitted(engine)) == 9


def test_lines_that_are_no_pairs_are_left_out_and_ids_that_were_given_are_kept(tmp_path: Path, engine: Engine) -> None:
    good = {"image": "s3://shop/1.jpg", "text": "a red shoe"}
    lines = [json.dumps({**good, "ref": "sku-0"}), "no pair", json.dumps({**good, "ref": "sku-1", "id": ID})]
    path = write(tmp_path, "pairs.jsonl", "\n".join(lines))
    left_out = LeftOut()
    assert list(submit_file(engine, start(engine, path), noting(read_rows(path), left_out))) == [2]
    assert left_out.count == 1
    first, second = submitted(engine)
    assert UUID(first["id"]).version == 5
    assert second["id"] == ID


def test_a_file_that_was_submitted_before_still_says_which_lines_are_no_pairs(tmp_path: Path, engine: Engine) -> None:
    path = write(tmp_path, "pairs.jsonl", '{"image": "s3://shop/1.jpg", "text": "a red shoe"}\nno pair')
    for accepted in ([1], []):
        left_out = LeftOut()
        assert list(submit_file(engine, start(engine, path), noting(read_rows(path), left_out))) == accepted
        assert [row.detail.split(" is ")[0] for row in left_out.first] == ["line 2"]


@pytest.mark.parametrize(
    "name", ["pairs.txt", "pairs", "pairs.json", "pairs.gz", "pairs.parquet.gz", "pairs.jsonl.zst", ".jsonl"]
)
def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(
    tmp_path: Path, engine: Engine, name: str
) -> None:
    path = write(tmp_path, name, "{}")
    with pytest.raises(FileWrong, match=r"\.jsonl .* or \.csv, .* or \.parquet"):
        list(read_rows(path))
    with pytest.raises(FileWrong, match=r"\.jsonl .* or \.csv, .* or \.parquet"):
        start(engine, path)


@pytest.fixture
def tide(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> HighWater:
    """A mark at three messages, looked at every time."""
    monkeypatch.setattr("tasks.high_water.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(pairs_file, "LOOK_EVERY_S", 0.0)
    return HighWater(engine, 3)


def test_while_the_outbox_is_above_its_mark_a_file_waits_for_workers(
    tmp_path: Path, engine: Engine, small_commits: None, tide: HighWater
) -> None:
    path = pairs_in(tmp_path, 10)
    seen: list[int] = []

    def on_wait(held: int) -> None:
        seen.append(held)
        with engine.begin() as connection:  # A worker settles a message.
            connection.execute(text("delete from outbox where message_id = (select message_id from outbox limit 1)"))

    run = start(engine, path)
    assert list(submit_file(engine, run, read_rows(path), tide, on_wait)) == [4, 4, 2]
    # Two messages, then four; one of them is settled while the third commit waits.
    assert seen == [4, 0]
    assert state(engine, run).planned == 10


def test_a_file_that_waits_can_be_interrupted_and_goes_on_later(
    tmp_path: Path, engine: Engine, small_commits: None, tide: HighWater
) -> None:
    path = pairs_in(tmp_path, 11)

    def interrupted(held: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(submit_file(engine, start(engine, path), read_rows(path), tide, interrupted))
    again = start(engine, path)
    assert (again.planned, again.state) == (8, "planning")
    assert list(submit_file(engine, again, read_rows(path))) == [3]
    assert [pair["ref"] for pair in submitted(engine)] == [f"sku-{n}" for n in range(11)]


def test_an_empty_file_is_a_run_that_is_done(tmp_path: Path, engine: Engine) -> None:
    path = write(tmp_path, "pairs.jsonl", "")
    run = start(engine, path)
    assert list(submit_file(engine, run, read_rows(path))) == []
    assert state(engine, run).state == "done"


def test_no_message_and_no_commit_is_longer_than_its_limit_and_one_pair_alone_may_be(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs_file, "MAX_MESSAGE_CHARS", 1_000)
    monkeypatch.setattr(pairs_file, "MAX_COMMIT_CHARS", 2_000)
    lengths = [300, 300, 300, 5_000, 10, 10, 900, 900, 300]
    rows: list[Row] = [{"ref": f"sku-{n}", "image": "", "text": "x" * length} for n, length in enumerate(lengths)]
    path = write(tmp_path, "pairs.jsonl", "")
    assert list(submit_file(engine, start(engine, path), rows)) == [3, 1, 4, 1]
    with engine.connect() as connection:
        bodies = [json.loads(body) for body in connection.execute(text("select body from outbox")).scalars()]
    texts = sorted(sorted(len(pair["text"]) for pair in body["pairs"]) for body in bodies)
    assert texts == [[10, 10, 900], [300], [300, 300, 300], [900], [5_000]]
    assert [pair["ref"] for pair in submitted(engine)] == [f"sku-{n}" for n in range(9)]


def test_an_id_that_stands_twice_far_apart_is_one_pair_also_where_the_run_was_cut_short_between(
    tmp_path: Path, engine: Engine, small_commits: None
) -> None:
    lines = [json.dumps({"ref": f"sku-{n}", "image": "s3://shop/1.jpg", "text": "x"}) for n in range(1, 9)]
    twice = [
        json.dumps({"id": one, "ref": "sku-0", "image": "s3://shop/1.jpg", "text": "x"}) for one in (ID, ID.upper())
    ]
    path = write(tmp_path, "pairs.jsonl", "\n".join([twice[0], *lines, twice[1]]))
    for taken in (1, None):
        left_out = LeftOut()
        with PairsFile(path) as file:
            run = run_of(engine, file, lane="bulk", source="default")
            batches = submit_file(engine, run, noting(once(file.rows(), file.where), left_out))
            assert sum(accepted for _, accepted in zip(range(taken or 99), batches, strict=False)) == (
                4 if taken else 5
            )
    assert [row.detail.split(" is ")[0] for row in left_out.first] == ["line 10"]
    assert ID in left_out.first[0].detail
    assert (state(engine, run).planned, len({pair["id"] for pair in submitted(engine)})) == (9, 9)


def test_of_many_lines_that_are_no_pairs_the_first_are_kept_and_all_are_counted() -> None:
    left_out = LeftOut()
    rows = [PairRejected(ErrorCode.INVALID_PAIR, f"line {n}") for n in range(10_000)]
    assert sum(1 for _ in noting(rows, left_out)) == left_out.count == 10_000
    assert [row.detail for row in left_out.first] == [f"line {n}" for n in range(5)]


def test_a_file_of_broken_lines_alone_is_a_run_that_is_done(tmp_path: Path, engine: Engine) -> None:
    path = write(tmp_path, "pairs.jsonl", "no pair\n" * 5_000)
    run = start(engine, path)
    assert list(submit_file(engine, run, read_rows(path))) == []
    assert (state(engine, run).state, state(engine, run).planned) == ("done", 0)


# ---- Files that break off or are changed -----------------------------------------------------------------------------


def settle_everything(engine: Engine, run: Run) -> None:
    """Play the worker: all that was accepted of the run is judged."""
    with engine.begin() as connection:
        connection.execute(text("delete from outbox"))
        pairs = runs.read(connection, run.id).planned
        count_into_runs(connection, {run.id: Counter(judged=pairs)})


@pytest.mark.parametrize("settled", ["before", "after"])
def test_a_file_that_breaks_off_is_accepted_up_to_there_and_its_run_ends(
    tmp_path: Path, engine: Engine, small_commits: None, settled: str
) -> None:
    rows = [f"s3://shop/1.jpg,shoe {n},sku-{n}" for n in range(7)]
    path = write(tmp_path, "pairs.csv", "\n".join(["image,text,ref", *rows, 's3://shop/1.jpg,"a"b,sku-7', *rows]))
    run = start(engine, path)
    batches = submit_file(engine, run, read_rows(path))
    assert [next(batches), next(batches)] == [4, 3]
    if settled == "before":
        settle_everything(engine, run)
    with pytest.raises(FileWrong, match="line 9 is not CSV"):
        next(batches)
    if settled == "after":
        assert [pair["ref"] for pair in submitted(engine)] == [f"sku-{n}" for n in range(7)]
        settle_everything(engine, run)
    assert (state(engine, run).state, state(engine, run).planned) == ("done", 7)
    with pytest.raises(FileWrong, match="line 9 is not CSV"):
        list(submit_file(engine, start(engine, path), read_rows(path)))
    assert (state(engine, run).state, state(engine, run).planned) == ("done", 7)
    assert submitted(engine) == []


def test_a_file_that_could_not_be_read_on_and_then_can_is_submitted_to_its_end(
    tmp_path: Path, engine: Engine, small_commits: None
) -> None:
    path = pairs_in(tmp_path, 11)

    def failing() -> Iterator[Row]:
        yield from itertools.islice(read_rows(path), 6)
        raise FileWrong("it breaks off after line 6: the disk fails")

    run = start(engine, path)
    with pytest.raises(FileWrong, match="the disk fails"):
        list(submit_file(engine, run, failing()))
    settle_everything(engine, run)
    assert (state(engine, run).state, state(engine, run).planned) == ("done", 6)
    with engine.begin() as connection:
        (short,) = runs.without_page(connection)
        runs.note_page(connection, short, "s3://pages/of-6-pairs.html")
        assert runs.without_page(connection) == []
    assert list(submit_file(engine, start(engine, path), read_rows(path))) == [4, 1]
    assert [pair["ref"] for pair in submitted(engine)] == [f"sku-{n}" for n in range(6, 11)]
    assert state(engine, run).state == "running"
    with engine.begin() as connection:
        count_into_runs(connection, {run.id: Counter(judged=5)})
    assert state(engine, run).state == "done"
    with engine.begin() as connection:
        runs.note_page(connection, short, "s3://pages/of-6-pairs.html")
        assert [due.id for due in runs.without_page(connection)] == [run.id], "its page would be that of 6 pairs"


@pytest.mark.parametrize("change", ["longer", "other"])
def test_a_file_that_is_changed_meanwhile_is_noticed_before_anything_new_is_accepted(
    tmp_path: Path, engine: Engine, small_commits: None, change: str
) -> None:
    path = pairs_in(tmp_path, 11)
    whole = path.read_bytes()
    with PairsFile(path) as file:
        run = run_of(engine, file, lane="bulk", source="default")
        batches = submit_file(engine, run, file.rows(), check=file.check)
        assert next(batches) == 4
        path.write_bytes(whole + whole if change == "longer" else whole.replace(b"shoe", b"boot"))
        os.utime(path, ns=(0, 0))  # Where a clock stands still between two writes, it is not told from its moment.
        with pytest.raises(FileWrong, match=r"pairs\.jsonl was changed while it was read"):
            next(batches)
    settle_everything(engine, run)
    assert (state(engine, run).state, state(engine, run).planned) == ("done", 4)
    assert start(engine, path).id != run.id
    path.write_bytes(whole)
    assert sum(submit_file(engine, start(engine, path), read_rows(path))) == 7
    assert [pair["text"] for pair in submitted(engine)] == [f"shoe {n}" for n in range(4, 11)]


def test_a_file_that_is_changed_after_its_last_commit_is_noticed_too(tmp_path: Path, engine: Engine) -> None:
    path = pairs_in(tmp_path, 3)
    with PairsFile(path) as file:
        batches = submit_file(engine, start(engine, path), file.rows(), check=file.check)
        assert next(batches) == 3
        os.utime(path, ns=(0, 0))
        with pytest.raises(FileWrong, match="was changed"):
            next(batches)


def test_a_file_whose_name_goes_to_another_is_read_as_it_was(
    tmp_path: Path, engine: Engine, small_commits: None
) -> None:
    path = pairs_in(tmp_path, 11)
    with PairsFile(path) as file:
        run = run_of(engine, file, lane="bulk", source="default")
        batches = submit_file(engine, run, file.rows(), check=file.check)
        assert next(batches) == 4
        write(tmp_path, "new.jsonl", "no pair").replace(path)
        assert list(batches) == [4, 3]
    assert state(engine, run).planned == 11
