"""`concord sql`, `erase` and `db maintain`: the views of schema `report` without psql, and how rows go in the end."""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, BinaryIO, Literal, TextIO, get_args, get_origin
from uuid import UUID

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.prompt import Confirm
from rich.table import Table
from sqlalchemy import Engine

from db import erasure, reports, retention
from db.engine import make_engine
from tasks.console import err, out, verbatim
from tasks.settings import settings
from worker.errors import ConcordError

#: A question over a year of verdicts may take longer than anything that workers ask.
STATEMENT_TIMEOUT_S = 600
#: Rows of a table on a terminal, unless told otherwise.
SHOWN_ROWS = 100
#: Characters of a value in a table.
CELL_CHARS = 60
#: More than any table takes.
WIDEST = 10_000
#: Rows of a row group of a Parquet file.
ROW_GROUP = 50_000
#: How far back a view is read, unless told otherwise.
SINCE = "7d"
UNITS = {"h": "hours", "d": "days", "w": "weeks"}
#: Moments further out are taken for these: they leave a day's room on both sides of what Python can reckon with.
EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)
#: What a spreadsheet takes for the beginning of a formula, also in the full width of East Asian fonts.
#: OWASP, "CSV Injection": a quote before it makes it text.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


class SqlWrong(ConcordError):
    """There is no such view, or it cannot be asked that way."""


def read_moment(written: str) -> datetime:
    """`12h`, `2d` or `4w` ago; a date or a moment, in UTC unless it says otherwise. Gives it in UTC."""
    if found := re.fullmatch(r"(\d{1,4})([hdw])", written.strip()):
        return datetime.now(UTC) - timedelta(**{UNITS[found[2]]: int(found[1])})
    try:
        moment = datetime.fromisoformat(written.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{written!r} is no moment: write 12h, 2d, 4w, 2026-01-31 or 2026-01-31T12:00"
        ) from None
    return min(max(moment if moment.tzinfo else moment.replace(tzinfo=UTC), EARLIEST), LATEST).astimezone(UTC)


def read_name(written: str) -> str:
    """A name as it was typed. Raises BadParameter for bytes that are no UTF-8, which no name in the database has."""
    try:
        written.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{written!r} is not UTF-8") from None
    return written


def sql(
    name: Annotated[str | None, typer.Argument(help="A view; without it all are listed.")] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=read_moment, metavar="WHEN", help=f"From then on: 12h, 2d, 2026-01-31; {SINCE} unless --run."
        ),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=read_moment, metavar="WHEN", help="Up to then; without it up to now.")
    ] = None,
    source: Annotated[str | None, typer.Option(parser=read_name, metavar="NAME", help="Of this source.")] = None,
    run: Annotated[UUID | None, typer.Option(metavar="RUN_ID", help="Of this run.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"At most so many rows; a table shows {SHOWN_ROWS} unless told otherwise.")
    ] = None,
    form: Annotated[
        Literal["table", "csv", "json", "parquet"], typer.Option("--format", help="json is one object a line.")
    ] = "table",
    into: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="A file, in place of the output.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="CSV for a program: leave texts that a spreadsheet would run as a formula.")
    ] = False,
    columns: Annotated[bool, typer.Option("--columns", help="What the view's columns mean, in place of rows.")] = False,
) -> None:
    """Read a view of schema `report`. What the views are, and queries to start from: docs/sql.md."""
    if name is not None and name not in reports.REPORTS:
        raise SqlWrong(f"there is no view {name!r}; there are {', '.join(reports.REPORTS)}")
    if since is None and run is None:
        since = read_moment(SINCE)
    if since is not None and until is not None and since > until:
        raise SqlWrong(
            f"--since, {since:%Y-%m-%d %H:%M}, lies after --until, {until:%Y-%m-%d %H:%M}: give an earlier one"
        )
    if raw and form != "csv":
        raise SqlWrong(f"--raw is for --format csv: {form} has every text as it is")
    with signed_in(settings().need("database_url")) as database, database.connect() as connection:
        if name is None:
            return show(("view", "purpose"), reports.purposes(connection).items())
        if columns:
            return show(("column", "type", "meaning"), reports.columns(connection, name))
        if form == "table" and limit is None:
            limit = SHOWN_ROWS
        try:
            rows = reports.read(connection, name, since=since, until=until, source=source, run_id=run, limit=limit)
            with writing(into, form) as sink:
                count = (write_raw_csv if raw else WRITERS[form])(sink, name, rows)
        except reports.NotInReport as error:
            raise SqlWrong(str(error)) from None
    if form == "table" and count == limit:
        err.print(f"the first {count:,} rows; --limit shows more")


@contextmanager
def signed_in(url: str) -> Iterator[Engine]:
    """An engine for long questions, closed in the end."""
    database = make_engine(url, statement_timeout_s=STATEMENT_TIMEOUT_S)
    try:
        yield database
    finally:
        database.dispose()


def show(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*names)
    for row in rows:
        table.add_row(*map(verbatim, row))
    out.print(table)


@contextmanager
def writing(into: Path | None, form: str) -> Iterator[Any]:
    """Where rows go: a file, which is not left half written, or the output."""
    if into is None:
        if form == "parquet" and sys.stdout.isatty():
            raise SqlWrong("Parquet is no text: name a file with --out, or redirect the output")
        yield sys.stdout.buffer if form == "parquet" else sys.stdout
        return
    part = into.with_name(f"{into.name}.part")
    try:
        with part.open("wb") if form == "parquet" else part.open("w", newline="", encoding="utf-8") as sink:
            yield sink
        part.replace(into)
    except OSError as error:
        raise SqlWrong(f"{into} cannot be written ({error.strerror}): name another file with --out") from None
    finally:
        part.unlink(missing_ok=True)


def write_table(sink: TextIO, name: str, rows: Iterator[Any]) -> int:
    table = Table()
    for column in reports.REPORTS[name].types:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(verbatim(shown(value)) for value in values_of(row)))
    # As wide as it must be: a pager scrolls, and a cell of three letters tells nothing.
    wide = Console(file=sink, highlight=False, width=WIDEST)
    wide.width = max(out.width, Measurement.get(wide, wide.options, table).maximum)
    wide.print(table)
    return table.row_count


def write_csv(sink: TextIO, name: str, rows: Iterator[Any]) -> int:
    """CSV that a spreadsheet may open: no text in it is a formula."""
    return write_cells(sink, name, ([no_formula(value) for value in values_of(row)] for row in rows))


def write_raw_csv(sink: TextIO, name: str, rows: Iterator[Any]) -> int:
    return write_cells(sink, name, map(values_of, rows))


def write_cells(sink: TextIO, name: str, rows: Iterator[Sequence[Any]]) -> int:
    writer, count = csv.writer(sink), 0
    writer.writerow(reports.REPORTS[name].types)
    for values in rows:
        writer.writerow(map(flat, values))
        count += 1
    return count


def no_formula(value: Any) -> Any:
    """A text that would begin a formula has a quote before it; a number, also a negative one, stays a number."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def write_json(sink: TextIO, name: str, rows: Iterator[Any]) -> int:
    count = 0
    for row in rows:
        sink.write(json.dumps(vars(row), ensure_ascii=False, default=flat) + "\n")
        count += 1
    return count


def write_parquet(sink: BinaryIO, name: str, rows: Iterator[Any]) -> int:
    import pyarrow
    from pyarrow import parquet

    types = reports.REPORTS[name].types
    schema = pyarrow.schema([(column, arrow_type(kind)) for column, kind in types.items()])
    count = 0
    with parquet.ParquetWriter(sink, schema) as writer:
        page: list[dict[str, Any]] = []
        for row in rows:
            page.append({column: flat(v) if isinstance(v, UUID | dict) else v for column, v in vars(row).items()})
            count += 1
            if len(page) == ROW_GROUP:
                writer.write_table(pyarrow.Table.from_pylist(page, schema))
                page.clear()
        writer.write_table(pyarrow.Table.from_pylist(page, schema))
    return count


WRITERS: Mapping[str, Any] = {"table": write_table, "csv": write_csv, "json": write_json, "parquet": write_parquet}


def arrow_type(kind: Any) -> Any:
    """Arrow's type of a column; what it has none for, a UUID or an object of JSON, is a string."""
    import pyarrow

    if get_origin(kind) in (UnionType, Literal):
        kind = next(one for one in get_args(kind) if one is not type(None))
    plain = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
        bytes: pyarrow.binary(),
        date: pyarrow.date32(),
        datetime: pyarrow.timestamp("us", "UTC"),
    }
    if get_origin(kind) is Sequence:
        return pyarrow.list_(pyarrow.string())
    return plain.get(kind, pyarrow.string())


def values_of(row: Any) -> Sequence[Any]:
    """A row's values in the order of its columns."""
    return list(vars(row).values())


def shown(value: Any) -> Any:
    """A value for a table that a person reads: times to the second, numbers to four digits, long texts cut."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    written = str(flat(value))
    return written if len(written) <= CELL_CHARS else f"{written[: CELL_CHARS - 1]}\u2026"


def flat(value: Any) -> Any:
    """A value as text that reads back as the same: numbers stay numbers, objects and lists become JSON."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value


def erase(
    source: Annotated[str, typer.Option(parser=read_name, metavar="NAME", help="The source that the ref belongs to.")],
    ref: Annotated[str, typer.Option(parser=read_name, metavar="NAME", help="The producer's own name for the pair.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase what was written about a ref: its texts, picture addresses and attributes. Keys, scores and hashes stay.

    Needs the owner's login. Exits 1 while workers have pairs of it: the same command again erases what they write.
    """
    url = settings().need("owner_database_url")
    if not yes and not Confirm.ask(f"Erase all that was written about {ref!r} of {source!r}?", console=err):
        raise typer.Exit(1)
    with signed_in(url) as database, database.begin() as connection:
        done = erasure.erase(connection, source, ref)
    table = Table("table", "rows", "what was done")
    for name, count in done.rows.items():
        table.add_row(name, f"{count:,}", DONE[name])
    out.print(table)
    if done.in_work:
        err.print(
            f"{done.in_work:,} pairs of it are with the workers: give the same command again when they are judged"
        )
        raise typer.Exit(1)


#: What `erase` did to the rows that it counts.
DONE = {
    "outbox": "pairs that waited were taken out and settled as revoked",
    "rejected_message": "body and detail emptied",
    "verdict": "text, premise, image, attributes and error detail emptied; flagged erased",
    "catalog_state": "attributes emptied",
    "catalog_item": "row deleted",
}


def maintain(
    keep_months: Annotated[
        int | None, typer.Option(min=0, help="From now on keep so many months before the present one; 0: all.")
    ] = None,
    rejected_days: Annotated[
        int | None, typer.Option(min=0, help="From now on keep rejected messages so many days; 0: for ever.")
    ] = None,
    run_days: Annotated[
        int | None, typer.Option(min=0, help="From now on keep runs that are over so many days; 0: for ever.")
    ] = None,
) -> None:
    """Make the months ahead, drop those that are too old, delete old rejected messages and runs.

    What is kept how long stands in the database; without options nothing of that changes. Exits 1 where readers were in
    the way of dropping a month: the next time does it.
    """
    chosen = settings()
    asked = {"keep_months": keep_months, "rejected_days": rejected_days, "run_days": run_days}
    changes = {name: value or None for name, value in asked.items() if value is not None}
    with signed_in(chosen.owner_database_url or chosen.need("database_url")) as database:
        with database.begin() as connection:
            kept = replace(retention.read(connection), **changes)
            if changes:
                retention.change(connection, kept)
        done = retention.maintain(database)
    whats = ("months of verdicts", "days of rejected messages", "days of runs")
    out.print("kept: " + ", ".join(map(in_words, (kept.keep_months, kept.rejected_days, kept.run_days), whats)))
    out.print(f"made {done.made} months; dropped {', '.join(done.dropped) or 'none'}")
    for month in done.needed:
        out.print(f"{month} stays: a run that is not over has pairs in it. `concord sql run_summary` shows which")
    out.print(", ".join(f"{count:,} rows of {table} deleted" for table, count in done.forgotten.items()))
    if done.is_busy:
        err.print("readers or writers were in the way of dropping a month; the same command again drops it")
        raise typer.Exit(1)


def in_words(number: int | None, what: str) -> str:
    return f"all {what}" if number is None else f"{number} {what}"
