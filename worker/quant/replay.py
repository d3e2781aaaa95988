"""Reference pairs: what a quantized checkpoint answered when it was made, and whether this machine answers the same.

The file's sha256 says that the weights arrived; only an answer says that this machine's kernels read them as they were
meant. The pictures are drawn and the texts made up, so that they carry nobody's data and suit every checkpoint.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from worker.errors import CheckpointRefused
from worker.model.checkpoint import Checkpoint, load
from worker.quant.recipes import RECIPES
from worker.quant.statistics import probabilities
from worker.quant.stored import REFERENCE, REFERENCE_PICTURES, REFERENCE_SIDE_PX, ReferencePair, mosaic_of

REFERENCE_PAIRS = 32

#: The largest change of a probability with which reference pairs may be replayed, by what is computed in. On the demo
#: model bfloat16 alone changes one by 0.011 and float16 by 0.002, and two float32 kernels differ by 0.0003. A kernel
#: that reads zero points one too high changes one by 0.036, one that reads nibbles in the wrong order by 0.96.
MAX_DRIFT = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.05}

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "white")
SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Drift:
    """How far replayed answers are from the stored ones."""

    worst: float  # the largest change of a probability
    same_label: float  # share of the pairs
    allowed: float  # of `worst`

    @property
    def within_gate(self) -> bool:
        return self.worst <= self.allowed


def draw_pairs(count: int = REFERENCE_PAIRS, seed: int = 0) -> list[ReferencePair]:
    """Pictures of two coloured shapes, with texts that are true of them, or not, and short or long."""
    rng, pairs = random.Random(seed), []
    for number in range(count):
        ground, *colours = rng.sample(COLOURS, 3)
        shapes = rng.choices(SHAPES, k=2)
        things = [f"a {colour} {shape}" for colour, shape in zip(colours, shapes, strict=True)]
        text = rng.choice(things) if number % 2 else f"a {rng.choice(COLOURS)} {rng.choice(SHAPES)}"
        if number % 4 == 0:
            text = f"there is {text} beside {things[0]} on a {ground} ground, and nothing else is to be seen"
        image = Image.new("RGB", (REFERENCE_SIDE_PX, REFERENCE_SIDE_PX), ground)
        pen = ImageDraw.Draw(image)
        for place, (colour, shape) in enumerate(zip(colours, shapes, strict=True)):
            draw(pen, shape, colour, x=1 + 15 * place + rng.randrange(3), y=2 + rng.randrange(14), size=12)
        pairs.append(ReferencePair(image, str(number).encode(), text, things[1] if number % 8 == 5 else None, ()))
    return pairs


def draw(pen: ImageDraw.ImageDraw, shape: str, colour: str, x: int, y: int, size: int) -> None:
    box = (x, y, x + size, y + size)
    if shape == "circle":
        pen.ellipse(box, colour)
    elif shape == "square":
        pen.rectangle(box, colour)
    else:
        pen.polygon([(x, y + size), (x + size // 2, y), (x + size, y + size)], colour)


def make_reference(folder: Path, checkpoint: Checkpoint) -> None:
    """Write reference pairs with the checkpoint's answers into a folder."""
    pairs = draw_pairs()
    probs = probabilities(checkpoint, pairs).tolist()
    mosaic_of([pair.image for pair in pairs]).save(folder / REFERENCE_PICTURES, optimize=True)
    lines = [
        {"text": pair.text, "premise": pair.premise, "probs": [round(p, 6) for p in row]}
        for pair, row in zip(pairs, probs, strict=True)
    ]
    (folder / REFERENCE).write_text(json.dumps({"pairs": lines}, indent=1) + "\n", encoding="utf-8")


def replay(checkpoint: Checkpoint, allowed: float | None = None) -> Drift:
    """Ask a quantized checkpoint its reference pairs again, where and as it is loaded.

    Without `allowed` it is what MAX_DRIFT allows the precision. Raises CheckpointRefused where there are no such pairs.
    """
    reference: Sequence[ReferencePair] = () if checkpoint.quantization is None else checkpoint.quantization.reference
    if not reference:
        raise CheckpointRefused(f"{checkpoint.name} has no reference pairs to replay: quantize it again.")
    expected = torch.tensor([pair.probs for pair in reference])  # (32, A)
    found = probabilities(checkpoint, reference)
    # A comparison with what is not a number is false, which must not pass for agreement.
    worst = (found - expected).abs().nan_to_num(torch.inf).max()
    same = found.argmax(1).eq(expected.argmax(1)).float().mean()
    if allowed is None:
        allowed = MAX_DRIFT[checkpoint.model.encoder.image_proj.weight.dtype]
    return Drift(float(worst), float(same), allowed)


def load_gated(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Checkpoint:
    """Load a checkpoint, and where it is quantized make sure that it answers here as it did when it was made.

    One that does not is loaded by its `fallback`, which is then part of its recipe. Raises CheckpointRefused where it
    names none, or where that fails as well.
    """
    checkpoint = load(directory, device, dtype)
    if checkpoint.quantization is None:
        return checkpoint
    drift, fallback = replay(checkpoint), checkpoint.quantization.fallback
    if drift.within_gate:
        return checkpoint
    missed = f"its reference pairs change by {drift.worst:.3f} on this machine, and {drift.allowed} is allowed"
    if fallback is None:
        raise CheckpointRefused(
            f"{checkpoint.name} ({checkpoint.recipe}) does not answer as it did when it was quantized: {missed}. "
            "Quantize again with a fallback recipe, or run the original weights."
        )
    name = checkpoint.recipe
    del checkpoint
    dense = load(directory, device, RECIPES[fallback].compute, dequantize=True)
    # Activations that int8 rounds are no longer rounded, which is a change of its own.
    if not replay(dense, allowed=max(MAX_DRIFT.values())).within_gate:
        raise CheckpointRefused(f"{dense.name} ({name}) fails its reference pairs, also as {fallback}: {missed}.")
    return replace(dense, recipe=f"{name} as {fallback}")
