"""How long the site takes to recover from a fault, and what a dead worker had in hand."""

import base64
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import Engine, text

from infra.chaos.producer import SOURCE

#: Celery's keys for what workers hold: the messages by tag, and since when each was not touched.
UNACKED, UNACKED_INDEX = "unacked", "unacked_index"
#: Live workers touch what they hold every 5 s, so that what stays untouched for longer is nobody's.
UNTOUCHED_S = 7.0

FLOWS = "select exists (select from verdict where decided_at > :since) or not exists (select from outbox)"


@dataclass(frozen=True)
class Held:
    """A message that a worker has taken and not acknowledged, and when that worker last touched it (Unix seconds)."""

    tag: str
    touched_at: float
    source: str
    pair_ids: tuple[str, ...]


def client_of(redis_url: str) -> "redis.Redis":
    """A client that says at once where Redis is away."""
    return redis.Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0))


def held_by_workers(client: "redis.Redis") -> list[Held]:
    """Everything in `unacked`, read in one MULTI. Raises redis-py's errors while Redis is away."""
    with client.pipeline(transaction=True) as pipe:
        pipe.hgetall(UNACKED)
        pipe.zrange(UNACKED_INDEX, 0, -1, withscores=True)
        entries, scores = pipe.execute()
    touched = {tag.decode(): score for tag, score in scores}
    return [held_of(tag.decode(), entry, touched.get(tag.decode(), 0.0)) for tag, entry in entries.items()]


def held_of(tag: str, entry: bytes, touched_at: float) -> Held:
    """An entry of `unacked` is JSON of [message, exchange, routing key]."""
    source, ids = pairs_of(json.loads(entry)[0])
    return Held(tag, touched_at, source, ids)


def pairs_of(message: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Source and pairs' ids of a Celery message, whose body is base64 of the JSON of [args, kwargs, embed]."""
    (argument, *_), *_ = json.loads(base64.b64decode(message["body"]))
    return argument.get("source", ""), tuple(pair["id"] for pair in argument["pairs"])


def pairs_waiting(client: "redis.Redis") -> int:
    """Pairs of the outbox in messages that no worker has taken."""
    found = [pairs_of(json.loads(entry)) for key in lane_keys(client) for entry in client.lrange(key, 0, -1)]
    return sum(len(ids) for source, ids in found if source == SOURCE)


def lane_keys(client: "redis.Redis") -> list[bytes]:
    """The lanes' lists: a lane's name, and a separator and a number behind it for a priority other than 0."""
    return [key for key in client.scan_iter(_type="LIST") if key.split(b"\x06")[0] in (b"live", b"bulk")]


def left_behind(
    at_death: Collection[Held], later: Collection[Held], died_at: float, disturbed: Collection[float]
) -> list[Held]:
    """What the dead worker held, as far as one can be sure: not touched since, where live workers touch what they hold.

    `later` is `unacked` UNTOUCHED_S after the death, `disturbed` are the moments of other events that leave messages
    untouched. What such an event before the death left behind is told apart by its age, since the dead worker had
    touched its own later; after one that came between the two looks, nobody can tell.
    """
    if any(died_at < at <= died_at + UNTOUCHED_S for at in disturbed):
        return []
    since = max([died_at - UNTOUCHED_S, *(at for at in disturbed if at <= died_at)])
    untouched = {(held.tag, held.touched_at) for held in later}
    return [
        held for held in at_death if (held.tag, held.touched_at) in untouched and since < held.touched_at <= died_at
    ]


def had_begun(held: Collection[Held], max_pairs: int) -> bool:
    """Whether a batch was in work: a message that fills one begins at once, unless others are in work before it."""
    return any(len(one.pair_ids) >= max_pairs for one in held)


@dataclass(eq=False)
class Watched:
    """A fault from which the site is to recover: verdicts are committed again, where any pairs are left to judge, and
    those that were in hand have theirs.

    `waiting` are ids of pairs in hand at the fault; those of a bare `send_task` are left out, which Redis may lose.
    """

    what: str
    waiting: set[str]
    started: float = field(default_factory=time.monotonic)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    flows_again: bool = False
    recovered_s: float | None = None

    def look(self, connection: Any) -> None:
        """Ask the database once. Raises SQLAlchemyError while it is away."""
        if not self.flows_again:
            self.flows_again = bool(connection.execute(text(FLOWS), {"since": self.started_at}).scalar_one())
        if self.waiting:
            there = "select pair_id::text from verdict where pair_id = any(cast(:ids as uuid[]))"
            self.waiting -= set(connection.execute(text(there), {"ids": sorted(self.waiting)}).scalars())
        if self.flows_again and not self.waiting:
            self.recovered_s = time.monotonic() - self.started


def watch_for(what: str, in_hand: Sequence[Held]) -> Watched:
    return Watched(what, {pair_id for held in in_hand if held.source == SOURCE for pair_id in held.pair_ids})


def look_at(watched: Collection[Watched], engine: Engine) -> None:
    """Ask after every fault that the site has not recovered from."""
    if still := [one for one in watched if one.recovered_s is None]:
        with engine.connect() as connection:
            for one in still:
                one.look(connection)
