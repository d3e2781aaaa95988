"""The producer of a chaos run: the same pairs for the same seed, and a ledger without a line too many or too few."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from db.engine import make_engine
from infra.chaos import producer as module
from infra.chaos.ledger import WAYS, Ledger
from infra.chaos.producer import HEAD_START, Call, Producer, calls, due_s, succeeds
from tests.conftest import Database
from tests.shared import emptied_database
from tests.submit_env import configured

database = emptied_database


@pytest.fixture
def engine(database: Database, redis_url: str) -> Iterator[Engine]:
    engine = make_engine(database.url)
    with configured(database_url=database.url, broker_url=redis_url):
        yield engine
    engine.dispose()


@pytest.fixture
def producer(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Producer:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    return Producer(Ledger(tmp_path / "ledger.txt"), tmp_path)


def messages(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("select count(*) from outbox")).scalar_one())


def breaking_off() -> OperationalError:
    return OperationalError("commit", {}, Exception("server closed the connection"), connection_invalidated=True)


def test_the_same_seed_is_the_same_pairs_by_the_same_ways() -> None:
    assert list(calls(500, 1, "b")) == list(calls(500, 1, "b"))
    assert list(calls(500, 1, "b")) != list(calls(500, 2, "b"))


@pytest.mark.parametrize("pairs", [1, 240, 1_001])
def test_all_pairs_are_handed_over_each_under_an_id_of_its_own(pairs: int) -> None:
    ids = [pair["id"] for call in calls(pairs, 1, "b") for pair in call.pairs]
    assert len(ids) == len(set(ids)) == pairs


def test_every_way_has_its_turn_and_without_the_outbox_there_is_one() -> None:
    ways = Counter(call.way for call in calls(2_000, 1, "b"))
    assert set(ways) == set(WAYS)
    assert max(ways.values()) - min(ways.values()) <= 1
    assert {call.way for call in calls(2_000, 1, "b", outbox=False)} == {"send_task"}


def test_a_backlog_comes_first_and_the_rest_evenly() -> None:
    assert due_s(0, 1_000, 60.0) == due_s(int(1_000 * HEAD_START), 1_000, 60.0) == 0.0
    assert due_s(1_000, 1_000, 60.0) == 60.0


@pytest.mark.parametrize("call", [next(c for c in calls(240, 1, "b") if c.way == way) for way in WAYS], ids=WAYS)
def test_a_line_is_written_for_every_pair_that_was_accepted(producer: Producer, engine: Engine, call: Call) -> None:
    producer.hand_over(call)
    entries = producer.ledger.read()
    assert [entry.pair_id for entry in entries] == [pair["id"] for pair in call.pairs]
    assert {entry.way for entry in entries} == {call.way}
    assert all(bool(entry.run_id) == (call.way == "file") for entry in entries)
    assert messages(engine) == {"send_task": 0, "file": 2}.get(call.way, 1)


def test_a_call_that_broke_off_after_its_commit_is_not_made_again(producer: Producer, engine: Engine) -> None:
    call = next(call for call in calls(240, 1, "b") if call.way == "sql")

    def accepted_and_broken_off() -> None:
        producer.enqueue(call)
        raise breaking_off()

    producer.until_accepted(call, accepted_and_broken_off)
    assert messages(engine) == 1


def test_a_call_that_broke_off_before_its_commit_is_made_again(producer: Producer, engine: Engine) -> None:
    call = next(call for call in calls(240, 1, "b") if call.way == "sql")
    tries = iter([breaking_off(), breaking_off()])

    def broken_off_twice() -> None:
        for error in tries:
            raise error
        producer.enqueue(call)

    producer.until_accepted(call, broken_off_twice)
    assert messages(engine) == 1


def test_a_file_that_broke_off_is_gone_on_with(
    producer: Producer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = next(call for call in calls(240, 1, "b") if call.way == "file")
    going_on, tries = producer.go_on_with, iter([breaking_off()])

    def breaking_off_once(*arguments: object) -> None:
        going_on(*arguments)  # type: ignore[arg-type]
        for error in tries:
            raise error

    monkeypatch.setattr(producer, "go_on_with", breaking_off_once)
    producer.hand_over(call)
    assert [entry.pair_id for entry in producer.ledger.read()] == [pair["id"] for pair in call.pairs]
    assert messages(engine) == 2


def test_what_the_database_can_never_take_is_not_tried_again(engine: Engine) -> None:
    with pytest.raises(Exception, match="no_such_table"), engine.connect() as connection:
        succeeds(lambda: connection.execute(text("select * from no_such_table")))
