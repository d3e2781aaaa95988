"""Files of pairs in each form: what is read of them, and that whatever is wrong with one is said with its place."""

import csv
import gzip
import io
import json
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tasks import pairs_parquet
from tasks.pairs_file import PairsFile, read_rows
from tasks.pairs_formats import MAX_LINE_CHARS, FileWrong, Row
from worker.errors import ErrorCode, PairRejected
from worker.messages import MAX_TEXT_CHARS

GOOD = {"image": "s3://shop/1.jpg", "text": "a red shoe"}
ID = "0199c0de-0000-7000-8000-0000000000aa"

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def lines_of(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


def sentences(rows: list[Row]) -> list[str]:
    return [row.detail for row in rows if isinstance(row, PairRejected)]


def pairs(rows: list[Row]) -> list[dict[str, Any]]:
    return [row for row in rows if not isinstance(row, PairRejected)]


def refused(path: Path) -> str:
    """The sentence with which the file is, its name at the start."""
    with pytest.raises(FileWrong) as wrong:
        list(read_rows(path))
    said = str(wrong.value)
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    return said.removeprefix(f"{path}: ")


# ---- Lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.jsonl.gz", lines_of(GOOD, b"no pair\n", GOOD)),
        ("PAIRS.NDJSON.GZ", lines_of(GOOD, b"no pair\n", GOOD)),
        (
            "pairs.csv.gz",
            b"image,text\r\ns3://shop/1.jpg,a red shoe\r\ns3://shop/1.jpg,\xff\r\ns3://shop/1.jpg,a red shoe",
        ),
    ],
)
def test_a_gzipped_file_is_read_as_what_is_in_it(write: Write, name: str, content: bytes) -> None:
    rows = list(read_rows(write(name, gzip.compress(content))))
    assert [{**pair, "attributes": {}} for pair in pairs(rows)] == [{**GOOD, "attributes": {}}] * 2
    assert len(sentences(rows)) == 1


def test_a_gzipped_file_that_breaks_off_is_read_up_to_there(write: Write) -> None:
    whole = gzip.compress(lines_of(*({**GOOD, "ref": f"{n} {n * 7919 % 10007}"} for n in range(5_000))))
    path, read = write("pairs.jsonl.gz", whole[: len(whole) // 2]), 0
    with pytest.raises(FileWrong, match=r"it breaks off after line [\d,]+: Compressed file ended"):
        for _ in read_rows(path):
            read += 1
    assert 0 < read < 5_000


def test_a_file_that_only_is_named_gz_is_refused(write: Write) -> None:
    assert refused(write("pairs.jsonl.gz", lines_of(GOOD))).startswith("it breaks off after line 0: Not a gzipped file")


@pytest.mark.parametrize(
    ("name", "line", "header"),
    [
        ("pairs.jsonl", b'{"image": "s3://b/%d", "text": "%s"}\n', b"\n"),
        ("pairs.csv", b"s3://b/%d,%s\n", b"image,text\n"),
    ],
)
def test_lines_that_are_not_utf_8_are_left_out_with_their_numbers(
    write: Write, name: str, line: bytes, header: bytes
) -> None:
    texts = ["café".encode(), "café".encode("latin-1"), "thé \ufffd".encode()]
    content = header + b"".join(line % (number, text) for number, text in enumerate(texts, 1))
    rows = list(read_rows(write(name, content)))
    assert [(row["image"], row["text"]) for row in pairs(rows)] == [("s3://b/1", "café"), ("s3://b/3", "thé \ufffd")]
    (said,) = sentences(rows)
    assert said.startswith("line 3 is not a pair (it is not UTF-8)")
    said.encode()  # It can be printed.


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_as_that(write: Write, name: str, encoding: str) -> None:
    content = "\ufeff" + ("image,text\n" if name == "pairs.csv" else json.dumps(GOOD))
    assert "it is UTF-16; save it as UTF-8" in refused(write(name, content.encode(encoding)))


def test_a_line_of_nul_is_no_pair_and_a_cell_with_one_is(write: Write) -> None:
    rows = list(read_rows(write("pairs.jsonl", lines_of(GOOD, b"\0" * 50 + b"\n", GOOD))))
    assert ([pair["text"] for pair in pairs(rows)], len(sentences(rows))) == (["a red shoe"] * 2, 1)
    (row,) = read_rows(write("pairs.csv", "image,text\ns3://b/1,a\0b\n"))
    assert isinstance(row, dict)
    assert row["text"] == "a\0b"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_make_no_pair(write: Write, number: str) -> None:
    line = json.dumps({**GOOD, "attributes": {"price": 0}}).replace("0}", f"{number}}}")
    (said,) = sentences(list(read_rows(write("pairs.jsonl", line))))
    assert said.startswith(f"line 1 is not a pair ({number} is not a JSON number)")


def test_brackets_in_a_text_are_no_nesting(write: Write) -> None:
    row = {**GOOD, "text": "[{" * 50, "attributes": {"list": list(range(9_000))}}
    deep = {**GOOD, "attributes": json.loads('{"a":' * 21 + "1" + "}" * 21)}
    rows = list(read_rows(write("pairs.jsonl", lines_of(row, deep))))
    assert pairs(rows) == [row]
    assert sentences(rows)[0].startswith("line 2 is not a pair (attributes: nested deeper than 20)")


def test_a_line_without_end_is_left_out_in_little_memory_and_what_follows_is_read(write: Write) -> None:
    path = write("pairs.jsonl", lines_of(GOOD, b'{"text": "' + b"x" * 50_000_000 + b'"}\n', GOOD, b"x" * 9_000_000))
    tracemalloc.start()
    try:
        rows = list(read_rows(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pairs(rows) == [GOOD, GOOD]
    assert [said.split(": ")[0] for said in sentences(rows)] == [
        f"line {n} is not a pair (it is longer than 4,000,000 characters)" for n in (2, 4)
    ]
    assert most < 10 * MAX_LINE_CHARS


@pytest.mark.parametrize(
    "record",
    [
        "s3://b/1," + "x" * MAX_LINE_CHARS,
        's3://b/1,"' + "an open quote\n" * (MAX_LINE_CHARS // 10),
        's3://b/1,"' + 'cells without end\n","' * (MAX_LINE_CHARS // 10),
    ],
    ids=["a line", "a quote", "cells"],
)
def test_a_csv_record_without_end_is_refused_with_its_line(write: Write, record: str) -> None:
    said = refused(write("pairs.csv", f"image,text\ns3://b/0,a hat\n{record}"))
    assert said.startswith("line ")
    assert "is longer than 4,000,000 characters" in said or "field larger than field limit (4000000)" in said


def test_cells_as_long_as_a_text_may_be_are_read_whatever_their_number(write: Write) -> None:
    text = "a\n" * (MAX_TEXT_CHARS // 2)
    content = io.StringIO()
    csv.writer(content).writerows([["image", "text"], *(["s3://b/1", text] for _ in range(50))])
    assert [pair["text"] for pair in pairs(list(read_rows(write("pairs.csv", content.getvalue()))))] == [text] * 50


def test_columns_of_one_name_are_refused(write: Write) -> None:
    assert refused(write("pairs.csv", "text,image,text\n")) == "two columns are named text"


# ---- What is no file of pairs ----------------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("folder.jsonl", "pipe.jsonl"):
        assert refused(tmp_path / name).startswith("it is no regular file")
    assert refused(tmp_path / "nowhere.csv") == "No such file or directory"


def test_a_file_says_how_far_it_was_read(write: Write) -> None:
    content = lines_of(*({**GOOD, "ref": str(n)} for n in range(20_000)))
    for name, body in (("pairs.jsonl", content), ("pairs.jsonl.gz", gzip.compress(content))):
        with PairsFile(write(name, body)) as file:
            seen = [file.done() for _ in file.rows()]
            assert seen == sorted(seen)
            assert 0 < seen[0] < 0.2 < 0.8 < seen[-1] <= file.done() == 1.0
            assert file.where() == "line 20,000"


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz", "pairs.csv", "pairs.csv.gz", "pairs.parquet"])
def test_however_a_file_is_damaged_its_rows_are_json_or_it_is_refused(
    write: Write, table: Callable[..., Path], name: str
) -> None:
    chance = random.Random(name)
    whole = lines_of(*({**GOOD, "ref": str(n), "attributes": {"a": [n, {"b": n / 7}]}} for n in range(50)))
    if "csv" in name:
        whole = b"image,text,more\n" + b"".join(b's3://b/%d,"a ""red""\nshoe",%d\n' % (n, n) for n in range(50))
    elif "parquet" in name:
        whole = table(columns(50, ref=list(range(50)), attributes=[{"a": [n]} for n in range(50)])).read_bytes()
    whole = gzip.compress(whole) if name.endswith(".gz") else whole
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            place = chance.randrange(len(damaged))
            if chance.random() < 0.7:
                damaged[place] = chance.randrange(256)
            else:
                del damaged[place : place + chance.randrange(1, 20)]
        try:
            rows = list(read_rows(write(name, bytes(damaged))))
            json.dumps(pairs(rows), allow_nan=False)
            outcomes.add("read")
        except FileWrong:
            outcomes.add("refused")
    assert ("refused" in outcomes) == (name != "pairs.jsonl")


# ---- Parquet ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """A Parquet file of these columns."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def written(columns: Mapping[str, Any], **options: Any) -> Path:
        path = tmp_path / "pairs.parquet"
        parquet.write_table(arrow.table(dict(columns)), path, **options)
        return path

    return written


def columns(rows: int, **more: Any) -> dict[str, Any]:
    return {"image": ["s3://shop/1.jpg"] * rows, "text": ["a red shoe"] * rows, **more}


def test_other_columns_of_parquet_become_attributes_and_nulls_are_not_given(table: Callable[..., Path]) -> None:
    path = table(
        {
            "id": [ID, None], "ref": ["sku-1", None], "image": ["s3://shop/1.jpg", None], "text": ["a red shoe", None],
            "premise": [None, None], "policy": [None, "prohibited"],
            "attributes": [{"category": "shoes", "size": None}, None],
            "seller": ["s1", None], "price": [9.5, float("nan")], "tags": [["new", "red"], []], "left": [True, None],
        }
    )  # fmt: skip
    assert list(read_rows(path)) == [
        {
            "id": ID,
            "ref": "sku-1",
            **GOOD,
            "attributes": {"seller": "s1", "price": 9.5, "tags": ["new", "red"], "left": True, "category": "shoes"},
        },
        {"text": "", "policy": "prohibited", "attributes": {"tags": []}},
    ]


def test_attributes_of_parquet_may_be_a_struct_a_map_or_json(table: Callable[..., Path]) -> None:
    import pyarrow as arrow

    entries = [[("category", "shoes"), ("seller", "s1"), ("seller", "s2")], None, []]
    words = ['{"category": "shoes", "deep": {"list": [1, null]}}', "null", ""]
    for values, first in (
        (arrow.array(entries, arrow.map_(arrow.string(), arrow.string())), {"category": "shoes", "seller": "s2"}),
        ([{"a": {"b": [1]}}, None, {"a": None}], {"a": {"b": [1]}}),
        (words, {"category": "shoes", "deep": {"list": [1, None]}}),
    ):
        rows = pairs(list(read_rows(table(columns(3, attributes=values)))))
        assert [row["attributes"] for row in rows] == [first, {}, {}]


def test_attributes_that_are_no_json_object_make_no_pair_and_say_in_which_row(table: Callable[..., Path]) -> None:
    words = ['{"a": 1}', "{broken", "[1]", '{"a": ' * 30 + "1" + "}" * 30, '{"a": NaN}']
    rows = list(read_rows(table(columns(5, attributes=words))))
    assert len(pairs(rows)) == 1
    assert [said.split(": ")[0] for said in sentences(rows)] == [
        f"row {n} is not a pair (attributes" for n in (2, 3, 4, 5)
    ]


def test_values_that_json_has_not_are_written_as_text(table: Callable[..., Path]) -> None:
    import pyarrow as arrow

    moment = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    path = table(
        columns(
            1,
            id=arrow.array([UUID(ID).bytes], arrow.binary(16)),
            ref=[7],
            at=arrow.array([moment], arrow.timestamp("us", "UTC")),
            nanoseconds=arrow.array([1_769_860_800_250_000_999], arrow.timestamp("ns")),
            day=arrow.array([moment.date()]),
            price=[Decimal("9.50")],
            raw=[b"caf\xc3\xa9"],
            kind=arrow.array(["shoes"]).dictionary_encode(),
            nested=[[{"at": moment}]],
        )
    )
    (row,) = pairs(list(read_rows(path)))
    assert (row["id"], row["ref"]) == (ID, "7")
    assert row["attributes"] == {
        "at": "2026-01-31 12:00:00.250000+00:00", "nanoseconds": "2026-01-31 12:00:00.250000", "day": "2026-01-31",
        "price": "9.50", "raw": "café", "kind": "shoes", "nested": [{"at": "2026-01-31 12:00:00.250000+00:00"}],
    }  # fmt: skip
    json.dumps(row, allow_nan=False)


def test_a_value_that_cannot_be_written_at_all_costs_its_row_alone(table: Callable[..., Path]) -> None:
    import pyarrow as arrow

    far = arrow.array([0, 2**61, 0, 0, 0], arrow.timestamp("us"))
    numbers = [1.0, 1.0, float("inf"), 1.0, 1.0]
    texts = arrow.array([b"a", b"b", b"c", b"caf\xe9", b"e"])
    rows = list(read_rows(table({**columns(5, at=far, number=numbers), "text": texts})))
    assert [row["text"] for row in pairs(rows)] == ["a", "e"]
    assert [said.split(": ")[0] for said in sentences(rows)] == [
        "row 2 is not a pair (at", "row 3 is not a pair (number", "row 4 is not a pair (text"
    ]  # fmt: skip


def test_a_row_that_is_longer_than_any_pair_is_left_out(table: Callable[..., Path]) -> None:
    rows = list(read_rows(table({**columns(2), "text": ["x" * (MAX_LINE_CHARS + 1), "a hat"]})))
    assert [row["text"] for row in pairs(rows)] == ["a hat"]
    assert sentences(rows) == ["row 1 is not a pair (it is longer than 4,000,000 characters)"]


def test_nesting_without_end_makes_no_pair(table: Callable[..., Path]) -> None:
    import pyarrow as arrow

    kind, value = arrow.int64(), 1
    for _ in range(25):
        kind, value = arrow.list_(kind), [value]  # type: ignore[assignment]
    rows = list(read_rows(table(columns(2, deep=arrow.array([None, value], kind)))))
    assert (len(pairs(rows)), len(sentences(rows))) == (1, 1)
    assert "nested deeper than 20" in sentences(rows)[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"image": None}, "it has no column image"),
        ({"image": [5]}, "its column image holds int64, which is no text"),
        ({"text": [["a"]]}, "its column text holds list<element: string>, which is no text"),
        ({"ref": [1.5]}, "its column ref holds double, which is no text"),
        ({"id": [5]}, "its column id holds int64, which is no text"),
        ({"attributes": [5]}, "its column attributes holds int64, which is no object"),
    ],
)
def test_a_parquet_file_with_other_columns_is_refused(
    table: Callable[..., Path], wrong: dict[str, Any], says: str
) -> None:
    given = {name: values for name, values in columns(1, **wrong).items() if values is not None}
    assert refused(table(given)) == says


def test_a_parquet_file_without_rows_has_no_pairs(table: Callable[..., Path]) -> None:
    with PairsFile(table({"image": [], "text": []})) as file:
        assert list(file.rows()) == []


@pytest.mark.parametrize("damage", ["empty", "no end", "no start", "pages", "encrypted", "text"])
def test_a_damaged_parquet_file_is_refused_with_the_row(table: Callable[..., Path], write: Write, damage: str) -> None:
    texts = [f"{n} {random.Random(n).random()}" for n in range(5_000)]
    whole = table({**columns(5_000), "text": texts}, row_group_size=1_000, use_dictionary=False).read_bytes()
    middle = len(whole) // 2
    broken = {
        "empty": b"", "no end": whole[:middle], "no start": whole[middle:], "text": b"image,text\n",
        "pages": whole[:middle] + b"\xff" * 20_000 + whole[middle + 20_000 :],
        "encrypted": b"PARE" + whole[4:-4] + b"PARE",
    }  # fmt: skip
    path, read = write("damaged.parquet", broken[damage]), 0
    with pytest.raises(FileWrong) as wrong:
        for _ in read_rows(path):
            read += 1
    assert str(wrong.value).startswith(f"{path}: it is no Parquet from row {read + 1:,} on: ")
    assert bool(read) == (damage == "pages")


def test_without_pyarrow_the_extra_is_named(table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(columns(1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(path) == "Parquet needs pyarrow: pip install '.[parquet]' in Concord's folder"


def test_of_large_rows_few_are_decoded_at_a_time(table: Callable[..., Path]) -> None:
    texts = [str(n) * 200_000 for n in range(10)]
    path = table({**columns(10), "text": texts}, use_dictionary=False, compression="none")
    with path.open("rb") as file:
        assert 1 <= pairs_parquet.ParquetFile(file).rows_per_batch < 30
    assert [row["text"] for row in pairs(list(read_rows(path)))] == texts


def test_rows_are_numbered_across_row_groups(table: Callable[..., Path]) -> None:
    numbers = [float(n) for n in range(3_500)]
    numbers[2_999] = float("-inf")
    rows = list(read_rows(table(columns(3_500, number=numbers), row_group_size=1_500)))
    assert [row["attributes"]["number"] for row in pairs(rows)] == [n for n in numbers if n >= 0]
    assert sentences(rows) == ["row 3,000 is not a pair (number: -inf is not a JSON number)"]
    assert {row.code for row in rows if isinstance(row, PairRejected)} == {ErrorCode.INVALID_PAIR}
