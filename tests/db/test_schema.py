"""The migrations make what the code declares, and the database says what its columns mean."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, Literal
from uuid import RFC_4122

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from db import registry
from db.engine import make_engine
from db.migrations import upgrade
from db.tables import METADATA, VERDICT, is_declared
from db.verdicts import COLUMNS
from tests.conftest import Database
from tests.db import rows
from worker.moderator import SHIPPED_POLICIES, Judgement, Policy, decide


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    engine = create_engine(database.owner_url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def differences(connection: Connection) -> list[Any]:
    """What a new migration would have to change. Columns' comments stand in the migrations alone."""
    options = {"include_object": is_declared, "compare_type": True}
    found: list[Any] = compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)
    return [one for one in found if not (isinstance(one, list) and one[0][0] == "modify_comment")]


def test_the_migrations_make_what_the_code_declares(owner: Connection) -> None:
    assert differences(owner) == []


def test_a_column_that_is_not_declared_would_be_seen(owner: Connection) -> None:
    owner.execute(text("alter table outbox add column colour text"))
    assert [change[0] for change in differences(owner)] == ["remove_column"]


def test_every_table_and_every_column_of_verdict_is_explained(owner: Connection) -> None:
    tables = owner.execute(text("select relname, obj_description(oid) from pg_class where relname = any(:names)"),
                           {"names": list(METADATA.tables)})  # fmt: skip
    assert {name for name, comment in tables if comment} == set(METADATA.tables)
    columns = owner.execute(
        text(
            "select attname, col_description(attrelid, attnum) from pg_attribute "
            "where attrelid = 'verdict'::regclass and attnum > 0 and not attisdropped"
        )
    )
    assert {name for name, comment in columns if comment} == {column.name for column in VERDICT.columns}


def test_every_column_of_verdict_but_the_time_of_writing_is_written() -> None:
    assert {*COLUMNS, "decided_at"} == {column.name for column in VERDICT.columns}


def test_upgrading_again_changes_nothing(empty_database: Database) -> None:
    first = upgrade(empty_database.owner_url, empty_database.url)
    assert upgrade(empty_database.owner_url, empty_database.url) == first
    assert upgrade(empty_database.owner_url) == first


def test_two_upgrades_at_once_are_one(empty_database: Database) -> None:
    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(lambda _: upgrade(empty_database.owner_url, empty_database.url), range(4)))
    assert len(set(versions)) == 1
    engine = make_engine(empty_database.url)
    with engine.connect() as connection:
        assert {policy["name"] for policy in registry.policies_in_force(connection)} == set(SHIPPED_POLICIES)
    engine.dispose()


def test_the_policies_in_the_database_are_those_that_the_code_ships(owner: Connection) -> None:
    stored = {row["name"]: Policy(**row) for row in registry.policies_in_force(owner)}
    assert stored == SHIPPED_POLICIES


def test_the_highest_version_of_a_policy_is_in_force(owner: Connection) -> None:
    owner.execute(text("insert into policy (name, version, polarity) values ('catalog', 10, 'should_hold')"))
    in_force = {row["name"]: row["version"] for row in registry.policies_in_force(owner)}
    assert in_force == {"catalog": 10, "prohibited": 1}


@pytest.mark.parametrize("function", ["make_partitions", "make_verdict_partitions"])
@pytest.mark.parametrize("ahead", ["-1", "25", "2147483647", "null"])
def test_nobody_makes_months_by_the_thousand(owner: Connection, function: str, ahead: str) -> None:
    with pytest.raises(DBAPIError, match="months_ahead is 0 to 24"):
        owner.execute(text(f"select {function}({ahead})"))
    owner.rollback()


def test_months_are_made_ahead_and_only_where_they_are_missing(owner: Connection) -> None:
    assert registry.make_partitions(owner) == 0, "the migration made them"
    assert owner.execute(text("select make_verdict_partitions(5)")).scalar_one() == 6
    assert owner.execute(text("select make_verdict_partitions(5)")).scalar_one() == 0
    last = owner.execute(
        text("select max(inhrelid::regclass::text) from pg_inherits where inhparent = 'verdict'::regclass")
    ).scalar_one()
    ahead = (rows.THIS_MONTH.year * 12 + rows.THIS_MONTH.month - 1) + 5
    assert last == f"verdict_{ahead // 12}_{ahead % 12 + 1:02}"


def test_the_oldest_verdict_time_is_the_first_moment_of_the_oldest_month_that_is_there(owner: Connection) -> None:
    last_month = (rows.THIS_MONTH - timedelta(days=1)).replace(day=1)
    owner.execute(text("set timezone = 'Pacific/Auckland'"))
    assert registry.oldest_verdict_time(owner) == last_month
    owner.execute(text(f"alter table verdict detach partition verdict_{last_month:%Y_%m}"))
    assert registry.oldest_verdict_time(owner) == rows.THIS_MONTH


@pytest.mark.parametrize("moment", ["oldest", "newest"])
def test_a_verdict_can_be_stored_for_the_first_and_the_last_moment(owner: Connection, moment: str) -> None:
    at = registry.oldest_verdict_time(owner)
    if moment == "newest":
        at = datetime.now(UTC) + timedelta(hours=1)
    owner.execute(
        text(
            "insert into verdict (submitted_at, pair_id, source, message_id, lane, status, error_code) values"
            " (:at, gen_random_uuid(), 's', gen_random_uuid(), 'live', 'rejected', 'expired')"
        ),
        {"at": at},
    )


def judgement(p_entailment: float, p_contradiction: float, flags: tuple[str, ...]) -> Judgement:
    return Judgement("neutral", "", {}, p_entailment, p_contradiction, 0.0, "", None, flags)


def test_sql_decides_as_the_worker_does(owner: Connection) -> None:
    polarities: tuple[Literal["should_hold", "should_not_hold"], ...] = ("should_hold", "should_not_hold")
    thresholds = (None, 0.0, 0.2, 0.5, 1.0)
    probabilities = (0.0, 0.2, 0.1 + 0.1, 0.3, 0.49999999999999994, 0.5, 1.0)
    flag_sets: tuple[tuple[str, ...], ...] = ((), ("text_cut",), ("text_cut", "off_language"))
    statement = text("select decide(:polarity, :review_at, :reject_at, :p_entailment, :p_contradiction, :flags)")
    seen = set()
    with owner.begin_nested():
        for polarity, review_at, reject_at, p, flags in product(
            polarities, thresholds, thresholds, probabilities, flag_sets
        ):
            both = (p, 0.25) if polarity == "should_not_hold" else (0.25, p)
            parameters = {"polarity": polarity, "review_at": review_at, "reject_at": reject_at, "flags": list(flags)}
            answer = owner.execute(statement, {**parameters, "p_entailment": both[0], "p_contradiction": both[1]})
            expected = decide(Policy("p", 1, polarity, review_at, reject_at), judgement(*both, flags))
            assert answer.scalar_one() == expected, (parameters, both)
            seen.add(expected)
    assert seen == {"accept", "review", "reject"}


def test_ids_made_in_sql_are_uuids_of_version_7_that_sort_by_time(owner: Connection) -> None:
    first, *_, last = ids = list(owner.execute(text("select new_uuid7() from generate_series(1, 200)")).scalars())
    assert len(set(ids)) == 200
    assert {(one.version, one.variant) for one in ids} == {(7, RFC_4122)}
    made_at = datetime.fromtimestamp((last.int >> 80) / 1000, UTC)
    assert abs(made_at - datetime.now(UTC)) < timedelta(minutes=1)
    owner.execute(text("select pg_sleep(0.002)"))
    later = owner.execute(text("select new_uuid7()")).scalar_one()
    assert first < later
    assert last < later


def test_a_model_version_is_one_row_however_often_a_worker_starts_with_it(database: Database) -> None:
    engine: Engine = make_engine(database.url)
    assert rows.model(engine) == rows.model(engine)
    with engine.connect() as connection:
        newest = registry.newest_model(connection)
    engine.dispose()
    assert newest is not None
    assert (newest["name"], newest["answers"]) == ("mini", {"yes": "entailment", "no": "contradiction"})
