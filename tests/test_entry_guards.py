"""What guards a worker against entries of a queue: too long, compressed beyond measure, of another kind than JSON."""

import base64
import bz2
import json
import lzma
import zlib
from typing import Any

import kombu
import pytest
import redis

from tests.test_kombu_guards import GOOD, consume, installed
from worker import kombu_guards
from worker.batching import tell
from worker.consumer import Strategies
from worker.delivery import Delivery
from worker.kombu_guards import NOT_JSON

__all__ = ["installed"]


@pytest.mark.usefixtures("installed")
def test_a_json_string_of_lone_surrogates_is_recorded_as_it_was_written(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("live", '"a \\ud800"')
        (message,) = consume(redis_url)
    assert message.body == b"a \\ud800"


@pytest.mark.usefixtures("installed")
def test_an_entry_that_is_too_long_is_not_parsed_and_its_begin_is_kept(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    monkeypatch.setattr(kombu_guards, "MAX_ENTRY_CHARS", 5_000)
    monkeypatch.setattr(kombu_guards, "RECORDED_CHARS", 100)
    long = [b"[" + b"[]," * 5_000 + b"[]]", json.dumps({**GOOD, "body": "e30=" * 2_000}).encode()]
    short = json.dumps({**GOOD, "headers": {"x": "y" * 4_000}})
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("live", *long, short)
        one, other, read = consume(redis_url)
        assert client.exists("unacked") == 0
    assert [message.body for message in (one, other)] == [entry[:100] for entry in long]
    assert {one.content_type, other.content_type} == {NOT_JSON}
    assert read.decode() == {}


@pytest.mark.usefixtures("installed")
def test_a_message_as_long_as_is_read_comes_back_from_a_worker_that_died(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    entry = json.dumps({**GOOD, "headers": {"x": "y" * 4_000}})
    monkeypatch.setattr(kombu_guards, "MAX_ENTRY_CHARS", len(entry))
    with redis.Redis.from_url(redis_url) as client, kombu.Connection(redis_url) as connection:
        client.lpush("live", entry)
        with connection.channel() as channel:
            got: list[Any] = []
            with kombu.Consumer(channel, [kombu.Queue("live")], on_message=got.append, accept=["json"]):
                connection.drain_events(timeout=5)
            (message,) = got
            channel.qos.restore_by_tag(message.delivery_tag)
        assert client.llen("live") == 1
        assert json.loads(client.lindex("live", 0))["headers"]["x"] == "y" * 4_000


@pytest.mark.parametrize("headers", [None, {}, []])
@pytest.mark.parametrize("exchange", ["live", "", "nowhere", None, 5, {}, "\ud800"])
@pytest.mark.usefixtures("installed")
def test_a_message_is_given_back_to_its_queue_whatever_it_says_of_itself(
    redis_url: str, headers: Any, exchange: Any
) -> None:
    info = {"exchange": exchange, "routing_key": exchange}
    entry = {**GOOD, "headers": headers, "properties": {**GOOD["properties"], "delivery_info": info}}  # type: ignore[dict-item]
    with redis.Redis.from_url(redis_url) as client, kombu.Connection(redis_url) as connection:
        client.lpush("live", json.dumps(entry))
        with connection.channel() as channel:
            got: list[Any] = []
            with kombu.Consumer(channel, [kombu.Queue("live")], on_message=got.append, accept=["json"]):
                connection.drain_events(timeout=5)
            got[0].reject(requeue=True)
        assert client.llen("live") == 1


BODY = b'{"a": "b"}' * 20_000
COMPRESSED = {
    "application/x-gzip": zlib.compress(BODY),
    "application/x-bz2": bz2.compress(BODY),
    "application/x-lzma": lzma.compress(BODY),
}


def compressed_entry(name: str, body: bytes) -> str:
    return json.dumps({**GOOD, "body": base64.b64encode(body).decode(), "headers": {"compression": name}})


def consumed_by_one_that_reads_errors(url: str) -> tuple[list[Any], list[str]]:
    """The messages that could be made, and the errors of those that could not."""
    got: list[Any] = []
    errors: list[str] = []

    def on_decode_error(message: Any, error: Exception) -> None:
        errors.append(str(error))
        message.ack()

    with kombu.Connection(url) as connection, connection.channel() as channel:
        consumer = kombu.Consumer(
            channel, [kombu.Queue("live")], on_message=got.append, accept=["json"], on_decode_error=on_decode_error
        )
        with consumer:
            while channel._size("live"):
                connection.drain_events(timeout=5)
        for message in got:
            message.ack()
    return got, errors


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.usefixtures("installed")
def test_a_compressed_message_is_inflated_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, name: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("live", compressed_entry(name, COMPRESSED[name]))
        got, errors = consumed_by_one_that_reads_errors(redis_url)
        assert ([message.body for message in got], errors) == ([BODY], [])
        monkeypatch.setattr(kombu_guards, "MAX_INFLATED_BYTES", len(BODY) - 1)
        whole, cut = COMPRESSED[name], COMPRESSED[name][:-3]
        client.lpush("live", *(compressed_entry(name, body) for body in (whole, cut, b"no such thing", b"")))
        got, errors = consumed_by_one_that_reads_errors(redis_url)
    assert (len(got), len(errors)) == (0, 4)
    assert all("more than 199999 bytes when it is inflated" in error for error in errors[:2])


@pytest.mark.usefixtures("installed")
def test_what_an_inflated_message_left_in_memory_goes_with_its_error() -> None:
    """kombu keeps an error with its message, and an error keeps what stood in the functions it passed through."""
    bomb = zlib.compress(bytes(kombu_guards.MAX_INFLATED_BYTES + 1))
    with pytest.raises(ValueError, match="inflated") as caught:
        kombu_guards.inflate("application/x-gzip", bomb)
    frame = caught.traceback[-1].frame.f_locals
    assert {name for name, value in frame.items() if isinstance(value, bytes)} == {"body"}
    assert "decompressor" not in frame


@pytest.mark.usefixtures("installed")
def test_a_compression_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="compressed as application/zstd; a message may be compressed as"):
        kombu_guards.inflate("application/zstd", b"")


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [("application/data", "bz2"), ("application/text", "zip"), ("application/x-python-serialize", "binary"),
     ("", "utf-8"), (None, None), (["application/json"], "utf-8"), ("application/json; charset=utf-16", "utf-16")],
)  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_a_body_of_another_kind_meets_no_codec(redis_url: str, content_type: Any, encoding: Any) -> None:
    entry = {**GOOD, "body": base64.b64encode(COMPRESSED["application/x-bz2"]).decode(), "content-type": content_type,
             "content-encoding": encoding, "headers": {"compression": "bzip2", "id": "a"}}  # fmt: skip
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("live", json.dumps(entry))
        (message,) = consume(redis_url)
    assert (message.content_type, message.body) == (NOT_JSON, COMPRESSED["application/x-bz2"])
    assert message.headers == {"id": "a"}
    with pytest.raises(kombu.exceptions.ContentDisallowed):
        message.decode()


# ---- What a worker holds ---------------------------------------------------------------------------------------------


def made(**fields: Any) -> kombu.message.Message:
    return kombu.message.Message(**fields)


@pytest.mark.parametrize(
    ("pairs", "body", "weight"),
    [(1, b"", 1), (1, None, 1), (64, b"x" * 64_000, 64), (1, b"x" * 10_000_000, 152), (200, b"x" * 10_000_000, 200)],
)
def test_a_message_counts_by_its_pairs_or_by_its_bytes(pairs: int, body: Any, weight: int) -> None:
    assert Delivery(made(body=body), "live", pairs=pairs).weight == weight


@pytest.mark.parametrize("name", [None, 5, ["concord.moderate"], {}, True])
def test_what_is_no_name_is_the_name_of_no_task(name: Any) -> None:
    with pytest.raises(KeyError):
        Strategies({"concord.moderate": print})[name]
    assert Strategies({"concord.moderate": print})["concord.moderate"] is print


def test_celerys_books_that_go_wrong_are_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    tell({}.__getitem__, "no such key")
    assert "Celery could not be told of a message" in caplog.text
