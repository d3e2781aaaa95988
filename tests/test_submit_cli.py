"""`concord submit` as a command: what it shows meanwhile, and that Ctrl-C and the same command again lose nothing."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import psutil
import pytest
import typer
from rich.console import Console
from sqlalchemy import Engine, text

from db.engine import make_engine
from tasks import submit_cli
from tasks.pairs_formats import FileWrong
from tests.conftest import Database
from tests.line.site import ROOT, eventually
from tests.shared import emptied_database
from tests.submit_env import configured, environment

database = emptied_database

#: Also where the tests run in the background, to which a shell sends no Ctrl-C.
HEEDING_CONTROL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tasks.cli import main
main()
"""
#: A million pairs in constant memory: what a process may grow by while it reads all but the first tenth.
GROWTH_ALLOWED_MB = 16.0


@pytest.fixture
def line(database: Database) -> Iterator[Engine]:
    engine = make_engine(database.url)
    with configured(database_url=database.url):
        yield engine
    engine.dispose()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """What the command writes to a terminal, or to a file."""

    def shown(terminal: bool) -> io.StringIO:
        sink = io.StringIO()
        console = Console(file=sink, force_terminal=terminal, width=200, soft_wrap=True, highlight=False)
        monkeypatch.setattr(submit_cli, "err", console)
        return sink

    return shown


def pairs_in(folder: Path, number: int, name: str = "pairs.jsonl", **more: Any) -> Path:
    path = folder / name
    with path.open("w") as file:
        for n in range(number):
            file.write(json.dumps({"ref": f"sku-{n}", "image": "s3://shop/1.jpg", "text": f"shoe {n}", **more}) + "\n")
    return path


def submit(path: Path, **options: Any) -> int:
    """The command in this process; its exit status."""
    given = {"lane": "bulk", "source": "default", "wait": False, "again": False, **options}
    with pytest.raises(typer.Exit) as end:
        submit_cli.submit(path, **given)
    return end.value.exit_code


def planned(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("select coalesce(sum(planned), 0) from run")).scalar_one())


def refs(engine: Engine) -> list[str]:
    """The names of all pairs in the outbox."""
    with engine.connect() as connection:
        bodies = connection.execute(text("select body from outbox")).scalars()
        return [pair["ref"] for body in bodies for pair in json.loads(body)["pairs"]]


def process(database: Database, path: Path, *options: str, **settings: object) -> "subprocess.Popen[str]":
    """`concord submit` as a process of its own."""
    command = [sys.executable, "-c", HEEDING_CONTROL_C, "submit", str(path), *options]
    own = environment(database_url=database.url, **settings)
    return subprocess.Popen(command, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True)


# ---- What is shown ---------------------------------------------------------------------------------------------------


def test_a_terminal_has_a_bar_with_the_pairs_their_pace_and_what_is_left(
    line: Engine, said: Callable[..., io.StringIO], tmp_path: Path
) -> None:
    sink = said(terminal=True)
    assert submit(pairs_in(tmp_path, 5_000)) == 0
    shown = sink.getvalue()
    assert "submitting" in shown
    assert "100%" in shown
    assert "5,000 pairs, " in shown
    assert " a second, 0:00:00 left" in shown
    assert "5,000 pairs accepted" in shown


def test_without_a_terminal_there_is_a_line_now_and_then_and_no_more(
    line: Engine, said: Callable[..., io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = said(terminal=False)
    assert submit(pairs_in(tmp_path, 5_000)) == 0
    assert sink.getvalue().count("\n") == 1
    assert "5,000 pairs accepted" in sink.getvalue()
    monkeypatch.setattr(submit_cli, "LINE_EVERY_S", 0.0)
    sink = said(terminal=False)
    assert submit(pairs_in(tmp_path, 9_000), again=True) == 0
    lines = sink.getvalue().splitlines()
    assert lines[0].startswith("submitting: ")
    assert "% of pairs.jsonl, 0 pairs" in lines[0]
    assert any("4,096 pairs, " in one and " a second, 0:00:0" in one for one in lines)
    assert "100% of pairs.jsonl, 9,000 pairs" in lines[-2]


def test_what_was_accepted_before_is_said_to_be_skipped(
    line: Engine, said: Callable[..., io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs_in(tmp_path, 6_000)
    said(terminal=False)
    assert submit(path) == 0
    monkeypatch.setattr(submit_cli, "LINE_EVERY_S", 0.0)
    sink = said(terminal=False)
    assert submit(path) == 0
    lines = sink.getvalue().splitlines()
    assert lines[0].startswith("skipping what is accepted: ")
    assert "6,000 pairs" in lines[0]
    assert lines[-2:] == [
        lines[-2].split(":")[0] + ": 0 pairs accepted, 6,000 were before",
        "This file was submitted before; --again judges it anew.",
    ]


def test_of_a_file_that_breaks_off_it_says_what_was_accepted_and_then_why(
    line: Engine, said: Callable[..., io.StringIO], tmp_path: Path
) -> None:
    sink, path = said(terminal=False), tmp_path / "pairs.csv"
    path.write_bytes(b"image,text\ns3://b/1,a\ns3://b/2,caf\xe9\n" + b's3://b/3,"a"b\n')
    with pytest.raises(FileWrong, match=r"pairs\.csv: line 4 is not CSV"):
        submit_cli.submit(path)
    assert "1 pairs accepted\nline 3 is not a pair (it is not UTF-8)" in sink.getvalue()


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_a_submit_that_is_interrupted_again_and_again_accepts_each_pair_once(
    line: Engine, database: Database, tmp_path: Path
) -> None:
    path = pairs_in(tmp_path, 60_000)
    for interrupted in (True, True, False):
        before = planned(line)
        with process(database, path) as submitting:
            if interrupted:
                eventually(lambda before=before: planned(line) > before, "pairs that are accepted")  # type: ignore[misc]
                submitting.send_signal(signal.SIGINT)
            _, words = submitting.communicate()
        assert submitting.returncode == (130 if interrupted else 0), words
        if interrupted:
            assert before < planned(line) < 60_000
            assert words == f"{planned(line):,} pairs are accepted so far; the same command goes on.\n"
    assert planned(line) == 60_000
    assert sorted(refs(line)) == sorted(f"sku-{n}" for n in range(60_000))
    with line.connect() as connection:
        assert connection.execute(text("select state from run")).scalars().all() == ["running"]


def test_control_c_before_anything_was_accepted_is_no_error(line: Engine, database: Database, tmp_path: Path) -> None:
    owner = make_engine(database.owner_url)
    with owner.begin() as connection, process(database, pairs_in(tmp_path, 5)) as submitting:
        connection.execute(text("lock table run"))
        eventually(lambda: blocked(line), "a command that waits for the lock")
        submitting.send_signal(signal.SIGINT)
        _, words = submitting.communicate()
    owner.dispose()
    assert (submitting.returncode, "Traceback" in words, planned(line)) == (130, False, 0)


def blocked(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'relation'"
        return bool(connection.execute(text(waiting)).scalar_one())


def test_a_submit_with_again_that_is_interrupted_goes_on_with_the_same_command(
    line: Engine, said: Callable[..., io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs_in(tmp_path, 5_000)
    sink = said(terminal=False)

    def interrupted(self: object, skipping: bool = False) -> None:
        if planned(line):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(submit_cli.Shown, "look", interrupted)
        assert submit(path, again=True) == 130
    assert "4,096 pairs are accepted so far; the same command goes on.\n" in sink.getvalue()
    for accepted in ("904 pairs accepted, 4,096 were before", "5,000 pairs accepted"):
        assert submit(path, again=True) == 0
        assert sink.getvalue().endswith(f"{accepted}\n")
    assert planned(line) == 10_000
    with line.connect() as connection:
        bodies = [json.loads(body) for body in connection.execute(text("select body from outbox")).scalars()]
    assert all(body["fresh"] for body in bodies), "what was judged before would be answered from that"


# ---- A million -------------------------------------------------------------------------------------------------------


def write_parquet(folder: Path, number: int) -> Path:
    """In one row group, which is the most that a reader could be tempted to hold."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = [f"sku-{n}" for n in range(number)]
    columns = {"ref": names, "image": ["s3://shop/1.jpg"] * number, "text": [f"shoe {n}" for n in range(number)]}
    parquet.write_table(arrow.table(columns), folder / "pairs.parquet", row_group_size=number)
    return folder / "pairs.parquet"


def with_ids(folder: Path, number: int) -> Path:
    path = folder / "ids.jsonl"
    with path.open("w") as file:
        for n in range(number):
            pair = {
                "id": str(uuid5(NAMESPACE_URL, str(n))),
                "ref": f"sku-{n}",
                "image": "s3://shop/1.jpg",
                "text": "shoe",
            }
            file.write(json.dumps(pair) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("write", [pairs_in, with_ids, write_parquet])
def test_a_million_pairs_take_no_more_memory_than_a_tenth_of_them(
    line: Engine, database: Database, tmp_path: Path, write: Callable[[Path, int], Path]
) -> None:
    path, samples = write(tmp_path, 1_000_000), []
    with process(database, path, outbox_high_water=1_000_000) as submitting:
        looked_at = psutil.Process(submitting.pid)
        while submitting.poll() is None:
            samples.append((planned(line), looked_at.memory_info().rss / 1e6))
            time.sleep(0.2)  # Between two samples.
        _, words = submitting.communicate()
    assert submitting.returncode == 0, words
    early = max(megabytes for pairs, megabytes in samples if pairs <= 100_000)
    assert max(megabytes for _, megabytes in samples) <= early + GROWTH_ALLOWED_MB
    assert planned(line) == 1_000_000
    found = refs(line)
    assert len(found) == len(set(found)) == 1_000_000
