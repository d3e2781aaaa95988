"""When which messages become a batch: pure, with the clock passed in, so that it is tested without Celery."""

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Lanes(Generic[T]):
    """What waits to be batched, a buffer a lane, the urgent lane first.

    A lane is due when it holds `max_pairs` or when its OLDEST message has waited `max_wait_s`. A batch takes whole
    messages until it holds `max_pairs`; the last may overshoot. Every `bulk_every`-th batch goes to the last lane that
    is due, so that a saturated urgent lane does not starve it; of `max_inflight` batches, one is kept for the first
    lane.

    A message that is added as `alone` is a batch of its own, before all others, and nothing runs beside it.
    """

    def __init__(
        self, names: Sequence[str], *, max_pairs: int, max_wait_s: float, max_inflight: int, bulk_every: int = 4
    ) -> None:
        self.max_pairs, self.max_wait_s, self.max_inflight = max_pairs, max_wait_s, max_inflight
        self.bulk_every = bulk_every
        self.buffers: dict[str, deque[tuple[T, int, float]]] = {name: deque() for name in names}
        self.alone: deque[tuple[str, T]] = deque()
        self.pairs: dict[str, int] = dict.fromkeys(names, 0)
        self.inflight: dict[str, int] = dict.fromkeys(names, 0)
        self.batches = 0
        self.is_alone = False

    def add(self, lane: str, item: T, pairs: int, now: float, *, alone: bool = False) -> None:
        """Append a message of `pairs` pairs that arrived at `now` (seconds of any steady clock)."""
        if alone:
            self.alone.append((lane, item))
            return
        self.buffers[lane].append((item, pairs, now))
        self.pairs[lane] += pairs

    def is_open(self, lane: str) -> bool:
        """Whether more messages of this lane are wanted: while less than a batch of them waits, and none for all."""
        return not self.alone and self.pairs[lane] < self.max_pairs

    def is_due(self, lane: str, now: float) -> bool:
        buffer = self.buffers[lane]
        return bool(buffer) and (self.pairs[lane] >= self.max_pairs or now >= buffer[0][2] + self.max_wait_s)

    def has_slot(self, lane: str) -> bool:
        """Whether another batch of this lane may start now."""
        if self.alone or self.is_alone:
            return False
        lanes = list(self.buffers)
        kept_free = 1 if lane != lanes[0] and self.max_inflight > 1 and not self.inflight[lanes[0]] else 0
        return sum(self.inflight.values()) + kept_free < self.max_inflight

    def take(self, now: float) -> tuple[str, list[T]] | None:
        """The next batch, or None; the caller says `done` when it has run. `is_alone` says whether it is."""
        if self.alone and not any(self.inflight.values()):
            lane, item = self.alone.popleft()
            self.is_alone = True
            self.inflight[lane] += 1
            return lane, [item]
        due = [lane for lane in self.buffers if self.is_due(lane, now) and self.has_slot(lane)]
        if not due:
            return None
        self.batches += 1
        lane = due[-1] if self.batches % self.bulk_every == 0 else due[0]
        batch: list[T] = []
        pairs = 0
        buffer = self.buffers[lane]
        while buffer and pairs < self.max_pairs:
            item, size, _ = buffer.popleft()
            batch.append(item)
            pairs += size
        self.pairs[lane] -= pairs
        self.inflight[lane] += 1
        return lane, batch

    def done(self, lane: str) -> None:
        """A batch of this lane has run."""
        self.inflight[lane] -= 1
        self.is_alone = False

    def waiting(self) -> list[T]:
        """The messages of no batch yet."""
        return [item for _, item in self.alone] + [item for buffer in self.buffers.values() for item, _, _ in buffer]

    def clear(self) -> None:
        """Forget the messages of no batch yet."""
        self.alone.clear()
        for name, buffer in self.buffers.items():
            buffer.clear()
            self.pairs[name] = 0

    def wake_at(self) -> float | None:
        """When a lane that has a slot becomes due by age; None when only an arrival or an end can change anything."""
        ages = [b[0][2] + self.max_wait_s for lane, b in self.buffers.items() if b and self.has_slot(lane)]
        return min(ages, default=None)
