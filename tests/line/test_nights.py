"""A night through the whole line: planner, outbox, relay, worker, model; and what a kill of any of them leaves."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.line.site import ROOT, Site, Worker, eventually
from tests.model.golden import GOLDEN
from tests.submit_env import environment

#: A page and a part of one.
ITEMS = 1_300


@contextlib.contextmanager
def beat(site: Site, catalogs: Path, schedule: Path) -> Iterator[Worker]:
    """`celery -A tasks.planner beat`, up."""
    own = {**environment(**{**site.settings, "catalogs_file": catalogs}), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "celery", "-A", "tasks.planner", "beat", "-l", "info", "-s", str(schedule)]
    process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    worker = Worker(process)
    try:
        worker.says("beat: Starting")
        yield worker
    finally:
        if process.poll() is None:
            assert worker.stop() == 0
        if process.stdout is not None:
            process.stdout.close()
        print("".join(worker.lines[-50:]))


def concord(site: Site, catalogs: Path, *arguments: str) -> str:
    own = environment(**{**site.settings, "catalogs_file": catalogs})
    command = [sys.executable, "-c", "from tasks.cli import main; main()", "nightly", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_planner_beat_and_worker_are_killed_and_each_item_is_judged_once(site: Site, tmp_path: Path) -> None:
    pictures = sorted(path.name for path in (GOLDEN / "images").iterdir())[:3]
    lines = [
        {
            "ref": f"n{n}",
            "image": f"s3://line/{pictures[n % 3]}",
            "text": f"thing {n % 10}",
            "attributes": {"seller": n % 2},
        }
        for n in range(ITEMS)
    ]
    lines[7]["image"] = "s3://line/is-not-there"
    body = "".join(json.dumps(line) + "\n" for line in lines)
    site.bucket.put_object(Bucket="line", Key="nights/items.jsonl", Body=body.encode())
    catalogs = tmp_path / "catalogs.toml"
    catalogs.write_text(
        """[killed]
        manifest = "s3://line/nights/items.jsonl"
        images = ["s3://line/"]
        pairs_ahead = 256
        results = "s3://line/nights/"
        schedule = "0 3 1 1 *"
        """
    )

    def run() -> dict[str, Any]:
        (row,) = site.query("select * from run where kind = 'nightly' and source = 'killed'")
        return row

    with site.worker() as first_worker:
        with beat(site, catalogs, tmp_path / "schedule") as first_beat:
            concord(site, catalogs, "start", "killed", "--detach")
            eventually(lambda: run()["planned"] == 1_000 and run()["judged"] > 100, "the middle of the night")
            first_beat.kill()
        first_worker.kill()
    site.time_passes()
    between = run()
    assert (between["state"], between["planned"] < ITEMS) == ("planning", True)
    with site.worker(), beat(site, catalogs, tmp_path / "schedule"):
        eventually(lambda: run()["state"] not in ("planning", "running", "finishing"), "the end of the night", 100.0)
    end = run()
    assert (end["state"], end["planned"], end["judged"], end["rejected"]) == ("done", ITEMS, ITEMS - 1, 1)
    (counted,) = site.query(
        """select count(*) as rows, count(distinct ref) as refs, count(*) filter (where status = 'judged') as judged,
                  count(*) filter (where decision <> 'accept') as flagged
           from verdict where run_id = :id""",
        id=end["id"],
    )
    assert counted == {"rows": ITEMS, "refs": ITEMS, "judged": ITEMS - 1, "flagged": end["flagged"]}
    assert site.query("select 1 from outbox where run_id = :id", id=end["id"]) == []
    whole = end["summary"]["catalog"]
    assert (whole["items"], whole["first"], whole["without_verdict"]) == (ITEMS, ITEMS - 1, 1)
    assert {row["value"] for row in end["summary"]["by"]["seller"]} == {"0", "1"}
    assert len(end["summary"]["results"]) == 2
