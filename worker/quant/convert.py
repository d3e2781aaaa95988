"""What each Linear becomes by a recipe: scales first, group by group, then every Linear on its own.

The original network is only read. A scale is folded by multiplying the columns of the Linears that read the scaled
input and by dividing what makes that input, so a Linear's new weights are computed when its turn comes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.errors import ConcordError
from worker.model.ofa import OFA
from worker.quant import int4, int8
from worker.quant.awq import Halves, search_clip, search_scale
from worker.quant.int4 import Int4Linear, group_of
from worker.quant.int8 import Int8Linear
from worker.quant.layers import Group, groups, may_clip
from worker.quant.linear import QuantizedLinear
from worker.quant.recipes import Recipe
from worker.quant.statistics import InputStatistics, Progress


@dataclass(frozen=True)
class Seen:
    """What each group of Linears read: of pairs that propose, that accept, and that only measure."""

    calibration: Mapping[str, InputStatistics]
    held_out: Mapping[str, InputStatistics]
    report: Mapping[str, InputStatistics]


@dataclass
class Conversion:
    """The original network, a recipe, and what has been made of the network so far."""

    model: OFA
    recipe: Recipe
    seen: Seen
    #: Group -> exponent; Linear -> scale (K,) of its input; norm or v_proj -> scale that its output is divided by.
    alphas: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    divided: dict[str, Tensor] = field(default_factory=dict)
    #: Linear -> its replacement; share of its groups of weights whose range was narrowed.
    made: dict[str, nn.Module] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)

    def linear(self, name: str) -> nn.Linear:
        return cast(nn.Linear, self.model.get_submodule(name))

    def scale(self, group: Group, names: Sequence[str]) -> None:
        """Search the scale of a group's input, for those of its Linears in `names`, and note how it is folded."""
        weights = [self.linear(name).weight for name in names]
        halves = Halves(self.seen.calibration[group.name], self.seen.held_out[group.name])
        alpha, s = search_scale(weights, halves, group_of(weights[0].size(1)))
        self.alphas[group.name] = alpha
        if alpha:
            self.columns |= dict.fromkeys(group.linears, s)
            self.divided[group.source] = s

    def folded(self, name: str, tensor: Tensor) -> Tensor:
        """Weights (N, K) or a bias (N,) of a Linear or a norm, between scaled inputs and scaled outputs."""
        if tensor.ndim == 2 and name in self.columns:
            tensor = tensor * self.columns[name]
        if name in self.divided:
            tensor = tensor / (self.divided[name][:, None] if tensor.ndim == 2 else self.divided[name])
        return tensor

    def convert(self, group: Group, name: str) -> None:
        """Make a Linear's quantized replacement."""
        linear = self.linear(name)
        weight, bias = self.folded(name, linear.weight), self.folded(name, linear.bias)
        if self.recipe.linears == "int8":
            self.made[name] = Int8Linear(*int8.quantize(weight), bias)
            return
        size, clip = group_of(linear.in_features), None
        if self.recipe.clip and may_clip(name):
            halves = Halves(self.seen.calibration[group.name], self.seen.held_out[group.name])
            s = self.columns.get(name, torch.ones(linear.in_features))
            clip = search_clip(weight, s, halves, size)
        self.made[name] = Int4Linear(int4.quantize(weight, size, clip), bias)
        self.clipped[name] = 0.0 if clip is None else float((clip < 1).float().mean())

    def keep(self, name: str) -> None:
        """Leave a Linear dense, in the precision in which the recipe stores what it does not quantize."""
        linear = self.linear(name)
        made = nn.Linear(linear.in_features, linear.out_features, device="meta")
        made.weight = nn.Parameter(self.folded(name, linear.weight).to(self.recipe.stored).float(), requires_grad=False)
        made.bias = nn.Parameter(self.folded(name, linear.bias), requires_grad=False)
        self.made[name] = made
        self.clipped.pop(name, None)

    def error(self, name: str, seen: InputStatistics) -> float:
        """|found - x W.T| / |x W.T| over sampled rows x of a Linear's input, with all scales undone."""
        made = self.made[name]
        found = made(seen.rows / self.columns[name] if name in self.columns else seen.rows) - made.bias
        return self._distance(name, seen, found * self.divided[name] if name in self.divided else found)

    def plain_error(self, name: str, seen: InputStatistics) -> float:
        """The error that rounding to four bits makes without scale and clip."""
        linear = self.linear(name)
        made = Int4Linear(int4.quantize(linear.weight, group_of(linear.in_features)), linear.bias)
        return self._distance(name, seen, made(seen.rows) - linear.bias)

    def _distance(self, name: str, seen: InputStatistics, found: Tensor) -> float:
        expected = F.linear(seen.rows, self.linear(name).weight)
        return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def convert(model: OFA, recipe: Recipe, seen: Seen, keep: Sequence[str] | int, tell: Progress) -> Conversion:
    """Convert every Linear that the recipe quantizes, but for those that `keep` names or counts.

    Raises ConcordError where `keep` names nothing that would be quantized.
    """
    conversion = Conversion(model, recipe, seen)
    every = groups(model.config)
    kept = kept_linears(every, () if isinstance(keep, int) else keep)
    if recipe.linears == "dense":
        kept = {name for group in every for name in group.linears}
    for done, group in enumerate(every, start=1):
        names = [name for name in group.linears if name not in kept]
        if recipe.scale and names:
            conversion.scale(group, names)
        tell("scales", done, len(every))
    for done, group in enumerate(every, start=1):
        for name in group.linears:
            if name in kept:
                conversion.keep(name)
            else:
                conversion.convert(group, name)
        tell("weights", done, len(every))
    if isinstance(keep, int) and recipe.linears != "dense":
        # Which are the worst is said by the pairs that accept, so that the report stays out of every decision.
        errors = {name: conversion.error(name, seen.held_out[g.name]) for g in every for name in g.linears}
        for name in sorted(errors, key=lambda name: -errors[name])[: max(keep, 0)]:
            conversion.keep(name)
    return conversion


def kept_linears(every: Sequence[Group], keep: Sequence[str]) -> set[str]:
    """The quantizable Linears that are named, or lie in what is named. Raises ConcordError for a name without any."""
    kept: set[str] = set()
    for wanted in keep:
        found = {n for group in every for n in group.linears if n == wanted or n.startswith(f"{wanted}.")}
        if not found:
            raise ConcordError(
                f"{wanted!r} is no Linear that is quantized, nor does it hold any: name one such as "
                f"{every[0].linears[0]}, or a block such as {every[0].linears[0].rsplit('.', 2)[0]}."
            )
        kept |= found
    return kept


def is_dense(module: nn.Module) -> bool:
    return not isinstance(module, QuantizedLinear)
