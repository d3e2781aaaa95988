"""How long rows are kept: months ahead are made, months that are too old are dropped, old side tables are emptied.

The numbers stand in the table `retention`, which only the owner changes. Workers too may ask for what
follows from them: the functions run with the owner's rights and obey the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from db import registry

#: SQLSTATEs of a lock that could not be had in time, and of a deadlock: the next maintenance succeeds.
BUSY = ("55P03", "40P01")


@dataclass(frozen=True)
class Retention:
    """The row of `retention`; None keeps for ever. `keep_months` counts months before the present one."""

    keep_months: int | None = None
    rejected_days: int | None = None
    run_days: int | None = None


@dataclass(frozen=True)
class Maintained:
    """What one maintenance did.

    `needed` are months that are old enough to go and hold pairs of a run that is not over. `is_busy` says that readers
    or writers were in the way of dropping one.
    """

    made: int
    dropped: Sequence[str]
    needed: Sequence[str]
    forgotten: Mapping[str, int]
    is_busy: bool


def read(connection: Connection) -> Retention:
    """The numbers in force."""
    row = connection.execute(text("select keep_months, rejected_days, run_days from retention")).one()
    return Retention(*row)


def change(connection: Connection, retention: Retention) -> None:
    """Put other numbers in force; the owner's right alone."""
    statement = "update retention set keep_months = :keep_months, rejected_days = :rejected_days, run_days = :run_days"
    connection.execute(text(statement), asdict(retention))


def maintain(engine: Engine) -> Maintained:
    """Make the months ahead, drop those that are not kept, empty the side tables; as often as one likes, by anybody.

    Each month and each page is a transaction of its own, so that no lock is held for long.
    """
    with engine.begin() as connection:
        made = registry.make_partitions(connection)
    dropped, is_busy = drop_months(engine)
    with engine.begin() as connection:
        needed = list(connection.execute(text("select name from expired_month where needed order by name")).scalars())
    return Maintained(made, dropped, needed, forget_rows(engine), is_busy)


def drop_months(engine: Engine) -> tuple[list[str], bool]:
    """Drop the months that are not kept, the oldest first; stops where others are in the way, and says so."""
    dropped: list[str] = []
    while True:
        try:
            with engine.begin() as connection:
                name = connection.execute(text("select drop_expired_month()")).scalar_one()
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) in BUSY:
                return dropped, True
            raise
        if name is None:
            return dropped, False
        dropped.append(name)


def forget_rows(engine: Engine) -> dict[str, int]:
    """Delete rejected messages and runs that are not kept, page by page; returns how many of each."""
    gone: dict[str, int] = {}
    while True:
        with engine.begin() as connection:
            page = {row.of_table: row.gone for row in connection.execute(text("select * from forget_expired_rows()"))}
        for table, count in page.items():
            gone[table] = gone.get(table, 0) + count
        if not any(page.values()):
            return gone
