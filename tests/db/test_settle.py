"""One transaction a batch: what it changes, that it changes it once, and what it leaves alone."""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, make_url, text
from sqlalchemy.exc import DBAPIError

from db import outbox, runs, verdicts
from db.engine import make_engine
from db.outbox import Rejected
from db.verdicts import Settlement, settle
from infra.local.postgres import SUPERUSER
from tasks.storing import persist, write
from tests.conftest import Database
from tests.db.rows import THIS_MONTH, a_run, all_of, failed, judged, message, model, pair_id, rejected
from tests.line.site import eventually
from tests.shared import emptied_database

database = emptied_database


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url, pool_size=10)
    yield engine
    engine.dispose()


def apply(engine: Engine, settlement: Settlement) -> int:
    with engine.begin() as connection:
        return settle(connection, settlement)


def stored(engine: Engine, table: str) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return all_of(connection, table)


def never() -> bool:
    return False


def test_a_row_comes_back_as_it_was_written(engine: Engine) -> None:
    row = judged(
        model(engine), ref="sku-1", run_id=uuid4(), image="s3://b/k", text="it's \\u0041 \u2028\U0001f45f", premise="p",
        attributes={"deep": [1, {"er": None}], "big": 2**70}, answer="yes", flags=["text_cut", "a,b"], text_scored="t",
        premise_scored="p", image_sha256=b"\0\xff" * 16, image_etag="e", image_width=3, image_height=4,
        decode_mode="reduced", content_hash=b"\x80" * 16,
    )  # fmt: skip
    assert apply(engine, Settlement([row])) == 1
    (found,) = stored(engine, "verdict")
    found.pop("decided_at")
    assert found == vars(row)


def test_settling_again_changes_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=3)
        outbox.add(connection, [message(run.id, lane="bulk")], published=True)
    made_by = model(engine)
    rows = [judged(made_by, 1), rejected(2), failed(3)]
    settlement = Settlement(
        verdicts=[replace(row, run_id=run.id) for row in rows],
        done=[(run.id, 0)],
        rejected=[Rejected("live", "duplicate_id", "twice", b"{}", pair_ids=[pair_id(1)])],
    )
    assert apply(engine, settlement) == 3
    before = {table: stored(engine, table) for table in ("verdict", "run", "outbox", "rejected_message")}
    assert apply(engine, settlement) == 0
    assert {table: stored(engine, table) for table in before} == before
    assert before["outbox"] == []
    assert len(before["rejected_message"]) == 1
    assert [before["run"][0][name] for name in ("judged", "rejected", "failed", "state")] == [1, 1, 1, "done"]


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        ("failed", "judged", "judged"),
        ("failed", "rejected", "rejected"),
        ("failed", "failed", "failed"),
        ("judged", "failed", "judged"),
        ("judged", "rejected", "judged"),
        ("rejected", "judged", "rejected"),
    ],
)
def test_a_verdict_stands_but_a_failed_one_gives_way(engine: Engine, first: str, second: str, stands: str) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=1)
    made_by = model(engine)
    kinds = {"judged": judged(made_by), "rejected": rejected(), "failed": failed()}
    apply(engine, Settlement([replace(kinds[first], run_id=run.id, attempts=1)]))
    apply(engine, Settlement([replace(kinds[second], run_id=run.id, attempts=2)]))
    (row,) = stored(engine, "verdict")
    assert (row["status"], row["attempts"]) == (stands, 1 if stands == first else 2)
    assert (row["error_code"] is None) == (stands == "judged")
    (counted,) = stored(engine, "run")
    assert {name: counted[name] for name in kinds} == {**dict.fromkeys(kinds, 0), stands: 1}
    assert counted["state"] == "done"


def test_one_id_at_two_moments_is_two_verdicts(engine: Engine) -> None:
    later = failed(1, submitted_at=THIS_MONTH + timedelta(seconds=1))
    apply(engine, Settlement([later]))
    made_by = model(engine)
    assert (
        apply(engine, Settlement([judged(made_by, 1), replace(judged(made_by, 1), submitted_at=later.submitted_at)]))
        == 2
    )
    assert [row["status"] for row in stored(engine, "verdict")] == ["judged", "judged"]


def test_a_run_is_done_with_its_last_pair_and_not_while_it_is_planned(engine: Engine) -> None:
    with engine.begin() as connection:
        run = runs.open_run(connection, uuid4(), name="pairs.csv", lane="bulk", source="default")
        assert runs.plan(connection, run.id, 2, before=0)
    apply(engine, Settlement([rejected(1, run_id=run.id), rejected(2, run_id=run.id)]))
    with engine.begin() as connection:
        assert runs.read(connection, run.id).state == "planning"
        assert runs.plan(connection, run.id, 1, before=2)
        runs.end_planning(connection, run.id)
        assert runs.read(connection, run.id).state == "running"
    apply(engine, Settlement([rejected(3, run_id=run.id)]))
    with engine.connect() as connection:
        done = runs.read(connection, run.id)
    assert (done.state, done.settled, done.planned) == ("done", 3, 3)
    assert stored(engine, "run")[0]["finished_at"] is not None


def test_a_run_whose_pairs_were_all_settled_before_its_planning_ended_is_done_then(engine: Engine) -> None:
    with engine.begin() as connection:
        run = runs.open_run(connection, uuid4(), name="pairs.csv", lane="bulk", source="default")
        assert runs.plan(connection, run.id, 1, before=0)
    apply(engine, Settlement([rejected(1, run_id=run.id)]))
    with engine.begin() as connection:
        runs.end_planning(connection, run.id)
        assert runs.read(connection, run.id).state == "done"


def test_a_late_duplicate_neither_deletes_nor_rewrites_the_row_of_a_later_attempt(engine: Engine) -> None:
    row = message(attempts=0)
    with engine.begin() as connection:
        outbox.add(connection, [row], published=True)
    apply(engine, Settlement(retries=[replace(row, attempts=1, body={"try": 1}, last_error="S3 was away")]))
    (second,) = stored(engine, "outbox")
    assert (second["attempts"], second["published_at"], second["last_error"]) == (1, None, "S3 was away")
    apply(engine, Settlement(done=[(row.message_id, 0)]))
    apply(engine, Settlement(retries=[replace(row, attempts=1, body={"try": "forked"})]))
    apply(engine, Settlement(retries=[replace(row, attempts=3, body={"try": "skipped"})]))
    assert stored(engine, "outbox") == [second]
    apply(engine, Settlement(done=[(row.message_id, 1)]))
    assert stored(engine, "outbox") == []


def test_a_delivery_without_a_row_makes_one_that_is_due_after_its_wait(engine: Engine) -> None:
    row = message(attempts=1, lane="bulk", delay_s=3600.0)
    apply(engine, Settlement(retries=[row]))
    with engine.begin() as connection:
        assert outbox.claim(connection, "bulk", 10) == []
        connection.execute(text("update outbox set not_before = now()"))
        (claimed,) = outbox.claim(connection, "bulk", 10)
    assert (claimed.message_id, claimed.attempts) == (row.message_id, 1)


def test_a_transaction_that_fails_changes_nothing_at_all(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=1)
        outbox.add(connection, [message(run.id)])
    bad = Settlement([rejected(1, run_id=run.id), rejected(2, status="lost")], done=[(run.id, 0)])
    before = [stored(engine, table) for table in ("verdict", "outbox", "run")]
    with pytest.raises(DBAPIError):
        apply(engine, bad)
    assert [stored(engine, table) for table in ("verdict", "outbox", "run")] == before


@pytest.mark.parametrize("before", ["nothing", "failed"])
def test_writers_of_the_same_rows_in_any_order_all_come_through(engine: Engine, before: str) -> None:
    with engine.begin() as connection:
        all_runs = [a_run(connection, planned=20) for _ in range(3)]
        outbox.add(connection, [message(pair_id(number)) for number in range(60)])
    made_by = model(engine)
    if before == "failed":
        apply(engine, Settlement([failed(number, run_id=all_runs[number % 3].id) for number in range(60)]))

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(2):
            numbers = chance.sample(range(60), 60)
            rows = [judged(made_by, number, run_id=all_runs[number % 3].id) for number in numbers]
            rejects = [Rejected("live", "not_json", "?", str(number).encode()) for number in numbers[:10]]
            whole = Settlement(rows, [(pair_id(number), 0) for number in numbers], rejected=rejects)
            persist(lambda whole=whole: apply(engine, whole), never)  # type: ignore[misc]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert Counter(row["status"] for row in stored(engine, "verdict")) == {"judged": 60}
    assert stored(engine, "outbox") == []
    assert [(run["judged"], run["failed"], run["state"]) for run in stored(engine, "run")] == [(20, 0, "done")] * 3


def test_a_writer_that_postgres_ends_for_a_deadlock_does_it_again(
    engine: Engine, database: Database, stack: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one writes the same two rows in the opposite order, and is not the one that looks for deadlocks."""
    row, held = rejected(1), message()
    with engine.begin() as connection:
        outbox.add(connection, [held])
    name = make_url(database.url).database
    connect = partial(stack.postgres.connect, SUPERUSER, name)
    with connect() as other, connect() as onlooker, ThreadPoolExecutor(1) as pool:
        other.execute("set deadlock_timeout = '1min'")
        other.execute("begin")
        other.execute("delete from outbox where message_id = %s", [held.message_id])
        waiting: list[Future[Any]] = []
        forget = outbox.forget

        def forget_in_its_way(connection: Connection, deliveries: Any) -> None:
            if not waiting:  # the verdict is written, and not committed
                waiting.append(pool.submit(other.execute, THE_SAME_VERDICT, [row.submitted_at, row.pair_id]))
                eventually(lambda: onlooker.execute(WAITS).fetchone(), "a writer that waits for the other")
            forget(connection, deliveries)

        monkeypatch.setattr(verdicts, "forget", forget_in_its_way)
        write(engine, [Settlement([row], done=[(held.message_id, 0)])], lambda: finish(other, waiting))
    assert "deadlock detected" in caplog.text
    assert [(one["pair_id"], one["source"]) for one in stored(engine, "verdict")] == [(row.pair_id, "the other")]
    assert stored(engine, "outbox") == []


THE_SAME_VERDICT = """
insert into verdict (submitted_at, pair_id, source, message_id, lane, status, attempts, error_code)
values (%s, %s, 'the other', gen_random_uuid(), 'live', 'rejected', 0, 'text_empty')
"""


WAITS = "select pid from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


def finish(other: Any, waiting: list[Future[Any]]) -> bool:
    """Between two tries the other one goes on; the writer is not told to stop."""
    waiting[0].result()
    other.execute("commit")
    return False


def test_a_pair_that_stands_twice_in_a_batch_has_one_verdict_and_is_counted_once(engine: Engine) -> None:
    with engine.begin() as connection:
        run = a_run(connection, planned=2)
    apply(engine, Settlement([failed(1, run_id=run.id)]))
    twice = [judged(model(engine), number, run_id=run.id) for number in (1, 2) for _ in range(2)]
    both = [failed(3), judged(model(engine), 3)]
    assert apply(engine, Settlement([*twice, *both])) in (3, 4)
    assert apply(engine, Settlement([*twice, *both])) == 0
    found = {row["pair_id"]: row["status"] for row in stored(engine, "verdict")}
    assert found == {pair_id(number): "judged" for number in (1, 2, 3)}
    (counted,) = stored(engine, "run")
    assert [counted[name] for name in ("judged", "rejected", "failed", "state")] == [2, 0, 0, "done"]


def test_deliveries_of_several_attempts_end_only_the_rows_of_their_own(engine: Engine) -> None:
    waiting = [message(attempts=attempts) for attempts in (0, 0, 1, 2)]
    with engine.begin() as connection:
        outbox.add(connection, waiting)
    first, second, third, fourth = (one.message_id for one in waiting)
    apply(engine, Settlement(done=[(third, 1), (first, 0), (second, 1), (fourth, 0), (third, 0)]))
    assert {one["message_id"] for one in stored(engine, "outbox")} == {second, fourth}


def test_messages_that_are_there_already_are_left_alone_and_not_counted(engine: Engine) -> None:
    before = message(attempts=1)
    with engine.begin() as connection:
        assert outbox.add(connection, [before], published=True) == 1
        again = replace(before, attempts=0, body={})
        assert outbox.add(connection, [again, *(message() for _ in range(3)), again]) == 3
        assert outbox.add(connection, []) == 0
    rows = {one["message_id"]: one for one in stored(engine, "outbox")}
    kept = rows.pop(before.message_id)
    assert (kept["attempts"], kept["body"], kept["publishes"]) == (1, b'{"pairs": []}', 1)
    assert kept["published_at"] is not None
    assert [(one["publishes"], one["published_at"]) for one in rows.values()] == [(0, None)] * 3


NUL_INSIDE = {"attributes": {"a": "\0"}}
NO_LABEL = {"status": "judged", "error_code": None}


@pytest.mark.parametrize("fault", [NUL_INSIDE, {"text": "\ud800"}, NO_LABEL, {"image_width": 2**40}])
def test_a_row_that_postgres_refuses_fails_alone(engine: Engine, fault: dict[str, Any]) -> None:
    rows = [rejected(number, text=f"text {number}") for number in range(6)]
    rows[3] = replace(rows[3], **fault)
    ids = [uuid4() for _ in range(3)]
    with engine.begin() as connection:
        outbox.add(connection, [message(one) for one in ids])
    write(engine, [Settlement(rows[n : n + 2], done=[(ids[n // 2], 0)]) for n in (0, 2, 4)], never)
    found = {row["pair_id"]: row for row in stored(engine, "verdict")}
    culprit = found.pop(pair_id(3))
    assert (culprit["status"], culprit["error_code"], culprit["text"]) == ("failed", "unstorable", None)
    assert culprit["error_detail"]
    assert {one["text"] for one in found.values()} == {f"text {number}" for number in (0, 1, 2, 4, 5)}
    assert stored(engine, "outbox") == []


def test_a_row_whose_month_is_gone_is_recorded_beside_the_verdicts(engine: Engine) -> None:
    message_id = uuid4()
    with engine.begin() as connection:
        outbox.add(connection, [message(message_id)])
    lost = rejected(1, submitted_at=THIS_MONTH.replace(year=1999), ref="sku-1", message_id=message_id)
    write(engine, [Settlement([lost, rejected(2)], done=[(message_id, 0)])], never)
    assert [row["pair_id"] for row in stored(engine, "verdict")] == [pair_id(2)]
    (record,) = stored(engine, "rejected_message")
    assert (record["error_code"], record["pair_ids"], record["message_id"]) == ("unstorable", [pair_id(1)], message_id)
    assert b"sku-1" in record["body"]
    assert stored(engine, "outbox") == []


def test_verdicts_are_read_back_in_the_order_asked_for_and_found_by_id_or_ref(engine: Engine) -> None:
    apply(engine, Settlement([rejected(n, ref=f"sku-{n % 2}") for n in range(4)]))
    asked = [pair_id(n) for n in (2, 0, 9, 1)]
    with engine.connect() as connection:
        assert [row["pair_id"] for row in verdicts.read_back(connection, THIS_MONTH, asked)] == [
            str(one) for one in asked if one != pair_id(9)
        ]
        assert [row["pair_id"] for row in verdicts.find(connection, pair_id=pair_id(3))] == [pair_id(3)]
        assert {row["pair_id"] for row in verdicts.find(connection, ref="sku-0")} == {pair_id(0), pair_id(2)}
        assert verdicts.find(connection, ref="sku-0", source="another") == []
