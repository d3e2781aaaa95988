"""What is accepted is judged, whatever dies meanwhile, by the producer's own ledger."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, text

from tasks.submit import Pair, submit
from tests.line.site import Site, eventually

PAIRS = 2_000
#: One accepted submission of the producer below.
CHUNK = 50
#: A message comes back 20 s after its worker died and is looked for 25 s after Redis lost it; the rest is margin.
RECOVERY_S = 90.0
PICTURES = ("big.jpg", "cmyk.jpg", "gray.png", "palette.png", "square.jpg", "tall.png", "tiny.png", "wide.jpg")


def pair_of(number: int) -> Pair:
    picture = PICTURES[number % len(PICTURES)]
    return Pair(ref=f"survivor-{number}", image=f"s3://line/{picture}", text=f"{number} dogs on a boat")


@contextmanager
def producing(site: Site, ledger: Path) -> Iterator[threading.Thread]:
    """A producer that submits by turns live, bulk and in SQL, and notes an id when the call that accepts it returns."""

    def produce() -> None:
        engine = create_engine(site.database_url)
        with ledger.open("a") as book:
            for start in range(0, PAIRS, CHUNK):
                pairs = [pair_of(number) for number in range(start, start + CHUNK)]
                if start // CHUNK % 3 == 2:
                    body = json.dumps([pair.model_dump(mode="json", exclude={"id"}) for pair in pairs])
                    enqueue = text("select enqueue(cast(:body as jsonb))")
                    with engine.begin() as connection:
                        ids = list(connection.execute(enqueue, {"body": body}).scalars())
                else:
                    lane: Any = ("live", "bulk")[start // CHUNK % 3]
                    ids = list(submit(pairs, lane=lane).pair_ids)
                book.writelines(f"{pair_id}\n" for pair_id in ids)
        engine.dispose()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def judged(site: Site) -> int:
    return int(site.query("select count(*) as rows from verdict where ref like 'survivor-%'")[0]["rows"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wiped", [False, True], ids=["redis restarts", "redis restarts with its data gone"])
def test_kill_9_of_the_worker_and_a_redis_restart_lose_nothing(
    site: Site, stack: Any, tmp_path: Path, wiped: bool
) -> None:
    site.query("delete from outbox")
    before = judged(site)
    ledger = tmp_path / "ledger"
    # Small batches, so that there are many to die in the middle of.
    with site.worker(max_pairs=16) as first, producing(site, ledger) as producer:
        eventually(lambda: judged(site) > before + 100, "some verdicts")
        first.kill()
        with site.worker(max_pairs=16) as second:
            eventually(lambda: judged(site) > before + 500, "verdicts of the second worker")
            stack.redis.kill()
            stack.redis.start(wipe=wiped)
            producer.join()
            accepted = ledger.read_text().split()
            assert len(set(accepted)) == PAIRS
            rows = site.verdicts(accepted, RECOVERY_S)
            assert {row["status"] for row in rows.values()} == {"judged"}
            assert len(rows) == PAIRS
            eventually(site.outbox_is_empty, "an empty outbox")
            with redis.Redis.from_url(site.redis_url) as client:
                eventually(lambda: not client.exists("live", "bulk") and not client.hlen("unacked"), "empty queues")
            assert second.process.poll() is None, "the worker ended with Redis"


@pytest.mark.timeout(180)
def test_sigterm_lets_batches_end_gives_the_rest_back_and_exits_0(site: Site) -> None:
    with site.worker(max_pairs=16) as first:
        pairs = [pair_of(PAIRS + number) for number in range(640)]
        submission = submit(pairs, lane="bulk")
        first.says("a batch is settled")
        assert first.stop() == 0
        assert not any("given back" in line or "Traceback" in line for line in first.lines)
    with redis.Redis.from_url(site.redis_url) as client:
        assert client.hlen("unacked") == 0
    with site.worker():
        rows = site.verdicts(submission.pair_ids)
    assert {row["attempts"] for row in rows.values()} == {0}
    assert {row["status"] for row in rows.values()} == {"judged"}
    eventually(site.outbox_is_empty, "an empty outbox")
