"""The wire contract: task `concord.moderate`, one JSON argument, 1 to 256 pairs.

    {"v": 1, "message_id": uuid, "submitted_at": iso time with zone, "run_id": uuid | null, "source": "default",
     "fresh": false, "attempts": 0,
     "pairs": [{"id": uuid, "ref": "sku-1", "image": "s3://bucket/key", "text": "...", "premise": null,
                "policy": "catalog", "attributes": {}}]}

A later attempt adds `replaced`: ids of pairs in whose strings an earlier one replaced characters.

Unknown fields are ignored, so that an old worker reads a newer producer's message; an unknown `v` is refused, so
that it never guesses. The envelope stands or falls as a whole (`MessageRejected`), but each pair is read on its
own: a pair that cannot be read becomes a `RefusedPair` and its neighbours are judged.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID, uuid5

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from worker.errors import ErrorCode, MessageRejected, PairRejected

TASK_NAME = "concord.moderate"
VERSION = 1
#: Pairs in one message. A message is settled in one transaction and held in memory whole.
MAX_PAIRS_PER_MESSAGE = 256
#: Characters of a text that are accepted; what the model reads is far less, and is flagged as cut.
MAX_TEXT_CHARS = 200_000
#: A producer's clock may be this far ahead of the worker's.
MAX_CLOCK_AHEAD = timedelta(hours=1)
#: Objects and arrays may stand this deep inside `attributes`.
MAX_ATTRIBUTE_DEPTH = 20
#: Values that a pair may hold with all its attributes: ten megabytes of empty lists are millions, and minutes of work.
MAX_PAIR_VALUES = 10_000
REPLACEMENT = "\ufffd"
#: Flag of the verdict of a pair in whose strings NUL or lone surrogates were replaced.
TEXT_REPLACED = "text_replaced"

#: Characters of a source or of a policy's name.
MAX_NAME_CHARS = 200

Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]


def read_time(value: object) -> object:
    """A moment from its ISO form alone: of a number nobody can say whether it counts seconds or milliseconds."""
    if (isinstance(value, str) and "-" not in value) or isinstance(value, int | float):
        raise ValueError("write the time as 2026-01-31T12:00:00+00:00")
    return value


def read_uuid(value: object) -> object:
    """A UUID in any spelling that Python and Postgres take, which are more than pydantic's."""
    return as_uuid(value) or value


def read_uuids(value: object) -> object:
    """Those of a list that are UUIDs: a worker's mark that somebody else set is no reason to refuse a message."""
    listed = value[:MAX_PAIRS_PER_MESSAGE] if isinstance(value, list) else []
    return [one for one in map(as_uuid, listed) if one]


Id = Annotated[UUID, BeforeValidator(read_uuid)]


class Pair(BaseModel):
    """One image and the text that is checked against it.

    `image` is an S3 address. `premise` is an optional second text that is taken as true. `policy` names the rule
    that turns probabilities into a decision. `attributes` (category, seller ...) travel into the verdict's row.
    A pair without an `id` is given one; `ref` is the caller's own name for it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    image: Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
    text: Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
    id: Id | None = None
    ref: Annotated[str, StringConstraints(max_length=1_000)] | None = None
    premise: Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)] | None = None
    policy: Name = "catalog"
    attributes: dict[str, JsonValue] = Field(default_factory=dict)


class Envelope(BaseModel):
    """A message's own fields; the pairs are read one by one."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    message_id: Id
    submitted_at: Annotated[datetime, BeforeValidator(read_time)]
    run_id: Id | None = None
    source: Name = "default"
    fresh: Annotated[bool, Field(strict=True)] = False
    attempts: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 0
    replaced: Annotated[list[UUID], BeforeValidator(read_uuids)] = Field(default_factory=list)
    pairs: list[Any]


@dataclass(frozen=True)
class RefusedPair:
    """A pair that could not be read, with as much of it as could be."""

    id: UUID
    error: PairRejected
    ref: str | None = None
    image: str | None = None
    text: str | None = None
    policy: str | None = None


@dataclass(frozen=True)
class Message:
    """A message as read: every pair has an id, and every pair that was sent is in exactly one of the three tuples.

    `replaced` holds the ids of pairs in whose strings NUL or lone surrogates, which neither Postgres nor a
    tokenizer takes, became U+FFFD.
    """

    message_id: UUID
    submitted_at: datetime
    pairs: tuple[Pair, ...]
    run_id: UUID | None = None
    source: str = "default"
    fresh: bool = False
    attempts: int = 0
    refused: tuple[RefusedPair, ...] = ()
    duplicates: tuple[RefusedPair, ...] = ()
    replaced: frozenset[UUID] = frozenset()

    def again(self, pair_ids: Iterable[UUID]) -> "Message":
        """The message of the next attempt: only these pairs, ids spelt out since positions have changed."""
        wanted = set(pair_ids)
        kept = tuple(pair for pair in self.pairs if pair.id in wanted)
        marked = self.replaced & wanted
        return replace(self, pairs=kept, attempts=self.attempts + 1, refused=(), duplicates=(), replaced=marked)


def encode(message: Message) -> dict[str, Any]:
    """The message's JSON argument."""
    replaced = {"replaced": sorted(map(str, message.replaced))} if message.replaced else {}
    return {
        "v": VERSION,
        "message_id": str(message.message_id),
        "submitted_at": message.submitted_at.isoformat(),
        "run_id": str(message.run_id) if message.run_id else None,
        "source": message.source,
        "fresh": message.fresh,
        "attempts": message.attempts,
        **replaced,
        "pairs": [pair.model_dump(mode="json") for pair in message.pairs],
    }


def decode(payload: object, *, now: datetime, oldest: datetime, default_id: UUID | None = None) -> Message:
    """Read a message's JSON argument.

    `oldest` is the first moment for which verdicts can be stored; `default_id` (Celery's task id) stands in for a
    missing `message_id`. Raises MessageRejected when the envelope cannot be read.
    """
    if not isinstance(payload, Mapping):
        raise MessageRejected(ErrorCode.INVALID_MESSAGE, f"expected one JSON object, got {type(payload).__name__}")
    if payload.get("v") != VERSION or isinstance(payload.get("v"), bool):
        raise MessageRejected(
            ErrorCode.UNKNOWN_VERSION, f"message version {payload.get('v')!r:.50}; this worker reads version {VERSION}"
        )
    fields = {name: clean_string(value) for name, value in payload.items() if name in Envelope.model_fields}
    if fields.get("message_id") is None:
        fields["message_id"] = default_id
    try:
        envelope = Envelope.model_validate(fields)
    except ValidationError as error:
        raise MessageRejected(ErrorCode.INVALID_MESSAGE, first_problem(error)) from None
    if len(envelope.pairs) > MAX_PAIRS_PER_MESSAGE:
        raise MessageRejected(
            ErrorCode.TOO_MANY_PAIRS, f"{len(envelope.pairs)} pairs; a message holds at most {MAX_PAIRS_PER_MESSAGE}"
        )
    if not envelope.pairs:
        raise MessageRejected(ErrorCode.INVALID_MESSAGE, "pairs: the list is empty")
    check_time(envelope.submitted_at, now=now, oldest=oldest)
    return read_pairs(envelope)


def check_time(submitted_at: datetime, *, now: datetime, oldest: datetime) -> None:
    """`submitted_at` is half of a verdict's key and picks its partition, so it must be a plausible moment."""
    if submitted_at.tzinfo is None:
        raise MessageRejected(ErrorCode.SUBMITTED_AT_OUT_OF_RANGE, "submitted_at has no time zone: write +00:00")
    if submitted_at > now + MAX_CLOCK_AHEAD:
        raise MessageRejected(
            ErrorCode.SUBMITTED_AT_OUT_OF_RANGE, f"submitted_at {submitted_at.isoformat()} is more than an hour ahead"
        )
    if submitted_at < oldest:
        raise MessageRejected(
            ErrorCode.SUBMITTED_AT_OUT_OF_RANGE,
            f"submitted_at {submitted_at.isoformat()} is before {oldest.isoformat()}, the oldest month that is kept",
        )


def read_pairs(envelope: Envelope) -> Message:
    """Read each pair on its own; an id that stood before in the message is judged once."""
    pairs: dict[UUID, Pair] = {}
    refused: dict[UUID, RefusedPair] = {}
    duplicates: list[RefusedPair] = []
    replaced = set(envelope.replaced)
    for position, raw in enumerate(envelope.pairs):
        pair_id = None
        try:
            pair_id = read_id(raw) or id_at(envelope, position)
            if pair_id in pairs or pair_id in refused:
                raise PairRejected(ErrorCode.DUPLICATE_ID, f"{pair_id} stands twice in this message")
            cleaned = clean(raw)
            pair = read_pair(cleaned)
            pairs[pair_id] = pair if pair.id == pair_id else pair.model_copy(update={"id": pair_id})
            if cleaned != raw:
                replaced.add(pair_id)
        except PairRejected as error:
            pair_id = pair_id or id_at(envelope, position)
            it = describe(pair_id, error, raw)
            if pair_id in pairs or pair_id in refused:
                duplicates.append(it)
            else:
                refused[pair_id] = it
    return Message(
        message_id=envelope.message_id,
        submitted_at=envelope.submitted_at,
        pairs=tuple(pairs.values()),
        run_id=envelope.run_id,
        source=envelope.source,
        fresh=envelope.fresh,
        attempts=envelope.attempts,
        refused=tuple(refused.values()),
        duplicates=tuple(duplicates),
        replaced=frozenset(replaced & pairs.keys()),
    )


def id_at(envelope: Envelope, position: int) -> UUID:
    """The id that follows from a pair's place in its message."""
    return uuid5(envelope.message_id, str(position))


def read_id(raw: object) -> UUID | None:
    """The pair's own id, if it has one. Raises PairRejected where that is none."""
    given = raw.get("id") if isinstance(raw, Mapping) else None
    if given is None:
        return None
    try:
        return UUID(given)
    except (ValueError, AttributeError, TypeError):
        raise PairRejected(ErrorCode.INVALID_ID, f"id {given!r:.80} is not a UUID") from None


def read_pair(raw: object) -> Pair:
    """One pair of the list, its strings already cleaned. Raises PairRejected."""
    try:
        pair = Pair.model_validate(raw)
    except ValidationError as error:
        raise PairRejected(ErrorCode.INVALID_PAIR, first_problem(error)) from None
    if not pair.text.strip():
        raise PairRejected(ErrorCode.TEXT_EMPTY, "the text is empty or only spaces")
    return pair


def describe(pair_id: UUID, error: PairRejected, raw: object) -> RefusedPair:
    """What can be said of a pair that was refused."""
    fields = raw if isinstance(raw, Mapping) else {}

    def text_of(name: str) -> str | None:
        value = fields.get(name)
        return str(clean_string(value))[:2_000] if isinstance(value, str) else None

    return RefusedPair(pair_id, error, *(text_of(name) for name in ("ref", "image", "text", "policy")))


def check_size(raw: object) -> None:
    """Raises PairRejected where a pair holds more values than are gone through."""
    count, inside = 0, [raw]
    while inside:
        value = inside.pop()
        if isinstance(value, Mapping | list):
            count += len(value)
            if count > MAX_PAIR_VALUES:
                raise PairRejected(ErrorCode.INVALID_PAIR, f"more than {MAX_PAIR_VALUES} values in one pair")
            inside += value.values() if isinstance(value, Mapping) else value


def clean(value: object, depth: int = 0) -> object:
    """A pair with every string cleaned; raises PairRejected where it is too large, nested too deep, or not JSON."""
    if depth == 0:
        check_size(value)
    if depth > MAX_ATTRIBUTE_DEPTH:
        raise PairRejected(ErrorCode.INVALID_PAIR, f"attributes: nested deeper than {MAX_ATTRIBUTE_DEPTH}")
    if isinstance(value, Mapping):
        return {clean_string(key): clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, float):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise PairRejected(ErrorCode.INVALID_PAIR, f"{value} is not a JSON number") from None
    return clean_string(value)


def as_uuid(value: object) -> UUID | None:
    """The UUID that a string spells, if it does."""
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


def clean_string(value: Any) -> Any:
    """NUL and lone surrogates become U+FFFD; anything but a string is returned as it is."""
    if not isinstance(value, str) or (value.isascii() and "\0" not in value):
        return value
    return value.replace("\0", REPLACEMENT).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def first_problem(error: ValidationError) -> str:
    """`field: what is wrong`, of the first thing that is."""
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'pair'}: {problem['msg']}"
