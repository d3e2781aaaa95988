"""A worker against what it feeds: `concord bench worker`.

First a stand-in for a GPU (infra/bench/stand_in.py), which takes a fixed time a slice and no CPU, at two rates: how
much of its own rate the worker gets out of it, from a backlog that never runs dry, each pair with a picture of its own,
nothing reused. Then the demo model on one core, everything else on another: the worker against a bare loop over the
same batches in memory (infra/bench/bare.py), which takes turns with it on that core.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.bench import bare
from infra.bench.pictures import pictures
from infra.bench.site import ROOT, BenchVoid, Site, Window, cpu_of, on_cores, spent
from infra.bench.stand_in import SLICE_PAIRS, Device
from infra.endings import undisturbed

#: What the worker must reach: of the stand-in's own rate, and of the bare loop's.
OF_THE_DEVICE, OF_THE_LOOP = 0.95, 0.85
#: Batches before the first that counts, in each measurement.
WARM_UP_BATCHES = 8
#: So much longer than the measurement does the backlog last: the warm-up, and a moment at the end.
MARGIN_S = 4.0
#: Turns of worker and loops, and seconds of one turn of a loop.
ROUNDS, TURN_S = 7, 4.0
#: Pictures of which the time to decode is told.
DECODED = 64


@dataclass(frozen=True)
class Load:
    """A device, and the pictures that come with its pairs."""

    device: Device
    side_px: int
    size: int


LOADS: Mapping[str, Load] = {
    "400 pairs/s, 256 px": Load(Device(SLICE_PAIRS / 400, side_px=256), side_px=256, size=10_000),
    "100 pairs/s, 1000 px": Load(Device(SLICE_PAIRS / 100, side_px=480), side_px=1000, size=60_000),
}


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    with Site() as site:
        devices = {name: against_device(site, name, load, seconds, say) for name, load in LOADS.items()}
    loop = against_loop(say, max(1.0, min(TURN_S, seconds / ROUNDS)))
    ratio = min(one["ratio"] for one in devices.values())
    loop_ratio = loop.get("ratio")
    met = ratio >= OF_THE_DEVICE and (loop_ratio is None or loop_ratio >= OF_THE_LOOP)
    return {
        "pairs_per_s": devices[next(iter(LOADS))]["pairs_per_s"],
        "ratio": ratio,
        "ratio_to_bare_loop": loop_ratio,
        "target": f"{OF_THE_DEVICE} of the device's own rate; {OF_THE_LOOP} of a bare loop on one core",
        "met": met,
        "devices": devices,
        "bare_loop": loop,
    }


# ---- A stand-in for a GPU --------------------------------------------------------------------------------------------


def against_device(site: Site, name: str, load: Load, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Judged pairs a second in the window against the device's own rate."""
    rate = load.device.pairs_per_s
    pairs = round(rate * (seconds + MARGIN_S)) + WARM_UP_BATCHES * SLICE_PAIRS
    say(f"{name}: uploading {pairs:,} pictures of {load.size / 1000:g} kB")
    images = site.upload(f"{load.side_px}px", pictures(pairs, load.side_px, load.size))
    decode_ms = milliseconds_to_decode(load)
    with site.worker(load.device.program):
        before = site.settled()
        site.submit(images)
        site.await_settled(before + WARM_UP_BATCHES * SLICE_PAIRS)
        say(f"{name}: measuring")
        cpu = site.cpu_seconds()
        window, least = site.watch(seconds)
        busy = spent(cpu, site.cpu_seconds(), window.seconds)
        found = site.rate(window)
        site.await_empty()
    if not least:
        raise BenchVoid(f"the backlog of {name} ran dry: more pairs are needed")
    say(f"{name}: {found:.1f} pairs/s")
    return {
        "pairs_per_s": round(found, 1),
        "device_pairs_per_s": round(rate, 1),
        "ratio": round(found / rate, 4),
        "decode_ms": round(decode_ms, 2),
        "read_px": load.device.side_px,
        "seconds": round(window.seconds, 1),
        "least_messages_waiting": least,
        **site.stages(window),
        **{f"cores_{name}": cores for name, cores in busy.items()},
    }


def milliseconds_to_decode(load: Load) -> float:
    """CPU time of one picture in the decoder, in the mean."""
    from worker.decode_image import decode

    some = list(pictures(DECODED, load.side_px, load.size))
    started = time.thread_time()
    for data in some:
        decode(data, target_px=load.device.side_px, exact=False)
    return 1000 * (time.thread_time() - started) / len(some)


# ---- The demo model on one core --------------------------------------------------------------------------------------


def against_loop(say: Callable[[str], None], turn_s: float) -> dict[str, Any]:
    """The worker and the loops take turns on one core. Empty where there are no two cores, or no way to choose one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        say("one core, or a system that does not tell them apart: no bare loop")
        return {}
    own, others = cores[0], cores[1:]
    turns: list[dict[str, float]] = []
    with on_cores(others), Site() as site, contextlib.ExitStack() as pinned:
        say("bare loop: the demo model on one core")
        pairs = bare.sample_pairs()
        images, texts = site.upload("demo", (data for data, _ in pairs)), [text for _, text in pairs]
        with on_cores([own]):
            loop = pinned.enter_context(bare_loop())
            worker = pinned.enter_context(site.worker())
        speed = ask(loop, turn_s, "decoded")["rate"]
        batches = round(speed * turn_s / bare.BATCH_PAIRS) + 2 * WARM_UP_BATCHES
        for number in range(ROUNDS + 1):
            decoded, encoded = ask(loop, turn_s, "decoded"), ask(loop, turn_s, "encoded")
            whole = worker_turn(site, worker, images, texts, batches)
            if number:  # The first turn of each warms up.
                turns.append(
                    {
                        "worker": whole["rate"], "decoded": decoded["rate"], "encoded": encoded["rate"],
                        "worker_cpu_ms": whole["cpu_ms"], "decoded_cpu_ms": decoded["cpu_ms"],
                        "encoded_cpu_ms": encoded["cpu_ms"],
                    }
                )  # fmt: skip
                say(f"worker {whole['rate']:.0f}, loop {decoded['rate']:.0f}, from bytes {encoded['rate']:.0f} pairs/s")
    middle = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "pairs_per_s": round(middle["worker"], 1),
        "loop_pairs_per_s": round(middle["decoded"], 1),
        "loop_from_bytes_pairs_per_s": round(middle["encoded"], 1),
        "ratio": round(statistics.median(turn["worker"] / turn["decoded"] for turn in turns), 4),
        "ratio_of_cpu_ms": round(middle["decoded_cpu_ms"] / middle["worker_cpu_ms"], 4),
        "ratio_from_bytes": round(statistics.median(turn["worker"] / turn["encoded"] for turn in turns), 4),
        "cpu_ms_a_pair": round(middle["worker_cpu_ms"], 3),
        "loop_cpu_ms_a_pair": round(middle["decoded_cpu_ms"], 3),
        "loop_from_bytes_cpu_ms_a_pair": round(middle["encoded_cpu_ms"], 3),
        "turns": len(turns),
    }


@contextlib.contextmanager
def bare_loop() -> Iterator["subprocess.Popen[str]"]:
    """The loop's process, ready."""
    process = None
    try:
        with undisturbed():
            process = subprocess.Popen(
                [sys.executable, "-m", "infra.bench.bare"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise BenchVoid("the bare loop did not start: see above")
        yield process
    finally:
        if process is not None:
            with undisturbed():
                process.kill()
                process.communicate()


def ask(loop: "subprocess.Popen[str]", seconds: float, of: str) -> dict[str, float]:
    """A turn of the loop: pairs a second, and CPU milliseconds a pair."""
    assert loop.stdin is not None
    assert loop.stdout is not None
    loop.stdin.write(json.dumps({"seconds": seconds, "pictures": of}) + "\n")
    loop.stdin.flush()
    if not (line := loop.stdout.readline()):
        raise BenchVoid("the bare loop ended")
    told = json.loads(line)
    return {"rate": told["pairs"] / told["seconds"], "cpu_ms": 1000 * told["cpu_s"] / told["pairs"]}


def worker_turn(site: Site, worker: Any, images: Sequence[str], texts: Sequence[str], batches: int) -> dict[str, float]:
    """As many batches through the worker; the first and the last ones, where no others come before or after, do not
    count.
    """
    before = site.settled()
    for _ in range(-(-batches // bare.BATCHES)):
        site.submit(images, texts=texts)
    site.await_settled(before + WARM_UP_BATCHES * bare.BATCH_PAIRS)
    started, cpu, pairs = time.time(), cpu_of(worker), site.settled()
    site.await_settled(before + (batches - WARM_UP_BATCHES) * bare.BATCH_PAIRS)
    ended, used, pairs = time.time(), cpu_of(worker) - cpu, site.settled() - pairs
    rate = site.rate(Window(started, ended))
    site.await_empty()
    return {"rate": rate, "cpu_ms": 1000 * used / pairs}
