"""The relay: one at a time, within Redis's window, and what Redis lost is published again, but never by age alone."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
from sqlalchemy import text

from db import outbox
from db.outbox import OutboxRow
from tasks import relay as module
from tasks import submit
from tasks.app import app
from tasks.relay import READ_ALL_EVERY_S, SEARCH_EVERY_S, Relay, pause_after, task_ids
from tasks.submit import publish
from tests.conftest import Database
from tests.shared import emptied_database
from tests.submit_env import configured
from worker.delivery import published_again
from worker.messages import TASK_NAME

database = emptied_database

WINDOW = 3


@pytest.fixture(autouse=True)
def producer(database: Database, redis_url: str) -> Iterator[None]:
    with configured(database_url=database.url, broker_url=redis_url):
        yield


@pytest.fixture
def relays(database: Database) -> Iterator[tuple[Relay, Relay]]:
    """Two that could be in two workers; neither's thread is started."""
    both = (
        Relay(database.url, {"live": WINDOW, "bulk": WINDOW}, 0.1),
        Relay(database.url, {"live": WINDOW, "bulk": WINDOW}, 0.1),
    )
    for name, relay in zip(("first", "second"), both, strict=True):
        relay.holder = name
    yield both
    for relay in both:
        relay.engine.dispose()


@pytest.fixture
def relay(relays: tuple[Relay, Relay]) -> Relay:
    relays[0].turn()
    return relays[0]


def sql(relay: Relay, statement: str, **parameters: Any) -> Any:
    with relay.engine.begin() as connection:
        return connection.execute(text(statement), parameters)


def accept(relay: Relay, number: int = 1, lane: str = "live", **fields: Any) -> list[UUID]:
    rows = [OutboxRow(uuid4(), lane, {"pairs": []}, **fields) for _ in range(number)]
    with relay.engine.begin() as connection:
        outbox.add(connection, rows)
    return [row.message_id for row in rows]


def publish_long_ago(relay: Relay, number: int = 1) -> list[UUID]:
    """Messages that were published, and reached Redis, a minute ago."""
    ids = accept(relay, number)
    relay.publish_due("live")
    age(relay)
    return ids


def age(relay: Relay) -> None:
    sql(relay, "update outbox set published_at = published_at - interval '1 minute'")


def publishes(relay: Relay) -> list[int]:
    return [row.publishes for row in sql(relay, "select publishes from outbox order by message_id")]


def queued(url: str, lane: str = "live") -> list[UUID]:
    with redis.Redis.from_url(url) as client:
        entries: Any = client.lrange(lane, 0, -1)
        return [UUID(json.loads(entry)["headers"]["id"]) for entry in entries]


def lose(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushdb()


def send_foreign(number: int, **options: Any) -> None:
    for _ in range(number):
        app.send_task(TASK_NAME, args=[{}], queue="live", **options)


def search(relay: Relay, looks: Sequence[float] = (0.0, SEARCH_EVERY_S)) -> None:
    for moment in looks:
        relay.publish_lost(moment)


def test_one_relay_holds_the_lease_and_the_other_does_nothing(relays: tuple[Relay, Relay], redis_url: str) -> None:
    first, second = relays
    first.turn()
    ids = accept(first)
    second.turn()
    assert (first.holds_lease, second.holds_lease) == (True, False)
    assert queued(redis_url) == []
    first.turn()
    assert queued(redis_url) == ids


def test_a_lease_that_ran_out_is_taken_over_and_its_frozen_holder_publishes_nothing_more(
    relays: tuple[Relay, Relay], redis_url: str
) -> None:
    first, second = relays
    first.turn()
    sql(first, "update relay_lease set expires_at = now() - interval '1 second'")
    second.turn()
    assert second.holds_lease
    accept(first)
    assert first.publish_due("live") == 0
    first.turn()
    assert not first.holds_lease
    assert queued(redis_url) == []


def test_a_holder_that_goes_lets_the_next_one_in_at_once_and_a_former_one_ends_nothing(
    relays: tuple[Relay, Relay],
) -> None:
    first, second = relays
    first.turn()
    first.give_up_lease()
    second.turn()
    assert second.holds_lease
    first.give_up_lease()
    first.turn()
    assert not first.holds_lease


def test_the_lease_is_renewed_by_every_turn(relay: Relay) -> None:
    sql(relay, "update relay_lease set expires_at = now() + interval '1 second'")
    relay.turn()
    left = sql(relay, "select extract(epoch from expires_at - now()) from relay_lease").scalar_one()
    assert float(left) > outbox.LEASE_S - 5


@pytest.mark.parametrize("lane", ["live", "bulk"])
def test_redis_holds_no_more_than_its_window_of_a_lane(relay: Relay, redis_url: str, lane: str) -> None:
    accept(relay, 2 * WINDOW, lane)
    relay.turn()
    relay.turn()
    assert len(queued(redis_url, lane)) == WINDOW
    with redis.Redis.from_url(redis_url) as client:
        client.rpop(lane)
    relay.turn()
    assert len(queued(redis_url, lane)) == WINDOW
    assert sorted(publishes(relay)) == [0] * (WINDOW - 1) + [1] * (WINDOW + 1)


def test_what_was_due_first_is_published_first_and_what_is_put_off_waits(relay: Relay, redis_url: str) -> None:
    (later,), (first,), (second,) = accept(relay, delay_s=3600.0), accept(relay), accept(relay)
    sql(relay, "update outbox set not_before = now() - interval '1 hour' where message_id = :id", id=second)
    relay.windows["live"] = 1
    relay.turn()
    assert queued(redis_url) == [second]
    relay.windows["live"] = WINDOW
    relay.turn()
    assert set(queued(redis_url)) == {first, second}
    sql(relay, "update outbox set not_before = now() where message_id = :id", id=later)
    relay.turn()
    assert set(queued(redis_url)) == {first, second, later}


def test_more_than_one_claims_worth_is_published_in_a_turn(
    relay: Relay, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_LIMIT", 2)
    relay.windows["bulk"] = 100
    accept(relay, 5, "bulk")
    relay.turn()
    assert len(queued(redis_url, "bulk")) == 5


def test_a_lane_whose_window_is_emptied_all_the_time_does_not_keep_the_other_waiting(
    relay: Relay, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_LIMIT", 1)
    monkeypatch.setattr(module, "queue_length", lambda lane: 0)
    accept(relay, 3 * WINDOW, "live")
    accept(relay, 1, "bulk")
    assert relay.turn() == 1.0
    assert (len(queued(redis_url, "live")), len(queued(redis_url, "bulk"))) == (WINDOW, 1)


@pytest.mark.parametrize(
    ("share", "pauses"),
    [(1.0, [0.2, 0.1, 0.05, 0.025, 0.02, 0.02]), (0.3, [0.4, 0.4]), (0.0, [0.5, 0.5])],
    ids=["a whole window is gone", "a part of it", "nothing"],
)
def test_the_faster_a_window_is_emptied_the_sooner_the_next_turn_and_never_at_once(
    share: float, pauses: list[float]
) -> None:
    pause = 0.4
    for expected in pauses:
        pause = pause_after(share, pause, poll_s=0.5)
        assert pause == expected


def test_after_an_error_the_pause_is_that_of_any_turn() -> None:
    for share in (0.0, 0.3, 1.0):
        assert pause_after(share, module.BACK_OFF_S, poll_s=0.5) == 0.5
    assert pause_after(1.0, 0.01, poll_s=0.01) == 0.01, "whoever wants turns more often gets them"


def test_a_turn_tells_how_much_of_a_window_it_filled(relay: Relay) -> None:
    assert relay.turn() == 0.0
    accept(relay, 1, "bulk")
    accept(relay, 2, "live")
    assert relay.turn() == 2 / WINDOW


def test_where_nothing_is_due_nothing_is_handed_over(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "publish", lambda rows: pytest.fail("nothing is handed over"))
    assert relay.turn() == 0.0


def test_a_message_that_cannot_be_published_is_recorded_and_its_neighbours_are_published(
    relay: Relay, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay.windows["live"] = 10
    ids = sorted(accept(relay, 7))
    culprit = ids[3]
    send = submit.send

    def picky(row: OutboxRow, producer: Any) -> None:
        if row.message_id == culprit:
            raise ValueError("no message can be made of it")
        send(row, producer)

    monkeypatch.setattr(submit, "send", picky)
    relay.turn()
    assert set(queued(redis_url)) == set(ids) - {culprit}
    (recorded,) = sql(relay, "select * from rejected_message")
    assert (recorded.message_id, recorded.error_code) == (culprit, "invalid_message")
    assert (recorded.body, recorded.error_detail) == (
        b'{"pairs": []}', "cannot be published: no message can be made of it",
    )  # fmt: skip
    assert len(publishes(relay)) == len(ids) - 1


def test_however_deep_a_body_is_nested_its_message_is_published_or_recorded(relay: Relay, redis_url: str) -> None:
    depths = range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 10, 3)
    relay.windows["bulk"] = len(depths)
    rows = {uuid4(): f'{{"pairs": {"[" * depth}{"]" * depth}}}'.encode() for depth in depths}
    with relay.engine.begin() as connection:
        outbox.add(connection, [OutboxRow(message_id, "bulk", {}) for message_id in rows])
        for message_id, body in rows.items():
            parameters = {"body": body, "message_id": message_id}
            connection.execute(text("update outbox set body = :body where message_id = :message_id"), parameters)
    relay.turn()
    recorded = {row.message_id: row.body for row in sql(relay, "select message_id, body from rejected_message")}
    assert recorded
    assert all(body == rows[message_id] for message_id, body in recorded.items())
    assert set(queued(redis_url, "bulk")) == rows.keys() - recorded.keys()


def test_what_was_claimed_but_never_published_is_found_missing_twice_and_published(
    relay: Relay, redis_url: str
) -> None:
    ids = accept(relay, attempts=2)
    with relay.engine.begin() as connection:
        (claimed,) = outbox.claim(connection, "live", 10)
    search(relay)
    assert queued(redis_url) == [], "it may be on its way"
    age(relay)
    relay.publish_lost(0.0)
    assert queued(redis_url) == [], "missing once may be bad luck"
    relay.publish_lost(SEARCH_EVERY_S)
    assert queued(redis_url) == ids
    assert (claimed.attempts, publishes(relay)) == (2, [2])
    search(relay, (2 * SEARCH_EVERY_S, 3 * SEARCH_EVERY_S))
    assert publishes(relay) == [2], "it was published a moment ago"


def test_what_redis_forgot_is_published_again(relay: Relay, redis_url: str) -> None:
    ids = publish_long_ago(relay, WINDOW)
    search(relay)
    lose(redis_url)
    search(relay, (10.0, 15.0))
    assert sorted(queued(redis_url)) == sorted(ids)
    assert publishes(relay) == [2] * WINDOW


def test_a_message_that_is_in_its_queue_is_left_there_however_old(relay: Relay, redis_url: str) -> None:
    ids = publish_long_ago(relay)
    search(relay, (0.0, 100.0, 200.0))
    assert queued(redis_url) == ids
    assert publishes(relay) == [1]


@pytest.mark.parametrize("priority", [0, 3, 6, 9])
def test_a_message_under_any_priority_is_seen(relay: Relay, redis_url: str, priority: int) -> None:
    (message_id,) = publish_long_ago(relay)
    lose(redis_url)
    app.send_task(TASK_NAME, args=[{}], task_id=str(message_id), queue="live", priority=priority)
    search(relay)
    assert publishes(relay) == [1]


def test_a_message_that_a_worker_holds_is_not_lost(relay: Relay, redis_url: str) -> None:
    publish_long_ago(relay)
    with app.connection_for_read() as connection, connection.channel() as channel:
        assert channel.basic_get("live") is not None
        assert queued(redis_url) == []
        search(relay)
        assert publishes(relay) == [1]


def test_a_message_that_is_settled_between_two_looks_is_not_published(relay: Relay, redis_url: str) -> None:
    (message_id,) = publish_long_ago(relay)
    lose(redis_url)
    relay.publish_lost(0.0)
    with relay.engine.begin() as connection:
        outbox.forget(connection, [(message_id, 0)])
    relay.publish_lost(5.0)
    assert queued(redis_url) == []


def test_a_message_that_waits_for_its_next_attempt_is_not_lost(relay: Relay, redis_url: str) -> None:
    (message_id,) = publish_long_ago(relay)
    lose(redis_url)
    relay.publish_lost(0.0)
    with relay.engine.begin() as connection:
        outbox.retry(connection, [OutboxRow(message_id, "live", {}, attempts=1, delay_s=60.0)])
    relay.publish_lost(5.0)
    assert queued(redis_url) == []


def test_counts_that_disagree_are_looked_into_at_once(relay: Relay, redis_url: str) -> None:
    ids = publish_long_ago(relay, 2)
    relay.publish_lost(0.0)
    lose(redis_url)
    send_foreign(1)
    search(relay, (5.0, 10.0))
    assert set(queued(redis_url)) > set(ids)


def test_messages_without_a_row_hide_a_lost_one_for_a_while_but_not_for_ever(relay: Relay, redis_url: str) -> None:
    publish_long_ago(relay)
    relay.publish_lost(0.0)
    lose(redis_url)
    send_foreign(2)
    search(relay, (5.0, 10.0))
    assert publishes(relay) == [1], "the counts leave nothing to be suspected"
    search(relay, (READ_ALL_EVERY_S, READ_ALL_EVERY_S + 5))
    assert publishes(relay) == [2]


def test_a_relay_that_lost_the_lease_forgets_what_it_missed(relays: tuple[Relay, Relay], redis_url: str) -> None:
    first, second = relays
    first.turn()
    publish_long_ago(first)
    lose(redis_url)
    first.publish_lost(0.0)
    sql(first, "update relay_lease set expires_at = now() - interval '1 second'")
    second.turn()
    first.turn()
    assert first.missing == set()


def test_a_relay_that_lost_the_lease_while_it_read_redis_makes_nothing_due(
    relays: tuple[Relay, Relay], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = relays
    first.turn()
    publish_long_ago(first)
    lose(redis_url)
    first.publish_lost(0.0)
    read = module.snapshot

    def read_slowly(*, contents: bool) -> module.InRedis:
        found = read(contents=contents)
        sql(first, "update relay_lease set expires_at = now() - interval '1 second'")
        second.turn()
        return found

    monkeypatch.setattr(module, "snapshot", read_slowly)
    first.publish_lost(5.0)
    assert [row.published_at is None for row in sql(first, "select published_at from outbox")] == [False]
    assert second.holds_lease


@pytest.mark.parametrize("attempts", [0, 1, 3])
@pytest.mark.parametrize("bare", [False, True], ids=["from the outbox", "bare"])
def test_only_losses_of_the_same_attempt_count(relay: Relay, redis_url: str, attempts: int, bare: bool) -> None:
    message_id = uuid4()
    with relay.engine.begin() as connection:
        if not bare:
            outbox.add(connection, [OutboxRow(message_id, "live", {})])
        for attempt in range(1, attempts + 1):
            connection.execute(text("update outbox set publishes = publishes + 3"))  # found lost twice
            outbox.retry(connection, [OutboxRow(message_id, "live", {}, attempts=attempt)])
        if bare and not attempts:  # put off: it comes back as the same attempt
            outbox.retry(connection, [OutboxRow(message_id, "live", {}, attempts=0)])
    for lost in (0, 1, 2):
        with relay.engine.begin() as connection:
            (row,) = outbox.claim(connection, "live", 10)
        assert published_again({"publishes": row.publishes}, {"attempts": row.attempts}) == lost
        sql(relay, "update outbox set published_at = null")


def test_a_message_that_has_another_id_in_celery_is_looked_for_and_published_under_that_one(
    relay: Relay, redis_url: str
) -> None:
    accept(relay, task_id="chosen by the sender")
    relay.publish_due("live")
    age(relay)
    search(relay)
    assert publishes(relay) == [1], "it is in its queue"
    lose(redis_url)
    search(relay, (10.0, 15.0))
    assert publishes(relay) == [2]
    with redis.Redis.from_url(redis_url) as client:
        (entry,) = [json.loads(raw) for raw in client.lrange("live", 0, -1)]
    assert entry["headers"]["id"] == "chosen by the sender"


def test_entries_that_are_no_messages_of_celery_are_passed_over() -> None:
    good = json.dumps({"headers": {"id": "one"}}).encode()
    held = json.dumps([{"headers": {"id": "other"}}, "live", "live"]).encode()
    bad = [b"\xff", b"5", b"[]", b"null", b"{}", b'{"headers": 5}', b'{"headers": {}}', b"[" * 100_000, b""]
    assert list(task_ids([good, *bad, held])) == ["one", "other"]


def test_rubbish_in_a_queue_does_not_keep_the_relay_from_what_was_lost(relay: Relay, redis_url: str) -> None:
    publish_long_ago(relay)
    lose(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("live", b"\xff not json", b"[" * 100_000)
    search(relay)
    assert publishes(relay) == [2]


def test_what_is_published_is_what_was_accepted(relay: Relay, redis_url: str) -> None:
    row = OutboxRow(uuid4(), "bulk", {"v": 1, "text": "\u00e9"}, wants_result=True)
    publish([row])
    with redis.Redis.from_url(redis_url) as client:
        (entry,) = [json.loads(raw) for raw in client.lrange("bulk", 0, -1)]
    message = app.connection_for_read().channel().message_to_python(entry)
    assert message.decode()[0] == [row.body]


def test_the_relay_outlives_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.relay.BACK_OFF_S", 0.0)
    relay = Relay("postgresql+psycopg://nobody@127.0.0.1:1/none", {"live": 1, "bulk": 1}, 0.0)
    turns, twice = [], threading.Event()

    def turn() -> None:
        turns.append(1)
        if len(turns) > 1:
            twice.set()
        raise MemoryError  # Its text is empty.

    monkeypatch.setattr(relay, "turn", turn)
    relay.start()
    assert twice.wait(10)
    relay.stop()
    assert not relay.is_alive()
