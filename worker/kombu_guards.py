"""Faults of kombu's Redis transport, mended here until kombu mends them.

All were seen with kombu 5.7.0. The first two are bound to the releases in which they were seen, and change nothing in
others; what can be pushed into a queue is no release's fault, and is always guarded.

    guard_restore    Redis goes away while messages are unacknowledged
    guard_refusals   Redis is up and refuses to write: full, a replica, a disk that fails
    guard_entries    something that is no message is pushed into a queue
    guard_inflation  a small message grows to gigabytes when it is inflated
"""

import base64
import bz2
import json
import logging
import lzma
import time
import uuid
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import kombu
from kombu import compression
from kombu.serialization import register
from kombu.transport import redis as transport
from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from redis.exceptions import ResponseError

log = logging.getLogger(__name__)

#: Releases in which each fault was seen. Remove a guard when the last of its releases is no longer supported.
RESTORE_FAULT_IN = ("5.7.0",)
REFUSAL_FAULT_IN = ("5.7.0",)
#: Not a fault that a release mends: any Redis client can push anything into a list.
NOT_JSON = "application/x-not-json"
#: Header of a message that a worker held until `visibility_timeout`: the worker died, perhaps of it.
ABANDONED = "abandoned"
#: A longer entry is not read. Redis takes 512 MB, of which JSON can make many times as much in memory.
MAX_ENTRY_CHARS = 64 * 2**20
#: So much of an entry that is no message is recorded.
RECORDED_CHARS = 16 * 2**20
#: What a message may become when it is inflated.
MAX_INFLATED_BYTES = 16 * 2**20
#: How a message may be compressed.
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "application/x-gzip": zlib.decompressobj,
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": partial(lzma.LZMADecompressor, memlimit=MAX_INFLATED_BYTES),
}
#: A Redis that refuses is asked several times a second; this often the log says so.
SAY_EVERY_S = 10.0

#: By delivery tag: messages that were popped and could not be noted in `unacked`. They outlive their connection.
unnoted: dict[str, Any] = {}
say_again_at = 0.0


def install() -> None:
    """Mend the transport of this process; doing it twice does no harm."""
    if kombu.__version__ in RESTORE_FAULT_IN and not hasattr(transport.QoS.restore_unacked, "guarded"):
        guard_restore()
    if kombu.__version__ in REFUSAL_FAULT_IN and not hasattr(transport.QoS.append, "guarded"):
        guard_refusals()
    if not hasattr(transport.Transport._deliver, "guarded"):
        guard_entries()
    if not hasattr(transport.QoS.restore_visible, "guarded"):
        mark_abandoned()
    guard_inflation()
    # JSON as it stands: kombu would make objects of {"__type__": ..., "__value__": ...}, which a pair may hold.
    register("json", dumps, partial(loads, object_hook=None), "application/json", "utf-8")


def guard_restore() -> None:
    """Redis goes away while messages are unacknowledged: closing the channel asks a connection that is None for its
    client, and the AttributeError ends the worker. The messages are safe in `unacked`; forget them here, and the
    visibility timeout brings them back.
    """
    original = transport.QoS.restore_unacked

    def restore_unacked(self: Any, client: Any = None) -> None:
        connection = self.channel.connection
        if client is None and (connection is None or connection.client is None):
            log.warning("Redis is gone; %d messages will be delivered again", len(self._delivered))
            self._delivered.clear()
            return
        original(self, client)

    restore_unacked.guarded = True  # type: ignore[attr-defined]
    transport.QoS.restore_unacked = restore_unacked


def guard_refusals() -> None:
    """A full Redis (noeviction) still gives messages out but lets nobody note them: the error ends the worker, and the
    message, popped already, is lost. Keep it in memory and hand it on, and take no other until it is noted or settled.
    One whose note meets a broken connection is noted over the next.

    What else the transport writes on its own account is written later: while Redis refuses, nothing is restored, and
    the queues of remote control, which are published and not kept, need no binding.
    """
    append, can_consume = transport.QoS.append, transport.QoS.can_consume
    restore_visible, restore_by_tag = transport.QoS.restore_visible, transport.QoS.restore_by_tag
    refresh, bind = transport.Channel.maybe_refresh_binding_expiry, transport.Channel._queue_bind

    def append_guarded(self: Any, message: Any, delivery_tag: str) -> None:
        try:
            append(self, message, delivery_tag)
        except ResponseError as error:
            say(error)
            unnoted[delivery_tag] = message
            virtual.QoS.append(self, message, delivery_tag)
        except self.channel.connection_errors:
            unnoted[delivery_tag] = message
            raise

    def can_consume_guarded(self: Any) -> bool:
        waiting = any(message.channel is self.channel and not message.acknowledged for message in unnoted.values())
        return not waiting and bool(can_consume(self))

    def restore_visible_guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            for tag in list(unnoted):
                note(self, tag)
            restore_visible(self, *args, **kwargs)
        except ResponseError as error:
            say(error)

    def restore_by_tag_guarded(self: Any, tag: str, *args: Any, **kwargs: Any) -> None:
        try:
            note(self, tag)
        except ResponseError:
            log.error("message %s can neither be noted nor given back; if it has no row in the outbox, it is lost", tag)
            raise
        restore_by_tag(self, tag, *args, **kwargs)

    def refresh_guarded(self: Any) -> None:
        try:
            refresh(self)
        except ResponseError as error:
            say(error)

    def bind_guarded(self: Any, exchange: str, *args: Any) -> None:
        try:
            bind(self, exchange, *args)
        except ResponseError as error:
            if self.typeof(exchange).type != "fanout":
                raise
            say(error)

    append_guarded.guarded = True  # type: ignore[attr-defined]
    transport.QoS.append, transport.QoS.can_consume = append_guarded, can_consume_guarded
    transport.QoS.restore_visible, transport.QoS.restore_by_tag = restore_visible_guarded, restore_by_tag_guarded
    transport.Channel.maybe_refresh_binding_expiry, transport.Channel._queue_bind = refresh_guarded, bind_guarded


def note(qos: Any, tag: str) -> None:
    """Note a message in `unacked` after all, unless it is noted or settled. Raises ResponseError, and keeps it, where
    Redis still refuses.
    """
    message = unnoted.get(tag)
    if message is None:
        return
    if not message.acknowledged:
        info = message.delivery_info
        entry = dumps([message._raw, info["exchange"], info["routing_key"]])
        with qos.pipe_or_acquire() as pipe:
            pipe.zadd(qos.unacked_index_key, {tag: time.time()}).hset(qos.unacked_key, tag, entry).execute()
    unnoted.pop(tag, None)


def say(error: ResponseError) -> None:
    """Log that Redis refuses, once in a while."""
    global say_again_at
    now = time.monotonic()
    if now >= say_again_at:
        say_again_at = now + SAY_EVERY_S
        # What a pipeline raises quotes the command before, and with it a part of somebody's message.
        why = str(error).rpartition(" of pipeline caused error: ")[2].partition(" script:")[0].rstrip(".")
        log.warning("Redis refuses to write: %s. Messages that cannot be noted are judged one at a time", why)


def guard_entries() -> None:
    """A list entry that is not a message (not JSON, not an object) raises out of the event loop and ends the worker,
    and is lost, since it was popped. Wrap it in a message that says so; the worker records it and goes on.
    """
    original_loads, original_deliver = transport.loads, transport.Transport._deliver
    original_to_str = transport.bytes_to_str

    def bytes_to_str(value: Any) -> Any:
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else original_to_str(value)

    def loads(text: Any, *args: Any, **kwargs: Any) -> Any:
        # What was read once is read again when it is restored, as an array with some words beside it.
        if len(text) > MAX_ENTRY_CHARS + 1_000 * text.startswith("["):
            return text
        try:
            return original_loads(text, *args, **kwargs)
        except Exception:
            # Not only what is no JSON: kombu makes objects of `__type__` and `__value__`, which can fail in any way.
            return text

    def _deliver(self: Any, message: Any, queue: str) -> None:
        original_deliver(self, as_read(message, queue) if is_message(message) else as_message(message, queue), queue)

    _deliver.guarded = True  # type: ignore[attr-defined]
    transport.bytes_to_str, transport.loads, transport.Transport._deliver = bytes_to_str, loads, _deliver


def mark_abandoned() -> None:
    """kombu marks what a worker gives back and what a dead one left behind alike, as redelivered. Only who holds a
    message until `visibility_timeout` may have died of it: that is said in a header of its own, which stays.
    """
    original_visible, original_restore = transport.QoS.restore_visible, transport.Channel._do_restore_message

    def restore_visible(self: Any, *args: Any, **kwargs: Any) -> None:
        self.channel.restores_abandoned = True
        try:
            original_visible(self, *args, **kwargs)
        finally:
            self.channel.restores_abandoned = False

    def _do_restore_message(self: Any, payload: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, "restores_abandoned", False):
            payload["headers"][ABANDONED] = True
        original_restore(self, payload, *args, **kwargs)

    restore_visible.guarded = True  # type: ignore[attr-defined]
    transport.QoS.restore_visible, transport.Channel._do_restore_message = restore_visible, _do_restore_message


def is_message(entry: object) -> bool:
    """Whether kombu can make a message of it and note it as unacknowledged."""
    if not isinstance(entry, dict) or not isinstance(entry.get("properties"), dict):
        return False
    properties, body = entry["properties"], entry.get("body")
    info, encoding = properties.get("delivery_info"), properties.get("body_encoding")
    if not isinstance(info, dict) or not {"exchange", "routing_key"} <= info.keys():
        return False
    headers = entry.get("headers") or {}
    if not is_text(properties.get("delivery_tag")) or not isinstance(headers, dict):
        return False
    if not isinstance(headers.get("task", ""), str):
        return False
    if not isinstance(body or "", str) or encoding not in (None, "utf-8", "base64"):
        return False
    if body and encoding == "base64":
        try:
            base64.b64decode(body, validate=True)
        except ValueError:
            return False
    return True


def is_text(value: object) -> bool:
    """Whether it is a string that Redis can keep: one without lone surrogates."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def as_read(entry: dict[str, Any], queue: str) -> dict[str, Any]:
    """The message as one that kombu can give back to the queue that it came from, whatever it says of itself, and
    called by another name where it is not JSON: kombu trusts some types, and finds codecs that would inflate them.
    """
    entry["properties"]["delivery_info"].update(exchange="", routing_key=queue)
    entry["headers"] = entry.get("headers") or {}
    if entry.get("content-type") != "application/json":
        entry["content-type"], entry["content-encoding"] = NOT_JSON, "binary"
        entry["headers"].pop("compression", None)
    return entry


def as_message(entry: object, queue: str) -> dict[str, Any]:
    """The entry's own bytes as the body of a message of a kind that nobody reads."""
    text = (entry if isinstance(entry, str) else json.dumps(entry))[:RECORDED_CHARS]
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # A JSON string of lone surrogates, which never were bytes.
        raw = text.encode("utf-8", "backslashreplace")
    return {
        "body": base64.b64encode(raw).decode(),
        "content-type": NOT_JSON,
        "content-encoding": "binary",
        "headers": {},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
            "delivery_info": {"exchange": "", "routing_key": queue},
        },
    }


def guard_inflation() -> None:
    """kombu inflates a message as far as it goes, before anybody has looked at it."""
    for content_type in compression.encoders():
        encode, _ = compression.get_encoder(content_type)
        compression.register(encode, partial(inflate, content_type), content_type)


def inflate(content_type: str, body: bytes) -> bytes:
    """The message's body. Raises ValueError where it is too large, cut, or compressed in a way that is not known."""
    make = DECOMPRESSORS.get(content_type)
    if make is None:
        raise ValueError(f"compressed as {content_type}; a message may be compressed as {', '.join(DECOMPRESSORS)}")
    decompressor = make()
    inflated: bytes = decompressor.decompress(body, MAX_INFLATED_BYTES)
    if decompressor.eof:
        return inflated
    del decompressor, inflated  # The message keeps the error, and the error would keep these.
    raise ValueError(f"it is cut, or more than {MAX_INFLATED_BYTES} bytes when it is inflated")
