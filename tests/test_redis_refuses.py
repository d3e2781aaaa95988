"""A Redis that answers and refuses (full, a replica, loading, another password): the outbox keeps what was accepted."""

import json
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from sqlalchemy import text

from db import outbox
from db.outbox import OutboxRow
from infra.local.redis import Redis
from tasks.relay import SEARCH_EVERY_S, Relay
from tasks.submit import Pair, engine, publish, redis_errors, submit, uuid7
from tests.conftest import Database
from tests.redis_server import REFUSALS, Refusing, redis_server
from tests.shared import emptied_database
from tests.submit_env import configured

database = emptied_database
own_redis = redis_server

WINDOW = 3


@pytest.fixture
def producer(database: Database, own_redis: Redis) -> Iterator[None]:
    with configured(database_url=database.url, broker_url=own_redis.url()):
        yield


@pytest.fixture
def relay(database: Database, producer: None) -> Iterator[Relay]:
    relay = Relay(database.url, {"live": WINDOW, "bulk": WINDOW}, 0.1)
    relay.turn()
    yield relay
    relay.engine.dispose()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"a producer would wait for {seconds} s")

    monkeypatch.setattr("time.sleep", sleep)


def pairs(number: int = 1) -> list[Pair]:
    return [Pair(ref=f"sku-{n}", image="s3://shop/1.jpg", text="a red shoe") for n in range(number)]


def rows() -> list[dict[str, Any]]:
    with engine().connect() as connection:
        return [dict(row) for row in connection.execute(text("select * from outbox order by message_id")).mappings()]


def queued(server: Redis, lane: str = "live") -> list[str]:
    with redis.Redis.from_url(server.url()) as client:
        entries: Any = client.lrange(lane, 0, -1)
        return [json.loads(entry)["headers"]["id"] for entry in entries]


def accept(number: int) -> list[str]:
    messages = [OutboxRow(uuid7(), "live", {"pairs": []}) for _ in range(number)]
    with engine().begin() as connection:
        outbox.add(connection, messages)
    return sorted(str(message.message_id) for message in messages)


@pytest.mark.parametrize("how", REFUSALS)
@pytest.mark.usefixtures("producer", "no_waiting")
def test_live_pairs_are_accepted_and_left_to_the_relay(
    own_redis: Redis, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Refusing(own_redis, how):
        done = submit(pairs())
        assert [row["message_id"] for row in rows()] == done.message_ids
        assert queued(own_redis) == []
    assert "the relay will publish 1 messages" in caplog.text


@pytest.mark.parametrize("how", REFUSALS)
@pytest.mark.usefixtures("producer")
def test_a_producer_that_was_refused_connects_anew(own_redis: Redis, how: str) -> None:
    """What was the master may be a replica by then, and another machine the master. It is kombu that does this."""
    with redis.Redis.from_url(own_redis.url()) as client:
        ours = client.client_id()

        def others() -> set[str]:
            return {each["id"] for each in client.client_list() if each["id"] != str(ours)}

        submit(pairs())
        first = others()
        with Refusing(own_redis, how):
            submit(pairs())
        done = submit(pairs())
        assert queued(own_redis)[0] == str(done.message_ids[0])
        assert not first & others()


@pytest.mark.parametrize("how", REFUSALS)
def test_what_the_relay_could_not_publish_is_due_again_and_no_more_is_claimed(
    own_redis: Redis, relay: Relay, how: str
) -> None:
    ids = accept(2 * WINDOW)
    with Refusing(own_redis, how):
        for _ in range(3):
            with pytest.raises(redis_errors()):
                relay.turn()
        assert [(row["published_at"], row["publishes"]) for row in rows()] == [(None, 0)] * len(ids)
    relay.turn()
    assert sorted(queued(own_redis)) == ids[:WINDOW]
    assert [row["publishes"] for row in rows()] == [1] * WINDOW + [0] * WINDOW


def test_live_pairs_that_could_not_be_published_come_into_the_window_one_by_one(own_redis: Redis, relay: Relay) -> None:
    with Refusing(own_redis):
        ids = sorted(str(submit(pairs()).message_ids[0]) for _ in range(2 * WINDOW))
    assert all(row["published_at"] for row in rows()), "they are looked for like any others"
    with relay.engine.begin() as connection:
        connection.execute(text("update outbox set published_at = published_at - interval '1 minute'"))
    for look in (0.0, SEARCH_EVERY_S):
        relay.publish_lost(look)
    assert sorted(queued(own_redis)) == ids[:WINDOW]
    with redis.Redis.from_url(own_redis.url()) as client:
        client.delete("live")
    with relay.engine.begin() as connection:
        connection.execute(text("delete from outbox where published_at is not null"))
    relay.turn()
    assert sorted(queued(own_redis)) == ids[WINDOW:]


#: Of bodies that Redis has room for a part of.
LONG, ROOM = 50_000, 1_000_000


def test_what_redis_takes_in_the_middle_of_a_batch_stays_published_and_the_rest_is_due_again(
    own_redis: Redis, relay: Relay
) -> None:
    relay.windows["live"] = 100
    ids = sorted(str(row.message_id) for row in accept_long(40))
    with redis.Redis.from_url(own_redis.url()) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + ROOM)
        for _ in range(3):
            with pytest.raises(redis_errors()):
                relay.turn()
        taken = queued(own_redis)
        assert 0 < len(taken) < len(ids)
        published = {str(row["message_id"]) for row in rows() if row["published_at"]}
        assert published == set(taken)
        assert sorted(taken) == sorted(set(taken)), "each once, however often the relay has tried"
        client.config_set("maxmemory", 0)
    relay.turn()
    assert sorted(queued(own_redis)) == ids
    assert {row["publishes"] for row in rows()} == {1}


def test_an_error_of_a_batch_quotes_nobody(own_redis: Redis, relay: Relay) -> None:
    (row,) = accept_long(1)
    for how in REFUSALS:
        with Refusing(own_redis, how), pytest.raises(redis_errors()) as caught:
            publish([row, row])
        assert len(str(caught.value)) < 200
        assert "LPUSH" not in str(caught.value)


def accept_long(number: int) -> list[OutboxRow]:
    messages = [OutboxRow(uuid7(), "live", {"pairs": ["x" * LONG]}) for _ in range(number)]
    with engine().begin() as connection:
        outbox.add(connection, messages)
    return messages


class Answer(socketserver.StreamRequestHandler):
    """Answers every command with the one error."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            for _ in range(2 * int(line[1:])):
                self.rfile.readline()
            self.wfile.write(f"-{self.server.error}\r\n".encode())  # type: ignore[attr-defined]


@pytest.fixture(
    params=[
        "LOADING Redis is loading the dataset in memory",
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "MISCONF Errors writing to the AOF file: No space left on device",
    ]
)
def refusing_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a Redis that has one answer."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        server.error = request.param  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        thread.join()


def test_whatever_it_answers_a_producer_is_not_held_up_and_the_relay_tries_again(
    database: Database, refusing_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with configured(database_url=database.url, broker_url=refusing_url):
        with monkeypatch.context() as patched:
            patched.setattr("time.sleep", lambda seconds: pytest.fail(f"a producer would wait for {seconds} s"))
            done = submit(pairs())
        assert [(row["message_id"], row["published_at"]) for row in rows()] == [(done.message_ids[0], None)]
        relay = Relay(database.url, {"live": WINDOW, "bulk": WINDOW}, 0.1)
        with pytest.raises(redis_errors()):
            relay.turn()
        relay.engine.dispose()
        assert [row["published_at"] for row in rows()] == [None]
