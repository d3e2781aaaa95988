"""Backpressure: who hands pairs over faster than workers judge them is told so, and slowed down.

The outbox takes whatever it is given until the disk of Postgres is full. So producers look now and then whether it
holds more messages than a mark: `submit` pauses a moment in every call, and a file waits between its commits.
"""

import logging
import threading
import time

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from db import outbox
from worker.errors import first_line

log = logging.getLogger(__name__)

#: Between two looks of a process. Counting 40,000 of a million rows takes some 20 ms.
LOOK_EVERY_S = 1.0
#: A look that takes longer than this is given up.
LOOK_LIMIT_MS = 2_000
#: Between two warnings.
WARN_EVERY_S = 60.0
#: The longest pause in a call, reached where the outbox holds twice its mark. For a live pair somebody may be waiting.
MAX_PAUSE_S = {"live": 0.5, "bulk": 5.0}


class HighWater:
    """How full the outbox of a database is, against its mark in messages. Threads may share one."""

    def __init__(self, engine: Engine, mark: int) -> None:
        self.engine, self.mark = engine, mark
        self.held = 0
        self.next_look = self.next_warning = 0.0
        self.looking = threading.Lock()

    def waiting(self) -> int:
        """Messages in the outbox, counted up to twice the mark, as of a second ago at most."""
        if time.monotonic() >= self.next_look and self.looking.acquire(blocking=False):
            try:
                self.held = self.look()
                self.next_look = time.monotonic() + LOOK_EVERY_S
            finally:
                self.looking.release()
        return self.held

    def look(self) -> int:
        """Count; 0 where the database does not say. Whether it takes pairs is found out by whoever has some."""
        try:
            with self.engine.begin() as connection:
                connection.execute(text(f"set local statement_timeout = {LOOK_LIMIT_MS}"))
                return outbox.waiting(connection, 2 * self.mark)
        except SQLAlchemyError as error:
            log.debug("how full the outbox is, is not known: %s", first_line(error))
            return 0

    def excess(self) -> float:
        """By how much of itself the mark is exceeded, from 0 to 1; says so in the log once in a while."""
        held = self.waiting()
        if held <= self.mark:
            return 0.0
        if time.monotonic() >= self.next_warning:
            self.next_warning = time.monotonic() + WARN_EVERY_S
            log.warning("%s: start more workers, or submit less", self.sentence(held))
        return min(held / self.mark - 1, 1.0)

    def slow_down(self, lane: str) -> None:
        """Pause for the longer the fuller the outbox is."""
        if pause := MAX_PAUSE_S[lane] * self.excess():
            time.sleep(pause)

    def sentence(self, held: int) -> str:
        """That the outbox holds more than its mark, in words."""
        more = " or more" if held >= 2 * self.mark else ""
        return f"the outbox holds {held:,} messages{more}, CONCORD_OUTBOX_HIGH_WATER is {self.mark:,}"

    def worker_runs(self) -> bool:
        """Whether a worker publishes the outbox; True also where the database does not say."""
        try:
            with self.engine.begin() as connection:
                return outbox.has_publisher(connection)
        except SQLAlchemyError:
            return True
