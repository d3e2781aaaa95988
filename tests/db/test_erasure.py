"""Erasing a ref: what the producer wrote is gone from wherever it lies, what identifies and counts stays."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4, uuid5

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from db import outbox, runs, verdicts
from db.engine import make_engine
from db.erasure import ERASED, GOES, GOES_WHOLE, erase, names
from db.outbox import OutboxRow, Rejected
from db.tables import METADATA
from db.verdicts import Settlement, Verdict
from tests.conftest import Database
from tests.db import rows
from tests.shared import emptied_database

database = emptied_database

#: Tables with nothing of one ref that a producer wrote: why they are left alone is in db/erasure.py or beside them.
WITHOUT_WORDS = {
    "batch", "model_version", "policy", "relay_lease", "retention", "run", "suspect", "catalog_object",
}  # fmt: skip
#: Tables whose bodies are searched.
SEARCHED = {"outbox", "rejected_message"}
#: What is kept of tables that have a row for each ref.
STAYS = {
    "verdict": {
        "submitted_at", "pair_id", "source", "ref", "run_id", "message_id", "lane", "status", "label", "p_entailment",
        "p_contradiction", "p_neutral", "answer", "policy", "policy_version", "decision", "error_code", "flags",
        "model_version_id", "image_sha256", "image_etag", "image_width", "image_height", "decode_mode", "content_hash",
        "attempts", "decided_at",
    },
    "catalog_state": {
        "source", "ref", "seen_in", "planned_as", "planned_fingerprint", "fingerprint", "gone_in", "judged_in", "label",
        "label_before", "policy", "p_entailment", "p_contradiction", "flags",
    },
}  # fmt: skip

SECRET = "Jane Doe's red shoe"
WORDS: dict[str, Any] = {
    "image": f"s3://shop/{SECRET}.jpg", "text": SECRET, "premise": SECRET, "text_scored": SECRET.lower(),
    "premise_scored": SECRET.lower(), "attributes": {"seller": SECRET},
}  # fmt: skip


@pytest.fixture
def owner(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.owner_url)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(owner: Engine) -> Iterator[Connection]:
    with owner.connect() as connection:
        yield connection
        connection.rollback()


def dump(connection: Connection) -> str:
    """Everything that every table holds, bodies as text."""
    tables = [
        connection.execute(text(f"select coalesce(string_agg(t::text, ' '), '') from {name} as t")).scalar_one()
        for name in METADATA.tables
    ]
    bodies = connection.execute(
        text(
            "select coalesce(string_agg(encode(body, 'escape'), ' '), '') from (select body from outbox union all"
            " select body from rejected_message) as bodies"
        )
    ).scalar_one()
    return " ".join([*tables, bodies]).lower()


def a_judged_pair(owner: Engine, number: int, **fields: Any) -> Verdict:
    hashes = {"image_sha256": b"sha", "image_etag": "etag", "content_hash": b"hash"}
    return rows.judged(rows.model(owner), number, **{"source": "shop", "ref": "sku-1", **WORDS, **hashes, **fields})


def write(connection: Connection, *rows_: Verdict) -> None:
    verdicts.settle(connection, Settlement(verdicts=rows_))


def test_every_column_that_may_hold_a_producers_words_is_known() -> None:
    assert WITHOUT_WORDS | SEARCHED | set(GOES) | GOES_WHOLE == set(METADATA.tables)
    for table, columns in GOES.items():
        assert columns | STAYS[table] == {column.name for column in METADATA.tables[table].columns}


def test_a_verdict_keeps_its_keys_hashes_and_scores_and_loses_every_word(owner: Engine, connection: Connection) -> None:
    write(connection, a_judged_pair(owner, 1))
    before = rows.all_of(connection, "verdict")[0]
    assert erase(connection, "shop", "sku-1").rows["verdict"] == 1
    (after,) = rows.all_of(connection, "verdict")
    assert {name for name in after if after[name] != before[name]} == {*WORDS, "flags"}
    assert all(not after[name] for name in WORDS)
    assert after["flags"] == [ERASED]
    assert "jane" not in dump(connection)


def test_other_refs_and_sources_are_left_alone(owner: Engine, connection: Connection) -> None:
    write(connection, a_judged_pair(owner, 1, ref="sku-10"), a_judged_pair(owner, 2, source="other"))
    before = rows.all_of(connection, "verdict")
    assert set(erase(connection, "shop", "sku-1").rows.values()) == {0}
    assert rows.all_of(connection, "verdict") == before


def test_erasing_again_changes_nothing(owner: Engine, connection: Connection) -> None:
    write(connection, a_judged_pair(owner, 1))
    erase(connection, "shop", "sku-1")
    before = rows.all_of(connection, "verdict")
    assert set(erase(connection, "shop", "sku-1").rows.values()) == {0}
    assert rows.all_of(connection, "verdict") == before


def message(*pairs: dict[str, Any], **fields: Any) -> OutboxRow:
    made = rows.message(lane="bulk")
    body = {"v": 1, "message_id": str(made.message_id), "submitted_at": rows.THIS_MONTH.isoformat(), "source": "shop"}
    return replace(made, body={**body, **fields, "pairs": list(pairs)})


def pair(ref: str | None, **fields: Any) -> dict[str, Any]:
    return {"id": str(uuid4()), "ref": ref, "image": WORDS["image"], "text": SECRET, **fields}


def unpublished(connection: Connection, *rows_: OutboxRow) -> None:
    outbox.add(connection, rows_)
    connection.execute(text("update outbox set published_at = null"))


def bodies(connection: Connection) -> list[dict[str, Any]]:
    return [json.loads(bytes(body)) for body in connection.execute(text("select body from outbox")).scalars()]


@pytest.mark.parametrize("ref", ["sku-1", 'Größe "42"', "\U0001f45f"])
def test_a_pair_that_waits_is_taken_out_of_its_message_and_settled(connection: Connection, ref: str) -> None:
    run = rows.a_run(connection, 2)
    gone, kept = pair(ref), pair("sku-10", text="a hat", image="s3://shop/hat.jpg")
    unpublished(connection, message(gone, kept, run_id=str(run.id)))
    done = erase(connection, "shop", ref)
    assert (done.rows["outbox"], done.in_work) == (1, 0)
    assert [body["pairs"] for body in bodies(connection)] == [[kept]]
    (verdict,) = rows.all_of(connection, "verdict")
    assert (verdict["pair_id"], verdict["ref"], verdict["text"]) == (UUID(gone["id"]), ref, None)
    assert (verdict["status"], verdict["error_code"], verdict["flags"]) == ("rejected", "revoked", [ERASED])
    assert runs.read(connection, run.id).rejected == 1
    assert "jane" not in dump(connection)


def test_an_error_of_an_earlier_attempt_goes_with_the_pair_that_it_quotes(connection: Connection) -> None:
    unpublished(connection, message(pair("sku-1"), pair("sku-10", text="a hat", image="s3://shop/hat.jpg")))
    connection.execute(text("update outbox set last_error = :why"), {"why": f"image_fetch_failed: {WORDS['image']}"})
    assert erase(connection, "shop", "sku-1").rows["outbox"] == 1
    assert "jane" not in dump(connection)


def test_a_message_of_nothing_else_goes_and_its_run_ends(connection: Connection) -> None:
    run = rows.a_run(connection, 2)
    unpublished(connection, message(pair("sku-1"), pair("sku-1"), run_id=str(run.id)))
    assert erase(connection, "shop", "sku-1").rows["outbox"] == 2
    assert bodies(connection) == []
    assert runs.read(connection, run.id).state == "done"


def test_pairs_that_stay_keep_the_ids_that_their_places_gave_them(connection: Connection) -> None:
    made = message(pair("sku-1"), {"ref": "b", "image": "s3://shop/b.jpg", "text": "b"})
    unpublished(connection, made)
    erase(connection, "shop", "sku-1")
    assert bodies(connection)[0]["pairs"][0]["id"] == str(uuid5(made.message_id, "1"))


def test_a_message_that_sql_enqueued_is_found_too(connection: Connection) -> None:
    body = json.dumps({"source": "shop", "pairs": [pair("Größe 42")]}, ensure_ascii=False)
    connection.execute(text("select enqueue(cast(:body as jsonb))"), {"body": body})
    assert erase(connection, "shop", "Größe 42").rows["outbox"] == 1
    assert "jane" not in dump(connection)


def test_what_workers_have_is_counted_and_left_to_them(connection: Connection) -> None:
    outbox.add(connection, [message(pair("sku-1"), pair("sku-1"), pair("sku-10"))])
    connection.execute(text("update outbox set published_at = now()"))
    done = erase(connection, "shop", "sku-1")
    assert (done.rows["outbox"], done.in_work) == (0, 2)
    assert len(bodies(connection)[0]["pairs"]) == 3


def test_a_message_that_another_transaction_holds_is_not_waited_for(owner: Engine, connection: Connection) -> None:
    with owner.begin() as made:
        unpublished(made, message(pair("sku-1")))
    with owner.connect() as relay:
        outbox.claim(relay, "bulk", 10)
        done = erase(connection, "shop", "sku-1")
        relay.rollback()
    assert (done.rows["outbox"], done.in_work) == (0, 1)


@pytest.mark.parametrize(
    "body",
    [b'not json, but "ref": "sku-1"', b'{"pairs": 5, "ref": "sku-1"}',
     b'{"source": "shop", "submitted_at": "never", "pairs": [{"ref": "sku-1"}]}'],
)  # fmt: skip
def test_messages_that_nobody_can_read_are_counted_and_left_to_the_relay(connection: Connection, body: bytes) -> None:
    unpublished(connection, message())
    connection.execute(text("update outbox set body = :body"), {"body": body})
    done = erase(connection, "shop", "sku-1")
    assert (done.rows["outbox"], done.in_work) == (0, 1)


def test_a_message_whose_month_is_gone_is_left_to_a_worker_which_refuses_it(connection: Connection) -> None:
    unpublished(connection, message(pair("sku-1"), submitted_at="2001-01-01T00:00:00+00:00"))
    done = erase(connection, "shop", "sku-1")
    assert (done.rows["outbox"], done.in_work) == (0, 1)
    assert len(bodies(connection)) == 1


def test_rejected_messages_that_name_the_ref_or_its_pair_lose_their_bodies(
    owner: Engine, connection: Connection
) -> None:
    judged = a_judged_pair(owner, 1)
    write(connection, judged)
    by_name = Rejected("live", "invalid_message", f"why {SECRET}", json.dumps({"pairs": [pair("sku-1")]}).encode())
    by_id = Rejected("live", "unstorable", "why", SECRET.encode(), pair_ids=[judged.pair_id], source="shop")
    another = Rejected("live", "invalid_message", "why", json.dumps({"pairs": [pair("sku-10", text="a hat")]}).encode())
    outbox.record_rejected(connection, [by_name, by_id, another])
    before = {row["id"]: row for row in rows.all_of(connection, "rejected_message")}
    assert erase(connection, "shop", "sku-1").rows["rejected_message"] == 2
    after = rows.all_of(connection, "rejected_message")
    emptied = [row for row in after if bytes(row["body"]) == b""]
    assert {row["error_code"] for row in emptied} == {"invalid_message", "unstorable"}
    assert {row["error_detail"] for row in emptied} == {ERASED}
    assert all(row["digest"] == before[row["id"]]["digest"] for row in after)
    assert len(emptied) == len(after) - 1


#: Refs that are words of every message, parts of each other, signs of LIKE and of regular expressions, and what JSON
#: writes in more than one way.
REFS = ["text", "id", "ref", "image", "sku-1", "sku-10", "sku-", "1", "s%u_1", "a.*", "%", 'say "x"', "back\\slash",
        "\\u0041", "a/b", "it's", "Größe", "日本", "\U0001f45f", "<b>&", "tab\there", "x\x7fy", " "]  # fmt: skip


def envelope(*pairs: Any, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "source": "shop", "submitted_at": "never", **fields, "pairs": list(pairs)}


def plainly(made: Any) -> bytes:
    return json.dumps(made, ensure_ascii=False).encode()


def as_php_does(made: Any) -> bytes:
    return json.dumps(made).replace("/", "\\/").encode()


def in_capitals(made: Any) -> bytes:
    """As .NET and Go do: what could stand in a page of HTML is escaped too, in capital hexadecimals."""
    written = "".join(f"\\u{ord(sign):04X}" if sign in "<>&'+" else sign for sign in json.dumps(made))
    return re.sub(
        r"(?<!\\)(\\\\)*\\u[0-9a-f]{4}", lambda found: found[0][:-4] + found[0][-4:].upper(), written
    ).encode()


SPELLINGS: dict[str, Callable[[Any], bytes]] = {
    "json": lambda made: json.dumps(made).encode(),
    "plain": plainly,
    "php": as_php_does,
    "capitals": in_capitals,
    "utf-16": lambda made: json.dumps(made).encode("utf-16"),
    "twice": lambda made: json.dumps(json.dumps(made)).encode(),
    "celery": lambda made: json.dumps([[made], {}, {"chain": None}]).encode(),
    "cut": lambda made: json.dumps(made).encode()[:-1],
    "cut, plain": lambda made: plainly(made)[:-1],
    "repr": lambda made: repr(made).encode(),
    "latin-1": lambda made: json.dumps(made, ensure_ascii=False).encode("latin-1", "replace"),
}


CANNOT_BE_SPELT = {("latin-1", "日本"), ("latin-1", "\U0001f45f"), ("repr", "x\x7fy")}


def rejected(connection: Connection, *bodies: bytes, **fields: Any) -> None:
    outbox.record_rejected(connection, [Rejected("live", "invalid_message", "why", body, **fields) for body in bodies])


def kept(connection: Connection) -> list[bytes]:
    return sorted(bytes(row["body"]) for row in rows.all_of(connection, "rejected_message") if row["body"])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_rejected_message_is_emptied_for_the_refs_that_it_names_and_no_other(
    connection: Connection, spelling: str
) -> None:
    for ref in REFS:
        if (spelling, ref) in CANNOT_BE_SPELT:
            continue
        body = SPELLINGS[spelling](envelope(pair(ref), image="s3://b/a/b", ref_of=ref, attributes={"ref": "gone"}))
        connection.execute(text("delete from rejected_message"))
        rejected(connection, body)
        for another in REFS:
            assert names(body, "shop", another) == (another == ref), (ref, another, body)
        assert erase(connection, "shop", ref).rows["rejected_message"] == 1, (ref, body)
        assert kept(connection) == []


@pytest.mark.parametrize(
    "body",
    [plainly(envelope({"text": "sku-1", "id": "sku-1", "sku": "sku-1", "attributes": {"ref": "sku-1"}})),
     plainly(envelope(pair("sku-1"), source="other")), plainly([envelope(), envelope(pair("sku-1"), source="x")]),
     plainly(["ref", "sku-1"]), b"ref sku-1", b'{"pairs": [{"text": "ref sku-1", "ref": "b"', b"href=sku-1", b'"sku-1"',
     b'{"ref": "sku-1" + "0"}'[:-9] + b'0"', b"\xff\xfe", b'{"ref": ["sku-1"]}', b"[" * 100_000],
)  # fmt: skip
def test_what_only_looks_like_the_refs_name_is_no_reason(connection: Connection, body: bytes) -> None:
    rejected(connection, body)
    assert set(erase(connection, "shop", "sku-1").rows.values()) == {0}
    assert kept(connection) == [body]


@pytest.mark.parametrize(
    "body",
    [plainly({"ref": 42}), plainly(envelope({"ref": "42", "source": "web"})), b'{"ref": "a", "ref": "42"}',
     b'{"ref": "42", "ref": "a"}', b"ref: 42\n", b"{'ref': '42'}", b"source=shop&ref=42&text=x", b'{"ref": "42',
     b'{"ref": "42", "text": "a\x01b", }', b"\x80\x04ref\x94\x8c\x0242\x94\x8c", b'{"text": "\xff", "ref" : "42"}',
     b'\xef\xbb\xbf{"ref": "42"}', b"[" * 100_000 + b'{"ref": "42"}'],
)  # fmt: skip
def test_however_it_is_written_the_refs_name_is_found(connection: Connection, body: bytes) -> None:
    rejected(connection, body)
    assert erase(connection, "shop", "42").rows["rejected_message"] == 1


def test_of_a_ref_in_half_characters_what_is_stored_is_found(connection: Connection) -> None:
    rejected(connection, b'{"pairs": [{"ref": "a\\ud800b\\u0000"}]}')
    assert erase(connection, "shop", "a\ufffdb\ufffd").rows["rejected_message"] == 1


def test_a_message_that_was_recorded_for_another_source_stays(connection: Connection) -> None:
    rejected(connection, plainly({"ref": "sku-1"}), source="other")
    assert erase(connection, "shop", "sku-1").rows["rejected_message"] == 0


@pytest.mark.parametrize("ref", REFS)
def test_of_messages_that_wait_only_the_refs_own_pairs_go(connection: Connection, ref: str) -> None:
    unpublished(connection, message(*(pair(one) for one in REFS)))
    done = erase(connection, "shop", ref)
    assert (done.rows["outbox"], done.in_work) == (1, 0)
    assert [one["ref"] for one in bodies(connection)[0]["pairs"]] == [one for one in REFS if one != ref]


def test_the_catalogs_books_and_its_item_lose_their_words(connection: Connection) -> None:
    for ref in ("sku-1", "sku-10"):
        connection.execute(
            text(
                "insert into catalog_item (source, ref, image, text) values ('shop', :ref, 's3://shop/1.jpg', :words)"
            ),
            {"ref": ref, "words": SECRET},
        )
        connection.execute(
            text(
                "insert into catalog_state (source, ref, seen_in, planned_fingerprint, fingerprint, attributes)"
                " values ('shop', :ref, gen_random_uuid(), 'f', 'f', :attributes)"
            ),
            {"ref": ref, "attributes": json.dumps({"seller": SECRET})},
        )
    done = erase(connection, "shop", "sku-1")
    assert (done.rows["catalog_item"], done.rows["catalog_state"]) == (1, 1)
    assert [row["ref"] for row in rows.all_of(connection, "catalog_item")] == ["sku-10"]
    state = {row["ref"]: row for row in rows.all_of(connection, "catalog_state")}
    assert (state["sku-1"]["attributes"], bytes(state["sku-1"]["fingerprint"])) == ({}, b"f")
    assert state["sku-10"]["attributes"] == {"seller": SECRET}


def test_a_worker_cannot_erase(database: Database) -> None:
    engine = make_engine(database.url)
    with engine.connect() as connection, pytest.raises(Exception, match="permission denied"):
        erase(connection, "shop", "sku-1")
    engine.dispose()
