"""What an analyst's login may do: read schema `report`, and nothing else."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import ProgrammingError

from db.engine import make_engine
from db.reports import REPORTS
from db.tables import METADATA
from tests.conftest import Database, _database

INSUFFICIENT_PRIVILEGE = "42501"


@pytest.fixture(scope="module")
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """One for all tests here, since they leave nothing in it that another would see."""
    yield from _database(stack, _migrated)


@pytest.fixture(scope="module")
def owner(database: Database) -> Iterator[Connection]:
    engine = create_engine(database.owner_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture(scope="module")
def reader(database: Database, owner: Connection) -> Iterator[Engine]:
    """A login that is granted `concord_reader` alone."""
    login, password = f"analyst_{secrets.token_hex(4)}", secrets.token_hex(16)
    owner.execute(text(f"create role {login} login password '{password}'"))
    owner.execute(text(f"grant concord_reader to {login}"))
    engine = make_engine(make_url(database.url).set(username=login, password=password).render_as_string(False))
    yield engine
    engine.dispose()
    owner.execute(text(f"drop role {login}"))


@pytest.mark.parametrize("name", REPORTS)
def test_a_reader_reads_every_view(reader: Engine, name: str) -> None:
    with reader.connect() as connection:
        connection.execute(text(f"select * from report.{name} limit 1")).all()


def test_a_reader_reads_them_whatever_its_search_path(reader: Engine) -> None:
    with reader.connect() as connection:
        connection.execute(text("set search_path = report"))
        for name in REPORTS:
            connection.execute(text(f"select * from {name} limit 1")).all()


def test_a_reader_has_a_rates_error_bars(reader: Engine) -> None:
    with reader.connect() as connection:
        bounds = connection.execute(text("select report.wilson_low(1, 10), report.wilson_high(1, 10)")).one()
    assert 0 < bounds[0] < 0.1 < bounds[1] < 1


@pytest.mark.parametrize(
    "statement",
    [
        *(f"select * from {table}" for table in (*sorted(METADATA.tables), "alembic_version")),
        "select * from calendar_day",
        "select * from expired_month",
        "select text from verdict",
        "insert into verdict (submitted_at, pair_id) values (now(), gen_random_uuid())",
        "update report.dead_letters set text = ''",
        "delete from report.dead_letters",
        "create table mine (id int)",
        "create table report.mine (id int)",
        "create view report.mine as select 1",
        "create or replace view report.mismatches as select 1",
        "drop view report.mismatches",
        """select enqueue('{"image": "s3://b/k", "text": "t"}')""",
        "select make_partitions()",
        "select drop_expired_month()",
        "select * from forget_expired_rows()",
        "set role concord_worker",
        "set role concord_owner",
        "select * from pg_authid",
        "select * from pg_shadow",
        "select * from pg_hba_file_rules",
        "select * from pg_largeobject",
        "select pg_read_file('postgresql.conf')",
        "copy report.mismatches to program 'cat'",
        "copy report.mismatches to '/tmp/x'",
    ],
)
def test_a_reader_can_do_nothing_else(reader: Engine, statement: str) -> None:
    with pytest.raises(ProgrammingError) as caught, reader.begin() as connection:
        connection.execute(text(statement))
    assert getattr(caught.value.orig, "sqlstate", None) == INSUFFICIENT_PRIVILEGE


def test_a_months_table_cannot_be_read_past_its_parent(reader: Engine, owner: Connection) -> None:
    months = owner.execute(
        text("select inhrelid::regclass::text from pg_inherits where inhparent = 'verdict'::regclass")
    )
    for month in months.scalars():
        with pytest.raises(ProgrammingError, match="permission denied"), reader.begin() as connection:
            connection.execute(text(f"select * from {month}"))


def test_the_role_has_no_rights_outside_report_but_those_of_everybody(owner: Connection) -> None:
    granted = owner.execute(
        text(
            "select relnamespace::regnamespace::text as schema, relname from pg_class, aclexplode(relacl) as one"
            " where one.grantee = 'concord_reader'::regrole"
        )
    ).all()
    assert {row.schema for row in granted} == {"report"}
