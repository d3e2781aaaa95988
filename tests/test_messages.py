"""The wire contract: what is read, what is refused and with which code, and that no pair is lost on the way."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid5

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.errors import ErrorCode, MessageRejected
from worker.messages import (
    MAX_ATTRIBUTE_DEPTH,
    MAX_PAIR_VALUES,
    MAX_PAIRS_PER_MESSAGE,
    MAX_TEXT_CHARS,
    Message,
    Pair,
    decode,
    encode,
)

NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)
OLDEST = datetime(2025, 12, 1, tzinfo=UTC)
MESSAGE_ID = UUID("0199c0de-0000-7000-8000-000000000001")
PAIR_ID = UUID("0199c0de-0000-7000-8000-0000000000aa")
REPLACED = "\ufffd"


def pair(**fields: Any) -> dict[str, Any]:
    return {"image": "s3://shop/1.jpg", "text": "a red shoe", **fields}


def payload(*pairs: Any, **fields: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "message_id": str(MESSAGE_ID),
        "submitted_at": "2026-01-15T11:00:00+00:00",
        "pairs": list(pairs or [pair()]),
        **fields,
    }


def read(value: object, default_id: UUID | None = None) -> Message:
    return decode(value, now=NOW, oldest=OLDEST, default_id=default_id)


def read_or_refused(value: object) -> Message | MessageRejected:
    try:
        return read(value)
    except MessageRejected as error:
        return error


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = {"inside": value}
    return value


def test_a_message_in_full_is_read_field_by_field() -> None:
    run_id = "0199c0de-0000-7000-8000-0000000000ff"
    full = pair(
        id=str(PAIR_ID), ref="sku-1", premise="it is a shop", policy="prohibited", attributes={"category": ["shoes"]}
    )
    message = read(payload(full, run_id=run_id, source="emea", fresh=True, attempts=3))
    assert message == Message(
        message_id=MESSAGE_ID,
        submitted_at=datetime(2026, 1, 15, 11, tzinfo=UTC),
        pairs=(
            Pair(
                id=PAIR_ID,
                ref="sku-1",
                image="s3://shop/1.jpg",
                text="a red shoe",
                premise="it is a shop",
                policy="prohibited",
                attributes={"category": ["shoes"]},
            ),
        ),
        run_id=UUID(run_id),
        source="emea",
        fresh=True,
        attempts=3,
    )


def test_what_a_message_may_leave_out_has_a_default() -> None:
    message = read({name: payload()[name] for name in ("v", "message_id", "submitted_at", "pairs")})
    (only,) = message.pairs
    assert (message.run_id, message.source, message.fresh, message.attempts) == (None, "default", False, 0)
    assert (only.ref, only.premise, only.policy, only.attributes) == (None, None, "catalog", {})


def test_a_pair_without_an_id_takes_one_from_the_message_and_its_place() -> None:
    message = read(payload(pair(), pair(id=str(PAIR_ID)), pair(id=None)))
    assert [one.id for one in message.pairs] == [uuid5(MESSAGE_ID, "0"), PAIR_ID, uuid5(MESSAGE_ID, "2")]


def test_celerys_task_id_stands_in_for_a_missing_message_id() -> None:
    without = {name: value for name, value in payload().items() if name != "message_id"}
    assert read(without, default_id=PAIR_ID).message_id == PAIR_ID
    with pytest.raises(MessageRejected, match="message_id"):
        read(without)


def test_an_id_twice_in_a_message_is_judged_once_and_noted_once() -> None:
    twice = [pair(id=str(PAIR_ID), text="the first"), pair(id=str(PAIR_ID).upper(), text="the second")]
    message = read(payload(*twice))
    assert [one.text for one in message.pairs] == ["the first"]
    assert [(d.id, d.text, d.error.code) for d in message.duplicates] == [
        (PAIR_ID, "the second", ErrorCode.DUPLICATE_ID)
    ]


def test_unknown_fields_are_ignored() -> None:
    assert read(payload(pair(colour="red"), shard=7)) == read(payload())


@pytest.mark.parametrize("version", [0, 2, "1", None, True, [1], {}])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(MessageRejected) as caught:
        read(payload(v=version))
    assert caught.value.code is ErrorCode.UNKNOWN_VERSION


def test_a_message_without_a_version_is_refused() -> None:
    with pytest.raises(MessageRejected) as caught:
        read({name: value for name, value in payload().items() if name != "v"})
    assert caught.value.code is ErrorCode.UNKNOWN_VERSION


@pytest.mark.parametrize("value", [None, 5, "text", [], [payload()], True])
def test_an_argument_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(MessageRejected) as caught:
        read(value)
    assert caught.value.code is ErrorCode.INVALID_MESSAGE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("message_id", 5),
        ("message_id", "sku-1"),
        ("run_id", "tonight"),
        ("source", 5),
        ("source", ""),
        ("source", None),
        ("fresh", "yes"),
        ("attempts", -1),
        ("attempts", "3"),
        ("attempts", True),
        ("attempts", 2**40),
        ("submitted_at", None),
        ("submitted_at", "yesterday"),
        ("submitted_at", 1_768_474_800),
        ("submitted_at", "1768474800"),
        ("pairs", None),
        ("pairs", {}),
        ("pairs", "s3://shop/1.jpg"),
        ("pairs", []),
    ],
)
def test_a_field_of_the_wrong_kind_refuses_the_message_and_is_named(field: str, value: object) -> None:
    with pytest.raises(MessageRejected, match=field) as caught:
        read(payload(**{field: value}))
    assert caught.value.code is ErrorCode.INVALID_MESSAGE


@pytest.mark.parametrize(
    "spelt",
    [
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11",
        "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",
        "a0eebc999c0b4ef8bb6d6bb9bd380a11",
        "a0ee-bc99-9c0b-4ef8-bb6d-6bb9-bd38-0a11",
    ],
)
def test_ids_may_be_spelt_in_any_way_that_postgres_takes(spelt: str) -> None:
    message = read(payload(pair(id=spelt), message_id=spelt, run_id=spelt))
    assert {message.message_id, message.run_id, message.pairs[0].id} == {UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")}


@pytest.mark.parametrize("mark", [None, 5, "x", ["x", None, [], str(PAIR_ID)], {}, [str(PAIR_ID)] * 300])
def test_a_workers_mark_that_somebody_else_set_refuses_nothing(mark: object) -> None:
    message = read(payload(pair(id=str(PAIR_ID)), replaced=mark))
    assert [one.id for one in message.pairs] == [PAIR_ID]
    assert message.replaced == ({PAIR_ID} if isinstance(mark, list) else frozenset())


MANY: list[Any] = [[]] * 1_000_000


@pytest.mark.parametrize(
    "field", ["v", "message_id", "submitted_at", "run_id", "source", "fresh", "attempts", "replaced", "pairs", "other"]
)
def test_a_million_values_in_a_field_of_the_message_are_not_gone_through(field: str) -> None:
    found = read_or_refused(payload(**{field: MANY}))
    if isinstance(found, MessageRejected):
        assert field in found.detail or field in ("v", "pairs")
        assert len(found.detail) < 300
    else:
        assert found.pairs


@pytest.mark.parametrize("attributes", [{"a": MANY}, {"a": [MANY]}, {str(n): n for n in range(MAX_PAIR_VALUES + 1)}])
def test_a_pair_of_very_many_values_is_refused_alone(attributes: dict[str, Any]) -> None:
    message = read(payload(pair(attributes=attributes), pair(attributes={"a": [0] * 9_000})))
    (refused,) = message.refused
    assert (refused.error.code, len(message.pairs)) == (ErrorCode.INVALID_PAIR, 1)
    assert "more than 10000 values" in refused.error.detail


def test_a_message_holds_at_most_256_pairs() -> None:
    assert MAX_PAIRS_PER_MESSAGE == 256
    assert len(read(payload(*[pair()] * 256)).pairs) == 256
    with pytest.raises(MessageRejected, match="257") as caught:
        read(payload(*[pair()] * 257))
    assert caught.value.code is ErrorCode.TOO_MANY_PAIRS


@pytest.mark.parametrize(
    ("submitted_at", "why"),
    [
        ("2026-01-15T11:00:00", "time zone"),
        ("2026-01-15", "time zone"),
        ("2099-01-01T00:00:00+00:00", "ahead"),
        ((NOW + timedelta(hours=1, microseconds=1)).isoformat(), "ahead"),
        ((OLDEST - timedelta(microseconds=1)).isoformat(), "oldest"),
        ("0001-01-01T00:00:00+23:59", "oldest"),
        ("9999-12-31T23:59:59-23:59", "ahead"),
    ],
)
def test_a_time_that_verdicts_cannot_be_stored_for_is_refused(submitted_at: str, why: str) -> None:
    with pytest.raises(MessageRejected, match=why) as caught:
        read(payload(submitted_at=submitted_at))
    assert caught.value.code is ErrorCode.SUBMITTED_AT_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("submitted_at", "moment"),
    [
        ((NOW + timedelta(hours=1)).isoformat(), NOW + timedelta(hours=1)),
        (OLDEST.isoformat(), OLDEST),
        ("2026-01-15T11:00:00Z", NOW - timedelta(hours=1)),
        ("2026-01-15T12:00:00+01:00", datetime(2026, 1, 15, 12, tzinfo=timezone(timedelta(hours=1)))),
        ("2026-01-15T11:00:00.123456Z", NOW - timedelta(hours=1) + timedelta(microseconds=123_456)),
    ],
)
def test_a_time_at_the_edge_or_in_another_zone_is_read(submitted_at: str, moment: datetime) -> None:
    assert read(payload(submitted_at=submitted_at)).submitted_at == moment


@pytest.mark.parametrize(
    ("bad", "clean"),
    [
        ({"text": "a\0b"}, {"text": f"a{REPLACED}b"}),
        ({"text": "a\ud800b"}, {"text": f"a{REPLACED}b"}),
        ({"ref": "\udfffsku"}, {"ref": f"{REPLACED}sku"}),
        ({"image": "s3://shop/\0.jpg"}, {"image": f"s3://shop/{REPLACED}.jpg"}),
        ({"attributes": {"a\0": [{"b\ud800": 1}]}}, {"attributes": {f"a{REPLACED}": [{f"b{REPLACED}": 1}]}}),
        ({"attributes": {"a": {"b": ["c\0"]}}}, {"attributes": {"a": {"b": [f"c{REPLACED}"]}}}),
    ],
)
def test_nul_and_lone_surrogates_are_replaced_and_flagged(bad: dict[str, Any], clean: dict[str, Any]) -> None:
    message = read(payload(pair(), pair(id=str(PAIR_ID), **bad)))
    assert message.pairs[1] == Pair(**pair(id=PAIR_ID, **clean))
    assert message.replaced == {PAIR_ID}


def test_a_surrogate_pair_is_one_character_and_nothing_is_flagged() -> None:
    message = read(json.loads(json.dumps(payload(pair(text="\U0001f45f")))))
    assert message.pairs[0].text == "\U0001f45f"
    assert not message.replaced


def test_a_source_with_a_nul_is_cleaned_too() -> None:
    assert read(payload(source="em\0ea")).source == f"em{REPLACED}ea"


@pytest.mark.parametrize(
    ("bad", "code", "detail"),
    [
        ("s3://shop/1.jpg", ErrorCode.INVALID_PAIR, "dictionary"),
        (None, ErrorCode.INVALID_PAIR, "dictionary"),
        ([pair()], ErrorCode.INVALID_PAIR, "dictionary"),
        ({"image": "s3://shop/1.jpg"}, ErrorCode.INVALID_PAIR, "text"),
        ({"text": "a red shoe"}, ErrorCode.INVALID_PAIR, "image"),
        (pair(image=""), ErrorCode.INVALID_PAIR, "image"),
        (pair(image=5), ErrorCode.INVALID_PAIR, "image"),
        (pair(text=None), ErrorCode.INVALID_PAIR, "text"),
        (pair(text="x" * (MAX_TEXT_CHARS + 1)), ErrorCode.INVALID_PAIR, "text"),
        (pair(text=""), ErrorCode.TEXT_EMPTY, "empty"),
        (pair(text=" \t\n\u3000"), ErrorCode.TEXT_EMPTY, "empty"),
        (pair(policy=""), ErrorCode.INVALID_PAIR, "policy"),
        (pair(policy=["catalog"]), ErrorCode.INVALID_PAIR, "policy"),
        (pair(attributes=[1]), ErrorCode.INVALID_PAIR, "attributes"),
        (pair(attributes={"price": float("nan")}), ErrorCode.INVALID_PAIR, "nan"),
        (pair(attributes={"price": [float("inf")]}), ErrorCode.INVALID_PAIR, "inf"),
        (pair(attributes=nested(MAX_ATTRIBUTE_DEPTH + 1)), ErrorCode.INVALID_PAIR, "deep"),
        (pair(attributes=nested(500)), ErrorCode.INVALID_PAIR, "deep"),
    ],
)
def test_a_bad_pair_is_refused_under_its_own_id_and_its_neighbours_are_not(
    bad: object, code: ErrorCode, detail: str
) -> None:
    named = isinstance(bad, dict)
    raw = {"id": str(PAIR_ID), "ref": "sku-1", **bad} if isinstance(bad, dict) else bad
    message = read(payload(pair(text="before"), raw, pair(text="after")))
    assert [one.text for one in message.pairs] == ["before", "after"]
    (refused,) = message.refused
    assert refused.id == (PAIR_ID if named else uuid5(MESSAGE_ID, "1"))
    assert refused.ref == ("sku-1" if named else None)
    assert refused.error.code is code
    assert detail in refused.error.detail


@pytest.mark.parametrize("bad_id", ["sku-1", 5, ["x"], "", f"{MESSAGE_ID}0"])
def test_an_id_that_is_no_uuid_refuses_the_pair_under_the_id_of_its_place(bad_id: object) -> None:
    (refused,) = read(payload(pair(id=bad_id))).refused
    assert (refused.id, refused.error.code) == (uuid5(MESSAGE_ID, "0"), ErrorCode.INVALID_ID)


def test_a_pair_that_cannot_be_read_never_takes_the_place_of_one_that_can() -> None:
    message = read(payload(pair(id=str(uuid5(MESSAGE_ID, "1")), text="good"), pair(id="no uuid", text="bad")))
    assert [one.text for one in message.pairs] == ["good"]
    assert not message.refused
    assert [(d.text, d.error.code) for d in message.duplicates] == [("bad", ErrorCode.INVALID_ID)]


def test_what_was_encoded_is_decoded_to_the_same_message() -> None:
    pairs = [pair(text="a\0b", attributes={"deep": {"er": [1, None, 2.5]}}), pair(ref="sku-2")]
    message = read(payload(*pairs, attempts=2))
    assert message.replaced
    assert read(json.loads(json.dumps(encode(message)))) == message


def test_the_next_attempt_holds_only_the_pairs_that_are_left_and_still_knows_what_was_replaced() -> None:
    message = read(payload(pair(text="a\0b"), pair(text="c\0d"), pair(text="e"), pair(text=" "), attempts=1))
    left = [one.id for one in message.pairs[1:] if one.id]
    again = read(json.loads(json.dumps(encode(message.again(left)))))
    assert [one.id for one in again.pairs] == left
    assert (again.attempts, again.refused, again.duplicates) == (2, (), ())
    assert again.replaced == {left[0]}
    assert (again.message_id, again.submitted_at) == (message.message_id, message.submitted_at)


#: What is dear to some layer: to JSON, to Python, to pydantic, to Postgres.
ODD_TEXTS = [
    "\0",
    "\ud800",
    "",
    " ",
    str(PAIR_ID),
    str(MESSAGE_ID),
    "s3://b/k",
    "NaN",
    "\u202e",
    "\ufeff",
]
ODD_NUMBERS = [0, -1, 2**31, 2**63, 2**70, 10**308, 1e308, 5e-324, float("nan"), float("-inf"), True]
LONG = st.integers(1, 3).map(lambda times: "x" * (100_001 * times))
TEXTS = st.text(max_size=5) | st.sampled_from(ODD_TEXTS) | LONG
TYPED = st.fixed_dictionaries({"__type__": TEXTS, "__value__": TEXTS})
DEEP = st.sampled_from([MAX_ATTRIBUTE_DEPTH, MAX_ATTRIBUTE_DEPTH + 1, 200]).map(nested)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | TEXTS
    | st.sampled_from(ODD_NUMBERS)
    | DEEP
    | TYPED,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
#: What JSON never makes, and a decoder that is not as strict might.
NOT_JSON = st.sampled_from(
    [b"bytes", {1, 2}, (1, 2), NOW, MESSAGE_ID, object(), {5: "a"}, {None: 1}, range(3), 1j, print]
)
FIELDS = {
    "id": st.sampled_from([str(PAIR_ID), str(MESSAGE_ID), str(uuid5(MESSAGE_ID, "1")), None]) | JSON,
    "ref": st.none() | JSON,
    "text": st.just("a shoe") | JSON,
    "premise": st.none() | JSON,
    "image": st.just("s3://b/k") | JSON,
    "attributes": st.just({}) | JSON | st.dictionaries(TEXTS, JSON, max_size=3),
    "policy": st.just("catalog") | JSON,
}
PAIRS = st.lists(st.fixed_dictionaries({}, optional=FIELDS) | JSON, max_size=5)
ENVELOPES = st.fixed_dictionaries(
    {"v": st.just(1) | JSON, "message_id": st.just(str(MESSAGE_ID)) | JSON, "pairs": PAIRS | JSON},
    optional=dict.fromkeys(("run_id", "source", "fresh", "attempts", "replaced", "settled", "submitted_at"), JSON),
).map(lambda fields: {"submitted_at": "2026-01-15T11:00:00+00:00", **fields})


@settings(max_examples=300, deadline=None)
@given(JSON | ENVELOPES | PAIRS.map(lambda pairs: payload(pairs=pairs)))
def test_whatever_arrives_is_read_or_refused_and_no_pair_is_lost_or_counted_twice(value: Any) -> None:
    message = read_or_refused(value)
    if isinstance(message, MessageRejected):
        assert message.detail
        return
    assert len(message.pairs) + len(message.refused) + len(message.duplicates) == len(value["pairs"])
    ids = [one.id for one in message.pairs] + [one.id for one in message.refused]
    assert len(set(ids)) == len(ids)
    # What was read can be stored and sent on.
    json.dumps(encode(message), ensure_ascii=False, allow_nan=False).encode()
    for refused in (*message.refused, *message.duplicates):
        described = (refused.ref, refused.image, refused.text, refused.policy)
        assert not [text for text in described if text and ("\0" in text or len(text.encode()) > 8_000)]


@settings(max_examples=100, deadline=None)
@given(NOT_JSON, st.sampled_from([*FIELDS, None]), st.sampled_from(["source", "replaced", "pairs", "message_id", "v"]))
def test_even_what_no_json_holds_is_refused_and_never_raises_anything_else(odd: Any, of_pair: Any, field: str) -> None:
    for value in (odd, payload(**{field: odd}), payload(odd if of_pair is None else pair(**{of_pair: odd}))):
        found = read_or_refused(value)
        assert found.detail if isinstance(found, MessageRejected) else json.dumps(encode(found))
