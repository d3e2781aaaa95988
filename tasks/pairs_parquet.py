"""Pairs in Parquet, read a few rows at a time however large its row groups are. Needs the extra `parquet`."""

import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any
from uuid import UUID

from tasks.pairs_formats import (
    MAX_LINE_CHARS,
    PAIR_COLUMNS,
    FileWrong,
    Row,
    check_columns,
    json_object,
    no_pair,
    too_long,
)
from worker.errors import PairRejected, first_line
from worker.messages import MAX_ATTRIBUTE_DEPTH

#: Rows that are decoded at a time: so many, or fewer where they are large.
ROWS_PER_BATCH, BYTES_PER_BATCH = 1_000, 4_000_000
#: Bytes that are read of a column at a time; without it a whole row group is held.
BUFFER_BYTES = 1 << 18
UUID_BYTES = 16
#: What a value that is no JSON raises while it is turned into it: bytes that are no UTF-8, years that Python has not.
UNREADABLE = (ValueError, OverflowError, LookupError, TypeError)


class ParquetFile:
    """An open Parquet file: `number` is the row that was read last, of `total`.

    `needed` are its columns that must be there. Raises FileWrong.
    """

    def __init__(self, file: IO[bytes], needed: Collection[str] = ("image", "text")) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError:
            raise FileWrong("Parquet needs pyarrow: pip install '.[parquet]' in Concord's folder") from None
        self.broken = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
        self.number = 0
        try:
            self.file = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES)
            types = {column.name: column.type for column in self.file.schema_arrow}
            names = self.file.schema_arrow.names
        except self.broken as error:
            raise FileWrong(self.sentence(error)) from None
        check_columns(names, "it has no column", needed)
        for name, kind in types.items():
            check_type(name, kind)
        self.total: int = self.file.metadata.num_rows
        groups = [self.file.metadata.row_group(n) for n in range(self.file.metadata.num_row_groups)]
        largest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        self.rows_per_batch = max(1, min(ROWS_PER_BATCH, BYTES_PER_BATCH // max(largest, 1)))

    def rows(self) -> Iterator[Row]:
        """Rows as JSON has them: nulls are left out, moments and decimals are text."""
        try:
            for batch in self.file.iter_batches(batch_size=self.rows_per_batch, use_threads=False):
                names = batch.schema.names
                columns = [values_of(name, column) for name, column in zip(names, batch.columns, strict=True)]
                for values in zip(*columns, strict=True):
                    self.number += 1
                    yield self.row(dict(zip(names, values, strict=True)))
        except self.broken as error:
            raise FileWrong(self.sentence(error)) from None

    def row(self, values: dict[str, Any]) -> Row:
        row = {name: value for name, value in values.items() if value is not None}
        for name, value in row.items():
            if type(value) is Unreadable:
                return no_pair(self.where(), ValueError(f"{name}: {value}"))
        if sum(map(len, map(str, row.values()))) > MAX_LINE_CHARS:
            return no_pair(self.where(), ValueError(too_long("it")))
        return row

    def pairs(self) -> Iterator[Row]:
        """Rows as pairs: columns that are no field of one are among the attributes, which may be a string of JSON."""
        for row in self.rows():
            try:
                yield row if isinstance(row, PairRejected) else pair_of(row)
            except (ValueError, RecursionError, PairRejected) as error:
                yield no_pair(self.where(), ValueError(f"attributes: {first_line(error)}"))

    def where(self) -> str:
        return f"row {self.number:,}"

    def sentence(self, error: Exception) -> str:
        return f"it is no Parquet from row {self.number + 1:,} on: {first_line(error)}"


class Unreadable(str):
    """Stands in the place of a value that JSON has not, and says why."""


def values_of(name: str, column: Any) -> list[Any]:
    """A column's values as JSON has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a key that stands twice in a map the last counts.
        try:
            return [as_json(name, value) for value in in_microseconds(column).to_pylist(maps_as_pydicts="lossy")]
        except UNREADABLE:
            return [value_of(name, scalar) for scalar in column]


def value_of(name: str, scalar: Any) -> Any:
    try:
        return as_json(name, scalar.as_py(maps_as_pydicts="lossy"))
    except UNREADABLE as error:
        return Unreadable(first_line(error))


def in_microseconds(column: Any) -> Any:
    """Python has no moments of nanoseconds, and pandas and Spark write no others."""
    from pyarrow import timestamp, types

    if types.is_timestamp(column.type) and column.type.unit == "ns":
        return column.cast(timestamp("us", column.type.tz), safe=False)
    return column


def as_json(name: str, value: Any, depth: int = 1) -> Any:
    """A value of this column. Raises ValueError where it is none that JSON has."""
    if value is None or type(value) in (str, bool):
        return value
    if isinstance(value, int):
        return str(value) if name == "ref" and depth == 1 else value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{value} is not a JSON number")
        return None if math.isnan(value) else value  # Not a number is how pandas says that nothing was given.
    if isinstance(value, bytes):
        return str(UUID(bytes=value)) if name == "id" and len(value) == UUID_BYTES else value.decode()
    if depth > MAX_ATTRIBUTE_DEPTH:
        raise ValueError(f"nested deeper than {MAX_ATTRIBUTE_DEPTH}")
    if isinstance(value, Mapping):
        return {str(as_json(name, key, 2)): as_json(name, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(name, item, depth + 1) for item in value]
    return str(value)


def pair_of(row: dict[str, Any]) -> Row:
    """Raises ValueError, RecursionError or PairRejected for attributes that are no JSON object."""
    pair: dict[str, Any] = {"text": ""}  # None is the pair's own fault, to be recorded as such.
    others: dict[str, Any] = {}
    for name, value in row.items():
        (pair if name in PAIR_COLUMNS else others)[name] = value
    given = others.pop("attributes", None)
    if isinstance(given, str):
        given = json_object(given) if given not in ("", "null") else None
    if given:
        others |= {name: value for name, value in given.items() if value is not None}
    pair["attributes"] = others
    return pair


def check_type(name: str, kind: Any) -> None:
    """Raises FileWrong for a column of a pair's field that no value of the field could be in."""
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)
    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    good = any(getattr(types, f"is_{one}")(kind) for one in texts)
    if name == "attributes":
        good = good or types.is_struct(kind) or types.is_map(kind)
    elif name == "ref":
        good = good or types.is_integer(kind)
    elif name == "id":
        good = good or types.is_fixed_size_binary(kind)
    if not good and name in (*PAIR_COLUMNS, "attributes"):
        raise FileWrong(f"its column {name} holds {kind}, which is no {'object' if name == 'attributes' else 'text'}")
