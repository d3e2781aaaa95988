"""What a worker agrees to run, and the commands that make it: quantize, compare, tune."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.demo import HELDOUT
from tasks.cli import cli
from tasks.scoring import DEMO_QUANTIZED, DEMO_WEIGHTS, worker_moderator
from tasks.settings import settings
from tests.submit_env import configured
from worker.errors import CheckpointRefused, ConcordError
from worker.moderator import Moderator


def moderator(**chosen: object) -> Moderator:
    with configured(device="cpu", **chosen):
        return worker_moderator(settings())


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A few labelled pairs of the sample catalog, as a file."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:60]]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({**row, "image": str(HELDOUT.parent / row["image"])}) + "\n" for row in rows))
    return file


def run(*arguments: object, status: int = 0) -> str:
    with configured(device="cpu", torch_threads=1):
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def test_a_worker_runs_the_quantized_demo_model_unless_told_otherwise() -> None:
    assert moderator().checkpoint.recipe == "awq-int4"
    assert DEMO_QUANTIZED.is_dir()


def test_a_checkpoint_that_is_not_quantized_is_refused_with_the_command_to_type() -> None:
    with pytest.raises(CheckpointRefused, match=f"concord quantize --model {DEMO_WEIGHTS} --recipe awq-int4"):
        moderator(model_dir=DEMO_WEIGHTS)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_one_that_is_meant_to_run_as_it_is_runs_and_its_verdicts_say_so(recipe: str) -> None:
    assert moderator(model_dir=DEMO_WEIGHTS, recipe=recipe).checkpoint.recipe == recipe


def test_quantize_makes_a_folder_that_a_worker_runs_and_writes_the_report(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    said = run(
        "quantize", "--model", DEMO_WEIGHTS, "--calibration", pairs, "--out", out, "--fallback", "fp32",
        "--report", tmp_path / "report", "--keep", "decoder.layers.1",
    )  # fmt: skip
    assert "decoder.layers.0" in said
    assert f"CONCORD_MODEL_DIR={out}" in said
    assert moderator(model_dir=out).checkpoint.recipe == "awq-int4"
    assert {path.suffix for path in tmp_path.glob("report*")} == {".json", ".txt", ".png"}


def test_compare_ends_in_one_json_object(pairs: Path) -> None:
    said = run(
        "compare",
        "--model",
        DEMO_WEIGHTS,
        "--pairs",
        pairs,
        "--recipes",
        f"rtn-int4,{DEMO_QUANTIZED}",
        "--quick",
        "--json",
    )
    found = json.loads(said.strip().splitlines()[-1])
    assert len(found["recipes"]) == 3
    assert all(row["agreement"] >= 0.9 for row in found["recipes"].values())


def test_tune_writes_what_a_worker_reads(pairs: Path, tmp_path: Path) -> None:
    env = tmp_path / "env"
    run("tune", "--model", DEMO_WEIGHTS, "--pairs", pairs, "--out", tmp_path / "tuned", "--env-file", env, "--quick")
    assert f"CONCORD_MODEL_DIR='{tmp_path / 'tuned'}'" in env.read_text()
    assert "CONCORD_MAX_PAIRS" in env.read_text()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"image": "nothing.png", "text": "a dog", "label": "neutral"}', "pair 61: image_not_found"),
        ("not json", "pair 61: invalid_pair"),
    ],
)
def test_a_pair_that_cannot_be_asked_is_named(pairs: Path, tmp_path: Path, line: str, sentence: str) -> None:
    pairs.write_text(pairs.read_text() + line + "\n")
    with configured(device="cpu"):
        arguments = ["quantize", "--model", DEMO_WEIGHTS, "--calibration", pairs, "--out", tmp_path / "made"]
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert isinstance(result.exception, ConcordError)
    assert sentence in str(result.exception)


def test_a_labelled_pair_without_its_label_is_named(pairs: Path) -> None:
    pairs.write_text(pairs.read_text().replace('"label": "entailment"', '"note": "none"', 1))
    with configured(device="cpu"):
        result = CliRunner().invoke(cli, ["compare", "--model", str(DEMO_WEIGHTS), "--pairs", str(pairs)])
    assert "has no label" in str(result.exception)
