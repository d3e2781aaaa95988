"""Small pictures out of S3: GETs a CPU-second of the client against boto3's, and whether memory grows.

Both clients run in processes of their own (infra/bench/image_clients.py) with the same number of threads, and take
turns. What decoding costs is measured beside it, since a picture that has come is decoded on the same threads.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from infra.bench.decode import cost
from infra.bench.pictures import pictures, upload
from infra.bench.site import BenchVoid
from infra.endings import undisturbed
from infra.local import Stack

#: Sides and bytes of the pictures.
KINDS: Mapping[str, tuple[int, int]] = {"10kB": (256, 10_000), "60kB": (1000, 60_000)}
#: Objects of each kind; a batch has no object twice.
OBJECTS = 512
#: As a worker has them by default.
THREADS = 16
ROUNDS = 5
#: Before the first round, for connections and caches.
WARM_UP_S = 0.3
#: Pictures over which memory is looked at, where a measurement is this long or longer.
PICTURES, PICTURES_FROM_S = 20_000, 20.0
#: As docs/deploy.md has it for workers.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "TOKIO_WORKER_THREADS": "1"}

#: Sides of the JPEGs whose decoding is timed, and of the inputs for which: the hub's large checkpoints', the demo's.
DECODED_PX = (256, 1000, 2000, 4000)
TARGETS_PX = (480, 64)
DECODE_REPEATS = 5

TIMES_WANTED = 6.0
GROWTH_ALLOWED_MB = 64.0


class Client:
    """A process of infra.bench.image_clients: a job in, its figures out."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def do(self, **job: object) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise BenchVoid("a client of S3 has ended; what it said stands above")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextlib.contextmanager
def client(name: str, environment: Mapping[str, str]) -> Iterator[Client]:
    command = [sys.executable, "-m", "infra.bench.image_clients", name, str(THREADS)]
    with undisturbed():
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    try:
        yield Client(process)
    finally:
        with undisturbed():
            process.kill()
            process.communicate()


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """`seconds` of GETs for each client and kind of picture; memory over 20,000 pictures, fewer below 20 seconds."""
    with tempfile.TemporaryDirectory(prefix="concord-bench-") as folder, contextlib.ExitStack() as running:
        stack = Stack(Path(folder, ".concord"))
        running.callback(stack.s3.stop)
        stack.s3.start()
        addresses = stack.addresses()
        own = {name: value for name, value in os.environ.items() if not name.startswith("CONCORD_")}
        own |= {**addresses.environment(), "CONCORD_ENV_FILE": "", **ENVIRONMENT}
        objects = {kind: upload(addresses, kind, pictures(OBJECTS, *shape)) for kind, shape in KINDS.items()}
        ours, theirs = (running.enter_context(client(name, own)) for name in ("concord", "boto3"))
        gets = {kind: compared(objects[kind], ours, theirs, seconds / ROUNDS) for kind in KINDS}
        for kind, figures in gets.items():
            say(f"{kind}: {figures['ratio']} times boto3's GETs a CPU-second")
        many = int(PICTURES * min(1.0, seconds / PICTURES_FROM_S))
        say(f"memory over {many:,} pictures, fetched and decoded")
        both = [address for pair in zip(*objects.values(), strict=True) for address in pair]
        memory = ours.do(pictures=many, addresses=both)
    say("decoding")
    ratio = min(figures["ratio"] for figures in gets.values())
    return {
        "bench": "images",
        "gets_per_cpu_s": gets["10kB"]["gets_per_cpu_s"],
        "ratio": ratio,
        "growth_mb": round(memory["growth_mb"], 1),
        "target": f"at least {TIMES_WANTED:g} times boto3's GETs a CPU-second of the client; memory grows by at most "
        f"{GROWTH_ALLOWED_MB:g} MB over 20,000 pictures",
        "met": ratio >= TIMES_WANTED and memory["growth_mb"] <= GROWTH_ALLOWED_MB,
        "threads": THREADS,
        "gets": gets,
        "memory": {name: round(value, 1) for name, value in memory.items()},
        "decoding": [cost(side, target, DECODE_REPEATS) for target in TARGETS_PX for side in DECODED_PX],
        "notes": [
            "`ratio` is the smaller one of the two kinds of pictures. CPU time is user and system time of the client's"
            " process; SeaweedFS runs on the same cores. boto3 has one client for all threads, as many connections as"
            " threads, and no checks that it can leave out. The rate in a second of wall time is that of this machine,"
            " where S3's server takes most of the cores.",
            "Decoding: CPU milliseconds on one thread from the file to the model's input, all of the JPEG (`exact`) and"
            " at 1/2, 1/4 or 1/8 of its size (`reduced`).",
        ],
    }


def compared(addresses: Sequence[str], ours: Client, theirs: Client, round_s: float) -> dict[str, float | int]:
    """Both in turn. The ratio is the median of the rounds' ratios, each of two neighbours in time."""
    for each in (ours, theirs):
        each.do(seconds=WARM_UP_S, addresses=addresses)
    rounds = [[each.do(seconds=round_s, addresses=addresses) for each in (ours, theirs)] for _ in range(ROUNDS)]
    ours_rates, boto3_rates = zip(*([one["gets"] / one["cpu_s"] for one in pair] for pair in rounds), strict=True)
    ratios = [a / b for a, b in zip(ours_rates, boto3_rates, strict=True)]
    walls = [[one["gets"] / one["wall_s"] for one in pair] for pair in rounds]
    return {
        "gets_per_cpu_s": round(statistics.median(ours_rates)),
        "boto3_gets_per_cpu_s": round(statistics.median(boto3_rates)),
        "ratio": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "gets_per_s": round(statistics.median(wall for wall, _ in walls)),
        "boto3_gets_per_s": round(statistics.median(wall for _, wall in walls)),
    }
