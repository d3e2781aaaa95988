"""Erasing one ref: what the producer wrote about it goes, keys and hashes stay, so that counts and reuse stay true.

Text, premise, both as scored, the picture's address, attributes and the details of errors are taken for personal: the
producer wrote them, or they quote it. Ids, the ref, labels, scores, decisions, times, the picture's hash, ETag and
size, and the content hash stay.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from db.verdicts import Settlement, Verdict, settle

#: Flag of a verdict whose texts are gone.
ERASED = "erased"
#: A pair that is erased before it was judged is rejected with this code.
REVOKED = "revoked"

#: What goes, by table, of those that have a row for each ref; a test holds every declared table against this.
GOES = {
    "verdict": {"image", "text", "premise", "attributes", "error_detail", "text_scored", "premise_scored"},
    "catalog_state": {"attributes"},
}
#: Tables of which the whole row goes: the next night would judge it anew and bring the text back.
GOES_WHOLE = {"catalog_item"}

VERDICTS = """
update verdict set
    image = null, text = null, premise = null, text_scored = null, premise_scored = null, error_detail = null,
    attributes = '{}', flags = array_append(array_remove(flags, :erased), :erased)
where source = :source and ref = :ref
  and (num_nonnulls(image, text, premise, text_scored, premise_scored, error_detail) > 0 or attributes <> '{}')
"""

STATE = "update catalog_state set attributes = '{}' where source = :source and ref = :ref and attributes <> '{}'"

ITEM = "delete from catalog_item where source = :source and ref = :ref"

#: By the ids of the ref's verdicts, or by the ref's name in the body, as JSON writes it with and without \\u.
REJECTED = """
update rejected_message set body = '', error_detail = :erased
where (source = :source or source is null) and body <> ''
  and (pair_ids && array(select pair_id from verdict where source = :source and ref = :ref)
       or position(:plain in body) > 0 or position(:escaped in body) > 0)
"""

#: A row that the relay has locked is as good as published.
WAITING = """
select message_id, lane, attempts, body from outbox
where published_at is null and (position(:plain in body) > 0 or position(:escaped in body) > 0)
order by message_id for update skip locked
"""

IN_WORK = """
select message_id, lane, attempts, body from outbox
where position(:plain in body) > 0 or position(:escaped in body) > 0
"""


@dataclass(frozen=True)
class Erasure:
    """Rows changed, by table.

    `in_work` counts pairs that workers have, and messages that name the ref and cannot be read: what workers write of
    them is to be erased again.
    """

    rows: dict[str, int]
    in_work: int


def erase(connection: Connection, source: str, ref: str) -> Erasure:
    """Erase a ref inside the caller's transaction, as the owner. Doing it again is harmless."""
    spelt = {"plain": json.dumps(ref, ensure_ascii=False).encode(), "escaped": json.dumps(ref).encode()}
    named = {"source": source, "ref": ref, "erased": ERASED}
    rows = {"outbox": take_back(connection, source, ref, spelt)}
    rows["rejected_message"] = connection.execute(text(REJECTED), {**named, **spelt}).rowcount
    for table, statement in (("verdict", VERDICTS), ("catalog_state", STATE), ("catalog_item", ITEM)):
        rows[table] = connection.execute(text(statement), named).rowcount
    left = connection.execute(text(IN_WORK), spelt).all()
    places = [pairs_of(row, source, ref) for row in left]
    return Erasure(rows, sum(1 if one is None else len(one) for one in places))


def take_back(connection: Connection, source: str, ref: str, spelt: dict[str, bytes]) -> int:
    """Pairs that no worker has yet leave their messages and are settled as revoked; returns how many."""
    taken = 0
    for row in connection.execute(text(WAITING), spelt).all():
        places = pairs_of(row, source, ref)
        if not places:
            continue
        body = json.loads(bytes(row.body))
        verdicts = [verdict_of(row, body, place) for place in places]
        # Ids that come from a place are spelt out, since the places change.
        kept = [
            {**pair, "id": str(id_of(row, pair, place))} if isinstance(pair, dict) and pair.get("id") is None else pair
            for place, pair in enumerate(body["pairs"])
            if place not in places
        ]
        try:
            with connection.begin_nested():
                settle(connection, Settlement(verdicts, done=[] if kept else [(row.message_id, row.attempts)]))
        except DBAPIError:
            # There is no month for it any more: a worker will refuse the message, and record it.
            continue
        if kept:
            statement = text("update outbox set body = :body, last_error = null where message_id = :message_id")
            new = json.dumps({**body, "pairs": kept}).encode()
            connection.execute(statement, {"body": new, "message_id": row.message_id})
        taken += len(places)
    return taken


def pairs_of(row: Any, source: str, ref: str) -> Sequence[int] | None:
    """The places of the ref's pairs in a message; None for one that cannot be read: it will be recorded as rejected."""
    try:
        body = json.loads(bytes(row.body))
        datetime.fromisoformat(body["submitted_at"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("pairs"), list):
        return None
    if body.get("source", "default") != source:
        return []
    return [place for place, pair in enumerate(body["pairs"]) if isinstance(pair, dict) and pair.get("ref") == ref]


def id_of(row: Any, pair: dict[str, Any], place: int) -> UUID:
    """As worker.messages gives it where the producer gave none that can be read."""
    try:
        return UUID(pair["id"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return uuid5(row.message_id, str(place))


def verdict_of(row: Any, body: dict[str, Any], place: int) -> Verdict:
    """The verdict of a pair that is erased before it was judged."""
    pair = body["pairs"][place]
    return Verdict(
        submitted_at=datetime.fromisoformat(body["submitted_at"]),
        pair_id=id_of(row, pair, place),
        source=body.get("source", "default"),
        message_id=row.message_id,
        lane=row.lane,
        status="rejected",
        attempts=row.attempts,
        ref=pair["ref"],
        run_id=UUID(body["run_id"]) if body.get("run_id") else None,
        error_code=REVOKED,
        flags=[ERASED],
    )
