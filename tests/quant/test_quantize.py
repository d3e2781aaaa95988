"""A quantized folder loads by the same call, holds what was computed, and is refused where it cannot be trusted."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.model.golden import SETS, picture, recorded, write_checkpoint
from tests.quant.toy import CONFIG, manifest, questions, tensors, write_toy
from worker.errors import CheckpointRefused, ConcordError
from worker.model.checkpoint import MANIFEST, SAFETENSORS, load, sha256
from worker.moderator import Judgement, Moderator, Question
from worker.quant.int4 import Int4, dequantize
from worker.quant.layers import SKIPPED
from worker.quant.linear import QuantizedLinear
from worker.quant.quantize import quantize
from worker.quant.recipes import RECIPES
from worker.quant.report import Report
from worker.quant.statistics import probabilities
from worker.quant.stored import linears_of

NARROW = replace(CONFIG, d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128)
INT4_KEYS = ("qweight", "scales", "zeros", "bias")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("source") / "toy", NARROW)


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "toy-awq-int4"
    quantize(source, "awq-int4", questions(15), out, fallback="fp32")
    return out


@pytest.fixture
def folder(quantized: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(quantized, tmp_path / "spoilt")


def change(folder: Path, edit: Callable[[dict], None]) -> None:
    """Edit a manifest, whose hashes are made to fit again."""
    content = json.loads((folder / MANIFEST).read_text())
    edit(content)
    content["files"] = {path.name: sha256(path) for path in folder.iterdir() if path.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps(content))


def change_tensors(folder: Path, edit: Callable[[dict], None]) -> None:
    content = {name: tensor.clone() for name, tensor in tensors(folder).items()}
    edit(content)
    safetensors.torch.save_file(content, folder / SAFETENSORS)
    change(folder, lambda content: None)


def test_the_folder_holds_four_bit_linears_in_the_canonical_form(quantized: Path) -> None:
    stored = tensors(quantized)
    fc2 = {key: stored[f"encoder.layers.0.fc2.{key}"] for key in INT4_KEYS}

    assert {key: (tuple(t.shape), t.dtype) for key, t in fc2.items()} == {
        "qweight": ((64, 64), torch.uint8),
        "scales": ((64, 1), torch.float16),  # 128 columns
        "zeros": ((64, 1), torch.uint8),
        "bias": ((64,), torch.float16),
    }
    assert stored["encoder.layers.0.self_attn.q_proj.scales"].shape == (64, 1)  # 64 columns, in groups of 64
    assert "encoder.layers.0.fc2.weight" not in stored
    assert stored["encoder.image_proj.weight"].dtype == torch.float16
    assert stored["encoder.layers.0.final_layer_norm.weight"].dtype == torch.float32


def test_the_manifest_says_how_it_was_made(source: Path, quantized: Path) -> None:
    content = manifest(quantized)
    about = content["quantization"]

    assert (content["name"], content["recipe"]) == ("toy", "awq-int4")
    assert (about["format"], about["group"], about["fallback"]) == (1, 128, "fp32")
    assert about["dense"] == list(SKIPPED)
    assert about["source_sha256"] == sha256(source / SAFETENSORS)
    assert len(about["calibration_sha256"]) == 64
    assert set(content["files"]) == {path.name for path in quantized.iterdir()} - {MANIFEST}


def test_it_loads_by_the_same_call_as_any_checkpoint(source: Path, quantized: Path) -> None:
    checkpoint = load(quantized)

    assert checkpoint.recipe == "awq-int4"
    assert checkpoint.sha256 == sha256(quantized / SAFETENSORS)
    assert sorted(linears_of(checkpoint.model)) == sorted(SKIPPED)
    assert load(source).quantization is None
    answers = Moderator(checkpoint, "cpu").judge(questions(6))
    assert all(isinstance(answer, Judgement) for answer in answers)


def test_what_is_loaded_is_bit_for_bit_what_was_stored(quantized: Path) -> None:
    stored, loaded = tensors(quantized), load(quantized, dequantize=True).model

    for name, module in linears_of(loaded).items():
        if name not in SKIPPED:
            weight = Int4(*(stored[f"{name}.{key}"] for key in INT4_KEYS[:3]))
            assert torch.equal(module.weight, dequantize(weight)), name


def test_every_bias_survives_and_is_used(source: Path, quantized: Path) -> None:
    original, stored = load(source).model, tensors(quantized)
    for name, module in linears_of(original).items():
        # The bias of a v_proj is divided by the scale of what reads it.
        if not name.endswith("v_proj"):
            torch.testing.assert_close(stored[f"{name}.bias"].float(), module.bias, rtol=1e-3, atol=1e-6)
    model = load(quantized).model
    for name, module in model.named_modules():
        if name.endswith(("fc1", "out_proj", "k_proj")) and "layers" in name:
            nothing = torch.zeros(1, module.in_features)
            assert torch.equal(module(nothing)[0], stored[f"{name}.bias"].float()), name


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_answers_nearly_like_the_original(recipe: str, source: Path, tmp_path: Path) -> None:
    report = quantize(source, recipe, questions(15), tmp_path / "out", measure_on=questions(12, "test"))
    checkpoint = load(tmp_path / "out")

    assert checkpoint.recipe == recipe
    assert checkpoint.model.encoder.image_proj.weight.dtype == RECIPES[recipe].compute
    allowed = {"int4": 0.6, "int8": 0.1, "dense": 0.03}[RECIPES[recipe].linears]
    before = probabilities(load(source), questions(12, "test"))
    assert (probabilities(checkpoint, questions(12, "test")) - before).abs().max() < allowed
    assert report.worst_change is not None
    assert report.worst_change < allowed


def test_the_same_seed_gives_the_same_weights(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        quantize(source, "awq-int4", questions(15), tmp_path / name, seed=3)
    assert sha256(tmp_path / "one" / SAFETENSORS) == sha256(tmp_path / "two" / SAFETENSORS)


def test_named_linears_and_blocks_stay_at_higher_precision(source: Path, tmp_path: Path) -> None:
    keep = ("decoder.layers.1", "encoder.layers.0.fc1")
    report = quantize(source, "awq-int4", questions(15), tmp_path / "out", keep=keep)

    kept = {linear.name for linear in report.linears if linear.kept_as == "float16"}
    assert "encoder.layers.0.fc1" in kept
    assert "decoder.layers.1.cross_attn.k_proj" in kept
    assert len(kept) == 11
    assert all((linear.error or 0) < 1e-3 for linear in report.linears if linear.name in kept)
    assert set(linears_of(load(tmp_path / "out").model)) == kept | set(SKIPPED)


@pytest.mark.parametrize("recipe", ["awq-int4", "rtn-int4"])
def test_the_most_sensitive_linears_stay_at_higher_precision(recipe: str, source: Path, tmp_path: Path) -> None:
    def kept_of(report: Report) -> set[str]:
        return {linear.name for linear in report.linears if linear.kept_as == "float16"}

    # Measured on the pairs that accept, the order is that of the report but for near ties.
    plain = quantize(source, recipe, questions(30), tmp_path / "plain")
    mixed = quantize(source, recipe, questions(30), tmp_path / "mixed", keep=3)

    assert len(kept_of(mixed)) == 3
    assert kept_of(mixed) <= {linear.name for linear in plain.worst_first()[:8]}
    assert len(linears_of(load(tmp_path / "mixed").model)) == len(SKIPPED) + 3


def test_pairs_without_text_are_left_out(source: Path, tmp_path: Path) -> None:
    pairs = [*questions(15), Question(questions(1)[0].image, b"", " ... ")]
    report = quantize(source, "rtn-int4", pairs, tmp_path / "out")
    assert report.pairs == 3


def test_progress_is_told_stage_by_stage(source: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    quantize(source, "awq-int4", questions(15), tmp_path / "out", progress=lambda *step: told.append(step))

    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == ["calibration pairs", "held-out pairs", "report pairs", "scales", "weights", "comparison"]
    last = {stage: (done, total) for stage, done, total in told}
    assert all(done == total for done, total in last.values())


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ({"recipe": "int3"}, "no recipe 'int3': use one of awq-int4"),
        ({"calibration": questions(6)}, "6 pairs with text are too few"),
        ({"keep": ("decoder.layers.9",)}, "'decoder.layers.9' is no Linear that is quantized"),
        ({"keep": ("encoder.image_proj",)}, "'encoder.image_proj' is no Linear that is quantized"),
        ({"fallback": "rtn-int4"}, "'rtn-int4' is no recipe to fall back to"),
    ],
)
def test_a_request_that_cannot_be_followed_leaves_nothing(
    request_: dict, match: str, source: Path, tmp_path: Path
) -> None:
    arguments = {"recipe": "awq-int4", "calibration": questions(15), **request_}

    with pytest.raises(ConcordError, match=match):
        quantize(source, out=tmp_path / "out", **arguments)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConcordError, match="is there already"):
        quantize(source, "fp16", [], tmp_path)


def test_a_quantized_checkpoint_is_not_quantized_again(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"quantized already \(awq-int4\): quantize the original"):
        quantize(quantized, "rtn-int4", questions(15), tmp_path / "out")


def test_a_width_that_no_group_divides_is_refused(tmp_path: Path) -> None:
    odd = write_toy(tmp_path / "odd", replace(NARROW, d_model=80))
    with pytest.raises(CheckpointRefused, match=r"80 channels.*keep that Linear at higher precision"):
        quantize(odd, "awq-int4", questions(15), tmp_path / "out")


def test_what_no_group_divides_can_be_kept(tmp_path: Path) -> None:
    odd = write_toy(tmp_path / "odd", replace(NARROW, encoder_ffn_dim=80))
    keep = ("encoder.layers.0.fc2", "encoder.layers.1.fc2")

    report = quantize(odd, "awq-int4", questions(15), tmp_path / "out", keep=keep)

    assert {linear.name for linear in report.linears if linear.plain_error is None} == set(keep)
    assert load(tmp_path / "out").recipe == "awq-int4"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda c: c["quantization"].update(format=2), "format 2 and this version reads 1"),
        (lambda c: c.update(recipe="int3"), "unknown recipe 'int3'"),
        (lambda c: c.pop("quantization"), "recipe awq-int4 and no quantization"),
        (lambda c: c.update(quantization=[1]), "not an object"),
        (lambda c: c["quantization"].update(group=96), "groups of 96 weights"),
        (lambda c: c["quantization"].update(group=32), r"scales has the shape \(\d+, 1\) where"),
        (lambda c: c["quantization"].update(dense=None), "does not list which"),
        (lambda c: c["quantization"]["dense"].append("encoder.layers.7.fc1"), "no such Linear"),
        (lambda c: c["quantization"]["dense"].append("encoder.layers.0.fc1"), "encoder.layers.0.fc1 are quantized"),
        (lambda c: c["quantization"]["dense"].remove("encoder.image_proj"), "encoder.image_proj are not quantized"),
        (lambda c: c["quantization"].update(fallback="best"), "fallback 'best'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(edit: Callable[[dict], None], match: str, folder: Path) -> None:
    change(folder, edit)
    with pytest.raises(CheckpointRefused, match=match):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("encoder.layers.0.fc1.qweight"), "encoder.layers.0.fc1 are not quantized"),
        (lambda t: t.pop("encoder.layers.0.fc1.zeros"), "lack 1 keys.*encoder.layers.0.fc1.zeros"),
        (lambda t: t.update({"encoder.layers.9.fc1.qweight": torch.zeros(1)}), "encoder.layers.9.fc1 are quantized"),
        (lambda t: t["encoder.layers.0.fc1.scales"].fill_(torch.nan), "fc1.scales holds values that are not finite"),
        (
            lambda t: t.update({"encoder.layers.0.fc1.qweight": t["encoder.layers.0.fc1.qweight"].float()}),
            "fc1.qweight holds values that are not",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(edit: Callable[[dict], None], match: str, folder: Path) -> None:
    change_tensors(folder, edit)
    with pytest.raises(CheckpointRefused, match=match):
        load(folder)


@pytest.mark.parametrize("hashed", [True, False])
def test_a_truncated_file_is_refused(hashed: bool, folder: Path) -> None:
    weights = folder / SAFETENSORS
    weights.write_bytes(weights.read_bytes()[:-1000])
    if not hashed:
        change(folder, lambda content: None)
    with pytest.raises(CheckpointRefused, match="has sha256" if hashed else "cannot be read as weights"):
        load(folder)


def test_the_precision_of_activations_can_be_chosen(quantized: Path) -> None:
    checkpoint = load(quantized, dtype=torch.bfloat16)

    found, expected = (probabilities(c, questions(6, "test")) for c in (checkpoint, load(quantized)))

    assert (found - expected).abs().max() < 0.05
    assert not any(isinstance(module, QuantizedLinear) for module in checkpoint.model.modules())


@pytest.mark.parametrize("name", SETS)
def test_a_pickled_checkpoint_with_any_kind_of_answers_is_quantized(name: str, tmp_path: Path) -> None:
    """Answers that share a prefix go through the decoder as several rows a pair."""
    source, cases = write_checkpoint(tmp_path / "mini", name), recorded(name)["cases"]
    pairs = [
        Question(picture(case["image"]), case["image"].encode(), case["text"], case.get("text2")) for case in cases
    ]

    report = quantize(source, "awq-int4", pairs, tmp_path / "out", measure_on=pairs)

    assert report.pairs == len(cases)
    assert report.worst_change is not None
    assert report.worst_change < 0.3  # of random weights
    assert all((linear.error or 0.0) <= (linear.plain_error or 0.0) * 1.02 for linear in report.linears)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
