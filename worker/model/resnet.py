"""OFA's image trunk: the first three stages of a bottleneck ResNet.

He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), with the stride in the 3x3 convolution.
Parameter names are those of ModelScope's OFA. For inference `fold` merges each batch normalisation into the convolution
before it, since in evaluation both are one affine map.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Channels of the trunk's output.
FEATURES = 1024

#: Width of the narrow convolutions in each stage; a block's output is four times as wide.
STAGE_WIDTHS = (64, 128, 256)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2: nn.Module = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3: nn.Module = nn.BatchNorm2d(out)
        self.downsample: nn.Sequential | None = None
        if project:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)  # (N, width, h, w)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)  # (N, width, h / stride, w / stride)
        y = self.bn3(self.conv3(y))  # (N, 4 * width, h / stride, w / stride)
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(y + shortcut, inplace=True)


class ResNet(nn.Module):
    """Pixels (N, 3, S, S) to features (N, 1024, ceil(S / 16), ceil(S / 16))."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(64)
        self.layer1 = stage(64, STAGE_WIDTHS[0], blocks[0], stride=1)
        self.layer2 = stage(STAGE_WIDTHS[0] * EXPANSION, STAGE_WIDTHS[1], blocks[1], stride=2)
        self.layer3 = stage(STAGE_WIDTHS[1] * EXPANSION, STAGE_WIDTHS[2], blocks[2], stride=2)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(pixels)), inplace=True)  # (N, 64, S/2, S/2)
        x = F.max_pool2d(x, 3, 2, 1)  # (N, 64, S/4, S/4)
        x = self.layer1(x)  # (N, 256, S/4, S/4)
        x = self.layer2(x)  # (N, 512, S/8, S/8)
        return cast(Tensor, self.layer3(x))  # (N, 1024, S/16, S/16)

    def fold(self) -> None:
        """Merge every batch normalisation into its convolution, in place; a second call changes nothing."""
        self.bn1 = _fold(self.conv1, self.bn1)
        for block in self.modules():
            if isinstance(block, Bottleneck):
                block.bn1 = _fold(block.conv1, block.bn1)
                block.bn2 = _fold(block.conv2, block.bn2)
                block.bn3 = _fold(block.conv3, block.bn3)
                if block.downsample is not None:
                    block.downsample[1] = _fold(cast(nn.Conv2d, block.downsample[0]), block.downsample[1])


def stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """One stage; only its first block changes the number of channels, and the resolution by `stride`."""
    first = Bottleneck(channels, width, stride, project=True)
    return nn.Sequential(first, *(Bottleneck(width * EXPANSION, width, 1, project=False) for _ in range(blocks - 1)))


@torch.no_grad()
def _fold(conv: nn.Conv2d, norm: nn.Module) -> nn.Module:
    """Write `norm(conv(x))` as one convolution: w' = w * g / sqrt(var + eps), b' = b - mean * g / sqrt(var + eps)."""
    if not isinstance(norm, nn.BatchNorm2d):
        return norm
    mean, variance = cast(Tensor, norm.running_mean).double(), cast(Tensor, norm.running_var).double()
    gain = norm.weight.double() / (variance + norm.eps).sqrt()  # (out,)
    # The products are taken in double precision, because gains far from one would cost digits of the weights.
    weight = conv.weight.double() * gain[:, None, None, None]
    bias = norm.bias.double() - mean * gain
    conv.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
    conv.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=False)
    return nn.Identity()
