"""Whatever is pushed into a queue: no crash, no lost neighbour, each recorded or settled, in bounded memory."""

import contextlib
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis

from tasks.app import app
from tasks.submit import Pair, submit
from tests.line.hostile import KINDS, ODD, Entry, entries, envelope, good, message, nested, pair, spoil, task
from tests.line.site import Site, Worker, eventually

#: What a worker may take in memory beyond what it has when it is ready, whatever comes. Unguarded, the bombs alone
#: took it three times as much.
MORE_BYTES = 1_000_000_000
#: Entries between which one message is good.
GOOD_EVERY = 3


@pytest.fixture
def lists(site: Site) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(site.redis_url, socket_timeout=60) as client:
        yield client


def most_memory(worker: Worker) -> int:
    """The most memory that the process has had, in bytes, since this was last asked."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    Path(f"/proc/{worker.process.pid}/clear_refs").write_text("5")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


UUID_4 = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


class Ledger:
    """Which of the entries are recorded, have a verdict, or wait in the outbox."""

    def __init__(self, site: Site, hostile: Sequence[Entry]) -> None:
        self.site, self.missing = site, {entry.mark: entry.what for entry in hostile}
        self.raw = {entry.raw: entry.mark for entry in hostile}
        self.seen = 0

    def unrecorded(self) -> list[str]:
        """What is wrong with those of which there is no trace yet."""
        found: set[str] = set()
        new = "select id, body, message_id from rejected_message where id > :seen order by id limit 200"
        while rows := self.site.query(new, seen=self.seen):
            self.seen = rows[-1]["id"]
            for row in rows:
                body = bytes(row["body"])
                found |= {str(row["message_id"]), self.raw.get(body, "")}
                found |= {mark.decode() for mark in UUID_4.findall(body)}
        for table, columns in {
            "verdict": "pair_id::text, message_id::text, ref",
            "outbox": "message_id::text, task_id",
        }.items():
            sql = f"select {columns} from {table} where array[{columns}] && cast(:marks as text[])"
            for row in self.site.query(sql, marks=list(self.missing)):
                found |= {str(value) for value in row.values()}
        for mark in found & self.missing.keys():
            del self.missing[mark]
        return list(self.missing.values())


def is_settled(lists: redis.Redis) -> bool:
    return not (lists.llen("live") or lists.llen("bulk") or lists.hlen("unacked") or lists.zcard("unacked_index"))


def storm(site: Site, worker: Worker, lists: redis.Redis, hostile: Sequence[Entry], patience_s: float = 60) -> None:
    """Push them all at once, with good messages between, and look at everything that must hold afterwards."""
    before, memory = len(worker.lines), most_memory(worker)
    neighbours = []
    for number, entry in enumerate(hostile):
        lists.lpush("live" if number % 4 else "bulk", entry.raw)
        if number % GOOD_EVERY == 0:
            neighbours.append(str(uuid4()))
            lists.lpush("live", good(neighbours[-1]))
    rows = site.verdicts(neighbours, patience_s)
    assert {row["status"] for row in rows.values()} == {"judged"}
    ledger = Ledger(site, hostile)
    with contextlib.suppress(AssertionError):  # What is missing says more.
        eventually(lambda: not ledger.unrecorded(), "a record of each", patience_s)
    assert not (missing := ledger.unrecorded()), "\n".join(missing)
    eventually(lambda: is_settled(lists), "empty queues, nothing unacknowledged", patience_s)
    assert worker.process.poll() is None
    said = "".join(worker.lines[before:])
    assert [
        words for words in ("given back", "Connection to broker lost", "Unrecoverable", "pool") if words in said
    ] == []
    more = most_memory(worker) - memory
    print(f"{len(hostile)} entries took {more / 1e6:.0f} MB more")
    assert more < MORE_BYTES


def test_whatever_is_pushed_is_recorded_and_good_messages_between_are_judged(
    site: Site, worker: Worker, lists: redis.Redis
) -> None:
    storm(site, worker, lists, list(itertools.islice(entries(seed=1), 13 * len(KINDS))))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", [2, 3])
def test_thousands_of_hostile_entries_are_recorded(site: Site, worker: Worker, lists: redis.Redis, seed: int) -> None:
    storm(site, worker, lists, list(itertools.islice(entries(seed), 2_400)), patience_s=600)


TEN_MB = 10_000_000


def large(kind: str) -> Entry:
    """A body of some ten megabytes, or an entry that is longer than any that is read."""
    mark = str(uuid4())
    long = "x" * TEN_MB
    of_pair = {"a text": {"text": long}, "an attribute": {"attributes": {"a": long}}, "names": {"unknown": {long: 1}},
               "lists": {"attributes": {"a": [[]] * (TEN_MB // 4)}}}  # fmt: skip
    made: dict[str, bytes] = {
        "no JSON": mark.encode() + random.Random(1).randbytes(TEN_MB),
        "an array": b"[" + json.dumps(mark).encode() + b",[]" * (TEN_MB // 3) + b"]",
        "depth": json.dumps(envelope(mark, b"[" * TEN_MB)).encode(),
        "too long": mark.encode() + b"[]," * (70_000_000 // 3),
    }
    if kind in of_pair:
        made[kind] = json.dumps(envelope(mark, task(message(mark, [pair(mark, **of_pair[kind])])))).encode()
    return Entry(f"ten megabytes of {kind}", mark, made[kind])


LARGE = ("an attribute", "lists", "no JSON", "too long", "a text", "names", "an array", "depth")


def test_bodies_of_ten_megabytes_are_recorded_or_judged(site: Site, worker: Worker, lists: redis.Redis) -> None:
    storm(site, worker, lists, [large(kind) for kind in LARGE[:4]], patience_s=100)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_many_bodies_of_ten_megabytes_are_held_a_few_at_a_time(site: Site, worker: Worker, lists: redis.Redis) -> None:
    storm(site, worker, lists, [large(kind) for kind in LARGE * 8], patience_s=1_200)


def test_what_is_wrong_with_a_header_gives_no_neighbour_back(site: Site, worker: Worker, lists: redis.Redis) -> None:
    """Celery counts messages by a name that a header may set, to a list too."""
    hostile = []
    for header, odd in itertools.product(("shadow", "id", "task", "root_id", "eta", "timelimit"), ODD[::3]):
        mark = str(uuid4())
        value = envelope(mark, task(message(mark)))
        value["headers"][header] = odd
        hostile.append(Entry(f"{header} is {json.dumps(odd)[:40]}", mark, json.dumps(value).encode()))
    storm(site, worker, lists, hostile)


def test_a_tag_that_stands_twice_loses_neither_message(site: Site, worker: Worker, lists: redis.Redis) -> None:
    tag, marks = str(uuid4()), [str(uuid4()) for _ in range(4)]
    for mark in marks:
        value = envelope(mark, task(message(mark)))
        value["properties"]["delivery_tag"] = tag
        lists.lpush("live", json.dumps(value))
    assert {row["status"] for row in site.verdicts(marks).values()} == {"judged"}
    eventually(lambda: is_settled(lists), "nothing unacknowledged")


def test_what_a_refused_message_wants_to_run_afterwards_is_not_run(
    site: Site, worker: Worker, lists: redis.Redis
) -> None:
    marks = []
    for name in ("errbacks", "callbacks", "chain"):
        mark, asked = str(uuid4()), str(uuid4())
        run = {"task": "somebody.elses", "args": [asked], "kwargs": {}, "options": {"queue": "live", "task_id": asked}}
        lists.lpush("live", json.dumps(envelope(mark, json.dumps([[message(mark)], {}, {name: [run]}]).encode())))
        row = site.verdicts([mark])[mark]
        assert (row["status"], row["error_code"]) == ("rejected", "unsupported_option")
        marks.append(asked)
    # What the worker had published for them would stand in the queue before this one.
    site.verdicts([(last := str(uuid4())) and lists.lpush("live", good(last)) and last])
    assert site.query("select 1 from rejected_message where message_id = any(cast(:ids as uuid[]))", ids=marks) == []


@pytest.mark.parametrize("name", ["celery.chord_unlock", "celery.map", "celery.backend_cleanup", "celery.starmap"])
def test_celerys_own_tasks_are_unknown_ones(site: Site, worker: Worker, lists: redis.Redis, name: str) -> None:
    mark = str(uuid4())
    lists.lpush(
        "live",
        json.dumps(envelope(mark, json.dumps([[mark, []], {}, {}]).encode(), headers={"task": name, "id": mark})),
    )
    (row,) = eventually(
        lambda: site.query("select * from rejected_message where message_id = :id", id=UUID(mark)), "a record of it"
    )
    assert row["error_code"] == "unknown_task"
    eventually(lambda: is_settled(lists), "nothing unacknowledged")


def test_garbage_on_the_channel_of_remote_control_does_no_harm(site: Site, worker: Worker, lists: redis.Redis) -> None:
    choose = random.Random(1)
    channel = f"/{lists.connection_pool.connection_kwargs['db']}.celery.pidbox"
    payloads: list[Any] = [*ODD, {"method": ODD}, {"method": "ping", "arguments": ODD}, {"method": "rate_limit"},
                           {"method": "revoke", "arguments": {"task_id": nested(3)}}]  # fmt: skip
    for value in payloads:
        # Celery opens the channel anew after what it cannot carry out.
        eventually(lambda: lists.publish(channel, json.dumps(value)), "a worker that listens")  # noqa: B023
        lists.publish(channel, json.dumps(envelope(str(uuid4()), json.dumps(value).encode(), queue="celery.pidbox")))
        lists.publish(channel, choose.randbytes(30))
    mark = str(uuid4())
    lists.lpush("live", good(mark))
    assert site.verdicts([mark])[mark]["status"] == "judged"
    assert app.control.inspect(timeout=10, limit=1).ping()
    assert worker.process.poll() is None


#: Columns of a row that a producer's login may write, and what Postgres takes for them.
COLUMNS: dict[str, list[Any]] = {
    "attempts": [-1, 1, 10_001, 2**31 - 1],
    "publishes": [-5, 7, 2**31 - 1],
    "expires_at": ["infinity", "-infinity", "294276-01-01", "0001-01-01", "4713-01-01 BC", "9999-12-31 23:59:59-12"],
    "not_before": ["-infinity", "4713-01-01 BC", "0001-01-01 00:00:00+14"],
    "published_at": ["-infinity", "4713-01-01 BC"],
    "created_at": ["infinity", "-infinity", "4713-01-01 BC"],
    "task_id": ["", " ", "x" * 100_000, "\u202e\U0001f45f", "not a uuid", "*"],
    "wants_result": [True],
    "last_error": ["x" * 100_000, ""],
    "run_id": [str(UUID(int=0))],
}
BODIES = [b"", b"\0", b"null", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"v": 1}', b'"\\ud800"', b"\x80\x04]\x94.", b"NaN",
          b'{"n": ' + b"1" * 5_000 + b"}", b'{"a": ' * 1_200 + b"1" + b"}" * 1_200]  # fmt: skip


def hostile_rows() -> Iterator[dict[str, Any]]:
    """Rows of the outbox that `enqueue` and `submit` would not write."""
    for column, values in COLUMNS.items():
        for value in values:
            mark = str(uuid4())
            yield {"message_id": mark, "body": json.dumps(message(mark)).encode(), column: value}
    for body in BODIES:
        yield {"message_id": str(uuid4()), "body": body}
    choose = random.Random(1)
    for _ in range(30):
        mark = str(uuid4())
        told = message(mark, [pair(mark, attributes={"a": [1]})], run_id=None, source="default", attempts=0, settled=[])
        spoil(told, choose)
        yield {"message_id": mark, "body": json.dumps(told).encode()}


def test_hostile_rows_of_the_outbox_hold_nobody_up(site: Site, worker: Worker, lists: redis.Redis) -> None:
    rows, neighbours = list(hostile_rows()), []
    for number, row in enumerate(rows):
        names = ", ".join(row)
        site.query(
            f"insert into outbox (lane, {names}) values ('bulk', {', '.join(f':{name}' for name in row)})", **row
        )
        if number % GOOD_EVERY == 0:
            submission = submit([Pair(ref="good", image="s3://line/square.jpg", text="a red shoe")], lane="bulk")
            neighbours += submission.pair_ids
    found = site.query("select status from verdict where pair_id = any(:ids)", ids=neighbours)
    found = eventually(
        lambda: (
            (seen := site.query("select status from verdict where pair_id = any(:ids)", ids=neighbours))
            and len(seen) == len(neighbours)
            and seen
        ),
        "verdicts of all neighbours",
    )
    assert {row["status"] for row in found} == {"judged"}
    eventually(site.outbox_is_empty, "an empty outbox")
    ids = [row["message_id"] for row in rows]
    sql = "select message_id from {} where message_id = any(cast(:ids as uuid[]))"
    told = {
        str(row["message_id"])
        for table in ("verdict", "rejected_message")
        for row in site.query(sql.format(table), ids=ids)
    }
    assert [row for row in rows if row["message_id"] not in told] == []
    assert worker.process.poll() is None
