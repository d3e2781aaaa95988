"""Activation-aware quantization: the scale of each group's input and the range of each group of weights.

Lin et al., "AWQ: Activation-aware Weight Quantization" (arXiv:2306.00978). Channels that carry large activations are
multiplied up before the weights are rounded, so that they lose less; with s = mean|x|^alpha, alpha is searched on a
grid which holds 0, plain rounding. Ranges are narrowed where that lowers the error, as little outliers cost less than a
coarse step does. What was found on one half of the calibration rows counts only if it helps on the other half as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.quant.int4 import dequantize, in_groups, quantize
from worker.quant.statistics import InputStatistics

#: Exponents of the scale that are tried. At 0 nothing is scaled.
ALPHAS = tuple(step / 10 for step in range(11))

#: Shares of a group's range that are tried.
CLIPS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

#: Channels that hardly ever carry anything are scaled as if they carried this share of the largest.
LEAST_SHARE = 1e-4


@dataclass(frozen=True)
class Halves:
    """Statistics of one input on the pairs that propose and on those that accept."""

    calibration: InputStatistics
    held_out: InputStatistics


def scale_of(mean_abs: Tensor, alpha: float) -> Tensor:
    """The scale of each channel (K,), spread evenly around 1."""
    s = mean_abs.clamp(min=LEAST_SHARE * float(mean_abs.max())) ** alpha
    return s / (s.max() * s.min()).sqrt()


def search_scale(weights: Sequence[Tensor], halves: Halves, size: int) -> tuple[float, Tensor]:
    """The best alpha and scale (K,) for Linears with `weights` (N, K) that read one input, in groups of `size`.

    Alphas are ordered by the sum of the Linears' errors on calibration rows; the first that makes no Linear worse than
    plain rounding on the held-out rows is taken.
    """
    mean_abs = halves.calibration.mean_abs
    ones = torch.ones_like(mean_abs)
    scales = {alpha: scale_of(mean_abs, alpha) if alpha else ones for alpha in ALPHAS}

    def errors(alpha: float, statistics: InputStatistics) -> Tensor:
        s = scales[alpha]
        return torch.tensor([relative_error(statistics, dequantize(quantize(w * s, size)) / s, w) for w in weights])

    plain = errors(0.0, halves.held_out)
    totals = {alpha: float(errors(alpha, halves.calibration).square().sum()) for alpha in ALPHAS}
    for alpha in sorted(ALPHAS, key=lambda alpha: totals[alpha]):
        if alpha == 0 or bool((errors(alpha, halves.held_out) <= plain).all()):
            return alpha, scales[alpha]
    raise AssertionError("plain rounding is on the grid")


def relative_error(statistics: InputStatistics, found: Tensor, weight: Tensor) -> float:
    """|x (found - weight).T| / |x weight.T| over the rows that were kept."""
    rows = statistics.rows
    return float(F.linear(rows, found - weight).norm() / F.linear(rows, weight).norm().clamp(min=1e-30))


def search_clip(weight: Tensor, s: Tensor, halves: Halves, size: int) -> Tensor | None:
    """Shares (N, K/G) to which the ranges of `weight` (N, K), already times `s` (K,), are narrowed; None for nowhere.

    A group's share is the best on the calibration rows and has to help on the held-out ones, each through the group's
    own Gram matrix; the whole is accepted only if the Linear's error on held-out rows falls.
    """
    inverse = (1 / s).view(-1, size)  # (K/G, G)
    outer = inverse[:, :, None] * inverse[:, None]

    def errors(clip: Tensor) -> tuple[Tensor, Tensor]:
        change = in_groups(dequantize(quantize(weight, size, clip)) - weight, size).transpose(0, 1)  # (K/G, N, G)
        both = []
        for statistics in (halves.calibration, halves.held_out):
            both.append(((change @ (statistics.grams * outer)) * change).sum(-1).T)  # (N, K/G)
        return both[0], both[1]

    clip = weight.new_ones(weight.size(0), weight.size(1) // size)
    best, plain_held_out = errors(clip)
    for share in CLIPS:
        proposed, held_out = errors(torch.full_like(clip, share))
        better = (proposed < best) & (held_out < plain_held_out)
        best, clip = torch.where(better, proposed, best), clip.masked_fill(better, share)
    before, after = (dequantize(quantize(weight, size, chosen)) / s for chosen in (None, clip))
    falls = relative_error(halves.held_out, after, weight / s) < relative_error(halves.held_out, before, weight / s)
    return clip if falls else None
