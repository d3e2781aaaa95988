"""What a dead worker had in hand, and when the site has recovered."""

import json
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest
import redis
from sqlalchemy import Engine

from db import outbox
from db.engine import make_engine
from db.verdicts import Settlement, settle
from infra.chaos.producer import BARE_SOURCE, SOURCE
from infra.chaos.recovery import (
    UNTOUCHED_S,
    Held,
    had_begun,
    held_by_workers,
    left_behind,
    look_at,
    pairs_waiting,
    watch_for,
)
from tasks.app import app
from tasks.submit import Pair, submit
from tests.conftest import Database
from tests.db import rows
from tests.shared import emptied_database
from tests.submit_env import configured

database = emptied_database

#: When the worker died.
DEATH = 1_000.0


def held(tag: str, touched_at: float, source: str = SOURCE) -> Held:
    return Held(tag, touched_at, source, (str(rows.pair_id(1)),))


def test_what_nobody_touches_any_more_was_the_dead_workers() -> None:
    dead, live, done = held("dead", DEATH - 2), held("live", DEATH - 2), held("done", DEATH - 2)
    later = [dead, replace(live, touched_at=DEATH + 3), held("new", DEATH + 5)]
    assert left_behind([dead, live, done], later, DEATH, []) == [dead]


def test_what_an_earlier_fault_left_behind_is_not_the_dead_workers() -> None:
    old, dead = held("old", DEATH - 4), held("dead", DEATH - 1)
    assert left_behind([old, dead], [old, dead], DEATH, []) == [old, dead]
    assert left_behind([old, dead], [old, dead], DEATH, [DEATH - 3]) == [dead]
    ancient = held("ancient", DEATH - UNTOUCHED_S - 1)
    assert left_behind([ancient], [ancient], DEATH, []) == []


def test_after_another_fault_nobody_can_tell() -> None:
    dead = held("dead", DEATH - 1)
    assert left_behind([dead], [dead], DEATH, [DEATH + 2]) == []
    assert left_behind([dead], [dead], DEATH, [DEATH + UNTOUCHED_S + 1]) == [dead]


def test_a_batch_had_begun_where_a_message_that_fills_one_was_in_hand() -> None:
    small, full = held("small", DEATH - 1), replace(held("full", DEATH - 1), pair_ids=("a", "b", "c"))
    assert had_begun([small, full], 3)
    assert not had_begun([small], 3), "it may still have waited for company"
    assert not had_begun([], 3)


def test_what_a_worker_holds_is_read_from_redis_as_celery_keeps_it(database: Database, redis_url: str) -> None:
    with configured(database_url=database.url, broker_url=redis_url):
        accepted = submit([Pair(image="s3://b/k", text="a dog")], lane="live", source=SOURCE)
        with app.connection_for_read() as connection, connection.SimpleQueue("live") as queue:
            message = queue.get(timeout=10)
            with redis.Redis.from_url(redis_url) as client:
                (found,) = held_by_workers(client)
            message.ack()
    assert found.source == SOURCE
    assert found.pair_ids == tuple(map(str, accepted.pair_ids))
    assert found.touched_at <= time.time()


def test_an_entry_of_any_source_is_understood(redis_url: str) -> None:
    body = b64encode(json.dumps([[{"pairs": [{"id": "x"}]}], {}, {}]).encode()).decode()
    with redis.Redis.from_url(redis_url) as client:
        client.hset("unacked", "tag", json.dumps([{"body": body}, "", "live"]))
        assert held_by_workers(client) == [Held("tag", 0.0, "", ("x",))]


def test_pairs_that_wait_in_redis_are_counted_but_for_a_bare_send_tasks(database: Database, redis_url: str) -> None:
    with configured(database_url=database.url, broker_url=redis_url), redis.Redis.from_url(redis_url) as client:
        assert pairs_waiting(client) == 0
        submit([Pair(image="s3://b/k", text="a dog")] * 3, lane="live", source=SOURCE)
        submit([Pair(image="s3://b/k", text="a dog")] * 5, lane="live", source=BARE_SOURCE)
        assert pairs_waiting(client) == 3


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


def test_a_site_has_recovered_when_verdicts_come_again_and_those_in_hand_are_there(engine: Engine) -> None:
    with engine.begin() as connection:
        outbox.add(connection, [rows.message()])
    lost = Held("bare", 0.0, BARE_SOURCE, (str(uuid4()),))
    watched = watch_for("a kill", [held("a", 0.0), lost])
    watched.started_at = datetime.now(UTC)
    look_at([watched], engine)
    assert (watched.flows_again, watched.recovered_s) == (False, None)
    with engine.begin() as connection:
        settle(connection, Settlement([rows.rejected(2, source=SOURCE)]))
    look_at([watched], engine)
    assert (watched.flows_again, watched.recovered_s) == (True, None), "one in hand has no verdict yet"
    with engine.begin() as connection:
        settle(connection, Settlement([rows.rejected(1, source=SOURCE)]))
    look_at([watched], engine)
    assert watched.recovered_s is not None


def test_where_nothing_is_left_to_judge_no_verdict_has_to_come(engine: Engine) -> None:
    watched = watch_for("a kill", [])
    look_at([watched], engine)
    assert watched.recovered_s is not None
