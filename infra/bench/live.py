"""How long a lone live pair takes while the bulk lane is full, and what bulk gets while live is: `concord bench live`.

One worker with a stand-in for a GPU (infra/bench/stand_in.py), which takes as long for one pair as for a whole slice.
First live pairs come one at a time, at random moments: from the call of `submit` until a reader sees the committed
verdict. Then more live pairs are there than the device can judge.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

from infra.bench.pictures import pictures
from infra.bench.site import TEXT, BenchVoid, Site, Window
from infra.bench.stand_in import SLICE_PAIRS, Device

DEVICE = Device(SLICE_PAIRS / 400, side_px=256)
MAX_WAIT_MS = 50
PICTURES, SIDE_PX, SIZE = 1_024, 256, 10_000
#: Between two lone pairs, at most.
PAUSE_BATCHES = 3
#: How often it is looked whether a verdict is there; so much later than it really was, it is seen.
LOOK_EVERY_S = 0.005
WARM_UP_BATCHES = 8

IS_DECIDED = "select 1 from verdict where submitted_at = :submitted_at and pair_id = :pair_id"
SHARES = """
select lane, sum(pairs)::float8 from batch
where settled_at between to_timestamp(:since) and to_timestamp(:until) group by lane
"""


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    batch_ms = 1000 * DEVICE.slice_s
    target_ms = MAX_WAIT_MS + 2 * batch_ms
    with Site() as site:
        say(f"uploading {PICTURES:,} pictures")
        images = site.upload("live", pictures(PICTURES, SIDE_PX, SIZE))
        fill(site, images, "bulk", 2 * seconds)
        with site.worker(DEVICE.program, max_wait_ms=MAX_WAIT_MS):
            site.await_settled(WARM_UP_BATCHES * SLICE_PAIRS)
            say("lone live pairs under a full bulk backlog")
            started = time.time()
            latencies = lone_pairs(site, images, seconds)
            window = Window(started, time.time())
            bulk = site.rate(window)
            if not site.waiting("bulk"):
                raise BenchVoid("the bulk lane ran dry: more pairs are needed")
            say(f"p50 {statistics.median(latencies):.0f} ms; now live is saturated")
            fill(site, images, "live", seconds)
            saturated, _ = site.watch(seconds / 2)
            shares = dict(map(tuple, site.ask(SHARES, since=saturated.since, until=saturated.until)))
            if not site.waiting("live") or not site.waiting("bulk"):
                raise BenchVoid("a lane ran dry: more pairs are needed")
    p50, p99 = statistics.median(latencies), quantile(latencies, 0.99)
    share = shares.get("bulk", 0.0) / sum(shares.values())
    return {
        "pairs_per_s": round(bulk, 1),
        "target": f"p50 at most {target_ms:.0f} ms (max_wait + two batches); bulk gets a share when live is saturated",
        "met": p50 <= target_ms and share > 0,
        "p50_ms": round(p50, 1),
        "p99_ms": round(p99, 1),
        "most_ms": round(max(latencies), 1),
        "live_pairs": len(latencies),
        "max_wait_ms": MAX_WAIT_MS,
        "batch_ms": round(batch_ms, 1),
        "bulk_share_when_live_is_saturated": round(share, 3),
        "pairs_per_s_when_live_is_saturated": round(sum(shares.values()) / saturated.seconds, 1),
    }


def fill(site: Site, images: Sequence[str], lane: str, seconds: float) -> None:
    """More pairs for a lane than the device judges in so much time."""
    pairs = round(DEVICE.pairs_per_s * seconds * 1.1) + 2 * WARM_UP_BATCHES * SLICE_PAIRS
    site.submit(list(islice(cycle(images), pairs)), lane=lane)


def lone_pairs(site: Site, images: Sequence[str], seconds: float) -> list[float]:
    """Milliseconds that each took, from before it is submitted until its verdict can be read.

    One at a time, or it would be no lone one; after a random pause, so that it comes at any moment of a batch.
    """
    chance, found = random.Random(0), list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.uniform(0, PAUSE_BATCHES * DEVICE.slice_s))
        found.append(lone_pair(site, chance.choice(images)))
    return found


def lone_pair(site: Site, image: str) -> float:
    from tasks.submit import Pair, submit

    started = time.monotonic()
    accepted = submit([Pair(image=image, text=TEXT)], lane="live", source="bench")
    key: dict[str, Any] = {"submitted_at": accepted.submitted_at, "pair_id": accepted.pair_ids[0]}
    while not site.ask(IS_DECIDED, **key):
        if time.monotonic() - started > 60:
            raise BenchVoid("a live pair had no verdict after a minute")
        time.sleep(LOOK_EVERY_S)
    return 1000 * (time.monotonic() - started)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so many of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
