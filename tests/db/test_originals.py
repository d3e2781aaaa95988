"""Which verdict answers for equal content, and that it is found without reading whole months."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from db import originals, registry
from db.engine import make_engine
from db.originals import REUSED
from db.verdicts import Settlement, Verdict, settle
from infra.bench.verdict_years import fill
from tests.conftest import Database, _database
from tests.db import rows

NOW = datetime.now(UTC)
HASH = b"0123456789abcdef"


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    yield engine
    engine.dispose()


@pytest.fixture
def model(engine: Engine) -> int:
    return rows.model(engine)


def keep(engine: Engine, *verdicts: Verdict) -> None:
    with engine.begin() as connection:
        settle(connection, Settlement(verdicts))


def found(engine: Engine, model: int, *hashes: bytes, days: float = 7.0) -> dict[bytes, str]:
    """By hash the answer, which tells the rows of a test apart."""
    with engine.connect() as connection:
        answers = originals.find(connection, hashes or [HASH], days=days, model_version_id=model)
    return {content_hash: answer["answer"] for content_hash, answer in answers.items()}


def judged(model: int, number: int = 0, **fields: Any) -> Verdict:
    made = {"submitted_at": NOW, "answer": "yes", "content_hash": HASH}
    return rows.judged(model, number, **{**made, **fields})


def test_an_original_is_found_with_all_that_it_said(engine: Engine, model: int) -> None:
    keep(engine, judged(model, 1), judged(model, 2, content_hash=b"another", answer="no"))
    with engine.connect() as connection:
        (answer,) = originals.find(connection, [HASH, b"unknown"], days=7, model_version_id=model).values()
    assert answer == {
        "content_hash": HASH, "label": "entailment", "answer": "yes",
        "p_entailment": 0.9, "p_contradiction": 0.05, "p_neutral": 0.05,
    }  # fmt: skip
    assert found(engine, model, HASH, b"another", b"unknown") == {HASH: "yes", b"another": "no"}


def test_what_is_no_original_answers_nobody(engine: Engine, model: int) -> None:
    keep(
        engine,
        judged(model, 1),
        judged(model, 2, content_hash=b"reused", flags=["text_cut", REUSED]),
        judged(model, 3, content_hash=b"handed over long ago", submitted_at=NOW - timedelta(days=8)),
        rows.rejected(4, submitted_at=NOW, content_hash=b"rejected", model_version_id=model),
        rows.failed(5, submitted_at=NOW, content_hash=b"failed", model_version_id=model),
    )
    hashes = (HASH, b"reused", b"handed over long ago", b"rejected", b"failed")
    assert found(engine, model, *hashes) == {HASH: "yes"}


def test_another_model_version_is_not_asked(engine: Engine, model: int) -> None:
    with engine.begin() as connection:
        newer = registry.register_model(
            connection, name="mini", revision="2", recipe="fp32", weights_sha256="0", prompt="?", image_px=64,
            answers={},
        )  # fmt: skip
    keep(engine, judged(model))
    assert found(engine, newer) == {}
    assert found(engine, model) == {HASH: "yes"}


def test_its_age_is_that_of_its_judging(engine: Engine, model: int) -> None:
    keep(engine, judged(model))
    assert found(engine, model, days=0.5) == {HASH: "yes"}
    with engine.begin() as connection:
        connection.execute(text("update verdict set decided_at = decided_at - interval '13 hours'"))
    assert found(engine, model, days=0.5) == {}
    assert found(engine, model, days=0.6) == {HASH: "yes"}


def test_the_newest_answers(engine: Engine, model: int) -> None:
    keep(engine, *(judged(model, n, submitted_at=NOW - timedelta(hours=n), answer=str(n)) for n in (2, 1, 3)))
    assert found(engine, model) == {HASH: "1"}


# ---- What is read ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(stack: Any, _migrated: str) -> Iterator[Connection]:
    """Some thousand verdicts over four months."""
    for made in _database(stack, _migrated):
        engine = create_engine(made.owner_url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            fill(connection, rows=20_000, months=4)
            yield connection
        engine.dispose()


def scans(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Of every part of a plan that was run and reads a table: which, and by which index."""
    if "Relation Name" in node and node["Actual Loops"]:
        yield node["Relation Name"], node.get("Index Name", "")
    for below in node.get("Plans", []):
        yield from scans(below)


@pytest.mark.parametrize("plan", ["custom", "generic"])
def test_only_the_months_within_the_setting_are_read_and_by_the_index(filled: Connection, plan: str) -> None:
    """psycopg prepares what is asked often, and Postgres may then plan once for whatever the hashes are."""
    days = 3.0
    newest = "select content_hash from verdict where status = 'judged' order by submitted_at desc limit 64"
    hashes = filled.exec_driver_sql(f"select array({newest})::text").scalar_one()
    model = filled.execute(text("select max(id) from model_version")).scalar_one()
    sql = originals.FIND.replace(":hashes", "$1").replace(":days", "$2").replace(":model_version_id", "$3")
    asked = f"'{hashes}', {days}, {model}"
    filled.exec_driver_sql(f"set plan_cache_mode = force_{plan}_plan")
    filled.exec_driver_sql(f"prepare find_{plan} (bytea[], float8, integer) as {sql}")
    explained = filled.exec_driver_sql(f"explain (analyze, format json) execute find_{plan} ({asked})").scalar_one()
    read = set(scans(explained[0]["Plan"]))
    now = datetime.now(UTC)
    within = {f"verdict_{moment:%Y_%m}" for moment in (now - timedelta(days=days), now, now + timedelta(hours=2))}
    assert {f"verdict_{now:%Y_%m}"} <= {month for month, _ in read} <= within
    parts = text("select inhrelid::regclass::text from pg_inherits where inhparent = 'verdict_content_hash'::regclass")
    assert {index for _, index in read} <= set(filled.execute(parts).scalars())
