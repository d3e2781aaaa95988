"""Two and three workers against one: `concord bench scale`.

Each worker has a stand-in for a GPU of its own (infra/bench/stand_in.py), slow enough that the cores of one machine,
which also carry Postgres, Redis and S3, are not full; what each process takes of them is told. Last come three workers
whose devices are faster than two cores can feed.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

from infra.bench.pictures import pictures
from infra.bench.site import BenchVoid, Site, Window, spent
from infra.bench.stand_in import SLICE_PAIRS, Device

DEVICE, FAST = Device(SLICE_PAIRS / 200, side_px=256), Device(SLICE_PAIRS / 2_000, side_px=256)
PICTURES, SIDE_PX, SIZE = 2_048, 256, 10_000
#: What so many workers must judge, in times of one.
TARGETS = {2: 1.9, 3: 2.8}
WARM_UP_BATCHES = 6

BY_WORKER = """
select worker, extract(epoch from settled_at)::float8, pairs from batch
where settled_at between to_timestamp(:since) and to_timestamp(:until) order by settled_at
"""


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    with Site() as site:
        say(f"uploading {PICTURES:,} pictures")
        images = site.upload("scale", pictures(PICTURES, SIDE_PX, SIZE))
        found = {count: with_workers(site, images, DEVICE, count, seconds, say) for count in (1, *TARGETS)}
        full = with_workers(site, images, FAST, max(TARGETS), seconds, say)
    one = found[1]["pairs_per_s"]
    times = {count: round(found[count]["pairs_per_s"] / one, 3) for count in TARGETS}
    return {
        "pairs_per_s": found[max(TARGETS)]["pairs_per_s"],
        "ratio": times[max(TARGETS)],
        "ratio_of_two": times[2],
        "target": " and ".join(f"{least} times one with {count} workers" for count, least in TARGETS.items()),
        "met": all(times[count] >= least for count, least in TARGETS.items()),
        "device_pairs_per_s": DEVICE.pairs_per_s,
        "workers": {**{str(count): figures for count, figures in found.items()}, f"{max(TARGETS)}, fast devices": full},
    }


def with_workers(
    site: Site, images: Sequence[str], device: Device, count: int, seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """So many workers on one backlog, which never runs dry."""
    enough = device.pairs_per_s * seconds + 2 * WARM_UP_BATCHES * SLICE_PAIRS
    with contextlib.ExitStack() as running:
        for number in range(1, count + 1):
            running.enter_context(site.worker(device.program, f"worker{count}{number}"))
        before = site.settled()
        site.submit(list(islice(cycle(images), round(count * enough))))
        site.await_settled(before + count * WARM_UP_BATCHES * SLICE_PAIRS)
        cpu = site.cpu_seconds()
        window, least = site.watch(seconds)
        busy = by_role(spent(cpu, site.cpu_seconds(), window.seconds))
        if not least:
            raise BenchVoid("the backlog ran dry: more pairs are needed")
        found = rate_of_all(site, window)
        say(f"{count} workers: {found:.1f} pairs/s, {sum(busy.values()):.2f} cores busy")
        if device == DEVICE:  # Others come after it.
            site.await_empty()
    return {
        "pairs_per_s": round(found, 1),
        **{f"cores_{role}": round(cores, 3) for role, cores in busy.items()},
        "cores_together": round(sum(busy.values()), 3),
        "cpu_ms_a_pair": round(1000 * sum(busy.values()) / found, 3),
    }


def rate_of_all(site: Site, window: Window) -> float:
    """Judged pairs a second: of each worker from its first commit to its last one in the window, added up."""
    commits: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for worker, moment, pairs in site.ask(BY_WORKER, since=window.since, until=window.until):
        commits[worker].append((moment, pairs))
    if any(len(each) < 3 for each in commits.values()):
        raise BenchVoid("too few batches to measure: a longer --seconds is needed")
    return sum(sum(pairs for _, pairs in each[1:]) / (each[-1][0] - each[0][0]) for each in commits.values())


def by_role(busy: dict[str, float]) -> dict[str, float]:
    """Cores by what they were busy with, all workers in one."""
    roles: defaultdict[str, float] = defaultdict(float)
    for name, cores in busy.items():
        roles["workers" if name.startswith("worker") else name] += cores
    return dict(roles)
