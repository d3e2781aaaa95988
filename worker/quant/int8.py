"""Eight-bit weights and activations: each weight row and each token's vector has its own symmetric scale.

    y = (xq @ wq.T) * x_scale * w_scale + bias,    xq = round(x / x_scale),    x_scale = max |x| / 127

Activations are scaled token by token, never by what else is in the batch, and the product is of whole numbers, so that
a pair's scores do not depend on its batch.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.quant.linear import QuantizedLinear

#: The largest code of eight bits, the same on both sides of zero.
TOP = 127

#: The least scale, for rows that are zero.
MIN_SCALE = 1e-8

#: CUDA's kernel takes more than 16 rows; fewer are filled up to this many.
MIN_ROWS_CUDA = 32


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights or activations (N, K) to int8, with their scales (N, 1) float32."""
    scales = weight.float().abs().amax(-1, keepdim=True).div(TOP).clamp(min=MIN_SCALE)
    return (weight.float() / scales).round().to(torch.int8), scales


class Int8Linear(QuantizedLinear):
    """A Linear on int8 weights: `qweight` int8 (N, K), `scales` float32 (N, 1), `bias` (N,)."""

    qweight: Tensor

    def __init__(self, qweight: Tensor, scales: Tensor, bias: Tensor) -> None:
        super().__init__(bias)
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)

    @classmethod
    def empty(cls, in_features: int, out_features: int) -> "Int8Linear":
        """One to load weights into."""
        qweight = torch.empty(out_features, in_features, dtype=torch.int8)
        return cls(qweight, torch.empty(out_features, 1), torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        codes, scales = quantize(x.reshape(-1, x.size(-1)))
        y = product(codes, self.qweight).float() * scales * self.scales.T
        return y.to(x.dtype).view(*x.shape[:-1], len(self.qweight)) + self.bias

    def weight(self) -> Tensor:
        return self.qweight.float() * self.scales


def product(codes: Tensor, qweight: Tensor) -> Tensor:
    """codes (M, K) int8 times qweight (N, K) int8, transposed: (M, N) int32, or whole numbers in float32."""
    if not len(codes) or not kernel_agrees(codes.device.type):
        return F.linear(codes.float(), qweight.float())
    return integer_product(codes, qweight)


def integer_product(codes: Tensor, qweight: Tensor) -> Tensor:
    """The product by torch's undocumented kernel."""
    rows = len(codes)
    if codes.is_cuda and rows < MIN_ROWS_CUDA:
        codes = F.pad(codes, (0, 0, 0, MIN_ROWS_CUDA - rows))
    return torch._int_mm(codes, qweight.T)[:rows]


@cache
def kernel_agrees(device: str) -> bool:
    """Whether the kernel is there and multiplies exactly, with codes at both ends of their range."""
    generator = torch.Generator().manual_seed(0)
    codes, qweight = (torch.randint(-TOP, TOP + 1, (n, 64), generator=generator, dtype=torch.int8) for n in (5, 16))
    codes[0], qweight[0] = TOP, -TOP
    try:
        found = integer_product(codes.to(device), qweight.to(device)).cpu()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(found, codes.int() @ qweight.int().T)
