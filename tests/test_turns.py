"""Whose batch is next on the device."""

import threading
from collections.abc import Sequence

import pytest

from worker.turns import Turns

LANES = ("live", "bulk")


def order_of(turns: Turns, waiting: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """In which order those who wait get the device, all of them waiting before the first may go."""
    order: list[tuple[str, float]] = []

    def wait(lane: str, since: float) -> None:
        with turns.turn(lane, since):
            order.append((lane, since))

    threads = [threading.Thread(target=wait, args=one) for one in waiting]
    with turns.turn("live", 0.0):
        for thread in threads:
            thread.start()
        while len(turns.waiting) < len(threads):
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join(timeout=10)
    return order


def test_the_urgent_lane_goes_first_and_the_oldest_of_a_lane() -> None:
    waiting = [("bulk", 1.0), ("live", 3.0), ("live", 2.0)]
    assert order_of(Turns(LANES, bulk_every=9), waiting) == [("live", 2.0), ("live", 3.0), ("bulk", 1.0)]


def test_every_kth_turn_is_the_last_lanes_however_many_urgent_batches_wait() -> None:
    waiting = [("live", float(n)) for n in range(6)] + [("bulk", 10.0), ("bulk", 11.0)]
    lanes = [lane for lane, _ in order_of(Turns(LANES, bulk_every=3), waiting)]
    assert lanes == ["live", "live", "bulk", "live", "live", "bulk", "live", "live"]


@pytest.mark.parametrize("turns_before", range(4))
def test_a_lone_urgent_batch_never_waits_for_the_last_lanes_turn(turns_before: int) -> None:
    turns = Turns(LANES, bulk_every=2)
    for n in range(turns_before):
        with turns.turn("bulk", float(n)):
            pass
    assert order_of(turns, [("bulk", 10.0), ("live", 11.0), ("bulk", 12.0)])[0] == ("live", 11.0)


def test_a_kth_turn_that_the_last_lane_has_no_batch_for_is_the_urgent_lanes() -> None:
    waiting = [("live", float(n)) for n in range(5)]
    assert order_of(Turns(LANES, bulk_every=2), waiting) == waiting


def test_two_batches_of_one_age_are_never_on_the_device_together() -> None:
    turns, together = Turns(LANES), []
    inside = threading.Lock()

    def wait() -> None:
        with turns.turn("bulk", 1.0):
            together.append(not inside.acquire(blocking=False))
            inside.release()

    threads = [threading.Thread(target=wait) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert together == [False] * 16


def test_a_batch_that_fails_on_the_device_leaves_it_to_the_next() -> None:
    turns = Turns(LANES)
    with pytest.raises(ValueError, match="of the model"), turns.turn("bulk", 1.0):
        raise ValueError("of the model")
    with turns.turn("live", 2.0):
        assert turns.is_taken
    assert not turns.is_taken
    assert turns.waiting == []
