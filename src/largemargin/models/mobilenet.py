"""MobileNet, first version (Howard et al. 2017)."""

from torch import nn

from largemargin.models.network import Size, convolution, he_initialised, pooled

BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *[(512, 1)] * 5,
    (1024, 2),
    (1024, 1),
)
"""Channels and stride of each depthwise separable convolution."""


def mobilenet(channels: int, size: Size, *, width: float = 1.0) -> tuple[nn.Module, int]:
    """A 3x3 convolution of stride 2, thirteen depthwise separable ones, mean over positions."""
    before = round(32 * width)
    layers: list[nn.Module] = [*convolution(channels, before, stride=2)]
    for full, stride in BLOCKS:
        after = round(full * width)
        layers += convolution(before, before, stride=stride, groups=before)
        layers += convolution(before, after, 1)
        before = after
    return he_initialised(nn.Sequential(*layers, *pooled())), before
