"""Timing: runs that take turns in one process, and what loading a model takes in a process of its own."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from worker.errors import ConcordError
from worker.model.checkpoint import load
from worker.moderator import Moderator

Run = TypeVar("Run", bound=Hashable)

#: What a fresh process is told to run.
LOAD_ALONE = "import sys; from worker.compare.clock import load_alone; load_alone(*sys.argv[1:])"


def in_turns(
    runs: Mapping[Run, Callable[[], object]], rounds: int, after_round: Callable[[int], None] = lambda done: None
) -> dict[Run, list[float]]:
    """Seconds of each run in each round. All run once unmeasured first; another one begins each round."""
    order: list[Run] = list(runs)
    seconds: dict[Run, list[float]] = {name: [] for name in order}
    for run in runs.values():
        run()
    for done in range(rounds):
        shift = done * len(order) // rounds
        for name in order[shift:] + order[:shift]:
            started = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - started)
        after_round(done + 1)
    return seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def in_fresh_process(folder: Path, device: torch.device | str) -> tuple[float, float]:
    """Seconds to load a checkpoint, and the peak memory, in MB, of a process that loads it and warms it up.

    The memory is the host's and holds Python and torch as well. Raises ConcordError where that process fails.
    """
    command = [sys.executable, "-c", LOAD_ALONE, str(folder), str(device), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"it ended with status {done.returncode}"]
        raise ConcordError(f"A fresh process could not load {folder}: {reason[0]}")
    values = json.loads(done.stdout.splitlines()[-1])
    return round(values["load_s"], 3), round(values["peak_rss_mb"], 1)


def load_alone(folder: str, device: str, threads: str) -> None:
    """Load a checkpoint, warm it up as workers do, and print what it took as a line of JSON."""
    torch.set_num_threads(int(threads))
    started = time.perf_counter()
    checkpoint = load(folder, device)
    load_s = time.perf_counter() - started
    Moderator(checkpoint, device).warm_up()
    print(json.dumps({"load_s": load_s, "peak_rss_mb": peak_rss_mb()}))


def peak_rss_mb() -> float:
    """The most memory that this process has had, in MB (10^6 bytes)."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands getrusage's figure down from the parent, which may have been larger than this process ever was.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
