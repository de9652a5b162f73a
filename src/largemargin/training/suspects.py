"""Which samples a step that was not finite saw."""

import torch

from largemargin.data import Batches

MOST = 64
"""Names that are written down."""


def suspects(batches: Batches, epoch: int, step: int) -> list[str]:
    """Names of samples whose images are not finite; where all are, those of the whole step.

    A step of several processes is that of all of them.
    """
    samples, first = batches.samples, step * batches.batch_size
    index = batches.order(epoch)[first : first + batches.batch_size]
    if samples.pixels is not None and samples.pixels.is_floating_point():
        broken = ~torch.isfinite(samples.pixels[index]).flatten(1).all(1)
        index = index[broken] if bool(broken.any()) else index
    return [str(samples.ids[number]) for number in index[:MOST].tolist()]
