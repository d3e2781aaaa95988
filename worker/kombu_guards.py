"""Two faults of kombu's Redis transport, mended here until kombu mends them.

Both were seen with kombu 5.7.0. `install` checks the version: when a release that is not listed as affected is
installed, nothing is changed.
"""

import base64
import json
import logging
import uuid
from functools import partial
from typing import Any

import kombu
from kombu.serialization import register
from kombu.transport import redis as transport
from kombu.utils.json import dumps, loads

log = logging.getLogger(__name__)

#: Releases in which each fault was seen. Remove a guard when the last of its releases is no longer supported.
RESTORE_FAULT_IN = ("5.7.0",)
#: Not a fault that a release mends: any Redis client can push anything into a list.
NOT_JSON = "application/x-not-json"


def install() -> None:
    """Mend the transport of this process; doing it twice does no harm."""
    if kombu.__version__ in RESTORE_FAULT_IN and not hasattr(transport.QoS.restore_unacked, "guarded"):
        guard_restore()
    if not hasattr(transport.Transport._deliver, "guarded"):
        guard_entries()
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


def guard_entries() -> None:
    """A list entry that is not a message (not JSON, not an object) raises out of the event loop and ends the worker,
    and is lost, since it was popped. Wrap it in a message that says so; the worker records it and goes on.
    """
    original_loads, original_deliver = transport.loads, transport.Transport._deliver
    original_to_str = transport.bytes_to_str

    def bytes_to_str(value: Any) -> Any:
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else original_to_str(value)

    def loads(text: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_loads(text, *args, **kwargs)
        except Exception:
            # Not only what is no JSON: kombu makes objects of `__type__` and `__value__`, which can fail in any way.
            return text

    def _deliver(self: Any, message: Any, queue: str) -> None:
        original_deliver(self, message if is_message(message) else as_message(message, queue), queue)

    _deliver.guarded = True  # type: ignore[attr-defined]
    transport.bytes_to_str, transport.loads, transport.Transport._deliver = bytes_to_str, loads, _deliver


def is_message(entry: object) -> bool:
    """Whether kombu can make a message of it and note it as unacknowledged."""
    if not isinstance(entry, dict) or not isinstance(entry.get("properties"), dict):
        return False
    properties, body = entry["properties"], entry.get("body")
    info, encoding = properties.get("delivery_info"), properties.get("body_encoding")
    if not isinstance(info, dict) or not {"exchange", "routing_key"} <= info.keys():
        return False
    headers = entry.get("headers") or {}
    if not isinstance(properties.get("delivery_tag"), str) or not isinstance(headers, dict):
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


def as_message(entry: object, queue: str) -> dict[str, Any]:
    """The entry's own bytes as the body of a message of a kind that nobody reads."""
    raw = entry if isinstance(entry, str) else json.dumps(entry)
    return {
        "body": base64.b64encode(raw.encode("utf-8", "surrogateescape")).decode(),
        "content-type": NOT_JSON,
        "content-encoding": "binary",
        "headers": {},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
            "delivery_info": {"exchange": "", "routing_key": queue},
        },
    }
