"""The producer: pairs become outbox rows, and live ones messages at once. Never imports torch.

    from tasks.submit import Pair, submit
    submit([Pair(ref="sku-1", image="s3://shop/1.jpg", text="a red shoe")])

A pair is accepted when the outbox row that carries it is committed; from then on it is not lost.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from typing import Any, Literal, TypeVar
from uuid import UUID

from kombu.exceptions import BatchPublishError
from kombu.exceptions import OperationalError as BrokerAway
from sqlalchemy import Connection, Engine

from db import outbox
from db.engine import make_engine
from db.outbox import OutboxRow
from tasks.app import app
from tasks.high_water import HighWater
from tasks.settings import settings
from worker.errors import first_line
from worker.messages import MAX_NAME_CHARS, TASK_NAME, VERSION, Pair, clean

__all__ = ["Pair", "Submission", "publish", "queue_length", "redis_errors", "submit"]

log = logging.getLogger(__name__)

#: Pairs that travel in one message: 40 times the pairs a second of one pair a message, and little to do again when a
#: worker dies.
PAIRS_PER_MESSAGE = 64
#: Messages that are sent to Redis before its answers are waited for. More gain nothing, and are held in memory.
MESSAGES_AT_ONCE = 50
Lane = Literal["live", "bulk"]
T = TypeVar("T")


@dataclass(frozen=True)
class Submission:
    """What was accepted: with submitted_at, the ids are the verdicts' keys."""

    pair_ids: Sequence[UUID]
    message_ids: Sequence[UUID]
    submitted_at: datetime


def submit(
    pairs: Iterable[Pair],
    *,
    lane: Lane = "live",
    source: str = "default",
    fresh: bool = False,
    expires_at: datetime | None = None,
    wants_result: bool = False,
    connection: Connection | None = None,
) -> Submission:
    """Hand pairs over; returns when they are accepted.

    `live` pairs are published at once while Redis holds few of them, `bulk` ones by the relay. With `connection` the
    rows are part of the caller's own transaction and the relay publishes them after its commit. `expires_at`: pairs
    not judged by then are rejected as `expired`. `wants_result`: AsyncResult(message_id).get() returns the verdicts.
    While the outbox is above its mark the call pauses first (tasks/high_water.py); with `connection` it only warns.
    Raises ValueError or PairRejected for what no worker could read, SQLAlchemy's DBAPIError when the database is away:
    either way nothing was accepted.
    """
    submitted_at = datetime.now(UTC)
    rows, pair_ids = [], []
    for chunk in chunked(pairs, PAIRS_PER_MESSAGE):
        numbered = [pair if pair.id else pair.model_copy(update={"id": uuid7()}) for pair in chunk]
        plain = [pair.model_dump(mode="json") for pair in numbered]
        for pair in plain:
            clean(pair)  # Raises where it is nested deeper than Celery could carry it.
        body = envelope(uuid7(), submitted_at, plain, source, fresh)
        rows.append(OutboxRow(UUID(body["message_id"]), lane, body, expires_at=expires_at, wants_result=wants_result))
        pair_ids += [pair.id for pair in numbered if pair.id]
    if len(set(pair_ids)) < len(pair_ids):
        raise ValueError("an id stands twice among these pairs: each has one verdict, under its own id")
    if connection is not None:
        warn_when_high()
        outbox.add(connection, rows)
    elif rows:
        high_water().slow_down(lane)
        at_once = lane == "live" and has_room(len(rows))
        with engine().begin() as own:
            outbox.add(own, rows, published=at_once)
        if at_once:
            publish_accepted(rows)
    return Submission(pair_ids, [row.message_id for row in rows], submitted_at)


def envelope(
    message_id: UUID,
    submitted_at: datetime,
    pairs: Sequence[dict[str, Any]],
    source: str = "default",
    fresh: bool = False,
    run_id: UUID | None = None,
) -> dict[str, Any]:
    """The JSON argument of the task, for pairs that may still be found wrong by the worker.

    Raises ValueError for a source that no worker reads.
    """
    if not 1 <= len(source) <= MAX_NAME_CHARS:
        raise ValueError(f"a source is a name of 1 to {MAX_NAME_CHARS} characters")
    return {
        "v": VERSION,
        "message_id": str(message_id),
        "submitted_at": submitted_at.isoformat(),
        "run_id": str(run_id) if run_id else None,
        "source": source,
        "fresh": fresh,
        "attempts": 0,
        "pairs": list(pairs),
    }


def publish(rows: Sequence[OutboxRow]) -> None:
    """Hand committed rows to Redis, many at once.

    Raises one of `redis_errors` where it is away or refuses; some of the rows may have arrived by then. Raises anything
    where a row cannot be made a message, and then the same holds.
    """
    with app.producer_pool.acquire(block=True) as producer:
        # Once: waiting is the outbox's part, and a producer is not held up by a Redis that is away.
        producer.connection.ensure_connection(max_retries=0)
        try:
            with producer.batch(MESSAGES_AT_ONCE):
                for row in rows:
                    send(row, producer)
        except BatchPublishError as error:
            raise without_quotation(error.__cause__ or error) from None


def send(row: OutboxRow, producer: Any) -> None:
    """One message, by way of the producer's batch."""
    app.send_task(
        TASK_NAME,
        args=[row.body],
        task_id=celery_id(row),
        queue=row.lane,
        expires=row.expires_at,
        # Said in the header alone: to say it to Celery would subscribe this process to the result.
        ignore_result=True,
        headers={
            "ignore_result": not row.wants_result,
            "publishes": row.publishes,
            "published_at": time.time(),
        },
        producer=producer,
        argsrepr="(message,)",
        retry=False,
    )


def celery_id(row: OutboxRow) -> str:
    """What Celery calls the message."""
    return row.task_id or str(row.message_id)


def without_quotation(error: BaseException) -> BaseException:
    """What Redis said, without the command that redis-py quotes before it, and with it a part of somebody's message."""
    error.args = (str(error).rpartition(" of pipeline caused error: ")[2],)
    return error


def publish_accepted(rows: Sequence[OutboxRow]) -> None:
    """Publish, or leave it to the relay, which finds what never reached Redis. Whatever happens, they are accepted."""
    try:
        publish(rows)
    except Exception as error:
        log.warning("the relay will publish %d messages: %s", len(rows), first_line(error))


def has_room(messages: int) -> bool:
    """Whether the live queue is below its window; False while Redis is away."""
    try:
        return queue_length("live") + messages <= settings().live_window
    except redis_errors():
        return False


def queue_length(lane: str) -> int:
    """Messages in the lane's queue, over all of Redis's priority keys. Raises one of `redis_errors`."""
    with app.connection_or_acquire() as connection:
        connection.ensure_connection(max_retries=0)
        size: int = connection.default_channel._size(lane)
        return size


def redis_errors() -> tuple[type[Exception], ...]:
    """What is raised where Redis is away or refuses: kombu's own error before a connection is up, redis-py's after."""
    connection = app.connection_for_write()
    return (BrokerAway, *connection.connection_errors, *connection.channel_errors)


def chunked(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def uuid7() -> UUID:
    """A UUID that sorts by time of making (RFC 9562): 48 bits of milliseconds, then random ones."""
    millis, random = time.time_ns() // 1_000_000, int.from_bytes(os.urandom(10))
    return UUID(int=(millis << 80 | 7 << 76 | (random >> 68) << 64 | 2 << 62 | random & (1 << 62) - 1))


def warn_when_high() -> None:
    """Say that the outbox is above its mark; a caller who has a connection of its own may have no database set."""
    if settings().database_url:
        high_water().excess()


@cache
def high_water() -> HighWater:
    """How full the outbox is, as this process last saw it."""
    return HighWater(engine(), settings().outbox_high_water)


@cache
def engine() -> Engine:
    """The producer's connections to Postgres, made at the first submit."""
    return make_engine(settings().need("database_url"))
