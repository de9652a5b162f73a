"""Images in memory brought to another size."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.data.config import DataConfig
from largemargin.data.reading import IN_MEMORY
from largemargin.data.samples import Samples, as_float
from largemargin.errors import LargeMarginError


def resized(samples: Samples, config: DataConfig) -> Samples:
    """The samples at ``config.size``; where that is not set, or theirs, as they are."""
    pixels, side = samples.pixels, config.size
    if pixels is None or side is None:
        return samples
    size = (side, config.width or side)
    if tuple(pixels.shape[2:]) == size:
        return samples
    needed = pixels[:, :, 0, 0].numel() * size[0] * size[1] * pixels.element_size()
    if needed > IN_MEMORY and config.resident != "yes":
        raise LargeMarginError(
            f"{len(pixels)} images of {size[0]} x {size[1]} pixels take {needed / 2**30:.1f} GiB "
            "in memory. Set resident: yes if there is room for them (on the training device too), "
            "or a smaller size or fraction."
        )
    return replace(samples, pixels=interpolated(pixels, size))


def interpolated(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, smoothed before it is made smaller; same dtype."""
    new = torch.empty((*pixels.shape[:2], *size), dtype=pixels.dtype)
    for first in range(0, len(pixels), 512):
        part = as_float(pixels[first : first + 512])
        part = F.interpolate(part, size, mode="bilinear", antialias=True)
        if pixels.dtype == torch.uint8:
            part = part.mul(255).round().clamp(0, 255)
        new[first : first + 512] = part.to(pixels.dtype)
    return new
