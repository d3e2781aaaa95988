"""`make demo`: however it is ended, it leaves nothing running, and where it cannot go on it says why."""

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from sqlalchemy import create_engine

from db import outbox
from db.outbox import OutboxRow
from infra import demo
from tasks.submit import uuid7
from tests.conftest import Database
from tests.line.site import ROOT, eventually
from tests.submit_env import configured, environment


def started_in(folder: Path) -> list[psutil.Process]:
    """What runs for this folder: servers name it on their command lines, workers stand in it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd().startswith(str(folder)) or str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


@contextlib.contextmanager
def demo_in(folder: Path, command: Sequence[str], output: int) -> Iterator[subprocess.Popen[str]]:
    """A demo with servers of its own; whatever becomes of the test, none of them is left."""
    own = environment()
    with subprocess.Popen(command, cwd=folder, env=own, stdout=output, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            for one in started_in(folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def hear(lines: Iterable[str], words: str) -> None:
    heard = []
    for line in lines:
        heard.append(line)
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}:\n{''.join(heard)}")


@pytest.mark.usefixtures("stack")  # without the servers' wheels there is no demo either
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_sigterm_to_make_ends_the_demo_with_its_worker_and_its_servers(tmp_path: Path) -> None:
    # As `make demo` in a folder of its own; .venv is there already.
    make = ["make", "-f", str(ROOT / "Makefile"), f"BIN={Path(sys.executable).parent}", "-o", "venv", "demo"]
    with demo_in(tmp_path, make, subprocess.PIPE) as process:
        hear(process.stdout or [], "one worker is up")
        names = {one.name() for one in started_in(tmp_path)}
        assert {"postgres", "redis-server", "weed"} <= names and [name for name in names if "python" in name]
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert "Stopped." in said
    assert process.returncode != 0
    assert started_in(tmp_path) == []


@pytest.mark.usefixtures("stack")
def test_a_terminal_that_is_closed_while_the_worker_starts_ends_the_demo(tmp_path: Path) -> None:
    screen, keyboard = pty.openpty()
    with demo_in(tmp_path, [sys.executable, "-m", "infra.demo"], keyboard) as process:
        os.close(keyboard)
        with open(screen, errors="replace") as shown:
            hear(shown, "are in s3://")
        eventually(lambda: (tmp_path / ".concord/logs/worker.log").exists(), "a worker that starts")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        process.wait(timeout=60)
    assert process.returncode not in (0, -signal.SIGHUP)
    assert started_in(tmp_path) == []


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    spoken = io.StringIO()
    monkeypatch.setattr(demo, "out", Console(file=spoken, soft_wrap=True, width=200))
    return spoken


@pytest.mark.parametrize("messages", [0, 3])
def test_a_demo_that_waits_in_vain_says_what_is_ahead_of_its_pairs(
    database: Database,
    redis_url: str,
    tmp_path: Path,
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    messages: int,
) -> None:
    monkeypatch.setattr(demo, "STALLED_S", 0.0)
    pairs = [{"id": str(uuid7()), "image": "s3://b/k", "text": "a dog", "label": "neutral"}]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pairs[0]))
    engine = create_engine(database.url)
    with engine.begin() as connection:
        outbox.add(connection, [OutboxRow(uuid7(), "bulk", {}) for _ in range(messages)])
    engine.dispose()
    with configured(database_url=database.url, broker_url=redis_url):
        outcome = demo.judge(tmp_path / "pairs.jsonl", pairs)
    assert not outcome.complete
    assert "No verdict for 0 s, and 1 of the demo's pairs wait." in said.getvalue()
    assert ("3 messages are ahead of them" in said.getvalue()) == bool(messages)
    assert ("Nothing is ahead of them" in said.getvalue()) == (not messages)
