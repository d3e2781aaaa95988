"""The three servers as one: started together, found again from any process, stopped together."""

import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from infra.local import s3
from infra.local.postgres import OWNER, Postgres
from infra.local.process import Server
from infra.local.redis import Redis
from infra.local.state import State, write_private

#: Where `concord local` keeps its servers, below the current directory.
DEFAULT_FOLDER = Path(".concord")


@dataclass(frozen=True)
class Addresses:
    """Where the servers are and how to log in. The fields hold passwords, so they stay out of repr and logs."""

    owner_database_url: str  # runs the migrations
    database_url: str  # everything else
    redis_url: str
    s3_endpoint_url: str
    s3_access_key_id: str
    s3_secret_access_key: str
    s3_bucket: str

    def __repr__(self) -> str:
        return f"Addresses(s3_endpoint_url={self.s3_endpoint_url!r}, s3_bucket={self.s3_bucket!r}, ...)"

    def environment(self) -> dict[str, str]:
        """The same as settings: the variables that a worker or a producer reads."""
        return {
            "CONCORD_OWNER_DATABASE_URL": self.owner_database_url,
            "CONCORD_DATABASE_URL": self.database_url,
            "CONCORD_BROKER_URL": self.redis_url,
            "CONCORD_S3_ENDPOINT_URL": self.s3_endpoint_url,
            "CONCORD_S3_ACCESS_KEY_ID": self.s3_access_key_id,
            "CONCORD_S3_SECRET_ACCESS_KEY": self.s3_secret_access_key,
            "CONCORD_ALLOWED_BUCKETS": self.s3_bucket,
        }


@dataclass(frozen=True)
class ServerStatus:
    """One server as it is now; `pid` is None when it does not run."""

    name: str
    pid: int | None
    port: int
    log: Path


class Stack:
    """Postgres, Redis and S3 under one folder. As a context manager: up on entry, down at the end."""

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        self.folder = folder.absolute()
        state = State(self.folder / "state.json")
        self.postgres = Postgres(self.folder, state)
        self.redis = Redis(self.folder, state)
        self.s3 = s3.S3(self.folder, state)

    @property
    def servers(self) -> tuple[Server, ...]:
        return (self.postgres, self.redis, self.s3)

    def up(self) -> Addresses:
        """Start what does not run yet and return once all three answer; write the addresses to `env`.

        Raises LocalStackError, with the end of the log, when a server does not start; those that this call started
        are stopped again.
        """
        with self._locked():
            stopped = [server for server in self.servers if server.running() is None]
            try:
                _at_once([server.start for server in self.servers])
            except BaseException:
                _at_once([server.stop for server in stopped])
                raise
            addresses = self.addresses()
            lines = [f"{name}='{value}'\n" for name, value in addresses.environment().items()]
            write_private(self.folder / "env", "".join(lines))
            return addresses

    def down(self) -> None:
        """Stop all three. Their data stays, and the next `up` opens it again."""
        if self.folder.exists():
            with self._locked():
                _at_once([server.stop for server in self.servers])

    def status(self) -> tuple[ServerStatus, ...]:
        """Each server's pid, port and log."""
        processes = [(server, server.running()) for server in self.servers]
        return tuple(
            ServerStatus(server.name, process.pid if process else None, server.port, server.log)
            for server, process in processes
        )

    def addresses(self) -> Addresses:
        """Where the servers are, or will be if their ports are still free when they start."""
        return Addresses(
            owner_database_url=self.postgres.url(OWNER),
            database_url=self.postgres.url(),
            redis_url=self.redis.url(),
            s3_endpoint_url=self.s3.endpoint_url,
            s3_access_key_id=s3.ACCESS_KEY_ID,
            s3_secret_access_key=self.s3.secret_access_key,
            s3_bucket=s3.BUCKET,
        )

    def __enter__(self) -> Addresses:
        return self.up()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time starts or stops: a second `up` waits, and then finds the servers running."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _at_once(calls: list[Callable[[], None]]) -> None:
    """Run the calls in parallel, wait for all of them, and raise the first error."""
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()
