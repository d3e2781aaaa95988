"""Two nights over one large catalog: how long planning, judging and summing up take, and in how much memory.

    python -m infra.bench.nights --items 100000

Real servers in a folder that is deleted at the end, one worker with the demo model, one planner, the demo's 200
pictures under as many refs as asked for. The second night follows after one item in a hundred has changed. Prints one
JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg

from infra.demo import HELDOUT, WEIGHTS
from infra.local.postgres import OWNER
from infra.local.stack import Addresses, Stack

ROOT = Path(__file__).parents[2]
SAMPLE_EVERY_S = 1.0
CATALOGS = """
[bench]
query = "select ref, image, text, attributes from product"
images = ["s3://concord-demo/"]
results = "s3://concord-demo-results/"
"""
PRODUCTS = """
create table product (ref text collate "C" primary key, image text, text text, attributes jsonb);
grant select on product to public;
"""


class Memory(threading.Thread):
    """Resident megabytes of processes, sampled until `end`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.processes: dict[str, psutil.Process] = {}
        self.megabytes: dict[str, list[float]] = {}
        self.ended = threading.Event()

    def watch(self, name: str, pid: int) -> None:
        self.processes[name] = psutil.Process(pid)

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_EVERY_S):
            for name, process in list(self.processes.items()):
                try:
                    if resident := process.memory_info().rss:  # A process that has ended has none.
                        self.megabytes.setdefault(name, []).append(resident / 2**20)
                except psutil.NoSuchProcess:
                    self.processes.pop(name, None)

    def told(self) -> dict[str, dict[str, int]]:
        """After a tenth of the samples (everything is loaded), at the end, and at most."""
        return {
            name: {"early_mb": round(found[len(found) // 10]), "end_mb": round(found[-1]), "most_mb": round(max(found))}
            for name, found in self.megabytes.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--again", action="store_true", help="a third night with --all, to see whether memory grows")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="concord-bench-") as folder:
        stack = Stack(Path(folder, ".concord"))
        addresses = stack.up()
        try:
            print(json.dumps(measure(stack, addresses, chosen.items, Path(folder), chosen.again)))
        finally:
            stack.down()


def measure(stack: Stack, addresses: Addresses, items: int, folder: Path, again: bool) -> dict[str, Any]:
    from db.migrations import upgrade

    upgrade(addresses.owner_database_url, addresses.database_url)
    fill(stack, addresses, items)
    catalogs = folder / "catalogs.toml"
    catalogs.write_text(CATALOGS)
    own = {name: value for name, value in os.environ.items() if not name.startswith("CONCORD_")}
    own |= {**addresses.environment(), "CONCORD_MODEL_DIR": str(WEIGHTS), "CONCORD_CATALOGS_FILE": str(catalogs)}
    # The items are few contents under many refs: each is judged, as those of a shop would be.
    own |= {"CONCORD_REUSE_DAYS": "0"}
    own |= {"CONCORD_ENV_FILE": "", "CONCORD_TORCH_THREADS": os.environ.get("CONCORD_TORCH_THREADS", "0")}
    memory = Memory()
    memory.start()
    found: dict[str, Any] = {"items": items, "model": "demo, awq-int4", "cpus": os.cpu_count()}
    with worker(own, folder / "worker.log") as pid:
        memory.watch("worker", pid)
        found["first"] = night(stack, own, memory, "first", "--sample", "0")
        with stack.postgres.connect(OWNER) as connection:
            connection.execute("update product set text = 'a photo of ' || text where right(ref, 2) = '07'")
        found["second"] = night(stack, own, memory, "second", "--again", "--sample", "0.01")
        if again:
            found["third"] = night(stack, own, memory, "third", "--again", "--all")
    memory.ended.set()
    memory.join()
    return {**found, "memory": memory.told()}


def fill(stack: Stack, addresses: Addresses, items: int) -> None:
    pairs = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    stack.s3.create_bucket("concord-demo-results")
    for name in sorted({pair["image"] for pair in pairs}):
        stack.s3.client.upload_file(str(HELDOUT.parent / name), addresses.s3_bucket, name)
    with stack.postgres.connect(OWNER) as connection:
        connection.execute(PRODUCTS.encode())
        copy: psycopg.Copy
        with connection.cursor().copy("copy product from stdin") as copy:
            for n in range(items):
                pair = pairs[n % len(pairs)]
                attributes = json.dumps({"category": f"c{n % 12}", "seller": f"s{n % 40}"})
                copy.write_row((f"sku-{n:08}", f"s3://{addresses.s3_bucket}/{pair['image']}", pair["text"], attributes))


@contextmanager
def worker(own: dict[str, str], log: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-Q", "live,bulk", "-l", "info"]
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=own, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)
    try:
        while "ready." not in log.read_text():
            if process.poll() is not None:
                sys.exit(f"the worker did not start:\n{log.read_text()[-3_000:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def night(stack: Stack, own: dict[str, str], memory: Memory, name: str, *options: str) -> dict[str, Any]:
    """One night by the command line; seconds until all is planned, until all is judged, and for the end work."""
    command = [sys.executable, "-c", "from tasks.cli import main; main()", "nightly", "start", "bench", *options]
    began = time.monotonic()
    process = subprocess.Popen(command, env=own, cwd=ROOT, stdout=subprocess.DEVNULL)
    memory.watch(f"planner, {name} night", process.pid)
    seconds: dict[str, float] = {}
    newest = "select state from run where kind = 'nightly' order by created_at desc limit 1"
    with stack.postgres.connect(OWNER) as connection:
        while process.poll() is None:
            row = connection.execute(newest.encode()).fetchone()
            if row is not None and row[0] != "done":
                seconds[str(row[0])] = time.monotonic() - began
            time.sleep(0.1)
        counters = connection.execute(
            b"select planned, judged, rejected, failed, flagged, reused from run order by created_at desc limit 1"
        ).fetchone()
    assert process.returncode == 0, "the night did not end well"
    assert counters is not None
    names = ("planned", "judged", "rejected", "failed", "flagged", "reused")
    return {
        **dict(zip(names, counters, strict=True)),
        "planned_after_s": round(seconds.get("planning", 0.0), 1),
        "judged_after_s": round(seconds.get("running", 0.0), 1),
        "done_after_s": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    main()
