"""Erasing one ref: what the producer wrote about it goes, keys and hashes stay, so that counts and reuse stay true.

Text, premise, both as scored, the picture's address, attributes and the details of errors are taken for personal: the
producer wrote them, or they quote it. Ids, the ref, labels, scores, decisions, times, the picture's hash, ETag and
size, and the content hash stay.
"""

import json
import re
from collections.abc import Iterator, Sequence
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

#: By the ids of the ref's verdicts, or because their bodies name the ref.
REJECTED = """
update rejected_message set body = '', error_detail = :erased
where (source = :source or source is null) and body <> ''
  and (pair_ids && array(select pair_id from verdict where source = :source and ref = :ref) or id = any(:ids))
"""

#: Bodies that could name the ref, to be read. Who wrote them is not known, so that any character may be spelt with a
#: backslash, or in two or four bytes.
MAY_NAME = """
select id, body from rejected_message
where (source = :source or source is null)
  and (position(:backslash in body) > 0 or position(:nul in body) > 0
       or position(:utf_8 in body) > 0 or position(:latin_1 in body) > 0)
"""
#: Bodies, of up to a megabyte each, that are read at a time.
BODIES_PER_PAGE = 20

#: A field `ref` with its value in what is no JSON, such as a body that was cut, the repr of a dict, or YAML.
REF_FIELD = re.compile(
    r"""(?<!\w)(["']?)ref\1\s*[:=]\s*(?:"((?:[^"\\]|\\.)*)|'((?:[^'\\]|\\.)*)|([^\s"',;&}\]]+))""", re.DOTALL
)
#: What no text holds.
BINARY = re.compile(rb"[\0-\x08\x0e-\x1f]")

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
    named_in = {"ids": list(naming(connection, source, ref))}
    rows["rejected_message"] = connection.execute(text(REJECTED), {**named, **named_in}).rowcount
    for table, statement in (("verdict", VERDICTS), ("catalog_state", STATE), ("catalog_item", ITEM)):
        rows[table] = connection.execute(text(statement), named).rowcount
    left = connection.execute(text(IN_WORK), spelt).all()
    places = [pairs_of(row, source, ref) for row in left]
    return Erasure(rows, sum(1 if one is None else len(one) for one in places))


def naming(connection: Connection, source: str, ref: str) -> Iterator[int]:
    """The ids of the rejected messages that name the ref."""
    spelt = {"utf_8": ref.encode(), "latin_1": ref.encode("latin-1", "ignore") or ref.encode()}
    parameters = {"source": source, "backslash": b"\\", "nul": b"\0", **spelt}
    statement = text(MAY_NAME).execution_options(yield_per=BODIES_PER_PAGE)
    for row in connection.execute(statement, parameters):
        if names(bytes(row.body), source, ref):
            yield row.id


def names(body: bytes, source: str, ref: str) -> bool:
    """Whether a body has the ref as the value of a field `ref`, and does not say that it is of another source.

    `attributes` are the producer's own, whatever their names are. In a body that is neither JSON nor text nobody can
    tell a name from a value: there the ref anywhere will do.
    """
    try:
        # Objects as tuples of their fields, so that one that stands twice is seen twice.
        read = json.loads(body, object_pairs_hook=tuple, strict=False)
    except (ValueError, RecursionError):
        written = {body.decode(encoding, "replace") for encoding in ("utf-8", "latin-1")}
        is_named = any(ref in values_of(found) for one in written for found in REF_FIELD.finditer(one))
        return is_named or (BINARY.search(body) is not None and ref.encode() in body)
    if isinstance(read, str):
        return names(read.encode("utf-8", "surrogatepass"), source, ref)
    left: list[Any] = [read]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, tuple) and not is_of_another(value, source):
            if any(name == "ref" and is_ref(inside, ref) for name, inside in value):
                return True
            left += [inside for name, inside in value if name != "attributes"]
    return False


def is_of_another(fields: tuple[tuple[str, Any], ...], source: str) -> bool:
    """Whether these are of a message that says that it is of another source."""
    said = [value for name, value in fields if name == "source" and isinstance(value, str)]
    return bool(said) and source not in said and any(name == "pairs" for name, _ in fields)


def is_ref(value: object, ref: str) -> bool:
    """Also a number, by which a producer may call a pair, and a string with NUL or half a character in it, which is
    stored with U+FFFD in their places.
    """
    if isinstance(value, str):
        return ref in (value, re.sub("[\0\ud800-\udfff]", "\ufffd", value))
    return isinstance(value, int) and str(value) == ref


def values_of(found: re.Match[str]) -> set[str]:
    """What the value of a field may stand for: as it is, and with JSON's escapes or Python's undone."""
    value = next(group for group in found.groups()[1:] if group is not None)
    readings = {value, re.sub(r"\\(.)", r"\1", value)}
    try:
        return {*readings, str(json.loads(f'"{value}"', strict=False))}
    except ValueError:
        return readings


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
    """The places of the ref's pairs in a message; None for one that names it and cannot be read: it will be recorded
    as rejected.
    """
    try:
        body = json.loads(bytes(row.body))
        datetime.fromisoformat(body["submitted_at"])
        list_of_pairs: list[Any] = body["pairs"]
        if not isinstance(list_of_pairs, list):
            raise TypeError
    except (ValueError, RecursionError, KeyError, TypeError):
        return None if names(bytes(row.body), source, ref) else []
    if body.get("source", "default") != source:
        return []
    return [place for place, pair in enumerate(list_of_pairs) if isinstance(pair, dict) and pair.get("ref") == ref]


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
