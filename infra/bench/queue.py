"""What goes through Redis and Celery by itself: messages of 64 pairs, and a worker whose task only counts.

The messages are in Redis before the worker starts, as many as the target would take the given time for. The pace is
that of distinct ids, from the start of the first batch to the end of the last.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from uuid import UUID

import redis

from db.outbox import OutboxRow
from infra.bench.site import Site, await_, spent
from worker.messages import Pair

TARGET_PAIRS_PER_S = 20_000
PAIRS_A_MESSAGE = 64
#: Redis holds some 25 kB a message: 300 MB.
MOST_MESSAGES = 12_000
#: Messages that are made at a time.
AT_ONCE = 500
#: A queue that is not empty after so many times the wanted seconds will not be.
PATIENCE = 10


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """Pairs a second of one worker over `seconds` times the target's pairs."""
    messages = min(math.ceil(seconds * TARGET_PAIRS_PER_S / PAIRS_A_MESSAGE), MOST_MESSAGES)
    with Site() as site, redis.Redis.from_url(site.addresses.redis_url) as client:
        say(f"{messages:,} messages of {PAIRS_A_MESSAGE} pairs go into Redis")
        published_in_s = fill(messages)
        counts = site.folder / "counts.json"
        with site.worker(("infra.bench.counting", str(counts))):
            before = site.cpu_seconds()
            say("a worker counts them")
            await_(lambda: not client.llen("bulk") + client.hlen("unacked"), PATIENCE * seconds, "an empty queue")
            after = site.cpu_seconds()
        counted = json.loads(counts.read_text())
    rate = counted["distinct"] / counted["seconds"]
    everything = messages * PAIRS_A_MESSAGE
    return {
        "target": f"at least {TARGET_PAIRS_PER_S:,} pairs/s, each counted once or more",
        "met": rate >= TARGET_PAIRS_PER_S and counted["distinct"] == everything,
        "pairs_per_s": round(rate),
        "pairs": everything,
        **counted,
        "seconds": round(counted["seconds"], 2),
        "published_pairs_per_s": round(everything / published_in_s),
        "busy_cores": spent(before, after, counted["seconds"]),
    }


def fill(messages: int) -> float:
    """Put so many messages into the bulk lane; returns the seconds that publishing took, without making them."""
    from tasks.submit import publish

    seconds = 0.0
    for start in range(0, messages, AT_ONCE):
        rows = list(made(min(AT_ONCE, messages - start)))
        began = time.monotonic()
        publish(rows)
        seconds += time.monotonic() - began
    return seconds


def made(messages: int) -> Iterator[OutboxRow]:
    """Messages as a producer makes them."""
    from tasks.submit import envelope, uuid7

    for _ in range(messages):
        body = envelope(uuid7(), datetime.now(UTC), [a_pair(n).model_dump(mode="json") for n in range(PAIRS_A_MESSAGE)])
        yield OutboxRow(UUID(body["message_id"]), "bulk", body)


def a_pair(number: int) -> Pair:
    """A pair of a catalog, as long as they are."""
    from tasks.submit import uuid7

    return Pair(
        id=uuid7(),
        ref=f"sku-{number:08}",
        image=f"s3://shop/pictures/2026/{number:08}.jpg",
        text=f"a red leather shoe with white laces, size {number}",
        attributes={"category": "shoes", "seller": "s-17"},
    )
