"""`concord bench queue`, `line` and `writer` measure what they say, on a short run; how fast is no test's matter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.submit_env import environment

ROOT = Path(__file__).parents[1]
SHORT_S = 0.5

#: A process of its own: a benchmark takes the settings of the process that runs it.
PROGRAM = "import importlib, json, sys; print(json.dumps(importlib.import_module(sys.argv[1]).measure({}, print)))"


def measured(name: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM.format(SHORT_S), f"infra.bench.{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["pairs_per_s"] > 0
    assert isinstance(figures["met"], bool)
    return figures


@pytest.mark.slow
def test_the_queue_bench_counts_every_pair_that_it_publishes() -> None:
    figures = measured("queue")
    assert figures["distinct"] == figures["pairs"] > 0


@pytest.mark.slow
def test_the_line_bench_finds_a_verdict_for_every_pair_that_it_submits() -> None:
    figures = measured("line")
    assert figures["verdicts"] > figures["pairs"] > 0, "those of the first messages come on top"


@pytest.mark.slow
def test_the_writer_bench_commits_durably_and_hears_of_no_deadlock() -> None:
    figures = measured("writer")
    assert (figures["fsync"], figures["synchronous_commit"]) == ("on", "on")
    assert figures["8_writers"]["errors"] == 0
    assert figures["complete"] is True
