"""The producer of a chaos run, a process of its own: pairs by every way in, and a ledger of what was accepted.

    python -m infra.chaos.producer LEDGER --pairs 2000 --seed 1 --seconds 60 --bucket concord-demo [--no-outbox]

Servers go away while it works. It tries again with the same ids until a call returns, having looked first whether the
call that broke off had been accepted after all; so the ledger has each accepted pair once, and no other.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid5

from celery import Celery
from kombu.exceptions import OperationalError as BrokerAway
from redis.exceptions import RedisError
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from db.engine import Trouble, trouble
from db.runs import Run
from infra.chaos.ledger import WAYS, Entry, Ledger, Way
from tasks.pairs_file import begin, submit_file
from tasks.settings import settings
from tasks.submit import Pair, engine, envelope, submit
from worker.messages import TASK_NAME

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
HELDOUT = DEMO_MODEL / "heldout.jsonl"
#: The source of the pairs that went through the outbox, and of those that went to Redis alone.
SOURCE, BARE_SOURCE = "chaos", "chaos-bare"
#: Ids of the pairs are derived under this name, so that a failure replays with the same ones.
NAMES = UUID("7f0d4c55-9e0b-4c0a-8a4e-0c4f2b6b1f9d")
#: Pairs of one call, by way; a file is cut into messages of 64.
PAIRS_PER_CALL: dict[Way, int] = {"live": 32, "bulk": 32, "sql": 32, "file": 128, "send_task": 16}
#: This share is submitted at once, so that there is a backlog from the first moment; the rest evenly over the time.
HEAD_START = 0.25
#: Between two tries while a server is away.
PAUSE_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """Pairs that are handed over together."""

    number: int
    way: Way
    pairs: list[dict[str, Any]]

    def entries(self, run_id: str = "") -> list[Entry]:
        return [Entry(self.way, pair["id"], pair["ref"], run_id) for pair in self.pairs]


def calls(pairs: int, seed: int, bucket: str, *, outbox: bool = True) -> Iterator[Call]:
    """All calls of a run in order: every way once in each round, in an order that the seed draws."""
    samples = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    chance = random.Random(f"{seed}/calls")
    number = done = 0
    while done < pairs:
        round_of_ways: list[Way] = chance.sample(WAYS, len(WAYS)) if outbox else ["send_task"]
        for way in round_of_ways:
            size = min(PAIRS_PER_CALL[way], pairs - done)
            if size:
                yield Call(number, way, [pair_of(place, seed, samples, bucket) for place in range(done, done + size)])
            number, done = number + 1, done + size


def pair_of(number: int, seed: int, samples: list[dict[str, Any]], bucket: str) -> dict[str, Any]:
    """A pair of the demo's test set under an id and a name of its own."""
    sample = samples[number % len(samples)]
    image = f"s3://{bucket}/{sample['image']}"
    pair_id = str(uuid5(NAMES, f"{seed}/{number}"))
    return {"id": pair_id, "ref": f"chaos-{number}", "image": image, "text": sample["text"], "policy": sample["policy"]}


class Producer:
    """Hands calls over, each until it is accepted, and writes the ledger."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.ledger, self.folder = ledger, folder
        self.database: Engine = engine()
        # As a stranger's client would be: it knows the broker and the task's name.
        self.celery = Celery(broker=settings().need("broker_url"))

    def hand_over(self, call: Call) -> None:
        match call.way:
            case "file":
                return self.submit_file(call)
            case "send_task":
                self.send_task(call)
            case "sql":
                self.until_accepted(call, lambda: self.enqueue(call))
            case lane:
                self.until_accepted(call, lambda: submit(as_pairs(call), lane=lane, source=SOURCE))
        self.ledger.write(call.entries())

    def until_accepted(self, call: Call, action: Callable[[], object]) -> None:
        """A second `submit` or `enqueue` has another submitted_at and so makes another verdict: where a call broke off,
        one has to look whether the message is there, as a row of the outbox or as the verdicts that took its place.
        """
        while not succeeds(action):
            if answer_of(lambda: self.look_for(call.pairs[0]["id"])):
                return

    def look_for(self, pair_id: str) -> bool:
        sql = """
            select exists (select from verdict where pair_id = cast(:id as uuid))
                or exists (select from outbox where position(cast(:id as text) in convert_from(body, 'UTF8')) > 0)
        """
        with self.database.connect() as connection:
            return bool(connection.execute(text(sql), {"id": pair_id}).scalar_one())

    def enqueue(self, call: Call) -> None:
        message = {"source": SOURCE, "pairs": call.pairs}
        with self.database.begin() as connection:
            connection.execute(text("select enqueue(cast(:message as jsonb))"), {"message": json.dumps(message)})

    def submit_file(self, call: Call) -> None:
        """As a run: the same file again goes on after the last pair that was accepted."""
        path = self.folder / f"pairs-{call.number}.jsonl"
        path.write_text("".join(json.dumps(pair) + "\n" for pair in call.pairs))
        noted = 0
        while True:
            run = answer_of(lambda: begin(self.database, path, lane="bulk", source=SOURCE))
            self.ledger.write(call.entries(str(run.id))[noted : run.planned])
            noted = run.planned
            if run.state != "planning":
                return
            succeeds(partial(self.go_on_with, run, call))

    def go_on_with(self, run: Run, call: Call) -> None:
        for _ in submit_file(self.database, run, iter(call.pairs)):
            pass

    def send_task(self, call: Call) -> None:
        # The very same message again is harmless.
        message_id = uuid5(NAMES, call.pairs[0]["id"])
        body = envelope(message_id, datetime.now(UTC), call.pairs, BARE_SOURCE)
        lane = ("live", "bulk")[call.number % 2]
        while True:
            try:
                self.celery.send_task(TASK_NAME, args=[body], task_id=str(message_id), queue=lane, retry=False)
                return
            except (BrokerAway, RedisError):
                time.sleep(PAUSE_S)


def as_pairs(call: Call) -> list[Pair]:
    return [Pair.model_validate(pair) for pair in call.pairs]


def succeeds(action: Callable[[], object]) -> bool:
    """Whether the call returned; False, after a pause, where the database was away."""
    try:
        action()
    except SQLAlchemyError as error:
        if trouble(error) is Trouble.DATA:
            raise
        time.sleep(PAUSE_S)
        return False
    return True


def answer_of(action: Callable[[], T]) -> T:
    """What the call returns, however long the database is away."""
    answers: list[T] = []
    while not succeeds(lambda: answers.append(action())):
        pass
    return answers[0]


def due_s(done: int, pairs: int, seconds: float) -> float:
    """When, after the start, the call after `done` pairs is due."""
    return seconds * max(0.0, done / pairs - HEAD_START) / (1 - HEAD_START)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--no-outbox", action="store_true")
    chosen = parser.parse_args()
    producer = Producer(Ledger(chosen.ledger), chosen.ledger.parent)
    started, done = time.monotonic(), 0
    for call in calls(chosen.pairs, chosen.seed, chosen.bucket, outbox=not chosen.no_outbox):
        time.sleep(max(0.0, started + due_s(done, chosen.pairs, chosen.seconds) - time.monotonic()))
        producer.hand_over(call)
        done += len(call.pairs)


if __name__ == "__main__":
    main()
