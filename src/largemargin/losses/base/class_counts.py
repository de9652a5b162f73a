"""Margins and weights per class, from how many samples each class has (LDAM, Cao et al. 2019)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_number


def refuse_mapping(class_counts: object, name: str = "class_counts") -> None:
    """A ``Counter`` of labels would be read as its keys, or in the order they were met."""
    if isinstance(class_counts, Mapping):
        raise LargeMarginError(
            f"{name} must be one number per class in the order of the labels, but "
            f"{type(class_counts).__name__} was given. Write them out: [counts[label] for label in "
            "range(num_classes)], or torch.bincount(labels)."
        )


def numbers_per_class(name: str, values: Sequence[float] | Tensor, hint: str) -> Tensor:
    """Whatever holds numbers, as a tensor; ``hint`` says how to make them."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.as_tensor(values)
        if not numbers.is_complex():
            return numbers
    given = f"{name} must be numbers, one per class, but {values!r} was given."
    raise LargeMarginError(given + hint)


def check_counts(class_counts: Sequence[float] | Tensor, name: str = "class_counts") -> Tensor:
    """Counts as a float64 vector; without samples a class has no weight, margin or prior."""
    refuse_mapping(class_counts, name)
    hint = " Count the labels: torch.bincount(labels)."
    counts = numbers_per_class(name, class_counts, hint).detach().double()
    if counts.dim() != 1 or counts.numel() < 2:
        raise LargeMarginError(
            f"{name} must be a vector of at least 2 counts, but its shape is {tuple(counts.shape)}."
        )
    bad = ~((counts > 0) & torch.isfinite(counts))
    if bool(bad.any()):
        row = int(bad.int().argmax())
        raise LargeMarginError(
            f"{name} must be positive, but class {row} has {counts[row].item():g}. Give the "
            "number of training samples of every class; drop classes that have none."
        )
    return counts


def ldam_margins(
    class_counts: Sequence[int] | Tensor,
    *,
    max_margin: float | Tensor = 0.5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Label-distribution-aware margins :math:`\Delta_j \propto n_j^{-1/4}` (BAS-LDAM).

    Scaled so that the rarest class has ``max_margin`` (0.5 in the original).

    Returns:
        (C,) in ``dtype`` (default: torch's default dtype).

    Example:
        >>> ldam_margins([10000, 1])
        tensor([0.0500, 0.5000])
    """
    if isinstance(max_margin, Tensor):
        raise LargeMarginError(
            "margin must be one number when class_counts are given: they make the margin of each "
            "class from it. Leave class_counts out to set the margins yourself."
        )
    check_number("max_margin", max_margin, above=0)
    counts = check_counts(class_counts)
    return (max_margin * (counts.min() / counts) ** 0.25).to(dtype or torch.get_default_dtype())


def dynamic_margins(
    class_counts: Sequence[int] | Tensor,
    *,
    factor: float = 0.5,
    offset: float = 0.05,
    power: float = 0.25,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Margins by class size (Ha et al. 2020), :math:`m_c = a\,n_c^{-\lambda} + b`.

    For the ``margin`` of a loss on cosines: ``ArcFace(margin=dynamic_margins(counts))``. Unlike
    :func:`ldam_margins` frequent classes keep at least b. The authors' code stretches
    :math:`n_c^{-1/4}` to margins from 0.05 to 0.5 for the sizes at hand.

    Args:
        class_counts: training samples per class, all positive.
        factor, offset, power: a, b and lambda >= 0; defaults 0.5, 0.05 and 1/4, which give about
            that range.

    Returns:
        (C,) in ``dtype`` (default: torch's default dtype).

    Example:
        >>> dynamic_margins([10000, 1])
        tensor([0.1000, 0.5500])
    """
    for name, value in (("factor", factor), ("offset", offset), ("power", power)):
        check_number(name, value, at_least=0)
    margins = factor * check_counts(class_counts) ** -power + offset
    return margins.to(dtype or torch.get_default_dtype())


def balanced_weights(
    class_counts: Sequence[int] | Tensor, *, beta: float = 0.9999, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Class-balanced weights :math:`w_j \propto (1-\beta)/(1-\beta^{n_j})`, summing to C.

    The inverse of the effective number of samples (Cui et al. 2019), for any loss:
    ``weight=balanced_weights(counts)``. Deferred re-weighting (LDAM-DRW) switches to them late in
    training. ``beta`` 0.9999 as in the original; 0 gives equal weights, 1 - 1e-9 all but the
    inverse counts.

    Example:
        >>> balanced_weights([1, 3], beta=0.5)
        tensor([1.2727, 0.7273])
    """
    check_number("beta", beta, at_least=0, below=1)
    counts = check_counts(class_counts)
    weights = (1 - beta) / (1 - beta**counts)
    return (weights * (counts.numel() / weights.sum())).to(dtype or torch.get_default_dtype())
