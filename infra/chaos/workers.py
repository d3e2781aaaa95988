"""Worker processes and their supervisor, which starts again what has ended, as systemd or a scheduler would."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
#: How long a worker may take to load the model and connect, on a machine whose other processes do the same.
START_S = 180.0
#: How long it may take to end after SIGTERM: its longest batch, a picture's timeout and a wait for a server in it.
STOP_S = 60.0
#: Between two looks at the processes.
LOOK_EVERY_S = 0.2

READY = " ready."
STOPPING = "worker: Warm shutdown"
#: The worker's line of a batch whose verdicts are committed; the last number counts pairs of messages that had been
#: delivered before.
SETTLED = re.compile(r"a batch is settled: (\d+) pairs of (\d+) messages, .* s(?:, (\d+) delivered before)?$")


@dataclass(frozen=True)
class Batch:
    """A settled batch, as the worker's log tells of it."""

    pairs: int
    messages: int
    delivered_before: int


def settled(log: str) -> list[Batch]:
    """The batches of a worker's log in order."""
    found = (SETTLED.search(line) for line in log.splitlines())
    return [Batch(*(int(number or 0) for number in one.groups())) for one in found if one]


class Worker:
    """One `celery worker` process. `told` is the signal that it was sent by a fault, if it was."""

    command: Sequence[str] = (sys.executable, "-m", "celery", "-A", "tasks", "worker", "-Q", "live,bulk", "-l", "info")

    def __init__(self, slot: int, number: int, environment: Mapping[str, str], folder: Path) -> None:
        self.slot, self.name = slot, f"worker-{slot}-{number}"
        self.log = folder / f"{self.name}.log"
        self.told: signal.Signals | None = None
        self.told_at = self.frozen_at = 0.0
        # The pid file names our folder on the command line, by which a process is known as this worker later.
        names = ["-n", f"{self.name}@%h", "--pidfile", str(folder / f"{self.name}.pid")]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*self.command, *names], cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL,
                stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether it takes messages: it runs, has said so, and was not told to end."""
        if self.told or self.process.poll() is not None:
            return False
        self._ready = self._ready or READY in self.read()
        return self._ready

    def read(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Tell it to end, by SIGKILL or SIGTERM."""
        self.told, self.told_at = number, time.monotonic()
        self.process.send_signal(number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped by SIGSTOP inside."""
        self.frozen_at = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
            self.frozen_at = 0.0

    def stopped_in_a_batch(self) -> bool:
        """Whether a batch was in work when SIGTERM came: it is settled after the line that tells of the signal."""
        _, stopping, after = self.read().partition(STOPPING)
        return bool(stopping) and bool(settled(after))

    def memory_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20


class Supervisor:
    """Keeps `count` workers running from entry to exit; `problems` are ends that nobody asked for."""

    def __init__(self, count: int, environment: Mapping[str, str], folder: Path, kind: type[Worker] = Worker) -> None:
        self.environment, self.folder, self.kind = environment, folder, kind
        self.started: list[Worker] = []
        self.problems: list[str] = []
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.workers = {slot: self.start(slot) for slot in range(count)}
        self.thread = threading.Thread(target=self.watch, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        if self.thread.ident is not None:
            self.thread.join()
        for worker in self.workers.values():
            if worker.process.poll() is None and worker.told is None:
                worker.signal(signal.SIGTERM)
        for worker in self.workers.values():
            try:
                worker.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            self.judge_end(worker)

    def start(self, slot: int) -> Worker:
        number = sum(worker.slot == slot for worker in self.started)
        worker = self.kind(slot, number, self.environment, self.folder)
        self.started.append(worker)
        return worker

    def watch(self) -> None:
        while not self.ending.wait(LOOK_EVERY_S):
            with self.lock:
                for slot, worker in self.workers.items():
                    overdue = worker.told is not None and time.monotonic() > worker.told_at + STOP_S
                    if worker.process.poll() is None and overdue:
                        worker.process.kill()
                        worker.process.wait()
                    if worker.process.poll() is not None:
                        self.judge_end(worker)
                        self.workers[slot] = self.start(slot)

    def judge_end(self, worker: Worker) -> None:
        """A worker ends when it is told to: after SIGTERM in order, with 0."""
        status = worker.process.returncode
        if worker.told is None:
            self.problems.append(f"{worker.name} ended by itself with status {status}: see {worker.log}")
        elif worker.told is signal.SIGTERM and status != 0:
            self.problems.append(f"{worker.name} ended with status {status} after SIGTERM: see {worker.log}")

    def ready(self) -> list[Worker]:
        """Workers that take messages and are not frozen."""
        with self.lock:
            return [worker for worker in self.workers.values() if worker.ready and not worker.frozen_at]

    def all_ready(self) -> bool:
        return len(self.ready()) == len(self.workers)

    def by_pid(self, pid: int) -> Worker | None:
        with self.lock:
            return next((worker for worker in self.workers.values() if worker.process.pid == pid), None)


def end_leftovers(folder: Path) -> None:
    """Kill workers with logs in this folder, whose chaos run was itself killed."""
    for pid_file in folder.glob("worker-*.pid"):
        with contextlib.suppress(psutil.Error, ValueError, OSError):
            process = psutil.Process(int(pid_file.read_text()))
            if str(pid_file) in process.cmdline():
                process.kill()
