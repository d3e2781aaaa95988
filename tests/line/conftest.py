"""`site`: one for the session, with the test process itself set up as its producer. `worker`: one a module."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import kombu.pools
import pytest

from tests.line.site import Site, Worker
from tests.model.golden import GOLDEN, write_checkpoint


@pytest.fixture(scope="session")
def site(stack: Any, _migrated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from infra.local import s3
    from infra.local.redis import DATABASES

    stack.postgres.create_database("line", _migrated)
    stack.s3.create_bucket("line")
    for picture in (GOLDEN / "images").iterdir():
        stack.s3.client.upload_file(str(picture), "line", picture.name)
    redis_url = stack.redis.url(DATABASES - 1)
    environment = {
        "CONCORD_ENV_FILE": os.devnull,
        "CONCORD_DATABASE_URL": stack.postgres.url(database="line"),
        "CONCORD_BROKER_URL": redis_url,
        "CONCORD_S3_ENDPOINT_URL": stack.s3.endpoint_url,
        "CONCORD_S3_ACCESS_KEY_ID": s3.ACCESS_KEY_ID,
        "CONCORD_S3_SECRET_ACCESS_KEY": stack.s3.secret_access_key,
        "CONCORD_ALLOWED_BUCKETS": "line",
        "CONCORD_MODEL_DIR": str(write_checkpoint(tmp_path_factory.mktemp("model") / "mini")),
        "CONCORD_DEVICE": "cpu",
        "CONCORD_TORCH_THREADS": "1",
        "CONCORD_RELAY_POLL_MS": "100",
    }
    yield Site(environment, environment["CONCORD_DATABASE_URL"], redis_url, stack.s3.client)
    stack.postgres.drop_database("line")


@pytest.fixture(autouse=True)
def producer(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process submits to the site."""
    for name, value in site.environment.items():
        monkeypatch.setenv(name, value)
    read_settings_anew()
    yield
    monkeypatch.undo()
    read_settings_anew()


def read_settings_anew() -> None:
    """Drop what was made from another environment's settings."""
    from tasks import submit
    from tasks.app import app
    from tasks.settings import settings

    if submit.engine.cache_info().currsize:
        submit.engine().dispose()
    settings.cache_clear()
    submit.engine.cache_clear()
    sys.modules.pop("celeryconfig", None)
    app.config_from_object("celeryconfig", force=True)
    kombu.pools.reset()
    app._pool = app.amqp._producer_pool = app._backend_cache = None
    app._local.__dict__.clear()


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    with site.worker("-E") as worker:
        yield worker
