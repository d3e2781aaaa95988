"""Files of pairs: what is read of them, and that a run that was cut short submits nothing twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from db import runs
from db.engine import make_engine
from db.runs import Run
from tasks import pairs_file
from tasks.high_water import HighWater
from tasks.pairs_file import FileWrong, Row, begin, noting, once, read_rows, submit_file
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
    unreadable: list[PairRejected] = []
    rows: list[Row] = [
        {"id": ID},
        {"id": None},
        {"id": ID.upper()},
        {"id": None},
        {"id": "sku"},
        {"id": "sku"},
        {"id": 5},
    ]
    kept = list(noting(once(iter(rows)), unreadable))
    assert [row for row in kept if not isinstance(row, PairRejected)] == [row for n, row in enumerate(rows) if n != 2]
    assert [row.code for row in unreadable] == [ErrorCode.DUPLICATE_ID]


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
    unreadable: list[PairRejected] = []
    assert list(submit_file(engine, start(engine, path), noting(read_rows(path), unreadable))) == [2]
    assert len(unreadable) == 1
    first, second = submitted(engine)
    assert UUID(first["id"]).version == 5
    assert second["id"] == ID


def test_a_file_that_was_submitted_before_still_says_which_lines_are_no_pairs(tmp_path: Path, engine: Engine) -> None:
    path = write(tmp_path, "pairs.jsonl", '{"image": "s3://shop/1.jpg", "text": "a red shoe"}\nno pair')
    for accepted in ([1], []):
        unreadable: list[PairRejected] = []
        assert list(submit_file(engine, start(engine, path), noting(read_rows(path), unreadable))) == accepted
        assert [row.detail.split(" is ")[0] for row in unreadable] == ["line 2"]


@pytest.mark.parametrize("name", ["pairs.txt", "pairs", "pairs.json", "pairs.jsonl.gz"])
def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(
    tmp_path: Path, engine: Engine, name: str
) -> None:
    path = write(tmp_path, name, "{}")
    with pytest.raises(FileWrong, match=r"\.jsonl .* or \.csv, and not compressed"):
        list(read_rows(path))
    with pytest.raises(FileWrong, match=r"\.jsonl .* or \.csv, and not compressed"):
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
