"""Files of pairs: reading JSONL and CSV, and submitting one as a run that can be taken up again where it stopped."""

import csv
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import Engine

from db import outbox, runs
from db.outbox import OutboxRow
from db.runs import Run
from tasks.high_water import LOOK_EVERY_S, HighWater
from tasks.submit import PAIRS_PER_MESSAGE, Lane, chunked, envelope
from worker.errors import ConcordError, ErrorCode, PairRejected
from worker.messages import MAX_NAME_CHARS, Pair, as_uuid, clean

#: Ids of runs are derived under this name, so that the same file gives the same run on any machine.
RUNS = UUID("6f0f3f2c-5b1e-4d0a-9a53-9c4f6c3c0d11")
#: Messages written to the outbox in one transaction.
MESSAGES_PER_COMMIT = 16
#: Characters of a line that cannot be read which an error quotes.
QUOTED_CHARS = 60
#: What a file of pairs may be, by its name's end.
SUFFIXES = (".jsonl", ".ndjson", ".csv")
PAIR_COLUMNS = frozenset(Pair.model_fields) - {"attributes"}

Row = dict[str, Any] | PairRejected


class FileWrong(ConcordError):
    """The file of pairs cannot be read."""


def read_rows(path: Path) -> Iterator[Row]:
    """The pairs of a .jsonl or .csv file, one at a time; a line that is none comes as PairRejected with its number.

    In CSV, columns that are no field of a pair become its attributes. Raises FileWrong.
    """
    suffix = suffix_of(path)
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            yield from csv_rows(lines) if suffix == ".csv" else jsonl_rows(lines)
    except OSError as error:
        raise FileWrong(f"{path}: {error.strerror}") from None


def suffix_of(path: Path) -> str:
    """By which a file's form is known. Raises FileWrong for one that is not read."""
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        raise FileWrong(
            f"{path}: a file of pairs is named .jsonl (or .ndjson: one JSON object a line) or .csv, and not compressed"
        )
    return suffix


def jsonl_rows(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            clean(row)  # Raises where it is nested deeper than Celery could carry it.
            yield row
        except (ValueError, RecursionError, PairRejected) as error:
            detail = f"line {number} is not a pair ({error}): {line.strip()[:QUOTED_CHARS]}"
            yield PairRejected(ErrorCode.INVALID_PAIR, detail)


def csv_rows(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines, restkey="more columns", strict=True)
    try:
        if missing := {"image", "text"} - set(reader.fieldnames or ()):
            raise FileWrong(f"the first line of a CSV names its columns; missing: {', '.join(sorted(missing))}")
        for row in reader:
            fields = {name: value for name, value in row.items() if value not in ("", None)}
            attributes = {name: value for name, value in fields.items() if name not in PAIR_COLUMNS}
            # An empty text is a pair's fault, to be recorded as such; other empty cells mean "not given".
            pair = {name: value for name, value in fields.items() if name in PAIR_COLUMNS}
            yield {"text": "", **pair, "attributes": attributes}
    except csv.Error as error:
        raise FileWrong(f"line {reader.reader.line_num} is not CSV: {error}") from None


def begin(engine: Engine, path: Path, *, lane: Lane, source: str, again: str = "") -> Run:
    """The run of this file: a new one, or the one that the same command began earlier. `again` makes another."""
    if not 1 <= len(source) <= MAX_NAME_CHARS:
        raise FileWrong(f"--source is a name of 1 to {MAX_NAME_CHARS} characters")
    suffix_of(path)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise FileWrong(f"{path}: {error.strerror}") from None
    run_id = uuid5(RUNS, json.dumps([digest.hexdigest(), lane, source, again]))
    with engine.begin() as connection:
        return runs.open_run(connection, run_id, name=path.name, lane=lane, source=source)


def submit_file(
    engine: Engine,
    run: Run,
    rows: Iterator[Row],
    high_water: HighWater | None = None,
    on_wait: Callable[[int], None] = lambda held: None,
) -> Iterator[int]:
    """Write the run's pairs to the outbox, yielding how many each commit accepted.

    While the outbox is above `high_water` nothing is written, and every second `on_wait` is called with the messages
    that it holds; with 0 when that is over.

    The outbox rows and the run's `planned` commit together, so that a call that was cut short is taken up after the
    last pair that was accepted. Lines that are no pairs are left out; the caller has seen them in `rows`, which are
    read to their end in any case. Raises FileWrong where another call submits the same run at this moment.
    """
    if run.state != "planning":
        for _ in rows:
            pass
        return
    pairs = (row for row in rows if not isinstance(row, PairRejected))
    planned = run.planned
    numbered = ((place, pair) for place, pair in enumerate(pairs) if place >= run.planned)
    for group in chunked(chunked(numbered, PAIRS_PER_MESSAGE), MESSAGES_PER_COMMIT):
        accepted = sum(map(len, group))
        if high_water is not None:
            wait_below(high_water, on_wait)
        with engine.begin() as connection:
            if not runs.plan(connection, run.id, accepted, before=planned):
                raise FileWrong(f"{run.name} is being submitted by another process too, which goes on")
            outbox.add(connection, [message_of(run, chunk) for chunk in group])
        planned += accepted
        yield accepted
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


def message_of(run: Run, chunk: Sequence[tuple[int, Mapping[str, Any]]]) -> OutboxRow:
    """One message of a run; ids follow from the run and the pair's place in the file."""
    message_id = uuid5(run.id, f"message {chunk[0][0]}")
    pairs = [{**pair, "id": pair.get("id") or str(uuid5(run.id, f"pair {place}"))} for place, pair in chunk]
    body = envelope(message_id, run.submitted_at, pairs, run.source, run_id=run.id)
    return OutboxRow(message_id, run.lane, body)


def once(rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows, but one whose id stood before in the file is no pair: it would have no verdict of its own, and
    the run, which waits for as many verdicts as it has pairs, no end.
    """
    seen: set[UUID] = set()
    for row in rows:
        given = as_uuid(row.get("id")) if isinstance(row, dict) else None
        if given is None or given not in seen:
            yield row
        else:
            yield PairRejected(ErrorCode.DUPLICATE_ID, f"the id {given} stands twice in this file")
        if given is not None:
            seen.add(given)


def noting(rows: Iterator[Row], unreadable: list[PairRejected]) -> Iterator[Row]:
    """The same rows, with those that are no pairs noted in `unreadable` on the way."""
    for row in rows:
        if isinstance(row, PairRejected):
            unreadable.append(row)
        yield row
