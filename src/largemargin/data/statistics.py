"""Mean and standard deviation of the pixels."""

from collections.abc import Iterable

import torch
from torch import Tensor

from largemargin.data.config import DataConfig
from largemargin.data.randomness import generator_for
from largemargin.data.samples import Samples
from largemargin.data.sources.source import Source
from largemargin.errors import check_choice

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Of ImageNet's training images, as every pretrained model of torchvision takes them."""
GREY_IMAGENET: Statistics = ((0.449,), (0.226,))
"""Means over the three channels, for images with one."""
AT_MOST = 2000
"""Image files that are read to compute statistics; images in memory are all used."""


def normalization(source: Source, config: DataConfig, channels: int) -> Statistics:
    """Mean and standard deviation per channel, as ``config.normalize`` asks."""
    check_choice("normalize", config.normalize, ("auto", "imagenet", "computed", "none"))
    kind = config.normalize
    if kind == "auto":
        if source.statistics is not None:
            return source.statistics
        kind = "imagenet" if source.from_files else "computed"
    if kind == "none":
        return (0.0,) * channels, (1.0,) * channels
    if kind == "imagenet":
        return IMAGENET if channels == 3 else GREY_IMAGENET
    return computed(source.train, config.seed)


def computed(samples: Samples, seed: int = 0) -> Statistics:
    """Of all pixels in memory, or of up to ``AT_MOST`` files drawn at random.

    Example:
        >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
        >>> computed(Samples(torch.tensor([0, 1]), ("a", "b"), pixels))
        ((0.5,), (0.5,))
    """
    parts: Iterable[Tensor]
    if samples.pixels is not None:
        parts = torch.split(samples.pixels, 1024)
    else:
        order = torch.randperm(len(samples), generator=generator_for(seed, "statistics"))
        # One after the other: what is in files may not fit into memory.
        parts = (samples.raw(i)[None] for i in order[:AT_MOST].tolist())
    total = torch.stack([moments(part) for part in parts]).sum(0)
    mean = total[1] / total[0]
    # A channel that is the same everywhere must not be divided by zero.
    std = (total[2] / total[0] - mean**2).clamp(min=0).sqrt()
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    return tuple(mean.tolist()), tuple(std.tolist())


def moments(part: Tensor) -> Tensor:
    """Number, sum and sum of squares of the pixels per channel, (3, C) float64."""
    whole = part.dtype == torch.uint8
    values = part.int() if whole else part.double()
    axes, top = (0, 2, 3), 255 if whole else 1
    # Sums of bytes are exact in whole numbers.
    exact = torch.int64 if whole else torch.float64
    first = values.sum(axes, dtype=exact).double() / top
    second = values.square().sum(axes, dtype=exact).double() / top**2
    return torch.stack([torch.full_like(first, part[:, 0].numel()), first, second])
