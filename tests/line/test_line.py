"""A real worker between real servers: pairs in by every way, verdicts out, bad ones told apart."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
import torch
from sqlalchemy import create_engine, text

from tasks.app import app
from tasks.submit import Pair, submit, uuid7
from tests.line.site import PATIENCE_S, ROOT, Site, Worker, eventually
from worker.messages import TASK_NAME, VERSION

pytestmark = pytest.mark.usefixtures("worker")

PICTURE = "s3://line/square.jpg"


def message(pairs: list[Any], /, **fields: Any) -> dict[str, Any]:
    envelope = {"v": VERSION, "message_id": str(uuid4()), "submitted_at": datetime.now(UTC).isoformat(), "pairs": pairs}
    return {**envelope, **fields}


def send(body: Any, queue: str = "live") -> UUID:
    """A bare send_task, as any Celery client does it."""
    return UUID(app.send_task(TASK_NAME, args=[body], queue=queue).id)


def rejections(site: Site, code: str, column: str, value: Any) -> list[dict[str, Any]]:
    sql = f"select * from rejected_message where error_code = :code and {column} = :value"
    return site.query(sql, code=code, value=value)


@pytest.mark.parametrize("lane", ["live", "bulk"])
def test_python_submits_and_every_pair_gets_one_verdict(site: Site, lane: Any) -> None:
    pairs = [Pair(ref=f"{lane}-{n}", image=PICTURE, text=f"{n} dogs on a boat") for n in range(130)]
    submission = submit(pairs, lane=lane)
    rows = site.verdicts(submission.pair_ids)
    assert {row["status"] for row in rows.values()} == {"judged"}
    assert {row["lane"] for row in rows.values()} == {lane}
    assert set(rows) == {pair.ref for pair in pairs}
    eventually(site.outbox_is_empty, "an empty outbox")


def test_sql_submits_inside_the_callers_transaction(site: Site) -> None:
    ref = uuid4().hex
    engine = create_engine(site.database_url)
    with engine.begin() as connection:
        pair = json.dumps({"ref": ref, "image": PICTURE, "text": "a red shoe", "attributes": {"seller": "a"}})
        pair_id = connection.execute(text("select enqueue(cast(:pair as jsonb))"), {"pair": pair}).scalar_one()
    engine.dispose()
    row = site.verdicts([pair_id])[ref]
    assert row["status"] == "judged"
    assert row["attributes"] == {"seller": "a"}


def test_any_celery_client_submits_with_send_task(site: Site) -> None:
    pair_id = uuid4()
    send(message([{"id": str(pair_id), "ref": "bare", "image": PICTURE, "text": "a red shoe"}]))
    assert site.verdicts([pair_id])["bare"]["status"] == "judged"


def test_a_verdict_says_by_what_it_was_made(site: Site) -> None:
    pairs = [Pair(ref="made", image="s3://line/big.jpg", text="A Red-Shoe", premise="a shop", attributes={"x": 1})]
    row = site.verdicts(submit(pairs).pair_ids)["made"]
    model = site.query("select * from model_version where id = :id", id=row["model_version_id"])[0]
    assert (model["image_px"], model["recipe"]) == (96, "fp32")
    assert (model["concord_version"], model["torch_version"]) == (version("concord"), torch.__version__)
    assert model["answers"] == {"yes": "entailment", "no": "contradiction", "maybe": "neutral"}
    assert row["text"] == "A Red-Shoe"
    assert row["text_scored"] == "a red shoe"
    assert row["premise_scored"] == "a shop"
    assert len(row["image_sha256"]) == 32
    assert row["image_etag"]
    assert (row["policy"], row["policy_version"]) == ("catalog", 1)
    assert row["decode_mode"] in ("exact", "reduced")
    assert len(row["content_hash"]) == 16
    total = row["p_entailment"] + row["p_contradiction"] + row["p_neutral"]
    assert total == pytest.approx(1, abs=1e-6)


def test_a_message_that_comes_twice_is_judged_once(site: Site) -> None:
    pair_id = uuid4()
    body = message([{"id": str(pair_id), "ref": "twice", "image": PICTURE, "text": "a red shoe"}])
    send(body)
    first = site.verdicts([pair_id])["twice"]
    send(body)
    after = uuid4()
    send(message([{"id": str(after), "image": PICTURE, "text": "later"}]))
    site.verdicts([after])
    assert site.verdicts([pair_id])["twice"] == first


BAD_PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "not the right bucket": ({"image": "s3://elsewhere/a.jpg"}, "bucket_not_allowed"),
    "no such key": ({"image": "s3://line/nothing.jpg"}, "image_not_found"),
    "a web address": ({"image": "http://shop.example/a.jpg"}, "image_not_s3"),
    "a page, not a picture": ({"image": "s3://line/page.jpg"}, "image_not_an_image"),
    "no bytes": ({"image": "s3://line/empty.jpg"}, "image_empty"),
    "half a picture": ({"image": "s3://line/half.jpg"}, "image_truncated"),
    "no text": ({"text": ""}, "text_empty"),
    "only spaces": ({"text": "  \n "}, "text_empty"),
    "only punctuation": ({"text": "..."}, "text_empty"),
    "text of a wrong type": ({"text": 7}, "invalid_pair"),
    "no image": ({"image": None}, "invalid_pair"),
    "an unknown policy": ({"policy": "whatever"}, "unknown_policy"),
    "not a number": ({"attributes": {"price": float("nan")}}, "invalid_pair"),
}


@pytest.fixture
def bad_objects(site: Site) -> None:
    square = site.bucket.get_object(Bucket="line", Key="square.jpg")["Body"].read()
    for key, body in {"page.jpg": b"<html></html>", "empty.jpg": b"", "half.jpg": square[: len(square) // 2]}.items():
        site.bucket.put_object(Bucket="line", Key=key, Body=body)


@pytest.mark.usefixtures("bad_objects")
def test_bad_pairs_are_rejected_one_by_one_and_their_neighbours_are_judged(site: Site) -> None:
    good = {"image": PICTURE, "text": "a red shoe"}
    pairs = []
    for name, (wrong, _) in BAD_PAIRS.items():
        pairs.append({**good, "id": str(uuid4()), "ref": name, **wrong})
        pairs.append({**good, "id": str(uuid4()), "ref": f"beside {name}"})
    sent = message(pairs)
    send(sent)
    rows = site.verdicts([pair["id"] for pair in pairs])
    for name, (_, code) in BAD_PAIRS.items():
        assert (name, rows[name]["status"], rows[name]["error_code"]) == (name, "rejected", code)
        assert rows[name]["error_detail"]
    beside = [row for ref, row in rows.items() if ref.startswith("beside")]
    assert {row["status"] for row in beside} == {"judged"}
    assert len({row["p_entailment"] for row in beside}) == 1
    # Verdicts and what was measured of their batch are of one transaction.
    (measured,) = site.query(
        "select sum(pairs) as pairs, sum(judged) as judged from batch"
        " where settled_at in (select decided_at from verdict where message_id = :id)",
        id=sent["message_id"],
    )
    assert (measured["pairs"], measured["judged"]) == (len(pairs), len(beside))


FLAGGED: dict[str, tuple[str, str, str | None]] = {
    "10,000 words": ("shoe " * 10_000, "text_cut", None),
    "another language": ("красная туфля на столе", "off_language", "review"),
    "NUL and a lone surrogate": ("a red\0 shoe \ud800", "text_replaced", None),
}


def test_odd_texts_are_judged_and_flagged(site: Site) -> None:
    ids = {ref: str(uuid4()) for ref in FLAGGED}
    pairs = [{"id": ids[ref], "ref": ref, "image": PICTURE, "text": odd} for ref, (odd, _, _) in FLAGGED.items()]
    send(message(pairs))
    rows = site.verdicts(ids.values())
    for ref, (_, flag, decision) in FLAGGED.items():
        assert rows[ref]["status"] == "judged", rows[ref]
        assert flag in rows[ref]["flags"]
        assert decision in (None, rows[ref]["decision"])


def test_a_pair_without_an_id_is_given_the_one_that_follows_from_its_place(site: Site) -> None:
    from uuid import uuid5

    message_id = uuid4()
    send(message([{"ref": "nameless", "image": PICTURE, "text": "a shoe"}], message_id=str(message_id)))
    assert site.verdicts([uuid5(message_id, "0")])["nameless"]["status"] == "judged"


def test_an_id_that_stands_twice_is_judged_once_and_the_other_recorded(site: Site) -> None:
    pair_id = uuid4()
    pair = {"id": str(pair_id), "ref": "double", "image": PICTURE, "text": "a shoe"}
    body = message([pair, {**pair, "text": "a hat"}])
    send(body)
    assert site.verdicts([pair_id])["double"]["text"] == "a shoe"
    assert len(rejections(site, "duplicate_id", "message_id", UUID(body["message_id"]))) == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"v": 2}, "unknown_version"),
        ({"submitted_at": "2099-01-01T00:00:00Z"}, "submitted_at_out_of_range"),
        ({"submitted_at": datetime.now(UTC).replace(tzinfo=None).isoformat()}, "submitted_at_out_of_range"),
        ({"submitted_at": (datetime.now(UTC) - timedelta(days=400)).isoformat()}, "submitted_at_out_of_range"),
        ({"pairs": []}, "invalid_message"),
        ({"pairs": [{}] * 257}, "too_many_pairs"),
    ],
    ids=["version", "2099", "no zone", "too old", "no pairs", "too many"],
)
def test_an_unreadable_envelope_is_recorded_with_its_body_and_its_outbox_row_deleted(
    site: Site, fields: dict[str, Any], code: str
) -> None:
    body = message([{"id": str(uuid4()), "image": PICTURE, "text": "a shoe"}], **fields)
    message_id = UUID(body["message_id"])
    put_into_outbox(site, message_id, body)
    row = eventually(lambda: rejections(site, code, "message_id", message_id), "a rejected message")[0]
    assert json.loads(bytes(row["body"]))[0][0]["message_id"] == str(message_id)
    assert site.query("select 1 from outbox where message_id = :id", id=message_id) == []


def put_into_outbox(site: Site, message_id: UUID, body: dict[str, Any]) -> None:
    site.query(
        "insert into outbox (message_id, lane, body) values (:id, 'live', :body)",
        id=message_id,
        body=json.dumps(body).encode(),
    )


def test_what_is_no_message_is_recorded_and_the_worker_goes_on(site: Site, worker: Worker) -> None:
    marker = uuid4().hex
    with redis.Redis.from_url(site.redis_url) as client:
        client.lpush("live", f"not json {marker}")
        client.lpush("live", json.dumps(["a list", marker]))
        client.lpush("live", b"\xff\xfe" + marker.encode())
    app.send_task(f"unknown.{marker}", queue="live")
    app.send_task(TASK_NAME, args=[marker, "two arguments"], queue="live")
    app.send_task(TASK_NAME, args=[marker], queue="live")

    def codes() -> list[str]:
        sql = "select error_code, body, error_detail from rejected_message order by error_code"
        return [
            row["error_code"]
            for row in site.query(sql)
            if marker.encode() in bytes(row["body"]) or marker in row["error_detail"]
        ]

    expected = ["invalid_message"] * 2 + ["not_json"] * 3 + ["unknown_task"]
    eventually(lambda: len(codes()) >= len(expected), "six recorded rejections")
    assert codes() == expected
    assert worker.process.poll() is None
    assert site.verdicts(submit([Pair(ref="after", image=PICTURE, text="a shoe")]).pair_ids)["after"]
    with redis.Redis.from_url(site.redis_url) as client:
        eventually(lambda: client.hlen("unacked") == 0, "nothing unacknowledged")


def test_the_command_line_submits_a_file_waits_and_shows_a_verdict(site: Site, tmp_path: Any) -> None:
    ref = uuid7().hex
    file = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"ref": f"{ref}-{n}", "image": PICTURE, "text": f"{n} shoes"}) for n in range(70)]
    file.write_text("\n".join(lines))
    done = concord("submit", str(file), "--wait")
    assert done.returncode == 0, done.stderr
    assert "70 of 70 pairs judged" in done.stdout
    assert "70 pairs accepted" in done.stderr
    again = concord("submit", str(file), "--wait")
    assert "0 pairs accepted, 70 were before" in again.stderr
    shown = concord("verdict", "--ref", f"{ref}-7", "--json")
    assert json.loads(shown.stdout)["verdicts"][0]["text"] == "7 shoes"
    state = json.loads(concord("status", "--json").stdout)
    assert state["workers"]
    file.write_text(lines[0].replace("square.jpg", "nothing.jpg"))
    failed = concord("submit", str(file), "--wait")
    assert failed.returncode == 1
    assert "image_not_found" in failed.stdout


def concord(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from tasks.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_worker_that_is_newer_than_the_database_ends_and_says_what_to_do(site: Site, stack: Any) -> None:
    stack.postgres.create_database("not_upgraded")
    url = stack.postgres.url(database="not_upgraded")
    try:
        with site.worker(ready="make_partitions() does not exist: run `concord db upgrade`", database_url=url) as ended:
            assert ended.process.wait(PATIENCE_S) == 1
        assert not any("Traceback" in line for line in ended.lines)
    finally:
        stack.postgres.drop_database("not_upgraded")
