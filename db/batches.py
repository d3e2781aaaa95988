"""Measured batches: one row each, written in the transaction that settles it, for the views throughput and latency."""

from dataclasses import dataclass, fields

from sqlalchemy import Connection, text


@dataclass(frozen=True)
class BatchRow:
    """A row of `batch` but for its key, which the database gives; the columns' meanings are in its comments."""

    worker: str
    lane: str
    model_version_id: int | None
    messages: int
    pairs: int
    judged: int
    queue_s: float
    fetch_s: float
    model_s: float
    write_s: float
    tokens: int
    padded_tokens: int
    pictures: int
    reused: int = 0


NAMES = [field.name for field in fields(BatchRow)]
RECORD = text(f"insert into batch ({', '.join(NAMES)}) values ({', '.join(f':{name}' for name in NAMES)})")


def record(connection: Connection, row: BatchRow) -> None:
    """Write it inside the caller's transaction; `settled_at` is the transaction's time."""
    connection.execute(RECORD, vars(row))
