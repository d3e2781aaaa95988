"""What the page of a run is made of: counted from its verdicts, compared with what was before, by a reader's login."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, create_engine, make_url, text

from db import batches, erasure, registry
from db.batches import BatchRow
from db.engine import make_engine
from db.run_reading import Ended, NoSuchRun, find_run, read_report
from db.run_report import BINS, TEXT_CHARS, VALUE_CHARS, WORST, Figure, RunReport
from db.verdicts import Settlement, Verdict, settle
from tests.conftest import Database, _database
from tests.db import rows

BEFORE, TONIGHT = rows.THIS_MONTH, rows.THIS_MONTH + timedelta(hours=1)
WRONG = {"label": "contradiction", "decision": "review"}
FORBIDDEN = {"policy": "prohibited", "decision": "reject"}

numbers = count()


@pytest.fixture(scope="module")
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """One for all tests here: each is rolled back."""
    yield from _database(stack, _migrated)


@pytest.fixture
def worker(database: Database) -> Iterator[Connection]:
    engine = make_engine(database.url)
    with engine.connect() as connection:
        connection.execute(
            text(
                "insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers,"
                " concord_version, torch_version)"
                " values ('mini', '1', 'fp32', 'abc', 'is it {}?', 64, '{}', '1.0', '2.0')"
            )
        )
        yield connection
        connection.rollback()
    engine.dispose()


def a_run(connection: Connection, at: datetime = TONIGHT, **fields: Any) -> UUID:
    values = {
        "id": uuid4(),
        "kind": "submit",
        "source": "default",
        "name": "pairs.jsonl",
        "state": "done",
        "summary": None,
    }
    values |= {"planned": 0, "finished_at": at + timedelta(minutes=1), **fields, "at": at}
    connection.execute(
        text(
            "insert into run (id, kind, source, name, lane, submitted_at, state, planned, finished_at, summary) values"
            " (:id, :kind, :source, :name, 'bulk', :at, :state, :planned, :finished_at, cast(:summary as jsonb))"
        ),
        values,
    )
    run_id: UUID = values["id"]
    return run_id


def judged(connection: Connection, run_id: UUID | None, **fields: Any) -> Verdict:
    label = fields.setdefault("label", "entailment")
    values = {f"p_{name}": 0.9 if name == label else 0.05 for name in ("entailment", "contradiction", "neutral")}
    model = connection.execute(text("select max(id) from model_version")).scalar_one()
    values |= {"policy": "catalog", "policy_version": 1, "decision": "accept", "model_version_id": model}
    values |= {"image": "s3://shop/1.jpg", "text": "a shoe", "image_sha256": b"1", "text_scored": "a shoe"}
    values |= {"status": "judged", "error_code": None, "submitted_at": TONIGHT, "run_id": run_id}
    return rows.rejected(next(numbers), **{**values, **fields})


def write(connection: Connection, *verdicts: Verdict) -> None:
    settle(connection, Settlement(verdicts))


def figures(report: RunReport) -> dict[str, Figure]:
    return {figure.name: figure for figure in report.figures}


# ---- The headline ----------------------------------------------------------------------------------------------------


def test_the_headline_is_counted_and_compared_with_the_last_run_of_the_source(worker: Connection) -> None:
    a_run(worker, BEFORE - timedelta(days=1))
    a_run(worker, BEFORE + timedelta(minutes=1), source="another")
    a_run(worker, BEFORE + timedelta(minutes=2), state="cancelled")
    first, second = (
        a_run(worker, BEFORE, planned=3, name="monday.jsonl"),
        a_run(worker, planned=4, name="tuesday.jsonl"),
    )
    was = {"submitted_at": BEFORE}
    write(worker, *(judged(worker, first, ref=ref, **was) for ref in ("worse", "same")),
          judged(worker, first, ref="better", **was, **WRONG),
          judged(worker, second, ref="worse", **WRONG), judged(worker, second, ref="better"),
          judged(worker, second, ref="same"),
          rows.rejected(next(numbers), run_id=second, submitted_at=TONIGHT))  # fmt: skip
    report = read_report(worker, second)
    assert report.before is not None and (report.before.id, report.before.name) == (first, "monday.jsonl")
    found = {name: (figure.value, figure.before) for name, figure in figures(report).items()}
    assert found == {
        "planned": (4, 3), "judged": (3, 3), "rejected": (1, 0), "failed": (0, 0), "flagged": (1, 1),
        "defect_rate": (pytest.approx(1 / 3), pytest.approx(1 / 3)), "newly_contradicting": (1, 0),
        "newly_agreeing": (1, 0), "pairs_per_s": (pytest.approx(4 / 60), pytest.approx(3 / 60)), "duration": (60, 60),
    }  # fmt: skip
    rate = figures(report)["defect_rate"]
    assert rate.low is not None and rate.high is not None and 0 < rate.low < 1 / 3 < rate.high < 1
    assert (report.state_note, report.mismatches) == ("", 1)


def test_the_first_run_has_nothing_to_be_compared_with(worker: Connection) -> None:
    run = a_run(worker, planned=1)
    write(worker, judged(worker, run, ref="only", **WRONG))
    report = read_report(worker, run)
    assert report.before is None
    assert {figure.before for figure in report.figures} == {None}
    (only,) = report.worst
    assert (only.earlier, only.change, only.is_new) == (None, "first_seen", False)
    assert [one.is_this for one in report.history] == [True]


@pytest.mark.parametrize(
    ("state", "planned", "says"),
    [
        ("running", 5, "not over: 1 of 5 pairs are settled"), ("planning", 5, "not over"), ("finishing", 1, "not over"),
        ("cancelled", 5, "was cancelled: 1 of 5"), ("done", 1, ""),
    ],
)  # fmt: skip
def test_a_run_that_is_not_done_says_so_first(worker: Connection, state: str, planned: int, says: str) -> None:
    run = a_run(worker, state=state, planned=planned, finished_at=None)
    write(worker, judged(worker, run))
    note = read_report(worker, run).state_note
    assert says in note
    assert bool(note) == bool(says)


def test_a_run_that_goes_on_is_compared_with_nothing(worker: Connection) -> None:
    a_run(worker, at=BEFORE, planned=5)
    run = a_run(worker, state="running", planned=5, finished_at=None)
    report = read_report(worker, run)
    assert report.before is None and {figure.before for figure in report.figures} == {None}
    worker.execute(text("update run set state = 'done' where id = :run"), {"run": run})
    assert figures(read_report(worker, run))["planned"].before == 5


def test_a_night_that_failed_says_why(worker: Connection) -> None:
    run = a_run(worker, kind="nightly", state="failed", summary='{"error": "the source is empty"}')
    assert "failed" in (note := read_report(worker, run).state_note) and note.endswith("the source is empty")


@pytest.mark.parametrize(("planned", "says"), [(0, "nothing to judge"), (2, "judged no pair")])
def test_a_run_without_a_judged_pair_has_a_report_all_the_same(worker: Connection, planned: int, says: str) -> None:
    run = a_run(worker, planned=planned)
    write(worker, *(rows.failed(next(numbers), run_id=run, submitted_at=TONIGHT) for _ in range(planned)))
    report = read_report(worker, run)
    assert says in report.state_note
    assert figures(report)["defect_rate"].value is None
    assert (report.histograms, report.attributes, report.models, report.worst) == ((), (), (), ())
    assert [(one.code, one.pairs) for one in report.errors] == ([("image_fetch_failed", planned)] if planned else [])


def test_a_run_whose_month_is_gone_keeps_its_counters(worker: Connection) -> None:
    run = a_run(worker, planned=2)
    worker.execute(text("update run set judged = 2 where id = :id"), {"id": run})
    report = read_report(worker, run)
    assert "month was dropped" in report.state_note
    assert (figures(report)["judged"].value, figures(report)["defect_rate"].value) == (2, None)


SUMMARY = """{"catalog": {"items": 1000, "without_verdict": 0, "mismatches": 50, "newly_contradicting": 7,
    "newly_agreeing": 3, "sample": 10, "sample_mismatches": 1}, "labels": {"entailment": 1}}"""


def test_a_nights_headline_is_what_its_end_noted(worker: Connection) -> None:
    run = a_run(worker, kind="nightly", source="shop", planned=1, summary=SUMMARY)
    write(worker, judged(worker, run, source="shop", ref="a"))
    found = figures(read_report(worker, run))
    assert (found["newly_contradicting"].value, found["newly_agreeing"].value, found["reused"].value) == (7, 3, 0)
    whole, sample = found["catalog_defect_rate"], found["sample_defect_rate"]
    assert (whole.value, sample.value) == (0.05, 0.1)
    assert sample.low is not None and sample.high is not None and sample.high - sample.low > 0.3


def test_a_night_can_be_shown_as_it_will_stand_in_a_moment(worker: Connection) -> None:
    run = a_run(worker, kind="nightly", state="finishing", planned=1, finished_at=None)
    write(worker, judged(worker, run, ref="a"))
    at, summary = TONIGHT + timedelta(minutes=5), {"catalog": None, "labels": {"entailment": 1}}
    ahead = read_report(worker, run, ended=Ended(at, summary))
    worker.execute(
        text("update run set state = 'done', finished_at = :at, summary = '{\"catalog\": null}' where id = :id"),
        {"id": run, "at": at},
    )
    assert read_report(worker, run) == ahead
    assert (ahead.state, ahead.speed.seconds) == ("done", 300)


def test_a_later_run_changes_nothing_in_an_earlier_ones_report(worker: Connection) -> None:
    first = a_run(worker, BEFORE, planned=1)
    write(worker, judged(worker, first, ref="a", submitted_at=BEFORE, **WRONG))
    report = read_report(worker, first)
    second = a_run(worker, planned=1)
    write(worker, judged(worker, second, ref="a"))
    assert read_report(worker, first) == report


# ---- What stands below it --------------------------------------------------------------------------------------------


def test_labels_of_the_last_runs_are_counted_or_taken_as_noted_while_that_is_true(worker: Connection) -> None:
    noted = a_run(worker, BEFORE, planned=1, summary='{"labels": {"neutral": 1}}')
    redriven = a_run(worker, BEFORE + timedelta(minutes=1), planned=2, summary='{"labels": {"neutral": 1}}')
    run = a_run(worker, planned=1)
    write(worker, judged(worker, noted, submitted_at=BEFORE),
          *(judged(worker, redriven, submitted_at=BEFORE + timedelta(minutes=1)) for _ in range(2)),
          judged(worker, run, **WRONG))  # fmt: skip
    found = [(one.run_id, one.entailment, one.neutral, one.contradiction) for one in read_report(worker, run).history]
    assert found == [(noted, 0, 1, 0), (redriven, 2, 0, 0), (run, 0, 0, 1)]


def test_scores_are_spread_over_bins_by_policy_with_its_thresholds(worker: Connection) -> None:
    run = a_run(worker)
    scores = (0.0, 0.019, 0.02, 0.999, 1.0)
    write(worker, *(judged(worker, run, p_contradiction=p, p_entailment=1 - p, p_neutral=0.0) for p in scores),
          judged(worker, run, p_entailment=0.5, policy="prohibited"))  # fmt: skip
    catalog, prohibited = read_report(worker, run).histograms
    assert {n: pairs for n, pairs in enumerate(catalog.pairs) if pairs} == {0: 2, 1: 1, BINS - 1: 2}
    assert (catalog.policy, catalog.score, catalog.review_at, catalog.reject_at) == (
        "catalog",
        "p_contradiction",
        0.5,
        None,
    )
    assert (prohibited.score, prohibited.polarity, prohibited.pairs[BINS // 2]) == (
        "p_entailment",
        "should_not_hold",
        1,
    )
    assert prohibited.reject_at is not None


def test_the_defect_rate_is_by_category_by_seller_and_by_what_has_few_values(worker: Connection) -> None:
    run = a_run(worker)
    for n in range(8):
        about = {"category": "shoes" if n < 4 else "hats", "article": f"a{n}", "size": n % 2, "box": {"w": 1}}
        write(worker, judged(worker, run, attributes=about, **(WRONG if n < 2 else {})))
    write(worker, judged(worker, run, attributes={}), judged(worker, run, attributes={"seller": "only"}))
    found = {one.name: one for one in read_report(worker, run).attributes}
    assert list(found) == ["category", "seller", "size"], "an article's number is no group"
    worst, other = found["category"].rates
    assert (worst.value, worst.judged, worst.mismatches, worst.rate) == ("shoes", 4, 2, 0.5)
    assert 0 < worst.low < 0.5 < worst.high < 1
    assert (other.value, other.rate) == ("hats", 0)
    assert {rate.value for rate in found["size"].rates} == {"0", "1"}


def test_of_many_sellers_the_surely_worst_are_shown_and_all_are_counted(worker: Connection) -> None:
    run = a_run(worker)
    write(worker, *(judged(worker, run, attributes={"seller": f"s{n:03}"}) for n in range(300)),
          *(judged(worker, run, attributes={"seller": "bad"}, **(WRONG if n else {})) for n in range(20)),
          judged(worker, run, attributes={"seller": "unlucky"}, **WRONG))  # fmt: skip
    (sellers,) = read_report(worker, run).attributes
    assert [rate.value for rate in sellers.rates[:2]] == ["bad", "unlucky"], (
        "one of one is not surely worse than 19 of 20"
    )
    assert (len(sellers.rates), sellers.values) == (20, 302)


def test_errors_are_counted_by_code(worker: Connection) -> None:
    run = a_run(worker)
    write(worker, *(rows.rejected(next(numbers), run_id=run, submitted_at=TONIGHT, ref=ref, error_detail="no text")
                    for ref in ("b", "a")),
          rows.failed(next(numbers), run_id=run, submitted_at=TONIGHT))  # fmt: skip
    found = read_report(worker, run).errors
    assert [(one.status, one.code, one.pairs, one.example_ref) for one in found] == [
        ("rejected", "text_empty", 2, "a"), ("failed", "image_fetch_failed", 1, None),
    ]  # fmt: skip


def test_the_speed_is_of_the_runs_time_and_lane(worker: Connection) -> None:
    now = datetime.now(UTC)
    run = a_run(worker, now - timedelta(minutes=1), planned=64, finished_at=now + timedelta(minutes=1))
    one = BatchRow("gpu0", "bulk", None, messages=1, pairs=64, judged=60, queue_s=0.5, fetch_s=0.25, model_s=0.5,
                   write_s=0.125, tokens=600, padded_tokens=800, pictures=20, reused=2)  # fmt: skip
    for batch in (one, replace(one, worker="gpu1", pairs=32), replace(one, lane="live")):
        batches.record(worker, batch)
    speed = read_report(worker, run).speed
    assert (speed.batches, speed.workers, speed.batch_pairs, speed.batch_mean, speed.batch_max) == (2, 2, 96, 48, 64)
    assert (speed.padding, speed.reused, speed.fetch_p50_s, speed.seconds) == (0.25, 4, 0.25, 120)


def test_what_judged_is_named_with_its_weights_prompt_and_versions(worker: Connection) -> None:
    run = a_run(worker)
    write(worker, judged(worker, run))
    (model,) = read_report(worker, run).models
    assert (model.name, model.recipe, model.weights_sha256, model.prompt, model.concord, model.torch, model.pairs) == (
        "mini", "fp32", "abc", "is it {}?", "1.0", "2.0", 1,
    )  # fmt: skip


# ---- The worst mismatches --------------------------------------------------------------------------------------------


def test_what_is_new_comes_first_and_then_the_score_under_either_policy(worker: Connection) -> None:
    earlier, run = a_run(worker, BEFORE), a_run(worker)
    was = {"submitted_at": BEFORE}
    write(
        worker,
        judged(worker, earlier, ref="known", **was, **WRONG),
        judged(worker, earlier, ref="new", **was),
        judged(worker, earlier, ref="new weapon", label="contradiction", **was, policy="prohibited"),
        judged(worker, run, ref="known", p_contradiction=0.99, **WRONG),
        judged(worker, run, ref="first", p_contradiction=0.95, **WRONG),
        judged(worker, run, p_contradiction=0.94, **WRONG),
        judged(worker, run, ref="new", p_contradiction=0.6, text_scored="another shoe", **WRONG),
        judged(worker, run, ref="new weapon", p_entailment=0.7, **FORBIDDEN),
        judged(worker, run, ref="agrees"),
    )
    report = read_report(worker, run)
    assert [(one.ref, one.is_new, one.change) for one in report.worst] == [
        ("new weapon", True, "newly_agreeing"), ("new", True, "newly_contradicting"), ("known", False, "unchanged"),
        ("first", False, "first_seen"), (None, False, "first_seen"),
    ]  # fmt: skip
    new = report.worst[1]
    assert new.earlier is not None
    assert (new.earlier.label, new.earlier.decision, new.earlier.submitted_at) == ("entailment", "accept", BEFORE)
    assert (new.earlier.same_content, new.earlier.same_model, new.p_trouble) == (False, True, 0.6)
    better = {figure.better for figure in report.figures if figure.name.startswith("newly")}
    assert better == {None}, "of what should not hold a contradiction is no bad news"


def test_the_sql_gives_what_is_shown_and_can_be_narrowed_down_as_it_is(worker: Connection) -> None:
    run = a_run(worker)
    for n in range(WORST + 5):
        about = {"category": "men's" if n % 2 else "women's", "seller": f"s{n}"}
        write(worker, judged(worker, run, ref=f"r{n}", p_contradiction=0.5 + n / 1000, attributes=about, **WRONG))
    report = read_report(worker, run)
    shown = worker.exec_driver_sql(f"{report.sql.select}\n{report.sql.order}").mappings().all()
    assert [row["ref"] for row in shown] == [one.ref for one in report.worst]
    assert len(shown) == WORST
    filters = {one.name: one for one in report.filters}
    assert list(filters) == ["label", "policy", "category", "seller"]
    category = filters["category"]
    assert (category.is_attribute, category.values) == (True, ("men's", "women's"))
    narrowed = f"{report.sql.select} and {category.column} = 'men''s'\n{report.sql.order}"
    found = worker.exec_driver_sql(narrowed).mappings().all()
    assert len(found) == (WORST + 5) // 2
    assert {row["attributes"]["category"] for row in found} == {"men's"}


def test_a_filter_by_an_attribute_of_any_name_is_sql(worker: Connection) -> None:
    run = a_run(worker)
    name = 'it\'s; "x" -- %s :y'
    write(worker, *(judged(worker, run, attributes={name: "a"}, **WRONG) for _ in range(2)))
    report = read_report(worker, run)
    (found,) = [one for one in report.filters if one.is_attribute]
    # As a driver sends it that knows no parameters.
    narrowed = f"{report.sql.select} and {found.column} = 'a'\n{report.sql.order}"
    assert len(worker.exec_driver_sql(narrowed, execution_options={"no_parameters": True}).all()) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("color", "x" * 2 * VALUE_CHARS), ("a\u202e'\\\r", "b"), ("a\u2028b\x1b", "c"), ("a\\b'", "d")]
)
def test_a_filters_sql_finds_long_values_and_hides_nothing_of_a_name(worker: Connection, name: str, value: str) -> None:
    run = a_run(worker)
    write(worker, *(judged(worker, run, attributes={name: value}, **WRONG) for _ in range(2)))
    report = read_report(worker, run)
    (found,) = [one for one in report.filters if one.is_attribute]
    assert found.column.isprintable()
    narrowed = f"{report.sql.select} and {found.column} = '{found.values[0]}'\n{report.sql.order}"
    assert len(worker.exec_driver_sql(narrowed, execution_options={"no_parameters": True}).all()) == 2


def test_an_attribute_whose_name_is_cut_is_no_filter(worker: Connection) -> None:
    run = a_run(worker)
    write(worker, *(judged(worker, run, attributes={"n" * 2 * VALUE_CHARS: "a"}, **WRONG) for _ in range(2)))
    assert not [one for one in read_report(worker, run).filters if one.is_attribute]


def test_huge_texts_are_cut_and_erased_ones_are_none(worker: Connection) -> None:
    run = a_run(worker)
    about = {**{f"key {n:02}": "v" for n in range(40)}, "a long": "x" * 10_000, "list": [1]}
    write(worker, judged(worker, run, ref="huge", text="x" * 50_000, premise="y" * 50_000, attributes=about, **WRONG))
    (huge,) = read_report(worker, run).worst
    assert (len(huge.text or ""), huge.text_is_cut, len(huge.premise or "")) == (TEXT_CHARS, True, TEXT_CHARS)
    assert len(huge.attributes) == 20 and len(huge.attributes["a long"]) == VALUE_CHARS


def test_what_is_erased_is_shown_without_its_words(database: Database, worker: Connection) -> None:
    owner = create_engine(database.owner_url)
    with owner.connect() as connection:
        connection.execute(
            text(
                "insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers)"
                " values ('mini', '2', 'fp32', '', '', 64, '{}')"
            )
        )
        run = a_run(connection)
        write(connection, judged(connection, run, ref="gone", attributes={"category": "shoes"}, **WRONG))
        erasure.erase(connection, "default", "gone")
        report = read_report(connection, run)
        connection.rollback()
    owner.dispose()
    (gone,) = report.worst
    assert (gone.text, gone.image, gone.premise, gone.attributes, gone.text_is_cut) == (None, None, None, {}, False)
    assert "erased" in gone.flags and gone.p_trouble == 0.9


# ---- Which run, and who may look -------------------------------------------------------------------------------------


def refused(connection: Connection, words: str) -> str:
    with pytest.raises(NoSuchRun) as caught:
        find_run(connection, words)
    return str(caught.value)


def test_a_run_is_found_by_id_by_a_unique_beginning_by_last_and_by_its_source(worker: Connection) -> None:
    first = a_run(worker, BEFORE, id=UUID("aaaa0000-0000-4000-8000-000000000001"), source="shop", kind="nightly")
    file = a_run(worker, id=UUID("aaaa0000-0000-4000-8000-000000000002"), source="shop")
    last = a_run(worker, TONIGHT + timedelta(hours=1), id=UUID("bbbb0000-0000-4000-8000-000000000003"))
    assert find_run(worker, str(first)) == first
    assert find_run(worker, str(first).upper()) == first
    assert find_run(worker, "bb") == last
    assert find_run(worker, "last") == last
    assert find_run(worker, "shop") == first, "a catalog's night, though a file of that source came later"
    assert find_run(worker, "default") == last
    assert str(file) in (said := refused(worker, "aaaa")) and "several" in said


@pytest.mark.parametrize("words", ["cccc", "", "%", "no such", "0" * 40])
def test_what_names_no_run_is_told_what_names_one(worker: Connection, words: str) -> None:
    a_run(worker)
    assert "`last`" in refused(worker, words)


def test_where_there_was_no_run_yet_that_is_said(worker: Connection) -> None:
    assert "no run yet" in refused(worker, "last")
    with pytest.raises(NoSuchRun):
        read_report(worker, uuid4())


@pytest.fixture
def reading(database: Database) -> Iterator[Callable[[UUID], RunReport]]:
    """Reads a report by a login that is granted `concord_reader` alone."""
    owner = create_engine(database.owner_url, isolation_level="AUTOCOMMIT")
    login, password = f"analyst_{secrets.token_hex(4)}", secrets.token_hex(16)
    with owner.connect() as connection:
        connection.execute(text(f"create role {login} login password '{password}'"))
        connection.execute(text(f"grant concord_reader to {login}"))
    engine = make_engine(make_url(database.url).set(username=login, password=password).render_as_string(False))

    def read(run_id: UUID) -> RunReport:
        with engine.connect() as connection:
            assert find_run(connection, str(run_id)) == run_id
            return read_report(connection, run_id)

    yield read
    engine.dispose()
    with owner.connect() as connection:
        connection.execute(text("delete from verdict; delete from run; delete from model_version"))
        connection.execute(text(f"drop role {login}"))
    owner.dispose()


def test_a_readers_login_is_enough(worker: Connection, reading: Callable[[UUID], RunReport]) -> None:
    run = a_run(worker, planned=1)
    write(worker, judged(worker, run, **WRONG))
    worker.commit()
    assert reading(run) == read_report(worker, run)


def test_a_worker_that_starts_with_a_model_notes_its_versions(worker: Connection) -> None:
    about: dict[str, Any] = {
        "name": "mini", "revision": "1", "recipe": "fp32", "weights_sha256": "abc", "prompt": "is it {}?",
        "image_px": 64, "answers": {},
    }  # fmt: skip
    model = registry.register_model(worker, **about, concord_version="1.1", torch_version="2.1")
    run = a_run(worker)
    write(worker, judged(worker, run))
    (found,) = read_report(worker, run).models
    assert (found.id, found.concord, found.torch) == (model, "1.1", "2.1"), "the same version of the model"
