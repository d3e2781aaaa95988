"""The fastest variant that agrees often enough is chosen, and written where workers look."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from infra.demo_model.vocabulary import WEIGHTS
from tasks.settings import Settings
from tests.test_compare import QUICK, pairs_of
from worker.compare import tune as module
from worker.compare.compare import Comparison, Measured, Measurement
from worker.compare.tune import choose, set_in_env_file, tune
from worker.errors import ConcordError
from worker.model.checkpoint import load
from worker.quant.quantize import quantize
from worker.quant.replay import replay

ROW = Measured(
    accuracy=0.9, agreement=1.0, accuracy_diff=0.0, diff_ci95=(-0.1, 0.1), batch_drift=0.0, p50_ms=1, p95_ms=1,
    p99_ms=1, best_batch=32, pairs_per_s=10, speed_ratio=1, bytes=1, load_s=1, peak_rss_mb=1,
)  # fmt: skip


def comparison(**rows: tuple[float, float]) -> Comparison:
    """Recipes by agreement and pairs a second."""
    made = {name: replace(ROW, agreement=agreement, pairs_per_s=speed) for name, (agreement, speed) in rows.items()}
    return Comparison(made, "fp32", 100, 0, "cpu")


def scripted(monkeypatch: pytest.MonkeyPatch, found: dict[str, tuple[float, float]]) -> None:
    """Have measured what a test needs, so that no machine's speed decides it."""

    def measured(self: Measurement) -> Comparison:
        return comparison(**{variant.name: found[variant.name] for variant in self.trial.variants})

    monkeypatch.setattr(module.Measurement, "comparison", measured)


def test_the_fastest_that_agrees_often_enough_is_chosen() -> None:
    found = comparison(fp32=(1.0, 10), awq=(0.99, 12), small=(0.97, 30))
    assert [choose(found, at_least) for at_least in (0.9, 0.985, 0.995, 1)] == ["small", "awq", "fp32", "fp32"]


def test_what_was_measured_is_what_the_worker_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"fp32@64": (1, 10), "rtn-int4@64": (0.99, 11), "rtn-int4@48": (0.99, 20)})

    tuned = tune(
        WEIGHTS,
        pairs_of(3),
        tmp_path / "tuned",
        recipes=["rtn-int4"],
        image_sizes=(64, 48),
        fallback="fp32",
        effort=QUICK,
    )

    assert tuned.name == "rtn-int4@48"
    assert {path.name for path in tmp_path.iterdir()} == {"tuned"}, "nothing else is left behind"
    settings = Settings(_env_file=tuned.env_file)  # type: ignore[call-arg]
    assert (settings.model_dir, settings.max_pairs) == (tmp_path / "tuned", 32)
    checkpoint = load(tmp_path / "tuned")
    assert (checkpoint.recipe, checkpoint.configuration.patch_image_size) == ("rtn-int4", 48)
    assert checkpoint.quantization is not None and checkpoint.quantization.fallback == "fp32"
    assert replay(checkpoint).within_gate


def test_a_measured_choice_agrees_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.compare.compare.in_fresh_process", lambda *_: (1.0, 100.0))
    tuned = tune(WEIGHTS, pairs_of(6), tmp_path / "tuned", recipes=["bf16"], agreement=1.0, effort=QUICK)
    assert tuned.comparison.recipes[tuned.name].agreement == 1
    assert tuned.batch_pairs in QUICK.batch_sizes
    assert load(tuned.folder).recipe == tuned.name


def test_a_given_folder_that_wins_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(WEIGHTS, "bf16", [], tmp_path / "mine", measure_on=())
    scripted(monkeypatch, {"fp32": (1, 10), "mine": (1, 20)})
    env_file = tmp_path / "env"

    tuned = tune(WEIGHTS, pairs_of(3), tmp_path / "out", recipes=[tmp_path / "mine"], env_file=env_file, effort=QUICK)

    assert tuned.folder == tmp_path / "mine"
    assert not (tmp_path / "out").exists()
    assert f"CONCORD_MODEL_DIR='{tmp_path / 'mine'}'" in env_file.read_text()


@pytest.mark.parametrize(("device", "fp16_too"), [("cpu", False), ("cuda", True)])
def test_float16_is_tried_where_it_is_not_slow(
    device: str, fp16_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def prepared(model_dir: object, recipes: list[str], *_: object, **__: object) -> None:
        tried.extend(recipes)
        raise ConcordError("that is all")

    monkeypatch.setattr(module, "prepare", prepared)
    with pytest.raises(ConcordError, match="that is all"):
        tune(WEIGHTS, pairs_of(3), tmp_path / "tuned", device=device)
    assert ("fp16" in tried) == fp16_too
    assert {"awq-int4", "int8-dynamic", "bf16", "fp32"} <= set(tried)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "precious").touch()
    with pytest.raises(ConcordError, match="tuned is there already: name a new directory"):
        tune(WEIGHTS, pairs_of(3), tmp_path / "tuned", effort=QUICK)
    shutil.rmtree(tmp_path / "tuned")
    with pytest.raises(ConcordError, match=r"An agreement of 98\.5 cannot be kept"):
        tune(WEIGHTS, pairs_of(3), tmp_path / "tuned", agreement=98.5, effort=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_file_keeps_its_other_lines_and_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# ours\nCONCORD_MAX_PAIRS=8\nexport CONCORD_MODEL_DIR=/old\nCONCORD_MAX_PAIRS_OTHER='1'\nA=1\n")
    path.chmod(0o640)
    set_in_env_file(path, {"CONCORD_MODEL_DIR": "/it's a \\ place", "CONCORD_MAX_PAIRS": "16"})
    lines = path.read_text().splitlines()
    assert lines[:3] == ["# ours", "CONCORD_MAX_PAIRS_OTHER='1'", "A=1"]
    assert len(lines) == 5
    assert path.stat().st_mode & 0o777 == 0o640
    settings = Settings(_env_file=path)  # type: ignore[call-arg]
    assert (settings.max_pairs, settings.model_dir) == (16, Path("/it's a \\ place"))
    assert {file.name for file in tmp_path.iterdir()} == {"env"}


def test_a_new_environment_file_is_its_owners_alone(tmp_path: Path) -> None:
    set_in_env_file(tmp_path / "new" / "env", {"CONCORD_MAX_PAIRS": "16"})
    assert (tmp_path / "new" / "env").stat().st_mode & 0o777 == 0o600
