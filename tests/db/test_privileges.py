"""What each login may do: workers write verdicts and settle the outbox, producers hand over and read nothing."""

import re
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
from db.reports import REPORTS
from infra.local.postgres import APP
from tests.conftest import Database, _database

INSUFFICIENT_PRIVILEGE = "42501"

#: What each role may do with each table, view and sequence. One that is new fails the test until it is decided here;
#: so does a right that nobody decided.
RELATIONS: dict[str, dict[str, set[str]]] = {
    "verdict": {"concord_worker": {"select", "insert", "update"}},
    "rejected_message": {"concord_worker": {"select", "insert"}},
    "outbox": {
        "concord_worker": {"select", "insert", "update", "delete"},
        "concord_producer": {"insert", "select (message_id)"},
    },
    "run": {"concord_worker": {"select", "insert", "update"}},
    "model_version": {"concord_worker": {"select", "insert", "update"}},
    "relay_lease": {"concord_worker": {"select", "update"}},
    "policy": {"concord_worker": {"select"}},
    "alembic_version": {"concord_worker": {"select"}},
    "suspect": {"concord_worker": {"select", "insert", "update", "delete"}},
    "model_version_id_seq": {},
    "rejected_message_id_seq": {},
    "batch": {"concord_worker": {"select", "insert"}},
    "retention": {"concord_worker": {"select"}},
    "expired_month": {"concord_worker": {"select"}},
    "calendar_day": {},
    "calendar_hour": {},
    "catalog_item": {"concord_worker": {"select"}},
    "catalog_state": {"concord_worker": {"select", "insert", "update", "delete"}},
    "catalog_object": {"concord_worker": {"select", "insert", "update", "delete"}},
    **{f"report.{name}": {"concord_reader": {"select"}, "concord_worker": {"select"}} for name in REPORTS},
}
#: Who may call each function.
FUNCTIONS: dict[str, set[str]] = {
    "decide": {"public"},
    "new_uuid7": {"public"},
    "oldest_verdict_time": {"public"},
    "enqueue": {"concord_worker", "concord_producer"},
    "make_verdict_partitions": {"concord_worker"},
    "make_partitions": {"concord_worker"},
    "drop_expired_month": {"concord_worker"},
    "forget_expired_rows": {"concord_worker"},
    "report.wilson_low": {"concord_reader", "concord_worker"},
    "report.wilson_high": {"concord_reader", "concord_worker"},
}
#: Who may look into each schema. `public` is the one that the tables are in here.
SCHEMAS: dict[str, set[str]] = {"public": {"public"}, "report": {"concord_reader", "concord_worker"}}

RIGHTS_ON_RELATIONS = """
with granted as (
    select oid as relation, relowner as owner, acl.grantee, acl.privilege_type, acl.is_grantable, null::name as col
    from pg_class, aclexplode(relacl) as acl
    union all
    select c.oid, c.relowner, acl.grantee, acl.privilege_type, acl.is_grantable, a.attname
    from pg_class c join pg_attribute a on a.attrelid = c.oid, aclexplode(a.attacl) as acl
)
select case n.nspname when current_schema() then '' else n.nspname || '.' end || c.relname as relation,
       c.relispartition,
       case g.grantee when 0 then 'public' else g.grantee::regrole::text end as role,
       lower(g.privilege_type) || coalesce(' (' || g.col || ')', '')
           || case when g.is_grantable then ' and grant' else '' end as may
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
left join granted g on g.relation = c.oid and g.grantee <> g.owner
where n.nspname !~ '^(pg_|information_schema$)' and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
"""
RIGHTS_ON_FUNCTIONS = """
select case n.nspname when current_schema() then '' else n.nspname || '.' end || p.proname as function,
       case acl.grantee when 0 then 'public' else acl.grantee::regrole::text end as role
from pg_proc p
join pg_namespace n on n.oid = p.pronamespace
left join aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as acl on acl.grantee <> p.proowner
where n.nspname !~ '^(pg_|information_schema$)'
"""
RIGHTS_ON_SCHEMAS = """
select n.nspname, case acl.grantee when 0 then 'public' else acl.grantee::regrole::text end as role,
       lower(acl.privilege_type) as may
from pg_namespace n
left join aclexplode(n.nspacl) as acl on acl.grantee <> n.nspowner
where n.nspname !~ '^(pg_|information_schema$)'
"""
#: Functions that run with the owner's rights, and where they look for what they name.
WITH_THE_OWNERS_RIGHTS = """
select p.proname, array_to_string(p.proconfig, '; ') as config
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where p.prosecdef and n.nspname !~ '^(pg_|information_schema$)'
"""
#: What would make a role more than its grants: attributes, and other roles that it is a member of.
POWERS = """
select rolname, rolsuper or rolcreaterole or rolcreatedb or rolreplication or rolbypassrls as powerful, rolcanlogin,
       array(select roleid::regrole::text from pg_auth_members where member = r.oid) as member_of,
       (select bool_or(admin_option) from pg_auth_members where member = r.oid) as may_grant
from pg_roles r where rolname = any(:names)
"""


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
    with pytest.raises(ProgrammingError) as caught, engine.connect() as connection:
        # Some statements refuse to be part of a transaction before they look at who is asking.
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text(statement))
    return getattr(caught.value.orig, "sqlstate", None)


def rows(database: Database, statement: str, **parameters: Any) -> list[Any]:
    """The answer as the owner sees it."""
    engine = create_engine(database.owner_url)
    with engine.connect() as connection:
        found = list(connection.execute(text(statement), parameters))
    engine.dispose()
    return found


def test_every_table_and_view_has_the_rights_that_were_decided_and_no_others(database: Database) -> None:
    found: dict[str, dict[str, set[str]]] = {}
    for row in rows(database, RIGHTS_ON_RELATIONS):
        if row.relispartition:
            assert row.role is None, f"{row.relation}: verdicts are reached by way of verdict alone"
            continue
        rights = found.setdefault(row.relation, {})
        if row.role:
            rights.setdefault(row.role, set()).add(row.may)
    assert found == RELATIONS


def test_every_function_is_called_by_those_that_were_decided_and_no_others(database: Database) -> None:
    found: dict[str, set[str]] = {}
    for row in rows(database, RIGHTS_ON_FUNCTIONS):
        found.setdefault(row.function, set()).update({row.role} - {None})
    assert found == FUNCTIONS


def test_a_function_with_the_owners_rights_looks_last_at_what_its_caller_can_make(database: Database) -> None:
    """Unnamed, the schema of temporary tables would come first."""
    found = rows(database, WITH_THE_OWNERS_RIGHTS)
    assert "enqueue" in {row.proname for row in found}
    assert [row for row in found if not re.search(r"search_path=[^;]*, pg_temp(;|$)", row.config or "")] == []


def test_every_schema_is_open_to_those_that_were_decided_and_nobody_makes_things_in_it(database: Database) -> None:
    found: dict[str, set[str]] = {}
    for row in rows(database, RIGHTS_ON_SCHEMAS):
        schema = found.setdefault(row.nspname, set())
        if row.role:
            assert row.may == "usage", f"{row.role} may {row.may} in {row.nspname}"
            schema.add(row.role)
    assert found == SCHEMAS


def test_what_the_owner_makes_later_is_nobodys(database: Database) -> None:
    """Else a table of the shop's own, in the same database, would be open to workers."""
    assert rows(database, "select * from pg_default_acl") == []


def test_the_roles_have_no_power_beside_their_grants(database: Database) -> None:
    names = [APP, "concord_worker", "concord_producer", "concord_reader"]
    found = {row.rolname: row for row in rows(database, POWERS, names=names)}
    assert [row.rolname for row in found.values() if row.powerful or row.may_grant] == []
    assert {name: set(row.member_of) for name, row in found.items()} == {
        APP: {"concord_worker"},
        "concord_worker": set(),
        "concord_producer": set(),
        "concord_reader": set(),
    }
    assert [name for name, row in found.items() if row.rolcanlogin] == [APP]


#: What neither may, whatever else it is granted: other schemas, other roles, the server's files and settings.
OUT_OF_BOUNDS = (
    "select * from other.secret",
    "insert into other.secret values ('x')",
    "create table other.mine (id int)",
    "select * from ajar.secret",
    "alter table ajar.secret add column colour text",
    "drop table ajar.secret",
    "drop schema other",
    "create schema mine",
    "create table mine (id int)",
    "create view mine as select 1",
    "create function mine() returns int language sql as 'select 1'",
    "create trigger mine before insert on outbox for each row execute function suppress_redundant_updates_trigger()",
    "create rule mine as on insert to outbox do nothing",
    "create publication mine for all tables",
    "create foreign data wrapper mine",
    "comment on table outbox is 'mine'",
    "alter table verdict disable trigger all",
    "set role concord_owner",
    "set session authorization concord_owner",
    "set role postgres",
    "grant concord_owner to current_user",
    "grant pg_read_all_data to current_user",
    "alter role current_user createrole",
    "create role mine",
    "select * from pg_authid",
    "alter system set log_statement = 'all'",
    "set session_replication_role = replica",
    "set log_statement = 'none'",
    "select pg_reload_conf()",
    "select pg_read_file('/etc/hostname')",
    "select pg_read_binary_file('postgresql.conf')",
    "select * from pg_ls_dir('.')",
    "select lo_import('/etc/hostname')",
    "copy (select 1) to '/tmp/concord-mine'",
    "copy (select 1) to program 'cat'",
    "copy outbox (body) from program 'true'",
)


@pytest.fixture(scope="module")
def other_schemas(database: Database) -> Iterator[None]:
    """Tables of somebody else's, made by the owner: one in a closed schema, one in a schema that all may look into."""
    owner = create_engine(database.owner_url, isolation_level="AUTOCOMMIT")
    with owner.connect() as connection:
        for schema in ("other", "ajar"):
            connection.execute(text(f"create schema {schema}"))
            connection.execute(text(f"create table {schema}.secret (word text)"))
        connection.execute(text("grant usage on schema ajar to public"))
        yield
        connection.execute(text("drop schema other, ajar cascade"))
    owner.dispose()


@pytest.mark.usefixtures("other_schemas")
@pytest.mark.parametrize("statement", OUT_OF_BOUNDS)
@pytest.mark.parametrize("login", ["worker", "producer"])
def test_neither_reaches_what_is_not_the_lines_own(login: str, statement: str, request: pytest.FixtureRequest) -> None:
    assert refused(request.getfixturevalue(login), statement) == INSUFFICIENT_PRIVILEGE


@pytest.mark.parametrize("login", ["worker", "producer"])
def test_neither_ends_or_sees_the_statements_of_the_owner(
    login: str, database: Database, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(login)
    owner = create_engine(database.owner_url)
    with owner.connect() as connection:
        pid = connection.execute(text("select pg_backend_pid() /* between us */")).scalar_one()
        assert refused(engine, f"select pg_terminate_backend({pid})") == INSUFFICIENT_PRIVILEGE
        assert refused(engine, f"select pg_cancel_backend({pid})") == INSUFFICIENT_PRIVILEGE
        with engine.connect() as own:
            seen = own.execute(text(f"select query from pg_stat_activity where pid = {pid}")).scalar_one()
        assert "between us" not in seen
    owner.dispose()


@pytest.mark.parametrize(
    "statement",
    [
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
    ],
)
def test_a_worker_can_neither_change_the_tables_nor_erase_verdicts_nor_make_rules(
    worker: Engine, statement: str
) -> None:
    assert refused(worker, statement) == INSUFFICIENT_PRIVILEGE


def test_a_worker_can_make_the_months_ahead(worker: Engine) -> None:
    with worker.begin() as connection:
        assert connection.execute(text("select make_verdict_partitions(4)")).scalar_one() == 4


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
