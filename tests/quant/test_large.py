"""OFA-large's shape is quantized in less memory than a small machine has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

MAX_PEAK_BYTES = 8e9


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ofa_large_is_quantized_in_less_than_8_gb(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.quant.large", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    assert figures["peak_bytes"] < MAX_PEAK_BYTES
    assert figures["share_of_fp16"] < 0.265
