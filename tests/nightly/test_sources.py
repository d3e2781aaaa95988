"""Catalogs out of Postgres and out of manifests: what is read, what is left out and said, and what ends the night."""

import gzip
import io
import json
import threading
from typing import Any

import pytest

from tasks import nightly, nightly_sources
from tests.nightly.shop import Shop


def summary(night: Any) -> dict[str, Any]:
    assert night.summary is not None
    found: dict[str, Any] = night.summary
    return found


def body_of(shop: Shop) -> dict[str, Any]:
    """The pair of the only message."""
    (row,) = shop.sql("select convert_from(body, 'UTF8')::jsonb as body from outbox")
    (pair,) = row["body"]["pairs"]
    return dict(pair)


def plan(shop: Shop, **fields: Any) -> Any:
    """A night up to the end of its planning, or its failing."""
    catalog = shop.catalog(**fields)
    night = shop.begin(catalog, again=True)
    return shop.drive(catalog, night, lambda: shop.run(night).state != "planning")


# ---- Postgres --------------------------------------------------------------------------------------------------------


def test_every_field_of_an_item_travels_into_its_pair(shop: Shop) -> None:
    query = """select 7 as ref, 's3://b/k' as image, 'it''s 100% {"wool"}' as text, 'p' as premise,
                      'prohibited' as policy, '{"category": "coat", "deep": [1]}'::jsonb as attributes,
                      now() as changed_at -- the newest;"""
    plan(shop, query=query)
    pair = body_of(shop)
    pair.pop("id")
    assert pair == {
        "ref": "7", "image": "s3://b/k", "text": 'it\'s 100% {"wool"}', "premise": "p", "policy": "prohibited",
        "attributes": {"category": "coat", "deep": [1]},
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["int", "bigint", "uuid", "text", "varchar(20)", "numeric(12, 3)"])
def test_refs_of_any_type_are_read_each_once(shop: Shop, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly_sources, "ROWS_PER_PAGE", 7)
    value = "md5(n::text)::uuid" if kind == "uuid" else "(n * 7919) % 1000"
    shop.sql(f"drop table product; create table product (sku {kind}, image text, title text, attributes jsonb)")
    shop.sql(f"insert into product select {value}, 'i', 't' from generate_series(1, 100) as n")
    shop.sql("grant select on product to public")
    source = nightly_sources.Sql(shop.catalog().sql_source(shop.settings), rows_per_page=7)
    refs, place = [], None
    while True:
        page = source.page(place)
        refs += [item["ref"] for item in page.items]
        if (place := page.position) is None:
            break
    assert len(refs) == len(set(refs)) == 100


def test_refs_that_stand_twice_are_judged_once_and_counted(shop: Shop) -> None:
    shop.sql("alter table product drop constraint product_pkey")
    shop.fill(1_500)
    shop.sql("insert into product select * from product where sku between 'sku-000990' and 'sku-001009'")
    shop.sql("insert into product select 'sku-000500', 'i', 't' from generate_series(1, 2500)")
    night = shop.night()
    assert (night.planned, night.judged, night.skipped) == (1_500, 1_500, 2_520)


def test_rows_without_a_ref_are_left_out_and_counted(shop: Shop) -> None:
    shop.sql("alter table product drop constraint product_pkey, alter column sku drop not null")
    shop.fill(3)
    shop.sql("insert into product select null, 'i', 't' from generate_series(1, 5)")
    shop.sql("insert into product values (repeat('x', 1001), 'i', 't')")
    night = shop.night()
    assert (night.state, night.planned, night.skipped) == ("done", 3, 6)
    assert summary(night)["skipped_rows"] == [
        f"the row '{'x' * 80}' has no ref of 1 to 1,000 characters",
        "5 rows have no ref",
    ]


SLOW = "select 1 as ref, '' as image, '' as text from pg_sleep(9)"
TWO_STATEMENTS = "select * from product) q; drop table product; select * from (select 1"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"query": "selekt * from product"}, "syntax error at or near"),
        ({"query": "select 1 as ref, 'a' as image"}, "the query yields no column text; it yields ref, image"),
        ({"query": "select * from nowhere"}, 'relation "nowhere" does not exist'),
        ({"query": "select body as ref, '' as image, '' as text from relay_lease"}, 'column "body" does not exist'),
        ({"query": "select ref, image, text, 1/(random()*0)::int as x from catalog_item"}, "empty"),
        ({"query": "select 1/0 as ref, '' as image, '' as text"}, "division by zero"),
        ({"query": "delete from product returning sku as ref, image, title as text"}, "syntax error"),
        ({"query": TWO_STATEMENTS}, "cannot insert multiple commands"),
        ({"query": "select nextval('product_n') as ref, '' as image, '' as text"}, "read-only transaction"),
        ({"query": "select * from private_product"}, "permission denied for table private_product"),
        ({"query": SLOW, "statement_timeout_s": 1}, "took over 1 s"),
        ({"table": "catalog_item"}, "the source is empty"),
        ({"table": "nowhere.item"}, 'relation "nowhere.item" does not exist'),
        ({"dsn": "postgresql://x:secret-word@127.0.0.1:1/none"}, "Connection refused"),
        ({"dsn": "what=is this secret-word"}, "the DSN cannot be read"),
        ({"manifest": "s3://no-such-bucket-here/m.jsonl"}, "S3 answered 404"),
        ({"images": ["s3://no-such-bucket-here/"]}, "S3 answered NoSuchBucket"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_read_fails_the_night_with_the_reason(
    shop: Shop, fields: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop.fill(1)
    shop.sql("drop sequence if exists product_n; create sequence product_n; grant all on sequence product_n to public")
    shop.sql("create table if not exists private_product (ref text)")
    night = plan(shop, **fields)
    assert night.state == "failed"
    assert says in summary(night)["error"]
    assert "secret-word" not in summary(night)["error"] + caplog.text
    assert shop.sql("select count(*) as rows from product")[0]["rows"] == 1


def test_keys_that_do_not_open_the_bucket_fail_the_night(shop: Shop) -> None:
    address = manifest(shop, "m.jsonl", jsonl(GOOD))
    shop.settings = shop.settings.model_copy(update={"s3_access_key_id": "nobody"})
    for fields in ({"manifest": address}, {"images": [f"s3://{shop.bucket.name}/"]}):
        night = plan(shop, **fields)
        assert night.state == "failed"
        assert f"s3://{shop.bucket.name}/" in summary(night)["error"] and "S3 answered" in summary(night)["error"]


def test_a_night_that_failed_is_resumed_once_its_source_is_mended(shop: Shop) -> None:
    from db import nights

    shop.fill(2_500)
    broken = shop.catalog(query="select sku as ref, image, title as text, 1 / (sku <> 'sku-001500')::int from product")
    night = shop.begin(broken)
    failed = shop.drive(broken, night)
    assert (failed.state, failed.planned) == ("failed", 1_000)
    with shop.engine.begin() as connection:
        assert nights.resume(connection, night.id)
    done = shop.drive_to_end(night)
    assert (done.state, done.planned, done.judged) == ("done", 2_500, 2_500)


def test_a_source_that_does_not_answer_is_waited_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from db.catalog_source import SourceAway, SqlSource

    shop.fill(3)
    tries = iter([SourceAway("no answer"), SourceAway("no answer")])
    page = SqlSource.page

    def away_twice(self: SqlSource, *arguments: Any) -> Any:
        for error in tries:
            raise error
        return page(self, *arguments)

    monkeypatch.setattr(SqlSource, "page", away_twice)
    assert shop.night(shop.catalog(patience_s=60)).judged == 3


def test_a_planner_that_is_stopped_while_the_source_is_away_leaves_the_night_to_the_next(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from db.catalog_source import SourceAway, SqlSource

    shop.fill(3)
    stop = threading.Event()

    def away(self: SqlSource, *_: Any) -> Any:
        stop.set()
        raise SourceAway("no answer")

    catalog = shop.catalog(patience_s=60)
    night = shop.begin(catalog)
    with monkeypatch.context() as patched:
        patched.setattr(SqlSource, "page", away)
        assert shop.drive(catalog, night, stop.is_set).state == "planning"
    assert shop.drive_to_end(night).judged == 3


def test_a_source_that_stays_away_longer_than_the_catalogs_patience_fails_the_night(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from db.catalog_source import SourceAway, SqlSource

    def away(self: SqlSource, *_: Any) -> Any:
        raise SourceAway("no answer")

    monkeypatch.setattr(SqlSource, "page", away)
    catalog = shop.catalog(patience_s=0)
    failed = shop.drive(catalog, shop.begin(catalog))
    assert (failed.state, failed.summary) == ("failed", {"error": "no answer"})


def test_the_shipped_table_is_read_by_its_source(shop: Shop) -> None:
    shop.sql(
        """insert into catalog_item (source, ref, image, text) values
           ('shop', 'a', 's3://b/1', 'a thing'), ('shop', 'b', 's3://b/2', 'a thing'),
           ('other', 'a', 's3://b/3', 'x')"""
    )
    night = shop.night(shop.catalog(table="catalog_item"))
    assert (night.judged, sorted(shop.workers.judged)) == (2, ["a", "b"])


# ---- The listing -----------------------------------------------------------------------------------------------------


def test_a_picture_that_was_replaced_under_its_name_is_judged_again(shop: Shop) -> None:
    for n in range(3):
        image = shop.bucket.put(f"pictures/{n}", b"before")
        shop.sql("insert into product values (:sku, :image, 'a thing')", sku=f"sku-{n}", image=image)
    catalog = shop.catalog(images=[f"s3://{shop.bucket.name}/pictures/"])
    assert shop.night(catalog, sample=0).planned == 3
    assert shop.night(catalog, sample=0, again=True).planned == 0
    shop.bucket.put("pictures/1", b"after")
    shop.workers.judged.clear()
    assert shop.night(catalog, sample=0, again=True).planned == 1
    assert shop.workers.judged == ["sku-1"]
    assert shop.sql("select count(*) as rows from catalog_object")[0]["rows"] == 0, "the listing is gone with its night"


def test_a_listing_that_a_crash_emptied_is_made_anew(shop: Shop) -> None:
    for n in range(3):
        shop.sql("insert into product values (:sku, :image, 'x')", sku=f"{n}", image=shop.bucket.put(f"{n}", b"1"))
    catalog = shop.catalog(images=[f"s3://{shop.bucket.name}/"])
    shop.night(catalog, sample=0)
    night = shop.begin(catalog, sample=0, again=True)
    # Listed, killed before the first page, and Postgres empties the table when it comes up after a crash of its own.
    nightly.list_objects(shop.engine, catalog, night, shop.settings, lambda: False)
    shop.sql("truncate catalog_object")
    with shop.working():
        assert shop.drive(catalog, night).planned == 0


# ---- Manifests -------------------------------------------------------------------------------------------------------

GOOD = {"ref": "a", "image": "s3://b/1", "text": "a thing", "attributes": {"category": "coat"}}


def manifest(shop: Shop, name: str, body: bytes) -> str:
    return shop.bucket.put(name, gzip.compress(body) if name.endswith(".gz") else body)


def jsonl(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


def csv(*lines: str) -> bytes:
    return "\n".join(["ref,image,text,category", *lines]).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    writer.write_table(arrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.gz", "m.csv", "m.csv.gz", "m.parquet"])
def test_a_manifest_of_each_kind_is_read(shop: Shop, name: str) -> None:
    body = {"m.j": jsonl(GOOD), "m.c": csv("a,s3://b/1,a thing,coat")}.get(name[:3]) or parquet([GOOD])
    plan(shop, manifest=manifest(shop, name, body))
    pair = body_of(shop)
    pair.pop("id")
    assert pair == GOOD


def test_lines_that_are_no_items_are_left_out_with_their_numbers(shop: Shop) -> None:
    lines = [{**GOOD, "ref": str(n)} for n in range(3)]
    deep = {**GOOD, "ref": "y", "attributes": json.loads("[" * 30 + "]" * 30)}
    nameless = {"image": "s3://b/1", "text": "x"}
    body = jsonl(lines[0], b"\n", b"{broken\n", nameless, lines[1], lines[1], b"[1]\n", lines[2], {**GOOD, "ref": ""})
    body += jsonl(deep)
    night = shop.night(shop.catalog(manifest=manifest(shop, "m.jsonl", body)))
    assert (night.state, night.judged, night.skipped) == ("done", 3, 6)
    says = summary(night)["skipped_rows"]
    assert [sentence.split(" ", 2)[:2] for sentence in says] == [["line", n] for n in ("3", "4", "7", "9", "10")]
    assert says[0].startswith("line 3 is not a pair (Expecting property name")
    assert says[1] == "line 4 has no ref of 1 to 1,000 characters"


def test_an_item_whose_picture_or_text_is_wrong_is_planned_and_has_its_own_verdict(shop: Shop) -> None:
    body = jsonl({"ref": "a", "text": "no picture"}, {"ref": "b", "image": "s3://b/1", "text": ""})
    assert plan(shop, manifest=manifest(shop, "m.jsonl", body)).planned == 2


def test_a_ref_that_stands_twice_pages_apart_is_judged_once(shop: Shop) -> None:
    body = jsonl(*({**GOOD, "ref": str(n % 1_500)} for n in range(3_000)))
    night = shop.night(shop.catalog(manifest=manifest(shop, "m.jsonl.gz", body)))
    assert (night.judged, night.skipped) == (1_500, 1_500)


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("m.jsonl", b"", "the source is empty"),
        ("m.jsonl", b"no\n" * 30, "the source names no item; 30 rows are none, the first: line 1 is not a pair"),
        ("m.csv", b"sku;picture\n", "missing: image, text"),
        ("m.csv", csv("a,s3://b/1,x,y", 'b,"open'), "line 3 is not CSV"),
        ("m.parquet", b"PAR1 not", "it is no Parquet from row 1 on"),
    ],
)
def test_a_manifest_that_cannot_be_read_fails_the_night(shop: Shop, name: str, body: bytes, says: str) -> None:
    night = plan(shop, manifest=shop.bucket.put(name, body))
    assert (night.state, says in summary(night)["error"]) == ("failed", True), summary(night)


def test_a_manifest_that_breaks_off_fails_the_night_and_says_where(shop: Shop) -> None:
    whole = gzip.compress(jsonl(*({**GOOD, "ref": f"{n} {n * 7919 % 10007}"} for n in range(5_000))))
    night = plan(shop, manifest=shop.bucket.put("m.jsonl.gz", whole[: len(whole) // 2]), pairs_ahead=1_000_000)
    assert night.state == "failed"
    assert "it breaks off after line" in summary(night)["error"]


def test_a_manifest_without_a_column_fails_the_night(shop: Shop) -> None:
    night = plan(shop, manifest=shop.bucket.put("m.parquet", parquet([{"ref": "a", "text": "x"}])))
    assert "it has no column image" in summary(night)["error"]


def test_a_planner_that_stops_in_a_manifest_goes_on_where_it_was(shop: Shop) -> None:
    body = jsonl(*({**GOOD, "ref": str(n)} for n in range(3_500)))
    catalog = shop.catalog(manifest=manifest(shop, "m.jsonl.gz", body))
    night = shop.begin(catalog)
    while shop.run(night).state == "planning":
        before = shop.run(night).planned
        shop.drive(catalog, night, lambda before=before: shop.run(night).planned > before)  # type: ignore[misc]
    with shop.working():
        done = shop.drive(catalog, night)
    assert (done.judged, len(set(shop.workers.judged)), done.skipped) == (3_500, 3_500, 0)


def test_a_manifest_that_is_replaced_while_it_is_read_fails_the_night(shop: Shop) -> None:
    body = jsonl(*({**GOOD, "ref": str(n)} for n in range(2_500)))
    catalog = shop.catalog(manifest=manifest(shop, "m.jsonl", body))
    night = shop.begin(catalog)
    shop.drive(catalog, night, lambda: shop.run(night).planned > 0)
    manifest(shop, "m.jsonl", jsonl(GOOD))
    failed = shop.drive(catalog, night)
    assert failed.state == "failed"
    assert "was replaced while it was read" in summary(failed)["error"]
