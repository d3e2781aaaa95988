"""What each login may do: workers write verdicts and settle the outbox, producers hand over and read nothing."""

import secrets
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import ProgrammingError

from db import outbox
from db.engine import make_engine
from db.outbox import OutboxRow
from tests.conftest import Database, _database

INSUFFICIENT_PRIVILEGE = "42501"


@pytest.fixture(scope="module")
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """One for all tests here, since they leave nothing in it that another would see."""
    yield from _database(stack, _migrated)


@pytest.fixture(scope="module")
def worker(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def producer(database: Database) -> Iterator[Engine]:
    """A login that is granted `concord_producer` alone."""
    login, password = f"shop_{secrets.token_hex(4)}", secrets.token_hex(16)
    owner = create_engine(database.owner_url, isolation_level="AUTOCOMMIT")
    try:
        with owner.connect() as connection:
            connection.execute(text(f"create role {login} login password '{password}'"))
            connection.execute(text(f"grant concord_producer to {login}"))
        engine = make_engine(make_url(database.url).set(username=login, password=password).render_as_string(False))
        yield engine
        engine.dispose()
        with owner.connect() as connection:
            connection.execute(text(f"drop role {login}"))
    finally:
        owner.dispose()


@pytest.fixture(autouse=True)
def empty_outbox(worker: Engine) -> Iterator[None]:
    yield
    with worker.begin() as connection:
        connection.execute(text("delete from outbox"))


def refused(engine: Engine, statement: str) -> Any:
    with pytest.raises(ProgrammingError) as caught, engine.begin() as connection:
        connection.execute(text(statement))
    return getattr(caught.value.orig, "sqlstate", None)


@pytest.mark.parametrize(
    "statement",
    [
        "create table mine (id int)",
        "create schema mine",
        "drop table verdict",
        "alter table outbox add column colour text",
        "create index on verdict (ref)",
        "truncate outbox",
        "delete from verdict",
        "delete from run",
        "delete from rejected_message",
        "update rejected_message set error_code = ''",
        "update policy set review_at = 1",
        "insert into policy (name, version, polarity) values ('catalog', 2, 'should_hold')",
        "insert into relay_lease values (2, 'me', now())",
        "update alembic_version set version_num = 'x'",
        "create or replace function decide(text, float8, float8, float8, float8, text[]) "
        "returns text language sql as $$ select 'accept' $$",
        "drop function enqueue(jsonb, text)",
        "set role concord_owner",
    ],
)
def test_a_worker_can_neither_change_the_tables_nor_erase_verdicts_nor_make_rules(
    worker: Engine, statement: str
) -> None:
    assert refused(worker, statement) == INSUFFICIENT_PRIVILEGE


def test_a_worker_can_make_the_months_ahead(worker: Engine) -> None:
    with worker.begin() as connection:
        assert connection.execute(text("select make_verdict_partitions(4)")).scalar_one() == 2


def test_a_producer_can_enqueue(producer: Engine, worker: Engine) -> None:
    with producer.begin() as connection:
        made = connection.execute(text("""select enqueue('{"image": "s3://b/k", "text": "t"}')""")).scalar_one()
    assert isinstance(made, UUID)
    with worker.connect() as connection:
        assert connection.execute(text("select count(*) from outbox")).scalar_one() == 1


def test_a_producer_can_write_to_the_outbox_as_submit_does(producer: Engine, worker: Engine) -> None:
    with producer.begin() as connection:
        assert outbox.add(connection, [OutboxRow(uuid4(), "bulk", {})]) == 1
    with worker.connect() as connection:
        assert connection.execute(text("select count(*) from outbox")).scalar_one() == 1


@pytest.mark.parametrize(
    "statement",
    [
        *(
            f"select * from {table}"
            for table in ("verdict", "outbox", "run", "policy", "model_version", "rejected_message", "relay_lease")
        ),
        "select body from outbox",
        "update outbox set lane = 'live'",
        "delete from outbox",
        "select make_verdict_partitions()",
        "create table mine (id int)",
        "set role concord_worker",
    ],
)
def test_a_producer_can_do_nothing_else(producer: Engine, statement: str) -> None:
    assert refused(producer, statement) == INSUFFICIENT_PRIVILEGE


def test_a_temporary_table_does_not_stand_in_for_the_outbox(producer: Engine, worker: Engine) -> None:
    """Else its triggers would run with the owner's rights."""
    with producer.begin() as connection:
        connection.execute(
            text("create temporary table outbox (message_id uuid, lane text, body bytea) on commit drop")
        )
        connection.execute(text("grant all on pg_temp.outbox to public"))
        connection.execute(text("""select enqueue('{"image": "s3://b/k", "text": "t"}')"""))
        assert connection.execute(text("select count(*) from pg_temp.outbox")).scalar_one() == 0
    with worker.connect() as connection:
        assert connection.execute(text("select count(*) from outbox")).scalar_one() == 1


def test_a_login_without_a_role_cannot_even_enqueue(database: Database) -> None:
    owner = create_engine(database.owner_url)
    with owner.connect() as connection:
        granted = text("select has_function_privilege('public', 'enqueue(jsonb, text)', 'execute')")
        assert connection.execute(granted).scalar_one() is False
    owner.dispose()
