"""One transaction a batch: verdicts in, outbox rows out, run counters up. Rows are touched in that order, sorted."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from db.outbox import OutboxRow, Rejected, forget, record_rejected, retry


@dataclass(frozen=True)
class Verdict:
    """A row of `verdict`; the columns' meanings are in the database's comments."""

    submitted_at: datetime
    pair_id: UUID
    source: str
    message_id: UUID
    lane: str
    status: str
    attempts: int
    ref: str | None = None
    run_id: UUID | None = None
    image: str | None = None
    text: str | None = None
    premise: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    p_entailment: float | None = None
    p_contradiction: float | None = None
    p_neutral: float | None = None
    answer: str | None = None
    policy: str | None = None
    policy_version: int | None = None
    decision: str | None = None
    error_code: str | None = None
    error_detail: str | None = None
    flags: Sequence[str] = ()
    text_scored: str | None = None
    premise_scored: str | None = None
    model_version_id: int | None = None
    image_sha256: bytes | None = None
    image_etag: str | None = None
    image_width: int | None = None
    image_height: int | None = None
    decode_mode: str | None = None
    content_hash: bytes | None = None


@dataclass(frozen=True)
class Settlement:
    """All that one batch changes.

    `done` names the deliveries (message id, attempts) whose pairs are all in `verdicts`; `retries` are the messages
    of the next attempt, for those that are not. `suspected`: tries of these may be counted in `suspect`.
    """

    verdicts: Sequence[Verdict] = ()
    done: Sequence[tuple[UUID, int]] = ()
    retries: Sequence[OutboxRow] = ()
    rejected: Sequence[Rejected] = ()
    suspected: bool = False


COLUMNS = {
    "submitted_at": "timestamptz",
    "pair_id": "uuid",
    "source": "text",
    "ref": "text",
    "run_id": "uuid",
    "message_id": "uuid",
    "lane": "text",
    "image": "text",
    "text": "text",
    "premise": "text",
    "attributes": "jsonb",
    "status": "text",
    "label": "text",
    "p_entailment": "float8",
    "p_contradiction": "float8",
    "p_neutral": "float8",
    "answer": "text",
    "policy": "text",
    "policy_version": "int",
    "decision": "text",
    "error_code": "text",
    "error_detail": "text",
    "flags": "text[]",
    "text_scored": "text",
    "premise_scored": "text",
    "model_version_id": "int",
    "image_sha256": "bytea",
    "image_etag": "text",
    "image_width": "int",
    "image_height": "int",
    "decode_mode": "text",
    "content_hash": "bytea",
    "attempts": "int",
}
NAMES = ", ".join(COLUMNS)
ROWS = f"json_to_recordset(cast(:rows as json)) as new ({', '.join(f'{n} {t}' for n, t in COLUMNS.items())})"

#: What really changed, as the statement before says.
CHANGED = """
select run_id, status, count(*) as rows, count(*) filter (where decision in ('review', 'reject')) as flagged
from changed group by run_id, status
"""

#: A verdict stands once it is written ...
INSERT = text(f"""
with changed as (
    insert into verdict ({NAMES}) select {NAMES} from {ROWS} order by submitted_at, pair_id
    on conflict (submitted_at, pair_id) do nothing
    returning run_id, status, decision)
{CHANGED}
""")

#: Flag of a failed row that waits for the verdict of a redrive, whose message the row then names.
REDRIVEN = "redriven"

#: ... but for `failed`, which gives way to a verdict made later; to another failure only if it is that of the row's own
#: redrive, and then once, since that failure does not carry the flag. The pair stays in the run that counted it.
REPLACE_FAILED = text(f"""
with changed as (
    update verdict set {", ".join(f"{name} = new.{name}" for name in COLUMNS if name != "run_id")}, decided_at = now()
    from {ROWS}
    where verdict.submitted_at = new.submitted_at and verdict.pair_id = new.pair_id and verdict.status = 'failed'
      and (new.status <> 'failed' or (verdict.message_id = new.message_id and '{REDRIVEN}' = any (verdict.flags)))
    returning verdict.run_id, verdict.status, verdict.decision)
{CHANGED}
""")

#: A night is not done with its last pair: its planner goes on (db.nights).
COUNT_INTO_RUN = text("""
update run set
    judged = judged + :judged, rejected = rejected + :rejected, failed = failed + :failed, flagged = flagged + :flagged,
    state = case when state = 'running' and kind <> 'nightly'
                      and judged + rejected + failed + :judged + :rejected + :failed >= planned
                 then 'done' else state end,
    finished_at = case when state = 'running' and kind <> 'nightly'
                            and judged + rejected + failed + :judged + :rejected + :failed >= planned
                       then now() else finished_at end
where id = :run_id
""")


def settle(connection: Connection, settlement: Settlement) -> int:
    """Write one batch's outcome inside the caller's transaction; returns how many verdict rows changed.

    Writing the same settlement again changes nothing and counts nothing, so a message that is delivered twice is
    harmless.
    """
    changed = write(connection, sorted(settlement.verdicts, key=lambda v: (v.submitted_at, v.pair_id)))
    forget(connection, settlement.done)
    retry(connection, settlement.retries)
    for one in record_rejected(connection, settlement.rejected):
        changed.setdefault(one.run_id, Counter())["rejected"] += one.pairs
    count_into_runs(connection, changed)
    return sum(count["rows"] for count in changed.values())


def count_into_runs(connection: Connection, changed: Mapping[UUID | None, Counter[str]]) -> None:
    """Add by run what changed by status, in one order for all who do."""
    for run_id, count in sorted(changed.items(), key=str):
        if run_id is not None:
            counters = {name: count[name] for name in ("judged", "rejected", "failed", "flagged")}
            connection.execute(COUNT_INTO_RUN, {"run_id": run_id, **counters})


def write(connection: Connection, verdicts: Sequence[Verdict]) -> dict[UUID | None, Counter[str]]:
    """Insert the rows, or replace failed ones; returns by run what really changed."""
    changed: dict[UUID | None, Counter[str]] = {}
    if not verdicts:
        return changed
    rows = {"rows": as_json(verdicts)}
    for found in connection.execute(INSERT, rows):
        count_changed(changed, found)
    if sum(count["rows"] for count in changed.values()) < len(verdicts):
        for found in connection.execute(REPLACE_FAILED, rows):
            count_changed(changed, found)["failed"] -= found.rows
    return changed


def count_changed(changed: dict[UUID | None, Counter[str]], found: Any) -> Counter[str]:
    """Add a row of CHANGED to its run's counts, which are returned."""
    count = changed.setdefault(found.run_id, Counter())
    count.update({"rows": found.rows, found.status: found.rows, "flagged": found.flagged})
    return count


def as_json(verdicts: Sequence[Verdict]) -> str:
    """All rows as one parameter: no limit on their number, one plan for every size of batch.

    Nulls are left out: half of what a row could say is not said, and Postgres has less to read.
    """

    def plain(value: object) -> object:
        if isinstance(value, bytes):
            return f"\\x{value.hex()}"
        if isinstance(value, datetime):
            return value.isoformat()
        if isinstance(value, UUID):
            return str(value)
        raise TypeError(f"{type(value).__name__} has no place in a verdict's row")

    rows = [{name: value for name, value in vars(row).items() if value is not None} for row in verdicts]
    return json.dumps(rows, default=plain, allow_nan=False)


#: Everything that explains a verdict to somebody who has only its id or the producer's name for it.
FIND_VERDICTS = """
select v.*, m.name as model_name, m.revision as model_revision, m.recipe as model_recipe, m.prompt, m.image_px
from verdict v left join model_version m on m.id = v.model_version_id
where (v.pair_id = cast(:pair_id as uuid) or (v.ref = :ref and v.source = :source))
order by v.submitted_at desc limit :limit
"""


def find(
    connection: Connection,
    *,
    pair_id: UUID | None = None,
    ref: str | None = None,
    source: str = "default",
    limit: int = 20,
) -> list[dict[str, Any]]:
    """Verdicts of a pair, or of a ref under any run, newest first, with the model that made them."""
    rows = connection.execute(
        text(FIND_VERDICTS), {"pair_id": pair_id, "ref": ref, "source": source, "limit": limit}
    ).mappings()
    return [dict(row) for row in rows]


#: A pair that has no verdict row because its message could not be read.
FIND_REJECTED = """
select received_at, message_id, queue, error_code, error_detail from rejected_message
where pair_ids @> array[cast(:pair_id as uuid)] order by received_at desc limit 20
"""


def find_rejected(connection: Connection, pair_id: UUID) -> list[dict[str, Any]]:
    """Rejected messages that named this pair."""
    return [dict(row) for row in connection.execute(text(FIND_REJECTED), {"pair_id": pair_id}).mappings()]


READ_BACK = """
select pair_id, ref, status, label, p_entailment, p_contradiction, p_neutral, answer, policy, decision,
       error_code, error_detail, flags
from verdict where submitted_at = :submitted_at and pair_id = any(:pair_ids)
"""


def read_back(connection: Connection, submitted_at: datetime, pair_ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """The verdicts that stand for these pairs of one message, in the order asked for, ready for JSON."""
    rows = connection.execute(text(READ_BACK), {"submitted_at": submitted_at, "pair_ids": list(pair_ids)}).mappings()
    by_id = {row["pair_id"]: {**row, "pair_id": str(row["pair_id"])} for row in rows}
    return [by_id[pair_id] for pair_id in pair_ids if pair_id in by_id]
