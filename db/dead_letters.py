"""Dead letters: the rows of `verdict` that are `failed`. Found, handed over again (redriven), or given up (dropped).

A redriven row stays `failed`, with the flag `redriven` and the id of its new message, until that message's verdict
replaces it. So a row is under way as long as its message is in the outbox.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from db.verdicts import REDRIVEN, count_into_runs

#: What a dropped pair is `rejected` with.
DROPPED = "dropped"


@dataclass(frozen=True)
class Selection:
    """Which failed pairs: those that failed before a moment, and of them those that meet all that is given."""

    before: datetime
    since: datetime | None = None
    code: str | None = None
    run_id: UUID | None = None
    source: str | None = None
    ref: str | None = None
    pair_ids: Sequence[UUID] | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def where(self) -> str:
        """Of the given conditions alone, so that each query has the plan that fits them."""
        return " and ".join(["v.status = 'failed'", *(CONDITIONS[name] for name in self.given)])


CONDITIONS = {
    # What has failed was submitted before, but for clocks that differ: later months are not even looked at.
    "before": "v.decided_at < :before and v.submitted_at < :before + interval '1 day'",
    # It may have waited long, so that this says nothing about the month.
    "since": "v.decided_at >= :since",
    "code": "v.error_code = :code",
    "run_id": "v.run_id = :run_id",
    "source": "v.source = :source",
    "ref": "v.ref = :ref",
    "pair_ids": "v.pair_id = any (:pair_ids)",
}

FAILED = f"""
(select v.*, o.attempts as attempt, o.last_error,
        case when o.message_id is not null then 'under way'
             when v.image is null or v.text is null then 'incomplete'
             else 'dead' end as state
 from verdict v left join outbox o on o.message_id = v.message_id and '{REDRIVEN}' = any (v.flags)) as v
"""

GROUPS = f"""
select v.error_code, v.source, v.run_id, r.name as run_name, count(*) as pairs,
       count(*) filter (where v.state = 'under way') as under_way,
       count(*) filter (where v.state = 'incomplete') as incomplete,
       min(v.decided_at) as oldest, max(v.decided_at) as newest,
       -- The newest one, as a whole.
       max(array[cast(v.decided_at as text), coalesce(v.ref, cast(v.pair_id as text)), v.error_detail]) as example
from {FAILED} left join run r on r.id = v.run_id
where {{where}}
group by v.error_code, v.source, v.run_id, r.name order by pairs desc, newest desc
"""


def now(connection: Connection) -> datetime:
    """The database's clock, by which ages count."""
    moment: datetime = connection.execute(text("select now()")).scalar_one()
    return moment


def groups(connection: Connection, selection: Selection) -> list[dict[str, Any]]:
    """How many pairs failed by code, source and run, since when, and the newest one of each as an example."""
    found = connection.execute(text(GROUPS.format(where=selection.where)), selection.given).mappings()
    return [{**row, "example": row["example"][1], "detail": row["example"][2]} for row in found]


PAIRS = f"""
select v.pair_id, v.submitted_at, v.decided_at, v.source, v.ref, v.run_id, v.lane, v.error_code, v.error_detail,
       v.attempts, v.state
from {FAILED}
where {{where}} order by v.decided_at desc, v.submitted_at desc, v.pair_id desc limit :limit
"""


def newest(connection: Connection, selection: Selection, limit: int) -> list[dict[str, Any]]:
    """The pairs that failed last, one by one."""
    found = connection.execute(text(PAIRS.format(where=selection.where)), {**selection.given, "limit": limit})
    return [dict(row) for row in found.mappings()]


def pair_ids(connection: Connection, selection: Selection) -> set[UUID]:
    """The ids of all that is selected: for selections that name pairs."""
    statement = text(f"select distinct v.pair_id from verdict v where {selection.where}")
    return set(connection.execute(statement, selection.given).scalars())


FIND = f"""
select v.*, s.tries as lone_tries, s.tried_at as last_lone_try
from {FAILED} left join suspect s on s.submitted_at = v.submitted_at and s.pair_id = v.pair_id
where v.pair_id = :pair_id and v.status = 'failed' order by v.submitted_at desc
"""


def find(connection: Connection, pair_id: UUID) -> list[dict[str, Any]]:
    """All that is known of a failed pair, for each moment that it was submitted at, the newest first.

    `attempt` and `last_error` are those of a redrive that is under way.
    """
    return [dict(row) for row in connection.execute(text(FIND), {"pair_id": pair_id}).mappings()]


@dataclass(frozen=True)
class DeadLetter:
    """A failed row, locked by the transaction that took it."""

    submitted_at: datetime
    pair_id: UUID
    decided_at: datetime
    source: str
    ref: str | None
    run_id: UUID | None
    message_id: UUID
    lane: str
    image: str | None
    text: str | None
    premise: str | None
    policy: str | None
    attributes: Mapping[str, Any]
    flags: Sequence[str]
    is_under_way: bool = False

    @property
    def is_incomplete(self) -> bool:
        """Whether its picture's address or its text is not there: erased, or never stored."""
        return self.image is None or self.text is None


TAKE = """
select v.submitted_at, v.pair_id, v.decided_at, v.source, v.ref, v.run_id, v.message_id, v.lane, v.image, v.text,
       v.premise, v.policy, v.attributes, v.flags
from verdict v
where {where}
order by v.decided_at, v.submitted_at, v.pair_id limit :limit for update skip locked
"""


def take(connection: Connection, selection: Selection, after: DeadLetter | None, limit: int) -> list[DeadLetter]:
    """Lock the next failed rows behind `after`, the oldest failures first, but for those that somebody else holds."""
    where, given = selection.where, {**selection.given, "limit": limit}
    if after:
        where += " and (v.decided_at, v.submitted_at, v.pair_id) > (:decided_at, :submitted_at, :pair_id)"
        given |= {"decided_at": after.decided_at, "submitted_at": after.submitted_at, "pair_id": after.pair_id}
    taken = connection.execute(text(TAKE.format(where=where)), given).all()
    # Asked once the rows are locked: what others have handed over until then is seen, and nobody can from now on.
    redriven = [row.message_id for row in taken if REDRIVEN in row.flags]
    there = text("select message_id from outbox where message_id = any (:message_ids)")
    waiting = set(connection.execute(there, {"message_ids": redriven}).scalars()) if redriven else set()
    return [
        DeadLetter(**row._mapping, is_under_way=REDRIVEN in row.flags and row.message_id in waiting) for row in taken
    ]


MARK = f"""
update verdict set message_id = :message_id, flags = array_append(array_remove(flags, '{REDRIVEN}'), '{REDRIVEN}')
where submitted_at = :submitted_at and pair_id = any (:pair_ids) and status = 'failed'
"""


def mark(connection: Connection, messages: Mapping[UUID, Sequence[DeadLetter]]) -> None:
    """Note in rows that were taken which message carries them now; the caller adds those to the outbox."""
    rows = [
        {
            "message_id": message_id,
            "submitted_at": carried[0].submitted_at,
            "pair_ids": [one.pair_id for one in carried],
        }
        for message_id, carried in messages.items()
    ]
    if rows:
        connection.execute(text(MARK), rows)


DROP = f"""
update verdict set
    status = 'rejected', error_code = '{DROPPED}', error_detail = concat_ws(': ', error_code, error_detail),
    flags = array_remove(flags, '{REDRIVEN}'), decided_at = now()
where submitted_at = :submitted_at and pair_id = any (:pair_ids) and status = 'failed'
"""


def drop(connection: Connection, letters: Sequence[DeadLetter]) -> None:
    """Give up rows that were taken: they are `rejected`, their runs count them so, and the detail keeps the error."""
    at: dict[datetime, list[UUID]] = defaultdict(list)
    changed: dict[UUID | None, Counter[str]] = defaultdict(Counter)
    for letter in letters:
        at[letter.submitted_at].append(letter.pair_id)
        changed[letter.run_id].update({"rejected": 1, "failed": -1})
    if at:
        connection.execute(text(DROP), [{"submitted_at": when, "pair_ids": ids} for when, ids in at.items()])
        count_into_runs(connection, changed)
