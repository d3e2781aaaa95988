"""A seed is a schedule."""

import pytest

from infra.chaos.schedule import HOWS, PARTS, QUIET_SHARE, Fault, Part, plan

#: What `make chaos` orders: 20,000 pairs, at 40 for each second of the schedule.
LONG_S = 500.0


def times(faults: tuple[Fault, ...], part: Part, *hows: str) -> int:
    return sum(fault.part == part and fault.how in (hows or HOWS[part]) for fault in faults)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_is_the_same_schedule_and_another_is_another(seed: int) -> None:
    assert plan(seed, PARTS, LONG_S) == plan(seed, PARTS, LONG_S)
    assert plan(seed, PARTS, LONG_S) != plan(seed + 1, PARTS, LONG_S)


@pytest.mark.parametrize("part", PARTS)
def test_a_parts_faults_are_the_same_whatever_else_breaks(part: Part) -> None:
    alone = plan(7, [part], LONG_S)
    assert alone
    assert alone == tuple(fault for fault in plan(7, PARTS, LONG_S) if fault.part == part)


@pytest.mark.parametrize("seed", range(20))
def test_the_long_run_breaks_what_it_promises_to(seed: int) -> None:
    faults = plan(seed, PARTS, LONG_S)
    assert times(faults, "worker") >= 10
    assert times(faults, "worker", "kill") >= 5
    assert times(faults, "worker", "term") >= 3
    assert times(faults, "redis", "kill", "stop", "wipe") == 3
    assert times(faults, "redis", "wipe") == 1
    assert times(faults, "postgres", "kill", "stop") == 2
    assert sum(fault.lasts_s for fault in faults if fault.part == "s3") >= 60
    assert times(faults, "relay") == 2
    assert all(fault.lasts_s > 20 for fault in faults if fault.part == "relay")


@pytest.mark.parametrize("seed", range(20))
def test_the_shortest_run_breaks_every_part_and_takes_redis_its_data(seed: int) -> None:
    faults = plan(seed, PARTS, 60.0)
    assert {fault.part for fault in faults} == set(PARTS)
    assert times(faults, "redis", "wipe") == 1
    assert {fault.how for fault in faults if fault.part == "worker"} == {"kill", "term"}


@pytest.mark.parametrize("duration_s", [5.0, 60.0, 700.0])
def test_faults_come_in_the_order_of_time_and_while_there_is_work(duration_s: float) -> None:
    faults = plan(3, PARTS, duration_s)
    moments = [fault.at_s for fault in faults]
    assert moments == sorted(moments)
    assert duration_s * QUIET_SHARE - 0.1 <= moments[0]
    assert moments[-1] <= duration_s * (1 - QUIET_SHARE) + 0.1


def test_a_fault_says_in_a_line_what_it_is() -> None:
    assert str(Fault(5.0, "s3", "half", 12.0, 0.4)) == "    5.0 s  s3       half for 12.0 s, 40% of the answers"
    assert str(Fault(5.0, "worker", "kill")) == "    5.0 s  worker   kill"
