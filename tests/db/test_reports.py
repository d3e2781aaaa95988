"""Schema `report`: it is what its files say, its views count what they say they count, and read no month in vain."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, create_engine, text

from db import batches, outbox, reports, runs, verdicts
from db.batches import BatchRow
from db.engine import make_engine
from db.outbox import Rejected
from db.reports import REPORTS
from db.verdicts import Settlement, Verdict
from infra.bench.reports import QUESTIONS, bounds, months_read
from infra.bench.verdict_years import fill
from tests.conftest import Database, _database
from tests.db import rows

VIEWS = Path(reports.__file__).parent / "views"
#: The views on which others build come first.
FILES = ["calendar_day", "calendar_hour", "wilson", "verdicts", *(name for name in REPORTS if name != "verdicts")]
#: Postgres's types as Python has them.
TYPES = {
    "uuid": UUID, "text": str, "bigint": int, "integer": int, "double precision": float, "boolean": bool,
    "timestamp with time zone": datetime, "date": date, "bytea": bytes, "jsonb": "Mapping", "text[]": "Sequence",
}  # fmt: skip

numbers = count()


@pytest.fixture(scope="module")
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """One for all tests here: each is rolled back."""
    yield from _database(stack, _migrated)


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    engine = create_engine(database.owner_url)
    with engine.connect() as connection:
        yield connection
        connection.rollback()
    engine.dispose()


@pytest.fixture
def worker(database: Database) -> Iterator[Connection]:
    """As workers write and `concord sql` reads."""
    engine = make_engine(database.url)
    with engine.connect() as connection:
        yield connection
        connection.rollback()
    engine.dispose()


# ---- The files and the database -------------------------------------------------------------------------------------

DEFINITIONS = """
select c.relname as name, pg_get_viewdef(c.oid) as is, obj_description(c.oid) as said,
       (select jsonb_object_agg(attname, col_description(attrelid, attnum)) from pg_attribute
        where attrelid = c.oid and attnum > 0) as columns
from pg_class as c where c.relkind = 'v' and (c.relnamespace = 'report'::regnamespace or c.relname like 'calendar%')
union all
select proname, pg_get_functiondef(oid), obj_description(oid), null from pg_proc
where pronamespace = 'report'::regnamespace
"""


def definitions(connection: Connection) -> dict[str, Any]:
    return {row.name: (row.is_, row.said, row.columns) for row in connection.execute(
        text(DEFINITIONS.replace(" as is,", " as is_,")))}  # fmt: skip


def test_there_is_a_file_for_each_view_and_no_other() -> None:
    assert sorted(path.stem for path in VIEWS.glob("*.sql")) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_view_file_begins_with_its_name_purpose_reader_and_grain(name: str) -> None:
    head = (VIEWS / f"{name}.sql").read_text().splitlines()[:4]
    assert [line.split(":")[0] for line in head] == ["-- name", "-- purpose", "-- reader", "-- grain"]
    assert head[0].split()[2].rstrip(",").startswith(name)


def test_what_is_in_the_database_is_what_the_files_say(owner: Connection) -> None:
    migrated = definitions(owner)
    owner.execute(text("drop schema report cascade"))
    owner.execute(text("drop view calendar_hour, calendar_day"))
    owner.execute(text("create schema report"))
    for name in FILES:
        owner.exec_driver_sql((VIEWS / f"{name}.sql").read_text(), execution_options={"no_parameters": True})
    assert definitions(owner) == migrated


def test_every_view_and_every_column_is_explained(owner: Connection) -> None:
    for name, (_, said, columns) in definitions(owner).items():
        assert said, name
        if columns and not name.startswith("calendar"):
            assert [column for column, meaning in columns.items() if not meaning] == [], name


@pytest.mark.parametrize("name", REPORTS)
def test_a_views_row_is_typed_as_the_database_types_it(owner: Connection, name: str) -> None:
    expected = [(column, TYPES[kind]) for column, kind, _ in reports.columns(owner, name)]
    typed = []
    for column, kind in REPORTS[name].types.items():
        if get_origin(kind) is UnionType:
            (kind,) = (one for one in get_args(kind) if one is not type(None))
        origin = get_origin(kind)
        typed.append((column, origin.__name__ if origin else kind))
    assert typed == expected


def test_the_views_are_listed_with_what_they_are_for(worker: Connection) -> None:
    listed = reports.purposes(worker)
    assert list(listed) == list(REPORTS)
    assert all(listed.values())


# ---- Months ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(stack: Any, _migrated: str) -> Iterator[Connection]:
    """Some thousand verdicts over four months."""
    for made in _database(stack, _migrated):
        engine = create_engine(made.owner_url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            fill(connection, rows=6_000, months=4)
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            yield connection
        engine.dispose()


LAST_MONTH = (rows.THIS_MONTH - timedelta(days=1)).replace(day=1)
MONTH_BEFORE = (LAST_MONTH - timedelta(days=1)).replace(day=1)


def months_of(question: str, *first_days: datetime) -> set[str]:
    of_batches, of_neither = {"throughput", "latency", "batches"}, {"runs", "models", "policies"}
    of_verdicts = set(QUESTIONS) - of_neither - {"throughput", "batches"}
    parents = [parent for parent, names in (("verdict", of_verdicts), ("batch", of_batches)) if question in names]
    return {f"{parent}_{day:%Y_%m}" for parent in parents for day in first_days}


@pytest.mark.parametrize("name", REPORTS)
def test_a_question_about_a_day_reads_that_days_month_alone(filled: Connection, name: str) -> None:
    day = LAST_MONTH.replace(day=15)
    read = months_read(filled, QUESTIONS[name], bounds(QUESTIONS[name], day, day + timedelta(days=1)))
    if name == "review_queue":
        # A later verdict may have replaced one, whichever month it is of.
        read = {month for month in read if month <= f"verdict_{LAST_MONTH:%Y_%m}"}
    if name == "run_changes":
        # What was known before may be of any earlier month.
        read = {month for month in read if month >= f"verdict_{LAST_MONTH:%Y_%m}"}
    assert read == months_of(name, LAST_MONTH)


@pytest.mark.parametrize("name", REPORTS)
def test_a_question_about_days_of_two_months_reads_two(filled: Connection, name: str) -> None:
    since, until = MONTH_BEFORE.replace(day=20), LAST_MONTH.replace(day=20)
    read = months_read(filled, QUESTIONS[name], bounds(QUESTIONS[name], since, until))
    later, earlier = f"verdict_{LAST_MONTH:%Y_%m}", f"verdict_{MONTH_BEFORE:%Y_%m}"
    if name == "review_queue":
        read = {month for month in read if month <= later}
    if name == "run_changes":
        read = {month for month in read if month >= earlier}
    assert read == months_of(name, MONTH_BEFORE, LAST_MONTH)


@pytest.mark.parametrize("name", ["run_summary", "run_changes"])
def test_a_run_is_looked_for_in_its_own_month_alone(filled: Connection, name: str) -> None:
    run = filled.execute(
        text("select id from run where submitted_at >= :since order by submitted_at limit 1"), {"since": LAST_MONTH}
    ).scalar_one()
    read = months_read(filled, f"select * from report.{name} where run_id = :run", {"run": run})
    later = {month for month in read if month > f"verdict_{LAST_MONTH:%Y_%m}"}
    assert later == set()
    assert f"verdict_{LAST_MONTH:%Y_%m}" in read


def test_a_question_without_a_range_reads_every_month(filled: Connection) -> None:
    read = months_read(filled, "select * from report.daily_labels", {})
    assert {f"verdict_{LAST_MONTH:%Y_%m}", f"verdict_{MONTH_BEFORE:%Y_%m}"} < read


@pytest.mark.parametrize("name", REPORTS)
def test_every_view_can_be_read_as_its_rows(filled: Connection, name: str) -> None:
    day = LAST_MONTH.replace(day=15)
    found = list(reports.read(filled, name, since=MONTH_BEFORE, until=day, limit=5))
    if name != "model_comparison":
        assert 0 < len(found) <= 5
    assert all(type(row) is REPORTS[name].row for row in found)


def test_the_days_of_a_view_add_up_to_the_rows_of_the_table(filled: Connection) -> None:
    since, until = MONTH_BEFORE.replace(day=20), LAST_MONTH.replace(day=3)
    counted = filled.execute(
        text("select count(*) from verdict where submitted_at >= :since and submitted_at < :until"),
        {"since": since, "until": until},
    ).scalar_one()
    assert sum(row.pairs for row in reports.read(filled, "daily_labels", since=since, until=until)) == counted
    assert counted > 0


# ---- What they count -------------------------------------------------------------------------------------------------


def judged(connection: Connection, **fields: Any) -> Verdict:
    """A judged row of the first model version, which is made for it if need be."""
    made = connection.execute(text("select min(id) from model_version")).scalar_one()
    if made is None:
        made = a_model(connection, "1")
    label = fields.setdefault("label", "entailment")
    values = {f"p_{name}": 0.9 if name == label else 0.05 for name in ("entailment", "contradiction", "neutral")}
    values |= {"policy": "catalog", "policy_version": 1, "decision": "accept", "model_version_id": made}
    values |= {"image_sha256": b"1", "text_scored": "a shoe", "status": "judged", "error_code": None}
    return rows.rejected(next(numbers), **{**values, **fields})


def a_model(connection: Connection, revision: str) -> int:
    statement = text(
        "insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers)"
        " values ('mini', :revision, 'fp32', '0', '?', 64, '{}') returning id"
    )
    return int(connection.execute(statement, {"revision": revision}).scalar_one())


def write(connection: Connection, *verdicts_: Verdict) -> None:
    verdicts.settle(connection, Settlement(verdicts=verdicts_))


def a_run(connection: Connection, submitted_at: datetime, **fields: Any) -> UUID:
    values = {"id": uuid4(), "kind": "nightly", "name": "catalog", "state": "done", **fields, "at": submitted_at}
    connection.execute(
        text(
            "insert into run (id, kind, source, name, lane, submitted_at, state) values"
            " (:id, :kind, 'default', :name, 'bulk', :at, :state)"
        ),
        values,
    )
    run_id: UUID = values["id"]
    return run_id


def read(connection: Connection, name: str, **chosen: Any) -> list[Any]:
    return list(reports.read(connection, name, **chosen))


TODAY = rows.THIS_MONTH
PROHIBITED = {"policy": "prohibited"}


def test_a_mismatch_is_what_its_policy_watches_for(worker: Connection) -> None:
    write(
        worker,
        judged(worker, ref="true"),
        judged(worker, ref="false", label="contradiction", decision="review"),
        judged(worker, ref="weapon", label="entailment", decision="reject", **PROHIBITED),
        judged(worker, ref="harmless", label="contradiction", **PROHIBITED),
        judged(worker, ref="unknown", label="contradiction", policy="of nobody"),
        rows.rejected(next(numbers), ref="broken"),
    )
    found = {row.ref: row.mismatch for row in read(worker, "verdicts")}
    assert found == {
        "true": False, "false": True, "weapon": True, "harmless": False, "unknown": False, "broken": False,
    }  # fmt: skip
    assert {(row.ref, row.p_trouble) for row in read(worker, "mismatches")} == {("false", 0.9), ("weapon", 0.9)}


def test_daily_labels_count_pairs_and_their_share_of_the_day(worker: Connection) -> None:
    write(worker, *(judged(worker) for _ in range(3)), judged(worker, label="neutral"),
          judged(worker, submitted_at=TODAY - timedelta(microseconds=1)))  # fmt: skip
    found = [(row.day, row.label, row.pairs, row.share) for row in read(worker, "daily_labels")]
    yesterday = (TODAY - timedelta(days=1)).date()
    assert found == [
        (yesterday, "entailment", 1, 1.0), (TODAY.date(), "entailment", 3, 0.75), (TODAY.date(), "neutral", 1, 0.25),
    ]  # fmt: skip


def test_a_days_rows_are_chosen_by_utc_whatever_the_session_says(worker: Connection) -> None:
    worker.execute(text("set timezone = 'Pacific/Auckland'"))
    write(worker, judged(worker, submitted_at=TODAY), judged(worker, submitted_at=TODAY - timedelta(microseconds=1)))
    found = read(worker, "daily_labels", since=TODAY, until=TODAY + timedelta(days=1))
    assert [(row.day, row.pairs) for row in found] == [(TODAY.date(), 1)]


def test_the_review_queue_leaves_out_what_a_later_verdict_replaces(worker: Connection) -> None:
    later = TODAY + timedelta(days=1)
    doubtful = {"label": "contradiction", "decision": "review"}
    write(
        worker,
        judged(worker, ref="open", **doubtful),
        judged(worker, ref="mended", **doubtful),
        judged(worker, ref="mended", submitted_at=later),
        judged(worker, ref="other policy", **doubtful),
        judged(worker, ref="other policy", submitted_at=later, **PROHIBITED),
        judged(worker, ref="again", **doubtful),
        judged(worker, ref="again", submitted_at=later, **doubtful),
        judged(worker, ref="not judged since", **doubtful),
        rows.rejected(next(numbers), ref="not judged since", submitted_at=later),
        judged(worker, **doubtful),
    )
    found = [(row.ref, row.submitted_at) for row in read(worker, "review_queue")]
    assert sorted(found, key=str) == sorted(
        [("open", TODAY), ("other policy", TODAY), ("again", later), ("not judged since", TODAY), (None, TODAY)],
        key=str,
    )


def test_dead_letters_are_the_failed_pairs(worker: Connection) -> None:
    write(worker, rows.failed(next(numbers), ref="dead"), rows.rejected(next(numbers)), judged(worker))
    assert [(row.ref, row.error_code) for row in read(worker, "dead_letters")] == [("dead", "image_fetch_failed")]


def test_errors_are_counted_by_code_with_what_could_not_be_read_at_all(worker: Connection) -> None:
    write(
        worker, *(rows.rejected(next(numbers), ref=ref, error_detail="no text") for ref in ("b", "a")), judged(worker)
    )
    lost = [
        Rejected("live", "not_json", "garbage", body, pair_ids=ids) for body, ids in ((b"{", []), (b"[", [uuid4()] * 2))
    ]
    outbox.record_rejected(worker, lost)
    found = {(row.status, row.error_code): row for row in read(worker, "errors_by_code")}
    assert set(found) == {("rejected", "text_empty"), ("unread", "not_json")}
    empty, unread = found["rejected", "text_empty"], found["unread", "not_json"]
    assert (empty.pairs, empty.example_ref, empty.example_detail) == (2, "a", "no text")
    assert (unread.pairs, unread.source, unread.day) == (3, None, datetime.now(UTC).date())


def test_the_defect_rate_is_by_every_plain_attribute(worker: Connection) -> None:
    shoes = {"category": "shoes", "size": 42, "sizes": [42, 43], "box": {"w": 1}}
    wrong = {"label": "contradiction", "decision": "review"}
    write(
        worker,
        *(judged(worker, attributes=shoes) for _ in range(3)),
        judged(worker, attributes=shoes, **wrong),
        judged(worker, attributes={"category": "hats"}),
        rows.rejected(next(numbers), attributes=shoes),
    )
    found = {(row.attribute, row.value): row for row in read(worker, "defect_rate")}
    assert set(found) == {("category", "shoes"), ("category", "hats"), ("size", "42")}
    shoes_row = found["category", "shoes"]
    assert (shoes_row.judged, shoes_row.mismatches, shoes_row.rate) == (4, 1, 0.25)
    assert found["category", "hats"].rate_low == 0.0
    assert found["category", "hats"].rate_high < 1.0


def test_wilsons_bounds_are_those_of_the_textbooks_and_hold_at_the_ends(owner: Connection) -> None:
    def bounds_of(hits: int, of: int) -> tuple[Any, Any]:
        low, high = owner.execute(
            text("select report.wilson_low(:hits, :of), report.wilson_high(:hits, :of)"), {"hits": hits, "of": of}
        ).one()
        return low, high

    # From the formula, with z = 1.96: (0.3 + 1.96^2/20 -+ 1.96 sqrt(0.021 + 1.96^2/400)) / (1 + 1.96^2/10).
    assert bounds_of(3, 10) == pytest.approx((0.107789, 0.603219), abs=1e-5)
    assert bounds_of(0, 10)[0] == pytest.approx(0, abs=1e-12)
    assert bounds_of(10, 10)[1] == pytest.approx(1, abs=1e-12)
    assert bounds_of(0, 0) == (None, None)


def test_the_histogram_has_twenty_buckets_and_none_beyond_one(worker: Connection) -> None:
    for trouble in (0.0, 0.049, 0.05, 0.999, 1.0):
        write(worker, judged(worker, p_contradiction=trouble, p_entailment=1 - trouble, p_neutral=0.0))
    found = [(row.from_score, row.to_score, row.pairs, row.accept) for row in read(worker, "score_histogram")]
    assert found == [(0.0, 0.05, 2, 2), (0.05, 0.1, 1, 1), (0.95, 1.0, 2, 2)]


def test_models_are_compared_on_the_same_picture_and_text_of_a_ref(worker: Connection) -> None:
    later, newer = TODAY + timedelta(days=1), None
    write(worker, judged(worker, ref="same"), judged(worker, ref="edited"), judged(worker, ref="once"))
    newer = a_model(worker, "2")
    changed = {"submitted_at": later, "model_version_id": newer}
    write(
        worker,
        judged(worker, ref="same", label="neutral", **changed),
        judged(worker, ref="edited", **{**changed, "text_scored": "another"}),
        judged(worker, ref="same", submitted_at=later + timedelta(days=1), model_version_id=newer),
    )
    found = read(worker, "model_comparison", since=TODAY, until=later + timedelta(hours=1))
    assert [(row.ref, row.old_label, row.new_label, row.same_label) for row in found] == [
        ("same", "entailment", "neutral", False)
    ]
    assert found[0].moved == pytest.approx(0.85)


def test_a_runs_summary_counts_its_verdicts(worker: Connection) -> None:
    run = a_run(worker, TODAY)
    write(
        worker,
        judged(worker, run_id=run),
        judged(worker, run_id=run, label="contradiction", decision="review"),
        judged(worker, run_id=run, decision="reject", **PROHIBITED),
        rows.failed(next(numbers), run_id=run),
        judged(worker),
    )
    (found,) = read(worker, "run_summary", run_id=run)
    assert (found.entailment, found.contradiction, found.neutral, found.mismatches) == (2, 1, 0, 2)
    assert (found.accept, found.review, found.reject) == (1, 1, 1)
    stored = runs.read(worker, run)
    assert (found.judged, found.failed) == (stored.judged, stored.failed) == (3, 1)
    assert found.pairs_per_s > 0


def test_a_run_is_compared_with_what_was_known_before_it_whichever_run_that_was(worker: Connection) -> None:
    long_ago, before, tonight = TODAY - timedelta(days=20), TODAY, TODAY + timedelta(days=1)
    wrong = {"label": "contradiction", "decision": "review"}
    first, second = a_run(worker, before), a_run(worker, tonight)
    write(
        worker,
        judged(worker, ref="worse", submitted_at=long_ago),
        judged(worker, ref="better", submitted_at=before, run_id=first, **wrong),
        judged(worker, ref="same", submitted_at=before, run_id=first),
        judged(worker, ref="unsure", submitted_at=before, run_id=first),
        judged(worker, ref="broken", submitted_at=before, run_id=first),
        judged(worker, ref="not tonight", submitted_at=before, run_id=first),
        judged(worker, ref="same", submitted_at=before, policy="prohibited", **wrong),
        judged(worker, ref="worse", submitted_at=tonight, run_id=second, text_scored="edited", **wrong),
        judged(worker, ref="better", submitted_at=tonight, run_id=second),
        judged(worker, ref="same", submitted_at=tonight, run_id=second),
        judged(worker, ref="unsure", submitted_at=tonight, run_id=second, label="neutral"),
        judged(worker, ref="new", submitted_at=tonight, run_id=second),
        rows.rejected(next(numbers), ref="broken", submitted_at=tonight, run_id=second, policy="catalog"),
    )
    found = {row.ref: row for row in read(worker, "run_changes", run_id=second)}
    assert {ref: row.change for ref, row in found.items()} == {
        "worse": "newly_contradicting", "better": "newly_agreeing", "same": "unchanged", "unsure": "newly_undecided",
        "new": "first_seen", "broken": "not_judged",
    }  # fmt: skip
    worse = found["worse"]
    assert (worse.submitted_at_before, worse.label_before, worse.same_content, worse.same_model) == (
        long_ago, "entailment", False, True,
    )  # fmt: skip
    assert (worse.mismatch_before, worse.mismatch) == (False, True)


def test_changes_are_of_the_label_as_a_nights_summary_counts_them_whatever_the_policy_watches_for(
    worker: Connection,
) -> None:
    run = a_run(worker, TODAY + timedelta(days=1))
    moves = {"newly_contradicting": ("entailment", "contradiction"), "newly_agreeing": ("contradiction", "entailment"),
             "newly_undecided": ("entailment", "neutral"), "unchanged": ("neutral", "neutral")}  # fmt: skip
    for change, (before, now) in moves.items():
        write(
            worker,
            judged(worker, ref=change, label=before, **PROHIBITED),
            judged(worker, ref=change, label=now, submitted_at=TODAY + timedelta(days=1), run_id=run, **PROHIBITED),
        )
    found = read(worker, "run_changes", run_id=run)
    assert [row.change for row in found] == [row.ref for row in found] == sorted(moves)


def test_a_table_that_was_attached_by_hand_leaves_the_days_as_they_are(owner: Connection) -> None:
    before = owner.execute(text("select min(day) from calendar_day")).scalar_one()
    owner.execute(
        text("create table verdict_archive partition of verdict for values from ('2020-01-01') to ('2021-01-01')")
    )
    assert owner.execute(text("select min(day) from calendar_day")).scalar_one() == before
    assert read(owner, "daily_labels") == []


def test_what_the_same_file_no_longer_has_is_gone(worker: Connection) -> None:
    first = a_run(worker, TODAY, kind="submit", name="pairs.jsonl")
    second = a_run(worker, TODAY + timedelta(days=1), kind="submit", name="pairs.jsonl")
    other = a_run(worker, TODAY + timedelta(hours=1), kind="submit", name="others.jsonl")
    write(
        worker,
        *(judged(worker, ref=ref, run_id=first) for ref in ("kept", "left out")),
        judged(worker, ref="kept", run_id=second, submitted_at=TODAY + timedelta(days=1)),
        judged(worker, ref="elsewhere", run_id=other, submitted_at=TODAY + timedelta(hours=1)),
    )
    found = {row.ref: row.change for row in read(worker, "run_changes", run_id=second)}
    assert found == {"kept": "unchanged", "left out": "gone"}
    assert {row.change for row in read(worker, "run_changes", run_id=other)} == {"first_seen"}


def test_what_cannot_be_read_in_the_one_file_or_the_other_is_not_gone(worker: Connection) -> None:
    first = a_run(worker, TODAY, kind="submit", name="pairs.jsonl")
    second = a_run(worker, TODAY + timedelta(days=1), kind="submit", name="pairs.jsonl")
    today = {"submitted_at": TODAY + timedelta(days=1), "run_id": second}
    write(
        worker,
        judged(worker, ref="worse", run_id=first),
        *(rows.rejected(next(numbers), ref=ref, run_id=first) for ref in ("better", "as bad")),
        judged(worker, ref="better", **today),
        *(rows.rejected(next(numbers), ref=ref, **today) for ref in ("worse", "as bad")),
    )
    found = [(row.ref, row.change) for row in read(worker, "run_changes", run_id=second)]
    assert found == [("better", "first_seen"), ("as bad", "not_judged"), ("worse", "not_judged")]


def test_what_a_night_no_longer_found_in_its_catalog_is_gone(owner: Connection) -> None:
    before, tonight = a_run(owner, TODAY), a_run(owner, TODAY + timedelta(days=1))
    for ref, gone_in in (("there", None), ("gone before", before), ("gone", tonight)):
        owner.execute(
            text(
                "insert into catalog_state (source, ref, seen_in, planned_fingerprint, label, gone_in)"
                " values ('default', :ref, gen_random_uuid(), '', 'entailment', :gone_in)"
            ),
            {"ref": ref, "gone_in": gone_in},
        )
    found = [(row.ref, row.change, row.label_before) for row in read(owner, "run_changes", run_id=tonight)]
    assert found == [("gone", "gone", "entailment")]


BATCH = BatchRow(
    "gpu0@host", "live", None, messages=2, pairs=64, judged=60, queue_s=0.5, fetch_s=0.2, model_s=0.4, write_s=0.1,
    tokens=600, padded_tokens=800, pictures=20,
)  # fmt: skip


def test_batches_become_throughput(worker: Connection) -> None:
    batches.record(worker, BATCH)
    batches.record(worker, replace(BATCH, worker="gpu1@host", pairs=32, judged=30, reused=2, padded_tokens=1200))
    batches.record(worker, replace(BATCH, lane="bulk"))
    live = next(row for row in read(worker, "throughput") if row.lane == "live")
    assert (live.workers, live.batches, live.messages, live.pairs, live.judged, live.reused) == (2, 2, 4, 96, 90, 2)
    assert (live.batch_mean, live.batch_p50, live.batch_max, live.pictures) == (48.0, 48.0, 64, 40)
    assert live.padding == pytest.approx(1 - 1200 / 2000)
    assert live.judged_per_model_s == pytest.approx(88 / 0.8)
    assert live.pairs_per_s > 0


def test_batches_and_verdicts_become_latency_by_lane(worker: Connection) -> None:
    batches.record(worker, BATCH)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    write(worker, judged(worker, submitted_at=hour), judged(worker, submitted_at=hour, lane="bulk"))
    found = {row.lane: row for row in read(worker, "latency", since=hour)}
    assert set(found) == {"live", "bulk"}
    live = found["live"]
    assert (live.batches, live.pairs) == (1, 1)
    assert (live.queue_p50_s, live.fetch_p95_s, live.model_p99_s, live.write_p50_s) == pytest.approx(
        (0.5, 0.2, 0.4, 0.1)
    )
    assert live.end_to_end_p50_s == live.end_to_end_p99_s >= 0
    assert (found["bulk"].batches, found["bulk"].queue_p50_s) == (0, None)


def test_a_view_is_read_by_source_run_and_limit(worker: Connection) -> None:
    run = a_run(worker, TODAY)
    write(worker, judged(worker, ref="a", source="emea", run_id=run), judged(worker, ref="b"), judged(worker, ref="c"))
    assert [row.ref for row in read(worker, "verdicts", source="emea")] == ["a"]
    assert [row.ref for row in read(worker, "verdicts", run_id=run)] == ["a"]
    assert len(read(worker, "verdicts", limit=2)) == 2
    with pytest.raises(reports.NotInReport, match="throughput has no column source"):
        read(worker, "throughput", source="emea")
