"""Rows of any width: what is too wide is left out and counted, and the planner holds a page of the rest, not more."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from db import catalog_source
from tasks import nightly_sources
from tasks.catalogs import Catalog
from tasks.nightly_sources import Page, open_source
from tests.nightly.shop import Shop

MB = 1_000_000


def pages(shop: Shop, catalog: Catalog) -> list[Page]:
    """All pages of a catalog's source."""
    source = open_source(catalog, shop.settings)
    try:
        found = [source.page(None)]
        while (place := found[-1].position) is not None:
            found.append(source.page(place))
            assert len(found) < 1_000, "it comes to an end"
    finally:
        source.close()
    return found


def refs(found: list[Page]) -> list[str]:
    return [item["ref"] for page in found for item in page.items]


@pytest.mark.parametrize("column", ["image", "text", "premise", "policy", "attributes", "ref"])
def test_a_row_that_is_too_wide_is_left_out_and_counted(shop: Shop, column: str) -> None:
    shop.fill(3)
    wide = {"ref": "sku || repeat('x', 5000)", "attributes": "jsonb_build_object('a', repeat('x', 4000000))"}.get(
        column, "repeat('x', 4000001)"
    )
    columns = {"ref": "sku", "image": "image", "text": "title", "premise": "'p'", "policy": "'catalog'",
               "attributes": "attributes"}  # fmt: skip
    plain = ", ".join(f"{value} as {name}" for name, value in columns.items())
    bad = ", ".join(f"{value} as {name}" for name, value in {**columns, column: wide}.items())
    query = f"select {bad} from product where sku = 'sku-000001' union all select {plain} from product"
    night = shop.night(
        shop.catalog(query=f"select * from ({query}) q where ref <> 'sku-000001' or length({column}::text) > 99")
    )
    assert (night.state, night.planned, night.skipped) == ("done", 2, 1)
    assert night.summary is not None
    assert night.summary["skipped_rows"] == [
        "1 rows have a ref of more than 4,000 bytes" if column == "ref"
        else "the row 'sku-000001' is longer than 4,000,000 bytes"
    ]  # fmt: skip


def test_columns_that_an_item_has_not_are_not_read_however_wide_they_are(shop: Shop) -> None:
    shop.fill(3)
    shop.sql("alter table product add pdf bytea; update product set pdf = convert_to(repeat('x', 9000000), 'utf8')")
    night = shop.night(shop.catalog(query="select sku as ref, image, title as text, pdf from product"))
    assert (night.state, night.judged, night.skipped) == ("done", 3, 0)


def test_the_widest_pair_that_there_may_be_is_planned(shop: Shop) -> None:
    shop.sql("insert into product values (repeat('\U0001f45f', 1000), repeat('\U0001f45f', 2000), 't')")
    text, attributes = "repeat('\U0001f45f', 200000)", "jsonb_build_object('a', repeat('x', 2000000))"
    query = f"select sku as ref, image, {text} as text, {text} as premise, {attributes} as attributes from product"
    (page,) = pages(shop, shop.catalog(query=query))
    assert (len(page.items), page.left_out) == (1, 0)


@pytest.mark.parametrize("budget", [1, 30_000, 45_000, 1_000_000])
def test_pages_of_wide_rows_end_early_and_every_row_is_read_once(
    shop: Shop, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one ref stands on both sides of a page's end, and where what is too wide stands there."""
    monkeypatch.setattr(catalog_source, "PAGE_BYTES", budget)
    monkeypatch.setattr(catalog_source, "MAX_ROW_BYTES", 20_000)
    monkeypatch.setattr(nightly_sources, "ROWS_PER_PAGE", 10)
    shop.sql("alter table product drop constraint product_pkey; create index on product (sku)")
    shop.fill(30)
    shop.sql("update product set title = repeat('x', 10000)")
    shop.sql("update product set title = repeat('x', 30000) where right(sku, 1) in ('4', '5')")
    repeated = "sku in ('sku-000007', 'sku-000029')"
    shop.sql(f"insert into product select p.* from product p, generate_series(1, 14) where {repeated}")
    source = nightly_sources.Sql(shop.catalog().sql_source(shop.settings), rows_per_page=10)
    found = [source.page(None)]
    while (place := found[-1].position) is not None:
        found.append(source.page(place))
        assert len(found) < 100, "it comes to an end"
    assert refs(found) == [f"sku-{n:06}" for n in range(30) if n % 10 not in (4, 5)]
    assert (sum(page.repeats for page in found), sum(page.left_out for page in found)) == (28, 6)
    assert max(page.held for page in found) <= budget + 20_000


def test_a_message_of_wide_items_has_fewer_of_them(shop: Shop) -> None:
    shop.fill(20)
    shop.sql("update product set title = repeat('x', 200000)")
    night = shop.begin()
    shop.drive(shop.catalog(), night, lambda: shop.run(night).state != "planning")
    sizes = shop.sql("select length(body) as bytes, jsonb_array_length(convert_from(body, 'utf8')::jsonb -> 'pairs') as"
                     " pairs from outbox")  # fmt: skip
    assert sum(row["pairs"] for row in sizes) == 20
    assert max(row["bytes"] for row in sizes) < MB


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv.gz", "m.parquet"])
def test_pages_of_wide_lines_end_early_and_every_line_is_read_once(
    shop: Shop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly_sources, "PAGE_BYTES", 50_000)
    rows = [{"ref": f"{n:03}", "image": "s3://b/k", "text": "x" * 10_000} for n in range(60)]
    found = pages(shop, shop.catalog(manifest=shop.bucket.put(name, WRITTEN[name](rows))))
    assert refs(found) == [row["ref"] for row in rows]
    assert len(found) > 10
    assert max(page.held for page in found) <= 65_000


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def packed_csv(rows: list[dict[str, Any]]) -> bytes:
    return gzip.compress("".join(["ref,image,text\n", *(",".join(row.values()) + "\n" for row in rows)]).encode())


def parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as file

    sink = arrow.BufferOutputStream()
    file.write_table(arrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


WRITTEN: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "m.jsonl": jsonl, "m.csv.gz": packed_csv, "m.parquet": parquet,
}  # fmt: skip

#: Reads a source to its end in a process of its own, as the planner does; prints its items and its most memory in MB.
READS = """
import json, resource, sys
from tasks.nightly_sources import Sql
from db.catalog_source import SqlSource
source = Sql(SqlSource(sys.argv[1], "select sku as ref, image, title as text from product"))
items, left_out, place = 0, 0, None
while True:
    page = source.page(place)
    items, left_out, place = items + len(page.items), left_out + page.left_out, page.position
    if place is None:
        break
print(json.dumps([items, left_out, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def test_memory_does_not_grow_with_the_width_of_rows(shop: Shop) -> None:
    """A thousand rows, of which a hundred have a megabyte each and one a hundred: a fifth of a gigabyte on one page."""

    def read() -> tuple[int, int, float]:
        command = [sys.executable, "-c", READS, shop.database.url]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        items, left_out, megabytes = json.loads(done.stdout)
        return items, left_out, megabytes

    shop.fill(1_000)
    items, left_out, narrow = read()
    assert (items, left_out) == (1_000, 0)
    shop.sql("update product set title = repeat('x', 1000000) where sku < 'sku-000100'")
    shop.sql("update product set title = repeat('x', 100000000) where sku = 'sku-000050'")
    items, left_out, wide = read()
    assert (items, left_out) == (999, 1)
    assert wide < narrow + 100, "a page is 16 MB, which are held as bytes, as text and as rows"
