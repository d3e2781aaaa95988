"""A Redis of a test's own, to be stopped, filled and made a replica.

A test module says `own_redis = redis_server`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from infra.local.redis import Redis
from infra.local.state import State

Command = Callable[["redis.Redis"], object]

#: What makes a Redis that is up refuse to write, and what ends it. Nothing listens where a replica's master should be.
REFUSALS: dict[str, tuple[Command, Command]] = {
    "full": (lambda client: client.config_set("maxmemory", 1), lambda client: client.config_set("maxmemory", 0)),
    "a replica": (lambda client: client.replicaof("127.0.0.1", 1), lambda client: client.replicaof("NO", "ONE")),
    "nobody to copy to": (
        lambda client: client.config_set("min-replicas-to-write", 1),
        lambda client: client.config_set("min-replicas-to-write", 0),
    ),
}


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path, State(tmp_path / "state.json"))
    server.start()
    yield server
    server.kill()


class Refusing:
    """Redis refuses to write inside the `with`, in one of three ways."""

    def __init__(self, server: Redis, how: str = "full") -> None:
        self.server, (self.begin, self.end) = server, REFUSALS[how]

    def __enter__(self) -> None:
        self.ask(self.begin)

    def __exit__(self, *_: object) -> None:
        self.ask(self.end)

    def ask(self, command: Command) -> None:
        with redis.Redis.from_url(self.server.url()) as client:
            command(client)
