"""Other ways to batch against this worker: the same model, pairs, servers and machine, in one run, taking turns.

The others are in infra/bench/others: one Celery task a pair, celery-batches, and an HTTP batching server (LitServe)
with its client. Each has one thread of torch and S3, and its verdicts end in Postgres, where distinct ids are counted.
Then each is given a batch in which one picture is missing, and is killed in the middle of its work.
"""

import contextlib
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.bench.contenders import Contender, Pairs, available
from infra.bench.site import POLL_S, BenchVoid, Site
from infra.demo import HELDOUT

#: Pairs of a round, and rounds, where a measurement is this long or longer; a shorter one has one round of fewer.
PAIRS, ROUNDS, FROM_S = 2_048, 2, 30.0
#: Pairs of a batch; every round is whole batches.
BATCH_PAIRS = 64
#: Pairs among which a contender is killed, and how many of them have verdicts by then.
KILLED_PAIRS, KILLED_AT = 512, 128
#: Pairs of which one has a picture that is not there: four batches of a worker that has a backlog.
SPOILT_PAIRS = 4 * BATCH_PAIRS
#: Where no verdict has come for this long, none will: a killed worker's messages come back after 20 to 25 s.
SILENCE_S = 60.0
#: The same where nothing was killed and a batch takes a second.
SHORT_SILENCE_S = 8.0


@dataclass(frozen=True)
class Ending:
    """What became of pairs where things went wrong."""

    others: int  # verdicts of the 255 pairs that were handed over with one whose picture is missing
    killed_at: int
    pairs: int
    verdicts: int  # distinct pairs, after a restart
    twice: int
    failed: int | None
    last_after_s: float | None  # of the verdicts that came after the kill

    @property
    def sentence(self) -> str:
        last = "" if self.last_after_s is None else f", the last one {self.last_after_s:.0f} s after the kill"
        told = "" if self.failed is None else f", {self.failed} failed by its own account"
        return (
            f"With one of {SPOILT_PAIRS} pictures missing, {self.others} of the {SPOILT_PAIRS - 1} other pairs have"
            f" verdicts. Killed with SIGKILL after {self.killed_at} of {self.pairs} pairs and started again:"
            f" {self.verdicts} have verdicts{last}; {self.pairs - self.verdicts} have none{told};"
            f" {self.twice} were judged twice."
        )

    @property
    def figures(self) -> dict[str, float | int | None]:
        return {
            "lost_with_one_missing_picture": SPOILT_PAIRS - 1 - self.others,
            "pairs": self.pairs,
            "without_verdict": self.pairs - self.verdicts,
            "twice": self.twice,
            "failed": self.failed,
            "last_after_s": self.last_after_s,
        }


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """Rounds of 2,048 pairs, fewer below 30 seconds; then what one missing picture and a kill do to each."""
    share = min(1.0, seconds / FROM_S)
    count = max(1, round(PAIRS * share / BATCH_PAIRS)) * BATCH_PAIRS
    with Site() as site:
        folder = Path(site.enter_context(tempfile.TemporaryDirectory(prefix="concord-bench-")))
        catalog = Catalog(site)
        there, missing = available(site, folder, say)
        rates: dict[str, list[float]] = {one.name: [] for one in there}
        for _ in range(ROUNDS if share == 1 else 1):
            for one in there:
                rates[one.name].append(rate(one, catalog, count))
                say(f"{one.name}: {rates[one.name][-1]:.1f} pairs/s")
        endings = {}
        for one in there:
            endings[one.name] = ending(one, catalog, share)
            say(f"{one.name}: {endings[one.name].sentence}")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ours = medians.pop("concord")
    return {
        "bench": "comparison",
        "pairs_per_s": round(ours, 1),
        "ratio": round(ours / max(medians.values()), 2),
        "target": "none: what each does, side by side",
        "met": True,
        "pairs": count,
        "contenders": {
            one.name: {
                "pairs_per_s": round(statistics.median(rates[one.name]), 1),
                "least": round(min(rates[one.name]), 1),
                "most": round(max(rates[one.name]), 1),
                "concord_is_faster": round(ours / statistics.median(rates[one.name]), 2),
                "lacks": one.lacks,
            }
            for one in there
        },
        "endings": {name: found.figures for name, found in endings.items()},
        "notes": [
            "`ratio` is this worker against the fastest of the others. A rate is from the first pair handed over to the"
            " last row in Postgres, the producer included, with workers that are up and warm. All judge with the same"
            " code on one thread of torch; the demo's pictures have three pairs each, and no verdict is reused.",
            *(f"{name}: {found.sentence}" for name, found in endings.items()),
            *missing,
        ],
    }


class Catalog:
    """The demo's test pairs, as often as is asked for, each time under new ids."""

    def __init__(self, site: Site) -> None:
        lines = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
        self.known = [{"image": pair["image"], "text": pair["text"]} for pair in lines]
        for name in sorted({pair["image"] for pair in self.known}):
            site.stack.s3.client.upload_file(str(HELDOUT.parent / name), site.addresses.s3_bucket, name)

    def pairs(self, count: int) -> Pairs:
        return [{"id": str(uuid.uuid4()), **self.known[place % len(self.known)]} for place in range(count)]


def rate(one: Contender, catalog: Catalog, count: int) -> float:
    """Pairs a second, from the first that is handed over to the last row."""
    with one.up():
        judged(one, catalog.pairs(BATCH_PAIRS), BATCH_PAIRS)  # Connections are open, everything has run once.
        pairs, began_at = catalog.pairs(count), time.monotonic()
        judged(one, pairs, count)
        return count / (time.monotonic() - began_at)


def judged(one: Contender, pairs: Pairs, wanted: int) -> None:
    """Hand over, and wait for so many verdicts. Raises BenchVoid where they do not come."""
    one.clear()
    one.hand_over(pairs)
    if (last := last_verdict(one, wanted, SILENCE_S))[0] < wanted:
        raise BenchVoid(f"{one.name}: {last[0]} of {wanted} verdicts:\n{one.log.read_text(errors='replace')[-3_000:]}")


def last_verdict(one: Contender, wanted: int, silence_s: float) -> tuple[int, float]:
    """Distinct pairs with verdicts once there are so many or no more come, and when the last one came."""
    found, last_at = -1, time.monotonic()
    while found < wanted and time.monotonic() < last_at + silence_s:
        if (now := one.counted()[0]) > found:
            found, last_at = now, time.monotonic()
        time.sleep(POLL_S)
    return found, last_at


def ending(one: Contender, catalog: Catalog, share: float) -> Ending:
    """A missing picture, then a kill and a restart."""
    pairs = catalog.pairs(max(2 * BATCH_PAIRS, int(KILLED_PAIRS * share)))
    kill_at = min(KILLED_AT, len(pairs) // 4)
    with contextlib.ExitStack() as running:
        running.enter_context(one.up())
        judged(one, catalog.pairs(BATCH_PAIRS), BATCH_PAIRS)
        spoilt = list(catalog.pairs(SPOILT_PAIRS))
        middle = SPOILT_PAIRS // 2
        spoilt[middle] = {**spoilt[middle], "image": "pictures/missing.png"}
        one.clear()
        one.hand_over(spoilt)
        others, _ = last_verdict(one, SPOILT_PAIRS - 1, SHORT_SILENCE_S)
        one.failed()
        one.clear()
        one.hand_over(pairs)
        last_verdict(one, kill_at, SILENCE_S)
        one.kill()
        killed_at, before = time.monotonic(), one.counted()[0]
        running.enter_context(one.up())
        after, last_at = last_verdict(one, len(pairs), SILENCE_S)
        failed = one.failed()
        verdicts, rows = one.counted()
    last_after_s = round(last_at - killed_at, 1) if after > before else None
    return Ending(others, before, len(pairs), verdicts, rows - verdicts, failed, last_after_s)
