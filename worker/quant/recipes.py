"""What a checkpoint's weights can be turned into: one frozen recipe each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from worker.errors import CheckpointRefused


@dataclass(frozen=True)
class Recipe:
    """How the Linears are kept, how everything else is, and in what the whole is computed."""

    name: str
    linears: Literal["int4", "int8", "dense"]
    #: Of what has two or more dimensions and is not quantized; norms and other vectors stay float32.
    stored: torch.dtype
    #: Of activations, unless loading asks for another.
    compute: torch.dtype = torch.float32
    #: AWQ's two searches (arXiv:2306.00978): input channels scaled before rounding, and ranges narrowed.
    scale: bool = False
    clip: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether the weights depend on calibration pairs."""
        return self.scale or self.clip


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("awq-int4", "int4", torch.float16, scale=True, clip=True),
        Recipe("rtn-int4", "int4", torch.float16),  # round to nearest: what AWQ must beat
        Recipe("int8-dynamic", "int8", torch.float16),
        Recipe("fp16", "dense", torch.float16, torch.float16),
        Recipe("bf16", "dense", torch.bfloat16, torch.bfloat16),
        Recipe("fp32", "dense", torch.float32),
    )
}

#: What a quantized checkpoint can fall back to: its own weights, dequantized.
FALLBACKS = tuple(name for name, recipe in RECIPES.items() if recipe.linears == "dense")


def recipe_named(name: str) -> Recipe:
    """The recipe of that name. Raises CheckpointRefused."""
    if name not in RECIPES:
        raise CheckpointRefused(f"There is no recipe {name!r}: use one of {', '.join(RECIPES)}.")
    return RECIPES[name]
