"""Micro-batches on Celery: messages of many producers are judged together and acknowledged one by one.

`worker.lanes` decides when which messages become a batch. Here is what carries that out:

- `Deliveries` lives on the worker's main thread (Celery's hub): it owns the lanes, the timer and every
  acknowledgement, and hands batches to the pool.
- `MicroBatchTask` is what a task derives from: `process` gets a batch on a pool thread and says what became of each
  message. A message is acknowledged only after `process` has returned, and given back where it raised.

The pool must be `threads`: a pool target that raises is swallowed there and its messages would stay unacknowledged
for ever, so `run` never raises.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from celery import signals
from celery.app.task import Task
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer as CeleryConsumer
from celery.worker.request import Request
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2

from worker.errors import CodedError, ErrorCode, Hold, MessageRejected
from worker.kombu_guards import NOT_JSON
from worker.lanes import Lanes

log = logging.getLogger(__name__)

#: How often the tags of messages in hand are touched, so that `visibility_timeout` can be far shorter than a batch.
TOUCH_EVERY_S = 5.0
#: How often the watchdog looks for a hung batch.
WATCH_EVERY_S = 1.0
#: Exit status of a worker that ended itself because a batch hung (sysexits.h: internal software error).
EXIT_HUNG = 70


@dataclass(eq=False)
class Delivery:
    """A message in hand. `refusal` is set where it cannot be carried out; `payload` is the task's one argument.

    `redelivered`: it was handed out before, and may have been judged. `suspect`: that worker may have died of it, so
    it is taken alone.
    """

    message: Any
    lane: str
    payload: object = None
    pairs: int = 1
    request: Request | None = None
    refusal: CodedError | None = None
    withdrawn: Literal["expired", "revoked"] | None = None
    not_before: datetime | None = None
    redelivered: bool = False
    suspect: bool = False

    @property
    def task_id(self) -> str | None:
        """Celery's id of the message, also of one that Celery could make nothing of."""
        if self.request is not None:
            return str(self.request.id)
        named = (self.message.headers or {}).get("id")
        return named if isinstance(named, str) else None

    @property
    def expires_at(self) -> datetime | None:
        return self.request.expires if self.request else None

    @property
    def wants_result(self) -> bool:
        return bool(self.request and not self.request.ignore_result)

    @property
    def body(self) -> bytes:
        """The message's bytes as they came."""
        raw = self.message.body
        return raw if isinstance(raw, bytes) else str(raw).encode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Outcome:
    """What became of a message; every outcome but a raised exception is acknowledged."""

    state: Literal["done", "failed", "retried", "parked", "withdrawn"]
    result: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class HangClock:
    """Since when a batch has been in the model or in decoders, in seconds of the steady clock."""

    started: dict[object, float] = field(default_factory=dict)

    @property
    def since(self) -> float | None:
        """When the oldest of what runs now began; None while nothing does."""
        return min(list(self.started.values()), default=None)


@dataclass(eq=False)
class Batch:
    """Messages that are settled together, on one pool thread."""

    lane: str
    deliveries: list[Delivery]
    alone: bool = False
    started_at: float = field(default_factory=time.monotonic)
    hang_clock: HangClock = field(default_factory=HangClock)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The watchdog's clock runs inside: round decoders and the model, not round waits for a server that is away."""
        one = object()
        self.hang_clock.started[one] = time.monotonic()
        try:
            yield
        finally:
            del self.hang_clock.started[one]

    @property
    def pairs(self) -> int:
        return sum(delivery.pairs for delivery in self.deliveries)

    def split(self) -> list["Batch"]:
        """Its messages, each as a batch of its own under the same watch."""
        return [replace(self, deliveries=[delivery]) for delivery in self.deliveries]

    def stopping(self) -> bool:
        """Whether the worker has been told to stop; a batch that only waits should raise then."""
        return is_stopping()


def is_stopping() -> bool:
    return worker_state.should_stop is not None or worker_state.should_terminate is not None


def leave_at_the_next_signal(how: str, **_: Any) -> None:
    """SIGTERM lets batches end. Whoever signals again, or says SIGQUIT, does not want to wait for that.

    Threads cannot be ended, and Celery would wait for them for as long as the model takes. Nothing is lost: what is
    in hand is not acknowledged, and comes back after visibility_timeout.
    """
    if how == "Cold":
        leave_at_once(signal.SIGQUIT)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda number, _: leave_at_once(number))


def leave_at_once(number: int) -> None:
    # Not by the log: this is a signal handler, and what it interrupted may be writing there.
    os.write(2, f"{signal.Signals(number).name}: this worker ends at once; what it has in hand comes back\n".encode())
    os._exit(128 + number)


signals.worker_shutting_down.connect(leave_at_the_next_signal)


class Deliveries:
    """The hub's side of one connection to the broker. Every method runs on the hub's thread."""

    def __init__(self, task: "MicroBatchTask", consumer: Any, batches: dict[int, Batch]) -> None:
        """`batches` still run, though the connection that brought them is gone."""
        self.task, self.consumer = task, consumer
        names = [lane for lane in task.lanes if lane in consumer.app.amqp.queues.consume_from] or list(task.lanes)
        self.lanes: Lanes[Delivery] = Lanes(
            names, max_pairs=task.max_pairs, max_wait_s=task.max_wait_s, max_inflight=task.max_inflight
        )
        self.held_pairs = 0
        self.batches = batches
        for batch in batches.values():
            self.lanes.inflight[batch.lane] += 1
            self.lanes.is_alone |= batch.alone
            self.held_pairs += batch.pairs
        self.closed = False
        self.wake_entry: Any = None
        self.timers = [
            consumer.timer.call_repeatedly(WATCH_EVERY_S, self.watch),
            consumer.timer.call_repeatedly(TOUCH_EVERY_S, self.touch),
        ]

    def close(self) -> None:
        """The connection is gone: what is buffered will be delivered again; what runs is acknowledged on the next."""
        self.closed = True
        self.lanes.clear()
        for entry in [*self.timers, *filter(None, [self.wake_entry])]:
            entry.cancel()

    # -- in -------------------------------------------------------------------------------------------------------

    def add(self, delivery: Delivery) -> None:
        self.gate(delivery.message.channel)
        if delivery.lane not in self.lanes.buffers:
            delivery.lane = next(reversed(self.lanes.buffers))
        if delivery.request is not None:
            worker_state.task_reserved(delivery.request)
        self.held_pairs += delivery.pairs
        self.lanes.add(delivery.lane, delivery, delivery.pairs, time.monotonic(), alone=delivery.suspect)
        self.pump()

    def gate(self, channel: Any) -> None:
        """Stop popping while enough PAIRS are held: Celery's prefetch counts messages, of 1 to 256 pairs each."""
        qos = channel.qos
        if getattr(qos, "gated_by", None) is not self:
            qos.gated_by = self
            can_consume, limit = qos.can_consume, self.task.max_pairs * (self.task.max_inflight + 1)
            qos.can_consume = lambda: not self.closed and self.held_pairs < limit and can_consume()

    def pump(self) -> None:
        """Start every batch that is due and has a slot, then sleep until the next is."""
        while not self.closed and not is_stopping() and (taken := self.lanes.take(time.monotonic())):
            batch = Batch(*taken, alone=self.lanes.is_alone)
            for delivery in batch.deliveries:
                delivery.withdrawn = withdrawn(delivery.request)
            self.batches[id(batch)] = batch
            self.consumer.pool.apply_async(self.task.run, (batch, self.consumer), callback=lambda _: None)
        if self.wake_entry is not None:
            self.wake_entry.cancel()
            self.wake_entry = None
        wake_at = self.lanes.wake_at()
        if wake_at is not None and not self.closed and not is_stopping():
            delay = max(wake_at - time.monotonic(), 0.001)
            self.wake_entry = self.consumer.timer.call_after(delay, self.pump)

    # -- out ------------------------------------------------------------------------------------------------------

    def finish(self, batch: Batch, settled: Collection[Delivery]) -> None:
        """A batch has run: acknowledge what is settled, leave the rest to be delivered again.

        Called from `Hub.close()` too, while the worker shuts down, where raising would skip other batches' turns.
        """
        self.batches.pop(id(batch), None)
        self.lanes.done(batch.lane)
        self.held_pairs -= batch.pairs
        given_back = [delivery for delivery in batch.deliveries if delivery not in settled]
        try:
            acknowledge(settled, self.consumer)
            # A worker that stops hands them on at once. One that goes on only stops touching them, so that what it
            # cannot settle comes back after visibility_timeout, to whoever is free then, and not in a hot loop.
            for delivery in given_back if is_stopping() else ():
                delivery.message.reject_log_error(log, self.consumer.connection_errors, requeue=True)
        except Exception:
            log.exception("could not acknowledge %d messages; they will be delivered again", len(batch.deliveries))
        self.pump()

    def touch(self) -> None:
        """Tell Redis that the messages in hand are still in hand."""
        try:
            messages = [delivery.message for delivery in self.in_hand()]
            if messages:
                # Tags are global: those of messages that came over an earlier connection are touched here as well.
                channel = self.consumer.task_consumer.channel
                tags = {message.delivery_tag: time.time() for message in messages}
                with channel.conn_or_acquire() as client:
                    client.zadd(channel.qos.unacked_index_key, tags, xx=True)
        except Exception as error:
            log.warning("could not touch the messages in hand: %s", error)

    def in_hand(self) -> Iterator[Delivery]:
        yield from self.lanes.waiting()
        for batch in self.batches.values():
            yield from batch.deliveries

    def watch(self) -> None:
        """Threads cannot be ended: a batch that hangs ends the process, and its messages come back."""
        limit = self.task.hang_limit_s
        clocks = [batch.hang_clock.since for batch in self.batches.values()]
        since = [started for started in clocks if started is not None]
        if since and time.monotonic() - min(since) > limit:
            log.critical(
                "a batch has hung for more than %s s: this worker ends, its messages will be delivered again", limit
            )
            # Celery replaces sys.stderr by a logger, which has no file descriptor.
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            os._exit(EXIT_HUNG)


def withdrawn(request: Request | None) -> Literal["expired", "revoked"] | None:
    """Whether the producer has taken the message back: by `expires`, or by revoke."""
    if request is None:
        return None
    if request.expires and datetime.now(UTC) > request.expires:
        return "expired"
    return "revoked" if request.id in worker_state.revoked else None


def acknowledge(deliveries: Collection[Delivery], consumer: Any) -> None:
    """One round trip for a whole batch. Tags are global in Redis, so a channel made since serves as well."""
    messages = [d.message for d in deliveries if not d.message.acknowledged]
    if not messages:
        return
    channel = messages[0].channel
    if channel.closed and consumer.task_consumer:
        channel = consumer.task_consumer.channel
    tags = [message.delivery_tag for message in messages]
    with channel.conn_or_acquire() as client, client.pipeline() as pipe:
        pipe.zrem(channel.qos.unacked_index_key, *tags).hdel(channel.qos.unacked_key, *tags).execute()
    for delivery in deliveries:
        delivery.message.channel.qos._quick_ack(delivery.message.delivery_tag)
        delivery.message._state = "ACK"
        if delivery.request is not None:
            delivery.request.acknowledged = True


class MicroBatchTask(Task):
    """A task whose messages are carried out in batches.

    Derive from it and define `process`. Limits are set on the instance before the worker starts.
    """

    abstract = True
    typing = False
    acks_late = True
    lanes: Sequence[str] = ("live", "bulk")
    max_pairs = 64
    max_wait_s = 0.05
    max_inflight = 2
    hang_limit_s = 120.0

    _deliveries: Deliveries | None = None

    def process(self, batch: Batch) -> list[Outcome]:
        """What became of each delivery of the batch, in order, all of it committed. Raise to give the batch back."""
        raise NotImplementedError

    def Strategy(self, task: Task, app: Any, consumer: Any) -> Any:
        """Called by Celery on every connection to the broker; returns what it calls with every message."""
        if type(consumer.pool).__module__ != "celery.concurrency.thread":
            raise SystemExit(
                "concord's worker runs its batches on threads: start it with --pool threads, or without --pool"
            )
        running: dict[int, Batch] = {}
        if self._deliveries is not None:
            self._deliveries.close()
            running = self._deliveries.batches
        deliveries = self._deliveries = Deliveries(self, consumer, running)

        def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **_: Any) -> None:
            try:
                delivery = read_delivery(message, body, task, app, consumer)
            except Exception as error:
                detail = f"not a Celery message: {type(error).__name__}: {error}"
                delivery = refused(message, ErrorCode.INVALID_MESSAGE, detail)
            request = delivery.request
            if request is not None:
                signals.task_received.send(sender=consumer, request=request)
                request.send_event("task-received", name=request.name, args=request.argsrepr, kwargs=request.kwargsrepr)
            deliveries.add(delivery)

        return on_message

    def finish(self, batch: Batch, settled: Collection[Delivery]) -> None:
        """On the hub: by way of the connection that is up now, which may not be the one that brought the batch."""
        assert self._deliveries is not None
        self._deliveries.finish(batch, settled)

    def run(self, batch: Batch, consumer: Any) -> None:
        """A batch on a pool thread; never raises."""
        settled: dict[Delivery, None] = {}
        try:
            for delivery in batch.deliveries:
                if delivery.request is not None:
                    delivery.request.on_accepted(os.getpid(), batch.started_at)
            outcomes = self.process(batch)
            for delivery, outcome in zip(batch.deliveries, outcomes, strict=True):
                settled[delivery] = None
                self.report(delivery, outcome, time.monotonic() - batch.started_at)
        except Hold as error:
            log.warning("a batch of %d messages is given back: %s", len(batch.deliveries), error)
        except BaseException as error:
            log.exception("a batch of %d messages is given back: %s", len(batch.deliveries), error)
        for delivery in batch.deliveries:
            if delivery.request is not None:
                worker_state.task_ready(delivery.request, successful=delivery in settled)
        consumer.call_soon(self.finish, batch, settled)

    def report(self, delivery: Delivery, outcome: Outcome, runtime_s: float) -> None:
        """What Celery's users see: result backend, events, signals.

        The verdicts are stored already, so trouble here is only logged.
        """
        request = delivery.request
        if request is None:
            return
        context, error = request._context, outcome.error
        try:
            match outcome.state:
                case "done":
                    self.backend.mark_as_done(
                        request.id, outcome.result, request=context, store_result=not request.ignore_result
                    )
                    signals.task_success.send(sender=self, result=outcome.result)
                    request.send_event("task-succeeded", result=f"{delivery.pairs} pairs", runtime=runtime_s)
                case "retried" | "parked":
                    self.backend.mark_as_retry(request.id, error, request=context, store_result=request.store_errors)
                    request.send_event("task-retried", exception=repr(error), traceback="")
                case "withdrawn":
                    reason = delivery.withdrawn or "revoked"
                    self.backend.mark_as_revoked(request.id, reason, request=context, store_result=request.store_errors)
                    request.send_event("task-revoked", terminated=False, signum=None, expired=reason == "expired")
                    signals.task_revoked.send(
                        sender=self, request=context, terminated=False, signum=None, expired=reason == "expired"
                    )
                case _:
                    self.backend.mark_as_failure(request.id, error, request=context, store_result=request.store_errors)
                    signals.task_failure.send(
                        sender=self, task_id=request.id, exception=error, args=[], kwargs={}, traceback=None, einfo=None
                    )
                    request.send_event("task-failed", exception=repr(error), traceback="")
        except Exception:
            log.exception("could not report the result of message %s", request.id)


def read_delivery(message: Any, body: Any, task: Task, app: Any, consumer: Any) -> Delivery:
    """Make a delivery of a Celery message of either protocol."""
    decoded = False
    headers, utc = message.headers, app.uses_utc_timezone()
    if body is not None or "args" in message.payload:
        read = hybrid_to_proto2 if "args" in message.payload else proto1_to_proto2
        body, headers, decoded, utc = read(message, message.payload if "args" in message.payload else body)
    request = Request(
        message, app=app, hostname=consumer.hostname, eventer=consumer.event_dispatcher, task=task, utc=utc,
        connection_errors=consumer.connection_errors, body=body or message.body, headers=headers, decoded=decoded,
    )  # fmt: skip
    if not (isinstance(request.id, str) and request.id.isprintable()):
        raise ValueError("its id is not plain text")
    args, kwargs, embed = request._payload
    delivery = Delivery(message, lane_of(message), request=request)
    delivery.redelivered = delivery.suspect = bool((message.delivery_info or {}).get("redelivered"))
    if len(args) != 1 or kwargs:
        delivery.refusal = MessageRejected(ErrorCode.INVALID_MESSAGE, f"{task.name} takes one argument, a JSON object")
        return delivery
    delivery.payload = args[0]
    pairs = args[0].get("pairs") if isinstance(args[0], Mapping) else None
    delivery.pairs = max(1, len(pairs)) if isinstance(pairs, list) else 1
    again = published_again(message.headers, args[0])
    delivery.redelivered |= again > 0
    # Not at the first time: a Redis that lost its data would have its whole window taken one by one.
    delivery.suspect |= again > 1
    if request.eta and request.eta > datetime.now(UTC):
        delivery.not_before = request.eta
    if options := [name for name in ("callbacks", "errbacks", "chain", "chord") if (embed or {}).get(name)]:
        delivery.refusal = CodedError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"{task.name} does not carry out link, link_error, chain or chord (this message has {', '.join(options)}): "
            "submit without, and read the verdicts with AsyncResult.get() or in SQL",
        )
    return delivery


def published_again(headers: Mapping[str, Any], payload: object) -> int:
    """How often the relay has published this attempt of the message beyond the first time."""
    publishes = headers.get("publishes")
    attempts = payload.get("attempts") if isinstance(payload, Mapping) else None
    if type(publishes) is not int or type(attempts) is not int:
        return 0
    return max(0, publishes - attempts - 1)


def lane_of(message: Any) -> str:
    """The queue that the message came through."""
    info = message.delivery_info or {}
    return str(info.get("routing_key") or info.get("exchange") or "")


def refused(message: Any, code: ErrorCode, detail: str) -> Delivery:
    """A message that Celery could make nothing of, to be recorded and acknowledged like any other."""
    return Delivery(message, lane_of(message), refusal=MessageRejected(code, detail[:2_000]))


class Consumer(CeleryConsumer):
    """Celery's consumer, but a message it cannot read is recorded before it is acknowledged, never dropped."""

    def record(self, message: Any, code: ErrorCode, detail: str) -> None:
        for task in self.app.tasks.values():
            if isinstance(task, MicroBatchTask) and task._deliveries is not None:
                return task._deliveries.add(refused(message, code, detail))
        raise RuntimeError("no micro-batch task is registered")

    def on_unknown_message(self, body: Any, message: Any) -> None:
        not_json = message.content_type == NOT_JSON
        code = ErrorCode.NOT_JSON if not_json else ErrorCode.INVALID_MESSAGE
        self.record(message, code, "the body is not JSON" if not_json else "not a Celery message: no task name")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.record(message, ErrorCode.UNKNOWN_TASK, f"no task of the name {str(exc)[:200]} here")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.record(message, ErrorCode.INVALID_MESSAGE, f"Celery refused it: {exc}")

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self.record(message, ErrorCode.NOT_JSON, f"could not be decoded: {exc}")
