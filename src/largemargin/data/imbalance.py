"""Imbalanced training sets: how many samples each class keeps."""

import math

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_length,
    check_num_classes,
    check_number,
)
from largemargin.shapes import Labels

ROUNDING = 1e-9
"""Relative allowance before rounding down, so that 50 computed as 49.999999999999993 stays 50."""


def class_counts_profile(
    num_classes: int, *, largest: int, ratio: float, kind: str = "exp"
) -> Tensor:
    r"""Class sizes of the usual imbalanced data sets (Cao et al. 2019, LTLM Table 2, BAS-IMB).

    .. math::
        \text{exp (long-tailed)}:\ n_j = \lfloor n_{\max}\,\rho^{-j/(C-1)} \rfloor, \qquad
        \text{step}:\ n_j = n_{\max} \text{ for } j < \lfloor C/2 \rfloor,\
            \text{else } \lfloor n_{\max}/\rho \rfloor

    Only training sets are thinned out; test sets stay balanced.

    Args:
        num_classes: C >= 2.
        largest: :math:`n_{\max}`, samples of the largest class: 5000 for CIFAR-10, 500 for
            CIFAR-100.
        ratio: :math:`\rho \ge 1`, largest over smallest class; LTLM uses 10 and 100.
        kind: "exp" (default: long-tailed) or "step".

    Returns:
        (C,) int64, largest class first.

    Example:
        >>> class_counts_profile(3, largest=100, ratio=100)
        tensor([100,  10,   1])
    """
    check_num_classes(num_classes)
    check_choice("kind", kind, ("exp", "step"))
    check_number("ratio", ratio, at_least=1)
    check_number(
        "largest", largest, at_least=ratio, hint="The smallest class needs at least one sample."
    )
    if kind == "exp":
        sizes = [largest * ratio ** (-j / (num_classes - 1)) for j in range(num_classes)]
    else:
        sizes = [largest / (1 if j < num_classes // 2 else ratio) for j in range(num_classes)]
    return torch.tensor([math.floor(size * (1 + ROUNDING)) for size in sizes])


def imbalanced_subset(
    labels: Labels, counts: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Indices of a random subset in which class c has ``counts[c]`` samples.

    Args:
        labels: (N,) class indices of the balanced set.
        counts: (C,) integers, from :func:`class_counts_profile`.
        generator: random numbers for the choice; default torch's global ones.

    Returns:
        (sum of counts,) int64 indices into ``labels``, ascending.

    Example:
        >>> imbalanced_subset(torch.tensor([0, 1, 1]), torch.tensor([1, 2]))
        tensor([0, 1, 2])
    """
    num_classes = counts.numel()
    check_length("counts", counts, num_classes, "one entry per class")
    check_labels(labels, labels.shape[0], num_classes, soft=False)
    device = labels.device if generator is None else generator.device
    shuffled = torch.randperm(len(labels), generator=generator, device=device).to(labels.device)
    chosen = []
    for label, wanted in enumerate(counts.tolist()):
        members = shuffled[labels[shuffled] == label]
        if not 0 <= wanted <= len(members):
            raise LargeMarginError(
                f"counts[{label}] must lie in [0, {len(members)}], the samples of class {label}, "
                f"but {wanted} was given. Lower the largest count."
            )
        chosen.append(members[:wanted])
    return torch.cat(chosen).sort().values
