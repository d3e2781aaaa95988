"""The outbox: what was accepted stays here until its verdicts are in. Redis holds a window of it.

A row's `attempts` is the guard of the chain of retries: a delivery deletes or rewrites the row only while the row
still carries the attempts that the delivery carries, so a late duplicate can neither end nor fork the chain.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.dialects.postgresql import insert

from db.tables import REJECTED_MESSAGE

LANES = ("live", "bulk")
#: A holder that does not renew its lease for this long has lost it, by the database's clock.
LEASE_S = 15
#: A message is looked for in Redis only when it was published longer ago than this.
SETTLED_FOR_S = 20
#: Bytes of a body that are kept of a rejected message.
MAX_REJECTED_BODY_BYTES = 1_000_000


@dataclass(frozen=True)
class OutboxRow:
    """A message on its way: `body` is the JSON argument of the task, `task_id` Celery's id where it is another.

    `publishes` counts the times that it was handed to Redis, this one among them.
    """

    message_id: UUID
    lane: str
    body: dict[str, Any]
    attempts: int = 0
    expires_at: datetime | None = None
    wants_result: bool = False
    task_id: str | None = None
    delay_s: float = 0.0
    last_error: str | None = None
    publishes: int = 0

    @property
    def run_id(self) -> UUID | None:
        """The run that its pairs belong to, as its body says."""
        try:
            return UUID(self.body.get("run_id"))
        except (ValueError, TypeError, AttributeError):
            return None


@dataclass(frozen=True)
class Rejected:
    """What could not be given a verdict row: a message, or a pair that stood twice in one.

    `pairs` of a run are counted there as rejected, since the run waits for them.
    """

    queue: str
    error_code: str
    error_detail: str
    body: bytes
    message_id: UUID | None = None
    pair_ids: Sequence[UUID] = field(default=())
    source: str | None = None
    run_id: UUID | None = None
    pairs: int = 0

    def digest(self) -> bytes:
        """Of what makes it the same one when it is delivered again."""
        words = (self.queue, self.error_code, self.error_detail, str(self.message_id or ""))
        return hashlib.sha256(b"\0".join([*(word.encode() for word in words), self.body])).digest()


#: One prepared statement that the driver sends for many rows in one go, without waiting between them.
ADD = text("""
insert into outbox (message_id, lane, body, attempts, published_at, publishes, expires_at, wants_result, task_id,
                    not_before, last_error, run_id)
values (:message_id, :lane, :body, :attempts, case when :published then now() end, cast(:published as int), :expires_at,
        :wants_result, :task_id, now() + make_interval(secs => :delay_s), :last_error, :run_id)
on conflict do nothing
""")


def add(connection: Connection, rows: Iterable[OutboxRow], *, published: bool = False) -> int:
    """Accept messages inside the caller's transaction; those already there are left alone. Returns how many are new."""
    values = [
        {
            "message_id": row.message_id,
            "lane": row.lane,
            "body": json.dumps(row.body).encode(),
            "attempts": row.attempts,
            "published": published,
            "expires_at": row.expires_at,
            "wants_result": row.wants_result,
            "task_id": row.task_id,
            "delay_s": row.delay_s,
            "last_error": row.last_error,
            "run_id": row.run_id,
        }
        for row in rows
    ]
    return connection.execute(ADD, values).rowcount if values else 0


#: By the primary key and in its order; a statement for each number of attempts, of which a batch nearly always has one.
FORGET = text("delete from outbox where message_id = any(:message_ids) and attempts = :attempts")


def forget(connection: Connection, deliveries: Iterable[tuple[UUID, int]]) -> None:
    """Delete the rows of messages whose verdicts are in."""
    keys = sorted({(attempts, message_id) for message_id, attempts in deliveries})
    for attempts, group in groupby(keys, key=itemgetter(0)):
        connection.execute(FORGET, {"message_ids": [message_id for _, message_id in group], "attempts": attempts})


#: Rewrites the row of the attempt before, or makes one for a message that came without (a bare send_task). Each attempt
#: before counts as published once, so that `publishes` beyond `attempts` are those of this attempt.
RETRY = """
insert into outbox as old
    (message_id, lane, body, attempts, publishes, not_before, expires_at, wants_result, task_id, last_error, run_id)
values (:message_id, :lane, :body, :attempts, :attempts, now() + make_interval(secs => :delay_s), :expires_at,
        :wants_result, :task_id, :last_error, :run_id)
on conflict (message_id) do update set
    body = excluded.body, attempts = excluded.attempts, publishes = excluded.publishes,
    not_before = excluded.not_before, published_at = null, last_error = excluded.last_error
where old.attempts = excluded.attempts - 1
"""


def retry(connection: Connection, rows: Iterable[OutboxRow]) -> None:
    """Write the next attempts; `row.attempts` is already counted up."""
    for row in sorted(rows, key=lambda row: row.message_id):
        connection.execute(
            text(RETRY),
            {
                "message_id": row.message_id,
                "lane": row.lane,
                "body": json.dumps(row.body).encode(),
                "attempts": row.attempts,
                "delay_s": row.delay_s,
                "expires_at": row.expires_at,
                "wants_result": row.wants_result,
                "task_id": row.task_id,
                "last_error": row.last_error,
                "run_id": row.run_id,
            },
        )


def record_rejected(connection: Connection, rejected: Iterable[Rejected]) -> list[Rejected]:
    """Keep what could not be read, once however often it is delivered; returns what is new."""
    new = []
    for one in sorted(rejected, key=Rejected.digest):
        found = connection.execute(
            insert(REJECTED_MESSAGE)
            .values(
                message_id=one.message_id,
                pair_ids=list(one.pair_ids),
                queue=one.queue,
                source=one.source,
                error_code=one.error_code,
                error_detail=one.error_detail,
                body=one.body[:MAX_REJECTED_BODY_BYTES],
                digest=one.digest(),
            )
            .on_conflict_do_nothing()
        )
        if found.rowcount:
            new.append(one)
    return new


#: A producer may write any row. What one of them holds must not keep the others: no number overflows, and no time is
#: beyond Python's.
CLAIM = """
update outbox set published_at = now(), publishes = least(publishes, 1000000) + 1
where message_id in (
    select message_id from outbox
    where lane = :lane and published_at is null and not_before <= now()
    order by not_before, message_id limit :room for update skip locked)
returning message_id, lane, body, attempts, wants_result, task_id, publishes,
    case when expires_at < '9999-12-30' then greatest(expires_at, '0001-01-02') end as expires_at
"""


def claim(connection: Connection, lane: str, room: int) -> list[OutboxRow]:
    """Mark the oldest due messages as published and return them; the caller commits, then publishes."""
    return readable(connection, connection.execute(text(CLAIM), {"lane": lane, "room": room}))


UNCLAIM = """
update outbox set published_at = null, publishes = publishes - 1
where message_id = any(:message_ids) and published_at is not null and publishes > 0
"""


def unclaim(connection: Connection, rows: Iterable[OutboxRow]) -> None:
    """What was claimed and could not be handed to Redis is due again, as if it had not been claimed."""
    connection.execute(text(UNCLAIM), {"message_ids": [row.message_id for row in rows]})


MAKE_DUE = """
update outbox set published_at = null
where message_id = any(:message_ids) and published_at < now() - make_interval(secs => :settled_for_s)
"""


def make_due(connection: Connection, message_ids: Sequence[UUID]) -> None:
    """Lost messages are due again: to be published within the window like all others."""
    connection.execute(text(MAKE_DUE), {"message_ids": list(message_ids), "settled_for_s": SETTLED_FOR_S})


def readable(connection: Connection, rows: Iterable[Any]) -> list[OutboxRow]:
    """Rows as messages; one that nobody could read or settle is recorded instead, so that it holds nobody up."""
    found = []
    for row in list(rows):
        try:
            found.append(row_of(row))
        except (ValueError, RecursionError) as error:
            unread = OutboxRow(row.message_id, row.lane, {}, row.attempts)
            refuse(connection, unread, f"the outbox holds no readable message: {error}"[:300])
    return found


def refuse(connection: Connection, row: OutboxRow, why: str) -> None:
    """Record a message that can never be delivered, with its body as it stands, and delete its row."""
    body = text("select body from outbox where message_id = :message_id")
    raw = connection.execute(body, {"message_id": row.message_id}).scalar() or b""
    record_rejected(connection, [Rejected(row.lane, "invalid_message", why, bytes(raw), row.message_id)])
    forget(connection, [(row.message_id, row.attempts)])


def row_of(row: Any) -> OutboxRow:
    """Raises ValueError where the row is not its body's: it would stay when the message is settled, and come again."""
    body = json.loads(row.body)
    if not isinstance(body, dict) or UUID(str(body.get("message_id", row.message_id))) != row.message_id:
        raise ValueError("its body has another message_id")
    attempts = body.setdefault("attempts", row.attempts) if row.attempts else body.get("attempts", 0)
    if type(attempts) is not int or attempts != row.attempts or attempts < 0:
        raise ValueError(f"its body has other attempts than {row.attempts}")
    if row.task_id is not None and not row.task_id.isprintable():
        raise ValueError("its task_id is not plain text")
    return OutboxRow(
        row.message_id,
        row.lane,
        body,
        row.attempts,
        row.expires_at,
        row.wants_result,
        row.task_id,
        publishes=row.publishes,
    )


def published_count(connection: Connection) -> int:
    """How many messages should be in Redis now."""
    return int(connection.execute(text("select count(*) from outbox where published_at is not null")).scalar_one())


OVERDUE = """
select message_id, coalesce(nullif(task_id, ''), message_id::text) as task_id from outbox
where published_at < now() - make_interval(secs => :settled_for_s)
order by published_at limit :limit
"""


def overdue(connection: Connection, limit: int) -> dict[UUID, str]:
    """The longest published messages that have no verdicts yet, with Celery's ids: in Redis, in work, or lost."""
    parameters = {"settled_for_s": SETTLED_FOR_S, "limit": limit}
    return {row.message_id: row.task_id for row in connection.execute(text(OVERDUE), parameters)}


LEASE = """
update relay_lease set holder = :holder, expires_at = now() + make_interval(secs => :lease_s)
where id = 1 and (holder = :holder or expires_at < now())
"""


def take_lease(connection: Connection, holder: str) -> bool:
    """Become or stay the one relay; by the database's clock, so that a frozen holder loses it."""
    return connection.execute(text(LEASE), {"holder": holder, "lease_s": LEASE_S}).rowcount == 1


def drop_lease(connection: Connection, holder: str) -> None:
    """Let the next worker take over at once."""
    statement = text("update relay_lease set expires_at = '-infinity' where holder = :holder")
    connection.execute(statement, {"holder": holder})


WAITING = "select count(*) from (select message_id from outbox limit :at_most) as waiting"


def waiting(connection: Connection, at_most: int) -> int:
    """How many messages are not settled yet, counted up to `at_most`, so that it is cheap however many there are."""
    return int(connection.execute(text(WAITING), {"at_most": at_most}).scalar_one())


def has_publisher(connection: Connection) -> bool:
    """Whether a worker holds the lease: False only while none runs, or a moment after the last was killed."""
    return bool(connection.execute(text("select expires_at > now() from relay_lease")).scalar())


BACKLOG = """
select lane, count(*) as messages, count(*) filter (where published_at is not null) as published,
       count(*) filter (where attempts > 0) as retrying,
       coalesce(extract(epoch from now() - min(created_at)), 0)::float8 as oldest_s
from outbox group by lane
"""


def backlog(connection: Connection) -> dict[str, dict[str, Any]]:
    """By lane: messages not settled yet, how many of them are in Redis, how many are retries, the oldest's age."""
    rows = connection.execute(text(BACKLOG)).mappings()
    found = {row["lane"]: dict(row) for row in rows}
    empty = {"messages": 0, "published": 0, "retrying": 0, "oldest_s": 0.0}
    return {lane: {"lane": lane, **empty, **found.get(lane, {})} for lane in LANES}
