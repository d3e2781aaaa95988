"""When messages become a batch: by number, by age, the urgent lane first, and never one lost on the way."""

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from worker.batching import Batch, Deliveries, MicroBatchTask
from worker.delivery import Delivery, published_again
from worker.lanes import Lanes

WAIT_S = 5.0


def lanes(*, max_pairs: int = 4, max_inflight: int = 2, bulk_every: int = 4) -> Lanes[str]:
    return Lanes(
        ("live", "bulk"), max_pairs=max_pairs, max_wait_s=WAIT_S, max_inflight=max_inflight, bulk_every=bulk_every
    )


def fill(buffers: Lanes[str], lane: str, sizes: Sequence[int], now: float = 0.0) -> None:
    for place, pairs in enumerate(sizes):
        buffers.add(lane, f"{lane} {place}", pairs, now)


def test_a_batch_starts_as_soon_as_enough_pairs_are_held() -> None:
    buffers = lanes(max_pairs=4)
    fill(buffers, "live", [1, 1, 1])
    assert buffers.take(0.0) is None
    buffers.add("live", "last", 1, 0.0)
    assert buffers.take(0.0) == ("live", ["live 0", "live 1", "live 2", "last"])
    assert buffers.pairs == {"live": 0, "bulk": 0}


def test_a_batch_starts_when_the_oldest_message_has_waited_however_young_the_others_are() -> None:
    buffers = lanes()
    buffers.add("live", "old", 1, 0.0)
    buffers.add("live", "young", 1, 4.9)
    assert buffers.take(4.9) is None
    assert buffers.wake_at() == WAIT_S
    assert buffers.take(WAIT_S) == ("live", ["old", "young"])
    assert buffers.wake_at() is None


def test_what_is_left_over_keeps_its_own_age() -> None:
    buffers = lanes(max_pairs=2)
    buffers.add("live", "a", 2, 0.0)
    buffers.add("live", "b", 1, 3.0)
    assert buffers.take(3.0) == ("live", ["a"])
    assert buffers.wake_at() == 3.0 + WAIT_S


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([3, 3, 3], [2, 1]),  # the second overshoots: 6 of 4
        ([256, 1], [1, 1]),
        ([4, 4], [1, 1]),
        ([1, 2, 256, 1], [3, 1]),
    ],
)
def test_a_batch_takes_whole_messages_and_only_its_last_may_overshoot(sizes: list[int], batches: list[int]) -> None:
    buffers = lanes(max_pairs=4)
    fill(buffers, "live", sizes)
    taken = []
    while batch := buffers.take(WAIT_S):
        taken.append(len(batch[1]))
        buffers.done(batch[0])
    assert taken == batches


def test_the_first_lane_goes_first_though_the_other_was_there_before() -> None:
    buffers = lanes()
    fill(buffers, "bulk", [4], now=0.0)
    fill(buffers, "live", [4], now=1.0)
    assert [buffers.take(1.0), buffers.take(1.0)] == [("live", ["live 0"]), ("bulk", ["bulk 0"])]


@pytest.mark.parametrize(("max_inflight", "bulk_batches"), [(1, 1), (2, 1), (3, 2), (8, 7)])
def test_one_slot_is_kept_for_the_first_lane(max_inflight: int, bulk_batches: int) -> None:
    buffers = lanes(max_inflight=max_inflight)
    fill(buffers, "bulk", [4] * 10)
    started = 0
    while buffers.take(0.0):
        started += 1
    assert started == bulk_batches
    assert buffers.wake_at() is None, "only the end of a batch can change anything"
    fill(buffers, "live", [4])
    taken = buffers.take(0.0)
    assert (taken is not None and taken[0] == "live") == (max_inflight > 1)


def test_the_slot_that_a_live_batch_has_used_is_kept_again_when_it_is_done() -> None:
    buffers = lanes(max_inflight=2)
    fill(buffers, "live", [4])
    fill(buffers, "bulk", [4, 4])
    assert [taken[0] for taken in (buffers.take(0.0), buffers.take(0.0)) if taken] == ["live", "bulk"]
    buffers.done("live")
    assert buffers.take(0.0) is None
    buffers.done("bulk")
    assert buffers.take(0.0) == ("bulk", ["bulk 1"])


@pytest.mark.parametrize("bulk_every", [2, 4])
def test_a_saturated_first_lane_leaves_every_kth_batch_to_the_last(bulk_every: int) -> None:
    buffers = lanes(bulk_every=bulk_every)
    fill(buffers, "live", [4] * 20)
    fill(buffers, "bulk", [4] * 20)
    order = []
    for _ in range(2 * bulk_every):
        taken = buffers.take(0.0)
        assert taken is not None
        order.append(taken[0])
        buffers.done(taken[0])
    assert order == 2 * (["live"] * (bulk_every - 1) + ["bulk"])


def test_a_batch_that_was_not_taken_does_not_count_towards_the_kth() -> None:
    buffers = lanes(bulk_every=2)
    for _ in range(3):
        assert buffers.take(0.0) is None
    fill(buffers, "live", [4])
    fill(buffers, "bulk", [4])
    assert buffers.take(0.0) == ("live", ["live 0"])


def test_nothing_wakes_a_lane_that_has_no_slot() -> None:
    buffers = lanes(max_inflight=1)
    fill(buffers, "live", [4, 1])
    assert buffers.take(0.0) is not None
    assert buffers.take(100.0) is None
    assert buffers.wake_at() is None
    buffers.done("live")
    assert buffers.wake_at() == WAIT_S


STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(["live", "bulk"]), st.integers(1, 9)),
    st.tuples(st.just("take"), st.floats(0, 3), st.none()),
    st.tuples(st.just("done"), st.integers(0, 8), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=60), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_every_message_is_in_one_batch_in_its_lanes_order_and_no_more_batches_run_than_may(
    steps: list[tuple[str, object, int]], max_pairs: int, max_inflight: int, bulk_every: int
) -> None:
    buffers: Lanes[tuple[int, int]] = Lanes(
        ("live", "bulk"), max_pairs=max_pairs, max_wait_s=1.0, max_inflight=max_inflight, bulk_every=bulk_every
    )
    numbers, now = count(), 0.0
    sent: dict[str, list[tuple[int, int]]] = {"live": [], "bulk": []}
    got: dict[str, list[tuple[int, int]]] = {"live": [], "bulk": []}
    running: list[str] = []

    def start_all() -> None:
        while taken := buffers.take(now):
            lane, batch = taken
            assert batch
            assert sum(pairs for _, pairs in batch[:-1]) < max_pairs
            got[lane] += batch
            running.append(lane)
            assert len(running) <= max_inflight
            assert running.count("bulk") <= max(1, max_inflight - 1)
        wake_at = buffers.wake_at()
        assert wake_at is None or wake_at > now, "what is due and has a slot was taken"

    for kind, value, pairs in steps:
        if kind == "add":
            item = (next(numbers), pairs)
            sent[str(value)].append(item)
            buffers.add(str(value), item, pairs, now)
        elif kind == "take":
            now += float(str(value))
        elif running:
            buffers.done(running.pop(int(str(value)) % len(running)))
        start_all()
        assert sum(buffers.pairs.values()) == sum(p for items in sent.values() for _, p in items) - sum(
            p for items in got.values() for _, p in items
        )
    now += 1.0
    start_all()
    while running:
        buffers.done(running.pop())
        start_all()
    assert got == sent


def test_a_message_that_is_taken_alone_waits_for_those_in_work_and_nothing_runs_beside_it() -> None:
    buffers = lanes(max_pairs=4, max_inflight=3)
    fill(buffers, "live", [4])
    assert buffers.take(0.0) == ("live", ["live 0"])
    buffers.add("bulk", "suspect", 4, 0.0, alone=True)
    buffers.add("bulk", "another", 4, 0.0, alone=True)
    fill(buffers, "live", [4])
    assert buffers.take(0.0) is None
    assert buffers.wake_at() is None, "only the end of what runs can change anything"
    buffers.done("live")
    for suspect in ("suspect", "another"):
        assert buffers.take(0.0) == ("bulk", [suspect])
        assert buffers.is_alone
        assert buffers.take(100.0) is None
        buffers.done("bulk")
    assert buffers.take(0.0) == ("live", ["live 0"])
    assert not buffers.is_alone


def test_a_lane_is_popped_while_less_than_a_batch_waits_in_it_whatever_the_other_holds() -> None:
    buffers = lanes(max_pairs=4, max_inflight=2)
    assert buffers.is_open("bulk")
    fill(buffers, "bulk", [3])
    assert buffers.is_open("bulk")
    fill(buffers, "bulk", [9])
    assert not buffers.is_open("bulk")
    assert buffers.is_open("live")
    assert buffers.take(0.0) == ("bulk", ["bulk 0", "bulk 0"])
    assert buffers.is_open("bulk")


def test_no_lane_is_popped_while_a_message_waits_to_be_judged_alone() -> None:
    buffers = lanes(max_pairs=4)
    buffers.add("bulk", "suspect", 1, 0.0, alone=True)
    assert not buffers.is_open("live")
    assert buffers.take(0.0) == ("bulk", ["suspect"])
    assert buffers.is_open("live")


def test_what_waits_is_known_and_can_be_forgotten() -> None:
    buffers = lanes()
    buffers.add("bulk", "suspect", 4, 0.0, alone=True)
    fill(buffers, "live", [1])
    assert sorted(buffers.waiting()) == ["live 0", "suspect"]
    buffers.clear()
    assert buffers.waiting() == []
    assert buffers.take(100.0) is None


@pytest.mark.parametrize(
    ("headers", "payload", "again"),
    [
        ({"publishes": 1}, {"attempts": 0}, 0),
        ({"publishes": 2}, {"attempts": 0}, 1),
        ({"publishes": 3}, {"attempts": 0}, 2),
        ({"publishes": 3}, {"attempts": 2}, 0),
        ({"publishes": 0}, {"attempts": 0}, 0),
        ({}, {"attempts": 0}, 0),
        ({"publishes": "3"}, {"attempts": 0}, 0),
        ({"publishes": True}, {"attempts": 0}, 0),
        ({"publishes": 3}, ["attempts"], 0),
        ({"publishes": 3}, {"attempts": None}, 0),
    ],
)
def test_a_retry_is_not_taken_for_a_message_that_was_lost(headers: Any, payload: Any, again: int) -> None:
    assert published_again(headers, payload) == again


def test_one_decoder_that_hangs_is_seen_though_others_begin_and_end_beside_it() -> None:
    batch = Batch("live", [])
    assert batch.hang_clock.since is None
    with batch.watched():
        hung = batch.hang_clock.since
        with batch.watched():
            assert batch.hang_clock.since == hung
        assert batch.hang_clock.since == hung
    assert batch.hang_clock.since is None


def test_a_message_that_redis_does_not_take_back_keeps_no_other_from_being_given_back() -> None:
    asked: list[str] = []

    def message(name: str, error: Exception | None) -> Any:
        def reject_log_error(_log: Any, _errors: Any, requeue: bool) -> None:
            asked.append(name)
            if error:
                raise error

        return SimpleNamespace(reject_log_error=reject_log_error)

    consumer = SimpleNamespace(
        app=SimpleNamespace(amqp=SimpleNamespace(queues=SimpleNamespace(consume_from={"live": 1, "bulk": 1}))),
        timer=SimpleNamespace(call_repeatedly=lambda *_: None),
        connection_errors=(),
    )
    deliveries = Deliveries(MicroBatchTask(), consumer, {})
    for name, error in (("first", ResponseError("OOM command not allowed")), ("second", None)):
        deliveries.lanes.add("live", Delivery(message(name, error), "live"), 1, 0.0)
    deliveries.give_back()
    assert asked == ["first", "second"]
    assert deliveries.lanes.waiting() == []


def test_a_batch_that_hangs_is_watched_across_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker import batching, endings

    timers: list[SimpleNamespace] = []

    def call(_seconds: float, function: Any) -> SimpleNamespace:
        entry = SimpleNamespace(function=function, cancelled=False)
        entry.cancel = lambda: setattr(entry, "cancelled", True)
        timers.append(entry)
        return entry

    pool = type("TaskPool", (), {"__module__": "celery.concurrency.thread"})()
    queues = SimpleNamespace(consume_from={"live": 1, "bulk": 1})
    timer = SimpleNamespace(call_repeatedly=call, call_after=call)
    consumer = SimpleNamespace(
        pool=pool, timer=timer, app=SimpleNamespace(amqp=SimpleNamespace(queues=queues)), task_consumer=None
    )
    exits: list[int] = []
    monkeypatch.setattr(endings.os, "_exit", exits.append)
    monkeypatch.setattr(endings.faulthandler, "dump_traceback", lambda **_: None)

    class Hanging(batching.MicroBatchTask):
        name = "hanging"

    task = Hanging()
    task.Strategy(task, None, consumer)
    assert task._deliveries is not None
    batch = batching.Batch("live", [])
    batch.hang_clock.started["a decoder"] = 0.0
    task._deliveries.batches[id(batch)] = batch
    task.Strategy(task, None, consumer)
    task.watch()
    assert exits == [endings.EXIT_HUNG]
    assert task._deliveries.lanes.inflight == {"live": 1, "bulk": 0}
    task.finish(batch, [])
    assert task._deliveries.lanes.inflight == {"live": 0, "bulk": 0}
