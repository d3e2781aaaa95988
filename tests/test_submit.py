"""Producers: what is accepted stays accepted, whatever becomes of Redis, and nothing of it needs torch."""

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import RFC_4122, UUID

import pytest
import redis
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from db import outbox
from db.outbox import OutboxRow
from tasks import high_water as module
from tasks.app import app
from tasks.high_water import MAX_PAUSE_S, HighWater
from tasks.submit import Pair, engine, high_water, queue_length, submit, uuid7
from tests.conftest import Database
from tests.shared import emptied_database
from tests.submit_env import configured, environment
from worker.errors import PairRejected
from worker.messages import decode

database = emptied_database


@pytest.fixture
def producer(database: Database, redis_url: str) -> Iterator[None]:
    with configured(database_url=database.url, broker_url=redis_url, live_window=2):
        yield


@pytest.fixture
def nowhere() -> Iterator[str]:
    """The URL of a Redis that does not listen."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{bound.getsockname()[1]}/0"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu would try for six seconds, in which a producer stands still."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"a producer would wait for {seconds} s")

    monkeypatch.setattr("kombu.utils.functional.sleep", sleep)


def pairs(number: int = 1) -> list[Pair]:
    return [Pair(ref=f"sku-{n}", image="s3://shop/1.jpg", text="a red shoe") for n in range(number)]


def rows() -> list[dict[str, Any]]:
    with engine().connect() as connection:
        found = connection.execute(text("select * from outbox order by message_id")).mappings()
        return [dict(row) for row in found]


def queued(url: str, lane: str = "live") -> list[dict[str, Any]]:
    with redis.Redis.from_url(url) as client:
        entries: Any = client.lrange(lane, 0, -1)
        return [json.loads(entry) for entry in entries]


def test_live_pairs_are_published_at_once(producer: None, redis_url: str) -> None:
    done = submit(pairs(2))
    (row,) = rows()
    assert (row["message_id"], row["lane"], row["publishes"]) == (done.message_ids[0], "live", 1)
    assert row["published_at"] is not None
    (entry,) = queued(redis_url)
    assert (entry["headers"]["id"], entry["headers"]["task"]) == (str(done.message_ids[0]), "concord.moderate")
    assert entry["headers"]["ignore_result"] is True


def test_what_is_accepted_is_what_a_worker_reads(producer: None) -> None:
    own_id = uuid7()
    given = [Pair(image="s3://shop/1.jpg", text="a red shoe", id=own_id, policy="prohibited"), *pairs(1)]
    done = submit(given, source="emea", fresh=True)
    (row,) = rows()
    now = datetime.now(UTC)
    message = decode(json.loads(row["body"]), now=now, oldest=now - timedelta(days=1))
    assert (message.message_id, message.source, message.fresh) == (done.message_ids[0], "emea", True)
    assert message.submitted_at == done.submitted_at
    assert [pair.id for pair in message.pairs] == done.pair_ids
    assert done.pair_ids[0] == own_id
    assert [pair.model_copy(update={"id": None}) for pair in message.pairs] == [
        pair.model_copy(update={"id": None}) for pair in given
    ]


def test_bulk_pairs_only_wait_in_the_outbox(producer: None, redis_url: str) -> None:
    submit(pairs(), lane="bulk")
    assert [(row["lane"], row["published_at"], row["publishes"]) for row in rows()] == [("bulk", None, 0)]
    assert queued(redis_url, "bulk") == queued(redis_url, "live") == []


def test_many_pairs_are_cut_into_messages(producer: None) -> None:
    done = submit(pairs(130), lane="bulk")
    sizes = sorted(len(json.loads(row["body"])["pairs"]) for row in rows())
    assert (sizes, len(set(done.pair_ids)), len(done.message_ids)) == ([2, 64, 64], 130, 3)


def test_no_pairs_are_no_message(producer: None) -> None:
    assert list(submit(iter(())).message_ids) == []
    assert rows() == []


def test_beyond_the_live_window_the_outbox_holds_the_backlog(producer: None, redis_url: str) -> None:
    for _ in range(3):
        submit(pairs())
    assert [row["published_at"] is None for row in rows()] == [False, False, True]
    assert (len(queued(redis_url)), queue_length("live")) == (2, 2)


@pytest.mark.parametrize("lane", ["live", "bulk"])
def test_in_the_callers_transaction_nothing_is_published_before_its_commit(
    producer: None, redis_url: str, lane: Literal["live", "bulk"]
) -> None:
    with engine().connect() as connection:
        submit(pairs(), lane=lane, connection=connection)
        assert rows() == []
        connection.rollback()
        assert rows() == []
        submit(pairs(), lane=lane, connection=connection)
        connection.commit()
    assert [row["published_at"] for row in rows()] == [None]
    assert queued(redis_url, lane) == []


def test_an_expiry_and_a_wish_for_the_result_travel_in_the_row_and_in_the_message(
    producer: None, redis_url: str
) -> None:
    expires_at = datetime.now(UTC) + timedelta(minutes=5)
    submit(pairs(), expires_at=expires_at, wants_result=True)
    (row,), (entry,) = rows(), queued(redis_url)
    assert (row["expires_at"], row["wants_result"]) == (expires_at, True)
    assert datetime.fromisoformat(entry["headers"]["expires"]) == expires_at
    assert entry["headers"]["ignore_result"] is False


@pytest.mark.usefixtures("no_waiting")
def test_while_redis_is_away_pairs_are_accepted_and_left_to_the_relay(database: Database, nowhere: str) -> None:
    with configured(database_url=database.url, broker_url=nowhere):
        done = submit(pairs())
        assert [(row["message_id"], row["published_at"]) for row in rows()] == [(done.message_ids[0], None)]


@pytest.mark.usefixtures("no_waiting")
def test_a_redis_that_goes_away_between_the_look_and_the_publishing_loses_nothing(
    database: Database, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.submit.has_room", lambda messages: True)
    with configured(database_url=database.url, broker_url=nowhere):
        submit(pairs())
        (row,) = rows()
    # It is marked as published, so that the relay looks for it and finds it missing.
    assert (row["published_at"] is None, row["publishes"]) == (False, 1)


@pytest.mark.usefixtures("no_waiting")
def test_a_redis_that_refuses_the_password_is_away_too(database: Database, redis_url: str) -> None:
    with configured(database_url=database.url, broker_url=redis_url.replace("redis://:", "redis://:not-")):
        submit(pairs())
        assert [row["published_at"] for row in rows()] == [None]


def test_a_redis_that_never_answers_does_not_hold_a_producer_up(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = app.conf.broker_transport_options
    assert 0 < options["socket_timeout"] <= 5
    with closing(socket.create_server(("127.0.0.1", 0))) as frozen:
        url = f"redis://127.0.0.1:{frozen.getsockname()[1]}/0"
        with configured(database_url=database.url, broker_url=url):
            monkeypatch.setitem(app.conf, "broker_transport_options", {**options, "socket_timeout": 0.2})
            submit(pairs())
            assert [row["published_at"] for row in rows()] == [None]


def test_while_the_database_is_away_nothing_is_accepted_and_the_caller_knows(nowhere: str, redis_url: str) -> None:
    away = nowhere.replace("redis://", "postgresql+psycopg://user:password@")
    with configured(database_url=away, broker_url=redis_url), pytest.raises(OperationalError):
        submit(pairs())
    assert queued(redis_url) == []


def test_ids_are_uuids_of_version_7_that_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({uuid7() for _ in range(1_000)}) == 1_000
    moments = [1_700_000_000_000, 1_700_000_000_001, 1_800_000_000_000, 2**48 - 1]
    made: list[UUID] = []
    for millis in moments:
        monkeypatch.setattr("tasks.submit.time.time_ns", lambda millis=millis: millis * 1_000_000 + 999_999)
        made.append(uuid7())
    assert made == sorted(made)
    assert [one.int >> 80 for one in made] == moments
    assert {(one.version, one.variant) for one in made} == {(7, RFC_4122)}


#: What a base install has not got.
EXTRAS = ("torch", "PIL", "numpy", "boto3", "botocore", "obstore", "tokenizers", "safetensors", "modelscope", "psutil")
BASE_INSTALL = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from tasks.submit import Pair, submit
done = submit([Pair(image="s3://shop/1.jpg", text="a red shoe")])
print(done.message_ids[0])
import tasks.pairs_file, tasks.cli
"""


def test_a_base_install_submits_without_torch_or_any_other_extra(database: Database, redis_url: str) -> None:
    env = environment(database_url=database.url, broker_url=redis_url)
    done = subprocess.run([sys.executable, "-c", BASE_INSTALL], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [entry["headers"]["id"] for entry in queued(redis_url)] == [done.stdout.strip()]


@pytest.mark.parametrize(
    ("wrong", "options"),
    [
        ([{"id": "0192f0c1-2b7e-7000-8000-000000000001"}] * 2, {}),
        ([{}], {"source": ""}),
        ([{}], {"source": "s" * 201}),
        ([{"attributes": {"a": json.loads("[" * 30 + "]" * 30)}}], {}),
    ],
    ids=["an id twice", "no source", "a long source", "nested too deep"],
)
def test_what_no_worker_could_store_is_refused_before_it_is_accepted(
    producer: None, wrong: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    given = [Pair(image="s3://shop/1.jpg", text="a shoe", **fields) for fields in wrong]
    with pytest.raises((ValueError, PairRejected)):
        submit(given, lane="bulk", **options)
    assert rows() == []


def test_more_messages_than_a_statement_has_parameters_for_are_accepted(producer: None) -> None:
    messages = [OutboxRow(uuid7(), "bulk", {}) for _ in range(5_000)]
    with engine().begin() as connection:
        assert outbox.add(connection, messages) == len(messages)


MARK = 4


@pytest.fixture
def pauses(database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How long each call would have paused, for a producer whose mark is at four messages and who looks every time."""
    made: list[float] = []
    monkeypatch.setattr("tasks.high_water.time.sleep", made.append)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    with configured(database_url=database.url, broker_url=redis_url, outbox_high_water=MARK):
        yield made


def fill(messages: int) -> None:
    with engine().begin() as connection:
        outbox.add(connection, [OutboxRow(uuid7(), "bulk", {}) for _ in range(messages)])


@pytest.mark.parametrize("lane", ["live", "bulk"])
def test_above_the_mark_a_call_pauses_the_longer_the_fuller_the_outbox_is(
    pauses: list[float], lane: Literal["live", "bulk"]
) -> None:
    for messages in (MARK - 1, 0, 1, 0, 100):
        fill(messages)
        submit(pairs(), lane=lane)
    longest = MAX_PAUSE_S[lane]
    # Before each call there were 3, 4, 6, 7 and 108: the first two are not above the mark.
    assert pauses == pytest.approx([longest * 2 / MARK, longest * 3 / MARK, longest])
    assert len(rows()) == MARK - 1 + 1 + 100 + 5, "every one was accepted"


def test_above_the_mark_the_log_says_what_to_do_but_not_with_every_call(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    fill(MARK + 2)
    for _ in range(3):
        submit(pairs())
    (warning,) = [record for record in caplog.records if record.name == "tasks.high_water"]
    assert warning.getMessage() == (
        "the outbox holds 6 messages, CONCORD_OUTBOX_HIGH_WATER is 4: start more workers, or submit less"
    )
    assert HighWater(engine(), MARK).sentence(8).startswith("the outbox holds 8 messages or more,")


def test_a_callers_own_transaction_is_never_held_open_for_it(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    fill(3 * MARK)
    with engine().begin() as connection:
        submit(pairs(), connection=connection)
    assert (pauses, len(rows())) == ([], 3 * MARK + 1)
    assert "the outbox holds 8 messages or more" in caplog.text


def test_a_process_looks_once_a_second_at_most(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 3_600.0)
    submit(pairs())
    fill(2 * MARK)
    submit(pairs())
    assert (pauses, high_water().waiting()) == ([], 0)


@pytest.fixture
def shop(database: Database) -> Iterator[Engine]:
    """A login that has been granted nothing yet."""
    login, password = f"shop_{secrets.token_hex(4)}", secrets.token_hex(16)
    owner = create_engine(database.owner_url)
    with owner.begin() as connection:
        connection.execute(text(f"create role {login} login password '{password}'"))
    shop = create_engine(make_url(database.url).set(username=login, password=password))
    yield shop
    shop.dispose()
    with owner.begin() as connection:
        connection.execute(text(f"drop role {login}"))
    owner.dispose()


def test_a_producers_rights_are_enough_to_look(database: Database, pauses: list[float], shop: Engine) -> None:
    fill(2 * MARK)
    owner = create_engine(database.owner_url)
    with owner.begin() as connection:
        connection.execute(text(f"grant concord_producer to {shop.url.username}"))
    owner.dispose()
    assert HighWater(shop, MARK).waiting() == 2 * MARK


def test_a_database_that_does_not_say_slows_nobody_down(
    database: Database, pauses: list[float], shop: Engine, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(2 * MARK)
    assert HighWater(shop, MARK).excess() == 0.0, "it may not look"
    away = create_engine(nowhere.replace("redis://", "postgresql+psycopg://user:password@"))
    assert HighWater(away, MARK).excess() == 0.0
    monkeypatch.setattr(module, "LOOK_LIMIT_MS", 100)
    owner = create_engine(database.owner_url)
    with owner.begin() as connection:
        connection.execute(text("lock table outbox in access exclusive mode"))
        assert HighWater(engine(), MARK).excess() == 0.0, "it takes too long"
    owner.dispose()
    assert HighWater(engine(), MARK).excess() == 1.0
