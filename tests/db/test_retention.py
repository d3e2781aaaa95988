"""Months come ahead of time, and go by the owner's numbers, whoever asks; those that a run still needs stay."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import ProgrammingError

from db import nights, outbox, registry, retention
from db.engine import make_engine
from db.outbox import Rejected
from db.retention import Retention
from db.verdicts import Settlement, settle
from tests.conftest import Database
from tests.db import rows
from tests.line.site import eventually

LAST_MONTH = (rows.THIS_MONTH - timedelta(days=1)).replace(day=1)
MONTH_BEFORE = (LAST_MONTH - timedelta(days=1)).replace(day=1)


@pytest.fixture
def owner(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.owner_url)
    yield engine
    engine.dispose()


@pytest.fixture
def worker(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


def keep(owner: Engine, **numbers: int) -> None:
    with owner.begin() as connection:
        retention.change(connection, Retention(**numbers))


def an_older_month(owner: Engine) -> None:
    """The month before last, which no migration makes, for both tables."""
    with owner.begin() as connection:
        for parent in ("verdict", "batch"):
            connection.execute(
                text(
                    f"create table {parent}_{MONTH_BEFORE:%Y_%m} partition of {parent}"
                    f" for values from ('{MONTH_BEFORE}') to ('{LAST_MONTH}')"
                )
            )


def months(engine: Engine, parent: str) -> list[str]:
    statement = text("select inhrelid::regclass::text from pg_inherits where inhparent = cast(:parent as regclass)")
    with engine.connect() as connection:
        return sorted(connection.execute(statement, {"parent": parent}).scalars())


def test_nothing_goes_unless_the_owner_said_so(owner: Engine, worker: Engine) -> None:
    an_older_month(owner)
    before = months(owner, "verdict")
    done = retention.maintain(worker)
    assert (done.made, done.dropped, done.needed, done.is_busy) == (0, [], [], False)
    assert months(owner, "verdict") == before


def test_a_worker_drops_what_the_owner_does_not_keep_and_no_more(owner: Engine, worker: Engine) -> None:
    an_older_month(owner)
    keep(owner, keep_months=1)
    with worker.begin() as connection:
        settle(connection, Settlement(verdicts=[rows.rejected(1, submitted_at=MONTH_BEFORE), rows.rejected(2)]))
    done = retention.maintain(worker)
    assert sorted(done.dropped) == [f"batch_{MONTH_BEFORE:%Y_%m}", f"verdict_{MONTH_BEFORE:%Y_%m}"]
    assert len(months(owner, "verdict")) == len(months(owner, "batch")) == 4
    assert not retention.maintain(worker).dropped
    with worker.connect() as connection:
        assert registry.oldest_verdict_time(connection) == LAST_MONTH
        assert connection.execute(text("select count(*) from verdict")).scalar_one() == 1


def test_a_worker_can_neither_choose_what_is_kept_nor_drop_a_month_itself(owner: Engine, worker: Engine) -> None:
    for statement in (
        "update retention set keep_months = 1",
        f"drop table verdict_{LAST_MONTH:%Y_%m}",
        f"alter table verdict detach partition verdict_{LAST_MONTH:%Y_%m}",
    ):
        with pytest.raises(ProgrammingError, match=r"permission denied|must be owner"), worker.begin() as connection:
            connection.execute(text(statement))


@pytest.mark.parametrize("state", ["planning", "running", "finishing", "done"])
def test_a_month_stays_while_a_run_that_is_not_over_has_pairs_in_it(owner: Engine, worker: Engine, state: str) -> None:
    an_older_month(owner)
    keep(owner, keep_months=1)
    with owner.begin() as connection:
        connection.execute(
            text(
                "insert into run (id, kind, source, name, lane, submitted_at, state)"
                " values (:id, 'submit', 's', 'n', 'bulk', :at, :state)"
            ),
            {"id": uuid4(), "at": MONTH_BEFORE + timedelta(days=3), "state": state},
        )
    done = retention.maintain(worker)
    month = f"verdict_{MONTH_BEFORE:%Y_%m}"
    assert done.needed == ([] if state == "done" else [month])
    assert (month in done.dropped) == (state == "done")
    assert f"batch_{MONTH_BEFORE:%Y_%m}" in done.dropped


def test_a_month_that_is_being_read_is_dropped_next_time(owner: Engine, worker: Engine) -> None:
    an_older_month(owner)
    keep(owner, keep_months=1)
    with owner.connect() as reader:
        reader.execute(text("select count(*) from verdict"))
        done = retention.maintain(worker)
    assert done.is_busy
    done = retention.maintain(worker)
    assert not done.is_busy
    assert f"verdict_{MONTH_BEFORE:%Y_%m}" in done.dropped


def test_a_detachment_that_was_broken_off_is_ended(owner: Engine, worker: Engine, database: Database) -> None:
    an_older_month(owner)
    keep(owner, keep_months=1)
    month = f"verdict_{MONTH_BEFORE:%Y_%m}"
    own = create_engine(database.owner_url, isolation_level="AUTOCOMMIT")
    with owner.connect() as reader, own.connect() as connection:
        reader.execute(text("select count(*) from verdict"))
        connection.execute(text("set lock_timeout = '100ms'"))
        connection.execute(text("set statement_timeout = '300ms'"))
        with pytest.raises(Exception, match="timeout"):
            connection.execute(text(f"alter table verdict detach partition {month} concurrently"))
    own.dispose()
    with owner.connect() as connection:
        pending = text("select count(*) from pg_inherits where inhdetachpending")
        assert connection.execute(pending).scalar_one() == 1
    assert month in retention.maintain(worker).dropped


def test_other_tables_that_were_attached_are_left_alone(owner: Engine, worker: Engine) -> None:
    keep(owner, keep_months=1)
    with owner.begin() as connection:
        connection.execute(
            text("create table verdict_archive partition of verdict for values from ('2020-01-01') to ('2021-01-01')")
        )
    assert retention.maintain(worker).dropped == []
    assert "verdict_archive" in months(owner, "verdict")


def test_old_rejected_messages_and_runs_that_are_over_are_deleted(owner: Engine, worker: Engine) -> None:
    with owner.begin() as connection:
        outbox.record_rejected(connection, [Rejected("live", "not_json", "x", body) for body in (b"1", b"2")])
        connection.execute(text("update rejected_message set received_at = now() - interval '9 days' where body = '1'"))
        for state, age in (("done", 9), ("done", 1), ("running", 9)):
            connection.execute(
                text(
                    "insert into run (id, kind, source, name, lane, submitted_at, state, created_at) values"
                    " (:id, 'submit', 's', :state, 'bulk', now(), :state, now() - :age * interval '1 day')"
                ),
                {"id": uuid4(), "state": state, "age": age},
            )
    assert retention.maintain(worker).forgotten == {"rejected_message": 0, "run": 0}
    keep(owner, rejected_days=8, run_days=8)
    assert retention.maintain(worker).forgotten == {"rejected_message": 1, "run": 1}
    with owner.connect() as connection:
        assert list(connection.execute(text("select state from run order by state")).scalars()) == ["done", "running"]


def test_a_cancelled_night_takes_along_what_it_kept_back(owner: Engine, worker: Engine) -> None:
    with owner.begin() as connection:
        night = nights.open_night(connection, uuid4(), source="shop", name="shop", lane="bulk", options={})
        assert night is not None
        kept_back = rows.message()
        outbox.add(connection, [kept_back, rows.message()])
        named = {"run_id": night.id, "id": kept_back.message_id}
        connection.execute(text("update outbox set run_id = :run_id where message_id = :id"), named)
        connection.execute(text("insert into catalog_object values (:id, 's3://shop/1.jpg', 'e')"), {"id": night.id})
        assert nights.cancel(connection, night.id)
        connection.execute(text("update run set finished_at = now() - interval '9 days'"))
    keep(owner, run_days=8)
    assert retention.maintain(worker).forgotten["run"] == 1
    with owner.connect() as connection:
        assert list(connection.execute(text("select run_id from outbox")).scalars()) == [None]
        assert connection.execute(text("select count(*) from catalog_object")).scalar_one() == 0


def test_two_who_drop_the_same_month_do_not_trip_over_each_other(owner: Engine, worker: Engine) -> None:
    an_older_month(owner)
    keep(owner, keep_months=1)
    dropping = text("select drop_expired_month()")
    waiting = text("select count(*) from pg_locks where not granted")
    with owner.connect() as first, owner.connect() as watching, ThreadPoolExecutor(1) as pool:
        first.execute(dropping)
        second = pool.submit(retention.drop_months, worker)
        eventually(lambda: watching.execute(waiting).scalar_one(), "the second waits for the first")
        first.commit()
        dropped, is_busy = second.result()
    assert not is_busy
    assert len(dropped) == 1


def test_pages_are_deleted_until_none_is_left(owner: Engine) -> None:
    with owner.begin() as connection:
        outbox.record_rejected(connection, [Rejected("live", "not_json", "x", str(n).encode()) for n in range(5)])
        connection.execute(text("update rejected_message set received_at = now() - interval '9 days'"))
        retention.change(connection, Retention(rejected_days=1))
        page = connection.execute(text("select gone from forget_expired_rows(2)")).scalars()
        assert list(page) == [2, 0]
    assert retention.forget_rows(owner)["rejected_message"] == 3


def test_months_ahead_are_made_for_verdicts_and_batches(owner: Engine, worker: Engine) -> None:
    with owner.begin() as connection:
        newest = {parent: months(owner, parent)[-1] for parent in ("verdict", "batch")}
        for month in newest.values():
            connection.execute(text(f"drop table {month}"))
    assert retention.maintain(worker).made == 2
    assert {parent: months(owner, parent)[-1] for parent in newest} == newest
