"""Passing troubles: pairs are tried again without their neighbours, and servers that are away are waited for."""

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from tasks.app import app
from tasks.submit import Pair, submit
from tests.line.site import PATIENCE_S, Site, Worker, eventually
from tests.line.test_line import PICTURE, message
from worker.messages import TASK_NAME

ATTEMPTS = 3


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    """One that is quick to try again, and whose allow-list names buckets that do not exist yet."""
    with site.worker(
        allowed_buckets="line,line-late,line-never", retry_delay_s=0.3, max_attempts=ATTEMPTS, image_timeout_s=1
    ) as worker:
        yield worker


def send(bucket: str, ref: str) -> tuple[list[UUID], Any]:
    """A good pair beside one whose picture is in a bucket that does not exist; and the result to wait on."""
    ids = [uuid4(), uuid4()]
    images = [PICTURE, f"s3://{bucket}/square.jpg"]
    names = [f"{ref} good", f"{ref} bad"]
    pairs = [
        {"id": str(i), "ref": name, "image": image, "text": "a red shoe"}
        for i, name, image in zip(ids, names, images, strict=True)
    ]
    return ids, app.send_task(TASK_NAME, args=[message(pairs)], queue="bulk", ignore_result=False)


@pytest.mark.usefixtures("worker")
def test_a_pair_that_never_succeeds_fails_at_last_and_holds_nobody_up(site: Site) -> None:
    (good, bad), result = send("line-never", "never")
    first = site.verdicts([good])["never good"]
    assert (first["status"], first["attempts"]) == ("judged", 0)
    row = site.verdicts([bad])["never bad"]
    assert (row["status"], row["error_code"], row["attempts"]) == ("failed", "image_fetch_failed", ATTEMPTS - 1)
    assert "does not exist" in row["error_detail"]
    assert [verdict["status"] for verdict in result.get(timeout=PATIENCE_S)] == ["judged", "failed"]
    eventually(site.outbox_is_empty, "an empty outbox")


@pytest.mark.usefixtures("worker")
def test_a_pair_that_succeeds_later_is_judged_under_its_own_key(site: Site) -> None:
    (good, bad), result = send("line-late", "late")
    site.verdicts([good])
    site.bucket.create_bucket(Bucket="line-late")
    body = site.bucket.get_object(Bucket="line", Key="square.jpg")["Body"].read()
    site.bucket.put_object(Bucket="line-late", Key="square.jpg", Body=body)
    row = site.verdicts([bad])["late bad"]
    assert row["status"] == "judged"
    assert row["attempts"] > 0
    assert [verdict["ref"] for verdict in result.get(timeout=PATIENCE_S)] == ["late good", "late bad"]


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("server", ["s3", "postgres"])
def test_a_server_that_goes_away_is_waited_for_and_no_attempts_are_spent(
    site: Site, stack: Any, worker: Worker, server: str
) -> None:
    submission = submit([Pair(ref=f"{server}-{n}", image=PICTURE, text=f"{n} shoes") for n in range(300)], lane="bulk")
    count = "select count(*) as rows from verdict where ref like :pattern"
    eventually(lambda: site.query(count, pattern=f"{server}-%")[0]["rows"] > 0, "a first verdict")
    said = len(worker.lines)
    getattr(stack, server).kill()
    try:
        patient = ("trying again", "the relay waits")
        eventually(
            lambda: any(words in line for line in worker.lines[said:] for words in patient), "a worker that waits"
        )
    finally:
        getattr(stack, server).start()
    rows = site.verdicts(submission.pair_ids, 90)
    assert {row["status"] for row in rows.values()} == {"judged"}
    assert {row["attempts"] for row in rows.values()} == {0}
    eventually(site.outbox_is_empty, "an empty outbox")
    assert worker.process.poll() is None


@pytest.mark.usefixtures("worker")
def test_a_postgres_that_is_read_only_for_a_while_is_waited_for(site: Site, stack: Any, worker: Worker) -> None:
    from infra.local.postgres import OWNER

    def set_read_only(value: str) -> None:
        with stack.postgres.connect(OWNER, "line") as connection:
            connection.autocommit = True
            connection.execute("set default_transaction_read_only = off")
            connection.execute(f"alter database line set default_transaction_read_only = {value}")
        others = "datname = 'line' and pid <> pg_backend_pid() and usename = current_user"
        site.query(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")

    pair_id, said = uuid4(), len(worker.lines)
    set_read_only("on")
    try:
        pair = {"id": str(pair_id), "ref": "failover", "image": PICTURE, "text": "a red shoe"}
        app.send_task(TASK_NAME, args=[message([pair])], queue="live")
        eventually(lambda: any("trying again" in line for line in worker.lines[said:]), "a worker that waits")
    finally:
        set_read_only("off")
    row = site.verdicts([pair_id])["failover"]
    assert (row["status"], row["attempts"]) == ("judged", 0)
