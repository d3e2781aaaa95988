"""Files of pairs, submitted as runs: a run that was cut short is taken up where it stopped."""

import hashlib
import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID, uuid5

from sqlalchemy import Engine

from db import outbox, runs
from db.outbox import OutboxRow
from db.runs import Run
from tasks.high_water import LOOK_EVERY_S, HighWater
from tasks.pairs_formats import FileWrong, Lines, Row, csv_rows, form_of, jsonl_rows
from tasks.pairs_parquet import ParquetFile
from tasks.submit import PAIRS_PER_MESSAGE, Lane, envelope
from worker.errors import ErrorCode, PairRejected
from worker.messages import MAX_NAME_CHARS, as_uuid

__all__ = ["FileWrong", "PairsFile", "Row", "begin", "read_rows", "submit_file"]

#: Ids of runs are derived under this name, so that the same file gives the same run on any machine.
RUNS = UUID("6f0f3f2c-5b1e-4d0a-9a53-9c4f6c3c0d11")
#: Messages written to the outbox in one transaction, 4,096 pairs: a commit costs as much as some hundred of them.
MESSAGES_PER_COMMIT = 64
#: Characters of pairs in one message of more than one pair, and in one transaction. As JSON a character is up to 12
#: bytes, and nobody reads a message of more than 64 MB.
MAX_MESSAGE_CHARS, MAX_COMMIT_CHARS = 500_000, 4_000_000
#: Lines that are no pairs and are kept to be told one by one.
KEPT_LINES = 5
#: Memory for the ids that were given in a file; what is more lies on disk.
SEEN_IDS_KB = 8_192

#: No file is ever written where memory is enough; where it is not, it has no name and is gone with the process.
SEEN_IDS = f"""
pragma journal_mode = off; pragma synchronous = off; pragma cache_size = -{SEEN_IDS_KB};
create table seen (id blob primary key) without rowid;
begin;
"""
SEE_ID = "insert or ignore into seen values (?)"

T = TypeVar("T")


class FileTaken(FileWrong):
    """Another process submits the same file."""


class PairsFile:
    """A file of pairs that is open: its digest, its rows, how far they have been read, and whether it stays as it was.

    All that is wrong with it is raised as FileWrong with its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._where: Callable[[], str] = lambda: "its start"
        self._done: Callable[[], float] = lambda: 0.0
        try:
            self.form, self.packed = form_of(path.name)
            if not stat.S_ISREG(path.stat().st_mode):
                raise FileWrong(
                    "it is no regular file, which can be read twice: once to know it again, once for its pairs"
                )
            self.file = path.open("rb")
        except FileWrong as error:
            raise self.wrong(error) from None
        except OSError as error:
            raise FileWrong(f"{path}: {error.strerror}") from None
        self.stamp = self.stamp_now()
        self.size = self.stamp[0]
        self._digest = ""

    def __enter__(self) -> "PairsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()

    def wrong(self, error: FileWrong) -> FileWrong:
        return FileWrong(f"{self.path}: {error}")

    def digest(self) -> str:
        """SHA-256 of the whole file, in hexadecimal."""
        if not self._digest:
            try:
                self.file.seek(0)
                self._digest = hashlib.file_digest(self.file, "sha256").hexdigest()
            except OSError as error:
                raise FileWrong(f"{self.path}: {error.strerror}") from None
        return self._digest

    def rows(self) -> Iterator[Row]:
        """The pairs, one at a time; what is none comes as PairRejected that says where it stands. Once only."""
        try:
            self.file.seek(0)
            if self.form == "parquet":
                table = ParquetFile(self.file)
                self._where, self._done = table.where, lambda: table.number / max(table.total, 1)
                yield from table.pairs()
                return
            self._done = lambda: self.file.tell() / max(self.size, 1)
            lines = Lines(self.file, packed=self.packed, skip_long=self.form == "jsonl")
            self._where = lines.where
            yield from csv_rows(lines) if self.form == "csv" else jsonl_rows(lines)
        except FileWrong as error:
            raise self.wrong(error) from None

    def where(self) -> str:
        """At which line or row the reading is, in words."""
        return self._where()

    def done(self) -> float:
        """The share of the file that was read, from 0 to 1."""
        return self._done()

    def check(self) -> None:
        """Raises FileWrong where it is no longer what it was when it was opened."""
        if self.stamp_now() != self.stamp:
            raise FileWrong(f"{self.path} was changed while it was read")

    def stamp_now(self) -> tuple[int, int]:
        """Size in bytes and the moment of the last change, of the open file: one that takes its name is another."""
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns


def read_rows(path: Path) -> Iterator[Row]:
    """The pairs of a file, one at a time; a line or row that is none comes as PairRejected. Raises FileWrong."""
    with PairsFile(path) as file:
        yield from file.rows()


def begin(engine: Engine, path: Path, *, lane: Lane, source: str, again: str = "") -> Run:
    """The run of this file: a new one, or the one that the same command began earlier. `again` makes another."""
    with PairsFile(path) as file:
        return run_of(engine, file, lane=lane, source=source, again=again)


def run_of(engine: Engine, file: PairsFile, *, lane: Lane, source: str, again: str = "") -> Run:
    """As `begin`, of a file that is open, so that what is read afterwards is what the run is known by."""
    if not 1 <= len(source) <= MAX_NAME_CHARS:
        raise FileWrong(f"--source is a name of 1 to {MAX_NAME_CHARS} characters")
    run_id = uuid5(RUNS, json.dumps([file.digest(), lane, source, again]))
    with engine.begin() as connection:
        return runs.open_run(connection, run_id, name=file.path.name, lane=lane, source=source)


def run_again(engine: Engine, file: PairsFile, *, lane: Lane, source: str) -> Run:
    """Another run of a file than all before it; the last of them where it was cut short."""
    generation = 1
    while (run := run_of(engine, file, lane=lane, source=source, again=str(generation))).state != "planning":
        generation += 1
    return run


def submit_file(
    engine: Engine,
    run: Run,
    rows: Iterable[Row],
    high_water: HighWater | None = None,
    on_wait: Callable[[int], None] = lambda held: None,
    check: Callable[[], None] = lambda: None,
    fresh: bool = False,
) -> Iterator[int]:
    """Write the run's pairs to the outbox, yielding how many each commit accepted.

    While the outbox is above `high_water` nothing is written, and every second `on_wait` is called with the messages
    that it holds; with 0 when that is over. `check` is called before each commit and at the end. `fresh` pairs are
    judged also where their content has a verdict.

    The outbox rows and the run's `planned` commit together, so that a call that was cut short is taken up after the
    last pair that was accepted. Lines that are no pairs are left out; the caller has seen them in `rows`, which are
    read to their end in any case.

    Raises FileWrong where another call submits the same run at this moment; and what `rows` and `check` raise, after
    which the run is over when what was accepted is settled. A call that finds more pairs than that goes on.
    """
    wrong: list[FileWrong] = []
    pairs = (row for row in until_wrong(rows, wrong) if not isinstance(row, PairRejected))
    planned = run.planned
    numbered = ((place, pair, chars_of(pair)) for place, pair in enumerate(pairs) if place >= run.planned)
    messages = cut(numbered, PAIRS_PER_MESSAGE, MAX_MESSAGE_CHARS, lambda item: item[2])
    groups = cut(messages, MESSAGES_PER_COMMIT, MAX_COMMIT_CHARS, lambda chunk: sum(item[2] for item in chunk))
    try:
        for group in groups:
            accepted = sum(map(len, group))
            if high_water is not None:
                wait_below(high_water, on_wait)
            check()
            with engine.begin() as connection:
                if not runs.plan(connection, run.id, accepted, before=planned):
                    raise FileTaken(f"{run.name} is being submitted by another process too, which goes on")
                outbox.add(connection, [message_of(run, chunk, fresh) for chunk in group])
            planned += accepted
            yield accepted
        check()
        for error in wrong:
            raise error
    except FileTaken:
        raise
    except FileWrong:
        end_planning(engine, run)
        raise
    end_planning(engine, run)


def until_wrong(rows: Iterable[Row], wrong: list[FileWrong]) -> Iterator[Row]:
    """The rows up to where the file cannot be read on, so that what stands before is accepted first."""
    try:
        yield from rows
    except FileWrong as error:
        wrong.append(error)


def end_planning(engine: Engine, run: Run) -> None:
    with engine.begin() as connection:
        runs.end_planning(connection, run.id)


def wait_below(high_water: HighWater, on_wait: Callable[[int], None]) -> None:
    """Until workers have brought the outbox down to its mark."""
    waited = False
    while (held := high_water.waiting()) > high_water.mark:
        waited = True
        on_wait(held)
        time.sleep(LOOK_EVERY_S)
    if waited:
        on_wait(0)


def message_of(run: Run, chunk: Sequence[tuple[int, Mapping[str, Any], int]], fresh: bool) -> OutboxRow:
    """One message of a run; ids follow from the run and the pair's place in the file."""
    message_id = uuid5(run.id, f"message {chunk[0][0]}")
    pairs = [{**pair, "id": pair.get("id") or str(uuid5(run.id, f"pair {place}"))} for place, pair, _ in chunk]
    body = envelope(message_id, run.submitted_at, pairs, run.source, fresh, run.id)
    return OutboxRow(message_id, run.lane, body)


def chars_of(pair: Mapping[str, Any]) -> int:
    """About how long a pair is, in characters."""
    return sum(map(len, map(str, pair.values())))


def cut(items: Iterable[T], most: int, most_chars: int, chars: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of at most so many items and characters, but of one item at least."""
    held: list[T] = []
    length = 0
    for item in items:
        longer = length + chars(item)
        if held and (len(held) == most or longer > most_chars):
            yield held
            held, longer = [], chars(item)
        held.append(item)
        length = longer
    if held:
        yield held


def once(rows: Iterable[Row], where: Callable[[], str] = lambda: "a row") -> Iterator[Row]:
    """The same rows, but one whose id stood before in the file is no pair: it would have no verdict of its own, and
    the run, which waits for as many verdicts as it has pairs, no end.

    Ids are kept on disk, so that memory does not grow with the file.
    """
    with closing(sqlite3.connect("", isolation_level=None)) as ids:
        ids.executescript(SEEN_IDS)
        for row in rows:
            given = as_uuid(row.get("id")) if isinstance(row, dict) else None
            try:
                is_new = given is None or ids.execute(SEE_ID, (given.bytes,)).rowcount
            except sqlite3.Error as error:
                raise FileWrong(f"no room for the ids of the file among temporary files: {error}") from None
            yield row if is_new else repeated(where(), given)


def repeated(where: str, given: UUID | None) -> PairRejected:
    return PairRejected(ErrorCode.DUPLICATE_ID, f"{where} is not a pair of its own: the id {given} stood before")


@dataclass
class LeftOut:
    """Rows that are no pairs: how many, and the first of them."""

    count: int = 0
    first: list[PairRejected] = field(default_factory=list)

    def note(self, row: PairRejected) -> None:
        self.count += 1
        if len(self.first) < KEPT_LINES:
            self.first.append(row)


def noting(rows: Iterable[Row], left_out: LeftOut) -> Iterator[Row]:
    """The same rows, with those that are no pairs noted in `left_out` on the way."""
    for row in rows:
        if isinstance(row, PairRejected):
            left_out.note(row)
        yield row
