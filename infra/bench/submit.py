"""A file of pairs handed over by `concord submit`, in each form: pairs a second, and whether memory grows with it.

Postgres alone, in a folder of its own; no worker takes anything out. Each form is submitted twice, as a file of a fifth
of the pairs and as one of all: memory is constant where the long one takes no more at its peak. The same command once
more then shows what a resumed one needs until it is where it stopped.
"""

import csv
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from infra.endings import undisturbed
from infra.local import Stack
from infra.local.postgres import OWNER
from worker.errors import ConcordError

ROOT = Path(__file__).parents[2]
#: Pairs of the long file, and seconds from which on it has so many; it never has fewer than that many.
PAIRS, PAIRS_FROM_S, LEAST_PAIRS = 1_000_000, 60.0, 100_000
#: The short file has this share of them, and so many at least: until then allocators find their working size.
SHORT, LEAST_SHORT = 0.2, 50_000
#: By form, the file's name. Ids of one's own are noted, to see that none stands twice.
FORMS: Mapping[str, str] = {
    "jsonl": "pairs.jsonl",
    "jsonl_with_ids": "ids.jsonl",
    "jsonl_gz": "pairs.jsonl.gz",
    "csv": "pairs.csv",
    "parquet": "pairs.parquet",
}
#: What the long file may take more at its peak: allocators keep some of what they had.
GROWTH_ALLOWED_MB = 16.0
SAMPLE_EVERY_S = 0.02
COLUMNS = ("ref", "image", "text", "category", "seller", "price")


def measure(seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """A million pairs in each form; fewer below 60 seconds."""
    pairs = max(LEAST_PAIRS, int(PAIRS * min(1.0, seconds / PAIRS_FROM_S)))
    short = max(LEAST_SHORT, int(pairs * SHORT))
    with tempfile.TemporaryDirectory(prefix="concord-bench-") as folder:
        stack = Stack(Path(folder, ".concord"))
        try:
            environment = bring_up(stack)
            forms = {form: measured(form, (short, pairs), Path(folder), stack, environment, say) for form in FORMS}
        finally:
            with undisturbed():
                stack.postgres.stop()
    growth = max(figures["growth_mb"] for figures in forms.values())
    return {
        "bench": "submit",
        "pairs": pairs,
        "pairs_per_s": {form: round(figures["pairs_per_s"]) for form, figures in forms.items()},
        "growth_mb": growth,
        "target": f"constant memory: {pairs:,} pairs take at most {GROWTH_ALLOWED_MB:g} MB more than {short:,}",
        "met": growth <= GROWTH_ALLOWED_MB,
        "forms": forms,
        "notes": [
            "Pairs a second are those of the whole command, its start and the file's digest included, and of a database"
            " on the same cores and disk. `client_cpu_us_a_pair` is the command's own CPU time. `seen_again_s` is how"
            " long the same command takes that finds all of the file accepted: so long a resumed one needs at most"
            " before it goes on.",
        ],
    }


def bring_up(stack: Stack) -> dict[str, str]:
    """Postgres with its tables; returns the settings of a producer."""
    from db.migrations import upgrade

    stack.postgres.start()
    addresses = stack.addresses()
    upgrade(addresses.owner_database_url, addresses.database_url)
    own = {name: value for name, value in os.environ.items() if not name.startswith("CONCORD_")}
    # No worker takes anything out: without a mark, nothing waits for one.
    return {**own, **addresses.environment(), "CONCORD_ENV_FILE": "", "CONCORD_OUTBOX_HIGH_WATER": str(10**9)}


def measured(
    form: str,
    counts: tuple[int, int],
    folder: Path,
    stack: Stack,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, float]:
    peaks = {}
    for count in counts:
        path = folder / FORMS[form]
        write(path, form, count)
        took = submit(path, environment)
        peaks[count] = took["peak_mb"]
        again = submit(path, environment)
        empty(stack, count)
        path.unlink()
    pairs = counts[-1]
    found = {
        "pairs_per_s": round(pairs / took["seconds"]),
        "client_cpu_us_a_pair": round(1e6 * took["cpu_s"] / pairs, 1),
        "seen_again_s": round(again["seconds"], 1),
        "peak_mb": round(took["peak_mb"], 1),
        "growth_mb": round(max(took["peak_mb"], again["peak_mb"]) - min(peaks.values()), 1),
    }
    say(f"{form}: {found['pairs_per_s']:,} pairs/s, {found['growth_mb']} MB more than for {counts[0]:,}")
    return found


def submit(path: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """One `concord submit`: seconds, CPU seconds, and resident megabytes at the peak."""
    command = [sys.executable, "-c", "from tasks.cli import main; main()", "submit", str(path), "--source", "bench"]
    started, peak, cpu = time.monotonic(), 0, 0.0
    with undisturbed():
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        looked_at = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, looked_at.memory_info().rss)
                cpu = sum(looked_at.cpu_times()[:2])
            except psutil.NoSuchProcess:
                break
            time.sleep(SAMPLE_EVERY_S)
        _, said = process.communicate()
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise ConcordError(f"concord submit ended with {process.returncode}: {said[-1_000:]}")
    return {"seconds": time.monotonic() - started, "cpu_s": cpu, "peak_mb": peak / 1e6}


def empty(stack: Stack, pairs: int) -> None:
    """Take all out again. Raises ConcordError where it is not what was handed over."""
    with stack.postgres.connect(OWNER) as connection:
        row = connection.execute(b"select sum(planned) from run").fetchone()
        if row is None or row[0] != pairs:
            raise ConcordError(f"{pairs:,} pairs were handed over, and {row} were accepted")
        connection.execute(b"truncate outbox, run")


# ---- Files -----------------------------------------------------------------------------------------------------------


def rows(count: int) -> Iterator[tuple[Any, ...]]:
    for n in range(count):
        text = f"a red shoe with white laces and a rubber sole, size {n % 60}"
        yield f"sku-{n}", f"s3://shop/pictures/{n}.jpg", text, f"category {n % 12}", f"seller {n % 40}", n % 100 / 2


def write(path: Path, form: str, count: int) -> None:
    """The same pairs in this form."""
    if form == "parquet":
        return write_parquet(path, count)
    with gzip.open(path, "wt", compresslevel=1) if form == "jsonl_gz" else path.open("w", newline="") as file:
        if form == "csv":
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(rows(count))
        else:
            file.writelines(json.dumps(pair) + "\n" for pair in objects(count, form == "jsonl_with_ids"))


def objects(count: int, with_ids: bool) -> Iterator[dict[str, Any]]:
    chance = random.Random(count)
    for ref, image, text, *attributes in rows(count):
        own = {"id": str(UUID(int=chance.getrandbits(128), version=4))} if with_ids else {}
        named = dict(zip(COLUMNS[3:], attributes, strict=True))
        yield {**own, "ref": ref, "image": image, "text": text, "attributes": named}


def write_parquet(path: Path, count: int) -> None:
    """In one row group, which is the most that a reader could be tempted to hold."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(dict(zip(COLUMNS, map(list, zip(*rows(count), strict=True)), strict=True)))
    parquet.write_table(table, path, row_group_size=count)
