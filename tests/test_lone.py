"""What a worker may have died of: innocents cost one more try together, and only what ends workers fails."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4, uuid5

import pytest
from sqlalchemy import Engine, event, text

from db import suspects
from db.engine import make_engine
from db.outbox import OutboxRow
from db.verdicts import Settlement
from tasks.lone import LONE_TRIES, judge_alone
from tasks.settings import Settings
from tasks.settling import Case, MadeBy, Reading, settlement_of
from tasks.storing import write
from tests.conftest import Database
from worker.delivery import Delivery
from worker.errors import DeviceLost, ErrorCode, GivenUp, Hold, PairRejected
from worker.messages import Message, Pair

#: Any final word will do.
JUDGED = PairRejected(ErrorCode.IMAGE_EMPTY)


class Died(BaseException):
    """The process ended here."""


class Workers:
    """Processes that die of certain pairs; what one did not live to do is left undone."""

    def __init__(self, engine: Engine, poison: Sequence[UUID] = (), death: type[BaseException] = Died) -> None:
        self.engine, self.poison, self.death = engine, poison, death
        self.asked: list[int] = []
        self.deaths = 0

    def judge(self, cases: Sequence[Case]) -> None:
        self.asked.append(len(cases))
        if any(case.pair.id in self.poison for case in cases):
            raise self.death
        for case in cases:
            case.answer = JUDGED

    def deliver(self, message: Message, stopping: bool = False) -> list[Case] | None:
        """One delivery of the message; None where the worker dies of it."""
        cases = [Case(message, pair) for pair in message.pairs]
        try:
            judge_alone(cases, self.judge, self.engine, lambda: stopping)
        except self.death:
            self.deaths += 1
            return None
        return cases


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has died deletes no row."""
    end = suspects.end

    def end_alive(*arguments: Any) -> None:
        if not isinstance(sys.exc_info()[1], Died):
            end(*arguments)

    monkeypatch.setattr(suspects, "end", end_alive)


def message(pairs: int) -> Message:
    made = tuple(Pair(id=uuid4(), image="s3://shop/1.jpg", text=f"{n} shoes") for n in range(pairs))
    return Message(uuid4(), datetime.now(UTC), made)


def counted(engine: Engine) -> dict[UUID, int]:
    with engine.connect() as connection:
        return {row.pair_id: row.tries for row in connection.execute(text("select pair_id, tries from suspect"))}


def test_an_innocent_message_is_judged_whole_and_at_once(engine: Engine) -> None:
    workers, one = Workers(engine), message(64)
    cases = workers.deliver(one)
    assert cases is not None
    assert {case.answer for case in cases} == {JUDGED}
    assert workers.asked == [64]
    assert counted(engine) == {}


@pytest.mark.parametrize("death", [Died, DeviceLost])
@pytest.mark.parametrize(
    ("pairs", "poison"), [(1, [0]), (4, [2]), (4, [0, 3]), (4, [0, 1, 2, 3])], ids=["alone", "one", "two", "all"]
)
def test_each_pair_that_ends_workers_fails_after_three_deaths_and_its_neighbours_are_judged(
    engine: Engine, pairs: int, poison: list[int], death: type[BaseException]
) -> None:
    one = message(pairs)
    poisonous = [pair.id for n, pair in enumerate(one.pairs) if n in poison and pair.id]
    workers = Workers(engine, poisonous, death)
    deaths = LONE_TRIES * len(poison) + (pairs > 1)
    cases = None
    while cases is None:
        cases = workers.deliver(one)
        assert workers.deaths <= deaths
    assert workers.deaths == deaths
    for case in cases:
        if case.pair.id in poisonous:
            assert isinstance(case.answer, GivenUp)
            assert case.answer.code == ErrorCode.KILLED_WORKER
        else:
            assert case.answer is JUDGED


def test_what_fails_fails_again_until_that_is_written(engine: Engine) -> None:
    one = message(2)
    poison = one.pairs[0].id
    assert poison is not None
    workers = Workers(engine, [poison])
    while workers.deliver(one) is None:
        pass
    deaths = workers.deaths
    assert workers.deliver(one) is not None, "the worker was killed before it could write"
    assert workers.deaths == deaths


@pytest.mark.parametrize("settled", ["done", "tried again"])
def test_a_message_that_is_settled_is_under_no_suspicion(engine: Engine, settled: str) -> None:
    one, other = message(2), message(2)
    workers = Workers(engine, [pair.id for pair in (*one.pairs, *other.pairs) if pair.id])
    for each in (one, one, other):
        assert workers.deliver(each) is None
    assert len(counted(engine)) == 3
    if settled == "done":
        settlement = Settlement(done=[(one.message_id, 0)], suspected=True)
    else:
        settlement = Settlement(retries=[OutboxRow(one.message_id, "live", {}, attempts=1)], suspected=True)
    write(engine, [settlement, Settlement()], lambda: False)
    assert counted(engine) == {uuid5(other.message_id, "whole"): 1}


@pytest.mark.parametrize(
    ("marks", "suspected"),
    [({}, False), ({"redelivered": True}, True), ({"suspect": True}, True), ({"request": None}, True)],
    ids=["the first time", "delivered before", "a suspect", "none of Celery's"],
)
def test_tries_are_looked_for_only_where_there_can_be_some(marks: dict[str, Any], suspected: bool) -> None:
    delivery = Delivery(SimpleNamespace(headers={}), "live", **{"request": cast(Any, object()), **marks})
    one = message(2)
    reading = Reading(delivery, one, cases=[Case(one, pair, answer=JUDGED) for pair in one.pairs])
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    assert settlement_of(reading, {}, settings, cast(MadeBy, None)).suspected == suspected


def test_a_batch_of_messages_that_come_for_the_first_time_leaves_the_table_of_suspects_alone(engine: Engine) -> None:
    asked: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *what: asked.append(what[2]))
    write(engine, [Settlement(done=[(uuid4(), 0)]), Settlement(retries=[])], lambda: False)
    assert asked
    assert not [statement for statement in asked if "suspect" in statement]


def test_a_worker_that_is_told_to_stop_judges_no_further_pair_alone(engine: Engine) -> None:
    one = message(3)
    poison = one.pairs[2].id
    assert poison is not None
    workers = Workers(engine, [poison])
    assert workers.deliver(one) is None
    with pytest.raises(Hold):
        workers.deliver(one, stopping=True)
    assert workers.asked == [3]
