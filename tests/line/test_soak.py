"""Nothing grows under full load, and nothing is lost. SOAK_MINUTES=30 makes it long; `make soak` writes the paper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.line.site import ROOT
from tests.submit_env import environment

MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))
#: Servers, worker and producer start, what waits is judged in the end, and all stop.
AROUND_S = 300


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + AROUND_S)
def test_at_full_load_nothing_grows_and_every_pair_is_judged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infra.bench.soak", "--minutes", str(MINUTES), "--out", str(tmp_path / "paper")]
    own = {**environment(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate()
        finally:
            process.terminate()
    result = json.loads(said.splitlines()[-1])
    assert [growth for growth in result["growths"] if not growth["flat"]] == []
    assert result["settled"] == {"judged": result["accepted"]}
    assert process.returncode == 0
    assert result["least_waiting"] > 0, "the load was not full"
    paper = (tmp_path / "paper/soak.md").read_text()
    assert "none is missing. Nothing grew." in paper
    assert "worker1" in (tmp_path / "paper/soak.svg").read_text()
    assert json.loads((tmp_path / "paper/soak.json").read_text())["samples"]
