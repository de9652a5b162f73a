"""What the registry knows about a network, and the layers several networks share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

Size: TypeAlias = tuple[int, int]
"""Height and width of the images."""


@dataclass(frozen=True)
class Network:
    """A network by name.

    Args:
        build: ``build(channels, size, **choices) -> (backbone, dim)``: images (N, channels, *size)
            to features (N, dim). Further keyword arguments are what ``ModelConfig.options`` may
            set.
        description: one line for ``largemargin list``.
        smallest: side of the smallest image it takes, in pixels.
        dropout: its own probability of dropout; None where it has no dropout.
        batch_norm: its own choice; None where there is none to make.
    """

    build: Callable[..., tuple[nn.Module, int]]
    description: str
    smallest: int
    dropout: float | None = None
    batch_norm: bool | None = None


def convolution(
    before: int,
    after: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    batch_norm: bool = True,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> tuple[nn.Module, ...]:
    """Convolution, batch norm where asked for, activation; padding keeps the size by default.

    Activations do not work in place, so that losses may read the layer before them.
    """
    padding = kernel // 2 if padding is None else padding
    # The bias of a convolution is removed again by the batch mean that follows it.
    layer = nn.Conv2d(before, after, kernel, stride, padding, groups=groups, bias=not batch_norm)
    norm = (nn.BatchNorm2d(after),) if batch_norm else ()
    return layer, *norm, activation()


def he_initialised(network: nn.Module, *, slope: float = 0.0) -> nn.Module:
    """He et al. (2015): variance 2 / fan-out for convolutions, biases 0; deep networks need it."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=slope, mode="fan_out")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def pooled() -> tuple[nn.Module, ...]:
    """Mean over all positions: (N, channels, h, w) to (N, channels)."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten()
