"""The site that a chaos run breaks: servers of its own, the proxy before S3, and workers under a supervisor."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from redis.exceptions import RedisError
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from db.migrations import upgrade
from infra.chaos.books import Footprint, entries_in, footprint
from infra.chaos.producer import DEMO_MODEL, HELDOUT
from infra.chaos.recovery import client_of
from infra.chaos.s3_proxy import S3Proxy
from infra.chaos.workers import ROOT, START_S, Supervisor, end_leftovers
from infra.local import Stack
from worker.errors import ConcordError

#: Small batches, small windows, short delays: there are many batches to die in, and a recovery is not measured as the
#: length of a queue or as the wait for an attempt. Every pair is judged, whatever was judged before.
MAX_PAIRS, MAX_INFLIGHT = 16, 3
SETTINGS = {
    "MODEL_DIR": str(DEMO_MODEL / "awq-int4"),
    "DEVICE": "cpu",
    "TORCH_THREADS": 1,
    "MAX_PAIRS": MAX_PAIRS,
    "MAX_INFLIGHT": MAX_INFLIGHT,
    "LIVE_WINDOW": 16,
    "BULK_WINDOW": 16,
    "RELAY_POLL_MS": 200,
    "RETRY_DELAY_S": 2,
    "REUSE_DAYS": 0,
}
#: Pairs that each worker judges before the first fault, so that memory is compared with one that has worked.
WARM_UP_PAIRS = 192
#: A warm-up that takes longer than this has come to nothing.
WARM_UP_S = 300.0
#: How long the site may take in the end until it holds no more than before.
BACK_S = 15.0
POLL_S = 0.2

#: Where logs are, below a run's folder.
LOGS = "logs"

BACKLOG = "select count(*) from outbox"
#: The pid stands second in the name of the lease's holder.
HOLDER = "select split_part(holder, '/', 2)::int from relay_lease where expires_at > now()"


class ChaosVoid(ConcordError):
    """The run could not be made, so that it says nothing."""


class Site(contextlib.ExitStack):
    """Everything under one folder, up from entry to exit. The folder is emptied first and left with its logs."""

    def __init__(self, folder: Path, workers: int, seed: int) -> None:
        super().__init__()
        self.folder, self.count, self.seed = folder.absolute(), workers, seed
        self.logs = self.folder / LOGS

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.bring_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        return bool(super().__exit__(kind, error, at))

    def bring_up(self) -> None:
        self.enter_context(alone(self.folder))
        self.stack = Stack(self.folder)
        addresses = self.enter_context(self.stack)
        upgrade(addresses.owner_database_url, addresses.database_url)
        self.bucket = addresses.s3_bucket
        for picture in sorted((DEMO_MODEL / "pictures").iterdir()):
            self.stack.s3.client.upload_file(str(picture), self.bucket, f"pictures/{picture.name}")
        self.engine = create_engine(
            addresses.database_url,
            pool_pre_ping=True,
            connect_args={"application_name": "concord-chaos", "connect_timeout": 5},
        )
        self.callback(self.engine.dispose)
        self.redis = client_of(addresses.redis_url)
        self.callback(self.redis.close)
        self.proxy = self.enter_context(S3Proxy(addresses.s3_endpoint_url, self.seed))
        self.environment = environment(addresses.environment() | {"CONCORD_S3_ENDPOINT_URL": self.proxy.endpoint_url})
        self.supervisor = self.enter_context(Supervisor(self.count, self.environment, self.logs))
        if not happens(self.supervisor.all_ready, START_S):
            raise ChaosVoid(f"the workers were not ready within {START_S:.0f} s: see their logs in {self.logs}")

    @contextlib.contextmanager
    def producer(self, ledger: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """The producer's process inside; killed at the end where it still runs."""
        command = [sys.executable, "-m", "infra.chaos.producer", str(ledger), "--bucket", self.bucket, *arguments]
        with (self.logs / "producer.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def warm_up(self) -> Footprint:
        """Pairs through every part; what the site holds after them, while nothing goes on."""
        samples = [json.loads(line) for line in HELDOUT.read_text().splitlines()][: WARM_UP_PAIRS * self.count]
        pairs = [{"image": f"s3://{self.bucket}/{pair['image']}", "text": pair["text"]} for pair in samples]
        message = json.dumps({"source": "warm-up", "pairs": pairs})
        with self.engine.begin() as connection:
            connection.execute(text("select enqueue(cast(:message as jsonb))"), {"message": message})
        if not happens(self.is_quiet, WARM_UP_S):
            raise ChaosVoid(f"the warm-up pairs had no verdicts within {WARM_UP_S:.0f} s: see the logs in {self.logs}")
        return self.footprint()

    def footprint(self) -> Footprint:
        workers = [worker.memory_mb() for worker in self.supervisor.ready()]
        return footprint(self.engine, self.redis, max(workers, default=0.0))

    def back_at(self, before: Footprint, limits: Footprint) -> Footprint:
        """What the site holds once it is no more than before and `limits`, or after a while: a transaction may be open
        at any moment, but not for long.
        """
        deadline = time.monotonic() + BACK_S
        while (now := self.footprint()).problems(before, limits) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return now

    def is_quiet(self) -> bool:
        """Whether nothing is on its way: neither in the outbox nor in Redis. False while one of them is away."""
        try:
            with self.engine.connect() as connection:
                return not connection.execute(text(BACKLOG)).scalar_one() and not any(entries_in(self.redis).values())
        except (SQLAlchemyError, RedisError):
            return False

    def lease_holder(self) -> int | None:
        """The pid of the worker that publishes the outbox; None while there is none or the database is away."""
        try:
            with self.engine.connect() as connection:
                pid: int | None = connection.execute(text(HOLDER)).scalar_one_or_none()
                return pid
        except SQLAlchemyError:
            return None


def environment(addresses: dict[str, str]) -> dict[str, str]:
    """This process's environment with the site's settings in place of any others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CONCORD_")}
    own = {f"CONCORD_{name}": str(value) for name, value in SETTINGS.items()}
    return {**inherited, **addresses, **own, "CONCORD_ENV_FILE": "", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder, empty, and nobody else's. Raises ChaosVoid where another run has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ChaosVoid(
                f"another chaos run is at work in {folder}: wait for it, or run in another folder"
            ) from None
        if folder.exists():
            stop_leftovers(folder)
            shutil.rmtree(folder)
        (folder / LOGS).mkdir(parents=True)
        yield
    finally:
        os.close(lock)


def stop_leftovers(folder: Path) -> None:
    """End what a run in this folder left behind that was itself killed."""
    end_leftovers(folder / LOGS)
    Stack(folder).down()


def happens(condition: Callable[[], bool], limit_s: float) -> bool:
    """Ask until it is so; False where it is not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
