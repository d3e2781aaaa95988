"""What breaks when. Pure: a seed, the parts and a duration are one schedule, on any machine."""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["worker", "redis", "postgres", "s3", "relay"]
PARTS: tuple[Part, ...] = get_args(Part)

#: What is done to a part, in turns: the first of them happen in the shortest run.
HOWS: dict[Part, tuple[str, ...]] = {
    "worker": ("kill", "kill", "term"),
    "redis": ("wipe", "kill", "stop", "freeze"),
    "postgres": ("kill", "stop", "freeze"),
    "s3": ("mixed", "500", "reset", "half", "503", "slow"),
    "relay": ("freeze",),
}
#: Seconds of the schedule for each fault of a part ...
EVERY_S: dict[Part, float] = {"worker": 40.0, "redis": 125.0, "postgres": 165.0, "s3": 80.0, "relay": 250.0}
#: ... and how many there are at least.
AT_LEAST: dict[Part, int] = {"worker": 3, "redis": 2, "postgres": 1, "s3": 1, "relay": 1}

#: Seconds that a server stays down, or is frozen: longer than the clients' timeouts of 5 s.
DOWN_S = (1.0, 4.0)
FROZEN_S = (7.0, 10.0)
#: Seconds of one kind of trouble with S3, and the shares of its answers that it may have.
S3_FAULT_S = 12.0
SHARES = (0.4, 0.7, 1.0)
#: Seconds that the holder of the lease is frozen: longer than its lease of 15 s and than the 20 s after which what it
#: holds is given to others.
RELAY_FROZEN_S = (21.0, 25.0)
#: Nothing breaks in the first and in the last part of the run, where there is little in work.
QUIET_SHARE = 0.06


@dataclass(frozen=True)
class Fault:
    """One thing that is done to one part, `at_s` seconds after the first pair; mended `lasts_s` seconds later.

    `share` is of the answers of S3 that are spoilt.
    """

    at_s: float
    part: Part
    how: str
    lasts_s: float = 0.0
    share: float = 1.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        share = f", {self.share:.0%} of the answers" if self.part == "s3" else ""
        return f"{self.at_s:7.1f} s  {self.part:<8} {self.how}{lasts}{share}"


def plan(seed: int, parts: Collection[Part], duration_s: float) -> tuple[Fault, ...]:
    """The faults of these parts in the order of time. A part's faults do not depend on which others take part."""
    faults = (fault for part in PARTS if part in parts for fault in faults_of(part, seed, duration_s))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def faults_of(part: Part, seed: int, duration_s: float) -> Iterator[Fault]:
    """One part's faults, each at a random moment of its own stretch of the run."""
    chance = random.Random(f"{seed}/{part}")
    count = max(AT_LEAST[part], round(duration_s / EVERY_S[part]))
    hows = [HOWS[part][number % len(HOWS[part])] for number in range(count)]
    chance.shuffle(hows)
    stretch_s = duration_s * (1 - 2 * QUIET_SHARE) / count
    for number, how in enumerate(hows):
        at_s = duration_s * QUIET_SHARE + (number + chance.uniform(0, 0.8)) * stretch_s
        lasts_s, share = 0.0, 1.0
        match part, how:
            case "relay", _:
                lasts_s = chance.uniform(*RELAY_FROZEN_S)
            case "s3", _:
                lasts_s, share = S3_FAULT_S, chance.choice(SHARES)
            case (("redis" | "postgres"), "freeze"):
                lasts_s = chance.uniform(*FROZEN_S)
            case (("redis" | "postgres"), _):
                lasts_s = chance.uniform(*DOWN_S)
        yield Fault(round(at_s, 1), part, how, round(lasts_s, 1), share)
