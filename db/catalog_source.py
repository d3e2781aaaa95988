"""A customer's catalog in Postgres, read in short pages by the key: no cursor or transaction outlasts one."""

import contextlib
import os
import re
import socket
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from threading import Timer
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

CONNECT_TIMEOUT_S = 10
#: A server that keeps to the statement's time has answered by then; one that is frozen never does.
ANSWER_LIMIT_S = 30.0
REQUIRED = ("ref", "image", "text")
#: Columns that an item has beside them, where the query yields them; no others are read.
OPTIONAL = ("premise", "policy", "attributes")
#: Of a row that is read, in all its columns: far more than a pair may hold, and as long as a line of a manifest.
MAX_ROW_BYTES = 4_000_000
#: A page ends early once its rows hold so much.
PAGE_BYTES = 16_000_000
#: Of a ref that is read: as many characters as a pair's may have, in any alphabet.
MAX_REF_BYTES = 4_000
#: SQLSTATEs, by their first two digits, of a server that is away or will do the same in a while: of a standby, too,
#: that had to end a query for the sake of its replay.
PASSING = ("", "08", "40", "53", "55", "57", "58")
#: A server that answers, and refuses the login: libpq has no SQLSTATE of it, only words. In another language than these
#: it is waited for like one that is away.
LOGIN_REFUSED = re.compile(
    r"authentication failed|no password supplied|does not exist|no pg_hba\.conf entry|permission denied|not permitted"
)
#: A URL of which libpq takes the same for the password as its writer: else it would name a part of it as the host.
PLAIN_URL = re.compile(r"postgres(ql)?://([^@/?#]*@)?[^@]*")


class SourceAway(Exception):
    """The catalog's database does not answer at present."""


class SourceBroken(Exception):
    """The catalog cannot be read as it is configured."""


@dataclass(frozen=True)
class SqlPage:
    """Rows as (ref, the item as JSON, or None where it is too wide); `repeats` more have the last page's last ref, and
    are not among them.
    """

    rows: list[tuple[str, dict[str, Any] | None]]
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

    @cached_property
    def columns(self) -> list[str]:
        """Those of the query that an item has. Raises SourceAway and SourceBroken."""
        statement = sql.SQL("select * from {} q limit 0").format(self._rows())
        with Reading(self) as connection:
            names = [column.name for column in run(connection, statement).description or ()]
        if missing := [name for name in REQUIRED if name not in names]:
            raise SourceBroken(f"the query yields no column {', '.join(missing)}; it yields {', '.join(names)}")
        return [*REQUIRED, *(name for name in OPTIONAL if name in names)]

    def check(self) -> None:
        """See that the query runs and yields what is needed. Raises SourceAway and SourceBroken."""
        _ = self.columns

    def page(self, after: str | None, seen: int, limit: int) -> SqlPage:
        """Up to `limit` rows after the `seen` ones whose ref is `after`, in the order that the ref's type has; fewer
        where they are wide, so that no more than PAGE_BYTES and one row are held.

        Raises SourceAway and SourceBroken.
        """
        if after is not None and seen >= limit:
            # So many of one ref that reading past them would be no page any more.
            repeats, compared, seen = self._count("q.ref = {}", after) - seen, "and q.ref > {}", 0
        else:
            # The last ref is asked for again: rows that share it may stand on both sides of a page's end.
            repeats, compared = 0, "and q.ref >= {}"
        # A row becomes JSON only after the limit, and one by one as they are read; lengths are known without reading.
        statement = sql.SQL(
            """select p.ref::text, {octets}, case when {octets} <= {most} then to_jsonb(p) end from (
                 select {columns} from {rows} q where octet_length(q.ref::text) <= {longest} {compared}
                 order by q.ref limit {limit}) p order by p.ref"""
        ).format(
            octets=sql.SQL(" + ").join(
                sql.SQL("coalesce(octet_length(p.{}::text), 0)").format(sql.Identifier(name)) for name in self.columns
            ),
            columns=sql.SQL(", ").join(sql.SQL("q.{}").format(sql.Identifier(name)) for name in self.columns),
            rows=self._rows(),
            most=sql.Literal(MAX_ROW_BYTES),
            longest=sql.Literal(MAX_REF_BYTES),
            compared=sql.SQL("") if after is None else sql.SQL(compared).format(sql.Literal(after)),
            limit=sql.Literal(limit + seen),
        )
        found: list[tuple[str, dict[str, Any] | None]] = []
        same, held = 0, 0
        with Reading(self) as connection, contextlib.closing(stream(connection, statement)) as rows:
            for ref, octets, row in rows:
                if ref == after:
                    same += 1
                    continue
                found.append((ref, row))
                held += 0 if row is None else octets
                if held > PAGE_BYTES:
                    break
        is_last = held <= PAGE_BYTES and len(found) + same < limit + seen
        return SqlPage(found, max(0, repeats + same - seen), is_last)

    def nameless(self) -> tuple[int, int]:
        """How many rows have no ref, and how many one that is longer than MAX_REF_BYTES. Raises SourceAway and
        SourceBroken.
        """
        statement = sql.SQL(
            "select count(*) filter (where ref is null), count(*) filter (where octet_length(ref::text) > {}) from {} q"
        ).format(sql.Literal(MAX_REF_BYTES), self._rows())
        with Reading(self) as connection:
            none, long = run(connection, statement).fetchone() or (0, 0)
        return int(none), int(long)

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
            connection = psycopg.connect(
                dsn, connect_timeout=CONNECT_TIMEOUT_S, application_name="concord nightly", client_encoding="utf8"
            )
        except psycopg.OperationalError as error:
            kind = SourceBroken if LOGIN_REFUSED.search(str(error)) else SourceAway
            raise kind(first_line(error, dsn)) from None
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
        if isinstance(error, psycopg.OperationalError) and state[:2] in PASSING:
            raise SourceAway(first_line(error, self.source.dsn)) from None
        raise SourceBroken(first_line(error, self.source.dsn)) from None


def hang_up(connection: psycopg.Connection[TupleRow]) -> None:
    """End a connection whose server does not answer: whoever waits for it is told that it is gone."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def run(connection: psycopg.Connection[TupleRow], statement: sql.Composed) -> psycopg.Cursor[TupleRow]:
    """Run what is one statement and no more: text that is prepared cannot end one and begin another."""
    return connection.execute(statement, prepare=True)


def stream(connection: psycopg.Connection[TupleRow], statement: sql.Composed) -> Generator[TupleRow, None, None]:
    """The same, row by row, so that one at a time is held; whoever stops before the end cancels the rest."""
    yield from connection.cursor().stream(statement)


def first_line(error: Exception, dsn: str) -> str:
    """What the server said, in a line; never the DSN, which holds a password."""
    lines = str(error).replace(dsn, "...").strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
