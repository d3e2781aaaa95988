"""The producer's own book: a line a pair, written after the call that accepted the pair has returned."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

#: How a pair was handed over: `submit` to either lane, `enqueue` in SQL, a file as a run, a bare `send_task`.
Way = Literal["live", "bulk", "sql", "file", "send_task"]
WAYS: tuple[Way, ...] = get_args(Way)
#: The ways of the outbox: a pair that was accepted by one of them is never lost. `send_task` has Redis's guarantee.
GUARANTEED: frozenset[Way] = frozenset(WAYS) - {"send_task"}


@dataclass(frozen=True)
class Entry:
    """One accepted pair: its id, the producer's name for it, and the run that it counts into."""

    way: Way
    pair_id: str
    ref: str
    run_id: str = ""


class Ledger:
    """A file of lines `way pair_id ref [run_id]`, appended to and flushed a call at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entries: Iterable[Entry]) -> None:
        lines = [f"{entry.way} {entry.pair_id} {entry.ref} {entry.run_id}\n" for entry in entries]
        with self.path.open("a") as file:
            file.write("".join(lines))

    def read(self) -> list[Entry]:
        if not self.path.exists():
            return []
        rows = [line.split() for line in self.path.read_text().splitlines()]
        ways = {str(way): way for way in WAYS}
        return [Entry(ways[way], *rest) for way, *rest in rows]
