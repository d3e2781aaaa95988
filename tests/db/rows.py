"""Rows for the tests of the database: valid ones, of which a test changes what it is about."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4, uuid5

from sqlalchemy import Connection, Engine, text

from db import registry, runs
from db.outbox import OutboxRow
from db.verdicts import Verdict

#: The first moment of the month: a partition for it is always there.
THIS_MONTH = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
_NAMES = UUID("0199c0de-0000-7000-8000-000000000000")


def pair_id(number: int) -> UUID:
    """The same id for the same number; their order is not the numbers'."""
    return uuid5(_NAMES, str(number))


def rejected(number: int = 0, **fields: Any) -> Verdict:
    row = Verdict(THIS_MONTH, pair_id(number), "default", uuid4(), "live", "rejected", 0, error_code="text_empty")
    return replace(row, **fields)


def failed(number: int = 0, **fields: Any) -> Verdict:
    return rejected(number, **{"status": "failed", "error_code": "image_fetch_failed", **fields})


def judged(model: int, number: int = 0, **fields: Any) -> Verdict:
    values = {"label": "entailment", "p_entailment": 0.9, "p_contradiction": 0.05, "p_neutral": 0.05}
    made = {"status": "judged", "error_code": None, "decision": "accept", "policy": "catalog", "policy_version": 1}
    return rejected(number, **values, **made, model_version_id=model, **fields)


def model(engine: Engine) -> int:
    """A model version, which a judged row must name."""
    labels = {"yes": "entailment", "no": "contradiction"}
    with engine.begin() as connection:
        return registry.register_model(
            connection, name="mini", revision="1", recipe="fp32", weights_sha256="0", prompt="?", image_px=64,
            answers=labels,
        )  # fmt: skip


def message(message_id: UUID | None = None, **fields: Any) -> OutboxRow:
    return OutboxRow(message_id or uuid4(), fields.pop("lane", "live"), {"pairs": []}, **fields)


def a_run(connection: Connection, planned: int) -> runs.Run:
    """A run whose planning has ended."""
    run = runs.open_run(connection, uuid4(), name="pairs.jsonl", lane="bulk", source="default")
    assert runs.plan(connection, run.id, planned, before=0)
    runs.end_planning(connection, run.id)
    return runs.read(connection, run.id)


def all_of(connection: Connection, table: str) -> list[dict[str, Any]]:
    """Every row of a table, in the order of its first column."""
    return [dict(row) for row in connection.execute(text(f"select * from {table} order by 1, 2")).mappings()]
