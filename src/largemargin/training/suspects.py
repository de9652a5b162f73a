"""What is wrong with steps that are not finite, or that do not teach the network anything."""

import warnings

import torch

from largemargin.data import Batches
from largemargin.dropin import Criterion, MarginWarning

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


def warn_untouched(criterion: Criterion) -> None:
    """Say so where the last step had no gradient for the network below its head, to the last bit.

    A hinge that is satisfied everywhere can do this, a network whose units all died of a learning
    rate that is too high, and a compiler that loses a gradient.
    """
    head = {id(parameter) for parameter in criterion.layer.parameters()}
    below = [
        parameter
        for parameter in criterion.model.parameters()
        if parameter.requires_grad and id(parameter) not in head
    ]
    sizes = [parameter.grad.norm() for parameter in below if parameter.grad is not None]
    if below and not (sizes and bool(torch.stack(sizes).any())):
        warnings.warn(
            f"the loss has no gradient for any of the {len(below)} parameters below the head: only "
            "the head is trained. Every unit of a layer may be dead: lower optimizer.lr, or clip. "
            "If the run is compiled and compile: false helps, tell us.",
            MarginWarning,
            stacklevel=2,
        )
