"""A customer's catalog in Postgres, read in short pages by the key: no cursor or transaction outlasts one."""

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from threading import Timer
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

CONNECT_TIMEOUT_S = 10
#: A server that keeps to the statement's time has answered by then; one that is frozen never does.
ANSWER_LIMIT_S = 30.0
REQUIRED = ("ref", "image", "text")
#: A URL of which libpq takes the same for the password as its writer: else it would name a part of it as the host.
PLAIN_URL = re.compile(r"postgres(ql)?://([^@/?#]*@)?[^@]*")


class SourceAway(Exception):
    """The catalog's database does not answer at present."""


class SourceBroken(Exception):
    """The catalog cannot be read as it is configured."""


@dataclass(frozen=True)
class SqlPage:
    """Rows as (ref, the whole row as JSON); `repeats` more have the last page's last ref, and are not among them."""

    rows: list[tuple[str, dict[str, Any]]]
    repeats: int
    is_last: bool


@dataclass(frozen=True)
class SqlSource:
    """A query, or the name of a table of `catalog_item`'s shape with the source that is looked for in it."""

    dsn: str
    query: str | None = None
    table: str | None = None
    source: str = ""
    timeout_s: int = 60

    def check(self) -> None:
        """See that the query runs and yields what is needed. Raises SourceAway and SourceBroken."""
        statement = sql.SQL("select * from {} q limit 0").format(self._rows())
        with Reading(self) as connection:
            names = [column.name for column in run(connection, statement).description or ()]
        if missing := [name for name in REQUIRED if name not in names]:
            raise SourceBroken(f"the query yields no column {', '.join(missing)}; it yields {', '.join(names)}")

    def page(self, after: str | None, seen: int, limit: int) -> SqlPage:
        """Up to `limit` rows after the `seen` ones whose ref is `after`, in the order that the ref's type has.

        Raises SourceAway and SourceBroken.
        """
        if after is not None and seen >= limit:
            # So many of one ref that reading past them would be no page any more.
            repeats, compared, seen = self._count("q.ref = {}", after) - seen, "and q.ref > {}", 0
        else:
            # The last ref is asked for again: rows that share it may stand on both sides of a page's end.
            repeats, compared = 0, "and q.ref >= {}"
        # The whole row becomes JSON only after the limit.
        statement = sql.SQL(
            """select p.ref::text, to_jsonb(p) from (
                 select * from {} q where q.ref is not null {} order by q.ref limit {}) p order by p.ref"""
        ).format(
            self._rows(),
            sql.SQL("") if after is None else sql.SQL(compared).format(sql.Literal(after)),
            sql.Literal(limit + seen),
        )
        with Reading(self) as connection:
            rows = run(connection, statement).fetchall()
        same = sum(1 for ref, _ in rows if ref == after)
        found = [(ref, row) for ref, row in rows if ref != after]
        return SqlPage(found, max(0, repeats + same - seen), is_last=len(rows) < limit + seen)

    def nameless(self) -> int:
        """How many rows have no ref. Raises SourceAway and SourceBroken."""
        return self._count("q.ref is null")

    def _count(self, condition: str, *values: str) -> int:
        where = sql.SQL(condition).format(*map(sql.Literal, values))
        statement = sql.SQL("select count(*) from {} q where {}").format(self._rows(), where)
        with Reading(self) as connection:
            (count,) = run(connection, statement).fetchone() or (0,)
        return int(count)

    def _rows(self) -> sql.Composable:
        if self.table:
            name = sql.Identifier(*self.table.split("."))
            return sql.SQL("(select * from {} where source = {})").format(name, sql.Literal(self.source))
        # A comment at its end must not swallow the bracket.
        return sql.Composed([sql.SQL("("), sql.SQL((self.query or "").strip().rstrip(";")), sql.SQL("\n)")])


class Reading:
    """A connection for one statement in a transaction that can change nothing; its errors are ours."""

    def __init__(self, source: SqlSource) -> None:
        self.source = source
        self.connection: psycopg.Connection[TupleRow] | None = None
        self.limit: Timer | None = None

    def __enter__(self) -> psycopg.Connection[TupleRow]:
        dsn = self.source.dsn.replace("+psycopg", "", 1)
        if "://" in dsn and not PLAIN_URL.fullmatch(dsn):
            raise SourceBroken("the DSN cannot be read: in a URL, @ / ? # of a password are %40 %2F %3F %23")
        try:
            connection = psycopg.connect(dsn, connect_timeout=CONNECT_TIMEOUT_S, application_name="concord nightly")
        except psycopg.OperationalError as error:
            raise SourceAway(first_line(error, dsn)) from None
        except (psycopg.Error, ValueError) as error:
            raise SourceBroken(f"the DSN cannot be read: {type(error).__name__}") from None
        self.connection = connection
        self.limit = Timer(self.source.timeout_s + ANSWER_LIMIT_S, hang_up, [connection])
        self.limit.daemon = True
        self.limit.start()
        connection.read_only = True
        try:
            connection.execute(f"set local statement_timeout = '{int(self.source.timeout_s)}s'".encode())
        except psycopg.Error as error:
            self.__exit__(type(error), error, None)
            raise
        return connection

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        assert self.connection is not None and self.limit is not None
        self.limit.cancel()
        self.limit.join()
        self.connection.close()
        if not isinstance(error, psycopg.Error):
            return
        state = error.sqlstate or ""
        if state == "57014":
            raise SourceBroken(f"a page took over {self.source.timeout_s} s: is there an index on ref?") from None
        if isinstance(error, psycopg.OperationalError) and state[:2] in ("", "08", "53", "57"):
            raise SourceAway(first_line(error, self.source.dsn)) from None
        raise SourceBroken(first_line(error, self.source.dsn)) from None


def hang_up(connection: psycopg.Connection[TupleRow]) -> None:
    """End a connection whose server does not answer: whoever waits for it is told that it is gone."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def run(connection: psycopg.Connection[TupleRow], statement: sql.Composed) -> psycopg.Cursor[TupleRow]:
    """Run what is one statement and no more: text that is prepared cannot end one and begin another."""
    return connection.execute(statement, prepare=True)


def first_line(error: Exception, dsn: str) -> str:
    """What the server said, in a line; never the DSN, which holds a password."""
    lines = str(error).replace(dsn, "...").strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
