"""List entries that no producer of ours would write: a seeded stream of them, each with a mark to find it by.

Every entry is bytes that some Redis client may push into a queue. Its mark is a UUID that stands somewhere in it, so
that whatever becomes of it, a verdict, a row in the outbox or a recorded rejection, can be told from all others.
"""

import base64
import bz2
import json
import lzma
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any
from uuid import UUID

from worker.messages import TASK_NAME

#: Inflated, each of these is more than a worker's machine need have.
BOMB_BYTES = 400_000_000


@dataclass(frozen=True)
class Entry:
    """`raw` is what is pushed; `what` says in words what is wrong with it."""

    what: str
    mark: str
    raw: bytes


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


#: Values that a field may have where it should have another.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 2**31, 2**63, 10**400, -1.5, 1e308, float("nan"), float("inf"), "", " ", "x", "0",
    "\0", "\ud800", "\udfff\ud800", "\U0001f45f", "x" * 5_000, "utf-8", "base64", "bz2", "concord.moderate", "live",
    "2026-01-01T00:00:00", "9999-12-31T23:59:59+00:00", "00000000-0000-0000-0000-000000000000", "-infinity", "$1",
    [], [None], [[]], ["x"], {}, {"a": 1}, {"": {}}, {"__type__": "datetime", "__value__": "x"}, {"__type__": []},
    nested(30), nested(700), {"x" * 1_000: "y"}, [1] * 300,
)  # fmt: skip


def pair(mark: str, **fields: Any) -> dict[str, Any]:
    return {"id": mark, "ref": mark, "image": "s3://line/square.jpg", "text": "a red shoe", **fields}


def message(mark: str, pairs: Any = None, **fields: Any) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat()
    return {
        "v": 1,
        "message_id": mark,
        "submitted_at": now,
        "pairs": [pair(mark)] if pairs is None else pairs,
        **fields,
    }


def envelope(mark: str, body: bytes, queue: str = "live", **changed: Any) -> dict[str, Any]:
    """What kombu puts into a list."""
    return {
        "body": base64.b64encode(body).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": TASK_NAME, "id": mark, "lang": "py", "argsrepr": "()", "kwargsrepr": "{}"},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": mark,
            "delivery_mode": 2,
            "priority": 0,
            "delivery_info": {"exchange": queue, "routing_key": queue},
        },
        **changed,
    }


def task(argument: Any) -> bytes:
    return json.dumps([[argument], {}, {}]).encode()


def good(mark: str, queue: str = "live") -> bytes:
    """A message that is to be judged whatever stands around it."""
    return json.dumps(envelope(mark, task(message(mark)), queue)).encode()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside."""
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*at, number))


def spoil(value: Any, choose: random.Random) -> str:
    """Change one place inside, or take it away; the words that say which."""
    way = choose.choice(list(places(value)))
    for key in way[:-1]:
        value = value[key]
    if choose.random() < 0.15:
        del value[way[-1]]
        return f"without {way}"
    value[way[-1]] = choose.choice(ODD)
    return f"{way} is {json.dumps(value[way[-1]])[:40]}"


@cache
def bombs() -> dict[str, bytes]:
    """Small bodies that grow when they are inflated, by the name under which kombu inflates them."""
    zeros = bytes(BOMB_BYTES)
    return {"application/x-gzip": zlib.compress(zeros, 1), "application/x-bz2": bz2.compress(zeros, 1),
            "application/x-lzma": lzma.compress(zeros, preset=0)}  # fmt: skip


Made = tuple[str, Any]


def random_bytes(mark: str, choose: random.Random) -> Made:
    return "random bytes", choose.randbytes(choose.randrange(300)) + mark.encode() + choose.randbytes(20)


def json_of_another_kind(mark: str, choose: random.Random) -> Made:
    odd = choose.choice(ODD)
    value = choose.choice([mark, mark + "\ud800", [mark], {"mark": mark}, {mark: odd}, [[odd], mark], [mark, "\ud800"]])
    return "another JSON value", value


def cut_envelope(mark: str, choose: random.Random) -> Made:
    raw = good(mark)
    at = choose.randrange(len(raw) // 2, len(raw))
    return f"cut after {at} bytes", raw[:at] + mark.encode()


def damaged_envelope(mark: str, choose: random.Random) -> Made:
    raw = bytearray(good(mark))
    for _ in range(choose.choice([1, 1, 5])):
        raw[choose.randrange(len(raw))] = choose.randrange(256)
    return "bytes of the envelope changed", bytes(raw) + (b"" if raw.count(mark.encode()) else b" " + mark.encode())


def odd_envelope(mark: str, choose: random.Random) -> Made:
    value = envelope(mark, task(message(mark)))
    return spoil(value, choose), value


def odd_headers(mark: str, choose: random.Random) -> Made:
    names = ("id", "eta", "expires", "retries", "timelimit", "root_id", "parent_id", "group", "shadow", "argsrepr",
             "kwargsrepr", "origin", "ignore_result", "stamps", "stamped_headers", "publishes", "published_at",
             "compression", "chord", "chain", "errbacks", "callbacks", "properties", "replaced_task_nesting",
             "x-death", "redelivered", "delivery_info", "args", "kwargs", "utc", "reply_to")  # fmt: skip
    value = envelope(mark, task(message(mark)))
    chosen = {name: choose.choice(ODD) for name in choose.sample(names, choose.choice([1, 1, 3]))}
    value["headers"].update(chosen)
    return f"headers {json.dumps(chosen)[:60]}", value


def odd_arguments(mark: str, choose: random.Random) -> Made:
    told = message(mark)
    odd = choose.choice(ODD)
    ping = {"task": "celery.ping", "args": []}
    body = choose.choice(
        [[[told, odd], {}, {}], [[told], {"a": odd}, {}], [[told], odd, {}], [[told], {}, odd], [odd, told], [told],
         [[], {"message": told}, {}], told, [[told], {}, {"chord": odd, "callbacks": odd, "mark": mark}],
         [[[told]], {}, {}], {"task": TASK_NAME, "id": mark, "args": [told], "kwargs": odd},
         {"task": odd, "id": mark, "args": [told]}, {"task": TASK_NAME, "id": odd, "args": [told]},
         [[told], {}, {"errbacks": [ping]}], [[told], {}, {"a": odd, "id": odd, "group": odd, "reply_to": odd}]]
    )  # fmt: skip
    value = envelope(mark, json.dumps(body).encode())
    if choose.random() < 0.4:
        del value["headers"]["task"]  # The first version of Celery's protocol had it in the body.
    return f"arguments {json.dumps(body)[:60]}", value


def odd_message(mark: str, choose: random.Random) -> Made:
    told = message(mark, run_id=None, source="default", fresh=False, attempts=0, replaced=[], settled=[])
    what = spoil(told, choose)
    return f"message {what}", envelope(mark, task(told))


def odd_pair(mark: str, choose: random.Random) -> Made:
    told = pair(mark, premise=None, policy="catalog", attributes={"a": {"b": [1]}})
    what = spoil(told, choose)
    return f"pair {what}", envelope(mark, task(message(mark, [told, pair(mark)])))


def another_language(mark: str, choose: random.Random) -> Made:
    told = [[message(mark)], {}, {}]
    content_type, body = choose.choice(
        [("application/x-python-serialize", pickle.dumps(told)), ("application/x-yaml", json.dumps(told).encode()),
         ("application/x-msgpack", b"\x93" + mark.encode()), ("text/plain", json.dumps(told).encode()),
         ("application/data", json.dumps(told).encode()), ("application/text", mark.encode()),
         ("application/json; charset=utf-16", json.dumps(told).encode("utf-16")), ("application/json", mark.encode()),
         ("application/json", pickle.dumps(told)), ("", json.dumps(told).encode())]
    )  # fmt: skip
    encoding = choose.choice(["utf-8", "binary", "utf-16", "bz2", "zip", "rot13", "idna", "no such", ""])
    value = envelope(mark, body, **{"content-type": content_type, "content-encoding": encoding})
    return f"{content_type} in {encoding}", value


def bomb(mark: str, choose: random.Random) -> Made:
    kind = choose.choice(sorted(bombs()))
    value = envelope(mark, bombs()[kind] + mark.encode())
    if kind == "application/x-bz2" and choose.random() < 0.5:
        value.update({"content-type": "application/data", "content-encoding": "bz2"})
    else:
        value["headers"]["compression"] = kind
    return f"{BOMB_BYTES} bytes in {kind}", value


def foreign_task(mark: str, choose: random.Random) -> Made:
    names = ("celery.backend_cleanup", "celery.chord_unlock", "celery.map", "celery.chunks", "celery.group",
             "celery.ping", "celery.accumulate", "other.app.task", "os.system", "concord.Moderate", "", "\0",
             "x" * 3_000)  # fmt: skip
    value = envelope(mark, json.dumps([[mark], {}, {}]).encode())
    value["headers"]["task"] = choose.choice(names)
    return f"task {value['headers']['task'][:40]!r}", value


KINDS: tuple[Callable[[str, random.Random], Made], ...] = (
    random_bytes, json_of_another_kind, cut_envelope, damaged_envelope, odd_envelope, odd_headers, odd_arguments,
    odd_message, odd_pair, another_language, bomb, foreign_task,
)  # fmt: skip


def entries(seed: int) -> Iterator[Entry]:
    """Hostile entries without end, of each kind in turn."""
    number = 0
    while True:
        for kind in KINDS:
            choose = random.Random(f"{seed} {number} {kind.__name__}")
            mark = str(UUID(int=choose.getrandbits(128), version=4))
            what, made = kind(mark, choose)
            raw = made if isinstance(made, bytes) else json.dumps(made).encode()
            yield Entry(f"{kind.__name__}, number {number}: {what}", mark, raw)
        number += 1
