"""What docs/deploy.md says about upgrading a large installation: indexes that were built beforehand are found, and
another is built month by month without a lock, and taken up where that was cut short.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError

from db import originals, verdicts
from db.migrations import alembic_config, upgrade
from tests.conftest import Database
from tests.db import rows
from tests.line.site import eventually

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"

INDEXES = """
select i.indexrelid::regclass::text as name, i.indisvalid as valid,
       (select count(*) from pg_inherits where inhparent = i.indexrelid) as months
from pg_index as i where i.indrelid = 'verdict'::regclass
"""


def statements() -> list[str]:
    """The paper's own, in their order, without the last, which only looks."""
    (block,) = re.findall(r"### A large `verdict`.*?```sql\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    bare = re.sub(r"^--.*\n", "", block, flags=re.MULTILINE)
    return [statement.strip() for statement in bare.split(";") if statement.strip()][:-1]


def months_of_verdict(connection: Connection) -> Sequence[str]:
    found = text("select inhrelid::regclass::text from pg_inherits where inhparent = 'verdict'::regclass order by 1")
    return connection.execute(found).scalars().all()


def indexes(connection: Connection) -> dict[str, tuple[bool, int]]:
    return {row.name: (row.valid, row.months) for row in connection.execute(text(INDEXES))}


def test_indexes_that_were_built_beforehand_are_found(empty_database: Database) -> None:
    engine = create_engine(empty_database.owner_url, isolation_level="AUTOCOMMIT")
    config = alembic_config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        months = months_of_verdict(connection)
        for statement in statements():
            for month in months if "2026_01" in statement else [""]:
                connection.execute(text(statement.replace("verdict_2026_01", month)))
        built = indexes(connection)
        assert built["verdict_source_ref_time"] == built["verdict_failed"] == (True, len(months))
        before = connection.execute(text("select 'verdict_failed'::regclass::oid")).scalar_one()
    upgrade(empty_database.owner_url)
    with engine.connect() as connection:
        assert connection.execute(text("select 'verdict_failed'::regclass::oid")).scalar_one() == before
        after = indexes(connection)
        assert after.pop("verdict_content_hash") == (True, len(months))
        assert after == {name: found for name, found in built.items() if name != "verdict_source_ref"}
        this_month = f"verdict_{rows.THIS_MONTH:%Y_%m}"
        assert (
            f"{this_month}_ref_time"
            in connection.execute(
                text("select string_agg(indexname, ' ') from pg_indexes where tablename = :month"),
                {"month": this_month},
            ).scalar_one()
        )
    engine.dispose()


def test_an_index_that_was_cut_short_is_taken_up_month_by_month(empty_database: Database) -> None:
    engine = create_engine(empty_database.owner_url, isolation_level="AUTOCOMMIT")
    config = alembic_config()
    with engine.connect() as connection, engine.connect() as other:
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        first, second, *_ = months = months_of_verdict(connection)
        on = f"(content_hash, submitted_at) where {originals.IS_ORIGINAL}"
        connection.execute(text(f"create index verdict_content_hash on only verdict {on}"))
        connection.execute(text(f"create index {first}_content_hash on {first} {on}"))
        other.exec_driver_sql("begin transaction isolation level repeatable read")
        other.execute(text("select count(*) from verdict"))
        connection.execute(text("set lock_timeout = '50ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            connection.execute(text(f"create index concurrently {second}_content_hash on {second} {on}"))
        other.exec_driver_sql("commit")
        assert indexes(connection)["verdict_content_hash"] == (False, 0)
        assert not originals.is_indexed(connection)
    upgrade(empty_database.owner_url)
    with engine.connect() as connection:
        assert indexes(connection)["verdict_content_hash"] == (True, len(months))
        assert originals.is_indexed(connection)
        connection.execute(text("select make_verdict_partitions(5)"))
        assert indexes(connection)["verdict_content_hash"] == (True, len(months) + 3)
        assert originals.is_indexed(connection)
    engine.dispose()


def test_an_index_waits_for_those_who_read_and_keeps_nobody_from_writing(empty_database: Database) -> None:
    engine = create_engine(empty_database.owner_url, isolation_level="AUTOCOMMIT")
    config = alembic_config()
    with ThreadPoolExecutor(1) as pool, engine.connect() as connection, engine.connect() as reader:
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        reader.exec_driver_sql("begin transaction isolation level repeatable read")
        reader.execute(text("select count(*) from verdict"))
        upgrading = pool.submit(upgrade, empty_database.owner_url)
        phase = text("select phase from pg_stat_progress_create_index")
        eventually(lambda: connection.execute(phase).scalar() == "waiting for old snapshots", "an index being built")
        connection.execute(text("set statement_timeout = '5s'"))
        verdicts.write(connection, [rows.rejected()])
        assert not upgrading.done()
        reader.exec_driver_sql("commit")
        upgrading.result(60)
        assert originals.is_indexed(connection)
    engine.dispose()
