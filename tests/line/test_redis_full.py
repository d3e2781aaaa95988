"""A Redis that is up and refuses to write: the worker lives, loses nothing, and judges everything when it is over."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest
import redis

from infra.local.redis import Redis
from tasks.app import app
from tasks.submit import Pair, submit
from tests.line.site import Site, Worker, eventually
from tests.redis_server import Refusing, redis_server
from tests.submit_env import configured
from worker.messages import TASK_NAME

own_redis = redis_server


@pytest.fixture
def full_site(site: Site, own_redis: Redis) -> Iterator[Site]:
    """The site with a Redis of the test's own, and this process as its producer."""
    site.query("delete from outbox")
    own = replace(site, redis_url=own_redis.url(), settings={**site.settings, "broker_url": own_redis.url()})
    with configured(**own.settings):
        yield own


def pair(number: int) -> Pair:
    return Pair(ref=f"refused-{number}", image="s3://line/tiny.png", text=f"{number} dogs")


def bare(number: int, wants_result: bool = False) -> str:
    """A message that no outbox keeps; returns its pair's id."""
    pair_id = str(uuid4())
    message = {
        "v": 1,
        "submitted_at": datetime.now(UTC).isoformat(),
        "pairs": [{**pair(number).model_dump(mode="json"), "id": pair_id}],
    }
    headers = {"ignore_result": not wants_result}
    app.send_task(TASK_NAME, args=[message], queue="live", ignore_result=True, headers=headers)
    return pair_id


def verdicts(site: Site, ids: list[str]) -> int:
    found = site.query("select count(*) as rows from verdict where pair_id = any(cast(:ids as uuid[]))", ids=ids)
    return int(found[0]["rows"])


class Frozen:
    """The worker stands still inside the `with`, so that what follows meets it in one moment."""

    def __init__(self, worker: Worker) -> None:
        self.pid = worker.process.pid

    def __enter__(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGCONT)


def test_a_worker_goes_on_judging_while_redis_is_full(full_site: Site, own_redis: Redis) -> None:
    with full_site.worker() as worker, ExitStack() as full:
        with Frozen(worker):
            kept = [bare(number, wants_result=number == 1) for number in range(3)]
            full.enter_context(Refusing(own_redis))
        # Popped, impossible to note, and without a row in the outbox: judged from memory.
        eventually(lambda: verdicts(full_site, kept) == 3, "verdicts of messages that could not be noted")
        worker.says("could not report the result")
        worker.says("Redis refuses to write")
        accepted = submit([pair(3)], wants_result=True)
        with pytest.raises(redis.exceptions.ResponseError):
            app.control.inspect(timeout=0.1).ping()
        app.control.revoke("0199c0de-0000-7000-8000-000000000001")
        worker.says("Tasks flagged as revoked")
        full.close()
        # The producer could not publish it, so that it is looked for, 20 s later unless it looks older.
        full_site.query("update outbox set published_at = published_at - interval '1 minute'")
        full_site.verdicts([*kept, *accepted.pair_ids])
        eventually(full_site.outbox_is_empty, "an empty outbox")
        assert app.control.inspect(timeout=5).ping()
        assert worker.process.poll() is None
        assert worker.stop() == 0
    with redis.Redis.from_url(own_redis.url()) as client:
        assert client.exists("live", "bulk", "unacked") == 0
        assert client.exists(f"celery-task-meta-{accepted.message_ids[0]}"), "its result could be kept again"


def test_a_redis_that_became_a_replica_is_waited_for(full_site: Site, own_redis: Redis) -> None:
    with full_site.worker() as worker:
        with Refusing(own_redis, "a replica"):
            worker.says("Redis answers and refuses")
            bulk = submit([pair(4)], lane="bulk")
            worker.says("the relay waits")
        full_site.verdicts([*bulk.pair_ids, bare(5)])
        eventually(full_site.outbox_is_empty, "an empty outbox")
        assert worker.process.poll() is None


def test_a_worker_that_starts_while_redis_is_full_waits_for_it(full_site: Site, own_redis: Redis) -> None:
    kept = bare(6)
    with ExitStack() as full:
        full.enter_context(Refusing(own_redis))
        with full_site.worker(ready="Redis answers and refuses") as worker:
            full.close()
            worker.says("ready.")
            full_site.verdicts([kept])


def test_what_a_worker_cannot_give_back_to_a_full_redis_comes_back_by_itself(full_site: Site, own_redis: Redis) -> None:
    with redis.Redis.from_url(own_redis.url()) as client, full_site.worker(max_wait_ms=600_000) as worker:
        kept = bare(7)
        eventually(lambda: client.hlen("unacked"), "a message in hand that waits for company")
        with Refusing(own_redis):
            assert worker.stop() == 0
        assert (client.llen("live"), client.hlen("unacked")) == (0, 1)
    full_site.time_passes()
    with full_site.worker():
        full_site.verdicts([kept])
