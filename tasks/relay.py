"""Outbox -> Redis. Rides in every worker on a thread of its own; one at a time holds the lease and works.

Each turn publishes what is due while Redis holds less than its window of a lane. Every few seconds it looks for
messages that were published and are neither in Redis nor settled: Redis lost them (it restarted, or a worker died
between popping and noting what it popped), and publishing them again is always harmless.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

from kombu.utils.encoding import bytes_to_str
from sqlalchemy import Engine

from db import outbox, registry
from db.engine import make_engine
from db.outbox import LANES, LEASE_S, OutboxRow
from tasks.app import app
from tasks.submit import celery_id, publish, queue_length, redis_errors
from worker.errors import first_line

log = logging.getLogger(__name__)

#: Between two looks for lost messages; one must be missing in both.
SEARCH_EVERY_S = 5.0
#: Counts can agree by chance (messages that came without an outbox row), so the contents are read this often anyway.
READ_ALL_EVERY_S = 60.0
#: Months ahead are looked after this often.
PARTITIONS_EVERY_S = 3_600.0
#: Messages that are claimed at a time, so that the lease is renewed between.
CLAIM_LIMIT = 100
#: Messages that are looked for at a time.
SEARCH_LIMIT = 10_000
#: After an error, before the next try.
BACK_OFF_S = 2.0
#: Between two turns at least, however fast workers are: a turn writes to Postgres.
LEAST_PAUSE_S = 0.02


class Relay(threading.Thread):
    """Publishes due messages while it holds the lease; stopped by `stop`."""

    def __init__(self, database_url: str, windows: dict[str, int], poll_s: float) -> None:
        super().__init__(name="relay", daemon=True)
        # A statement that outlives the lease would publish beside the next holder.
        self.engine: Engine = make_engine(database_url, pool_size=1, statement_timeout_s=LEASE_S - 5)
        self.windows, self.poll_s = windows, poll_s
        # Containers may share a host's name and have equal pids.
        self.holder = f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex[:8]}"
        self.stopped = threading.Event()
        self.holds_lease = False
        self.missing: set[UUID] = set()
        self.next_search = self.next_read_all = self.next_partitions = 0.0

    def run(self) -> None:
        pause = self.poll_s
        while not self.stopped.wait(pause):
            try:
                pause = pause_after(self.turn(), pause, self.poll_s)
            except Exception as error:
                # Whatever is away comes back; the outbox keeps everything until then.
                log.warning("the relay waits: %s", first_line(error))
                pause = max(BACK_OFF_S, self.poll_s)
        self.give_up_lease()

    def stop(self) -> None:
        """Let go of the lease and end."""
        self.stopped.set()
        self.join(timeout=LEASE_S)
        self.engine.dispose()

    def give_up_lease(self) -> None:
        try:
            with self.engine.begin() as connection:
                outbox.drop_lease(connection, self.holder)
        except Exception as error:
            log.warning("the lease is left to run out: %s", first_line(error))

    def turn(self) -> float:
        """One round: renew the lease, publish what is due, look for what was lost.

        Returns how much was published, as a share of the lane's window.
        """
        with self.engine.begin() as connection:
            held, self.holds_lease = self.holds_lease, outbox.take_lease(connection, self.holder)
        if self.holds_lease and not held:
            log.info("this worker publishes the outbox")
        if held and not self.holds_lease:
            log.info("another worker publishes the outbox from now on")
        if not self.holds_lease:
            self.missing.clear()
            return 0.0
        share = self.publish_all_due()
        now = time.monotonic()
        if now >= self.next_search:
            self.next_search = now + SEARCH_EVERY_S
            self.publish_lost(now)
        if now >= self.next_partitions:
            self.next_partitions = now + PARTITIONS_EVERY_S
            with self.engine.begin() as connection:
                registry.make_partitions(connection)
        return share

    def publish_all_due(self) -> float:
        """A window's worth of each lane at most; returns the larger share of its window that was published."""
        shares = [0.0]
        for lane in LANES:
            window, published, claimed = self.windows[lane], 0, CLAIM_LIMIT
            # Less than the limit: nothing more is due, or Redis holds its window. To go on for as long as workers make
            # room would keep the other lane, and what was lost, waiting.
            while claimed == CLAIM_LIMIT and published < window and not self.stopped.is_set():
                claimed = self.publish_due(lane)
                published += claimed
            shares.append(published / window)
        return max(shares)

    def publish_due(self, lane: str) -> int:
        """Claim, commit, then publish: a crash in between leaves a message that is found missing later."""
        room = min(self.windows[lane] - queue_length(lane), CLAIM_LIMIT)
        if room <= 0:
            return 0
        with self.engine.begin() as connection:
            if not outbox.take_lease(connection, self.holder):
                return 0
            rows = outbox.claim(connection, lane, room)
        if rows:
            self.hand_over(sorted(rows, key=lambda row: row.message_id))
        return len(rows)

    def hand_over(self, rows: Sequence[OutboxRow]) -> None:
        """Publish rows of one lane at once; where one cannot be made a message, each by itself."""
        try:
            publish(rows)
        except redis_errors():
            self.put_back(rows)
            raise
        except Exception as error:
            log.warning("one of %d messages cannot be published, each is tried alone: %s", len(rows), first_line(error))
            self.hand_over_singly(rows)

    def hand_over_singly(self, rows: Sequence[OutboxRow]) -> None:
        """Publish each row; one that cannot be made a message is recorded, so that it holds nobody up.

        What was published a moment ago as well does no harm.
        """
        for place, row in enumerate(rows):
            try:
                publish([row])
            except redis_errors():
                self.put_back(rows[place:])
                raise
            except Exception as error:
                log.exception("message %s cannot be published; it is recorded", row.message_id)
                why = f"cannot be published: {first_line(error)}"
                with self.engine.begin() as connection:
                    outbox.refuse(connection, row, why)

    def put_back(self, rows: Sequence[OutboxRow]) -> None:
        """What Redis did not take, full for example, is due again: marked as published it would be looked for, and
        while that lasts the whole outbox would come to be.

        What it took stays published: else the same few would go into the little room that is left, over and over.
        """
        taken = newest(rows[0].lane)
        with self.engine.begin() as connection:
            outbox.unclaim(connection, [row for row in rows if celery_id(row) not in taken])

    def publish_lost(self, now: float) -> None:
        """Publish again what was missing in two looks in a row."""
        with self.engine.begin() as connection:
            overdue = outbox.overdue(connection, SEARCH_LIMIT)
            published = outbox.published_count(connection)
        if not overdue:
            self.missing.clear()
            return
        in_redis = snapshot(contents=self.missing != set() or now >= self.next_read_all)
        if in_redis.ids is None and in_redis.count < published:
            in_redis = snapshot(contents=True)
        if in_redis.ids is None:
            return
        self.next_read_all = now + READ_ALL_EVERY_S
        missing = {message_id for message_id, task_id in overdue.items() if task_id not in in_redis.ids}
        lost, self.missing = sorted(missing & self.missing), missing
        if lost:
            log.warning("Redis lost %d messages; they are published again", len(lost))
            with self.engine.begin() as connection:
                # Reading what Redis holds takes its time.
                if outbox.take_lease(connection, self.holder):
                    outbox.make_due(connection, lost)
            self.publish_all_due()


def pause_after(share: float, pause_s: float, poll_s: float) -> float:
    """Until the next turn: shorter while workers empty half a window between two, so that they never wait for it."""
    if share >= 1 / 2:
        pause_s = max(pause_s / 2, LEAST_PAUSE_S)
    elif share < 1 / 4:
        pause_s *= 2
    return min(pause_s, poll_s)


def newest(lane: str) -> set[str]:
    """Celery's ids of what came into a lane last, twice as many messages as are claimed; none while Redis is away."""
    try:
        with app.connection_or_acquire() as connection:
            channel = connection.default_channel
            with channel.conn_or_acquire() as client:
                return set(task_ids(client.lrange(channel._q_for_pri(lane, 0), 0, 2 * CLAIM_LIMIT - 1)))
    except redis_errors():
        return set()


class InRedis:
    """What Redis holds of our lanes at one moment: how many messages, and, where asked for, which."""

    def __init__(self, count: int, ids: set[str] | None) -> None:
        self.count, self.ids = count, ids


def snapshot(*, contents: bool) -> InRedis:
    """The lanes' queues, over all priority keys, and what workers hold, read in one MULTI."""
    with app.connection_or_acquire() as connection:
        channel = connection.default_channel
        keys = [channel._q_for_pri(lane, step) for lane in LANES for step in channel.priority_steps]
        with channel.conn_or_acquire() as client, client.pipeline(transaction=True) as pipe:
            for key in keys:
                pipe.lrange(key, 0, -1) if contents else pipe.llen(key)
            pipe.hvals(channel.unacked_key) if contents else pipe.hlen(channel.unacked_key)
            found: list[Any] = pipe.execute()
    if not contents:
        return InRedis(sum(found), None)
    *queues, unacked = found
    entries = [entry for queue in queues for entry in queue] + unacked
    return InRedis(len(entries), set(task_ids(entries)))


def task_ids(entries: Sequence[bytes]) -> Iterator[str]:
    """Celery's ids of the messages in raw entries of a queue or of `unacked`; what has none is passed over."""
    for entry in entries:
        try:
            raw = json.loads(bytes_to_str(entry))
            message = raw[0] if isinstance(raw, list) else raw
            yield str(message["headers"]["id"])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue
