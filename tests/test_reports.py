"""`concord sql`, `concord erase` and `concord db maintain`, as somebody without psql uses them."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import typer
from pyarrow import parquet
from sqlalchemy import Engine, create_engine, text

from db import verdicts
from db.reports import REPORTS
from db.verdicts import Settlement
from tasks.reports import arrow_type, read_moment, write_csv
from tests.command_line import Concord, Ran, command_line
from tests.conftest import Database
from tests.db import rows
from tests.shared import emptied_database
from tests.submit_env import configured

database = emptied_database


@pytest.fixture
def concord(
    database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Concord]:
    """The command line in this process, with both logins in its settings: `concord("sql", "mismatches")`."""

    with configured(database_url=database.url, owner_database_url=database.owner_url):
        yield command_line(monkeypatch, capsys)


@pytest.fixture
def owner(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.owner_url)
    yield engine
    engine.dispose()


@pytest.fixture
def judged(owner: Engine) -> None:
    """A mismatch and a match of today, and a mismatch of last month."""
    model = rows.model(owner)
    now = datetime.now(UTC) - timedelta(minutes=1)
    contradicted = {"label": "contradiction", "p_contradiction": 0.9, "p_entailment": 0.05, "decision": "review"}
    pairs = [
        rows.judged(model, 1, ref="new", submitted_at=now, attributes={"seller": "[bold]a, b"}, text='say "no"'),
        rows.judged(model, 2, ref="match", submitted_at=now),
        rows.judged(model, 3, ref="old", submitted_at=rows.THIS_MONTH - timedelta(days=10), source="emea", text="t"),
    ]
    with owner.begin() as connection:
        verdicts.settle(connection, Settlement(verdicts=pairs))
        for name, value in contradicted.items():
            connection.execute(text(f"update verdict set {name} = :value where ref <> 'match'"), {"value": value})


def test_sql_alone_lists_the_views_with_what_they_are_for(concord: Concord) -> None:
    shown = concord("sql")
    assert shown.status == 0
    assert [name for name in REPORTS if name not in shown.out] == []
    assert "What a person should look at now" in shown.out


def test_a_views_columns_are_explained(concord: Concord) -> None:
    shown = concord("sql", "mismatches", "--columns").out
    assert "p_trouble" in shown
    assert "double precision" in shown
    assert "S3 address of the picture." in shown


def test_a_view_that_is_not_there_is_refused_with_those_that_are(concord: Concord) -> None:
    refused = concord("sql", "mismatch")
    assert refused.status == 2
    assert "there is no view 'mismatch'; there are daily_labels" in refused.err


def test_a_table_shows_the_last_days_and_a_producers_brackets_as_they_are(concord: Concord, judged: None) -> None:
    shown = concord("sql", "mismatches")
    assert shown.status == 0
    assert "[bold]a" in shown.out
    assert "emea" not in shown.out


def refs(ran: Ran) -> list[str]:
    assert ran.status == 0, ran.err
    return [json.loads(line)["ref"] for line in ran.out.splitlines()]


def test_rows_are_chosen_by_time_source_and_number(concord: Concord, judged: None) -> None:
    form = ("--format", "json")
    assert refs(concord("sql", "mismatches", *form)) == ["new"]
    assert sorted(refs(concord("sql", "mismatches", "--since", "9w", *form))) == ["new", "old"]
    assert refs(concord("sql", "mismatches", "--since", "9w", "--source", "emea", *form)) == ["old"]
    assert refs(concord("sql", "mismatches", "--since", "9w", "--until", "1d", *form)) == ["old"]
    assert len(refs(concord("sql", "mismatches", "--since", "9w", "--limit", 1, *form))) == 1


def test_a_run_is_found_however_old_it_is(concord: Concord, owner: Engine) -> None:
    run = "0199c0de-0000-7000-8000-000000000001"
    with owner.begin() as connection:
        connection.execute(
            text(
                "insert into run (id, kind, source, name, lane, submitted_at)"
                " values (:id, 'submit', 's', 'old.jsonl', 'bulk', now() - interval '90 days')"
            ),
            {"id": run},
        )
    assert "old.jsonl" not in concord("sql", "run_summary", "--format", "csv").out
    assert "old.jsonl" in concord("sql", "run_summary", "--run", run, "--format", "csv").out


def test_a_view_without_that_column_says_so(concord: Concord) -> None:
    refused = concord("sql", "throughput", "--source", "emea")
    assert refused.status == 2
    assert "throughput has no column source" in refused.err


def test_csv_reads_back_as_what_was_written(concord: Concord, judged: None) -> None:
    (row,) = csv.DictReader(io.StringIO(concord("sql", "mismatches", "--format", "csv").out))
    assert list(row) == list(REPORTS["mismatches"].types)
    assert (row["ref"], row["text"], float(row["p_trouble"])) == ("new", 'say "no"', 0.9)
    assert json.loads(row["attributes"]) == {"seller": "[bold]a, b"}
    assert datetime.fromisoformat(row["submitted_at"]).tzinfo is not None
    assert row["premise"] == ""


#: What a spreadsheet runs, at the beginning of a cell.
FORMULAS = [f"{sign}1+1|' /C calc'!A0" for sign in "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"]


@pytest.fixture
def hostile(owner: Engine) -> None:
    """A pair for each formula, which stands in every text that a producer writes."""
    model, now = rows.model(owner), datetime.now(UTC) - timedelta(minutes=1)
    pairs = [
        rows.judged(model, number, submitted_at=now, ref=f"{number}", source=one, text=one, premise=one, image=one,
                    attributes={one: one}, text_scored=one)
        for number, one in enumerate([*FORMULAS, "'=1", "a=1", " =1", "1"])
    ]  # fmt: skip
    with owner.begin() as connection:
        verdicts.settle(connection, Settlement(verdicts=pairs))


@pytest.mark.parametrize("name", ["verdicts", "daily_labels", "defect_rate"])
def test_no_cell_of_a_csv_begins_a_formula(concord: Concord, hostile: None, name: str) -> None:
    written = list(csv.DictReader(io.StringIO(concord("sql", name, "--format", "csv").out, newline="")))
    cells = [(column, cell) for row in written for column, cell in row.items()]
    assert {cell for column, cell in cells if column == "source"} == {
        *(f"'{one}" for one in FORMULAS), "'=1", "a=1", " =1", "1",
    }  # fmt: skip
    assert [cell for _, cell in cells if cell.startswith(tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"))] == []


def test_raw_leaves_them_as_they_are(concord: Concord, hostile: None, tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    assert concord("sql", "verdicts", "--format", "csv", "--raw", "--out", file).status == 0
    with file.open(encoding="utf-8", newline="") as lines:
        assert {row["text"] for row in csv.DictReader(lines)} >= set(FORMULAS)


def test_a_number_below_zero_is_no_formula() -> None:
    sink, row = io.StringIO(), dict.fromkeys(REPORTS["score_histogram"].types)
    write_csv(
        sink, "score_histogram", iter([SimpleNamespace(**{**row, "source": "-5", "from_score": -0.5, "pairs": -5})])
    )
    (read,) = csv.DictReader(io.StringIO(sink.getvalue()))
    assert (read["source"], read["from_score"], read["pairs"]) == ("'-5", "-0.5", "-5")


def test_raw_is_refused_where_nothing_would_be_quoted(concord: Concord) -> None:
    refused = concord("sql", "verdicts", "--raw", "--format", "json")
    assert (refused.status, "--raw is for --format csv" in refused.err) == (2, True)


def test_json_has_numbers_objects_and_nulls(concord: Concord, judged: None) -> None:
    row = json.loads(concord("sql", "mismatches", "--format", "json").out)
    assert (row["p_trouble"], row["attributes"], row["premise"], row["flags"]) == (
        0.9, {"seller": "[bold]a, b"}, None, [],
    )  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_every_view_can_be_written_as_parquet(concord: Concord, judged: None, name: str, tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"
    assert concord("sql", name, "--since", "9w", "--format", "parquet", "--out", file).status == 0
    table = parquet.read_table(file)
    assert table.column_names == list(REPORTS[name].types)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    if name == "verdicts":
        assert table.schema.field("submitted_at").type == pyarrow.timestamp("us", "UTC")
        new = next(row for row in table.to_pylist() if row["ref"] == "new")
        assert (new["mismatch"], new["flags"], json.loads(new["attributes"])) == (True, [], {"seller": "[bold]a, b"})


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_that_cannot_be_written_is_a_sentence(concord: Concord, tmp_path: Path, form: str) -> None:
    (folder := tmp_path / "folder").mkdir()
    for place in (folder, tmp_path / "missing" / "out"):
        ran = concord("sql", "verdicts", "--format", form, "--out", place)
        assert ran.status == 2
        assert "cannot be written" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_every_column_has_a_type_in_parquet() -> None:
    kinds = {str(arrow_type(kind)) for report in REPORTS.values() for kind in report.types.values()}
    assert kinds == {
        "string", "int64", "double", "bool", "binary", "date32[day]", "timestamp[us, tz=UTC]", "list<item: string>",
    }  # fmt: skip


def test_a_file_that_was_there_stays_when_the_question_fails(concord: Concord, tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    file.write_text("before")
    assert concord("sql", "throughput", "--source", "emea", "--format", "csv", "--out", file).status == 2
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("written", "back"), [("12h", timedelta(hours=12)), ("2d", timedelta(days=2)), ("3w", timedelta(weeks=3))]
)
def test_a_moment_may_be_an_age(written: str, back: timedelta) -> None:
    before = datetime.now(UTC)
    assert before - back <= read_moment(written) <= datetime.now(UTC) - back


def test_a_moment_is_utc_unless_it_says_otherwise() -> None:
    assert read_moment("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert read_moment("2026-01-31T12:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)


@pytest.mark.parametrize("written", ["", "yesterday", "2", "2x", "-2d"])
def test_what_is_no_moment_is_refused(written: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no moment"):
        read_moment(written)


#: As far out as a moment can be written, from either side of Greenwich.
ENDS_OF_TIME = ("0001-01-01", "0001-01-01T00:00+05:00", "9999-12-31", "9999-12-31T23:59-05:00", "9999w", "2999-01-01")


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("option", ["--since", "--until"])
def test_a_moment_at_the_end_of_time_is_answered(concord: Concord, name: str, option: str) -> None:
    for moment in ENDS_OF_TIME:
        other = ("--since", "0001-01-01") if option == "--until" else ()
        asked = concord("sql", name, *other, option, moment, "--format", "json")
        assert asked.status == 0, asked.err


def test_what_is_before_all_or_after_all_is_in_the_range(concord: Concord, judged: None) -> None:
    assert sorted(refs(concord("sql", "mismatches", "--since", "0001-01-01", "--format", "json"))) == ["new", "old"]
    both = ("--since", "0001-01-01T00:00+05:00", "--until", "9999-12-31T23:59-05:00")
    assert sorted(refs(concord("sql", "mismatches", *both, "--format", "json"))) == ["new", "old"]
    assert refs(concord("sql", "mismatches", "--since", "2999-01-01", "--format", "json")) == []
    assert refs(concord("sql", "mismatches", "--since", "1d", "--until", "1d", "--format", "json")) == []


@pytest.mark.parametrize("range_", [("--since", "1d", "--until", "2d"), ("--until", "2001-01-01")])
def test_a_range_that_ends_before_it_begins_is_refused(concord: Concord, range_: tuple[str, ...]) -> None:
    refused = concord("sql", "mismatches", *range_)
    assert (refused.status, "lies after --until" in refused.err) == (2, True)


@pytest.mark.parametrize(
    "arguments", [("sql", "verdicts", "--source"), ("erase", "--yes", "--ref", "x", "--source"),
                  ("erase", "--yes", "--source", "x", "--ref")],
)  # fmt: skip
def test_a_name_that_is_no_text_is_refused(concord: Concord, arguments: tuple[str, ...]) -> None:
    refused = concord(*arguments, "\udcff")
    assert (refused.status, "is not UTF-8" in refused.err) == (2, True)


def test_erase_says_what_it_did_by_table(concord: Concord, judged: None, owner: Engine) -> None:
    done = concord("erase", "--source", "emea", "--ref", "old", "--yes")
    assert done.status == 0
    assert "flagged erased" in done.out
    with owner.connect() as connection:
        flags = connection.execute(text("select ref, flags from verdict where flags <> '{}'")).all()
    assert [tuple(row) for row in flags] == [("old", ["erased"])]


@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("y", 0)])
def test_erase_asks_first(
    concord: Concord, judged: None, owner: Engine, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    done = concord("erase", "--source", "emea", "--ref", "old")
    assert done.status == status
    assert "Erase all that was written about 'old' of 'emea'?" in done.err
    with owner.connect() as connection:
        erased = connection.execute(text("select count(*) from verdict where flags <> '{}'")).scalar_one()
    assert erased == (1 if answer == "y" else 0)


def test_erase_exits_1_while_workers_have_pairs_of_it(concord: Concord, owner: Engine) -> None:
    with owner.begin() as connection:
        connection.execute(text("""select enqueue('{"ref": "old", "image": "s3://b/k", "text": "t"}')"""))
        connection.execute(text("update outbox set published_at = now()"))
    done = concord("erase", "--source", "default", "--ref", "old", "--yes")
    assert done.status == 1
    assert "1 pairs of it are with the workers" in done.err


def test_erase_needs_the_owners_login(concord: Concord, database: Database) -> None:
    with configured(database_url=database.url):
        refused = concord("erase", "--source", "emea", "--ref", "old", "--yes")
    assert refused.status == 2
    assert "CONCORD_OWNER_DATABASE_URL is not set" in refused.err


def test_maintain_says_what_is_kept_and_what_it_did(concord: Concord, owner: Engine) -> None:
    done = concord("db", "maintain")
    assert done.status == 0
    assert "kept: all months of verdicts, all days of rejected messages, all days of runs" in done.out
    assert "made 0 months; dropped none" in done.out
    done = concord("db", "maintain", "--keep-months", 13, "--rejected-days", 30)
    assert "kept: 13 months of verdicts, 30 days of rejected messages, all days of runs" in done.out
    done = concord("db", "maintain", "--keep-months", 0)
    assert "kept: all months of verdicts, 30 days of rejected messages, all days of runs" in done.out


def test_a_workers_login_may_maintain_but_not_change_what_is_kept(concord: Concord, database: Database) -> None:
    with configured(database_url=database.url):
        assert concord("db", "maintain").status == 0
        refused = concord("db", "maintain", "--keep-months", 1)
    assert refused.status == 2
    assert "permission denied" in refused.err


def test_without_pyarrow_the_extra_is_named(concord: Concord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = concord("sql", "verdicts", "--format", "parquet", "--out", tmp_path / "out.parquet")
    assert refused.status == 2
    assert ".[parquet]" in refused.err
