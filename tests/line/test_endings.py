"""Whatever ends a worker, everybody's pairs are judged; only a pair that ends it each time fails."""

import io
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest
import redis
from celery.apps.worker import (
    install_worker_int_handler,
    install_worker_term_handler,
    install_worker_term_hard_handler,
)
from celery.worker import state as worker_state
from PIL import Image

from tasks.submit import Pair, submit
from tests.line.broken_worker import (
    CRASHES,
    EXIT_STATUS,
    EXITS,
    HANGS,
    LOSES,
    STALLS,
    broken,
    unread_until,
    waits_for,
)
from tests.line.site import Site, eventually
from tests.line.test_line import PICTURE
from worker.endings import EXIT_DEVICE_LOST, EXIT_HUNG, leave_at_the_second_signal

#: Of its batch, of its message judged alone, and three times over the pair alone.
DEATHS = 5


@pytest.fixture(autouse=True)
def nothing_left(site: Site) -> Iterator[None]:
    """Each test begins and ends with empty queues, and an outbox and a table of suspects without rows."""
    site.query("delete from outbox")
    yield
    with redis.Redis.from_url(site.redis_url) as client:
        left = {"queues": client.exists("live", "bulk"), "unacked": client.hlen("unacked")}
        client.delete("live", "bulk", "unacked", "unacked_index")
    assert not any(left.values()), left
    assert site.query("select * from suspect") == []
    assert site.outbox_is_empty()


def message(*texts: str, lane: Any = "live", image: str = PICTURE) -> list[UUID]:
    """One message with a pair for each text, whose refs are the texts and their places."""
    return submit([Pair(ref=f"{n} {text}", image=image, text=text) for n, text in enumerate(texts)], lane=lane).pair_ids


def settled(site: Site, ids: Sequence[UUID]) -> bool:
    sql = "select count(*) as rows from verdict where pair_id = any(cast(:ids as uuid[]))"
    return bool(site.query(sql, ids=[str(pair_id) for pair_id in ids])[0]["rows"] == len(ids))


def assert_judged(site: Site, ids: Sequence[UUID]) -> None:
    """Each, as if nothing had been."""
    rows = site.verdicts(ids)
    assert {(row["status"], row["error_code"], row["attempts"]) for row in rows.values()} == {("judged", None, 0)}


# -- out of memory -----------------------------------------------------------------------------------------------------


def test_out_of_memory_is_found_out_once_and_every_pair_is_judged_as_ever(site: Site) -> None:
    texts = [f"{n} red shoes" for n in range(40)]
    with site.worker() as worker:
        expected = site.verdicts(message(*texts))
    # Room for nine shortest prompts and nine pictures: 40 pairs are tried, 20, 10, and then go by fives.
    with site.worker(program=broken(room=9 * 16)) as worker:
        warmed_up = len(worker.lines)
        first = site.verdicts(message(*texts))
        ran_out = [line for line in worker.lines[warmed_up:] if "no room for" in line]
        again = site.verdicts(message(*texts))
        assert len(ran_out) == 3
        assert [line for line in worker.lines[warmed_up:] if "no room for" in line] == ran_out
    for rows in (first, again):
        assert {row["attempts"] for row in rows.values()} == {0}
        for ref, row in rows.items():
            assert row["p_entailment"] == pytest.approx(expected[ref]["p_entailment"], abs=1e-5)


# -- a batch that never ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draining", [False, True], ids=["at work", "while it drains"])
def test_a_hung_batch_ends_the_worker_with_all_stacks_and_the_next_one_judges_it(
    site: Site, tmp_path: Path, draining: bool
) -> None:
    file = tmp_path / "go on"
    ids = message("a red shoe", waits_for(file)) + message("a blue shoe")
    with site.worker(program=broken(), hang_limit_s=2) as first:
        first.says("in the model")
        if draining:
            first.process.send_signal(signal.SIGTERM)
            first.says("Warm shutdown")
        assert first.process.wait(timeout=60) == EXIT_HUNG
        first.says("a batch has hung for more than 2.0 s")
        for frame in ("in obey", "in watch", *(["in stop"] if draining else ["in asynloop", "relay.py"])):
            first.says(frame)
    file.touch()
    site.time_passes()
    with site.worker():
        assert_judged(site, ids)


def test_a_text_that_hangs_before_it_is_on_the_device_ends_the_worker_too(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    ids = message("a red shoe", unread_until(file))
    with site.worker(program=broken(), hang_limit_s=2) as first:
        assert first.process.wait(timeout=60) == EXIT_HUNG
        first.says("in the tokenizer")
    file.touch()
    site.time_passes()
    with site.worker():
        assert_judged(site, ids)


def test_native_code_that_never_lets_go_of_the_interpreter_ends_the_worker(site: Site) -> None:
    (pair_id,) = message(STALLS)
    with site.worker(program=broken(), hang_limit_s=2) as first:
        first.says("in the model")
        assert first.process.wait(timeout=60) == 1
        first.says("in obey")
    site.time_passes()
    with site.worker():
        assert_judged(site, [pair_id])


def test_a_device_that_is_lost_ends_the_worker_and_spends_nobodys_attempts(site: Site) -> None:
    ids = message("a red shoe", LOSES) + message("a blue shoe")
    with site.worker(program=broken()) as first:
        assert first.process.wait(timeout=60) == EXIT_DEVICE_LOST
        first.says("does not answer any more: RuntimeError: CUDA error: an illegal memory access was encountered.")
    site.time_passes()
    with site.worker():
        assert_judged(site, ids)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pair_that_hangs_each_time_fails_after_three_lone_tries(site: Site) -> None:
    poison = message("a red shoe", HANGS, "a blue shoe")
    others = message("a cup") + message("a ball", lane="bulk")
    statuses = site.workers_until(
        lambda: settled(site, poison + others), program=broken(), hang_limit_s=2, max_wait_ms=500
    )
    assert statuses == [EXIT_HUNG] * DEATHS
    assert_failed_alone(site, poison, others)


# -- a pair that ends the process --------------------------------------------------------------------------------------


def assert_failed_alone(site: Site, poison: Sequence[UUID], others: Sequence[UUID]) -> None:
    """The second of the message failed; it took nobody with it."""
    (row,) = site.verdicts(poison[1:2]).values()
    assert (row["status"], row["error_code"], row["attempts"]) == ("failed", "killed_worker", 0)
    assert_judged(site, [poison[0], *poison[2:], *others])


@pytest.mark.timeout(240)
def test_a_pair_that_ends_the_process_each_time_fails_after_three_lone_tries(site: Site) -> None:
    poison = message("a red shoe", EXITS, "a blue shoe")
    others = message("a cup") + message("a ball", "a hat") + message("a box", lane="bulk")
    statuses = site.workers_until(lambda: settled(site, poison + others), program=broken(), max_wait_ms=500)
    assert statuses == [EXIT_STATUS] * DEATHS
    assert_failed_alone(site, poison, others)


@pytest.mark.timeout(240)
def test_a_picture_that_crashes_the_decoder_takes_no_other_with_it(site: Site) -> None:
    png = io.BytesIO()
    Image.new("RGB", CRASHES).save(png, "PNG")
    site.bucket.put_object(Bucket="line", Key="crashes.png", Body=png.getvalue())
    pairs = [Pair(ref=name, image=f"s3://line/{name}", text="a cup") for name in ("tall.png", "crashes.png", "big.jpg")]
    poison = submit(pairs).pair_ids
    others = message("a cup") + message("a ball", lane="bulk")
    statuses = site.workers_until(lambda: settled(site, poison + others), program=broken(), max_wait_ms=500)
    assert statuses == [-signal.SIGSEGV] * DEATHS
    assert_failed_alone(site, poison, others)


# -- signals -----------------------------------------------------------------------------------------------------------


def test_sigterm_lets_begun_batches_end_and_hands_the_others_on_at_once(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    begun = message(waits_for(file))
    with site.worker("-n", "first@%h", program=broken(), max_pairs=1, max_inflight=1) as first:
        first.says("in the model")
        left = message("a cup") + message("a ball", lane="bulk")
        with redis.Redis.from_url(site.redis_url) as client:
            eventually(lambda: client.hlen("unacked") == 2, "a message in the buffer")
        first.process.send_signal(signal.SIGTERM)
        first.says("Warm shutdown")
        with site.worker("-n", "second@%h") as second:
            assert_judged(site, left)
            second.says("this worker publishes the outbox")
            assert first.process.poll() is None
            file.touch()
            assert first.process.wait(timeout=60) == 0
            assert_judged(site, begun)
            # It is nobody's fault that the first was told to stop.
            assert not [line for line in second.lines if "judged alone" in line]
        assert not [line for line in first.lines if "Traceback" in line or "given back" in line]


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM, signal.SIGTERM], id="SIGTERM twice"),
        pytest.param([signal.SIGTERM, signal.SIGQUIT], id="SIGTERM then SIGQUIT", marks=pytest.mark.slow),
        pytest.param([signal.SIGQUIT], id="SIGQUIT"),
        pytest.param([signal.SIGINT, signal.SIGINT], id="Ctrl-C twice"),
    ],
)
def test_whoever_will_not_wait_is_obeyed_and_nothing_is_lost(
    site: Site, tmp_path: Path, signals: Sequence[signal.Signals]
) -> None:
    file = tmp_path / "go on"
    ids = message("a red shoe", waits_for(file)) + message("a cup", lane="bulk")
    with site.worker(program=broken()) as first:
        first.says("in the model")
        for number in signals[:-1]:
            first.process.send_signal(number)
            first.says("shutdown (MainProcess)")
        assert first.process.poll() is None

        def ends() -> bool:
            # The first may still be in its handler when the second comes, which then is none: signals do not queue.
            first.process.send_signal(signals[-1])
            return first.process.poll() is not None

        eventually(ends, "an end at once", 30)
        assert first.process.returncode == 128 + signals[-1]
        first.says("this worker ends at once")
    file.touch()
    site.time_passes()
    with site.worker():
        assert_judged(site, ids)


def test_the_first_signal_leaves_no_other_handler_for_the_second_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        for install in (install_worker_term_handler, install_worker_int_handler, install_worker_term_hard_handler):
            install(Mock(hostname="a worker"))
        leave_at_the_second_signal()
        ours = [signal.getsignal(number) for number in numbers]
        for number in (signal.SIGTERM, signal.SIGINT):
            monkeypatch.setattr(worker_state, "should_stop", None)
            signal.raise_signal(number)
            assert worker_state.should_stop == 0
            assert [signal.getsignal(number) for number in numbers] == ours
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("server", ["redis", "postgres", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_worker_that_is_told_to_stop_while_a_server_is_away_stops_and_nothing_is_lost(
    site: Site, stack: Any, tmp_path: Path, server: str
) -> None:
    file = tmp_path / "go on"
    with site.worker(program=broken(), image_timeout_s=2) as first:
        ids = message(waits_for(file))
        first.says("in the model")
        getattr(stack, server).kill()
        try:
            if server == "s3":
                ids += message("a cup", image="s3://line/tall.png")
            file.touch()
            complaint = {"redis": "Connection", "postgres": "trying again", "s3": "S3 gives nothing"}[server]
            first.says(complaint)
            first.process.send_signal(signal.SIGTERM)
            status = first.process.wait(timeout=60)
        finally:
            getattr(stack, server).start()
        assert status == 0
    site.time_passes()
    with site.worker():
        assert_judged(site, ids)
        with redis.Redis.from_url(site.redis_url) as client:
            eventually(lambda: not client.exists("live") and not client.hlen("unacked"), "empty queues")


# -- a worker that stands still ----------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_frozen_lease_holder_is_replaced_and_what_it_had_is_judged_once(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    with site.worker("-n", "first@%h", program=broken()) as first:
        first.says("this worker publishes the outbox")
        ids = message("a red shoe", waits_for(file))
        first.says("in the model")
        with site.worker("-n", "second@%h", program=broken()) as second:
            first.process.send_signal(signal.SIGSTOP)
            try:
                others = message("a ball", lane="bulk")
                second.says("this worker publishes the outbox")
                assert_judged(site, others)
                second.says("in the model")  # what the first had in hand was given to the second
            finally:
                first.process.send_signal(signal.SIGCONT)
            first.says("another worker publishes the outbox")
            file.touch()
            for worker in (first, second):
                worker.says("a batch is settled: 2 pairs")
            assert_judged(site, ids)
            assert_judged(site, [pair_id for n in range(50) for pair_id in message(f"{n} balls", lane="bulk")])
            (lease,) = site.query("select holder from relay_lease")
            assert f"/{second.process.pid}/" in lease["holder"]
            assert sum("this worker publishes" in line for line in first.lines) == 1
            assert first.process.poll() is None
