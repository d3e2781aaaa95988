"""A machine that computes something else than was computed when the weights were quantized is found out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.quant.test_quantize import NARROW, change
from tests.quant.toy import questions, write_toy
from worker.errors import CheckpointRefused
from worker.model.checkpoint import load
from worker.quant import int8, stored
from worker.quant.int4 import Int4Linear
from worker.quant.quantize import quantize
from worker.quant.replay import REFERENCE_PAIRS, draw_pairs, load_gated, replay
from worker.quant.stored import REFERENCE, REFERENCE_PICTURES

#: What 32 pairs may take beside the weights.
MAX_REFERENCE_BYTES = 200_000


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    source = write_toy(folder / "toy", NARROW, gain=3.0)
    quantize(source, "awq-int4", questions(15), folder / "with", fallback="fp32")
    quantize(source, "awq-int4", questions(15), folder / "without")
    return folder


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read the nibbles of a byte in the wrong order."""

    class Swapped(torch.nn.Module):
        def __init__(self, linear: Int4Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
            return self.linear(swapped)

    monkeypatch.setattr(stored, "with_kernel", lambda linear, few_rows: Swapped(linear))


def test_32_pairs_are_stored_and_answered_the_same_after_loading(quantized: Path) -> None:
    checkpoint = load(quantized / "with")
    assert checkpoint.quantization is not None
    reference = checkpoint.quantization.reference

    drift = replay(checkpoint)

    assert len(reference) == REFERENCE_PAIRS == 32
    assert drift.worst < 1e-5
    assert drift.same_label == 1
    size = sum((quantized / "with" / name).stat().st_size for name in (REFERENCE, REFERENCE_PICTURES))
    assert size < MAX_REFERENCE_BYTES
    for pair, drawn in zip(reference, draw_pairs(), strict=True):
        assert (pair.text, pair.premise) == (drawn.text, drawn.premise)
        assert pair.image.tobytes() == drawn.image.tobytes()


def test_reference_pairs_differ_in_picture_length_and_premise() -> None:
    pairs = draw_pairs()
    assert len({pair.image.tobytes() for pair in pairs}) == len(pairs)
    assert len({len(pair.text.split()) for pair in pairs}) > 1
    assert {pair.premise is None for pair in pairs} == {True, False}


def test_a_machine_that_answers_the_same_is_let_through(quantized: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert load_gated(quantized / "without", dtype=dtype).recipe == "awq-int4"


@pytest.mark.usefixtures("broken_kernel")
def test_a_machine_that_answers_otherwise_is_refused(quantized: Path) -> None:
    with pytest.raises(CheckpointRefused, match="does not answer as it did when it was quantized"):
        load_gated(quantized / "without")


@pytest.mark.usefixtures("broken_kernel")
def test_a_fallback_is_used_and_named_in_the_recipe(quantized: Path) -> None:
    checkpoint = load_gated(quantized / "with")

    assert checkpoint.recipe == "awq-int4 as fp32"
    assert replay(checkpoint).within_gate


def test_int8_falls_back_as_well(quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(quantized / "toy", "int8-dynamic", [], tmp_path / "out", fallback="fp32")
    assert load_gated(tmp_path / "out").recipe == "int8-dynamic"

    monkeypatch.setattr(int8, "integer_product", lambda codes, qweight: codes.int() @ qweight.int().T.roll(1, 1))
    monkeypatch.setattr(int8, "kernel_agrees", lambda device: True)

    assert load_gated(tmp_path / "out").recipe == "int8-dynamic as fp32"


def test_a_fallback_that_answers_otherwise_as_well_is_refused(quantized: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantized / "with", tmp_path / "spoilt")
    values = json.loads((folder / REFERENCE).read_text())
    values["pairs"][0]["probs"] = [1.0, 1.0, 1.0]
    (folder / REFERENCE).write_text(json.dumps(values))
    change(folder, lambda content: None)

    with pytest.raises(CheckpointRefused, match="also as fp32"):
        load_gated(folder)


def test_answers_that_are_no_numbers_do_not_pass(quantized: Path) -> None:
    checkpoint = load(quantized / "with")
    with torch.no_grad():
        checkpoint.model.encoder.layer_norm.weight.fill_(torch.nan)
    assert not replay(checkpoint).within_gate


def test_a_folder_without_reference_pairs_is_refused(quantized: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantized / "with", tmp_path / "spoilt")
    (folder / REFERENCE).unlink()
    change(folder, lambda content: None)
    with pytest.raises(CheckpointRefused, match="no reference pairs"):
        load_gated(folder)


@pytest.mark.parametrize(
    ("pairs", "match"),
    [([], "cannot be read"), ([{"text": "a", "premise": None, "probs": [0.5, 0.5]}] * 32, "each of the 3 answers")],
)
def test_reference_pairs_that_cannot_be_read_are_refused(
    pairs: list, match: str, quantized: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(quantized / "with", tmp_path / "spoilt")
    (folder / REFERENCE).write_text(json.dumps({"pairs": pairs}))
    change(folder, lambda content: None)
    with pytest.raises(CheckpointRefused, match=match):
        load(folder)


def test_unquantized_weights_load_without_a_replay(quantized: Path) -> None:
    assert load_gated(quantized / "toy").recipe == "none"
