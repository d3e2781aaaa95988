"""A catalog's items, page by page from any position: out of Postgres, or out of a manifest in S3.

A row that names no item is left out with a sentence that says where it stands. All else goes on: what is wrong with an
item's picture or text is its own verdict.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from db.catalog_source import MAX_REF_BYTES, MAX_ROW_BYTES, PAGE_BYTES, SqlSource
from tasks.catalogs import Catalog
from tasks.nightly_s3 import Buckets
from tasks.pairs_file import chars_of
from tasks.pairs_formats import FileWrong, Lines, csv_rows, form_of, jsonl_rows
from tasks.pairs_parquet import ParquetFile
from tasks.settings import Settings
from worker.errors import ConcordError, ErrorCode, PairRejected
from worker.messages import Pair, clean

#: Rows that are read, and planned in one transaction.
ROWS_PER_PAGE = 1_000
MAX_REF_CHARS = 1_000
#: Rows that are left out and named one by one.
SKIPPED_NAMED = 20
FIELDS = frozenset(Pair.model_fields) - {"id"}


class SourceWrong(ConcordError):
    """The catalog's source cannot be read as it is."""


@dataclass
class Page:
    """Items in the source's order, each ref once; `position` is where the next page begins, None where there is none.

    `repeats` counts rows whose ref stood before, `left_out` those that name no item; `skipped` says where some are.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    repeats: int = 0
    left_out: int = 0
    skipped: list[str] = field(default_factory=list)
    position: dict[str, Any] | None = None
    refs: set[str] = field(default_factory=set)
    #: Characters that the items hold: a page of wide ones ends early.
    held: int = 0

    def add(self, raw: Mapping[str, Any] | PairRejected, where: str) -> None:
        """Take a row in, or note why it is none."""
        try:
            item = read_item(raw, where)
        except PairRejected as error:
            self.leave_out(error.detail)
            return
        if item["ref"] in self.refs:
            self.repeats += 1
            return
        self.refs.add(item["ref"])
        self.items.append(item)
        self.held += chars_of(item)

    def leave_out(self, why: str, rows: int = 1) -> None:
        self.left_out += rows
        if len(self.skipped) < SKIPPED_NAMED:
            self.skipped.append(why)


class Source(Protocol):
    """Raises SourceWrong, SourceBroken and S3Refused where it is at fault, SourceAway and S3Away where it only does not
    answer.
    """

    def check(self) -> None:
        """See that it can be read at all."""

    def page(self, position: dict[str, Any] | None) -> Page:
        """The page that begins there; from the start where the position is None."""

    def close(self) -> None: ...


def open_source(catalog: Catalog, settings: Settings) -> Source:
    if catalog.manifest:
        return Manifest(catalog.manifest, Buckets(settings))
    return Sql(catalog.sql_source(settings))


def check_position(position: dict[str, Any] | None, name: str) -> None:
    """Raises SourceWrong for a position in a source of the other kind."""
    if position is not None and name not in position:
        raise SourceWrong("this night began on a source of another kind; begin another night with --again")


def read_item(raw: Mapping[str, Any] | PairRejected, where: str) -> dict[str, Any]:
    """The fields of an item that a pair has. Raises PairRejected where it has no name, or is no JSON."""
    if isinstance(raw, PairRejected):
        # Without what the line says: a run's summary is not where the texts of an item may live.
        why, is_quoted, _ = raw.detail.partition("): ")
        raise PairRejected(raw.code, why + (")" if is_quoted else ""))
    try:
        item = clean({name: value for name, value in raw.items() if name in FIELDS and value is not None})
    except PairRejected as error:
        raise PairRejected(error.code, f"{where}: {error.detail}") from None
    assert isinstance(item, dict)
    ref = item.get("ref")
    if isinstance(ref, int) and not isinstance(ref, bool):
        ref = item["ref"] = str(ref)
    if not isinstance(ref, str) or not 1 <= len(ref) <= MAX_REF_CHARS:
        raise PairRejected(ErrorCode.INVALID_PAIR, f"{where} has no ref of 1 to {MAX_REF_CHARS:,} characters")
    return item


@dataclass
class Sql:
    """A query or a table. Its position is the last ref, and how many rows of that ref were seen."""

    source: SqlSource
    rows_per_page: int = ROWS_PER_PAGE

    def check(self) -> None:
        self.source.check()

    def page(self, position: dict[str, Any] | None) -> Page:
        check_position(position, "ref")
        after, seen = (position["ref"], position["seen"]) if position else (None, 0)
        found = self.source.page(after, seen, self.rows_per_page)
        page = Page(repeats=found.repeats)
        for ref, row in found.rows:
            if row is None:
                page.leave_out(f"the row {ref[:80]!r} is longer than {MAX_ROW_BYTES:,} bytes")
            else:
                page.add({**row, "ref": ref}, f"the row {ref[:80]!r}")
        if found.is_last:
            nameless, long = self.source.nameless()
            if nameless:
                page.leave_out(f"{nameless:,} rows have no ref", nameless)
            if long:
                page.leave_out(f"{long:,} rows have a ref of more than {MAX_REF_BYTES:,} bytes", long)
        else:
            last = found.rows[-1][0] if found.rows else after
            same = sum(1 for ref, _ in found.rows if ref == last)
            page.position = {"ref": last, "seen": same if found.rows else seen + found.repeats}
        return page

    def close(self) -> None:
        pass


class Manifest:
    """A file in S3, copied to this machine's disk. Its position is how many rows were read, and of which version."""

    def __init__(self, address: str, buckets: Buckets) -> None:
        self.address, self.buckets = address, buckets
        self.file: Any = None
        self.etag = ""
        self.rows: Iterator[tuple[Mapping[str, Any] | PairRejected, str]] = iter(())
        self.read = -1

    def check(self) -> None:
        self._open(None)

    def page(self, position: dict[str, Any] | None) -> Page:
        check_position(position, "rows")
        wanted = position["rows"] if position else 0
        if self.file is None or self.read != wanted:
            self._open(position["etag"] if position else None)
            self.read += sum(1 for _ in islice(self.rows, wanted))
        page, count, is_full = Page(), 0, False
        try:
            for row, where in islice(self.rows, ROWS_PER_PAGE):
                count += 1
                page.add(row, where)
                if is_full := page.held > PAGE_BYTES:
                    break
        except FileWrong as error:
            raise SourceWrong(f"{self.address}: {error}") from None
        self.read += count
        if is_full or count == ROWS_PER_PAGE:
            page.position = {"rows": self.read, "etag": self.etag}
        return page

    def _open(self, etag: str | None) -> None:
        self.close()
        self.etag = self.buckets.etag(self.address)
        if etag not in (None, self.etag):
            raise SourceWrong(f"{self.address} was replaced while it was read; begin another night with --again")
        self.file = tempfile.NamedTemporaryFile(prefix="concord-manifest-")  # noqa: SIM115
        self.buckets.download(self.address, self.etag, self.file)
        self.file.flush()
        self.rows, self.read = numbered(Path(self.file.name), self.address), 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def numbered(path: Path, name: str) -> Iterator[tuple[Mapping[str, Any] | PairRejected, str]]:
    """The rows of a manifest, each with the line, or in Parquet the row, that it ends on. Raises FileWrong."""
    with path.open("rb") as file:
        form, packed = form_of(name)
        if form == "parquet":
            table = ParquetFile(file, needed=("ref", "image", "text"))
            for row in table.rows():
                yield row if isinstance(row, PairRejected) else with_attributes(row), table.where()
        else:
            # Bytes that are no UTF-8 become U+FFFD: such an item is judged, and its verdict says so.
            lines = Lines(file, packed=packed, errors="replace")
            for row in csv_rows(lines) if form == "csv" else jsonl_rows(lines):
                yield row, lines.where()


def with_attributes(row: dict[str, Any]) -> dict[str, Any]:
    """Attributes may be a string that is JSON."""
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        return {**row, "attributes": json.loads(row["attributes"])}
    return row
