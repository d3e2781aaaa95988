"""The supervisor of a chaos run, and what it reads in the workers' logs."""

import ast
import inspect
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.chaos.workers import SETTLED, STOPPING, Batch, Supervisor, Worker, end_leftovers, settled
from tasks import moderate
from tests.line.site import eventually

LOG = """
[12:00:00: INFO] a batch is settled: 64 pairs of 2 messages, bulk, 0.123 s, 0 delivered before
[12:00:01: WARNING] trying again in 0.1 s: away
[12:00:02: INFO] a batch is settled: 32 pairs of 1 messages, live, 1.023 s, 32 delivered before
"""


def test_the_batches_of_a_log_are_read() -> None:
    assert settled(LOG) == [Batch(64, 2, 0), Batch(32, 1, 32)]


def test_the_line_is_the_one_that_workers_write() -> None:
    constants = [
        node.value for node in ast.walk(ast.parse(inspect.getsource(moderate))) if isinstance(node, ast.Constant)
    ]
    (line,) = [value for value in constants if isinstance(value, str) and value.startswith("a batch is settled")]
    assert SETTLED.search(line % (64, 2, "bulk", 0.1234, 3))


class Pretender(Worker):
    """A process in a worker's place: it says that it is ready, and ends in order when it is told to."""

    command = (
        "sh",
        "-c",
        "trap 'echo worker: Warm shutdown; exit 0' TERM; echo it is ready.; while :; do sleep 0.05; done",
    )


class Hopeless(Worker):
    """Ends by itself."""

    command = ("sh", "-c", "exit 3")


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(2, {}, tmp_path, Pretender) as supervisor:
        eventually(supervisor.all_ready, "two that are ready")
        yield supervisor


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_fault_ends_is_started_again_and_no_problem(supervisor: Supervisor, number: signal.Signals) -> None:
    worker = supervisor.workers[0]
    worker.signal(number)
    assert worker not in supervisor.ready()
    eventually(lambda: supervisor.workers[0] is not worker and supervisor.all_ready(), "another in its place")
    assert [started.name for started in supervisor.started] == ["worker-0-0", "worker-1-0", "worker-0-1"]
    assert supervisor.problems == []


def test_what_ends_by_itself_is_a_problem(tmp_path: Path) -> None:
    with Supervisor(1, {}, tmp_path, Hopeless) as supervisor:
        eventually(lambda: supervisor.problems, "a problem")
    assert supervisor.problems[0].startswith("worker-0-0 ended by itself with status 3: see ")


def test_a_worker_whose_run_was_killed_is_ended_by_the_next_and_nobody_else(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    left, other = supervisor.workers.values()
    (tmp_path / f"{left.name}.pid").write_text(f"{left.process.pid}\n")
    (tmp_path / "worker-7-0.pid").write_text(f"{other.process.pid}\n")  # a number that another process has by now
    left.told = signal.SIGKILL
    end_leftovers(tmp_path)
    assert left.process.wait() == -signal.SIGKILL
    assert other.process.poll() is None


def test_a_frozen_worker_is_not_ready_and_lives_on(supervisor: Supervisor) -> None:
    worker = supervisor.workers[0]
    with worker.frozen():
        assert supervisor.ready() == [supervisor.workers[1]]
    assert supervisor.all_ready()
    assert supervisor.by_pid(worker.process.pid) is worker
    assert supervisor.by_pid(1) is None


def test_whether_a_batch_was_in_work_when_sigterm_came_stands_in_the_log(supervisor: Supervisor) -> None:
    worker = supervisor.workers[0]
    before, _, after = LOG.strip().splitlines()
    worker.log.write_text("\n".join([before, after]))
    assert not worker.stopped_in_a_batch(), "it was not told to stop"
    worker.log.write_text("\n".join([before, STOPPING]))
    assert not worker.stopped_in_a_batch()
    worker.log.write_text("\n".join([before, STOPPING, after]))
    assert worker.stopped_in_a_batch()
