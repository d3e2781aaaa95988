"""The judgement of a soak: a leak is found, noise and what was warming up are not, and the paper says which it was."""

import math
from collections.abc import Callable

import pytest

from infra.bench.flatness import Growth, Sample, Usage, growths
from infra.bench.soak_page import chart, page

MINUTES = 30
EVERY_S = 5


def run(memory_mb: Callable[[float], float], files: Callable[[float], int] = lambda _: 40) -> list[Sample]:
    """Half an hour of one worker beside a Postgres whose shared buffers fill."""
    samples = []
    for number in range(MINUTES * 60 // EVERY_S + 1):
        minute = number * EVERY_S / 60
        worker = Usage(memory_mb(minute) + 90, memory_mb(minute), 26, files(minute), 1)
        postgres = Usage(200 + 10 * minute, 32.0, 14, 460, 14)
        others = dict.fromkeys(("redis", "s3", "worker2", "producer", "soak", "one more"), Usage(99.0, 80.0, 4, 20, 1))
        processes = {"postgres": postgres, "worker1": worker, **others}
        connections = {"Postgres": 9, "Redis": 13}
        samples.append(
            Sample(60 * minute, int(300 * 60 * minute), {"live": 1, "bulk": 64}, connections, 50.0, processes)
        )
    return samples


def grown(samples: list[Sample]) -> list[Growth]:
    return [growth for growth in growths(samples) if not growth.flat]


@pytest.mark.parametrize(
    "memory_mb",
    [
        lambda minute: 480.0,
        lambda minute: 480 + 12 * math.sin(minute * 7),  # goes up and down
        lambda minute: 380 + min(100.0, 30 * minute),  # has its working size after four minutes
    ],
)
def test_memory_that_stays_where_it_is_is_flat(memory_mb: Callable[[float], float]) -> None:
    assert grown(run(memory_mb)) == []


@pytest.mark.parametrize("mb_a_minute", [3.0, 10.0])
def test_a_leak_is_found_and_its_slope_told(mb_a_minute: float) -> None:
    (leak,) = grown(run(lambda minute: 480 + mb_a_minute * minute))
    assert leak.what == "worker1, memory"
    assert leak.per_hour == pytest.approx(60 * mb_a_minute)


def test_files_that_are_never_closed_are_found() -> None:
    (leak,) = grown(run(lambda minute: 480.0, files=lambda minute: 40 + int(minute)))
    assert leak.what == "worker1, open files"


@pytest.mark.parametrize("leaks", [False, True])
def test_the_paper_says_what_grew_and_what_is_missing(leaks: bool) -> None:
    samples = run(lambda minute: 480 + 10 * minute * leaks)
    machine = {"cpu": "a CPU", "cores": 2, "torch": "2", "python": "3", "load": 0.1, "threads": 1}
    result = {
        "command": "python -m infra.bench.soak", "minutes": MINUTES, "workers": 1, "date": "2026-01-31",
        "commit": "abc", "growths": [], "pairs_per_s": 300.0,
        "accepted": 540_000, "settled": {"judged": 540_000 - 7 * leaks}, **machine,
    }  # fmt: skip
    paper = page(result, samples, growths(samples))
    assert ("540,000 judged: none is missing. Nothing grew." in paper) == (not leaks)
    assert ("**7 are missing**. **What grew: worker1, memory.**" in paper) == leaks
    rates = [line.split("|")[2].strip() for line in paper.splitlines() if line.endswith("| 50 |")]
    assert len(rates) == 12 and set(rates) == {"300"}
    assert "<svg" in chart(samples) and all(name in chart(samples) for name in samples[0].processes)
