"""Whether a process grows: the second half of a run against its second quarter.

The first quarter is left out: caches fill, allocators reach their working size. A leak goes on afterwards, so that the
median of the second half lies above that of the second quarter by three eighths of what leaks in the whole run.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Memory may be higher by the smaller of these two, where they are not less than NOISE_MB.
MAX_GROWTH = 0.05
MAX_GROWTH_MB = 30.0
#: What small processes go up and down by.
NOISE_MB = 4.0
#: Connections, files and threads may be more by the same share, or by this many where that is more: a pool that grew by
#: one, a file of a table that one more of Postgres' processes has opened.
MAX_MORE = 3


@dataclass(frozen=True)
class Usage:
    """A process and all that it has started, summed up.

    `rss_mb` counts everything that is in memory, what processes share once for each. `own_mb` leaves out what is shared
    or a file's: programs, weights that are mapped, Postgres' shared buffers, which fill up to their fixed size.
    """

    rss_mb: float
    own_mb: float
    threads: int
    files: int
    processes: int


@dataclass(frozen=True)
class Sample:
    """One look at everything."""

    at_s: float
    verdicts: int
    waiting: Mapping[str, int]  # lane -> messages
    connections: Mapping[str, int]  # server -> connections
    database_mb: float
    processes: Mapping[str, Usage]


@dataclass(frozen=True)
class Growth:
    """One measure of one process: medians, and the slope of the second half."""

    what: str
    unit: str
    before: float  # the second quarter's median
    after: float  # the second half's
    per_hour: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.after - self.before <= self.allowed


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Every measure that must stay where it is, memory first. Takes eight samples or more."""
    hours = [sample.at_s / 3600 for sample in samples]
    series = [measures(sample) for sample in samples]
    return [growth(what, unit, hours, [one[what, unit] for one in series]) for what, unit in series[0]]


def measures(sample: Sample) -> dict[tuple[str, str], float]:
    """What is measured in one look, by its name and unit."""
    memory = {(f"{name}, memory", "MB"): used.own_mb for name, used in sample.processes.items()}
    threads = {(f"{name}, threads", ""): float(used.threads) for name, used in sample.processes.items()}
    files = {(f"{name}, open files", ""): float(used.files) for name, used in sample.processes.items()}
    connections = {(f"connections to {server}", ""): float(count) for server, count in sample.connections.items()}
    return memory | threads | files | connections


def growth(what: str, unit: str, hours: Sequence[float], values: Sequence[float]) -> Growth:
    quarter, middle = len(values) // 4, len(values) // 2
    before, after = statistics.median(values[quarter:middle]), statistics.median(values[middle:])
    slope = statistics.linear_regression(hours[middle:], values[middle:]).slope
    share = MAX_GROWTH * before
    allowed = max(NOISE_MB, min(MAX_GROWTH_MB, share)) if unit == "MB" else max(MAX_MORE, share)
    return Growth(what, unit, round(before, 1), round(after, 1), round(slope, 1), round(allowed, 1))
