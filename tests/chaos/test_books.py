"""The books of a chaos run: right where they are right, and every kind of wrong is found and named."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
from sqlalchemy import Connection, Engine, text

from db import outbox, runs
from db.engine import make_engine
from db.verdicts import Settlement, Verdict, settle
from infra.chaos.books import Footprint, check, footprint
from infra.chaos.ledger import Entry, Ledger, Way
from infra.chaos.producer import BARE_SOURCE, SOURCE
from tests.conftest import Database
from tests.db import rows
from tests.shared import emptied_database

database = emptied_database

#: Pairs 0 to 4 are of a run, 5 to 9 were submitted, 10 to 14 are a bare send_task's.
WAYS: tuple[Way, ...] = ("file",) * 5 + ("live",) * 5 + ("send_task",) * 5
RUN = UUID("0199c0de-0000-7000-8000-0000000000aa")

Spoil = Callable[[Connection], object]


def entry(number: int) -> Entry:
    way = WAYS[number]
    return Entry(way, str(rows.pair_id(number)), f"chaos-{number}", str(RUN) if way == "file" else "")


LEDGER = [entry(number) for number in range(len(WAYS))]


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.owner_url)
    yield engine
    engine.dispose()


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def verdicts(engine: Engine) -> list[Verdict]:
    """A judged verdict for every pair of the ledger, and the run that counted its own."""
    model = rows.model(engine)

    def verdict(number: int) -> Verdict:
        source = BARE_SOURCE if WAYS[number] == "send_task" else SOURCE
        own_run = RUN if WAYS[number] == "file" else None
        fields: dict[str, Any] = {"image": f"s3://b/{number % 3}", "text": "a dog"}
        return rows.judged(model, number, source=source, ref=f"chaos-{number}", run_id=own_run, **fields)

    made = [verdict(number) for number in range(len(WAYS))]
    with engine.begin() as connection:
        runs.open_run(connection, RUN, name="pairs.jsonl", lane="bulk", source=SOURCE)
        runs.plan(connection, RUN, 5, before=0)
        runs.end_planning(connection, RUN)
        settle(connection, Settlement(made))
    return made


def delete(number: int) -> Spoil:
    return lambda connection: connection.execute(
        text("delete from verdict where pair_id = :id"), {"id": rows.pair_id(number)}
    )


def execute(sql: str) -> Spoil:
    return lambda connection: connection.execute(text(sql))


def change(number: int, assignment: str) -> Spoil:
    return execute(f"update verdict set {assignment} where pair_id = '{rows.pair_id(number)}'")


FAILED = """status = 'failed', error_code = 'image_fetch_failed', label = null, decision = null, policy_version = null,
    p_entailment = null, p_contradiction = null, p_neutral = null, model_version_id = null"""
COPIED = f"""
create temporary table copied as select * from verdict where pair_id = '{rows.pair_id(7)}';
update copied set submitted_at = submitted_at + interval '1 second';
insert into verdict select * from copied; drop table copied;
"""

WRONG: dict[str, tuple[Spoil, str]] = {
    "a missing pair": (delete(6), "1 accepted pairs have no verdict: chaos-6 ("),
    "a doubled pair": (execute(COPIED), "1 pairs have more than one verdict: chaos-7"),
    "a failed pair": (change(8, FAILED), "1 pairs failed: chaos-8 (image_fetch_failed)"),
    "a rejected pair": (
        change(8, FAILED.replace("'failed'", "'rejected'").replace("fetch_failed", "truncated")),
        "1 good pairs were rejected: chaos-8 (image_truncated)",
    ),
    "another answer to the same question": (
        change(9, "label = 'neutral'"),
        "1 questions were answered in two ways: s3://b/0 'a dog'",
    ),
    "a row of the outbox": (
        lambda connection: outbox.add(connection, [rows.message()]),
        "1 rows are left in the outbox",
    ),
    "a suspect": (
        execute("insert into suspect values (now(), gen_random_uuid(), gen_random_uuid(), 1, now())"),
        "1 rows are left in suspect",
    ),
    "a rejected message": (
        lambda connection: outbox.record_rejected(connection, [outbox.Rejected("live", "not_json", "", b"x")]),
        "1 messages were rejected",
    ),
    "a counter": (execute("update run set judged = judged - 1"), "judged is 4 and should be 5"),
    "a run that does not end": (execute("update run set state = 'running'"), "state is running and should be done"),
    "a plan": (execute("update run set planned = 6"), "planned is 6 and should be 5"),
    "a run that is gone": (execute("delete from run"), f"run {RUN} is not there"),
}


def test_right_books_have_nothing_wrong(engine: Engine, client: "redis.Redis", verdicts: list[Verdict]) -> None:
    books = check(LEDGER, engine, client)
    assert books.problems() == []
    assert (books.pairs, books.lost_bare) == (15, [])


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found_and_named(
    engine: Engine, client: "redis.Redis", verdicts: list[Verdict], what: str
) -> None:
    spoil, sentence = WRONG[what]
    with engine.begin() as connection:
        spoil(connection)
    (problem,) = check(LEDGER, engine, client).problems()
    assert sentence in problem


def test_a_verdict_that_nobody_was_told_of_is_found(
    engine: Engine, client: "redis.Redis", verdicts: list[Verdict]
) -> None:
    (problem,) = check(LEDGER[:7] + LEDGER[8:], engine, client).problems()
    assert problem.endswith(f"nobody was told are accepted: {rows.pair_id(7)}")


def test_a_bare_message_that_redis_lost_is_counted_apart(
    engine: Engine, client: "redis.Redis", verdicts: list[Verdict]
) -> None:
    with engine.begin() as connection:
        delete(12)(connection)
    books = check(LEDGER, engine, client)
    assert books.problems() == []
    assert [name.split()[0] for name in books.lost_bare] == ["chaos-12"]


def test_without_the_outbox_a_bare_message_is_held_to_the_full_guarantee(
    engine: Engine, client: "redis.Redis", verdicts: list[Verdict]
) -> None:
    with engine.begin() as connection:
        delete(12)(connection)
    (problem,) = check(LEDGER, engine, client, outbox=False).problems()
    assert "1 accepted pairs have no verdict: chaos-12" in problem


@pytest.mark.parametrize("key", ["live", "bulk", "live\x06\x163", "unacked", "unacked_index"])
def test_what_is_left_in_redis_is_found_under_every_key(
    engine: Engine, client: "redis.Redis", verdicts: list[Verdict], key: str
) -> None:
    match key:
        case "unacked":
            client.hset(key, "tag", "entry")
        case "unacked_index":
            client.zadd(key, {"tag": 1.0})
        case _:
            client.lpush(key, "entry")
    (problem,) = check(LEDGER, engine, client).problems()
    assert problem == f"1 entries are left in Redis under {key!r}"


def test_long_lists_of_names_are_cut(engine: Engine, client: "redis.Redis") -> None:
    more = [Entry("live", str(uuid4()), f"chaos-{number}") for number in range(30)]
    (problem,) = check(more, engine, client).problems()
    assert problem.startswith("30 accepted pairs have no verdict: chaos-0 (")
    assert problem.endswith(" and 20 more")


def test_the_ledger_reads_what_was_written(tmp_path: Any) -> None:
    ledger = Ledger(tmp_path / "ledger.txt")
    assert ledger.read() == []
    ledger.write(LEDGER[:3])
    ledger.write(LEDGER[3:])
    assert ledger.read() == LEDGER


def test_a_site_that_holds_more_than_before_is_told_of(engine: Engine, client: "redis.Redis") -> None:
    before, limits = footprint(engine, client, 500.0), Footprint(1, 0, 1, 4.0, 50.0)
    assert footprint(engine, client, 540.0).problems(before, limits) == []
    assert footprint(engine, client, 560.0).problems(before, limits) == ["worker mb: 560, and 500 before"]
    with engine.connect() as one, engine.connect() as two:
        one.execute(text("select 1"))
        two.execute(text("select 1"))
        one.commit()
        now = footprint(engine, client, 500.0)
    assert "in transaction: 1, and 0 before" in now.problems(before, limits)
