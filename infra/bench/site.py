"""Where benchmarks of workers run: servers of their own in a folder that is deleted at the end, and worker processes.

    with Site() as site:
        addresses = site.upload("small", pictures(1000, 256, 10_000))
        site.submit(addresses)
        with site.worker(Device(0.16, 256).program) as worker:
            site.settled(640)
            ...

The process that makes one is the producer, with the site's settings in place of any others.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
from sqlalchemy import text

from infra.bench.pictures import upload
from infra.demo import WEIGHTS
from infra.endings import undisturbed
from infra.local import Stack
from worker.errors import ConcordError

ROOT = Path(__file__).parents[2]
#: How long a worker may take to load the model and connect, and to end.
START_S, STOP_S = 180.0, 60.0
#: Where nothing is settled for this long, nothing will be.
STALLED_S = 60.0
POLL_S = 0.05
#: Pairs that are submitted in one transaction.
AT_ONCE = 4_096
#: The worker on one thread of torch: the machine has few cores, and others need them too.
SETTINGS = {"MODEL_DIR": str(WEIGHTS), "DEVICE": "cpu", "TORCH_THREADS": 1, "ENV_FILE": "", "REUSE_DAYS": 0}

TEXT = "a picture of a shoe"

REUSED = "select coalesce(sum(reused), 0) from batch"
SETTLED = "select coalesce(sum(pairs), 0) from batch"
WAITING = "select count(*) from outbox where lane = :lane"
#: Each batch is one transaction, and so has one moment.
COMMITS = """
select extract(epoch from decided_at)::float8, count(*) from verdict
where status = 'judged' and lane = :lane and decided_at between to_timestamp(:since) and to_timestamp(:until)
group by decided_at order by decided_at
"""
STAGES = """
select avg(pairs) as pairs_a_batch, 1000 * avg(fetch_s) as fetch_and_decode_ms_a_batch,
       1000 * avg(model_s) as model_ms_a_batch, 1000 * avg(write_s) as write_ms_a_batch
from batch where lane = :lane and settled_at between to_timestamp(:since) and to_timestamp(:until)
"""


class BenchVoid(ConcordError):
    """The measurement could not be made."""


@dataclass(frozen=True)
class Window:
    """A stretch of time, in seconds since 1970; servers and workers are on the clock of this machine."""

    since: float
    until: float

    @property
    def seconds(self) -> float:
        return self.until - self.since


@contextlib.contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """What is started inside runs on these cores and no others, all of its threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Site(contextlib.ExitStack):
    """Everything up from entry to exit."""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.bring_up()
        except BaseException:
            self.close()
            raise
        return self

    def bring_up(self) -> None:
        from db.migrations import upgrade

        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="concord-bench-")))
        self.stack = Stack(self.folder / ".concord")
        self.callback(self.take_down)
        self.addresses = self.stack.up()
        upgrade(self.addresses.owner_database_url, self.addresses.database_url)
        self.use()
        self.workers: dict[str, psutil.Process] = {}

    def take_down(self) -> None:
        with undisturbed():
            self.stack.down()

    def use(self) -> None:
        """Make this process a producer of the site, whatever it was before."""
        from kombu import pools

        from db.engine import make_engine
        from tasks import submit
        from tasks.app import app
        from tasks.settings import settings

        for name in [name for name in os.environ if name.startswith("CONCORD_")]:
            del os.environ[name]
        own = {f"CONCORD_{name}": str(value) for name, value in SETTINGS.items()}
        os.environ.update(own, **self.addresses.environment())
        for made_once in (settings, submit.engine, submit.high_water):
            made_once.cache_clear()
        pools.reset()
        app.conf.update(broker_url=self.addresses.redis_url, result_backend=self.addresses.redis_url)
        self.engine = make_engine(self.addresses.database_url)
        self.callback(self.engine.dispose)
        self.callback(submit.engine().dispose)

    # -- in -------------------------------------------------------------------------------------------------------

    def upload(self, prefix: str, pictures: Iterable[bytes]) -> Sequence[str]:
        return upload(self.addresses, prefix, pictures)

    def submit(
        self, images: Sequence[str], lane: str = "bulk", texts: Sequence[str] = ("a picture of a shoe",)
    ) -> None:
        """A pair for each picture, 64 a message."""
        from tasks.submit import Pair, submit

        pairs = [Pair(image=image, text=texts[place % len(texts)]) for place, image in enumerate(images)]
        for start in range(0, len(pairs), AT_ONCE):
            submit(pairs[start : start + AT_ONCE], lane=lane, source="bench")  # type: ignore[arg-type]

    @contextlib.contextmanager
    def worker(
        self, program: Sequence[str] = ("celery",), name: str = "worker", **settings: object
    ) -> Iterator[psutil.Process]:
        """A worker process that takes messages; stopped in the end, its log in the site's folder until then."""
        own = {f"CONCORD_{key.upper()}": str(value) for key, value in settings.items()}
        command = [sys.executable, "-m", *program, "-A", "tasks", "worker", "-Q", "live,bulk", "-l", "info"]
        log = self.folder / f"{name}.log"
        process = None
        try:
            with log.open("w") as sink, undisturbed():
                process = subprocess.Popen(
                    [*command, "-n", f"{name}@bench"], cwd=ROOT, env={**os.environ, **own}, stdin=subprocess.DEVNULL,
                    stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self.workers[name] = psutil.Process(process.pid)
            await_(
                lambda: " ready." in log.read_text() or process.poll() is not None, START_S, "a worker that is ready"
            )
            if process.poll() is not None:
                raise BenchVoid(f"the worker did not start:\n{log.read_text()[-3_000:]}")
            yield self.workers[name]
        finally:
            if process is not None:
                with undisturbed():
                    end(process)

    # -- out ------------------------------------------------------------------------------------------------------

    def ask(self, statement: str, **parameters: object) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement), parameters))

    def settled(self) -> int:
        """Pairs that have verdicts, of both lanes."""
        return int(self.ask(SETTLED)[0][0])

    def waiting(self, lane: str = "bulk") -> int:
        """Messages that are accepted and have no verdicts yet."""
        return int(self.ask(WAITING, lane=lane)[0][0])

    def await_settled(self, pairs: int) -> None:
        """Until so many pairs have verdicts. Raises BenchVoid where no more come."""
        last, since = self.settled(), time.monotonic()
        while (now := self.settled()) < pairs:
            if now > last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > STALLED_S:
                logs = "\n".join(log.read_text()[-2_000:] for log in self.folder.glob("*.log"))
                raise BenchVoid(f"{now} of {pairs} pairs have verdicts, and no more for {STALLED_S:.0f} s:\n{logs}")
            time.sleep(POLL_S)

    def await_empty(self) -> None:
        """Until all that was submitted has verdicts."""
        await_(lambda: not self.waiting("bulk") + self.waiting("live"), STALLED_S, "an empty outbox")

    def watch(self, seconds: float) -> tuple[Window, int]:
        """Let so much time pass; says when that was, and the least that waited in the bulk lane meanwhile."""
        since, least = time.time(), self.waiting()
        while (left := since + seconds - time.time()) > 0:
            time.sleep(min(1.0, left))
            least = min(least, self.waiting())
        return Window(since, time.time()), least

    def rate(self, window: Window, lane: str = "bulk") -> float:
        """Judged pairs a second, from one commit to the last one in the window: verdicts of all but the first."""
        commits = self.ask(COMMITS, lane=lane, since=window.since, until=window.until)
        if self.ask(REUSED)[0][0]:
            raise BenchVoid("pairs were answered from earlier verdicts, which is not what is measured")
        if len(commits) < 3:
            raise BenchVoid(f"{len(commits)} batches in {window.seconds:.0f} s are too few to measure")
        pairs = sum(count for _, count in commits[1:])
        return float(pairs / (commits[-1][0] - commits[0][0]))

    def stages(self, window: Window, lane: str = "bulk") -> dict[str, float]:
        """What the batches in the window say about their steps, in the mean."""
        (row,) = self.ask(STAGES, lane=lane, since=window.since, until=window.until)
        return {name: round(float(value), 1) for name, value in row._mapping.items() if value is not None}

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of every server and worker, and of this process, the producer."""
        roots = {server.name: process for server in self.stack.servers if (process := server.running())}
        roots |= {name: process for name, process in self.workers.items() if process.is_running()}
        return {**{name: cpu_of(process) for name, process in roots.items()}, "producer": sum(os.times()[:2])}


def spent(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Cores that each kept busy between two looks at `cpu_seconds`."""
    return {name: round((after[name] - before[name]) / seconds, 3) for name in before if name in after}


def cpu_of(root: psutil.Process) -> float:
    """CPU seconds of a process with all it has started, those among them that have ended."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
            if process == root:
                total += times.children_user + times.children_system
    return total


def await_(condition: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchVoid(f"not within {limit_s:.0f} s: {what}")
        time.sleep(POLL_S)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to one that does not heed it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
