"""`select enqueue(...)`: pairs handed over in SQL, inside the caller's own transaction."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from db import registry
from db.engine import make_engine
from tests.conftest import Database, _database
from tests.line.hostile import ODD
from worker.errors import MessageRejected
from worker.messages import Message, decode

PAIR = {"image": "s3://shop/1.jpg", "text": 'it\'s a "red" shoe \U0001f45f'}
GIVEN = "0199C0DE-0000-7000-8000-0000000000AA"


@pytest.fixture(scope="module")
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """One for all tests here, since they leave nothing in it that another would see."""
    yield from _database(stack, _migrated)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def enqueue(connection: Connection, value: Any, lane: str = "bulk") -> list[UUID]:
    statement = text("select enqueue(cast(:value as jsonb), :lane)")
    return list(connection.execute(statement, {"value": json.dumps(value), "lane": lane}).scalars())


def messages(connection: Connection) -> list[Message]:
    """The outbox's bodies as a worker reads them."""
    oldest = registry.oldest_verdict_time(connection)
    found = connection.execute(text("select message_id, body from outbox order by message_id")).all()
    read = [decode(json.loads(row.body), now=datetime.now(UTC), oldest=oldest) for row in found]
    assert [message.message_id for message in read] == [row.message_id for row in found]
    return read


def test_one_pair_becomes_a_message_that_a_worker_reads(connection: Connection) -> None:
    (made,) = enqueue(connection, {**PAIR, "ref": "sku-1", "policy": "prohibited", "attributes": {"a": [1]}})
    (message,) = messages(connection)
    (pair,) = message.pairs
    assert (pair.id, pair.ref, pair.text, pair.policy) == (made, "sku-1", PAIR["text"], "prohibited")
    assert pair.attributes == {"a": [1]}
    assert made.version == message.message_id.version == 7
    assert abs(message.submitted_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert not message.refused
    row = connection.execute(text("select lane, published_at, attempts from outbox")).one()
    assert tuple(row) == ("bulk", None, 0)


def test_the_lane_can_be_named_and_is_bulk_otherwise(connection: Connection) -> None:
    enqueue(connection, PAIR, "live")
    connection.execute(text("select enqueue(cast(:value as jsonb))"), {"value": json.dumps(PAIR)})
    lanes = connection.execute(text("select lane from outbox order by lane")).scalars()
    assert list(lanes) == ["bulk", "live"]


@pytest.mark.parametrize("form", ["list", "envelope"])
def test_many_pairs_are_cut_into_messages_of_64_and_their_ids_come_back_in_order(
    connection: Connection, form: str
) -> None:
    pairs = [{**PAIR, "ref": str(number)} for number in range(130)]
    ids = enqueue(connection, pairs if form == "list" else {"pairs": pairs})
    read = messages(connection)
    assert sorted(len(message.pairs) for message in read) == [2, 64, 64]
    by_ref = {pair.ref: pair.id for message in read for pair in message.pairs}
    assert ids == [by_ref[str(number)] for number in range(130)]
    assert len({message.submitted_at for message in read}) == 1


def test_an_envelopes_own_fields_travel_but_it_cannot_choose_its_key_or_version(connection: Connection) -> None:
    chosen = {"v": 9, "message_id": GIVEN, "submitted_at": "1999-01-01", "attempts": 7, "lane": "live"}
    enqueue(connection, {**chosen, "source": "emea", "fresh": True, "run_id": GIVEN, "pairs": [PAIR]})
    (message,) = messages(connection)
    assert (message.source, message.fresh, message.run_id, message.attempts) == ("emea", True, UUID(GIVEN), 0)
    assert message.message_id != UUID(GIVEN)


def test_ids_that_are_given_are_kept(connection: Connection) -> None:
    ids = enqueue(connection, [{**PAIR, "id": GIVEN}, {**PAIR, "id": None}, PAIR])
    assert ids[0] == UUID(GIVEN)
    assert [pair.id for pair in messages(connection)[0].pairs] == ids
    assert len(set(ids)) == 3


def test_an_empty_list_is_no_message(connection: Connection) -> None:
    assert enqueue(connection, []) == []
    assert messages(connection) == []


def test_what_is_rolled_back_was_never_accepted(engine: Engine, connection: Connection) -> None:
    with engine.connect() as caller:
        assert enqueue(caller, PAIR)
        assert messages(connection) == [], "nobody else sees it before the commit"
        caller.rollback()
    connection.rollback()
    assert messages(connection) == []


@pytest.mark.parametrize(
    ("value", "lane", "state"),
    [
        (PAIR, "express", "22023"),
        (PAIR, None, "23502"),
        (5, "bulk", "22023"),
        ("pairs", "bulk", "22023"),
        (None, "bulk", "22023"),
        ([PAIR, 5], "bulk", "22023"),
        ([[PAIR]], "bulk", "22023"),
        ([None], "bulk", "22023"),
        ({"pairs": PAIR}, "bulk", "22023"),
        ({"pairs": None}, "bulk", "22023"),
        ({"pairs": ["s3://shop/1.jpg"]}, "bulk", "22023"),
        ([PAIR, {**PAIR, "id": "sku-1"}], "bulk", "22P02"),
        ([{**PAIR, "id": "0192f0c1-2b7e-7000-8000-000000000001"}] * 2, "bulk", "22023"),
        ({**PAIR, "attributes": {"a": json.loads("[" * 30 + "]" * 30)}}, "bulk", "22023"),
        ({**PAIR, "attributes": {"a": 10**400}}, "bulk", "22023"),
        ({"source": "", "pairs": [PAIR]}, "bulk", "22023"),
        ({"source": 5, "pairs": [PAIR]}, "bulk", "22023"),
        ({"source": "s" * 201, "pairs": [PAIR]}, "bulk", "22023"),
        ({"fresh": "yes", "pairs": [PAIR]}, "bulk", "22023"),
        ({"run_id": "tonight", "pairs": [PAIR]}, "bulk", "22P02"),
    ],
)
def test_what_is_no_pair_is_refused_at_once_and_leaves_nothing(
    connection: Connection, value: Any, lane: Any, state: str
) -> None:
    with pytest.raises(DBAPIError) as caught:
        enqueue(connection, value, lane)
    assert getattr(caught.value.orig, "sqlstate", None) == state
    connection.rollback()
    assert messages(connection) == []


def test_a_null_is_refused_like_any_other_value_that_is_no_pair(connection: Connection) -> None:
    with pytest.raises(DBAPIError, match="enqueue takes one pair"):
        connection.execute(text("select enqueue(null)"))


FIELDS_OF_A_MESSAGE = (
    "v", "message_id", "submitted_at", "run_id", "source", "fresh", "attempts", "replaced", "settled", "pairs", "other",
)  # fmt: skip
FIELDS_OF_A_PAIR = ("id", "ref", "image", "text", "premise", "policy", "attributes", "other")


def hostile_values() -> Iterator[tuple[str, str]]:
    """JSON in which one value is not what it should be; some of it is text that is no JSON to Postgres."""
    # Python writes neither.
    for odd in [*map(json.dumps, ODD), "[" * 3_000 + "]" * 3_000, "1" * 5_000]:
        yield "the whole", odd
        yield "a pair", f"[{json.dumps(PAIR)}, {odd}]"
        for field in FIELDS_OF_A_MESSAGE:
            yield f"{field} of the message", f'{{"pairs": [{json.dumps(PAIR)}], "{field}": {odd}}}'
        for field in FIELDS_OF_A_PAIR:
            yield f"{field} of a pair", f'[{json.dumps(PAIR)}, {json.dumps(PAIR)[:-1]}, "{field}": {odd}}}]'


def enqueued_or_refused(connection: Connection, value: str) -> list[UUID] | str:
    """The ids, or the SQLSTATE."""
    try:
        with connection.begin_nested():
            return list(connection.execute(text("select enqueue(cast(:value as jsonb))"), {"value": value}).scalars())
    except DBAPIError as error:
        return str(getattr(error.orig, "sqlstate", None))


def test_whatever_is_enqueued_is_refused_at_once_or_read_by_a_worker(connection: Connection) -> None:
    """What is accepted is accepted for good: a message that no worker could read would be its pairs' only trace."""
    accepted = 0
    for what, value in hostile_values():
        ids = enqueued_or_refused(connection, value)
        if isinstance(ids, str):
            # Not of the right kind, or deeper than Postgres goes.
            assert ids[:2] in ("22", "23") or ids == "54001", f"{ids}, {what}: {value[:200]}"
            continue
        try:
            read = messages(connection)
        except (MessageRejected, ValueError, RecursionError) as error:
            raise AssertionError(f"{what}: {value[:200]}") from error
        known = [one.id for message in read for one in (*message.pairs, *message.refused)]
        assert sorted(known) == sorted(ids), f"{what}: {value[:200]}"
        accepted += bool(ids)
        connection.execute(text("delete from outbox"))
    assert accepted > 100
