"""`make demo`: the sample catalog through real servers, one worker and the model, and what came out, as a table.

Exits 0 only if every pair has exactly one verdict and each label's accuracy is at least ACCURACY_WANTED. The servers'
data stays in .concord/. KEEP=1 leaves the servers up.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, text

from db.runs import Run
from infra.endings import in_order, undisturbed
from infra.local import Addresses, Stack
from infra.local.stack import DEFAULT_FOLDER

DEMO_MODEL = Path(__file__).parent / "demo_model"
WEIGHTS = DEMO_MODEL / "awq-int4"
HELDOUT = DEMO_MODEL / "heldout.jsonl"
ACCURACY_WANTED = 0.90
SHOWN_MISMATCHES = 5
#: How long the worker may take to load the model and connect.
WORKER_START_S = 120.0
WORKER_STOP_S = 60.0
#: The demo gives up where no verdict has come for this long.
STALLED_S = 60.0
UPLOAD_THREADS = 8
POLL_S = 0.1
PROBABILITIES = ("p_entailment", "p_contradiction", "p_neutral")
POLICIES = {
    "catalog": "the text should be true: a contradiction is reviewed",
    "prohibited": "the claim should not be true: entailment is rejected",
}

#: A first look at the verdicts in SQL.
BY_LABEL = "select label, decision, count(*) from verdict group by 1, 2 order by 1, 2"

VERDICTS = """
select pair_id, ref, text, label, p_entailment, p_contradiction, p_neutral, policy, decision, error_code
from verdict where run_id = :run_id and submitted_at = :submitted_at
"""

#: What was accepted before the demo's pairs and still waits for its verdicts.
AHEAD = "select count(*) as messages, min(created_at) as oldest from outbox where created_at < :since"

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Outcome:
    """What the demo's run came to."""

    rows: list[dict[str, Any]]
    truth: dict[str, str]  # pair id -> label
    seconds: float

    @property
    def accuracy(self) -> dict[str, float]:
        """By true label, over the pairs that have it; a pair without a verdict is wrong."""
        found = {str(row["pair_id"]): row["label"] for row in self.rows}
        right = Counter(label for pair_id, label in self.truth.items() if found.get(pair_id) == label)
        return {label: right[label] / count for label, count in sorted(Counter(self.truth.values()).items())}

    @property
    def complete(self) -> bool:
        """Whether every pair has exactly one verdict."""
        return sorted(str(row["pair_id"]) for row in self.rows) == sorted(self.truth)


def main() -> int:
    stack = Stack()
    # What was up before is somebody's, who may be using it.
    keep = os.environ.get("KEEP", "") not in ("", "0") or any(server.running() for server in stack.servers)
    try:
        with out.status("starting Postgres, Redis and S3"):
            addresses = stack.up()
            point_settings_at(addresses)
            from db.migrations import upgrade

            upgrade(addresses.owner_database_url, addresses.database_url)
        out.print("Postgres, Redis and S3 are up on 127.0.0.1, their data in .concord/")
        pairs = upload(stack, addresses)
        file = stack.folder / "demo.jsonl"
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        with worker(stack.folder / "logs" / "worker.log"):
            outcome = judge(file, pairs)
        show(outcome)
        passed = outcome.complete and min(outcome.accuracy.values()) >= ACCURACY_WANTED
    finally:
        if not keep:
            with undisturbed():
                stack.down()
    say_what_next(file, outcome, keep)
    return 0 if passed else 1


def point_settings_at(addresses: Addresses) -> None:
    """The demo's own servers and model, whatever the environment says; and it judges, however often it is run."""
    for name in [name for name in os.environ if name.startswith("CONCORD_")]:
        del os.environ[name]
    os.environ.update(addresses.environment(), CONCORD_MODEL_DIR=str(WEIGHTS), CONCORD_REUSE_DAYS="0")


def upload(stack: Stack, addresses: Addresses) -> list[dict[str, Any]]:
    """Put the sample catalog's pictures into S3; returns its pairs with their S3 addresses."""
    pairs = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    pictures = sorted({pair["image"] for pair in pairs})
    client = stack.s3.client
    with out.status(f"uploading {len(pictures)} pictures"), ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        list(pool.map(lambda name: client.upload_file(str(HELDOUT.parent / name), addresses.s3_bucket, name), pictures))
    out.print(f"{len(pictures)} pictures of the sample catalog are in s3://{addresses.s3_bucket}")
    return [{**pair, "image": f"s3://{addresses.s3_bucket}/{pair['image']}"} for pair in pairs]


@contextmanager
def worker(log: Path, *arguments: str) -> Iterator[int]:
    """One worker, started as anybody would, stopped in the end by SIGTERM; gives its process id."""
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-Q", "live,bulk", "-l", "info", *arguments]
    process = None
    try:
        with log.open("w") as sink, undisturbed():
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        with out.status("starting a worker"):
            deadline = time.monotonic() + WORKER_START_S
            while "ready." not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the worker did not start:\n{log.read_text()[-3_000:]}")
                time.sleep(0.1)
        out.print(f"one worker is up: celery -A tasks worker -Q live,bulk (its log: {os.path.relpath(log)})")
        yield process.pid
    finally:
        if process is not None:
            with undisturbed():
                stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(WORKER_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def judge(file: Path, pairs: list[dict[str, Any]]) -> Outcome:
    """Submit the pairs through Celery and wait for their verdicts. Every demo is a run of its own."""
    from db import runs
    from tasks.console import progress
    from tasks.pairs_file import begin, submit_file
    from tasks.submit import engine

    database = engine()
    run = begin(database, file, lane="bulk", source="demo", again=datetime.now(UTC).isoformat())
    started = last_change = time.monotonic()
    sum(submit_file(database, run, iter(pairs)))
    with progress(out) as bar:
        task = bar.add_task(f"judging {len(pairs)} pairs", total=len(pairs))
        while run.settled < len(pairs) and time.monotonic() < last_change + STALLED_S:
            time.sleep(POLL_S)
            with database.connect() as connection:
                now = runs.read(connection, run.id)
            if now.settled > run.settled:
                last_change = time.monotonic()
            run = now
            bar.update(task, completed=run.settled)
    with database.connect() as connection:
        if run.settled < len(pairs):
            out.print(why_stalled(connection, run, len(pairs) - run.settled))
        found = connection.execute(text(VERDICTS), {"run_id": run.id, "submitted_at": run.submitted_at}).mappings()
        rows = [dict(row) for row in found]
    database.dispose()
    return Outcome(rows, {pair["id"]: pair["label"] for pair in pairs}, last_change - started)


def why_stalled(connection: Connection, run: Run, waiting: int) -> str:
    """What the demo's pairs wait for: they go to the bulk lane, behind what is there from earlier."""
    ahead = connection.execute(text(AHEAD), {"since": run.submitted_at}).one()
    said = f"No verdict for {STALLED_S:.0f} s, and {waiting} of the demo's pairs wait."
    if not ahead.messages:
        return f"{said} Nothing is ahead of them: the worker's log, {DEFAULT_FOLDER}/logs/worker.log, may say why."
    return (
        f"{said} {ahead.messages:,} messages are ahead of them, the oldest of {ahead.oldest:%Y-%m-%d %H:%M} UTC. Let a "
        "worker finish those (`concord local up`, then `celery -A tasks worker -Q live,bulk`; `concord status` shows "
        f"what is left), or delete {DEFAULT_FOLDER}/ and begin with empty servers."
    )


def show(outcome: Outcome) -> None:
    """The tables: labels, a few mismatches, decisions."""
    labels = Table("label", "pairs", "judged so", "accuracy", title="Labels against the known truth")
    truth, found = Counter(outcome.truth.values()), Counter(row["label"] for row in outcome.rows)
    for label, accuracy in outcome.accuracy.items():
        style = "" if accuracy >= ACCURACY_WANTED else "bold red"
        labels.add_row(label, str(truth[label]), str(found[label]), f"{accuracy:.3f}", style=style)
    out.print(labels)

    wrong = mismatches(outcome)
    table = Table("ref", "text", "truth", "judged", "entail / contra / neutral")
    for column in (0, 2, 3, 4):
        table.columns[column].no_wrap = True
    table.title = f"{len(wrong)} mismatches" if wrong else "No mismatches; these were the closest calls"
    for row in shown_pairs(outcome):
        scores = " ".join("-" if row[name] is None else f"{row[name]:.3f}" for name in PROBABILITIES)
        judged = row["label"] or row["error_code"]
        truth_of = outcome.truth[str(row["pair_id"])]
        table.add_row(row["ref"], row["text"], truth_of, judged, scores)
    out.print(table)

    decisions = Table("policy", "what it is for", "accept", "review", "reject", title="What the policies decided")
    for policy, purpose in POLICIES.items():
        counts = Counter(row["decision"] for row in outcome.rows if row["policy"] == policy)
        decisions.add_row(policy, purpose, *(str(counts[decision]) for decision in ("accept", "review", "reject")))
    out.print(decisions)
    speed = len(outcome.rows) / outcome.seconds if outcome.seconds else 0.0
    out.print(
        f"{len(outcome.rows)} verdicts for {len(outcome.truth)} pairs in {outcome.seconds:.1f} s: {speed:.0f} pairs/s"
        " on this machine, fetching, decoding, judging and storing included"
    )


def mismatches(outcome: Outcome) -> list[dict[str, Any]]:
    return [row for row in outcome.rows if row["label"] != outcome.truth.get(str(row["pair_id"]))]


def shown_pairs(outcome: Outcome) -> list[dict[str, Any]]:
    """A few mismatches, or, where there are none, the closest calls."""
    closest = sorted((row for row in outcome.rows if row["label"]), key=confidence)
    return (mismatches(outcome) or closest)[:SHOWN_MISMATCHES]


def confidence(row: dict[str, Any]) -> float:
    """How far the winning label is ahead of the next."""
    *_, second, first = sorted(row[name] for name in PROBABILITIES)
    return float(first - second)


def say_what_next(file: Path, outcome: Outcome, kept: bool) -> None:
    """Commands that work when they are pasted, in this order."""
    odd = shown_pairs(outcome)
    commands = [] if kept else [(".venv/bin/concord local up", "opens the same data again")]
    if odd:
        commands.append((f".venv/bin/concord verdict --source demo --ref {odd[0]['ref']}", "everything about one pair"))
    commands += [
        (".venv/bin/concord status", "what waits, and who works"),
        (f".venv/bin/concord local psql -c '{BY_LABEL}'", "SQL"),
        (".venv/bin/celery -A tasks worker -Q live,bulk -l info", "a worker, in another terminal"),
        (
            f".venv/bin/concord submit {os.path.relpath(file)} --source demo --wait --again",
            "the same pairs once more",
        ),
        (f".venv/bin/concord score {os.path.relpath(HELDOUT)}", "the same without any server"),
        (".venv/bin/concord local down", "stops the servers"),
    ]
    out.print("\nNext:")
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        out.print(f"  {command.ljust(width)}  # {what}", markup=False)


if __name__ == "__main__":
    with in_order("Stopped. `make demo` starts anew; what it had started is down again."):
        sys.exit(main())
