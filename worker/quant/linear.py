"""What Linears on quantized weights have in common."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """A Linear whose codes belong to `scales` of a precision of their own, whatever activations are computed in."""

    scales: Tensor

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias, requires_grad=False)

    def weight(self) -> Tensor:
        """The weights (N, K) float32 that the codes stand for."""
        raise NotImplementedError

    def dense(self) -> nn.Linear:
        """A plain Linear of these weights: large, but it needs no kernel."""
        weight = self.weight()
        linear = nn.Linear(weight.size(1), weight.size(0), device="meta")
        linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return linear

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to a device or to another precision, the scales only to the device."""
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self
