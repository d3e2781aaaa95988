"""`site`: one for the session, with the test process itself set up as its producer. `worker`: one a module."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.line.site import Site, Worker
from tests.model.golden import GOLDEN, write_checkpoint
from tests.submit_env import configured


@pytest.fixture(scope="session")
def site(stack: Any, _migrated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from infra.local import s3
    from infra.local.redis import DATABASES

    stack.postgres.create_database("line", _migrated)
    stack.s3.create_bucket("line")
    for picture in (GOLDEN / "images").iterdir():
        stack.s3.client.upload_file(str(picture), "line", picture.name)
    redis_url = stack.redis.url(DATABASES - 1)
    settings = {
        "database_url": stack.postgres.url(database="line"),
        "broker_url": redis_url,
        "s3_endpoint_url": stack.s3.endpoint_url,
        "s3_access_key_id": s3.ACCESS_KEY_ID,
        "s3_secret_access_key": stack.s3.secret_access_key,
        "allowed_buckets": "line",
        "model_dir": str(write_checkpoint(tmp_path_factory.mktemp("model") / "mini")),
        "recipe": "fp32",
        "device": "cpu",
        "torch_threads": "1",
        "relay_poll_ms": "100",
        "reuse_days": "0",
    }
    yield Site(settings, settings["database_url"], redis_url, stack.s3.client)
    stack.postgres.drop_database("line")


@pytest.fixture(autouse=True)
def producer(site: Site) -> Iterator[None]:
    """This process submits to the site."""
    with configured(**site.settings):
        yield


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    with site.worker("-E") as worker:
        yield worker
