"""What docs/deploy.md says about upgrading a large installation: its indexes are built beforehand, and found."""

import re
from pathlib import Path

from alembic import command
from sqlalchemy import Connection, create_engine, text

from db.migrations import alembic_config, upgrade
from tests.conftest import Database
from tests.db import rows

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


def indexes(connection: Connection) -> dict[str, tuple[bool, int]]:
    return {row.name: (row.valid, row.months) for row in connection.execute(text(INDEXES))}


def test_indexes_that_were_built_beforehand_are_found(empty_database: Database) -> None:
    engine = create_engine(empty_database.owner_url, isolation_level="AUTOCOMMIT")
    config = alembic_config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        found = text("select inhrelid::regclass::text from pg_inherits where inhparent = 'verdict'::regclass")
        months = list(connection.execute(found).scalars())
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
