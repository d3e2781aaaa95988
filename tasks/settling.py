"""Verdicts -> Postgres: what each message's answers come to as rows. tasks/storing.py writes them.

Each pair settles on its own: judged; rejected, by its own fault; tried again later, which is a new attempt of its
message with the pairs that are left; or failed, once the attempts are used up.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from db import verdicts
from db.batches import BatchRow
from db.originals import REUSED
from db.outbox import OutboxRow, Rejected
from db.verdicts import Settlement, Verdict
from tasks.settings import Settings
from worker.batching import Batch, Outcome
from worker.delivery import Delivery
from worker.errors import CodedError, GivenUp, Hold, MessageRejected, TryLater
from worker.images import DecodedImage
from worker.messages import (
    MAX_PAIRS_PER_MESSAGE,
    TEXT_REPLACED,
    Message,
    Pair,
    RefusedPair,
    as_uuid,
    clean_string,
    encode,
)
from worker.model.checkpoint import Label
from worker.model.config import Configuration
from worker.moderator import Judgement, Policy, Prepared, decide

log = logging.getLogger(__name__)

#: Seconds of the longest wait before an attempt.
MAX_RETRY_DELAY_S = 3_600.0


@dataclass(frozen=True)
class Picture:
    """A decoded image and the version of the object that it was."""

    decoded: DecodedImage
    etag: str


@dataclass(eq=False)
class Case:
    """One pair on its way down the line; the first step with a final word sets `answer`."""

    message: Message
    pair: Pair
    picture: Picture | None = None
    prepared: Prepared | None = None
    content_hash: bytes | None = None  # tasks/reuse.py
    answer: Judgement | CodedError | None = None


@dataclass(eq=False)
class Reading:
    """A delivery as read: a message with its cases, or why it is none."""

    delivery: Delivery
    message: Message | None = None
    rejected: MessageRejected | None = None
    cases: list[Case] = field(default_factory=list)
    again: list[Case] = field(default_factory=list)

    @property
    def is_parked(self) -> bool:
        """Whether the producer asked for a later moment (Celery's countdown or eta)."""
        return self.delivery.not_before is not None and not self.delivery.refusal and not self.delivery.withdrawn


@dataclass(frozen=True)
class MadeBy:
    """What the scores of this process depend on beside the pair."""

    model_version_id: int
    weights_sha256: str
    recipe: str
    configuration: Configuration
    labels: Mapping[str, Label]  # what each of the model's answers means

    @cached_property
    def digest(self) -> str:
        """Of all of it but the version, which is the database's own name for it: 32 hexadecimal digits."""
        parts = [self.weights_sha256, self.recipe, asdict(self.configuration), dict(self.labels)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def settlement_of(reading: Reading, policies: Mapping[str, Policy], settings: Settings, made_by: MadeBy) -> Settlement:
    """What one message comes to."""
    settlement = rows_of(reading, policies, settings, made_by)
    # What was never handed out before was never tried; of what Celery could not read that is not known.
    delivery = reading.delivery
    suspected = delivery.redelivered or delivery.suspect or delivery.request is None
    return replace(settlement, suspected=True) if suspected else settlement


def rows_of(reading: Reading, policies: Mapping[str, Policy], settings: Settings, made_by: MadeBy) -> Settlement:
    """The rows that one message comes to."""
    delivery, message = reading.delivery, reading.message
    if message is None:
        return recorded(reading)
    rejected = [rejected_pair(delivery, message, duplicate) for duplicate in message.duplicates]
    if reading.is_parked:
        return Settlement(retries=[parked(delivery, message)], rejected=rejected)
    rows = [refused_row(delivery, message, refused) for refused in message.refused]
    last_attempt = message.attempts + 1 >= settings.max_attempts
    reading.again = [] if last_attempt else [case for case in reading.cases if is_passing(case.answer)]
    rows += [row_of(case, delivery.lane, policies, made_by) for case in reading.cases if case not in reading.again]
    if reading.again:
        retries = [next_attempt(delivery, message, reading.again, settings)]
        return Settlement(rows, retries=retries, rejected=rejected)
    return Settlement(rows, done=[(message.message_id, message.attempts)], rejected=rejected)


def is_passing(answer: object) -> bool:
    """Whether another attempt may succeed."""
    return isinstance(answer, TryLater) and not isinstance(answer, GivenUp)


def row_of(case: Case, lane: str, policies: Mapping[str, Policy], made_by: MadeBy) -> Verdict:
    """The verdict's row of one pair."""
    message, pair, answer = case.message, case.pair, case.answer
    assert pair.id is not None
    assert answer is not None
    flags = [TEXT_REPLACED] if pair.id in message.replaced else []
    found: dict[str, Any] = {}
    if case.picture is not None:
        decoded = case.picture.decoded
        flags += decoded.flags
        found = {
            "image_sha256": decoded.sha256,
            "image_etag": case.picture.etag,
            "image_width": decoded.width,
            "image_height": decoded.height,
            "decode_mode": decoded.decode_mode,
        }
    if isinstance(answer, CodedError):
        status = "failed" if isinstance(answer, TryLater) else "rejected"
        found |= {"error_code": answer.code, "error_detail": answer.detail or None}
    else:
        status = "judged"
        policy = policies[pair.policy]
        flags += answer.flags
        found |= {
            "label": answer.label,
            "p_entailment": answer.p_entailment,
            "p_contradiction": answer.p_contradiction,
            "p_neutral": answer.p_neutral,
            "answer": answer.answer,
            "policy_version": policy.version,
            "decision": decide(policy, answer),
            "text_scored": answer.text_scored,
            "premise_scored": answer.premise_scored,
            "model_version_id": made_by.model_version_id,
            "content_hash": case.content_hash,
        }
    return Verdict(
        submitted_at=message.submitted_at,
        pair_id=pair.id,
        source=message.source,
        message_id=message.message_id,
        lane=lane,
        status=status,
        attempts=message.attempts,
        ref=pair.ref,
        run_id=message.run_id,
        image=pair.image,
        text=pair.text,
        premise=pair.premise,
        attributes=pair.attributes,
        policy=pair.policy,
        flags=flags,
        **found,
    )


def refused_row(delivery: Delivery, message: Message, refused: RefusedPair) -> Verdict:
    """The row of a pair that could not be read."""
    return Verdict(
        submitted_at=message.submitted_at,
        pair_id=refused.id,
        source=message.source,
        message_id=message.message_id,
        lane=delivery.lane,
        status="rejected",
        attempts=message.attempts,
        ref=refused.ref,
        run_id=message.run_id,
        image=refused.image,
        text=refused.text,
        policy=refused.policy,
        error_code=refused.error.code,
        error_detail=refused.error.detail,
    )


def rejected_pair(delivery: Delivery, message: Message, duplicate: RefusedPair) -> Rejected:
    """An id that stood twice has one verdict, of its first standing; the other is recorded here."""
    return Rejected(
        queue=delivery.lane,
        error_code=duplicate.error.code,
        error_detail=duplicate.error.detail,
        body=json.dumps({"ref": duplicate.ref, "image": duplicate.image, "text": duplicate.text}).encode(),
        message_id=message.message_id,
        pair_ids=[duplicate.id],
        source=message.source,
        run_id=message.run_id,
        pairs=1,
    )


def recorded(reading: Reading) -> Settlement:
    """A message that could not be read: kept with its body, and its outbox row deleted."""
    delivery, error = reading.delivery, reading.rejected
    assert error is not None
    payload = delivery.payload if isinstance(delivery.payload, Mapping) else {}
    message_id = as_uuid(payload.get("message_id")) or as_uuid(delivery.task_id)
    attempts = payload.get("attempts")
    raw_pairs = payload.get("pairs")
    pairs = raw_pairs if isinstance(raw_pairs, list) else []
    ids = [as_uuid(pair.get("id")) for pair in pairs[:1_000] if isinstance(pair, Mapping)]
    rejected = Rejected(
        queue=delivery.lane,
        error_code=error.code,
        error_detail=clean_string(error.detail),
        body=delivery.body,
        message_id=message_id,
        pair_ids=[pair_id for pair_id in ids if pair_id],
        run_id=as_uuid(payload.get("run_id")),
        pairs=len(pairs),
    )
    # True is an int too, but not to Postgres.
    counted = attempts if type(attempts) is int and 0 <= attempts < 2**31 else 0
    done = [(message_id, counted)] if message_id else []
    return Settlement(done=done, rejected=[rejected])


def next_attempt(delivery: Delivery, message: Message, again: Sequence[Case], settings: Settings) -> OutboxRow:
    """The message with the pairs that are left, due after a wait that doubles with every attempt."""
    ids = [case.pair.id for case in again if case.pair.id]
    body = encode(message.again(ids))
    if delivery.wants_result:
        # The result of the last attempt is to hold the verdicts of all.
        body["settled"] = [str(pair_id) for pair_id in asked_for(delivery, message) if pair_id not in ids]
    delay_s = min(settings.retry_delay_s * 2**message.attempts, MAX_RETRY_DELAY_S)
    answer = again[0].answer
    return OutboxRow(
        message.message_id,
        delivery.lane,
        body,
        attempts=message.attempts + 1,
        expires_at=delivery.expires_at,
        wants_result=delivery.wants_result,
        task_id=delivery.task_id,
        delay_s=delay_s,
        last_error=clean_string(f"{answer.code}: {answer.detail}"[:500]) if isinstance(answer, CodedError) else None,
    )


def parked(delivery: Delivery, message: Message) -> OutboxRow:
    """Celery's countdown or eta: the message waits in the outbox, where a restart cannot lose it."""
    assert delivery.not_before is not None
    payload = delivery.payload if isinstance(delivery.payload, Mapping) else {}
    return OutboxRow(
        message.message_id,
        delivery.lane,
        {**payload, "message_id": str(message.message_id)},
        attempts=message.attempts,
        expires_at=delivery.expires_at,
        wants_result=delivery.wants_result,
        task_id=delivery.task_id,
        delay_s=max(0.0, (delivery.not_before - datetime.now(UTC)).total_seconds()),
    )


def asked_for(delivery: Delivery, message: Message) -> list[UUID]:
    """The ids of all pairs of the message, those that earlier attempts settled among them."""
    payload = delivery.payload if isinstance(delivery.payload, Mapping) else {}
    before = payload.get("settled")
    earlier = [as_uuid(one) for one in before[:MAX_PAIRS_PER_MESSAGE]] if isinstance(before, list) else []
    now = [*(pair.id for pair in message.pairs), *(refused.id for refused in message.refused)]
    return [pair_id for pair_id in [*earlier, *now] if pair_id]


def measurement_of(
    readings: Sequence[Reading], settlements: Sequence[Settlement], batch: Batch, made_by: MadeBy, worker: str
) -> BatchRow | None:
    """What a batch tells of the line's speed; None where it held no pair.

    Pairs that could not be read count, for they have a verdict; those that are tried again count where it is written.
    """
    cases = [case for reading in readings for case in reading.cases]
    pairs = sum(len(one.verdicts) for one in settlements)
    if not cases and not pairs:
        return None
    started_at = time.time() - (time.monotonic() - batch.started_at)
    waits = [
        started_at - (reading.delivery.published_at or reading.message.submitted_at.timestamp())
        for reading in readings
        if reading.message and not reading.is_parked
        for _ in [*reading.cases, *reading.message.refused]
    ]
    judged = [case.answer for case in cases if isinstance(case.answer, Judgement)]
    return BatchRow(
        worker=worker,
        lane=batch.lane,
        model_version_id=made_by.model_version_id,
        messages=len(readings),
        pairs=pairs,
        judged=len(judged),
        queue_s=max(0.0, sum(waits) / len(waits)),
        fetch_s=batch.seconds["fetch"],
        model_s=batch.seconds["model"],
        write_s=0.0,  # known when it is written
        tokens=sum(answer.tokens for answer in judged),
        padded_tokens=sum(answer.padded_tokens for answer in judged),
        pictures=len({case.picture.decoded.sha256 for case in cases if case.picture}),
        reused=sum(REUSED in answer.flags for answer in judged),
    )


def outcome_of(reading: Reading, engine: Engine) -> Outcome:
    """What Celery is told of a message whose settlement is committed."""
    delivery, message = reading.delivery, reading.message
    if message is None:
        return Outcome("failed", error=reading.rejected)
    if delivery.withdrawn:
        return Outcome("withdrawn")
    if delivery.refusal:
        return Outcome("failed", error=delivery.refusal)
    if delivery.not_before:
        return Outcome("parked", error=Hold(f"put off until {delivery.not_before.isoformat()}"))
    if reading.again:
        answer = reading.again[0].answer
        return Outcome("retried", error=answer if isinstance(answer, CodedError) else None)
    if not delivery.wants_result:
        return Outcome("done")
    with engine.begin() as connection:
        return Outcome("done", verdicts.read_back(connection, message.submitted_at, asked_for(delivery, message)))
