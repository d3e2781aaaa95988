"""The faults of kombu's Redis transport: seen on a real Redis without the guards, gone with them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kombu
import pytest
import redis
from kombu.transport import redis as transport
from redis.exceptions import ConnectionError as Gone
from redis.exceptions import ResponseError

from infra.local.redis import Redis
from tests.redis_server import Refusing, redis_server
from tests.submit_env import environment
from worker import kombu_guards
from worker.kombu_guards import NOT_JSON, as_message, is_message

own_redis = redis_server

#: Takes a message and asks for the next, waits until it is told that Redis is gone, and closes as Celery's worker does
#: that lost its connection: first the connection, then the channel of its consumer.
CLOSE_WITHOUT_REDIS = """
import socket, sys
from kombu import Connection, Consumer, Queue
from worker import kombu_guards
if sys.argv[2] == "guarded":
    kombu_guards.install()
connection = Connection(sys.argv[1])
channel = connection.channel()
consumer = Consumer(channel, [Queue("live")], on_message=lambda message: None)
consumer.consume()
connection.Producer().publish({}, routing_key="live")
try:
    while True:
        connection.drain_events(timeout=0.2)
except socket.timeout:
    assert channel.qos._delivered
print("held", flush=True)
sys.stdin.readline()
connection.collect()
channel.close()
print("left to the visibility timeout:", len(channel.qos._delivered))
"""


@pytest.mark.parametrize("guarded", ["guarded", "plain"])
def test_a_connection_that_closes_while_redis_is_gone_only_forgets_what_it_held(own_redis: Redis, guarded: str) -> None:
    command = [sys.executable, "-c", CLOSE_WITHOUT_REDIS, own_redis.url(), guarded]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() == "held\n":
            own_redis.kill()
        out, err = process.communicate("gone\n", timeout=60)
    if guarded == "guarded":
        assert (process.returncode, out) == (0, "left to the visibility timeout: 0\n"), err
    elif kombu.__version__ in kombu_guards.RESTORE_FAULT_IN:
        assert process.returncode == 1
        assert "AttributeError: 'NoneType' object has no attribute" in err


def consume(url: str) -> list[Any]:
    """Everything that waits in `live`, as a consumer gets it."""
    got: list[Any] = []
    with kombu.Connection(url) as connection, connection.channel() as channel:
        queue = kombu.Queue("live")
        with kombu.Consumer(channel, [queue], on_message=got.append, accept=["json"]):
            while channel._size("live"):
                connection.drain_events(timeout=5)
        for message in got:
            message.ack()
    return got


GOOD = {
    "body": "e30=",
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": {},
    "properties": {
        "body_encoding": "base64",
        "delivery_tag": "1",
        "delivery_info": {"exchange": "live", "routing_key": "live"},
    },
}


def with_properties(**changed: Any) -> dict[str, Any]:
    return {**GOOD, "properties": {**GOOD["properties"], **changed}}  # type: ignore[dict-item]


BAD_SHAPES = [
    5,
    None,
    [],
    [1, 2],
    {},
    {"body": "e30="},
    {**GOOD, "properties": None},
    {**GOOD, "properties": {}},
    {**GOOD, "headers": [1]},
    {**GOOD, "body": 5},
    {**GOOD, "body": {"a": 1}},
    {**GOOD, "body": "not base64!"},
    with_properties(delivery_tag=5),
    with_properties(delivery_info=None),
    with_properties(delivery_info={}),
    with_properties(delivery_info={"exchange": "live"}),
    # Redis keeps no lone surrogates.
    with_properties(delivery_tag="\ud800"),
    with_properties(body_encoding="rot13"),
    with_properties(body_encoding=["base64"]),
]
BAD_BYTES = [
    b"not json",
    b"",
    b"\xff\xfe\x00 bytes",
    b'{"half": ',
    b"[" * 100_000,
    b"NaN",
    b'{"__type__": "uuid", "__value__": 5}',
    b'{"__type__": "datetime", "__value__": {}}',
]


#: What the guards replace, and where.
PATCHED: dict[Any, tuple[str, ...]] = {
    transport: ("bytes_to_str", "loads"),
    transport.Transport: ("_deliver",),
    transport.QoS: ("append", "can_consume", "restore_unacked", "restore_visible", "restore_by_tag"),
    transport.Channel: ("maybe_refresh_binding_expiry", "_queue_bind"),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards, until the end of the test or, where another module has installed them, for good."""
    for owner, names in PATCHED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(kombu_guards, "unnoted", {})
    kombu_guards.install()


@pytest.mark.usefixtures("installed")
def test_entries_that_are_no_messages_are_handed_on_as_what_they_are_and_the_others_still_come(redis_url: str) -> None:
    raw = BAD_BYTES + [json.dumps(shape).encode() for shape in BAD_SHAPES]
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("live", *raw, json.dumps(GOOD))
        *bad, good = consume(redis_url)
        assert client.exists("unacked", "live") == 0, "all of them could be acknowledged"
    assert [message.content_type for message in bad] == [NOT_JSON] * len(raw)
    assert [message.body for message in bad[: len(BAD_BYTES)]] == BAD_BYTES
    assert [json.loads(message.body) for message in bad[len(BAD_BYTES) :]] == BAD_SHAPES
    assert good.decode() == {}


@pytest.mark.parametrize("shape", [*BAD_SHAPES, "text"])
def test_what_kombu_could_make_nothing_of_is_wrapped_in_something_it_can(shape: object) -> None:
    assert not is_message(shape)
    assert is_message(as_message(shape, "live"))


@pytest.mark.parametrize(
    "shape",
    [
        GOOD,
        with_properties(body_encoding=None),
        {**GOOD, "body": ""},
        {**GOOD, "headers": None},
        {**GOOD, "body": None},
    ],
)
def test_a_message_of_kombus_own_is_left_as_it_is(shape: object) -> None:
    assert is_message(shape)


@pytest.mark.usefixtures("installed")
def test_installing_twice_wraps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [getattr(owner, name) for owner, names in PATCHED.items() for name in names]
    kombu_guards.install()
    assert before == [getattr(owner, name) for owner, names in PATCHED.items() for name in names]


@pytest.mark.parametrize(("version", "replaced"), [("5.7.0", True), ("5.7.1", False), ("5.6.3", False)])
@pytest.mark.parametrize("name", ["restore_unacked", "append"])
@pytest.mark.usefixtures("installed")
def test_a_release_in_which_the_fault_was_not_seen_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str, replaced: bool
) -> None:
    def original(self: object, client: object = None) -> None:
        """Stands for kombu's own."""

    monkeypatch.setattr(transport.QoS, name, original)
    monkeypatch.setattr(kombu, "__version__", version)
    kombu_guards.install()
    assert (getattr(transport.QoS, name) is not original) == replaced


@contextmanager
def consuming(url: str, waiting: int) -> Iterator[tuple[Any, list[Any]]]:
    """A channel that consumes `live`, where so many messages wait, and what it got by now: the first."""
    with kombu.Connection(url) as connection:
        queue = kombu.Queue("live")
        producer = connection.Producer()
        for number in range(waiting):
            producer.publish({"number": number}, routing_key="live", declare=[queue])
        channel = connection.channel()
        got: list[Any] = []
        kombu.Consumer(channel, [queue], on_message=got.append, accept=["json"]).consume()
        yield channel, got


def drain(channel: Any) -> None:
    """Whatever comes within a second, which BRPOP waits at most."""
    with pytest.raises(TimeoutError):
        while True:
            channel.connection.client.drain_events(timeout=1.5)


def held(url: str) -> tuple[int, int]:
    """How many messages wait in `live`, and how many are noted as unacknowledged."""
    with redis.Redis.from_url(url) as client:
        return int(client.llen("live")), int(client.hlen("unacked"))


@pytest.mark.usefixtures("installed")
def test_what_a_full_redis_does_not_let_note_is_handed_on_and_no_other_is_taken(own_redis: Redis) -> None:
    with consuming(own_redis.url(), 3) as (channel, got):
        with Refusing(own_redis):
            drain(channel)
            assert ([message.decode() for message in got], held(own_redis.url())) == ([{"number": 0}], (2, 0))
            got[0].ack()
            drain(channel)
            assert ([message.decode()["number"] for message in got], held(own_redis.url())) == ([0, 1], (1, 0))
        channel.qos.restore_visible()
        assert held(own_redis.url()) == (1, 1), "the second is noted, the first was settled before"
        assert kombu_guards.unnoted == {}
        drain(channel)
        assert ([message.decode()["number"] for message in got], held(own_redis.url())) == ([0, 1, 2], (0, 2))
        for message in got[1:]:
            message.ack()
        assert held(own_redis.url()) == (0, 0)


@pytest.mark.usefixtures("installed")
def test_what_could_not_be_noted_can_be_given_back_later(own_redis: Redis) -> None:
    with consuming(own_redis.url(), 1) as (channel, got):
        with Refusing(own_redis):
            drain(channel)
            with pytest.raises(ResponseError):
                got[0].reject(requeue=True)
        got[0].reject(requeue=True)
        assert held(own_redis.url()) == (1, 0)


@pytest.mark.usefixtures("installed")
def test_what_was_popped_while_the_connection_broke_is_noted_over_the_next(
    own_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise Gone("Connection reset by peer")

    with consuming(own_redis.url(), 1) as (channel, got):
        with monkeypatch.context() as patched:
            patched.setattr(transport.QoS, "pipe_or_acquire", broken)
            with pytest.raises(Gone):
                drain(channel)
        assert (got, held(own_redis.url())) == ([], (0, 0)), "as kombu leaves it: in nobody's hands"
    with kombu.Connection(own_redis.url()) as connection:
        qos = connection.channel().qos
        qos.restore_visible()
        assert held(own_redis.url()) == (0, 1)
        with redis.Redis.from_url(own_redis.url()) as client:
            # As old as the visibility timeout, so that it comes back.
            (tag,) = client.zrange("unacked_index", 0, -1)
            client.zadd("unacked_index", {tag: time.time() - qos.visibility_timeout})
        qos.restore_visible(interval=1)
        assert held(own_redis.url()) == (1, 0)


@pytest.mark.usefixtures("installed")
def test_while_redis_refuses_nothing_is_restored_and_a_queue_that_needs_its_binding_is_not_declared(
    own_redis: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kombu_guards, "say_again_at", 0.0)
    with kombu.Connection(own_redis.url()) as connection, connection.channel() as channel, Refusing(own_redis):
        channel.qos.restore_visible()
        kombu.Queue("control", kombu.Exchange("control", "fanout"))(channel).declare()
        with pytest.raises(ResponseError):
            kombu.Queue("live", kombu.Exchange("live"), routing_key="live")(channel).declare()
    assert caplog.text.count("Redis refuses to write: command not allowed when used memory > 'maxmemory'. ") == 1
