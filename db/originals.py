"""Verdicts that answer for equal content: those that a model made, by their content's hash.

A verdict that was itself answered from another is flagged and answers nobody, so that the age of an answer is always
that of its original.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, text

#: Flag of a verdict whose scores are another's, of the same content.
REUSED = "reused"

#: As the index `verdict_content_hash` has it.
IS_ORIGINAL = f"content_hash is not null and status = 'judged' and not ('{REUSED}' = any (flags))"

#: The newest of each hash: whoever asked for a new judgement wants it to count from then on. By its time a producer's
#: clock may be an hour ahead (worker.messages.MAX_CLOCK_AHEAD); the bounds are what keeps the other months unread.
FIND = f"""
select asked.content_hash, one.label, one.answer, one.p_entailment, one.p_contradiction, one.p_neutral
from unnest(cast(:hashes as bytea[])) as asked (content_hash)
cross join lateral (
    select label, answer, p_entailment, p_contradiction, p_neutral
    from verdict
    where verdict.content_hash = asked.content_hash and {IS_ORIGINAL}
      and submitted_at > now() - cast(:days as float8) * interval '1 day'
      and submitted_at < now() + interval '2 hours'
      and decided_at > now() - cast(:days as float8) * interval '1 day'
      and model_version_id = :model_version_id
    order by submitted_at desc
    limit 1
) as one
"""


def find(
    connection: Connection, hashes: Collection[bytes], *, days: float, model_version_id: int
) -> dict[bytes, dict[str, Any]]:
    """By content hash what this model said within the last `days`, where it did: label, answer and probabilities."""
    parameters = {"hashes": list(hashes), "days": days, "model_version_id": model_version_id}
    return {row["content_hash"]: dict(row) for row in connection.execute(text(FIND), parameters).mappings()}


#: Every month has its part of the index, ready to be used.
IS_INDEXED = """
select to_regclass('verdict_content_hash') is not null and not exists (
    select from pg_inherits as month where month.inhparent = 'verdict'::regclass and not exists (
        select from pg_index as part join pg_inherits as of on of.inhrelid = part.indexrelid
        where part.indrelid = month.inhrelid and part.indisvalid
          and of.inhparent = to_regclass('verdict_content_hash')))
"""


def is_indexed(connection: Connection) -> bool:
    """Whether originals are found without reading whole months: migration 0007 has come to its end."""
    return bool(connection.execute(text(IS_INDEXED)).scalar_one())
