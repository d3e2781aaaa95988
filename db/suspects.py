"""Pairs that may be what ended their worker: counted before each lone try, forgotten when the try has ended."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, text

BEGIN = """
insert into suspect as old (submitted_at, pair_id, message_id, tries)
values (:submitted_at, :pair_id, :message_id, 1)
on conflict (submitted_at, pair_id) do update set
    tries = old.tries + 1, message_id = excluded.message_id, tried_at = now()
returning tries
"""


def begin(connection: Connection, submitted_at: datetime, pair_id: UUID, message_id: UUID) -> int:
    """Count a lone try before it begins; returns how many have begun and not ended, this one among them."""
    parameters = {"submitted_at": submitted_at, "pair_id": pair_id, "message_id": message_id}
    return int(connection.execute(text(BEGIN), parameters).scalar_one())


def end(connection: Connection, submitted_at: datetime, pair_id: UUID) -> None:
    """The worker lives: whatever became of the pair, it does not end workers."""
    statement = text("delete from suspect where submitted_at = :submitted_at and pair_id = :pair_id")
    connection.execute(statement, {"submitted_at": submitted_at, "pair_id": pair_id})
