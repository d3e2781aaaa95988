"""Connections to Postgres, and what an error of the database means for the work in hand."""

from enum import Enum

from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

#: No statement of the line takes longer than this unless something is wrong.
STATEMENT_TIMEOUT_S = 30
CONNECT_TIMEOUT_S = 5
#: SQLSTATEs of a function, a table and a column that are not there.
NOT_UPGRADED = ("42883", "42P01", "42703")


class Trouble(Enum):
    """What to do about an error of the database."""

    AWAY = "the server is down, full or shutting down: wait, nobody's fault"
    CLASH = "a deadlock or a serialization failure: the same again succeeds"
    DATA = "this statement can never succeed: some row of it is at fault"


def make_engine(url: str, *, pool_size: int = 2, statement_timeout_s: int = STATEMENT_TIMEOUT_S) -> Engine:
    """An engine whose connections are checked before use and never wait for ever.

    A transaction that is left idle ends after the same time: a process that freezes or loses its network in the middle
    of one would keep its rows locked for hours, and with the row of a run every other batch of that run.
    """
    return create_engine(
        url,
        pool_size=pool_size,
        max_overflow=2,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "options": f"-c statement_timeout={statement_timeout_s * 1000} -c timezone=UTC"
            f" -c idle_in_transaction_session_timeout={statement_timeout_s * 1000}",
            "application_name": "concord",
        },
    )


def is_outdated(error: Exception) -> bool:
    """Whether the database lacks a table, a column or a function that this version needs."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) in NOT_UPGRADED


def trouble(error: Exception) -> Trouble:
    """Sort an error by its SQLSTATE: classes 08, 53, 57 are the server's, 40 is the neighbour's, the rest the row's."""
    if isinstance(error, PoolTimeout):
        return Trouble.AWAY
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if state is None:
        gone = isinstance(error, DBAPIError) and (
            error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
        )
        return Trouble.AWAY if gone else Trouble.DATA
    # 25006: the server is read only, as after a failover. 25P03, 25P04: it has ended a transaction that took too long.
    # 55: somebody holds a lock. 58: its disk fails.
    if state[:2] in ("08", "53", "55", "57", "58") or state in ("25006", "25P03", "25P04"):
        return Trouble.AWAY
    if state[:2] == "40":
        return Trouble.CLASH
    return Trouble.DATA
