"""Full load for half an hour, and whether anything grows: `python -m infra.bench.soak [--minutes 30] [--out DIR]`.

Real servers in a folder of their own, the demo model in one or two workers, and a producer (infra/bench/load.py) that
never lets the bulk lane run dry. Every five seconds each process is looked at: memory, files, threads; and the servers
are asked for their connections. What may grow and by how much is in infra/bench/flatness.py. In the end every accepted
pair must have one verdict, and it must be judged. Exits 1 where something grew or a pair is missing. With --out,
soak.md, soak.json and soak.svg are written there.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
import redis
from rich.console import Console

from infra import demo
from infra.bench.flatness import Sample, Usage, growths
from infra.bench.soak_page import chart, page
from infra.endings import in_order, undisturbed
from infra.local import Addresses, Stack

#: Before the first sample: until then Go's collector and glibc's arenas have found their working size.
WARM_UP_S = 120.0
SAMPLE_EVERY_S = 5.0
#: Samples between two that are printed and kept in soak.json: a minute.
SAY_EVERY = 12
#: After the producer has stopped: what it left in the outbox is judged within this time.
DRAIN_S = 120.0
MB = 1e6

#: A model on one thread a worker is the measure: two workers share two cores.
TORCH_THREADS = 1
#: As docs/deploy.md has it: with more of glibc's arenas a worker takes more memory, and less steadily.
MALLOC_ARENAS = 2

#: Rows that were written to the months of `verdict`: Postgres counts them anyway, and to count them anew takes long.
WRITTEN = "select coalesce(sum(n_tup_ins), 0) from pg_stat_user_tables where relname ~ '^verdict_'"
WAITING = "select lane, count(*) from outbox group by lane"
CONNECTIONS = "select count(*) from pg_stat_activity where usename = 'concord_app'"
SETTLED = "select status, count(*) from verdict group by status"

out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Watched:
    """What is looked at: process ids by name, each with all that it has started."""

    processes: Mapping[str, int]
    postgres: psycopg.Connection[Any]
    redis: "redis.Redis"
    logs: Path  # a file for each, by its name

    def sample(self, started_at: float) -> Sample:
        waiting = dict(self.postgres.execute(WAITING).fetchall())
        return Sample(
            at_s=round(time.monotonic() - started_at, 1),
            verdicts=self.one(WRITTEN),
            waiting={lane: waiting.get(lane, 0) for lane in ("live", "bulk")},
            connections={
                "Postgres": self.one(CONNECTIONS),
                "Redis": int(self.redis.info("clients")["connected_clients"]),
            },
            database_mb=round(self.one("select pg_database_size(current_database())") / MB, 1),
            processes={name: self.usage(name) for name in self.processes},
        )

    def usage(self, name: str) -> Usage:
        try:
            return usage(self.processes[name])
        except psutil.NoSuchProcess:
            said = (self.logs / f"{name}.log").read_text(errors="replace")[-3_000:]
            sys.exit(f"{name} has ended under the load. The end of its log:\n{said}")

    def one(self, statement: str) -> int:
        row = self.postgres.execute(statement.encode()).fetchone()
        assert row is not None
        return int(row[0])


def usage(pid: int) -> Usage:
    """A process with all that it has started, summed up; of this one, which has started all, itself alone.

    Raises psutil.NoSuchProcess where it has ended.
    """
    root, found = psutil.Process(pid), []
    for process in [root, *(root.children(recursive=True) if pid != os.getpid() else ())]:
        # Postgres ends processes of its own as it likes; between two questions, too.
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            memory = process.memory_info()
            found.append(
                (memory.rss, memory.rss - getattr(memory, "shared", 0), process.num_threads(), process.num_fds())
            )
    if not found:
        raise psutil.NoSuchProcess(pid)
    rss, own, threads, files = map(sum, zip(*found, strict=True))
    return Usage(round(rss / MB, 1), round(own / MB, 1), threads, files, len(found))


@contextlib.contextmanager
def producer(pairs: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    process = None
    try:
        with log.open("w") as sink, undisturbed():
            command = [sys.executable, "-m", "infra.bench.load", str(pairs)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True, start_new_session=True)
        yield process
    finally:
        if process is not None:
            with undisturbed():
                process.terminate()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def soak(stack: Stack, addresses: Addresses, minutes: float, workers: int) -> tuple[list[Sample], int, dict[str, int]]:
    """Run the load and look; returns the samples, the number of accepted pairs, and verdicts by their status."""
    from db.migrations import upgrade

    upgrade(addresses.owner_database_url, addresses.database_url)
    pairs = demo.upload(stack, addresses)
    file = stack.folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    logs = stack.folder / "logs"
    with contextlib.ExitStack() as running:
        processes = {server.name: process.pid for server in stack.servers if (process := server.running())}
        for number in range(1, workers + 1):
            name = f"worker{number}"
            processes[name] = running.enter_context(demo.worker(logs / f"{name}.log", "-n", f"{name}@soak"))
        owner = running.enter_context(stack.postgres.connect())
        client = running.enter_context(redis.Redis.from_url(addresses.redis_url))
        with producer(file, logs / "producer.log") as source:
            time.sleep(WARM_UP_S)
            watched = Watched({**processes, "producer": source.pid, "soak": os.getpid()}, owner, client, logs)
            samples = list(samples_of(watched, minutes * 60))
            source.terminate()
            said, _ = source.communicate()
        return samples, int(json.loads(said)["accepted"]), drained(owner)


def samples_of(watched: Watched, seconds: float) -> Iterator[Sample]:
    """A sample every few seconds, the first at once."""
    started_at = time.monotonic()
    for number in range(int(seconds / SAMPLE_EVERY_S) + 1):
        time.sleep(max(0.0, started_at + number * SAMPLE_EVERY_S - time.monotonic()))
        sample = watched.sample(started_at)
        yield sample
        if number % SAY_EVERY == 0:
            memory = ", ".join(f"{name} {used.own_mb:.0f}" for name, used in sample.processes.items())
            out.print(
                f"{sample.at_s / 60:4.0f} min {sample.verdicts:9,} verdicts, {sample.waiting['bulk']:3} wait; {memory}"
            )


def drained(owner: psycopg.Connection[Any]) -> dict[str, int]:
    """Verdicts by status once the outbox is empty, or, where it does not become so, as they are then."""
    deadline = time.monotonic() + DRAIN_S
    while dict(owner.execute(WAITING).fetchall()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return {str(status): int(rows) for status, rows in owner.execute(SETTLED).fetchall()}


def about() -> dict[str, Any]:
    """What the figures were taken on."""
    from infra.bench.precision import commit, machine  # loads torch

    return {**machine(), "threads": TORCH_THREADS, "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def main() -> int:
    """Soak, judge, write the papers, print one line of JSON last."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="a new one, which keeps the servers' data and all logs")
    parser.add_argument("--out", type=Path, help="folder for soak.md, soak.json and soak.svg")
    arguments = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    with contextlib.ExitStack() as scratch:
        folder = arguments.folder or Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="concord-soak-")))
        stack = Stack(folder / ".concord")
        if stack.folder.exists():
            parser.error(f"{stack.folder} is there already, and its verdicts would be counted as this run's")
        try:
            addresses = stack.up()
            demo.point_settings_at(addresses)
            os.environ |= {"CONCORD_TORCH_THREADS": str(TORCH_THREADS), "MALLOC_ARENA_MAX": str(MALLOC_ARENAS)}
            samples, accepted, settled = soak(stack, addresses, arguments.minutes, arguments.workers)
        finally:
            with undisturbed():
                stack.down()
    found = growths(samples)
    result = {
        "bench": "soak",
        "command": " ".join(["python -m infra.bench.soak", *sys.argv[1:]]),
        "minutes": arguments.minutes,
        "workers": arguments.workers,
        "accepted": accepted,
        "settled": settled,
        "pairs_per_s": round((samples[-1].verdicts - samples[0].verdicts) / samples[-1].at_s, 1),
        "least_waiting": min(sample.waiting["bulk"] for sample in samples),
        **about(),
        "load": load,
        "growths": [{**asdict(growth), "flat": growth.flat} for growth in found],
    }
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "soak.md").write_text(page(result, samples, found), encoding="utf-8")
        (arguments.out / "soak.svg").write_text(chart(samples), encoding="utf-8")
        whole = {**result, "samples": [asdict(sample) for sample in samples[::SAY_EVERY]]}
        (arguments.out / "soak.json").write_text(json.dumps(whole) + "\n", encoding="utf-8")
    for growth in found:
        if not growth.flat:
            out.print(f"grew: {growth.what}, from {growth.before:g} to {growth.after:g} {growth.unit}")
    print(json.dumps(result))
    return 0 if all(growth.flat for growth in found) and settled == {"judged": accepted} else 1


if __name__ == "__main__":
    with in_order():
        sys.exit(main())
