"""Who is compared (infra/bench/comparison.py): this worker, and the programs of infra/bench/others.

Each is started, given pairs, killed and asked for its verdicts in the same way, whatever it is inside.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from celery import Celery

from infra.bench.others.asking import Asking
from infra.bench.others.parts import TABLE
from infra.bench.site import ROOT, START_S, STOP_S, BenchVoid, Site, await_
from infra.endings import undisturbed

Pairs = Sequence[Mapping[str, str]]

#: What each keeps apart from the others: database numbers of Redis. Concord has number 0.
ONE_TASK_DATABASE, BATCHES_DATABASE = 1, 2
#: celery-batches pins an older Celery than Concord's, and LitServe brings its web server.
BATCHES_PACKAGES = ("celery-batches==0.11", "celery[redis]<5.7")
SERVER_PACKAGES = ("litserve>=0.2.11,<1",)


def celery(app: str, *options: str) -> Sequence[str]:
    return "-m", "celery", "-A", app, "worker", "-l", "info", "-n", "compared@bench", *options


class Contender(ABC):
    """One way to have pairs judged. `folder` takes its log, and what it is handed over."""

    name: str
    #: What it does not do, whatever its speed.
    lacks: str
    python = sys.executable
    #: Which Redis database, where it has one.
    database = 0

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def command(self) -> Sequence[str]:
        """What follows its Python."""

    @abstractmethod
    def hand_over(self, pairs: Pairs) -> None:
        """Have them judged; each is {"id": uuid, "image": key, "text": text}."""

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """Once, before it is started. Raises BenchVoid where it cannot be had."""

    def is_ready(self) -> bool:
        return " ready." in self.log.read_text(errors="replace")

    def counted(self) -> tuple[int, int]:
        """Distinct pairs that have verdicts since `clear`, and how many verdicts there are."""
        (row,) = self.site.ask("select count(distinct id), count(*) from compared")
        return int(row[0]), int(row[1])

    def clear(self) -> None:
        with self.site.stack.postgres.connect() as owner:
            owner.execute("truncate compared")

    def failed(self) -> int | None:
        """Pairs of which the caller was told that they failed, once all are over; None where no caller is told."""
        return None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def environment(self) -> Mapping[str, str]:
        to = self.site.addresses
        return {
            **os.environ,
            "DATABASE_URL": to.database_url,
            "BROKER_URL": self.site.stack.redis.url(self.database),
            "S3_ENDPOINT_URL": to.s3_endpoint_url,
            "S3_ACCESS_KEY_ID": to.s3_access_key_id,
            "S3_SECRET_ACCESS_KEY": to.s3_secret_access_key,
            "S3_BUCKET": to.s3_bucket,
            "PYTHONWARNINGS": "ignore",
        }

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Runs and is warm; ended afterwards, where it was not killed."""
        process = None
        try:
            with self.log.open("w") as sink, undisturbed():
                process = self.process = subprocess.Popen(
                    [self.python, *self.command], cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL,
                    stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            await_(lambda: self.is_ready() or self.has_ended(), START_S, f"{self.name} is ready")
            if self.has_ended():
                raise BenchVoid(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-3_000:]}")
            yield
        finally:
            if process is not None:
                with undisturbed():
                    end_all(process)

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL to it and to all that it started."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Concord(Contender):
    name = "concord"
    lacks = "runs Postgres and Redis beside itself; not for who waits milliseconds for an answer"
    command = celery("tasks", "-Q", "live,bulk")
    source = 0

    def hand_over(self, pairs: Pairs) -> None:
        from tasks.submit import Pair, submit

        bucket = self.site.addresses.s3_bucket
        given = [Pair(id=one["id"], image=f"s3://{bucket}/{one['image']}", text=one["text"]) for one in pairs]  # type: ignore[arg-type]
        submit(given, lane="bulk", source=f"round-{self.source}")

    def clear(self) -> None:
        self.source += 1

    def counted(self) -> tuple[int, int]:
        statement = "select count(distinct pair_id), count(*) from verdict where status = 'judged' and source = :source"
        (row,) = self.site.ask(statement, source=f"round-{self.source}")
        return int(row[0]), int(row[1])

    def failed(self) -> int:
        statement = "select count(*) from verdict where status <> 'judged' and source = :source"
        return int(self.site.ask(statement, source=f"round-{self.source}")[0][0])


class OneTask(Contender):
    name = "one task a pair"
    lacks = "no outbox: what Redis loses is gone; no batches; a failed task is a line in the log"
    command = celery("infra.bench.others.one_task", "-P", "threads", "-c", "8")
    database = ONE_TASK_DATABASE

    @cached_property
    def producer(self) -> Celery:
        return Celery("producer", broker=self.site.stack.redis.url(self.database), set_as_current=False)

    def hand_over(self, pairs: Pairs) -> None:
        with self.producer.producer_pool.acquire() as producer:
            for pair in pairs:
                self.producer.send_task("judge", args=[pair], ignore_result=True, producer=producer)


class Batches(OneTask):
    name = "celery-batches"
    lacks = "no outbox: what Redis loses is gone; a call that raises is acknowledged, all its pairs with it"
    command = celery("infra.bench.others.batches", "-P", "threads", "-c", "2")
    database = BATCHES_DATABASE

    def prepare(self) -> None:
        self.python = environment(self.folder / "batches", BATCHES_PACKAGES)


class Server(Contender):
    name = "LitServe"
    lacks = "no queue: what is not answered is in the client's memory alone; a call that raises fails all its pairs"

    def prepare(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.python = environment(self.folder / "server", SERVER_PACKAGES)
        self.client = Asking(self.url, self.site.enter_context(self.site.stack.postgres.connect()))
        self.asked: Future[int] | None = None
        self.asking = self.site.enter_context(ThreadPoolExecutor(1))
        self.site.callback(self.client.closed.set)

    @property
    def command(self) -> Sequence[str]:
        return "-m", "infra.bench.others.server", str(self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def hand_over(self, pairs: Pairs) -> None:
        self.asked = self.asking.submit(self.client.ask_all, pairs)

    def failed(self) -> int | None:
        return self.asked.result() if self.asked else None


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, and SIGKILL to what does not heed it and to what outlives its parent."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(folder: Path, packages: Sequence[str]) -> str:
    """A virtual environment with these packages, and behind them all that this one has; its Python.

    Raises BenchVoid where pip cannot install them.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BenchVoid(f"pip could not install {', '.join(packages)}: {reason}")
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Behind its own packages: the model's are found there and not downloaded once more.
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "behind.pth").write_text("\n".join(here) + "\n")
    return str(python)


def available(site: Site, folder: Path, say: Callable[[str], None]) -> tuple[list[Contender], list[str]]:
    """Concord first, and of the others those that can be had; and a sentence about each that cannot."""
    with site.stack.postgres.connect() as owner:
        owner.execute(TABLE)
        owner.execute("grant select, insert on compared to concord_app")
    found, missing = list[Contender](), list[str]()
    for kind in (Concord, OneTask, Batches, Server):
        one: Contender = kind(site, folder)
        try:
            one.prepare()
            found.append(one)
        except BenchVoid as error:
            missing.append(f"{one.name} is left out. {error}")
            say(missing[-1])
    return found, missing
