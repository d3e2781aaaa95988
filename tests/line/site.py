"""A site of its own for tests of the whole line: a database, a Redis database, a bucket, and worker processes."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis
from sqlalchemy import create_engine, text

from tasks.app import app
from tests.submit_env import environment

ROOT = Path(__file__).parents[2]
#: What must happen, happens within this time or the test fails.
PATIENCE_S = 60.0
POLL_S = 0.05

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Ask until it is true. For what no event tells of: rows of a database, lists in Redis."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(POLL_S)
    return value


@dataclass
class Worker:
    """A `celery worker` process; its log is read as it is written."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()

    def says(self, words: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for a line of the log."""
        with self.changed:
            found = self.changed.wait_for(lambda: any(words in line for line in self.lines), patience_s)
        assert found, f"the worker never said {words!r}:\n{''.join(self.lines[-40:])}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit status of the warm shutdown that follows."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE_S)


@dataclass(frozen=True)
class Site:
    """Where the test's pairs go and come out."""

    settings: dict[str, str]
    database_url: str
    redis_url: str
    bucket: Any

    @contextlib.contextmanager
    def worker(
        self, *arguments: str, program: Sequence[str] = ("celery",), ready: str = "ready.", **settings: object
    ) -> Iterator[Worker]:
        """A worker that is ready; stopped in the end, if it still runs, and its log shown if the test fails.

        `program`: a module that is run in celery's place, and what it wants before celery's own arguments. `ready`:
        what its log says by then.
        """
        own = {**environment(**{**self.settings, **settings}), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", *program, "-A", "tasks", "worker", "-Q", "live,bulk", "-l", "info", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        worker = Worker(process)
        try:
            worker.says(ready)
            yield worker
        finally:
            if process.poll() is None:
                try:
                    worker.stop()
                except subprocess.TimeoutExpired:
                    worker.kill()
            if process.stdout is not None:
                process.stdout.close()
            print("".join(worker.lines[-200:]))

    def workers_until(self, done: Callable[[], object], **options: Any) -> list[int]:
        """Start a worker whenever the one before has ended, as a supervisor does, until it is done.

        Returns the exit statuses of those that ended by themselves, in order.
        """
        statuses: list[int] = []
        while True:
            with self.worker(**options) as worker:
                eventually(lambda: worker.process.poll() is not None or done(), "a worker that ends, or is done")
                if (status := worker.process.poll()) is None:
                    return statuses
                statuses.append(status)
            self.time_passes()

    def time_passes(self) -> None:
        """No worker runs, and `visibility_timeout` and the lease's time are over: what was in hand is queued again."""
        self.query("update relay_lease set expires_at = '-infinity'")
        with redis.Redis.from_url(self.redis_url) as client, app.connection_for_write() as connection:
            qos = connection.default_channel.qos
            client.delete(qos.unacked_mutex_key)
            if held := client.zrange(qos.unacked_index_key, 0, -1):
                client.zadd(qos.unacked_index_key, dict.fromkeys(held, 1))
            qos.restore_visible(num=None)

    def query(self, sql: str, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of the site's database, read as the worker's login."""
        engine = create_engine(self.database_url)
        try:
            with engine.begin() as connection:
                result = connection.execute(text(sql), parameters)
                return [dict(row) for row in result.mappings()] if result.returns_rows else []
        finally:
            engine.dispose()

    def verdicts(self, pair_ids: Any, patience_s: float = PATIENCE_S) -> dict[str, dict[str, Any]]:
        """The verdicts of these pairs by ref (or id), once all are there."""
        wanted = [str(pair_id) for pair_id in pair_ids]

        def rows() -> list[dict[str, Any]]:
            found = self.query("select * from verdict where pair_id = any(cast(:ids as uuid[]))", ids=wanted)
            return found if len(found) >= len(wanted) else []

        found = eventually(rows, f"{len(wanted)} verdicts", patience_s)
        assert len(found) == len(wanted), "a pair has more than one verdict"
        return {row["ref"] or str(row["pair_id"]): row for row in found}

    def outbox_is_empty(self) -> bool:
        return self.query("select count(*) as rows from outbox")[0]["rows"] == 0
