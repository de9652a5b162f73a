"""Does low curvature go with robustness? Accuracy and curvature by groups of samples (ROB 7.3)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_length, check_number
from largemargin.geometry.pairs import widen
from largemargin.ops.rows import promote
from largemargin.shapes import PerSample

NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in which a share like 0.9 is visibly another number."""


class LowCurvatureAccuracy(NamedTuple):
    """Accuracy on low-curvature subsets: see :func:`low_curvature_accuracy`."""

    strict: Tensor
    weak: Tensor
    size_strict: Tensor
    size_weak: Tensor


class RobustnessGroups(NamedTuple):
    """Curvature by number of correct noisy predictions: see :func:`curvature_by_robustness`."""

    mean: Tensor
    size: Tensor
    pearson: Tensor


def _check_curvature(curvature: PerSample) -> None:
    if not isinstance(curvature, Tensor) or curvature.dim() != 1 or curvature.numel() == 0:
        given = (
            tuple(curvature.shape) if isinstance(curvature, Tensor) else type(curvature).__name__
        )
        raise LargeMarginError(
            f"curvature must be a tensor of shape (N,) with N >= 1, but {given} was given."
        )


def _threshold(curvature: Tensor, share: float, rounding: float = 0.0) -> Tensor:
    """Linear interpolation quantile; equal neighbours give exactly their value.

    ``rounding`` is the relative error that a narrow dtype left in the share: a position that is a
    sample's up to that error is that sample's.
    """
    check_number("share", share, at_least=0, at_most=1)
    ordered = widen(curvature).sort().values
    position = share * (len(ordered) - 1)
    if abs(position - round(position)) <= rounding * position:
        position = round(position)
    low = min(int(position), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def low_curvature_mask(
    curvature: PerSample, share: float = 0.9, *, inclusive: bool = False
) -> Tensor:
    r"""The samples of lowest curvature, :math:`\{i: \Lambda_i < \mathrm{quantile}_p(\Lambda)\}`.

    The quantile interpolates linearly. The strict sign is the printed one; it drops the largest
    sample at p = 1 and everything when all curvatures are equal (erratum R5).

    Args:
        curvature: (N,), from :func:`curvature`.
        share: p in [0, 1]. Default 0.9, the share that ROB's box plots show.
        inclusive: use <= instead.

    Returns:
        (N,) booleans.

    Example:
        >>> low_curvature_mask(torch.tensor([3.0, 1.0, 2.0]), 0.5, inclusive=True)
        tensor([False,  True,  True])
    """
    _check_curvature(curvature)
    return _below(curvature, _threshold(curvature, share), inclusive)


def _below(curvature: PerSample, limit: Tensor, inclusive: bool) -> Tensor:
    values = widen(curvature)
    return values <= limit if inclusive else values < limit


def _rounding(shares: Sequence[float] | Tensor) -> float:
    """How far numbers of the shares' dtype are from the decimal ones meant; 0 for plain numbers."""
    if not isinstance(shares, Tensor) or shares.dtype not in NARROW:
        return 0.0
    return torch.finfo(shares.dtype).eps


def low_curvature_accuracy(
    curvature: PerSample, correct: Tensor, shares: Sequence[float] | Tensor
) -> LowCurvatureAccuracy:
    r"""Accuracy under noise on the samples of lowest clean curvature (ROB 7.3, NGR-7.3).

    .. math:: \mathrm{acc}(p) = \text{accuracy on } D(p) =
        \{i : \Lambda_i < \mathrm{quantile}_p(\Lambda)\}

    Both readings of the sign are returned, since they differ at p = 1 and with ties; say which one
    is reported.

    Args:
        curvature: (N,) of the clean samples.
        correct: (N,) booleans: prediction under noise was right. Numbers in [0, 1] (shares of
            right predictions) are averaged as well.
        shares: p values in [0, 1], P of them. A tensor of float32 means the same p as a list: 0.9
            of 11 samples ends at the tenth, although float32 has no 0.9.

    Returns:
        ``strict`` and ``weak`` accuracies (P,), NaN for an empty subset, with the subset sizes
        ``size_strict`` and ``size_weak`` (P,) int64.

    Example:
        >>> flat, right = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
        >>> low_curvature_accuracy(flat, right, [1.0]).weak
        tensor([0.5000])
    """
    _check_curvature(curvature)
    check_length("correct", correct, len(curvature), "one entry per curvature")
    if isinstance(shares, int | float) or (isinstance(shares, Tensor) and shares.dim() != 1):
        raise LargeMarginError(
            f"shares must be a list or a tensor of shape (P,), but {shares} was given. Put a "
            "single share into a list."
        )
    dtype = promote(curvature).dtype
    hits = correct.to(dtype)
    rounding = _rounding(shares)
    limits = [_threshold(curvature, float(p), rounding) for p in shares]
    accuracies: list[Tensor] = []
    sizes: list[Tensor] = []
    for inclusive in (False, True):
        masks = [_below(curvature, limit, inclusive) for limit in limits]
        subsets = torch.stack(masks) if masks else hits.new_empty((0, len(hits)), dtype=torch.bool)
        sizes.append(subsets.sum(1))
        accuracies.append((subsets * hits).sum(1) / sizes[-1])
    return LowCurvatureAccuracy(*accuracies, *sizes)


def curvature_by_robustness(
    curvature: PerSample, correct_counts: Tensor, *, draws: int = 10
) -> RobustnessGroups:
    r"""Mean curvature of samples by how often noise left their prediction right (ROB 7.3).

    .. math:: G(k) = \{i : \mathrm{count}(i) = k\}, \qquad
        \bar\Lambda(k) = \operatorname{mean}_{i\in G(k)} \Lambda_i, \qquad k = 0..\text{draws}

    A negative correlation says that flat samples are robust ones.

    Args:
        curvature: (N,) of the clean samples.
        correct_counts: (N,) integers, correct predictions out of ``draws`` noisy draws.
        draws: draws per sample. Default 10 (ROB 7.3).

    Returns:
        ``mean`` (draws + 1,), NaN for an empty group; ``size`` (draws + 1,) int64;
        ``pearson`` 0-dim, the correlation of k and the means over the non-empty groups, NaN when
        fewer than two groups or no spread leave it undefined.

    Example:
        >>> curvature_by_robustness(torch.tensor([4.0, 2.0]), torch.tensor([0, 1]), draws=1)[2]
        tensor(-1.)
    """
    _check_curvature(curvature)
    check_number("draws", draws, at_least=1)
    check_length("correct_counts", correct_counts, len(curvature), "one entry per curvature")
    if correct_counts.is_floating_point() or int(correct_counts.min()) < 0:
        raise LargeMarginError(
            "correct_counts must be integers >= 0, but their dtype is "
            f"{correct_counts.dtype} and their minimum {correct_counts.min().item()}."
        )
    if int(correct_counts.max()) > draws:
        raise LargeMarginError(
            f"correct_counts must be at most draws = {draws}, but their maximum is "
            f"{int(correct_counts.max())}. Pass the number of draws as draws."
        )
    dtype = promote(curvature).dtype
    groups = correct_counts.long()
    size = torch.bincount(groups, minlength=draws + 1)
    wide = widen(curvature)
    mean = wide.new_zeros(draws + 1).index_add_(0, groups, wide) / size
    present = size > 0
    pairs = torch.stack([present.nonzero().squeeze(1).to(wide.dtype), mean[present]])
    apart = pairs - pairs.mean(1, keepdim=True)
    # 0/0 is NaN, which is what a correlation without spread is.
    pearson = (apart[0] * apart[1]).sum() / apart.square().sum(1).prod().sqrt()
    return RobustnessGroups(mean.to(dtype), size, pearson.to(dtype))
