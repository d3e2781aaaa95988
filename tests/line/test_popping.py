"""Lanes that hold enough are not popped, and what that changes for the other: a real worker, whose model waits."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis

from tasks.app import app
from tasks.submit import Lane, Pair, submit
from tests.line.broken_worker import broken, waits_for
from tests.line.site import Site, Worker, eventually
from tests.line.test_line import PICTURE

#: A message is a batch; of bulk three are in work, with one slot kept for live, and one waits for its turn.
SETTINGS: dict[str, Any] = {"max_pairs": 2, "max_inflight": 4, "hang_limit_s": 600}
IN_HAND = 4
BACKLOG = 12
#: Longer than any test: a BRPOP that leaves a lane out ends because something came, or because it was ended.
FOR_EVER_S = 3_600


@pytest.fixture
def client(site: Site) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(site.redis_url) as client:
        yield client


def message(text: str, lane: Lane) -> Sequence[UUID]:
    return submit([Pair(image=PICTURE, text=one) for one in (text, "a red shoe")], lane=lane).pair_ids


def fill_bulk(client: redis.Redis, folder: Path) -> tuple[list[UUID], Path]:
    """A backlog of which the worker has what it takes, the first of it in the model, until the file is there."""
    gate = folder / "gate"
    there = folder / "there"
    there.touch()
    ids = [*message(waits_for(gate), "bulk")]
    eventually(lambda: client.hlen("unacked") == 1, "the first bulk message in hand")
    for _ in range(BACKLOG - 1):
        ids += message(waits_for(there), "bulk")
    eventually(lambda: held(client, "bulk") == (BACKLOG - IN_HAND, IN_HAND), "a bulk lane that is full")
    return ids, gate


def held(client: redis.Redis, lane: Lane) -> tuple[int, int]:
    """Messages of a lane that wait in Redis, and of all lanes in hand."""
    return client.llen(lane), client.hlen("unacked")


def in_the_model(worker: Worker) -> list[str]:
    """What the model was asked, in order."""
    return [found[1].rstrip() for line in worker.lines if (found := re.search("in the model: (.*)", line))]


@contextlib.contextmanager
def busy_worker(site: Site, client: redis.Redis, folder: Path) -> Iterator[tuple[Worker, list[UUID], Path]]:
    with site.worker(program=broken(brpop_s=FOR_EVER_S), **SETTINGS) as worker:
        ids, gate = fill_bulk(client, folder)
        try:
            yield worker, ids, gate
        finally:
            gate.touch()


def test_a_live_message_is_taken_past_a_full_bulk_lane_and_is_next_on_the_device(
    site: Site, client: redis.Redis, tmp_path: Path
) -> None:
    with busy_worker(site, client, tmp_path) as (worker, ids, gate):
        live = tmp_path / "live"
        live.touch()
        ids += message(waits_for(live), "live")
        eventually(lambda: held(client, "live") == (0, IN_HAND + 1), "the live message in hand")
        assert held(client, "bulk") == (BACKLOG - IN_HAND, IN_HAND + 1)
        gate.touch()
        assert {row["status"] for row in site.verdicts(ids).values()} == {"judged"}
    assert in_the_model(worker)[:2] == [waits_for(gate), waits_for(live)]


def test_a_lane_is_popped_again_as_soon_as_a_batch_was_taken_from_it(
    site: Site, client: redis.Redis, tmp_path: Path
) -> None:
    """The BRPOP that leaves it out would last longer than this test."""
    with busy_worker(site, client, tmp_path) as (_, ids, gate):
        before = client.info("commandstats")["cmdstat_brpop"]["calls"]
        gate.touch()
        assert {row["status"] for row in site.verdicts(ids).values()} == {"judged"}
        assert client.info("commandstats")["cmdstat_brpop"]["calls"] > before


def test_when_both_lanes_are_full_nothing_is_popped_and_nothing_is_lost(
    site: Site, client: redis.Redis, tmp_path: Path
) -> None:
    with busy_worker(site, client, tmp_path) as (_, ids, gate):
        for _ in range(4):
            ids += message("a blue hat", "live")
        # One live batch waits for the device, one for its slot.
        eventually(lambda: held(client, "live") == (2, IN_HAND + 2), "a live lane that is full")
        gate.touch()
        assert {row["status"] for row in site.verdicts(ids).values()} == {"judged"}
        eventually(lambda: client.hlen("unacked") == 0, "everything acknowledged")


def test_a_worker_that_is_stopped_while_a_lane_is_closed_gives_back_what_it_holds(
    site: Site, client: redis.Redis, tmp_path: Path
) -> None:
    with busy_worker(site, client, tmp_path) as (worker, ids, gate):
        worker.process.terminate()
        worker.says("Warm shutdown")
        gate.touch()
        assert worker.process.wait(60) == 0
        assert client.hlen("unacked") == 0
        assert not any("Traceback" in line for line in worker.lines)
    with site.worker():
        assert {row["status"] for row in site.verdicts(ids).values()} == {"judged"}


def test_a_channel_that_is_closed_has_no_command_to_be_ended() -> None:
    with app.connection_for_read() as connection:
        channel = connection.channel()
        cycle = channel._queue_cycle
        cycle.gate(channel, lambda queue: True)
        cycle.left_out, cycle.client_id = ["bulk"], 1
        channel.close()
        cycle.reopen()


@pytest.mark.parametrize("refused", ["-client|unblock", "-client"])
def test_where_redis_lets_nobody_end_a_command_a_lane_is_popped_a_second_later(
    site: Site, client: redis.Redis, tmp_path: Path, refused: str
) -> None:
    client.acl_setuser(
        "limited", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", refused]
    )
    try:
        url = re.sub("//.*@", "//limited:pw@", site.redis_url)
        with site.worker(program=broken(), broker_url=url, **SETTINGS) as worker:
            ids, gate = fill_bulk(client, tmp_path)
            gate.touch()
            assert {row["status"] for row in site.verdicts(ids).values()} == {"judged"}
            assert not any("Traceback" in line for line in worker.lines)
    finally:
        client.acl_deluser("limited")
