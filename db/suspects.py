"""What may have ended its worker, pairs and whole messages: counted before each lone try, forgotten when it has ended.

A message is counted under an id of its own in the pair's place (tasks/lone.py).
"""

from collections.abc import Sequence
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


def forget(connection: Connection, message_ids: Sequence[UUID]) -> None:
    """Messages that are settled are under no suspicion, whatever tries of theirs were cut short."""
    statement = text("delete from suspect where message_id = any(:message_ids)")
    connection.execute(statement, {"message_ids": list(message_ids)})
