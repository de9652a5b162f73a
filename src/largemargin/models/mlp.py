"""Fully connected layers."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from largemargin.models.network import Size


def mlp(
    channels: int, size: Size, *, dropout: float, hidden: Sequence[int] = (256, 256)
) -> tuple[nn.Module, int]:
    """Flattened pixels, then linear layers with ReLU and dropout after each."""
    sizes = (channels * size[0] * size[1], *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers), sizes[-1]
