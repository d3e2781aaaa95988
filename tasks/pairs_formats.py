"""Pairs as text: JSONL and CSV, as they are or gzipped, read a row at a time in little memory.

What is no pair comes as PairRejected that says where it stands; where a file cannot be read on, FileWrong is raised.
"""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from worker.errors import ConcordError, ErrorCode, PairRejected, first_line
from worker.messages import MAX_ATTRIBUTE_DEPTH, MAX_PAIR_VALUES, Pair, clean

#: Of one line, of one record of a CSV and of one row of a Parquet file: far more than a pair may hold, little enough
#: for memory, and for Redis when it is a message of its own.
MAX_LINE_CHARS = 4_000_000
#: Characters of a line that cannot be read which an error quotes.
QUOTED_CHARS = 60
#: A value takes two characters of JSON at least, so that a line of this length has no more values than a pair may.
FEW_VALUES_CHARS = 2 * MAX_PAIR_VALUES
#: What a file of pairs may be, by its name's end.
FORMS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
PAIR_COLUMNS = frozenset(Pair.model_fields) - {"attributes"}

Row = dict[str, Any] | PairRejected


class FileWrong(ConcordError):
    """The file of pairs cannot be read."""


def form_of(name: str) -> tuple[str, bool]:
    """Of what form a file of this name is, and whether it is gzipped. Raises FileWrong for one that is not read."""
    plain = name.lower().removesuffix(".gz")
    packed = len(plain) < len(name)
    form = FORMS.get(Path(plain).suffix, "")
    if not form or (packed and form == "parquet"):
        raise FileWrong(
            "a file of pairs is named .jsonl (or .ndjson; one JSON object a line) or .csv, either also with .gz behind "
            "it, or .parquet"
        )
    return form, packed


# ---- Lines -----------------------------------------------------------------------------------------------------------


class Lines:
    """The lines of a text file, counted, of which none is held that is longer than MAX_LINE_CHARS.

    A longer one comes cut there where `skip_long` is set; else it raises FileWrong, and so do lines that a reader joins
    to one record and that are longer together: it sets `held` to 0 after each record.
    """

    def __init__(self, file: IO[bytes], *, packed: bool, errors: str = "surrogateescape", skip_long: bool = False):
        unpacked: Any = gzip.GzipFile(fileobj=file) if packed else file
        self.file = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors=errors, newline="")
        self.skip_long = skip_long
        self.number = self.held = 0

    def __iter__(self) -> Iterator[str]:
        """Raises FileWrong where it breaks off: a disk that fails, an archive whose end is missing."""
        try:
            while line := self.file.readline(MAX_LINE_CHARS):
                self.number += 1
                self.held += len(line)
                if self.held >= MAX_LINE_CHARS:
                    self.end_of_long(line)
                if self.number == 1 and line[:2] in ("\udcff\udcfe", "\udcfe\udcff"):
                    raise FileWrong("it is UTF-16; save it as UTF-8")
                yield line
        except (OSError, EOFError, zlib.error) as error:
            raise FileWrong(f"it breaks off after line {self.number:,}: {first_line(error)}") from None

    def end_of_long(self, line: str) -> None:
        if not self.skip_long:
            raise FileWrong(too_long(f"line {self.number:,}"))
        while line and line[-1] not in "\r\n":
            line = self.file.readline(MAX_LINE_CHARS)

    def where(self) -> str:
        return f"line {self.number:,}"


def too_long(where: str) -> str:
    return f"{where} is longer than {MAX_LINE_CHARS:,} characters"


def check_utf8(words: str) -> None:
    """Raises ValueError where bytes that were no UTF-8 were let through as lone surrogates."""
    if not words.isascii():
        try:
            words.encode()
        except UnicodeEncodeError:
            raise ValueError("it is not UTF-8") from None


# ---- JSONL -----------------------------------------------------------------------------------------------------------


def finite(digits: str) -> float:
    if math.isfinite(number := float(digits)):
        return number
    raise ValueError(f"{digits[:QUOTED_CHARS]} is not a JSON number")


DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)


def json_object(words: str) -> dict[str, Any]:
    """One JSON object, as large and as deep as a pair may be. Raises ValueError, RecursionError and PairRejected."""
    found = DECODER.decode(words)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    if len(words) > FEW_VALUES_CHARS or words.count("{") + words.count("[") > MAX_ATTRIBUTE_DEPTH:
        clean(found)  # Raises where it is nested deeper than Celery could carry it; slowly.
    return found


def jsonl_rows(lines: Lines) -> Iterator[Row]:
    for line in lines:
        lines.held = 0
        if line.isspace():
            continue
        try:
            if len(line) >= MAX_LINE_CHARS:
                raise PairRejected(ErrorCode.INVALID_PAIR, too_long("it"))
            check_utf8(line)
            row: Row = json_object(line)
        except (ValueError, RecursionError, PairRejected) as error:
            quoted = line[: 2 * QUOTED_CHARS].encode(errors="replace").decode().strip()[:QUOTED_CHARS]
            row = no_pair(lines.where(), error, f": {quoted}")
        yield row


def no_pair(where: str, error: BaseException, quoted: str = "") -> PairRejected:
    return PairRejected(ErrorCode.INVALID_PAIR, f"{where} is not a pair ({first_line(error)}){quoted}")


# ---- CSV -------------------------------------------------------------------------------------------------------------


def csv_rows(lines: Lines) -> Iterator[Row]:
    """Columns that are no field of a pair become its attributes; empty cells are not given, but for an empty text,
    which is the pair's own fault, to be recorded as such.
    """
    csv.field_size_limit(MAX_LINE_CHARS)
    reader = csv.reader(lines, strict=True)
    try:
        columns = [(name, name in PAIR_COLUMNS) for name in next(reader, [])]
        check_columns([name for name, _ in columns], "the first line of a CSV names its columns; missing:")
        for cells in reader:
            lines.held = 0
            if not cells:
                continue
            pair: dict[str, Any] = {"text": ""}
            attributes: dict[str, Any] = {}
            for (name, is_field), cell in zip(columns, cells, strict=False):
                if cell:
                    (pair if is_field else attributes)[name] = cell
            if len(cells) > len(columns):
                attributes["more columns"] = cells[len(columns) :]
            try:
                check_utf8("".join(cells))
            except ValueError as error:
                yield no_pair(lines.where(), error)
            else:
                yield {**pair, "attributes": attributes}
    except csv.Error as error:
        raise FileWrong(f"{lines.where()} is not CSV: {error}") from None


def check_columns(names: Sequence[str], lacking: str, needed: Collection[str] = ("image", "text")) -> None:
    """Raises FileWrong where one is missing, in the words `lacking`, or where two have one name."""
    if missing := set(needed) - set(names):
        raise FileWrong(f"{lacking} {', '.join(sorted(missing))}")
    if twice := {name for name in names if names.count(name) > 1}:
        raise FileWrong(f"two columns are named {', '.join(sorted(twice))}")
