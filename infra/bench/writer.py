"""Verdicts into Postgres: one connection in commits of 64, and eight writers that get in each other's way.

A commit is all that a batch changes: its verdicts, its message's row out of the outbox, the run's counters, and the
batch's own row; fsync is on. The eight write the same pairs, each in batches and an order of its own, so that rows of a
batch are another's too. Whatever Postgres ends for a deadlock must be tried again before a caller hears of it.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

from sqlalchemy import Engine, text

from db import outbox, registry, runs
from db.batches import BatchRow
from db.engine import make_engine
from db.outbox import OutboxRow
from db.verdicts import Settlement, Verdict
from infra.bench.site import Site

TARGET_VERDICTS_PER_S = 8_000
COMMIT = 64
#: Batches that are made at a time, while the clock stands.
AT_ONCE = 50
WRITERS = 8
#: Messages that all of them write, each of a few pairs, and how many of them go into a batch.
SHARED_MESSAGES, SHARED_PAIRS, SHARED_A_BATCH = 200, 4, 16

DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"
DURABILITY = "select current_setting('fsync') as fsync, current_setting('synchronous_commit') as commit"
KEPT = "select count(*) from verdict where run_id = :run_id"


@dataclass
class Rows:
    """Makes rows of one run, as a worker with a model would."""

    engine: Engine
    run_id: UUID = field(default_factory=uuid4)

    def __post_init__(self) -> None:
        from tasks.submit import uuid7

        self.new_id = uuid7
        with self.engine.begin() as connection:
            runs.open_run(connection, self.run_id, name="bench", lane="bulk", source="bench")
            self.model = registry.register_model(
                connection, name="bench", revision="1", recipe="fp32", weights_sha256="0", prompt="?", image_px=480,
                answers={"yes": "entailment", "no": "contradiction"},
            )  # fmt: skip
        self.measured = BatchRow("bench", "bulk", self.model, 1, COMMIT, COMMIT, 1.0, 0.1, 0.2, 0.0, 1_000, 1_200, 64)

    def settlement(self, pairs: int) -> Settlement:
        """A message of so many judged pairs, accepted before."""
        message_id, now = self.new_id(), datetime.now(UTC)
        rows = [self.verdict(message_id, now, number) for number in range(pairs)]
        return Settlement(rows, done=[(message_id, 0)])

    def verdict(self, message_id: UUID, submitted_at: datetime, number: int) -> Verdict:
        asked = f"a red leather shoe with white laces, size {number}"
        return Verdict(
            submitted_at=submitted_at,
            pair_id=self.new_id(),
            source="bench",
            message_id=message_id,
            lane="bulk",
            status="judged",
            attempts=0,
            ref=f"sku-{number:08}",
            run_id=self.run_id,
            image=f"s3://shop/pictures/2026/{number:08}.jpg",
            text=asked,
            attributes={"category": "shoes", "seller": "s-17"},
            label="entailment",
            p_entailment=0.9,
            p_contradiction=0.0625,
            p_neutral=0.0375,
            answer="yes",
            policy="catalog",
            policy_version=1,
            decision="accept",
            text_scored=asked,
            model_version_id=self.model,
            image_sha256=submitted_at.isoformat().encode()[:32].ljust(32),
            image_etag='"d41d8cd98f00b204e9800998ecf8427e"',
            image_width=1_000,
            image_height=1_000,
            decode_mode="reduced",
            content_hash=self.new_id().bytes,
        )

    def accept(self, settlements: Sequence[Settlement]) -> None:
        """Put the messages into the outbox."""
        waiting = [OutboxRow(one.done[0][0], "bulk", {"run_id": str(self.run_id)}) for one in settlements]
        with self.engine.begin() as connection:
            outbox.add(connection, waiting, published=True)

    def written(self) -> tuple[int, int, int]:
        """Verdicts that are there, those that the run has counted, and messages that are left in the outbox."""
        with self.engine.connect() as connection:
            kept = int(connection.execute(text(KEPT), {"run_id": self.run_id}).scalar_one())
            return kept, runs.read(connection, self.run_id).settled, outbox.waiting(connection, 1_000_000)


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """`seconds` of one writer's commits, then the eight."""
    with Site() as site:
        say("one writer")
        alone = one_writer(site, seconds)
        say(f"{WRITERS} writers of the same rows")
        together = writers(site)
        (server,) = site.ask(DURABILITY)
    rate = alone["verdicts_per_s"]
    whole = bool(alone.pop("complete")) and bool(together.pop("complete"))
    return {
        "target": f"at least {TARGET_VERDICTS_PER_S:,} verdicts/s; no error reaches a caller",
        "met": rate >= TARGET_VERDICTS_PER_S and whole and not together["errors"],
        "pairs_per_s": rate,
        "complete": whole,
        "fsync": server.fsync,
        "synchronous_commit": server.commit,
        "one_writer": alone,
        f"{WRITERS}_writers": together,
    }


def one_writer(site: Site, seconds: float) -> dict[str, float]:
    from tasks.storing import write

    engine = make_engine(site.addresses.database_url, pool_size=1)
    rows = Rows(engine)
    took: list[float] = []
    while sum(took) < seconds:
        settlements = [rows.settlement(COMMIT) for _ in range(AT_ONCE)]
        rows.accept(settlements)
        for one in settlements:
            began = time.perf_counter()
            write(engine, [one], lambda: False, rows.measured)
            took.append(time.perf_counter() - began)
    verdicts = len(took) * COMMIT
    complete = rows.written() == (verdicts, verdicts, 0)
    engine.dispose()
    in_order = sorted(took)
    return {
        "verdicts_per_s": round(verdicts / sum(took)),
        "commits": len(took),
        "p50_ms": round(1_000 * in_order[len(took) // 2], 2),
        "p99_ms": round(1_000 * in_order[len(took) * 99 // 100], 2),
        "complete": complete,
    }


def writers(site: Site) -> dict[str, float]:
    from tasks.storing import write

    engine = make_engine(site.addresses.database_url, pool_size=WRITERS)
    rows = Rows(engine)
    settlements = [rows.settlement(SHARED_PAIRS) for _ in range(SHARED_MESSAGES)]
    rows.accept(settlements)

    def work(seed: int) -> None:
        mine = random.Random(seed).sample(settlements, len(settlements))
        for start in range(0, len(mine), SHARED_A_BATCH):
            write(engine, mine[start : start + SHARED_A_BATCH], lambda: False, rows.measured)

    before = int(site.ask(DEADLOCKS)[0][0])
    began = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        ended: list[Future[None]] = [pool.submit(work, seed) for seed in range(WRITERS)]
    took = time.perf_counter() - began
    verdicts = SHARED_MESSAGES * SHARED_PAIRS
    complete = rows.written() == (verdicts, verdicts, 0)
    engine.dispose()
    return {
        "verdicts": verdicts,
        "settled_pairs_per_s": round(WRITERS * verdicts / took),
        "deadlocks": int(site.ask(DEADLOCKS)[0][0]) - before,
        "errors": sum(one.exception() is not None for one in ended),
        "complete": complete,
    }
