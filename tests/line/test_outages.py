"""A server that is away for long holds the workers, and nothing else: no attempts, no memory, no pair."""

import time
from typing import Any

import psutil
import pytest

from tasks.submit import Pair, submit
from tests.line.site import Site, Worker, eventually
from tests.line.test_line import PICTURE

#: Growth of a worker that only waits: less than one of the batches that it holds.
MAX_GROWTH_BYTES = 16 * 2**20
#: How often a worker that waits is looked at.
LOOK_EVERY_S = 0.5


def waits(worker: Worker, seconds: float) -> list[int]:
    """Bytes of the worker while that much time passes, from its first complaint on."""
    process = psutil.Process(worker.process.pid)
    until, sizes = time.monotonic() + seconds, []
    while time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
        assert worker.process.poll() is None, "the worker ended"
        sizes.append(process.memory_info().rss)
    return sizes


@pytest.mark.parametrize("server", ["s3", "postgres"])
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(5, marks=pytest.mark.timeout(180), id="seconds"),
        pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="ten minutes"),
    ],
)
def test_an_outage_spends_no_attempts_and_no_memory_and_ends_with_every_pair_judged(
    site: Site, stack: Any, server: str, seconds: float
) -> None:
    with site.worker(max_pairs=16, image_timeout_s=2) as worker:
        pairs = [Pair(ref=f"{server}-{seconds}-{n}", image=PICTURE, text=f"{n} dogs") for n in range(1_000)]
        ids = submit(pairs, lane="bulk").pair_ids
        worker.says("a batch is settled")
        said = len(worker.lines)
        getattr(stack, server).kill()
        try:
            complaints = ("trying again", "the relay waits")
            eventually(lambda: any(c in line for line in worker.lines[said:] for c in complaints), "a complaint")
            sizes = waits(worker, seconds)
        finally:
            getattr(stack, server).start()
        rows = site.verdicts(ids, 120)
        assert {(row["status"], row["attempts"]) for row in rows.values()} == {("judged", 0)}
        eventually(site.outbox_is_empty, "an empty outbox")
        assert max(sizes) - sizes[0] < MAX_GROWTH_BYTES
        # What is held is touched, so nobody else is given it, and nothing is judged alone for it.
        assert site.query("select * from suspect") == []
        assert not [line for line in worker.lines[said:] if "judged alone" in line or "published again" in line]
