"""Micro-batches on Celery: messages of many producers are judged together and acknowledged one by one.

`worker.delivery` reads a message, `worker.lanes` decides when which messages become a batch. Here is what carries that
out:

- `Deliveries` lives on the worker's main thread (Celery's hub): it owns the lanes, the timer and every
  acknowledgement, and hands batches to the pool.
- `MicroBatchTask` is what a task derives from: `process` gets a batch on a pool thread and says what became of each
  message. A message is acknowledged only after `process` has returned, and given back where it raised.

The pool must be `threads`: a pool target that raises is swallowed there and its messages would stay unacknowledged
for ever, so `run` never raises.
"""

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from celery import signals
from celery.app.task import Task
from celery.worker import state as worker_state

from worker.delivery import NOT_CARRIED_OUT, Delivery, read_delivery, withdrawn
from worker.endings import end_device_lost, end_hung, is_stopping
from worker.errors import DeviceLost, Hold
from worker.lanes import Lanes
from worker.popping import OpenLanes

log = logging.getLogger(__name__)

#: How often the tags of messages in hand are touched, so that `visibility_timeout` can be far shorter than a batch.
TOUCH_EVERY_S = 5.0


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
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The watchdog's clock runs inside: round decoders and the model, not round waits for a server that is away."""
        one = object()
        self.hang_clock.started[one] = time.monotonic()
        try:
            yield
        finally:
            del self.hang_clock.started[one]

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds spent inside to those of the stage."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - started

    def split(self) -> list["Batch"]:
        """Its messages, each as a batch of its own under the same watch."""
        return [replace(self, deliveries=[delivery], seconds=defaultdict(float)) for delivery in self.deliveries]

    def stopping(self) -> bool:
        """Whether the worker has been told to stop; a batch that only waits should raise then."""
        return is_stopping()


class Deliveries:
    """The hub's side of one connection to the broker. Every method runs on the hub's thread."""

    def __init__(self, task: "MicroBatchTask", consumer: Any, batches: dict[int, Batch]) -> None:
        """`batches` still run, though the connection that brought them is gone."""
        self.task, self.consumer = task, consumer
        names = [lane for lane in task.lanes if lane in consumer.app.amqp.queues.consume_from] or list(task.lanes)
        self.lanes: Lanes[Delivery] = Lanes(
            names, max_pairs=task.max_pairs, max_wait_s=task.max_wait_s, max_inflight=task.max_inflight
        )
        self.batches = batches
        for batch in batches.values():
            self.lanes.inflight[batch.lane] += 1
            self.lanes.is_alone |= batch.alone
        self.closed = False
        self.popping: OpenLanes | None = None
        self.wake_entry: Any = None
        self.touch_entry = consumer.timer.call_repeatedly(TOUCH_EVERY_S, self.touch)

    def close(self) -> None:
        """The connection is gone: what is buffered will be delivered again; what runs is acknowledged on the next."""
        self.closed = True
        self.lanes.clear()
        self.touch_entry.cancel()
        if self.wake_entry is not None:
            self.wake_entry.cancel()

    # -- in -------------------------------------------------------------------------------------------------------

    def add(self, delivery: Delivery) -> None:
        self.gate(delivery.message.channel)
        delivery.lane = self.lane_of(delivery.lane)
        if delivery.request is not None:
            worker_state.task_reserved(delivery.request)
        self.lanes.add(delivery.lane, delivery, delivery.weight, time.monotonic(), alone=delivery.suspect)
        self.pump()

    def lane_of(self, queue: str) -> str:
        """What comes by another queue is not urgent."""
        return queue if queue in self.lanes.buffers else next(reversed(self.lanes.buffers))

    def gate(self, channel: Any) -> None:
        """Pop a lane while it has room for PAIRS: Celery's prefetch counts messages, of 1 to 256 pairs each."""
        if self.popping is not channel._queue_cycle:
            self.popping = channel._queue_cycle
            self.popping.gate(channel, lambda queue: not self.closed and self.lanes.is_open(self.lane_of(queue)))

    def pump(self) -> None:
        """Start every batch that is due and has a slot, then sleep until the next is."""
        while not self.closed and not is_stopping() and (taken := self.lanes.take(time.monotonic())):
            batch = Batch(*taken, alone=self.lanes.is_alone)
            for delivery in batch.deliveries:
                delivery.withdrawn = withdrawn(delivery.request)
            self.batches[id(batch)] = batch
            self.consumer.pool.apply_async(self.task.run, (batch, self.consumer), callback=lambda _: None)
        if self.popping is not None and not self.closed and not is_stopping():
            self.popping.reopen()
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
        given_back = [delivery for delivery in batch.deliveries if delivery not in settled]
        try:
            acknowledge(settled, self.consumer)
            # A worker that stops hands them on at once. One that goes on only stops touching them, so that what it
            # cannot settle comes back after visibility_timeout, to whoever is free then, and not in a hot loop.
            for delivery in given_back if is_stopping() else ():
                self.hand_on(delivery)
        except Exception:
            log.exception("could not acknowledge %d messages; they will be delivered again", len(batch.deliveries))
        self.pump()

    def give_back(self) -> None:
        """The worker stops: what is in no batch yet goes back at once, to workers that go on."""
        waiting = self.lanes.waiting()
        self.lanes.clear()
        for delivery in waiting:
            self.hand_on(delivery)

    def hand_on(self, delivery: Delivery) -> None:
        """Back into its queue at once. Where Redis takes nothing, one after the other is left to its timeout."""
        try:
            delivery.message.reject_log_error(log, self.consumer.connection_errors, requeue=True)
        except Exception as error:
            log.warning("a message could not be given back, and will be delivered again: %s", error)

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
        for batch in list(self.batches.values()):
            yield from batch.deliveries

    def watch(self) -> None:
        """Every second, on the watchdog's thread: end the process if a batch hangs."""
        clocks = [batch.hang_clock.since for batch in list(self.batches.values())]
        since = min((started for started in clocks if started is not None), default=None)
        if since is not None and time.monotonic() - since > self.task.hang_limit_s:
            end_hung(self.task.hang_limit_s)
        if is_stopping():
            # The hub, which does this else, stands still while batches end.
            self.touch()


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
    max_inflight = 4
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
            delivery = read_delivery(message, body, task, app, consumer)
            request = delivery.request
            if request is not None:
                signals.task_received.send(sender=consumer, request=request)
                request.send_event("task-received", name=request.name, args=request.argsrepr, kwargs=request.kwargsrepr)
            deliveries.add(delivery)

        return on_message

    def watch(self) -> None:
        """On the watchdog's thread."""
        if self._deliveries is not None:
            self._deliveries.watch()

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
                    tell(delivery.request.on_accepted, os.getpid(), batch.started_at)
            outcomes = self.process(batch)
            for delivery, outcome in zip(batch.deliveries, outcomes, strict=True):
                settled[delivery] = None
                self.report(delivery, outcome, time.monotonic() - batch.started_at)
        except Hold as error:
            log.warning("a batch of %d messages is given back: %s", len(batch.deliveries), error)
        except DeviceLost as error:
            end_device_lost(error)
        except BaseException as error:
            log.exception("a batch of %d messages is given back: %s", len(batch.deliveries), error)
        for delivery in batch.deliveries:
            if delivery.request is not None:
                tell(worker_state.task_ready, delivery.request, successful=delivery in settled)
        consumer.call_soon(self.finish, batch, settled)

    def report(self, delivery: Delivery, outcome: Outcome, runtime_s: float) -> None:
        """What Celery's users see: result backend, events, signals.

        The verdicts are stored already, so trouble here is only logged.
        """
        request = delivery.request
        if request is None:
            return
        error = outcome.error
        try:
            context = request._context
            # They are refused, and Celery's backend would carry them out here all the same.
            for name in NOT_CARRIED_OUT:
                setattr(context, name, None)
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


def tell(what: Callable[..., object], *arguments: object, **named: object) -> None:
    """Keep Celery's own books. Trouble with one message's is no trouble of its batch's."""
    try:
        what(*arguments, **named)
    except Exception:
        log.exception("Celery could not be told of a message")
