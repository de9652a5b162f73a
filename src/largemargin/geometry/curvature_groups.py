"""Does low curvature go with robustness? Accuracy and curvature by groups of samples (ROB 7.3)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_length, check_number
from largemargin.geometry.pairs import widen
from largemargin.ops.rows import promote
from largemargin.shapes import PerSample


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


def _threshold(curvature: Tensor, share: float) -> Tensor:
    """Linear interpolation quantile; equal neighbours give exactly their value."""
    check_number("share", share, at_least=0, at_most=1)
    ordered = widen(curvature).sort().values
    position = share * (len(ordered) - 1)
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
    values, limit = widen(curvature), _threshold(curvature, share)
    return values <= limit if inclusive else values < limit


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
        shares: p values in [0, 1], P of them.

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
    dtype = promote(curvature).dtype
    hits = correct.to(dtype)
    accuracies: list[Tensor] = []
    sizes: list[Tensor] = []
    for inclusive in (False, True):
        masks = [low_curvature_mask(curvature, float(p), inclusive=inclusive) for p in shares]
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
