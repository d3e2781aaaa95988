"""What Celery's users expect of a task: each option works, or is refused with a sentence."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tasks.app import app
from tasks.submit import Pair, submit
from tests.line.site import PATIENCE_S, Site, eventually
from tests.line.test_line import PICTURE, message
from worker.messages import TASK_NAME

pytestmark = pytest.mark.usefixtures("worker")


def one_pair(ref: str) -> tuple[UUID, dict[str, Any]]:
    pair_id = uuid4()
    return pair_id, message([{"id": str(pair_id), "ref": ref, "image": PICTURE, "text": "a red shoe"}])


def test_async_result_returns_the_verdicts(site: Site) -> None:
    body = message(
        [
            {"id": str(uuid4()), "ref": "asked", "image": PICTURE, "text": "a red shoe"},
            {"id": str(uuid4()), "ref": "asked too", "image": "s3://line/nothing.jpg", "text": "a red shoe"},
        ]
    )
    result = app.send_task(TASK_NAME, args=[body], queue="live", ignore_result=False)
    verdicts = result.get(timeout=PATIENCE_S)
    assert [verdict["ref"] for verdict in verdicts] == ["asked", "asked too"]
    assert verdicts[0]["label"] in ("entailment", "contradiction", "neutral")
    assert verdicts[1]["error_code"] == "image_not_found"


def test_a_submission_can_be_waited_for(site: Site) -> None:
    submission = submit([Pair(ref="waited", image=PICTURE, text="a red shoe")], wants_result=True)
    (verdict,) = AsyncResult(str(submission.message_ids[0]), app=app).get(timeout=PATIENCE_S)
    assert verdict["ref"] == "waited"


def test_results_are_not_kept_unless_they_are_asked_for(site: Site) -> None:
    pair_id, body = one_pair("unasked")
    result = app.send_task(TASK_NAME, args=[body], queue="live")
    site.verdicts([pair_id])
    assert app.backend.get_task_meta(result.id)["status"] == "PENDING"


def test_an_expired_message_is_rejected_as_expired(site: Site) -> None:
    pair_id, body = one_pair("late")
    app.send_task(TASK_NAME, args=[body], queue="live", expires=datetime.now(UTC) - timedelta(seconds=1))
    row = site.verdicts([pair_id])["late"]
    assert (row["status"], row["error_code"]) == ("rejected", "expired")


def test_expires_travels_through_the_outbox(site: Site) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    submission = submit([Pair(ref="late too", image=PICTURE, text="a shoe")], lane="bulk", expires_at=past)
    assert site.verdicts(submission.pair_ids)["late too"]["error_code"] == "expired"
    eventually(site.outbox_is_empty, "an empty outbox")


def test_a_revoked_message_is_rejected_as_revoked_and_raises_for_who_waits(site: Site) -> None:
    pair_id, body = one_pair("revoked")
    task_id = str(uuid4())
    app.control.revoke(task_id, reply=True, timeout=PATIENCE_S, limit=1)
    result = app.send_task(TASK_NAME, args=[body], queue="live", task_id=task_id, ignore_result=False)
    row = site.verdicts([pair_id])["revoked"]
    assert (row["status"], row["error_code"]) == ("rejected", "revoked")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE_S)


def test_countdown_waits_in_the_outbox_and_is_judged_after_it(site: Site) -> None:
    pair_id, body = one_pair("patient")
    app.send_task(TASK_NAME, args=[body], queue="live", countdown=1.5)
    (row,) = eventually(
        lambda: site.query("select * from outbox where message_id = :id", id=UUID(body["message_id"])), "a parked row"
    )
    assert row["not_before"] > datetime.now(UTC)
    verdict = site.verdicts([pair_id])["patient"]
    assert verdict["decided_at"] >= row["not_before"]
    assert verdict["status"] == "judged"


@pytest.mark.parametrize("option", ["link", "link_error", "chain"])
def test_callbacks_are_refused_with_a_sentence(site: Site, option: str) -> None:
    pair_id, body = one_pair(f"with {option}")
    after = app.signature("anything.else")
    options: dict[str, Any] = {option: [after]} if option == "chain" else {option: after}
    app.send_task(TASK_NAME, args=[body], queue="live", **options)
    row = site.verdicts([pair_id])[f"with {option}"]
    assert (row["status"], row["error_code"]) == ("rejected", "unsupported_option")
    assert "AsyncResult" in row["error_detail"]


def test_inspect_sees_the_worker_its_task_and_its_queues(site: Site) -> None:
    inspect = app.control.inspect(timeout=5, limit=1)
    (tasks,) = inspect.registered().values()
    assert any(TASK_NAME in task for task in tasks)
    (queues,) = inspect.active_queues().values()
    assert {queue["name"] for queue in queues} == {"live", "bulk"}
    (stats,) = inspect.stats().values()
    site.verdicts(submit([Pair(ref="counted", image=PICTURE, text="a shoe")]).pair_ids)
    (after,) = eventually(
        lambda: [
            s for s in inspect.stats().values() if s["total"].get(TASK_NAME, 0) > stats["total"].get(TASK_NAME, 0)
        ],
        "a count of the message",
    )
    assert after["pool"]["max-concurrency"] >= 2


def test_events_tell_of_a_message_from_receipt_to_success(site: Site) -> None:
    with events() as seen:
        submission = submit([Pair(ref="seen", image=PICTURE, text="a shoe")])
        task_id = str(submission.message_ids[0])
        wanted = ["task-received", "task-started", "task-succeeded"]

        def types() -> list[str]:
            return [event["type"] for event in seen if event.get("uuid") == task_id]

        eventually(lambda: set(wanted) <= set(types()), "the three events")
        assert types() == wanted


@contextmanager
def events() -> Iterator[list[dict[str, Any]]]:
    """Celery's events as they come, until the block ends."""
    seen: list[dict[str, Any]] = []
    ready = threading.Event()
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})

        def loop() -> None:
            with receiver.consumer_context(wakeup=False) as (_, channel, _consumers):
                ready.set()
                while not receiver.should_stop:
                    with suppress(TimeoutError):
                        channel.connection.client.drain_events(timeout=0.2)

        thread = threading.Thread(target=loop)
        thread.start()
        ready.wait(PATIENCE_S)
        try:
            yield seen
        finally:
            receiver.should_stop = True
            thread.join()


def test_json_is_the_only_language_that_is_understood(site: Site) -> None:
    pair_id, body = one_pair("pickled")
    with app.connection_for_write() as connection:
        producer = connection.Producer()
        headers = {"task": TASK_NAME, "id": str(uuid4())}
        payload = json.dumps([[body], {}, {}])
        producer.publish(
            payload, exchange="live", routing_key="live", headers=headers,
            content_type="application/x-python-serialize", content_encoding="utf-8",
        )  # fmt: skip
    rows = eventually(
        lambda: site.query("select * from rejected_message where body = :body", body=payload.encode()),
        "a recorded rejection",
    )
    assert rows[0]["error_code"] in ("not_json", "invalid_message")
    assert site.query("select 1 from verdict where pair_id = :id", id=pair_id) == []
