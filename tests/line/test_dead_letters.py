"""Dead letters on a real worker: a bucket that is missing, pairs that fail of it, the bucket made, and a redrive."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery.result import AsyncResult

from tasks.app import app
from tasks.pairs_file import begin, read_rows, submit_file
from tasks.submit import engine
from tests import test_cli
from tests.line.site import PATIENCE_S, Site, Worker, eventually
from tests.line.test_line import PICTURE, message
from tests.test_cli import Concord
from worker.messages import TASK_NAME

concord = test_cli.concord

ATTEMPTS = 2


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    """One that gives up soon, and whose allow-list names a bucket that does not exist yet."""
    with site.worker(
        allowed_buckets="line,line-dead", retry_delay_s=0.2, max_attempts=ATTEMPTS, image_timeout_s=1
    ) as worker:
        yield worker


def verdict(site: Site, pair_id: UUID) -> dict[str, Any]:
    (row,) = site.query("select * from verdict where pair_id = :pair_id", pair_id=pair_id)
    return row


def run_of(site: Site, run_id: UUID) -> tuple[int, int, int, str]:
    (row,) = site.query("select judged, rejected, failed, state from run where id = :id", id=run_id)
    return row["judged"], row["rejected"], row["failed"], row["state"]


@pytest.mark.usefixtures("worker")
def test_what_failed_for_want_of_a_bucket_is_redriven_and_judged(site: Site, tmp_path: Path, concord: Concord) -> None:
    missing = "s3://line-dead/square.jpg"
    file = tmp_path / "pairs.jsonl"
    rows = [{"ref": f"dead {n}", "image": image, "text": "a red shoe"} for n, image in enumerate([PICTURE, missing])]
    file.write_text("\n".join(map(json.dumps, rows)))
    run = begin(engine(), file, lane="bulk", source="dead")
    assert list(submit_file(engine(), run, read_rows(file))) == [2]
    asked = {"id": str(uuid4()), "ref": "dead result", "image": missing, "text": "a red shoe"}
    result = app.send_task(TASK_NAME, args=[message([asked])], queue="live", ignore_result=False)

    eventually(lambda: run_of(site, run.id) == (1, 0, 1, "done"), "a run with one failed pair")
    assert [one["status"] for one in result.get(timeout=PATIENCE_S)] == ["failed"]
    (listed,) = json.loads(concord("dead", "list", "--run", run.id, "--json").out)["pairs"]
    failed = UUID(listed["pair_id"])
    first = verdict(site, failed)
    assert (first["error_code"], first["attempts"]) == ("image_fetch_failed", ATTEMPTS - 1)
    assert "does not exist" in first["error_detail"]

    assert concord("dead", "redrive", "--run", run.id).status == 0
    eventually(lambda: verdict(site, failed)["decided_at"] != first["decided_at"], "another failure of the same kind")
    second = verdict(site, failed)
    assert (second["status"], second["attempts"], second["flags"]) == ("failed", ATTEMPTS - 1, [])
    assert second["message_id"] != first["message_id"]
    assert run_of(site, run.id) == (1, 0, 1, "done")

    site.bucket.create_bucket(Bucket="line-dead")
    body = site.bucket.get_object(Bucket="line", Key="square.jpg")["Body"].read()
    site.bucket.put_object(Bucket="line-dead", Key="square.jpg", Body=body)
    redriven = json.loads(concord("dead", "redrive", failed, asked["id"], "--yes", "--json").out)
    assert (redriven["redriven"], redriven["messages"]) == (2, 2)
    eventually(lambda: verdict(site, failed)["status"] == "judged", "a verdict")
    eventually(lambda: verdict(site, UUID(asked["id"]))["status"] == "judged", "the other's verdict")
    judged = verdict(site, failed)
    assert (judged["attempts"], judged["error_code"], judged["run_id"]) == (0, None, run.id)
    assert (judged["submitted_at"], judged["ref"]) == (first["submitted_at"], "dead 1")
    assert run_of(site, run.id) == (2, 0, 0, "done")
    eventually(site.outbox_is_empty, "an empty outbox")
    kept = AsyncResult(result.id, app=app).get(timeout=PATIENCE_S)
    assert [one["status"] for one in kept] == ["failed"], "a result stays what it was"
    assert concord("dead", "show", failed).status == 1
