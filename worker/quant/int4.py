"""Four-bit weights: rounding, packing, and the Linears that compute with them.

A row of K weights is cut into groups of G. Each group has a scale and a zero point, and a weight w is kept as

    code = clamp(round(w / scale) + zero, 0, 15)    and read as    w' = (code - zero) * scale.

The canonical form, which is also the one on disk, is `qweight` uint8 (N, K/2) with even columns in the low nibble,
`scales` float16 (N, K/G), `zeros` uint8 (N, K/G) and `bias` (N,). Kernels want other layouts, which are made at load
and never saved. Which kernel a Linear uses is fixed then as well, by its place in the network and never by how much it
is given, so that a pair's scores do not depend on its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.errors import CheckpointRefused
from worker.quant.linear import QuantizedLinear

#: Weights that share a scale: the first of these that divides a row. The kernels have no others in common.
GROUPS = (128, 64, 32)

#: The largest code of four bits.
TOP = 15

#: Scales are float16; below this they would be too coarse themselves.
MIN_SCALE = 1e-6

#: How far a kernel's output may be from the reference's, relative to its norm. The unpacking kernel keeps
#: -scale * zero in float16; the packed one keeps scales and activations in bfloat16.
KERNEL_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Int4:
    """A quantized weight (N, K) in its canonical form."""

    qweight: Tensor  # (N, K/2) uint8
    scales: Tensor  # (N, K/G) float16
    zeros: Tensor  # (N, K/G) uint8


def group_of(width: int, largest: int = GROUPS[0]) -> int:
    """The size of the groups that rows of `width` weights are cut into. Raises CheckpointRefused where none divides."""
    for size in GROUPS:
        if size <= largest and width % size == 0:
            return size
    raise CheckpointRefused(
        f"A Linear reads {width} channels; no group of {', '.join(map(str, GROUPS))}, at most {largest}, divides: "
        "keep that Linear at higher precision."
    )


def in_groups(rows: Tensor, group: int) -> Tensor:
    """(N, K) -> (N, K/G, G)"""
    return rows.reshape(rows.size(0), -1, group)


def quantize(weight: Tensor, group: int, clip: Tensor | None = None) -> Int4:
    """Round weights (N, K) to four bits, each group's range first narrowed by `clip` (N, K/G) where given."""
    cut = in_groups(weight, group)  # (N, K/G, G)
    # The range includes zero, so that a weight of zero stays exactly zero.
    top, bottom = cut.amax(-1).clamp(min=0), cut.amin(-1).clamp(max=0)
    if clip is not None:
        top, bottom = top * clip, bottom * clip
    # Codes belong to the scale as it will be stored, so it is rounded first.
    scales = ((top - bottom) / TOP).clamp(min=MIN_SCALE).half()
    step = scales.float()
    zeros = (-bottom / step).round().clamp(0, TOP)
    codes = (cut / step[..., None]).round_().add_(zeros[..., None]).clamp_(0, TOP)
    return Int4(pack(codes.flatten(1).to(torch.uint8)), scales, zeros.to(torch.uint8))


def pack(codes: Tensor) -> Tensor:
    """Codes (N, K) uint8, 0 to 15 -> (N, K/2), even columns in the low nibble."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack(qweight: Tensor) -> Tensor:
    """(N, K/2) -> codes (N, K) uint8"""
    return torch.stack((qweight & TOP, qweight >> 4), -1).flatten(1)


def dequantize(weight: Int4) -> Tensor:
    """The weights (N, K) float32 that the codes stand for."""
    codes = unpack(weight.qweight)  # (N, K)
    cut = in_groups(codes, codes.size(1) // weight.scales.size(1)).float()
    return ((cut - weight.zeros[..., None]) * weight.scales[..., None].float()).flatten(1)


class Int4Linear(QuantizedLinear):
    """A Linear on canonical weights, in plain torch: what kernels are checked against, and what runs on CUDA."""

    qweight: Tensor
    zeros: Tensor

    def __init__(self, weight: Int4, bias: Tensor) -> None:
        super().__init__(bias)
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)

    @classmethod
    def empty(cls, in_features: int, out_features: int, group: int) -> "Int4Linear":
        """One to load weights into."""
        shape = (out_features, in_features // group)
        weight = Int4(
            torch.empty(out_features, in_features // 2, dtype=torch.uint8),
            torch.empty(shape, dtype=torch.float16),
            torch.empty(shape, dtype=torch.uint8),
        )
        return cls(weight, torch.empty(out_features))

    @property
    def canonical(self) -> Int4:
        return Int4(self.qweight, self.scales, self.zeros)

    @property
    def out_features(self) -> int:
        return self.qweight.size(0)

    @property
    def in_features(self) -> int:
        return self.qweight.size(1) * 2

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        return F.linear(x, self.weight().to(x.dtype), self.bias)

    def weight(self) -> Tensor:
        return dequantize(self.canonical)


class UnpackedLinear(nn.Module):
    """Unpacks its weights with FBGEMM's embedding kernel and multiplies with those: for many rows at a time."""

    rows: Tensor

    def __init__(self, linear: Int4Linear) -> None:
        super().__init__()
        weight = linear.canonical
        half = linear.qweight.size(1) // weight.scales.size(1)  # bytes of a group's codes
        # The kernel reads w' = code * scale + offset, both float16, behind the codes of each of its rows.
        offsets = -(weight.scales.float() * weight.zeros).half()
        affine = torch.stack((weight.scales, offsets), -1).view(-1, 2).view(torch.uint8)
        self.register_buffer("rows", torch.cat((weight.qweight.view(-1, half), affine), 1))  # (N * K/G, G/2 + 4)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        weight = torch.ops.quantized.embedding_bag_4bit_unpack(self.rows).view(self.out_features, self.in_features)
        return F.linear(x, weight.to(x.dtype), self.bias)


class PackedLinear(nn.Module):
    """Multiplies with packed weights in bfloat16 by torch's CPU kernel: for few rows at a time."""

    packed: Tensor
    affine: Tensor

    def __init__(self, linear: Int4Linear) -> None:
        super().__init__()
        weight = linear.canonical
        self.group = linear.in_features // weight.scales.size(1)
        scales = weight.scales.float()
        # The kernel reads w' = (code - 8) * scale + offset.
        affine = torch.stack((scales, (8 - weight.zeros.float()) * scales), -1).transpose(0, 1)
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(unpack(weight.qweight).int(), 1))
        self.register_buffer("affine", affine.contiguous().bfloat16())  # (K/G, N, 2)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features).bfloat16()
        y = torch._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.affine)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features) + self.bias


def with_kernel(linear: Int4Linear, few_rows: bool) -> nn.Module:
    """The Linear with the kernel that suits its place, its device and its precision, in that kernel's layout."""
    device, dtype = linear.qweight.device, linear.bias.dtype
    if device.type != "cpu":
        return linear
    # In float32 the packed kernel has no vector code and is some fifty times slower than a plain Linear.
    wanted = PackedLinear if few_rows and dtype == torch.bfloat16 else UnpackedLinear
    group = linear.in_features // linear.scales.size(1)
    if not kernel_agrees(wanted, linear.in_features, linear.out_features, group, dtype):
        return linear
    return wanted(linear)


@cache
def kernel_agrees(
    kernel: Callable[[Int4Linear], nn.Module], in_features: int, out_features: int, group: int, dtype: torch.dtype
) -> bool:
    """Whether an undocumented kernel is there and computes, for such a Linear, what the reference does."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(3, in_features, generator=generator).to(dtype)
    linear = Int4Linear(quantize(weight, group), torch.zeros(out_features, dtype=dtype))
    try:
        expected, found = linear(x).float(), kernel(linear)(x).float()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((found - expected).norm() <= KERNEL_TOLERANCE.get(dtype, 0.0) * expected.norm())
