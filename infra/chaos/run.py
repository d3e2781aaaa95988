"""One chaos run from the schedule to the books: `concord chaos`, docs/chaos.md."""

import contextlib
import json
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from db.outbox import LANES
from infra.chaos import books
from infra.chaos.books import Books, Footprint
from infra.chaos.faults import Faults
from infra.chaos.ledger import Ledger
from infra.chaos.producer import BARE_SOURCE, SOURCE
from infra.chaos.recovery import look_at
from infra.chaos.schedule import PARTS, Fault, Part, plan
from infra.chaos.site import MAX_INFLIGHT, MAX_PAIRS, Site, happens
from infra.chaos.workers import ROOT, START_S, Batch, settled
from tasks.console import progress

#: Pairs for each second of the schedule, unless a duration is given: less than three workers judge on two cores.
PAIRS_PER_S = 40
#: The shortest schedule: a frozen holder of the lease takes half of it.
SHORTEST_S = 60.0
#: A recovery may take this long.
RECOVERY_LIMIT_S = 60.0
#: Where nothing has changed for this long, nothing will: longer than any wait for a delivery or an attempt.
STALLED_S = 120.0
#: Of so many ends of workers, so many are to be known to have come in the middle of a batch.
MANY_KILLS, WANTED_MID_BATCH = 10, 5
#: Nothing has been on its way for this long: what one process has just taken from another is seen by then.
QUIET_FOR_S = 10.0
POLL_S = 0.25
#: What a message of a run holds. A batch, and what waits in a lane for the next one, is that much more than what is one
#: pair short of enough.
LARGEST_MESSAGE = 64
HELD_PAIRS = (MAX_INFLIGHT + len(LANES)) * (MAX_PAIRS - 1 + LARGEST_MESSAGE)
#: How far above the start memory and connections may be in the end, for each worker where it is theirs: a pool fills up
#: with use, and torch's own memory grows a little with the shapes that it has seen.
MORE_CONNECTIONS, MORE_REDIS_CONNECTIONS, MORE_REDIS_MB, MORE_WORKER_MB = 2, 3, 8.0, 96.0

VERDICTS = "select count(*) from verdict where source in (:source, :bare_source)"


@dataclass(frozen=True)
class Order:
    """What is to be done."""

    pairs: int
    seed: int
    parts: Collection[Part] = PARTS
    outbox: bool = True
    workers: int = 3
    duration_s: float | None = None
    folder: Path = Path(".concord/chaos")

    @property
    def seconds(self) -> float:
        return self.duration_s or max(SHORTEST_S, self.pairs / PAIRS_PER_S)

    @property
    def command(self) -> str:
        """The command line that does the same again."""
        words = ["concord chaos", f"--pairs {self.pairs}", f"--seed {self.seed}", f"--duration {self.seconds:g}"]
        words += [f"--kill {','.join(part for part in PARTS if part in self.parts)}", f"--workers {self.workers}"]
        return " ".join(words if self.outbox else [*words, "--no-outbox"])


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the figures of the JSON line, and a sentence for everything that is wrong."""

    figures: dict[str, Any]
    problems: Sequence[str]


def run(order: Order, console: Console) -> Outcome:
    """Bring a site up, break it while pairs go through it, and check the books."""
    schedule = plan(order.seed, order.parts, order.seconds)
    console.print(f"{order.command}\n" + "\n".join(map(str, schedule)), markup=False)
    with contextlib.ExitStack() as life:
        with console.status("starting Postgres, Redis, S3 and the workers"):
            site = life.enter_context(Site(order.folder, order.workers, order.seed))
        with console.status("warming up"):
            before = site.warm_up()
        ledger = Ledger(site.folder / "ledger.txt")
        faults, seconds = live_through(order, schedule, site, ledger, console)
        with console.status("checking the books"):
            if not happens(site.supervisor.all_ready, START_S):
                faults.problems.append(f"not all workers were up again within {START_S:.0f} s: see {site.logs}")
            found = books.check(ledger.read(), site.engine, site.redis, outbox=order.outbox)
            limits = allowed(order.workers)
            after = site.back_at(before, limits)
    batches = [batch for worker in site.supervisor.started for batch in settled(worker.read())]
    figures = figures_of(order, found, faults, batches, seconds)
    problems = problems_of(order, found, faults, batches, figures)
    problems += [*site.supervisor.problems, *after.problems(before, limits)]
    figures |= {"memory_mb": [round(before.worker_mb), round(after.worker_mb)], "problems": len(problems)}
    return Outcome(figures, problems)


def live_through(
    order: Order, schedule: Sequence[Fault], site: Site, ledger: Ledger, console: Console
) -> tuple[Faults, float]:
    """Pairs in and faults on, until all is settled or nothing moves; returns the seconds that it took too."""
    arguments = ["--pairs", str(order.pairs), "--seed", str(order.seed), "--seconds", str(order.seconds)]
    arguments += [] if order.outbox else ["--no-outbox"]
    started = moved = time.monotonic()
    quiet_since: float | None = None
    last = 0

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - started:7.1f} s  {what}", markup=False)

    faults, left = Faults(site, say), list(schedule)
    with site.producer(ledger.path, *arguments) as producer, progress(console) as bar:
        task = bar.add_task("judged", total=order.pairs)
        try:
            while quiet_since is None or time.monotonic() < quiet_since + QUIET_FOR_S:
                now = time.monotonic()
                while left and now >= started + left[0].at_s:
                    faults.begin(left.pop(0))
                judged = observe(site, faults) or last
                for one in faults.newly_recovered():
                    say(f"recovered within {one.recovered_s:.1f} s: {one.what}")
                busy = bool(left) or faults.going_on
                if busy or judged != last:
                    moved, last = now, judged
                elif now > moved + STALLED_S:
                    faults.problems.append(f"nothing has moved for {STALLED_S:.0f} s: this is given up")
                    break
                idle = not busy and producer.poll() is not None and site.is_quiet()
                quiet_since = (quiet_since or now) if idle else None
                bar.update(task, completed=judged)
                time.sleep(POLL_S)
        finally:
            faults.give_up()
        if producer.poll() != 0:
            log = (site.logs / "producer.log").read_text()
            faults.problems.append(f"the producer ended with status {producer.poll()}: {log[-1_000:]}")
    return faults, moved - started


def observe(site: Site, faults: Faults) -> int:
    """How many verdicts there are, and which faults the site has recovered from; 0 while the database is away."""
    try:
        look_at(faults.watched, site.engine)
        with site.engine.connect() as connection:
            found = connection.execute(text(VERDICTS), {"source": SOURCE, "bare_source": BARE_SOURCE})
            return int(found.scalar_one())
    except SQLAlchemyError:
        return 0


def figures_of(order: Order, found: Books, faults: Faults, batches: Sequence[Batch], seconds: float) -> dict[str, Any]:
    """The JSON line."""
    done = faults.done
    again = [batch for batch in batches if batch.delivered_before]
    recovered = [one.recovered_s for one in faults.watched if one.recovered_s is not None]
    told = sum(worker.stopped_in_a_batch() for worker in faults.ended if worker.log.exists())
    return {
        "pairs": found.pairs,
        "lost": len(found.lost),
        "duplicated": len(found.duplicated),
        "failed": len(found.failed),
        "rejected": len(found.rejected),
        "kills": len(faults.ended),
        "kills_mid_batch": faults.died_in_a_batch + told,
        "redis_restarts": sum(done["redis", how] for how in ("kill", "stop", "wipe")),
        "redis_wiped": done["redis", "wipe"],
        "postgres_restarts": sum(done["postgres", how] for how in ("kill", "stop")),
        "frozen": {part: count for part in ("relay", "redis", "postgres") if (count := done[part, "freeze"])},
        "redelivered": sum(batch.messages for batch in again),
        "rejudged": max(0, sum(batch.delivered_before for batch in batches) - faults.wiped_waiting),
        "recovery_s_max": round(max(recovered, default=0.0), 1),
        "outbox_left": found.outbox_left,
        "lost_bare": len(found.lost_bare),
        "seed": order.seed,
        "seconds": round(seconds, 1),
        "pairs_per_s": round(found.pairs / seconds, 1) if seconds else 0.0,
        "commit": commit(),
    }


def problems_of(
    order: Order, found: Books, faults: Faults, batches: Sequence[Batch], figures: dict[str, Any]
) -> list[str]:
    """Everything that is not as it must be."""
    problems = found.problems() + faults.problems
    if figures["kills"] >= MANY_KILLS and figures["kills_mid_batch"] < WANTED_MID_BATCH:
        problems.append(
            f"only {figures['kills_mid_batch']} of {figures['kills']} workers ended in the middle of a batch"
        )
    if found.pairs < order.pairs:
        problems.append(f"only {found.pairs} of {order.pairs} pairs were accepted")
    for one in faults.watched:
        if one.recovered_s is None:
            problems.append(f"no recovery from: {one.what}; {len(one.waiting)} pairs that were in hand have no verdict")
        elif one.recovered_s > RECOVERY_LIMIT_S:
            problems.append(f"{one.recovered_s:.0f} s to recover from: {one.what}")
    held = most_held(figures["kills"] + faults.done["relay", "freeze"], faults)
    if figures["rejudged"] > held:
        problems.append(f"{figures['rejudged']} pairs were judged again, more than the {held} that workers held")
    if sum(batch.pairs for batch in batches) + held < found.pairs - len(found.lost):
        problems.append(
            "the workers' logs tell of fewer pairs than have verdicts: their lines are no longer understood"
        )
    return problems


def most_held(interrupted: int, faults: Faults) -> int:
    """Pairs that workers held when they were interrupted: one that ends or freezes, and all of them when Redis goes."""
    return interrupted * HELD_PAIRS + faults.held_when_redis_went


def allowed(workers: int) -> Footprint:
    """How much more than at the start the site may hold in the end."""
    return Footprint(MORE_CONNECTIONS * workers, 0, MORE_REDIS_CONNECTIONS * workers, MORE_REDIS_MB, MORE_WORKER_MB)


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "worker", "tasks", "db", "infra")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parts_of(names: str) -> tuple[Part, ...]:
    """`worker,redis` -> the parts of these names. Raises ValueError for one that there is not."""
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := wanted - set(PARTS):
        raise ValueError(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in wanted)


def report(outcome: Outcome, err: Console, out: Console | None) -> None:
    """What is wrong, in sentences; a table of the figures, where there is a console for it; the JSON line."""
    for problem in outcome.problems:
        err.print(f"WRONG: {problem}", markup=False)
    if out is not None:
        table = Table(show_header=False, title="what came of it")
        for name, value in outcome.figures.items():
            table.add_row(name, str(value))
        out.print(table)
    print(json.dumps(outcome.figures))
