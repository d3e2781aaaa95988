"""Whose batch is next on the device: the urgent lane's, the oldest first, and never one that waits for ever."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Turns:
    """A lock on the device that goes by (lane, age), where a plain one goes by who happens to be woken.

    Where less urgent batches were overtaken `bulk_every` - 1 times in a row, the next turn is theirs: one that has its
    slot (worker.lanes) would else wait for as long as more urgent ones come.
    """

    def __init__(self, lanes: Sequence[str], bulk_every: int = 4) -> None:
        self.lanes, self.bulk_every = list(lanes), bulk_every
        self.changed = threading.Condition()
        self.waiting: list[tuple[int, float, int]] = []  # rank of the lane, age, order of asking
        self.overtaken = self.asked = 0
        self.is_taken = False

    @contextmanager
    def turn(self, lane: str, since: float) -> Iterator[None]:
        """Wait for the device and keep it; `since` is when the batch began, in seconds of any one clock."""
        with self.changed:
            self.asked += 1
            mine = (self.lanes.index(lane), since, self.asked)
            self.waiting.append(mine)
            try:
                self.changed.wait_for(lambda: not self.is_taken and mine == self.next())
            finally:
                self.waiting.remove(mine)
            self.is_taken = True
            self.overtaken = self.overtaken + 1 if any(rank > mine[0] for rank, _, _ in self.waiting) else 0
        try:
            yield
        finally:
            with self.changed:
                self.is_taken = False
                self.changed.notify_all()

    def next(self) -> tuple[int, float, int]:
        """Who of those that wait goes next."""
        if self.overtaken < self.bulk_every - 1:
            return min(self.waiting)
        last = max(rank for rank, _, _ in self.waiting)
        return min(one for one in self.waiting if one[0] == last)
