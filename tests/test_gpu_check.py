"""The check of a GPU machine runs from its first line to its last, also where there is no GPU and nothing installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.gpu import check, speed
from infra.gpu.speed import COMPUTED_IN, LARGE, TINY, build, cells, flop_a_pair, judge, lines, questions
from worker.quant.int4 import Int4Linear

CHECK = Path(check.__file__)

#: Runs the script where only the five packages, and what torch itself needs, can be imported.
ALONE = """
import runpy, sys
import torch, numpy, PIL.Image, tokenizers, safetensors.torch
import torch._dynamo

class Refuse:
    hidden = {hidden!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
sys.argv = [{path!r}, "--device", "cpu", "--tiny"]
runpy.run_path({path!r}, run_name="__main__")
"""
HIDDEN = (
    "celery", "kombu", "redis", "pydantic", "sqlalchemy", "psycopg", "boto3", "botocore", "obstore", "modelscope",
    "rich", "typer", "psutil", "tests", "tasks", "db",
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    code = ALONE.format(hidden=HIDDEN, path=str(CHECK))
    return subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path_factory.mktemp("elsewhere")
    )


def test_it_runs_to_its_end_with_five_packages_and_no_gpu(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["check"], summary["ok"], summary["wrong"], summary["shape"]) == ("gpu", True, [], "tiny")
    assert summary["seconds"] < 480


def test_the_last_line_has_every_recipe_plain_and_compiled_at_every_batch(
    done: subprocess.CompletedProcess[str],
) -> None:
    found = json.loads(done.stdout.splitlines()[-1])["speed"]
    for recipe in COMPUTED_IN:
        for mode in ("eager", "compiled"):
            assert set(found[f"{recipe} {mode}"]) == {str(batch) for batch in TINY.batches}
            for cell in found[f"{recipe} {mode}"].values():
                assert set(cell) == {"pairs_per_s", "p50_ms", "p95_ms", "peak_mb", "share_of_ceiling"}
        assert found[f"{recipe} compiled, change"] < 0.1
    assert found["ceiling_tflops"]["bfloat16"] > 0


def test_it_compares_the_reference_and_the_quantized_weights_in_every_precision(
    done: subprocess.CompletedProcess[str],
) -> None:
    errors = json.loads(done.stdout.splitlines()[-1])["errors"]
    for precision in ("fp32", "fp16", "bf16"):
        for name in ("ve_plain", "ve_long_answers", "ve_shared_prefix", "ve_text2"):
            assert f"golden {name} {precision}" in errors
        assert {f"demo {recipe} {precision}" for recipe in ("awq-int4", "int8-dynamic")} <= set(errors)
        assert f"int4 256x128 {precision}, many rows" in errors


def test_a_wrong_answer_is_named_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "golden", lambda *_: [("golden ve_plain fp32", float("nan"), 1e-4)])
    monkeypatch.setattr(check, "linears", lambda *_: [("int4", 1e-9, 1e-3)])
    monkeypatch.setattr(check, "demo", lambda *_: [("demo", 0.2, 0.1)])
    monkeypatch.setattr(check, "speed", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu"])
    assert check.main() == 1
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["ok"], summary["wrong"]) == (False, ["golden ve_plain fp32", "demo"])


def test_what_fails_is_reported_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: object, shape: object, batch: int, *_: object) -> dict[str, Any]:
        if batch == 2:
            raise torch.OutOfMemoryError("two is too many")
        return {"pairs_per_s": 1.0, "p50_ms": 1.0, "p95_ms": 1.0, "peak_mb": None, "share_of_ceiling": 0.5}

    monkeypatch.setattr(speed, "measure", measure)
    model: Any = None
    found = cells(model, TINY, torch.device("cpu"), 1.0, 1.0, lambda: 1.0)
    assert found["1"]["pairs_per_s"] == 1
    assert found["2"] == "OutOfMemoryError: two is too many"
    assert any("two is too many" in line for line in lines([("fp16 eager", found), ("tflop_a_pair", 0.4)]))


def test_without_time_nothing_further_begins() -> None:
    model: Any = None
    assert set(cells(model, TINY, torch.device("cpu"), 1.0, 1.0, lambda: 0.0).values()) == {"left out: no time"}


def test_the_timed_network_has_four_bit_linears_and_padded_texts() -> None:
    model = build(TINY.config, "awq-int4", torch.device("cpu"))
    kinds = [type(module).__name__ for module in model.modules()]
    assert "UnpackedLinear" in kinds or Int4Linear.__name__ in kinds
    ids, pixels = questions(TINY, 4)
    assert ids.eq(TINY.config.pad_token_id).any() and not ids[-1].eq(TINY.config.pad_token_id).any()
    assert judge(model, ids, pixels).sum(1) == pytest.approx([1] * 4, abs=1e-4)
    assert flop_a_pair(model, TINY) > 1e6


@pytest.mark.slow
def test_a_pair_of_ofa_large_takes_about_half_a_tera_operation() -> None:
    model = build(LARGE.config, "bf16", torch.device("cpu"))
    assert 0.4e12 < flop_a_pair(model, LARGE) < 0.5e12
