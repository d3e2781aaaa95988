"""Dead letters in SQL, as the workers' login: found, handed over again, replaced by what comes of that, given up."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from db import dead_letters, outbox
from db.dead_letters import DeadLetter, Selection
from db.engine import make_engine
from db.verdicts import REDRIVEN, Settlement, Verdict, settle
from tasks.settings import Settings
from tasks.settling import Case, MadeBy, Reading, settlement_of
from tests.conftest import Database
from tests.db.rows import THIS_MONTH, a_run, all_of, failed, judged, message, model, pair_id, rejected
from tests.shared import emptied_database
from worker.delivery import Delivery
from worker.errors import ErrorCode, TryLater
from worker.messages import Message, Pair

database = emptied_database

HOUR = timedelta(hours=1)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


def whole(number: int, **fields: Any) -> Verdict:
    """A failed pair that could be judged."""
    return failed(number, **{"image": "s3://shop/1.jpg", "text": f"shoe {number}", "ref": f"sku-{number}", **fields})


def apply(engine: Engine, *verdicts: Verdict, done: Sequence[tuple[UUID, int]] = ()) -> int:
    with engine.begin() as connection:
        return settle(connection, Settlement(verdicts, done=done))


def stored(engine: Engine, table: str = "verdict") -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return all_of(connection, table)


def row(engine: Engine, number: int) -> dict[str, Any]:
    return next(one for one in stored(engine) if one["pair_id"] == pair_id(number))


def everything(engine: Engine, **conditions: Any) -> Selection:
    with engine.connect() as connection:
        return Selection(dead_letters.now(connection), **conditions)


def age(engine: Engine, number: int, by: timedelta) -> None:
    """Make a failure look older than it is."""
    with engine.begin() as connection:
        statement = text("update verdict set decided_at = decided_at - :by where pair_id = :pair_id")
        connection.execute(statement, {"by": by, "pair_id": pair_id(number)})


def hand_over(engine: Engine, selection: Selection) -> dict[UUID, list[DeadLetter]]:
    """Redrive what is selected and idle, a message a pair."""
    with engine.begin() as connection:
        idle = [one for one in dead_letters.take(connection, selection, None, 100) if not one.is_under_way]
        messages = {uuid4(): [letter] for letter in idle}
        outbox.add(connection, [message(message_id) for message_id in messages])
        dead_letters.mark(connection, messages)
    return messages


def counters(engine: Engine) -> list[tuple[int, int, int, str]]:
    return [(one["judged"], one["rejected"], one["failed"], one["state"]) for one in stored(engine, "run")]


def test_a_pair_fails_with_the_error_of_its_last_attempt(engine: Engine) -> None:
    errors = [TryLater(ErrorCode.IMAGE_FETCH_FAILED, f"S3 answered {status}") for status in (500, 503)]
    errors.append(TryLater(ErrorCode.MODEL_FAILED, "it raised"))
    settings = Settings(_env_file=None, max_attempts=len(errors))  # type: ignore[call-arg]
    delivery = Delivery(SimpleNamespace(headers={}), "live")
    asked = Message(uuid4(), THIS_MONTH, (Pair(id=pair_id(1), image="s3://shop/1.jpg", text="a shoe"),))
    for attempts, error in enumerate(errors):
        attempt = replace(asked, attempts=attempts)
        reading = Reading(delivery, attempt, cases=[Case(attempt, asked.pairs[0], answer=error)])
        with engine.begin() as connection:
            settle(connection, settlement_of(reading, {}, settings, cast(MadeBy, None)))
        waits = [one["last_error"] for one in stored(engine, "outbox")]
        assert waits == ([f"{error.code}: {error.detail}"] if error is not errors[-1] else [])
    last = row(engine, 1)
    assert (last["status"], last["error_code"], last["error_detail"]) == ("failed", "model_failed", "it raised")
    assert last["attempts"] == len(errors) - 1


def test_groups_count_by_code_source_and_run_with_the_newest_as_example(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=2)
    apply(
        engine,
        *(whole(number, run_id=run.id, error_detail=f"trouble {number}") for number in (1, 2)),
        whole(3, source="emea", error_code="model_failed"),
        failed(4, error_code="unstorable"),
        rejected(5),
    )
    age(engine, 2, HOUR)
    with engine.connect() as connection:
        groups = dead_letters.groups(connection, everything(engine))
    first, *others = groups
    assert {name: first[name] for name in ("error_code", "source", "run_id", "run_name", "pairs", "under_way")} == {
        "error_code": "image_fetch_failed", "source": "default", "run_id": run.id, "run_name": run.name, "pairs": 2,
        "under_way": 0,
    }  # fmt: skip
    assert (first["example"], first["detail"]) == ("sku-1", "trouble 1")
    assert first["newest"] - first["oldest"] == HOUR
    assert {(one["error_code"], one["source"], one["pairs"], one["incomplete"]) for one in others} == {
        ("model_failed", "emea", 1, 0),
        ("unstorable", "default", 1, 1),
    }


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        ({}, {1, 2, 3, 4}),
        ({"code": "model_failed"}, {2}),
        ({"source": "emea"}, {3}),
        ({"ref": "sku-4"}, {4}),
        ({"pair_ids": [pair_id(1), pair_id(9)]}, {1}),
        ({"code": "model_failed", "source": "emea"}, set()),
    ],
)
def test_each_condition_selects_by_itself_and_with_the_others(
    engine: Engine, conditions: dict[str, Any], numbers: set[int]
) -> None:
    apply(engine, whole(1), whole(2, error_code="model_failed"), whole(3, source="emea"), whole(4), rejected(5))
    selection = everything(engine, **conditions)
    wanted = {pair_id(number) for number in numbers}
    with engine.begin() as connection:
        assert dead_letters.pair_ids(connection, selection) == wanted
        assert {one["pair_id"] for one in dead_letters.newest(connection, selection, 10)} == wanted
        assert {one.pair_id for one in dead_letters.take(connection, selection, None, 10)} == wanted


def test_age_counts_from_the_failure_and_not_from_the_submission(engine: Engine) -> None:
    apply(engine, whole(1), whole(2))
    age(engine, 1, 3 * HOUR)
    with engine.begin() as connection:
        now = dead_letters.now(connection)
        assert dead_letters.pair_ids(connection, Selection(now - 2 * HOUR)) == {pair_id(1)}
        assert dead_letters.pair_ids(connection, Selection(now, since=now - 2 * HOUR)) == {pair_id(2)}


def test_an_age_leaves_the_months_unread_that_came_after_it(engine: Engine) -> None:
    selection = Selection(THIS_MONTH - timedelta(days=2))
    with engine.connect() as connection:
        plan = connection.execute(
            text(f"explain select * from verdict v where {selection.where}"), selection.given
        ).scalars()
        read = "\n".join(plan)
    assert f"verdict_{THIS_MONTH - timedelta(days=2):%Y_%m}" in read
    assert f"verdict_{THIS_MONTH:%Y_%m}" not in read


def test_rows_are_taken_in_pages_the_oldest_failures_first_and_not_those_that_others_hold(engine: Engine) -> None:
    apply(engine, *(whole(number) for number in range(6)))
    for number in range(6):
        age(engine, number, number * HOUR)
    with engine.begin() as connection, engine.begin() as another:
        held = dead_letters.take(another, everything(engine, ref="sku-3"), None, 1)
        assert [one.ref for one in held] == ["sku-3"]
        selection = everything(engine)
        first = dead_letters.take(connection, selection, None, 3)
        assert [one.ref for one in first] == ["sku-5", "sku-4", "sku-2"]
        second = dead_letters.take(connection, selection, first[-1], 3)
        assert [one.ref for one in second] == ["sku-1", "sku-0"]
        assert dead_letters.take(connection, selection, second[-1], 3) == []


def test_a_redriven_pair_is_under_way_until_its_message_is_settled(engine: Engine) -> None:
    apply(engine, whole(1))
    ((message_id, _),) = hand_over(engine, everything(engine)).items()
    assert hand_over(engine, everything(engine)) == {}
    with engine.connect() as connection:
        (found,) = dead_letters.newest(connection, everything(engine), 10)
        (group,) = dead_letters.groups(connection, everything(engine))
    assert (found["state"], group["under_way"]) == ("under way", 1)
    apply(engine, replace(judged(model(engine), 1), message_id=message_id), done=[(message_id, 0)])
    now = row(engine, 1)
    assert (now["status"], now["flags"], now["message_id"]) == ("judged", [], message_id)


def test_a_redriven_pair_whose_message_is_gone_can_be_redriven_again(engine: Engine) -> None:
    apply(engine, whole(1))
    (lost,) = hand_over(engine, everything(engine))
    with engine.begin() as connection:
        outbox.forget(connection, [(lost, 0)])
    (again,) = hand_over(engine, everything(engine))
    assert row(engine, 1)["message_id"] == again
    assert row(engine, 1)["flags"] == [REDRIVEN]


def test_a_failure_of_the_redrive_replaces_the_older_one_once(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=1)
    first = whole(1, run_id=run.id, error_detail="the bucket is not there", attempts=4)
    apply(engine, first)
    ((message_id, _),) = hand_over(engine, everything(engine)).items()
    second = replace(first, message_id=message_id, error_code="model_failed", error_detail="no luck", attempts=2)
    assert apply(engine, second, done=[(message_id, 0)]) == 1
    newer = row(engine, 1)
    assert (newer["error_code"], newer["error_detail"], newer["attempts"]) == ("model_failed", "no luck", 2)
    assert (newer["message_id"], newer["flags"]) == (message_id, [])
    assert counters(engine) == [(0, 0, 1, "done")]
    assert apply(engine, second, done=[(message_id, 0)]) == 0
    assert apply(engine, replace(second, error_detail="another delivery of the same attempt")) == 0
    assert row(engine, 1) == newer
    assert counters(engine) == [(0, 0, 1, "done")]


def test_a_late_failure_of_the_message_before_does_not_end_a_redrive(engine: Engine) -> None:
    first = whole(1)
    apply(engine, first)
    hand_over(engine, everything(engine))
    before = stored(engine)
    assert apply(engine, first) == 0
    assert stored(engine) == before


@pytest.mark.parametrize("status", ["judged", "rejected"])
def test_the_runs_counters_follow_a_redriven_pair_and_a_done_run_stays_done(engine: Engine, status: str) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=2)
    apply(engine, whole(1, run_id=run.id), rejected(2, run_id=run.id))
    (ended,) = stored(engine, "run")
    ((message_id, _),) = hand_over(engine, everything(engine)).items()
    verdict = judged(model(engine), 1) if status == "judged" else rejected(1)
    for changed in (1, 0):
        assert apply(engine, replace(verdict, run_id=run.id, message_id=message_id), done=[(message_id, 0)]) == changed
    expected = (1, 1, 0, "done") if status == "judged" else (0, 2, 0, "done")
    assert counters(engine) == [expected]
    assert stored(engine, "run")[0]["finished_at"] == ended["finished_at"]


def test_a_pair_stays_in_its_run_whatever_the_message_says_that_replaces_its_failure(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=1)
    apply(engine, whole(1, run_id=run.id))
    apply(engine, judged(model(engine), 1))
    assert row(engine, 1)["run_id"] == run.id
    assert counters(engine) == [(1, 0, 0, "done")]


def test_dropping_makes_a_pair_rejected_and_keeps_why_it_had_failed(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=3)
    made_by = model(engine)
    apply(
        engine,
        whole(1, run_id=run.id, error_detail="S3 answered 503", attempts=4),
        failed(2, run_id=run.id, error_code="unstorable", submitted_at=THIS_MONTH + HOUR),
        judged(made_by, 3, run_id=run.id),
    )
    before = row(engine, 1)
    with engine.begin() as connection:
        dead_letters.drop(connection, dead_letters.take(connection, everything(engine), None, 10))
    dropped = row(engine, 1)
    assert (dropped["status"], dropped["error_code"]) == ("rejected", "dropped")
    assert dropped["error_detail"] == "image_fetch_failed: S3 answered 503"
    kept = ("text", "image", "ref", "attempts", "message_id", "run_id", "source")
    assert [dropped[name] for name in kept] == [before[name] for name in kept]
    assert row(engine, 2)["error_detail"] == "unstorable"
    assert counters(engine) == [(1, 2, 0, "done")]
    assert apply(engine, judged(made_by, 1, run_id=run.id)) == 0, "it is not judged any more"
    assert counters(engine) == [(1, 2, 0, "done")]
    with engine.begin() as connection:
        dead_letters.drop(connection, dead_letters.take(connection, everything(engine), None, 10))
    assert counters(engine) == [(1, 2, 0, "done")]


def test_a_failed_pair_is_found_with_its_redrive_and_the_lone_tries_of_its_worker(engine: Engine) -> None:
    apply(engine, whole(1), whole(1, submitted_at=THIS_MONTH + HOUR), rejected(2))
    with engine.begin() as connection:
        connection.execute(
            text("insert into suspect values (:submitted_at, :pair_id, :message_id, 2, now())"),
            {"submitted_at": THIS_MONTH, "pair_id": pair_id(1), "message_id": uuid4()},
        )
    hand_over(engine, everything(engine))
    with engine.connect() as connection:
        later, earlier = dead_letters.find(connection, pair_id(1))
        assert dead_letters.find(connection, pair_id(2)) == []
    assert (later["lone_tries"], earlier["lone_tries"]) == (None, 2)
    assert (later["state"], later["attempt"]) == ("under way", 0)
