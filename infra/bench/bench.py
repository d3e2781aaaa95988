"""`concord bench`: what is measured by which module, run in this process, and reported as a table and a JSON line.

Each module of BENCHES has `measure(seconds, say)`: it brings up servers of its own, says on the way what it does, and
returns its figures, JSON-able. Always among them: `target` and `met`. A page of all of them is made by
infra/bench/speed_page.py.
"""

import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.speed_page import Block, blocks, page
from infra.endings import undisturbed


@dataclass(frozen=True)
class Bench:
    """What is measured, and for how long if nothing else is said."""

    what: str
    seconds: float


BENCHES: Mapping[str, Bench] = {
    "worker": Bench("a worker against its device: a stand-in for a GPU, and the demo model on one core", 60),
    "scale": Bench("two and three workers against one", 40),
    "live": Bench("how long a lone live pair takes under a full bulk backlog", 60),
    "queue": Bench("messages through Redis alone, with a model that does nothing", 20),
    "submit": Bench("files of pairs handed over, in each form: pace and memory", 60),
    "line": Bench("the same with the outbox, the relay and verdicts in Postgres", 30),
    "writer": Bench("verdicts into Postgres, and writers that get in each other's way", 20),
    "images": Bench("pictures out of S3, against boto3", 20),
    "model": Bench("padding, and pictures that pairs share", 20),
    "comparison": Bench("other ways to batch, against this worker", 30),
}
ALL = "all"
#: Versions of these tell of the figures, beside Python's and the servers'.
PACKAGES = ("torch", "celery", "kombu", "redis", "psycopg", "obstore", "pillow")
#: Files whose changes a commit's name does not cover.
SOURCES = ("worker", "tasks", "db", "infra/bench", "celeryconfig.py")
#: An ended benchmark takes its servers and workers down first.
END_S = 90.0


def run(name: str, seconds: float | None, as_json: bool, out_folder: Path | None, err: Console, out: Console) -> bool:
    """Measure, show, and end in one line of JSON; with a folder, write the page anew. Whether the targets are met."""
    started = time.monotonic()

    def say(words: str) -> None:
        err.print(f"{time.monotonic() - started:5.0f} s  {words}", markup=False)

    say(f"{name}: {BENCHES[name].what}")
    load = os.getloadavg()[0]
    figures = importlib.import_module(f"infra.bench.{name}").measure(seconds or BENCHES[name].seconds, say)
    result = {"bench": name, **figures, **about(name, seconds), "load": [round(load, 2), round(os.getloadavg()[0], 2)]}
    if not as_json:
        for block in blocks(result):
            out.print(table(block))
    if out_folder is not None:
        write_page(out_folder, result)
    print(json.dumps(result), flush=True)
    return bool(result["met"])


def run_all(seconds: float | None, as_json: bool, out_folder: Path | None, err: Console) -> bool:
    """Each in a process of its own, so that none has another's threads and memory; one that fails fails alone."""
    options = [*(["--seconds", f"{seconds:g}"] if seconds else []), *(["--json"] if as_json else [])]
    options += ["--out", str(out_folder)] if out_folder else []
    met = True
    for name in BENCHES:
        command = [sys.executable, "-c", "from tasks.cli import main; main()", "bench", name, *options]
        with ended(subprocess.Popen(command, start_new_session=True)) as process:
            status = process.wait()
        if status not in (0, 1):
            err.print(f"concord bench {name} came to no result, status {status}", markup=False)
        met = met and status == 0
    return met


@contextlib.contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Any:
    """The process inside; told to end, and waited for, where it still runs."""
    try:
        yield process
    finally:
        with undisturbed():
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def about(name: str, seconds: float | None) -> dict[str, Any]:
    """On what the figures were taken, and by which command."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "command": f"concord bench {name}" + (f" --seconds {seconds:g}" if seconds else ""),
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def cpu() -> str:
    """The processor's name as the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit that is checked out, and whether what is measured differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", *SOURCES) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def table(block: Block) -> Table:
    shown = Table(*block.columns, title=block.title or None, title_justify="left", show_header=block.has_header)
    for row in block.rows:
        shown.add_row(*row)
    return shown


def write_page(folder: Path, result: Mapping[str, Any]) -> None:
    """speed.json holds the last result of each benchmark, speed.md shows them in the order of BENCHES."""
    folder.mkdir(parents=True, exist_ok=True)
    paper = folder / "speed.json"
    results = json.loads(paper.read_text()) if paper.exists() else {}
    results[result["bench"]] = result
    ordered: Sequence[Any] = [results[name] for name in BENCHES if name in results]
    lines = ",\n".join(f'"{one["bench"]}": {json.dumps(one)}' for one in ordered)
    paper.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    whats = {name: bench.what for name, bench in BENCHES.items()}
    (folder / "speed.md").write_text(page(ordered, whats), encoding="utf-8")
