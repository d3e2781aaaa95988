"""Catalogs out of Postgres and out of manifests: what is read, what is left out and said, and what ends the night."""

import gzip
import io
import json
import threading
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from db.nights import Night
from tasks import nightly, nightly_sources
from tasks.catalogs import Catalog
from tests.line.site import eventually
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


def over(shop: Shop, catalog: Catalog, night: Night) -> Night:
    """Drive a night that was driven before until it is over: the last driver's lock is let go a moment after it."""

    def drive() -> Night | None:
        driven = shop.drive(catalog, night)
        return None if driven.is_open else driven

    return cast(Night, eventually(drive, "the night is over"))


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


FINE = "select sku as ref, image, title as text from product"
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
        ({"query": f"select image as text, * from ({FINE}) q"}, 'column reference "text" is ambiguous'),
        ({"query": f"with gone as (delete from product returning sku) {FINE}"}, "must be at the top level"),
        ({"query": f"{FINE} where writes() > 0"}, "cannot execute INSERT in a read-only transaction"),
        ({"query": f"{FINE} where unlocks() > 0"}, "read-write mode must be set before any query"),
        ({"query": f"{FINE} for update"}, "cannot execute SELECT FOR UPDATE in a read-only transaction"),
        ({"query": f"{FINE} /*"}, "unterminated /* comment"),
        ({"query": ""}, "syntax error"),
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
    for name, does in (("writes", ""), ("unlocks", "set transaction_read_only = off;")):
        does += "insert into product (sku) values ('written'); return 1;"
        shop.sql(f"create or replace function {name}() returns int language plpgsql as $$ begin {does} end $$")
    night = plan(shop, **fields)
    assert night.state == "failed"
    assert says in summary(night)["error"]
    assert "secret-word" not in summary(night)["error"] + caplog.text
    assert shop.sql("select count(*) as rows from product")[0]["rows"] == 1
    shop.sql("drop function writes(); drop function unlocks(); drop table private_product; drop sequence product_n")


def test_a_login_that_is_refused_fails_the_night_at_once(shop: Shop) -> None:
    at = urlsplit(shop.database.url)
    server = f"{at.hostname}:{at.port}"
    for dsn, says in (
        (f"postgresql://nobody:secret-word@{server}{at.path}", "authentication failed"),
        (f"postgresql://{at.username}:secret-word@{server}{at.path}", "authentication failed"),
        (f"postgresql://{at.username}@{server}{at.path}", "no password supplied"),
        (f"postgresql://{at.username}:{at.password}@{server}/nowhere", 'database "nowhere" does not exist'),
    ):
        # Where it were waited for, it would be for an hour.
        night = plan(shop, dsn=dsn, patience_s=3600)
        assert (night.state, says in summary(night)["error"]) == ("failed", True), summary(night)
        assert "secret-word" not in summary(night)["error"]


def test_a_source_in_an_alphabet_that_nobody_knows_is_read_as_far_as_it_is_utf_8(shop: Shop, stack: Any) -> None:
    """A database in SQL_ASCII keeps whatever bytes it was given."""
    from infra.local.postgres import OWNER

    name = "ascii_goods"
    with stack.postgres.connect(OWNER) as connection:
        connection.autocommit = True
        connection.execute(f"drop database if exists {name}")
        connection.execute(f"create database {name} encoding 'SQL_ASCII' locale 'C' template template0")
    dsn = stack.postgres.url(database=name)
    with stack.postgres.connect(OWNER, name) as connection:
        connection.execute("create table product (sku text, image text, title text, attributes jsonb)")
        connection.execute("grant select on product to public")
        connection.execute("insert into product values (convert_from('\\xc3a9', 'SQL_ASCII'), 'i', 't', '{}')")
    assert plan(shop, dsn=dsn).planned == 1
    assert body_of(shop)["ref"] == "é"
    with stack.postgres.connect(OWNER, name) as connection:
        connection.execute("update product set title = convert_from('\\xe9', 'SQL_ASCII')")
    night = plan_again(shop, dsn=dsn)
    assert (night.state, 'invalid byte sequence for encoding "UTF8"' in summary(night)["error"]) == ("failed", True)
    with stack.postgres.connect(OWNER) as connection:
        connection.autocommit = True
        connection.execute(f"drop database {name} with (force)")
    night = plan_again(shop, dsn=dsn)
    assert (night.state, "does not exist" in summary(night)["error"]) == ("failed", True)


def plan_again(shop: Shop, **fields: Any) -> Any:
    shop.sql("delete from run")
    return plan(shop, **fields)


def test_a_standby_that_ends_a_query_for_its_replay_is_asked_again(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """Its words and its SQLSTATE, as a function says them for a while."""
    conflict = "canceling statement due to conflict with recovery"
    shop.fill(3)
    shop.sql(
        f"""drop table if exists conflict; create table conflict as select true as is_on;
            grant select on conflict to public;
            create or replace function conflict() returns int language plpgsql as $$ begin
                if (select is_on from conflict) then raise sqlstate '40001' using message = '{conflict}'; end if;
                return 1; end $$"""
    )
    catalog = shop.catalog(query=f"{FINE} where conflict() > 0", patience_s=60)
    night = shop.begin(catalog)
    with shop.driving(catalog, night):
        eventually(lambda: conflict in caplog.text, "it is asked")
        shop.sql("update conflict set is_on = false")
        shop.is_in(night, "running")
    assert shop.run(night).planned == 3
    shop.sql("drop function conflict(); drop table conflict")


def test_keys_that_do_not_open_the_bucket_fail_the_night(shop: Shop) -> None:
    address = manifest(shop, "m.jsonl", jsonl(GOOD))
    shop.settings = shop.settings.model_copy(update={"s3_access_key_id": "nobody"})
    for fields in ({"manifest": address}, {"images": [f"s3://{shop.bucket.name}/"]}):
        night = plan(shop, **fields)
        assert night.state == "failed"
        assert f"s3://{shop.bucket.name}/" in summary(night)["error"] and "S3 answered" in summary(night)["error"]


@pytest.mark.parametrize(
    ("breaks", "mends", "says"),
    [
        ("alter table product rename to goods", "alter table goods rename to product", 'relation "product" does not'),
        ("alter table product rename title to name", "alter table product rename name to title", "title"),
        ("alter table product rename sku to ref_", "alter table product rename ref_ to sku", "sku"),
        ("revoke select on product from public", "grant select on product to public", "permission denied"),
    ],
)
def test_a_source_that_disappears_while_it_is_read_fails_the_night_which_is_resumed_once_it_is_back(
    shop: Shop, breaks: str, mends: str, says: str
) -> None:
    from db import nights

    shop.fill(2_500)
    catalog = shop.catalog()
    night = shop.begin()
    stopped = shop.drive(catalog, night, lambda: shop.run(night).planned > 0)
    assert (stopped.state, stopped.planned) == ("planning", 1_000)
    shop.sql(breaks)
    failed = over(shop, catalog, night)
    assert (failed.state, failed.planned) == ("failed", 1_000)
    assert says in summary(failed)["error"]
    shop.sql(mends)
    with shop.engine.begin() as connection:
        assert nights.resume(connection, night.id)
    with shop.working():
        done = over(shop, catalog, night)
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
        done = over(shop, catalog, night)
    assert (done.judged, len(set(shop.workers.judged)), done.skipped) == (3_500, 3_500, 0)


def test_lines_of_parquet_that_are_no_items_are_left_out_with_their_numbers(shop: Shop) -> None:
    rows = [{**GOOD, "ref": str(n)} for n in range(1_200)]
    rows[1_100] = {**GOOD, "ref": "y" * 1_001}
    rows[1_101] = {**GOOD, "ref": "long", "text": "x" * 4_000_001}
    night = plan(shop, manifest=shop.bucket.put("m.parquet", parquet(rows)), pairs_ahead=10_000)
    assert (night.planned, night.skipped) == (1_198, 2)
    assert summary_so_far(night) == [
        "row 1,101 has no ref of 1 to 1,000 characters",
        "row 1,102 is not a pair (it is longer than 4,000,000 characters)",
    ]


def summary_so_far(night: Any) -> list[str]:
    """What its summary will say of rows that were left out."""
    found: list[str] = night.position["skipped"]
    return found


def test_a_manifest_that_is_gone_while_it_is_read_fails_the_night_where_another_planner_goes_on(shop: Shop) -> None:
    body = jsonl(*({**GOOD, "ref": str(n)} for n in range(2_500)))
    catalog = shop.catalog(manifest=manifest(shop, "m.jsonl", body))
    night = shop.begin(catalog)
    shop.drive(catalog, night, lambda: shop.run(night).planned > 0)
    shop.bucket.client.delete_object(Bucket=shop.bucket.name, Key="m.jsonl")
    failed = over(shop, catalog, night)
    assert (failed.state, "S3 answered 404" in summary(failed)["error"]) == ("failed", True)


@pytest.mark.parametrize("began_on", ["query", "manifest"])
def test_a_night_that_goes_on_with_a_source_of_another_kind_fails_and_says_so(shop: Shop, began_on: str) -> None:
    shop.fill(2_500)
    body = jsonl(*({**GOOD, "ref": str(n)} for n in range(2_500)))
    kinds = {"query": shop.catalog(), "manifest": shop.catalog(manifest=manifest(shop, "m.jsonl", body))}
    night = shop.begin()
    shop.drive(kinds.pop(began_on), night, lambda: shop.run(night).planned > 0)
    failed = over(shop, *kinds.values(), night)
    assert (failed.state, "a source of another kind" in summary(failed)["error"]) == ("failed", True)


def test_a_manifest_that_is_replaced_while_it_is_read_fails_the_night(shop: Shop) -> None:
    body = jsonl(*({**GOOD, "ref": str(n)} for n in range(2_500)))
    catalog = shop.catalog(manifest=manifest(shop, "m.jsonl", body))
    night = shop.begin(catalog)
    shop.drive(catalog, night, lambda: shop.run(night).planned > 0)
    manifest(shop, "m.jsonl", jsonl(GOOD))
    failed = over(shop, catalog, night)
    assert failed.state == "failed"
    assert "was replaced while it was read" in summary(failed)["error"]
