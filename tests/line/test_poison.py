"""Messages made to break a worker: each is recorded or judged, none comes back for ever, and no neighbour notices."""

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis

from tasks.app import app
from tasks.submit import Pair, submit
from tests.line.site import Site, Worker, eventually
from tests.line.test_line import PICTURE, message
from worker.messages import TASK_NAME


def one(ref: str, **fields: Any) -> dict[str, Any]:
    return {"id": str(uuid4()), "ref": ref, "image": PICTURE, "text": "a red shoe", **fields}


def send(body: dict[str, Any], **options: Any) -> None:
    app.send_task(TASK_NAME, args=[body], queue="live", **options)


def tampered(site: Site, body: dict[str, Any], **headers: Any) -> None:
    """A message with headers that no Celery client would write, put straight into the list."""
    with redis.Redis.from_url(site.redis_url) as client, app.connection_for_write() as connection:
        producer = connection.Producer()
        producer.publish(json.dumps([[body], {}, {}]), exchange="aside", routing_key="aside", declare=[aside()],
                         content_type="application/json", content_encoding="utf-8",
                         headers={"task": TASK_NAME, "id": str(uuid4()), **headers})  # fmt: skip
        client.lmove("aside", "live", "RIGHT", "LEFT")


def aside() -> Any:
    from kombu import Exchange, Queue

    return Queue("aside", Exchange("aside"), routing_key="aside")


def test_poisoned_messages_are_recorded_and_their_neighbours_are_judged(site: Site, worker: Worker) -> None:
    before = len(worker.lines)
    true_attempts = message([one("a")], attempts=True)
    listed_id = message([one("b")])
    listed_task_id = str(uuid4())
    id_with_nul = message([one("d")])
    neighbours = [message([one(f"neighbour {n}")]) for n in range(6)]
    send(neighbours[0])
    send(true_attempts)
    send(neighbours[1])
    tampered(site, listed_id, id=["x"])
    send(neighbours[2])
    tampered(site, message([one("c")]), task=["x"], id=listed_task_id)
    send(neighbours[3])
    send(id_with_nul, task_id=f"a\0{uuid4()}", countdown=600)
    send(neighbours[4])
    # kombu would make an object of this, or fail to.
    typed = message(
        [one("typed", attributes={"when": datetime.now(UTC), "a": {"__type__": "uuid", "__value__": "no"}})]
    )
    send(typed)
    send(neighbours[5])
    rows = site.verdicts([pair["id"] for body in [*neighbours, typed] for pair in body["pairs"]])
    assert {row["status"] for row in rows.values()} == {"judged"}
    marks = [true_attempts["message_id"], listed_id["message_id"], listed_task_id, id_with_nul["message_id"]]

    def unrecorded() -> list[str]:
        bodies = [bytes(row["body"]) for row in site.query("select body from rejected_message")]
        return [mark for mark in marks if not any(mark.encode() in body for body in bodies)]

    eventually(lambda: not unrecorded(), "a record of each")
    with redis.Redis.from_url(site.redis_url) as client:
        eventually(lambda: client.hlen("unacked") == 0, "nothing unacknowledged")
    assert not [line for line in worker.lines[before:] if "given back" in line]
    assert worker.process.poll() is None


UNREADABLE = {
    "a number of 5,000 digits": '{"n": ' + "1" * 5_000 + "}",
    "1,500 arrays": "[" * 1_500 + "]" * 1_500,
    "960 arrays": '{"n": ' + "[" * 960 + "]" * 960 + "}",
    "not JSON": "not json",
}


@pytest.mark.parametrize("wrong", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_an_outbox_row_that_cannot_be_read_or_published_holds_nobody_up(site: Site, worker: Worker, wrong: str) -> None:
    message_id = uuid4()
    site.query(
        "insert into outbox (message_id, lane, body) values (:id, 'bulk', :body)", id=message_id, body=wrong.encode()
    )
    behind = submit([Pair(ref="behind", image=PICTURE, text="a shoe")], lane="bulk")
    assert site.verdicts(behind.pair_ids)["behind"]["status"] == "judged"
    eventually(site.outbox_is_empty, "an empty outbox")
    (row,) = site.query("select error_code from rejected_message where message_id = :id", id=message_id)
    assert row["error_code"] in ("invalid_message", "unknown_version", "not_json")


def test_typed_attributes_travel_through_the_outbox_as_they_are(site: Site, worker: Worker) -> None:
    attributes: dict[str, Any] = {"a": {"__type__": "uuid", "__value__": "no"}}
    pairs = [Pair(ref="as it is", image=PICTURE, text="a shoe", attributes=attributes)]
    row = site.verdicts(submit(pairs).pair_ids)["as it is"]
    assert row["attributes"] == attributes
    assert isinstance(row["pair_id"], UUID)
