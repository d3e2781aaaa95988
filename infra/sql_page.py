"""docs/sql.md: what in it is made by the database. `python -m infra.sql_page` writes it anew.

Between the two marks stands the data dictionary, made of the comments that the migrations gave the views and their
columns. Under each query that is followed by a block of text stands what psql printed for it on two nights of the
sample catalog (infra/demo_nights.py).
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sqlalchemy import Connection, create_engine, make_url, text

from db import reports
from db.migrations import upgrade
from infra.demo_nights import load
from infra.local.postgres import OWNER, program
from infra.local.stack import Stack

PAGE = Path(__file__).parent.parent / "docs" / "sql.md"
BEGIN = "<!-- The dictionary begins. `python -m infra.sql_page` makes it of the database's comments. -->"
END = "<!-- The dictionary ends. -->"
#: A query and what it printed.
SHOWN = re.compile(
    r"(?P<query>^```sql run\n(?P<sql>.*?)^```\n\n)(?P<output>^```text\n.*?^```$)", re.MULTILINE | re.DOTALL
)

FUNCTIONS = """
select p.oid::regprocedure::text as name, pg_get_function_result(p.oid) as type, obj_description(p.oid) as meaning
from pg_proc as p where p.pronamespace = 'report'::regnamespace order by p.proname desc
"""


def dictionary(connection: Connection) -> str:
    """Every view of schema `report` with its columns, and the functions beside them, as Markdown."""
    parts = []
    for name, purpose in reports.purposes(connection).items():
        rows = "\n".join(
            f"| `{column}` | {kind} | {meaning} |" for column, kind, meaning in reports.columns(connection, name)
        )
        parts.append(f"### {name}\n\n{purpose}\n\n| column | type | meaning |\n|---|---|---|\n{rows}\n")
    rows = "\n".join(f"| `{row.name}` | {row.type} | {row.meaning} |" for row in connection.execute(text(FUNCTIONS)))
    parts.append(f"### Functions\n\n| function | gives | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def printed(owner_url: str, sql: str) -> str:
    """What psql prints for a query."""
    url = make_url(owner_url)
    environment = {**os.environ, "PGPASSWORD": str(url.password), "PGTZ": "UTC"}
    command = [
        str(program("psql")), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-P", "pager=off",
        "-h", str(url.host), "-p", str(url.port), "-U", str(url.username), "-d", str(url.database), "-c", sql,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def renewed(page: str, owner_url: str) -> str:
    """The page with its dictionary and its outputs as this database, which holds the two nights, has them."""
    engine = create_engine(owner_url)
    with engine.connect() as connection:
        words = dictionary(connection)
    engine.dispose()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    page = f"{before}{BEGIN}\n\n{words}\n{END}{after}"
    return SHOWN.sub(lambda one: f"{one['query']}```text\n{printed(owner_url, one['sql'])}\n```", page)


def main() -> None:
    """Write the page anew, with a Postgres of its own."""
    folder = Path(tempfile.mkdtemp(prefix="concord-sql-"))
    stack = Stack(folder / ".concord")
    try:
        stack.postgres.start()
        owner_url = stack.postgres.url(OWNER)
        upgrade(owner_url)
        engine = create_engine(owner_url)
        with engine.begin() as connection:
            load(connection)
        engine.dispose()
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), owner_url), encoding="utf-8")
    finally:
        stack.postgres.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
