"""The line, top to bottom: message -> batch -> images -> tensors -> model -> verdicts -> Postgres.

Each step is another module's; this one only hands on. A message is acknowledged by worker.batching after `process`
has returned, which is after the transaction that holds its verdicts.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from celery import bootsteps
from sqlalchemy import Engine
from sqlalchemy.exc import ProgrammingError

from db import originals, registry
from db.engine import is_outdated, make_engine
from tasks.app import app
from tasks.lone import judge_alone
from tasks.relay import Relay
from tasks.reuse import content_hash, reuse, share
from tasks.scoring import make_store, worker_moderator
from tasks.settings import Settings, settings
from tasks.settling import Case, MadeBy, Picture, Reading, measurement_of, outcome_of, settlement_of
from tasks.storing import patiently, persist, write
from worker.batching import Batch, MicroBatchTask, Outcome
from worker.delivery import Delivery
from worker.endings import Watchdog, is_stopping, leave_at_the_second_signal
from worker.errors import (
    CodedError,
    ConcordError,
    DeviceLost,
    ErrorCode,
    Hold,
    MessageRejected,
    PairRejected,
    TryLater,
    first_line,
)
from worker.images import Fetched, ImageStore, decode
from worker.messages import TASK_NAME, as_uuid
from worker.messages import decode as decode_message
from worker.moderator import Moderator, Policy, Question
from worker.turns import Turns

log = logging.getLogger(__name__)

#: Policies and the oldest month are read again after this long.
RULES_FRESH_FOR_S = 60.0


@dataclass
class Line:
    """What a worker process makes once, before its first message."""

    settings: Settings
    engine: Engine
    store: ImageStore
    moderator: Moderator
    made_by: MadeBy
    worker: str
    policies: Mapping[str, Policy] = field(default_factory=dict)
    oldest: datetime = datetime.min
    rules_read_at: float = float("-inf")

    def __post_init__(self) -> None:
        #: One batch on the device at a time; others are fetched, decoded, tokenized and written meanwhile.
        self.device = Turns(MicroBatchTask.lanes)
        #: Threads are many, because fetching waits. If as many decoded, one that has the device, or writes, would wait
        #: behind them all whenever it is to go on. A lane does not wait for another's.
        self.decoders = {lane: threading.BoundedSemaphore(os.cpu_count() or 1) for lane in MicroBatchTask.lanes}

    def refresh_rules(self) -> None:
        """Read the policies in force and the oldest month, now and then."""
        if time.monotonic() < self.rules_read_at + RULES_FRESH_FOR_S:
            return
        with self.engine.begin() as connection:
            rules = [Policy(**row) for row in registry.policies_in_force(connection)]
            self.oldest = registry.oldest_verdict_time(connection)
        self.policies = {policy.name: policy for policy in rules}
        self.rules_read_at = time.monotonic()

    def decode(self, fetched: Fetched) -> Picture:
        """An object's bytes as a picture; raises PairRejected."""
        decoded = decode(
            fetched.data,
            target_px=self.moderator.checkpoint.configuration.patch_image_size,
            exact=self.settings.exact_images,
            max_pixels=self.settings.max_image_pixels,
        )
        return Picture(decoded, fetched.etag)


class Moderate(MicroBatchTask):
    """Task `concord.moderate`."""

    name = TASK_NAME
    line: Line

    def process(self, batch: Batch) -> list[Outcome]:
        try:
            return self.moderate(batch)
        except (Hold, DeviceLost):
            raise
        except Exception as error:
            if len(batch.deliveries) > 1:
                log.exception("a batch of %d messages failed; each is taken alone", len(batch.deliveries))
                return [outcome for one in batch.split() for outcome in self.process(one)]
            log.exception("message %s failed alone", batch.deliveries[0].task_id)
            return self.settle_crashed(batch, error)

    def settle_crashed(self, batch: Batch, error: Exception) -> list[Outcome]:
        """One message on which this code failed: tried again, or, where not even that can be written, recorded."""
        (delivery,) = batch.deliveries
        try:
            return self.settle([crashed(delivery, self.line, error)], batch)
        except Hold:
            raise
        except Exception as worse:
            log.exception("message %s cannot be put off either; it is recorded", delivery.task_id)
            why = MessageRejected(ErrorCode.INTERNAL_ERROR, f"{type(worse).__name__}: {worse}"[:300])
            return self.settle([Reading(delivery, rejected=why)], batch)

    def moderate(self, batch: Batch) -> list[Outcome]:
        """The flow."""
        line = self.line
        persist(line.refresh_rules, batch.stopping)
        readings = [read(delivery, line) for delivery in batch.deliveries]
        cases = unanswered([case for reading in readings for case in reading.cases])
        if batch.alone:
            judge_alone(cases, lambda these: judge(these, line, batch), line.engine, batch.stopping)
        else:
            judge(cases, line, batch)
        return self.settle(readings, batch)

    def settle(self, readings: Sequence[Reading], batch: Batch) -> list[Outcome]:
        """Verdicts: one transaction for the whole batch."""
        line = self.line
        settlements = [settlement_of(reading, line.policies, line.settings, line.made_by) for reading in readings]
        measured = measurement_of(readings, settlements, batch, line.made_by, line.worker)
        write(line.engine, settlements, batch.stopping, measured)
        pairs = sum(len(reading.cases) for reading in readings)
        before = sum(len(reading.cases) for reading in readings if reading.delivery.redelivered)
        seconds = time.monotonic() - batch.started_at
        log.info(
            "a batch is settled: %d pairs of %d messages, %s, %.3f s, %d delivered before",
            pairs, len(readings), batch.lane, seconds, before,
        )  # fmt: skip
        return [persist(partial(outcome_of, reading, line.engine), batch.stopping) for reading in readings]


def read(delivery: Delivery, line: Line) -> Reading:
    """Message: what was asked; a pair that cannot be judged already has its answer."""
    reading = Reading(delivery)
    if isinstance(delivery.refusal, MessageRejected):
        reading.rejected = delivery.refusal
        return reading
    try:
        message = decode_message(
            delivery.payload, now=datetime.now(UTC), oldest=line.oldest, default_id=as_uuid(delivery.task_id)
        )
    except MessageRejected as error:
        reading.rejected = error
        return reading
    reading.message = message
    if reading.is_parked:
        return reading
    reading.cases = [Case(message, pair) for pair in message.pairs]
    for case in reading.cases:
        if delivery.refusal:
            case.answer = delivery.refusal
        elif delivery.withdrawn:
            case.answer = PairRejected(ErrorCode(delivery.withdrawn), f"{delivery.withdrawn} before it was judged")
        elif case.pair.policy not in line.policies:
            known = ", ".join(sorted(line.policies))
            case.answer = PairRejected(
                ErrorCode.UNKNOWN_POLICY, f"no policy {case.pair.policy!r:.80}; there are {known}"
            )
    return reading


def crashed(delivery: Delivery, line: Line, error: Exception) -> Reading:
    """A message on which this code itself failed: its pairs are tried again, then failed, like any passing trouble."""
    reading = read(delivery, line)
    for case in reading.cases:
        case.answer = case.answer or TryLater(ErrorCode.INTERNAL_ERROR, f"{type(error).__name__}: {error}"[:300])
    return reading


def judge(cases: Sequence[Case], line: Line, batch: Batch) -> None:
    """Images, tensors, earlier verdicts, and the model for what is left; each step works on what has no answer yet."""
    look(unanswered(cases), line, batch)
    prepare(unanswered(cases), line, batch)
    asked = reuse(unanswered(cases), line.settings.reuse_days, line.engine, line.made_by, batch.stopping)
    ask(asked, line, batch)
    share(unanswered(cases), asked)


def unanswered(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.answer is None]


def look(cases: Sequence[Case], line: Line, batch: Batch) -> None:
    """Images: fetch and decode each distinct one once; trouble with it is the answer of the pairs that show it.

    While a bucket is away the batch waits: no pair's attempts are spent on that.
    """
    pictures: dict[str, Picture | CodedError] = {}

    def decode_watched(fetched: Fetched) -> Picture:
        with line.decoders[batch.lane], batch.watched():
            return line.decode(fetched)

    def load_missing() -> None:
        missing = [case.pair.image for case in cases if case.pair.image not in pictures]
        loaded = line.store.load_all(missing, decode_watched, urgent=batch.lane == MicroBatchTask.lanes[0])
        away = buckets_away(loaded, line.store)
        pictures.update({uri: picture for uri, picture in loaded.items() if bucket_of(uri) not in away})
        if away:
            raise Hold(f"S3 gives nothing from {', '.join(sorted(away))}")

    with batch.timed("fetch"):
        patiently(lambda error: isinstance(error, Hold), batch.stopping)(load_missing)
    for case in cases:
        picture = pictures[case.pair.image]
        if isinstance(picture, CodedError):
            case.answer = picture
        else:
            case.picture = picture


def buckets_away(loaded: Mapping[str, Picture | CodedError], store: ImageStore) -> set[str]:
    """Buckets from which every fetch failed for a passing reason, and which do not answer otherwise either."""
    suspects = {bucket_of(uri) for uri, picture in loaded.items() if isinstance(picture, TryLater)}
    suspects -= {bucket_of(uri) for uri, picture in loaded.items() if not isinstance(picture, TryLater)}
    return {bucket for bucket in suspects if not store.answers(bucket)}


def bucket_of(uri: str) -> str:
    return uri.removeprefix("s3://").partition("/")[0]


def prepare(cases: Sequence[Case], line: Line, batch: Batch) -> None:
    """Tensors: prompts and pixels, while other batches are on the device, under the watchdog's eye."""
    questions = [
        Question(case.picture.decoded.image, case.picture.decoded.sha256, case.pair.text, case.pair.premise)
        for case in cases
        if case.picture
    ]
    with batch.watched():
        ready = line.moderator.prepare(questions)
    for case, prepared in zip(cases, ready, strict=True):
        if isinstance(prepared, CodedError):
            case.answer = prepared
        else:
            case.prepared = prepared
            case.content_hash = content_hash(case, line.made_by)


def ask(cases: Sequence[Case], line: Line, batch: Batch) -> None:
    """Model: one batch on the device at a time, the urgent lane's first, under the watchdog's eye."""
    prepared = [case.prepared for case in cases if case.prepared]
    if not prepared:
        return
    with line.device.turn(batch.lane, batch.started_at), batch.watched(), batch.timed("model"):
        answers = line.moderator.score(prepared)
    for case, answer in zip(cases, answers, strict=True):
        case.answer = answer


def set_up(chosen: Settings, worker: str) -> Line:
    """Load the model, send an example through it, and sign in to Postgres. Raises ConcordError with what to do."""
    if chosen.torch_threads:
        torch.set_num_threads(chosen.torch_threads)
    store = make_store(chosen)
    moderator = worker_moderator(chosen)
    moderator.warm_up()
    checkpoint = moderator.checkpoint
    engine = make_engine(chosen.need("database_url"), pool_size=chosen.max_inflight + 2)

    labels = dict(zip(checkpoint.answers.names, checkpoint.labels, strict=True))

    def sign_in() -> int:
        with engine.begin() as connection:
            if chosen.reuse_days and not originals.is_indexed(connection):
                raise ConcordError("verdict has no index to reuse verdicts by: run `concord db upgrade` to its end")
            registry.make_partitions(connection)
            return registry.register_model(
                connection,
                name=checkpoint.name,
                revision=checkpoint.revision,
                recipe=checkpoint.recipe,
                weights_sha256=checkpoint.sha256,
                prompt=checkpoint.configuration.plain_prompt,
                image_px=checkpoint.configuration.patch_image_size,
                answers=labels,
                concord_version=registry.concord_version(),
                torch_version=torch.__version__,
            )

    try:
        version = persist(sign_in, is_stopping)
    except ProgrammingError as error:
        if not is_outdated(error):
            raise
        why = first_line(error.orig)
        raise ConcordError(f"{why}: run `concord db upgrade` before workers of this version") from error
    made_by = MadeBy(version, checkpoint.sha256, checkpoint.recipe, checkpoint.configuration, labels)
    line = Line(chosen, engine, store, moderator, made_by, worker)
    persist(line.refresh_rules, is_stopping)
    log.info("%s %s (%s) is ready on %s", checkpoint.name, checkpoint.revision, checkpoint.recipe, moderator.device)
    return line


task = app.register_task(Moderate())


def urgent_first(app: Any) -> None:
    """Redis pops the first queue that has a message, in the order of -Q: make that the order of the lanes."""
    chosen = list(app.amqp.queues.consume_from)
    lanes = [lane for lane in task.lanes if lane in chosen]
    app.amqp.queues.select([*lanes, *(queue for queue in chosen if queue not in lanes)])


class LineStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Sets the line up before the worker takes its first message, and the relay beside it.

    Steps stop in reverse: the lease is free for others before the batches in work are waited for. Without a word on it
    the order would differ from start to start.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **_: Any) -> None:
        self.relay: Relay | None = None

    def start(self, parent: Any) -> None:
        leave_at_the_second_signal()
        try:
            chosen = settings()
            chosen.need("broker_url")
            urgent_first(parent.app)
            task.line = set_up(chosen, parent.hostname)
        except ConcordError as error:
            log.critical("the worker cannot start: %s", error)
            raise SystemExit(1) from None
        task.max_pairs, task.max_wait_s = chosen.max_pairs, chosen.max_wait_ms / 1000
        task.max_inflight, task.hang_limit_s = chosen.max_inflight, chosen.hang_limit_s
        windows = {"live": chosen.live_window, "bulk": chosen.bulk_window}
        self.relay = Relay(chosen.need("database_url"), windows, chosen.relay_poll_ms / 1000)
        self.relay.start()
        Watchdog(task.watch, chosen.hang_limit_s).start()

    def stop(self, parent: Any) -> None:
        if self.relay is not None:
            self.relay.stop()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)


app.steps["worker"].add(LineStep)
