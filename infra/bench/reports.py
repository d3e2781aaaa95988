"""How long analysts wait: `python -m infra.bench.reports [--rows 10000000] [--months 12] [--out docs/benchmarks]`.

A Postgres of its own is started, ten million verdicts over twelve months are made in it in SQL, and every view of
schema `report` is asked about one day and about 30 days, twice each: the first time much has to come from the disk.
EXPLAIN says which months were read. Then months are dropped one by one. With --out, reports.md is written there.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import Connection, create_engine, text

from db import retention
from db.migrations import upgrade
from db.retention import Retention
from infra.bench.reports_page import page
from infra.bench.verdict_years import fill
from infra.local.postgres import OWNER
from infra.local.stack import Stack

DATABASE = "bench"
#: Days asked about, and the seconds within which the answer is wanted.
WANTED_S = {1: 2.0, 30: 10.0}
#: Verdicts of the small database whose months are dropped for comparison.
FEW_ROWS = 100_000
STATEMENT_TIMEOUT_S = 300

#: One question a view, as an analyst asks it: all of what is summed up already, the top of what is row by row.
QUESTIONS: Mapping[str, str] = {
    "daily_labels": "select * from report.daily_labels where day >= :since and day < :until",
    "run_summary": "select * from report.run_summary where submitted_at >= :since and submitted_at < :until",
    "run_changes": "select change, count(*) from report.run_changes"
    " where submitted_at >= :since and submitted_at < :until group by change",
    "mismatches": "select * from report.mismatches where submitted_at >= :since and submitted_at < :until"
    " order by p_trouble desc limit 100",
    "review_queue": "select * from report.review_queue where submitted_at >= :since and submitted_at < :until"
    " order by p_trouble desc limit 100",
    "dead_letters": "select * from report.dead_letters where submitted_at >= :since and submitted_at < :until",
    "throughput": "select * from report.throughput where hour >= :since and hour < :until",
    "latency": "select * from report.latency where hour >= :since and hour < :until",
    "errors_by_code": "select * from report.errors_by_code where day >= :since and day < :until",
    "defect_rate": "select * from report.defect_rate where day >= :since and day < :until",
    "model_comparison": "select old_label, new_label, count(*) from report.model_comparison"
    " where new_submitted_at >= :since and new_submitted_at < :until"
    " and old_submitted_at >= :since and old_submitted_at < :until"
    " group by old_label, new_label",
    "score_histogram": "select * from report.score_histogram where day >= :since and day < :until",
    "runs": "select * from report.runs where submitted_at >= :since and submitted_at < :until",
    "models": "select * from report.models",
    "policies": "select * from report.policies",
    "batches": "select worker, count(*) from report.batches where settled_at >= :since and settled_at < :until"
    " group by worker",
    "verdicts": "select source, status, count(*) from report.verdicts"
    " where submitted_at >= :since and submitted_at < :until group by source, status",
}


def bounds(question: str, since: datetime, until: datetime) -> dict[str, Any]:
    """The question's parameters: days where it asks by day."""
    both = {"since": since, "until": until}
    return {name: moment.date() for name, moment in both.items()} if "day >=" in question else dict(both)


def months_read(connection: Connection, question: str, parameters: Mapping[str, Any]) -> set[str]:
    """The partitions of `verdict` and `batch` that the question reads rows or index entries of."""
    explained = connection.execute(text(f"explain (analyze, format json) {question}"), parameters).scalar_one()

    def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield plan
        for inner in plan.get("Plans", ()):
            yield from nodes(inner)

    read = {
        str(node["Relation Name"])
        for node in nodes(explained[0]["Plan"])
        if "Relation Name" in node and node["Actual Loops"] > 0
    }
    return {name for name in read if name.startswith(("verdict_", "batch_"))}


@contextmanager
def postgres() -> Iterator[Stack]:
    """A Postgres of the bench's own, deleted in the end."""
    folder = Path(tempfile.mkdtemp(prefix="concord-bench-"))
    stack = Stack(folder / ".concord")
    try:
        stack.postgres.start()
        yield stack
    finally:
        stack.postgres.stop()
        shutil.rmtree(folder)


def filled(stack: Stack, name: str, rows: int, months: int, tell: Callable[[str], object]) -> dict[str, Any]:
    """A migrated database with that many verdicts; returns how many, its bytes, and the seconds that it took."""
    stack.postgres.drop_database(name)
    stack.postgres.create_database(name)
    upgrade(stack.postgres.url(OWNER, name), stack.postgres.url(database=name))
    engine = create_engine(stack.postgres.url(OWNER, name), isolation_level="AUTOCOMMIT")
    started = time.monotonic()
    with engine.connect() as connection:
        connection.execute(text("set synchronous_commit = off"))
        connection.execute(text("set maintenance_work_mem = '256MB'"))
        made = fill(connection, rows, months, tell)
        size = connection.execute(text("select pg_database_size(current_database())")).scalar_one()
    engine.dispose()
    return {"rows": made, "bytes": size, "seconds": round(time.monotonic() - started)}


def asked(connection: Connection, question: str, parameters: Mapping[str, Any]) -> tuple[int, float]:
    """How many rows came back, and after how many seconds the last of them was here."""
    started = time.monotonic()
    rows = len(connection.execute(text(question), parameters).all())
    return rows, round(time.monotonic() - started, 2)


def ask_all(stack: Stack, until: datetime, tell: Callable[[str], object]) -> list[dict[str, Any]]:
    """Every question about each number of days: rows, seconds the first and the second time, months read."""
    engine = create_engine(
        stack.postgres.url(database=DATABASE),
        connect_args={"options": f"-c statement_timeout={STATEMENT_TIMEOUT_S * 1000} -c timezone=UTC"},
    )
    found = []
    for name, question in QUESTIONS.items():
        for days, wanted_s in WANTED_S.items():
            parameters = bounds(question, until - timedelta(days=days), until)
            with engine.connect() as connection:
                rows, first_s = asked(connection, question, parameters)
                rows, again_s = asked(connection, question, parameters)
                months = sorted(months_read(connection, question, parameters))
            found.append({
                "view": name, "days": days, "rows": rows, "first_s": first_s, "again_s": again_s, "wanted_s": wanted_s,
                "months": months,
            })  # fmt: skip
            tell(f"{name}, {days} days: {first_s} s, {again_s} s, {len(months)} months")
    engine.dispose()
    return found


def drop_all(stack: Stack, name: str) -> list[tuple[float, float]]:
    """Drop all months but this one and the last; milliseconds of each of `verdict`: up to its commit, and of that."""
    engine = create_engine(stack.postgres.url(OWNER, name))
    spent = []
    with engine.begin() as connection:
        retention.change(connection, Retention(keep_months=1))
    while True:
        with engine.connect() as connection:
            started = time.monotonic()
            dropped = connection.execute(text("select drop_expired_month()")).scalar_one()
            done = time.monotonic()
            connection.commit()
            committed = time.monotonic()
        if dropped is None:
            break
        if dropped.startswith("verdict"):
            spent.append((round(1000 * (done - started), 1), round(1000 * (committed - done), 1)))
    engine.dispose()
    return spent


def machine() -> dict[str, Any]:
    """Where this was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit.stdout.strip() or "unknown",
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def main() -> None:
    """Print how long each view takes, and how long dropping a month does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--months", type=int, default=12)
    parser.add_argument("--out", type=Path, help="a folder for reports.md")
    arguments = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    until = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    result: dict[str, Any] = {"bench": "reports", **machine(), "load": round(os.getloadavg()[0], 2)}
    with postgres() as stack:
        result["filled"] = filled(stack, DATABASE, arguments.rows, arguments.months, console.print)
        with stack.postgres.connect(OWNER, DATABASE) as connection:
            found = connection.execute("select current_setting('server_version'), current_setting('shared_buffers')")
            result["postgres"], result["shared_buffers"] = found.fetchone() or ("", "")
        result["asked"] = ask_all(stack, until, console.print)
        few = filled(stack, "few", min(FEW_ROWS, arguments.rows), arguments.months, lambda line: None)
        result["few_rows"] = few["rows"]
        result["dropped_ms"] = {"many": drop_all(stack, DATABASE), "few": drop_all(stack, "few")}
    result["load_at_end"] = round(os.getloadavg()[0], 2)
    command = " ".join(["python -m infra.bench.reports", *sys.argv[1:]])
    if arguments.out:
        (arguments.out / "reports.md").write_text(page({**result, "command": command}), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
