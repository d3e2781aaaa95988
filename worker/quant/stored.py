"""What a quantized checkpoint's concord.json says of its weights, and how they become Linears again.

Beside the keys of every manifest stands

    "quantization": {"format": 1, "group": 128, "dense": [names of Linears that are not quantized], "fallback": null,
                     "source_sha256": ..., "calibration_sha256": ..., "seed": 0, "alphas": {...}, "clipped": {...}}

of which the second line is for people. `reference.json` and `reference.png` hold pairs with the probabilities that the
weights gave when they were made; worker/quant/replay.py asks again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from worker.errors import CheckpointRefused
from worker.model.ofa import OFA
from worker.quant.int4 import GROUPS, Int4Linear, group_of, with_kernel
from worker.quant.int8 import Int8Linear
from worker.quant.layers import reads_prompt
from worker.quant.linear import QuantizedLinear
from worker.quant.recipes import FALLBACKS, RECIPES, Recipe

#: Of the weights' layout; a change that older code would misread gives it the next number.
FORMAT = 1

REFERENCE = "reference.json"
REFERENCE_PICTURES = "reference.png"
REFERENCE_SIDE_PX = 32
#: Of the file of pictures, which has some 20 kB, and of the picture in it.
MAX_REFERENCE_BYTES, MAX_REFERENCE_PX = 2**20, 2**22


@dataclass(frozen=True)
class ReferencePair:
    """A picture, a text and what was answered."""

    image: Image.Image
    image_key: bytes
    text: str
    premise: str | None
    probs: tuple[float, ...]  # by answer, in the answers' order


@dataclass(frozen=True)
class Quantization:
    """By what a checkpoint was quantized, and which of its Linears were not."""

    recipe: Recipe
    group: int
    dense: tuple[str, ...]
    fallback: str | None
    source_sha256: str
    reference: tuple[ReferencePair, ...] = ()

    @classmethod
    def from_manifest(cls, recipe: str, values: Mapping[str, Any] | None) -> "Quantization | None":
        """Read `quantization`; None where the weights are as they were trained. Raises CheckpointRefused."""
        if values is None:
            if recipe in RECIPES:
                raise CheckpointRefused(f"concord.json has the recipe {recipe} and no quantization: quantize again.")
            return None
        # The format comes first, since it says what the rest means.
        if values.get("format") != FORMAT:
            raise CheckpointRefused(
                f"The weights are quantized in format {values.get('format')!r:.80} and this version reads {FORMAT}: "
                "quantize the original checkpoint again."
            )
        if recipe not in RECIPES:
            raise CheckpointRefused(f"concord.json has the unknown recipe {recipe!r:.80}: use a newer version.")
        group, dense, fallback = values.get("group"), values.get("dense"), values.get("fallback")
        if group not in GROUPS:
            raise CheckpointRefused(
                f"concord.json has groups of {group!r:.80} weights; the kernels take {', '.join(map(str, GROUPS))}."
            )
        if not isinstance(dense, list) or not all(isinstance(name, str) for name in dense):
            raise CheckpointRefused("concord.json does not list which Linears are not quantized (quantization.dense).")
        if fallback is not None and fallback not in FALLBACKS:
            raise CheckpointRefused(
                f"concord.json has the fallback {fallback!r:.80}; it may be one of {', '.join(FALLBACKS)}."
            )
        return cls(RECIPES[recipe], group, tuple(dense), fallback, str(values.get("source_sha256", "")))


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain Linears by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def hollow(model: OFA, quantization: Quantization, stored: Mapping[str, Tensor]) -> None:
    """Put quantized Linears, still without weights, where the checkpoint's tensors `stored` have them.

    Raises CheckpointRefused where its names are not the network's.
    """
    linears = linears_of(model)
    unknown = [name for name in quantization.dense if name not in linears]
    if unknown:
        raise CheckpointRefused(f"concord.json keeps {unknown[0]:.99} unquantized, and config.json has no such Linear.")
    if quantization.recipe.linears == "dense":
        return
    wanted = set(linears) - set(quantization.dense)
    found = {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}
    for name in sorted(wanted ^ found):
        what = "are quantized" if name in found else "are not quantized"
        raise CheckpointRefused(
            f"The weights of {name:.200} {what}, and concord.json with config.json says otherwise: quantize again."
        )
    for name in wanted:
        k, n = linears[name].in_features, linears[name].out_features
        if quantization.recipe.linears == "int4":
            model.set_submodule(name, Int4Linear.empty(k, n, group_of(k, quantization.group)))
        else:
            model.set_submodule(name, Int8Linear.empty(k, n))


def make_dense(model: OFA) -> None:
    """Replace quantized Linears by plain ones with the same weights."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            model.set_submodule(name, module.dense())


def lay_out(model: OFA) -> None:
    """Give four-bit Linears their kernels, once the model is on its device and in its precision."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Int4Linear):
            model.set_submodule(name, with_kernel(module, few_rows=reads_prompt(name)))


def read_reference(values: Mapping[str, Any], pictures: Path, answers: int) -> tuple[ReferencePair, ...]:
    """The pairs of reference.json, their pictures the tiles of reference.png. Raises CheckpointRefused."""
    try:
        if pictures.stat().st_size > MAX_REFERENCE_BYTES:
            raise ValueError(f"more than {MAX_REFERENCE_BYTES} bytes of pictures")
        with Image.open(pictures, formats=["PNG"]) as mosaic:
            if mosaic.width * mosaic.height > MAX_REFERENCE_PX:
                raise ValueError(f"a picture of {mosaic.width} x {mosaic.height}")
            tiles = tiles_of(mosaic.convert("RGB"))
        pairs = [
            ReferencePair(tile, str(place).encode(), *texts_of(pair), tuple(map(float, pair["probs"])))
            for place, (tile, pair) in enumerate(zip(tiles, values["pairs"], strict=True))
        ]
    except Exception as error:
        # Pillow raises nearly anything on hostile bytes, and so does JSON of another shape.
        raise CheckpointRefused(
            f"{REFERENCE} with {REFERENCE_PICTURES} cannot be read ({error!s:.200}): quantize again."
        ) from error
    if any(len(pair.probs) != answers for pair in pairs):
        raise CheckpointRefused(f"{REFERENCE} has not a probability for each of the {answers} answers: quantize again.")
    return tuple(pairs)


def texts_of(pair: Mapping[str, Any]) -> tuple[str, str | None]:
    """A reference pair's text and premise. Raises ValueError where they are no texts."""
    text, premise = pair["text"], pair["premise"]
    if not isinstance(text, str) or not (premise is None or isinstance(premise, str)):
        raise ValueError("a text that is none")
    return text, premise


def tiles_of(mosaic: Image.Image) -> list[Image.Image]:
    """Cut a picture into squares of REFERENCE_SIDE_PX, row by row."""
    side = REFERENCE_SIDE_PX
    return [
        mosaic.crop((x, y, x + side, y + side))
        for y in range(0, mosaic.height, side)
        for x in range(0, mosaic.width, side)
    ]


def mosaic_of(tiles: Sequence[Image.Image], columns: int = 8) -> Image.Image:
    """Lay pictures of REFERENCE_SIDE_PX a side out row by row."""
    side = REFERENCE_SIDE_PX
    mosaic = Image.new("RGB", (columns * side, -(-len(tiles) // columns) * side))
    for place, tile in enumerate(tiles):
        mosaic.paste(tile, (place % columns * side, place // columns * side))
    return mosaic
