"""The index by which equal content finds its verdict, and words about it.

Safety: months are indexed one by one and without a lock, which takes a second or two for a million rows and keeps
nobody waiting; `verdict` itself, which holds no rows, is locked against writes for a moment, and the migration gives up
after 5 seconds if it cannot be. Each build first waits for the transactions that are open at that time. What was cut
short is taken up by the next upgrade. The code of the version before runs on it.
"""

from pathlib import Path

from alembic import op
from sqlalchemy import Connection, text

revision = "0007"
down_revision = "0006"

ON = (
    "(content_hash, submitted_at) where content_hash is not null and status = 'judged' and not ('reused' = any (flags))"
)

#: A month without its part of the index, and what an earlier try left there: nothing, a half, or all but the attaching.
LACKING = """
select m.inhrelid::regclass::text as month, quote_ident(c.relname || '_content_hash') as part, i.indisvalid as built
from pg_inherits as m
join pg_class as c on c.oid = m.inhrelid
left join (pg_class as p join pg_index as i on i.indexrelid = p.oid)
    on i.indrelid = c.oid and p.relname = c.relname || '_content_hash'
where m.inhparent = 'verdict'::regclass and not exists (
    select from pg_index as own join pg_inherits as a on a.inhrelid = own.indexrelid
    where own.indrelid = c.oid and a.inhparent = 'verdict_content_hash'::regclass)
order by c.relname desc limit 1
"""


def upgrade() -> None:
    connection = op.get_bind()
    with op.get_context().autocommit_block():
        index_months(connection)
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})


def index_months(connection: Connection) -> None:
    """Months that are made from here on get the index from their parent."""
    connection.execute(text(f"create index if not exists verdict_content_hash on only verdict {ON}"))
    while lacking := connection.execute(text(LACKING)).first():
        if lacking.built is False:
            connection.execute(text(f"drop index concurrently {lacking.part}"))
        if not lacking.built:
            build(connection, f"create index concurrently {lacking.part} on {lacking.month} {ON}")
        connection.execute(text(f"alter index verdict_content_hash attach partition {lacking.part}"))


def build(connection: Connection, statement: str) -> None:
    """It waits for others' transactions to end, and nobody waits for it meanwhile."""
    limits = ("lock_timeout", "statement_timeout")
    before = {name: connection.execute(text(f"show {name}")).scalar_one() for name in limits}
    try:
        for name in limits:
            connection.execute(text(f"set {name} = 0"))
        connection.execute(text(statement))
    finally:
        for name in limits:
            connection.execute(text(f"set {name} = '{before[name]}'"))
