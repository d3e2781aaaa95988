"""The two faults of kombu's Redis transport: seen on a real Redis without the guards, gone with them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from kombu.transport import redis as transport

from infra.local.redis import Redis
from infra.local.state import State
from tests.submit_env import environment
from worker import kombu_guards
from worker.kombu_guards import NOT_JSON, as_message, is_message


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis that this test alone starts and kills."""
    server = Redis(tmp_path, State(tmp_path / "state.json"))
    server.start()
    yield server
    server.kill()


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


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards, until the end of the test or, where another module has installed them, for good."""
    for owner, name in [
        (transport, "bytes_to_str"), (transport, "loads"), (transport.Transport, "_deliver"),
        (transport.QoS, "restore_unacked"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
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
    before = transport.Transport._deliver, transport.QoS.restore_unacked, transport.loads, transport.bytes_to_str
    kombu_guards.install()
    assert before == (
        transport.Transport._deliver, transport.QoS.restore_unacked, transport.loads, transport.bytes_to_str
    )  # fmt: skip


@pytest.mark.parametrize(("version", "replaced"), [("5.7.0", True), ("5.7.1", False), ("5.6.3", False)])
@pytest.mark.usefixtures("installed")
def test_a_release_in_which_the_fault_was_not_seen_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, version: str, replaced: bool
) -> None:
    def original(self: object, client: object = None) -> None:
        """Stands for kombu's own."""

    monkeypatch.setattr(transport.QoS, "restore_unacked", original)
    monkeypatch.setattr(kombu, "__version__", version)
    kombu_guards.install()
    assert (transport.QoS.restore_unacked is not original) == replaced
