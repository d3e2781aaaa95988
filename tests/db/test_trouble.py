"""What an error of the database means: wait, try again, or look for the culprit."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from psycopg import errors
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from db import outbox
from db.engine import STATEMENT_TIMEOUT_S, Trouble, make_engine, trouble
from tasks.storing import persist
from tests.conftest import Database, _database
from tests.db.rows import message
from worker.errors import Hold


@pytest.fixture(scope="module")
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """One for all tests here, since they leave nothing in it that another would see."""
    yield from _database(stack, _migrated)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url, pool_size=4)
    yield engine
    engine.dispose()


def error_of(engine: Engine, *statements: str, **parameters: Any) -> SQLAlchemyError:
    try:
        with engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement), parameters)
    except SQLAlchemyError as error:
        return error
    raise AssertionError("the database did not mind")


def state_of(error: Any) -> Any:
    return getattr(error.orig, "sqlstate", None)


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("insert into policy (name, version, polarity) values ('p', 1, 'upside down')", "42501"),
        ("insert into outbox (message_id, lane, body) values (new_uuid7(), 'express', '')", "23514"),
        ("insert into verdict (submitted_at, pair_id) values ('1999-01-01', new_uuid7())", "23514"),
        ("select cast('{\"a\": \"\\u0000\"}' as jsonb)", "22P05"),
        ("insert into outbox (message_id, lane) values (new_uuid7(), 'live')", "23502"),
        ("select * from nowhere", "42P01"),
        ("update policy set review_at = 0", "42501"),
    ],
)  # fmt: skip
def test_a_refusal_of_the_data_or_the_statement_is_the_rows_own(engine: Engine, statement: str, state: str) -> None:
    error = error_of(engine, statement)
    assert (state_of(error), trouble(error)) == (state, Trouble.DATA)


def test_a_statement_that_takes_too_long_is_the_servers_trouble(engine: Engine) -> None:
    error = error_of(engine, "set local statement_timeout = '10ms'", "select pg_sleep(20)")
    assert (state_of(error), trouble(error)) == ("57014", Trouble.AWAY)


@pytest.mark.parametrize(
    ("setting", "state"), [("idle_in_transaction_session_timeout", "25P03"), ("transaction_timeout", "25P04")]
)
def test_a_transaction_that_a_frozen_process_left_open_ends_with_its_locks_and_can_be_done_again(
    engine: Engine, setting: str, state: str
) -> None:
    with engine.begin() as connection:
        outbox.add(connection, [frozen := message()])
    lock = text("select from outbox where message_id = :id for update")
    with pytest.raises(DBAPIError) as caught, engine.begin() as connection:
        connection.execute(text(f"set local {setting} = '50ms'"))
        connection.execute(lock, {"id": frozen.message_id})
        with engine.begin() as other:
            other.execute(lock, {"id": frozen.message_id})  # it waits for the other's lock, and no longer
        connection.execute(text("select 1"))
    assert (state_of(caught.value), trouble(caught.value)) == (state, Trouble.AWAY)
    with engine.begin() as connection:
        outbox.forget(connection, [(frozen.message_id, 0)])


def test_no_connection_may_leave_a_transaction_open_for_ever(engine: Engine) -> None:
    with engine.connect() as connection:
        limit = connection.execute(text("show idle_in_transaction_session_timeout")).scalar_one()
    assert limit == f"{STATEMENT_TIMEOUT_S}s"


def test_a_session_that_an_operator_ends_is_the_servers_trouble_and_the_next_one_works(engine: Engine) -> None:
    with engine.connect() as connection, engine.connect() as other:
        pid = connection.execute(text("select pg_backend_pid()")).scalar_one()
        other.execute(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises(OperationalError) as caught:
            connection.execute(text("select pg_sleep(20)"))
    assert trouble(caught.value) is Trouble.AWAY
    with engine.connect() as connection:
        assert connection.execute(text("select 1")).scalar_one() == 1


def test_a_server_that_does_not_listen_is_away(database: Database) -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        engine = make_engine(make_url(database.url).set(port=bound.getsockname()[1]).render_as_string(False))
        assert trouble(error_of(engine, "select 1")) is Trouble.AWAY
        engine.dispose()


def test_of_two_transactions_that_wait_for_each_other_one_may_try_again(engine: Engine) -> None:
    first, second = message(), message()
    with engine.begin() as connection:
        outbox.add(connection, [first, second])
    both_hold_one = threading.Barrier(2)

    def lock(ids: list[Any]) -> SQLAlchemyError | None:
        statement = text("update outbox set last_error = 'locked' where message_id = :id")
        try:
            with engine.begin() as connection:
                connection.execute(statement, {"id": ids[0]})
                both_hold_one.wait(10)
                connection.execute(statement, {"id": ids[1]})
        except SQLAlchemyError as error:
            return error
        return None

    orders = [[first.message_id, second.message_id], [second.message_id, first.message_id]]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lock, orders))
    (error,) = [result for result in results if result is not None]
    assert (state_of(error), trouble(error)) == ("40P01", Trouble.CLASH)


@pytest.mark.parametrize(
    ("original", "meaning"),
    [
        (errors.ConnectionFailure, Trouble.AWAY),  # 08006
        (errors.TooManyConnections, Trouble.AWAY),  # 53300
        (errors.DiskFull, Trouble.AWAY),  # 53100
        (errors.AdminShutdown, Trouble.AWAY),  # 57P01
        (errors.CannotConnectNow, Trouble.AWAY),  # 57P03
        (errors.SerializationFailure, Trouble.CLASH),  # 40001
        (errors.DeadlockDetected, Trouble.CLASH),  # 40P01
        (errors.UniqueViolation, Trouble.DATA),  # 23505
        (errors.NumericValueOutOfRange, Trouble.DATA),  # 22003
    ],
)
def test_the_class_of_the_sqlstate_decides(original: type[Exception], meaning: Trouble) -> None:
    assert trouble(DBAPIError("select 1", {}, original())) is meaning


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (OperationalError("select 1", {}, Exception("connection refused")), Trouble.AWAY),
        (InterfaceError("select 1", {}, Exception("connection is closed")), Trouble.AWAY),
        (PoolTimeout("no connection is free"), Trouble.AWAY),
        (StatementError("not a parameter", "select 1", {}, TypeError()), Trouble.DATA),
        (ValueError("not the database's at all"), Trouble.DATA),
    ],
)
def test_an_error_without_a_sqlstate_is_the_connections_or_our_own(error: Exception, meaning: Trouble) -> None:
    assert trouble(error) is meaning


def fails(times: int, error: Exception, calls: list[int]) -> Any:
    def action() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "written"

    return action


AWAY = OperationalError("select 1", {}, Exception("connection refused"))
DATA = DBAPIError("select 1", {}, errors.CheckViolation())


def test_a_write_is_tried_until_the_database_is_back() -> None:
    calls: list[int] = []
    assert persist(fails(2, AWAY, calls), lambda: False) == "written"
    assert len(calls) == 3


def test_a_write_that_can_never_succeed_is_tried_once() -> None:
    calls: list[int] = []
    with pytest.raises(DBAPIError):
        persist(fails(9, DATA, calls), lambda: False)
    assert len(calls) == 1


def test_a_worker_that_is_told_to_stop_gives_the_batch_back_instead_of_waiting() -> None:
    calls: list[int] = []
    with pytest.raises(Hold, match="stops"):
        persist(fails(9, AWAY, calls), lambda: bool(calls))
    assert len(calls) == 1
