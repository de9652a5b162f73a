"""Networks for the scikit-learn estimator: standardised inputs, a backbone, a linear head."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_number

CHUNK = 4096
"""Rows converted at a time when statistics are taken of the whole training set."""


class Standardize(nn.Module):
    """(x - mean) / scale of each feature, or of each channel of images."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.scale


class Network(nn.Module):
    """``head(backbone(standardize(x)))``; the head is a linear layer, or what replaced it.

    A criterion is attached to ``classifier``, so that losses on inputs see standardised ones: their
    distances are in standard deviations, whatever the units of x.
    """

    def __init__(self, standardize: nn.Module, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.standardize = standardize
        self.classifier = nn.Sequential(OrderedDict(backbone=backbone, head=head))

    def features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.classifier[0](self.standardize(inputs))
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.standardize(inputs))
        return logits


def statistics(inputs: Tensor, weights: Tensor | None, per_channel: bool) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over samples, in float64; a constant gets 1.

    (N, ...) gives (...), or (C, 1, 1) for images (N, C, H, W) with ``per_channel``.
    """
    share = torch.ones(len(inputs)).double() if weights is None else weights.double()
    share = share / share.sum()
    axes = (0, *range(2, inputs.dim())) if per_channel else (0,)
    places = prod(inputs.shape[2:]) if per_channel else 1

    def average(of: Callable[[Tensor], Tensor]) -> Tensor:
        summed: Tensor | float = 0.0
        for start in range(0, len(inputs), CHUNK):
            rows, part = inputs[start : start + CHUNK], share[start : start + CHUNK]
            weight = part.reshape(-1, *[1] * (inputs.dim() - 1))
            summed = summed + (of(rows.double()) * weight).sum(axes, keepdim=True)[0] / places
        assert isinstance(summed, Tensor)
        return summed

    mean = average(lambda rows: rows)
    spread = average(lambda rows: (rows - mean).square()).sqrt()
    # A spread of rounding noise is a constant feature: dividing by it would blow the noise up.
    constant = spread <= 1e-12 * mean.abs().clamp_min(1e-300)
    return mean, torch.where(constant, 1.0, spread)


def build(
    backbone: nn.Module | Callable[[tuple[int, ...]], nn.Module] | None,
    inputs: Tensor,
    weights: Tensor | None,
    num_classes: int,
    *,
    hidden_sizes: Sequence[int],
    standardize: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Network:
    """A network for ``inputs`` (N, D) or (N, C, H, W); a given module is copied, not used up."""
    shape = tuple(inputs.shape[1:])
    made: Any = backbone
    if backbone is None:
        made = convolutions(shape) if len(shape) == 3 else perceptron(shape, hidden_sizes)
    elif isinstance(backbone, nn.Module):
        made = deepcopy(backbone)
    elif callable(backbone) and not isinstance(backbone, type):
        made = backbone(shape)
    if not isinstance(made, nn.Module):
        raise LargeMarginError(
            "backbone must be None, an nn.Module, or a function of the input shape that returns "
            f"one, but {made!r} was given. It maps {('N', *shape)} to features (N, dim)."
        )
    first: nn.Module = nn.Identity()
    if standardize:
        mean, scale = statistics(inputs, weights, per_channel=len(shape) == 3)
        first = Standardize(mean.to(dtype), scale.to(dtype))
    made = made.to(device=device, dtype=dtype)
    first = first.to(device)
    head = nn.Linear(_width(first, made, inputs[:2].to(device, dtype)), num_classes)
    return Network(first, made, head.to(device=device, dtype=dtype))


def _width(first: nn.Module, backbone: nn.Module, sample: Tensor) -> int:
    """How many features the backbone gives: one small batch tells, and wakes lazy layers."""
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        features: Any = backbone(first(sample))
    backbone.train(training)
    if not isinstance(features, Tensor) or features.dim() != 2:
        given = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise LargeMarginError(
            f"backbone must turn inputs {tuple(sample.shape)} into features (N, dim), but it "
            f"returned {given}. End it with pooling and nn.Flatten(), and without a "
            "classification layer: the head is put on top."
        )
    return int(features.shape[1])


def perceptron(shape: tuple[int, ...], hidden_sizes: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between them, none after the last: features point everywhere."""
    sizes = (prod(shape), *hidden_sizes)
    for size in hidden_sizes:
        check_number("each of hidden_sizes", size, at_least=1)
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    for index, (before, after) in enumerate(pairwise(sizes)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)


def convolutions(shape: tuple[int, ...]) -> nn.Module:
    """Three convolutions with batch normalisation, pooled to 2 x 2, and a linear layer."""
    channels, height, side = shape
    pools = [nn.MaxPool2d(2) if min(height, side) >= least else nn.Identity() for least in (16, 8)]
    return nn.Sequential(
        *_convolution(channels, 32),
        pools[0],
        *_convolution(32, 64),
        pools[1],
        *_convolution(64, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 64, 64),
    )


def _convolution(before: int, after: int) -> tuple[nn.Module, ...]:
    # The bias of a convolution is removed again by the batch mean that follows it.
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return layer, nn.BatchNorm2d(after), nn.ReLU()
