"""Margins: angles between class vectors, how well these are spread, and what separates each sample
from its closest rival.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_labels,
    check_matrix,
    check_num_classes,
    check_number,
)
from largemargin.geometry.pairs import blocks, closest_pair, widen
from largemargin.ops.class_stats import class_stats, class_stats_from_logits
from largemargin.ops.norms import EPS, normalize, promote, safe_norm
from largemargin.shapes import Features, Labels, Logits, PerSample, Prototypes

ANGLE_ROWS = 64
"""Rows of the angle matrix computed at a time."""

EXACT = "donot_use_mm_for_euclid_dist"
"""How torch.cdist computes small distances without cancellation."""


class MarginSummary(NamedTuple):
    """Sample margins in three numbers: see :func:`summarize_margins`."""

    minimum: Tensor
    mean: Tensor
    class_minimum: Tensor


class MarginRatio(NamedTuple):
    """Mean, population standard deviation and their ratio: see :func:`margin_ratio`."""

    mean: Tensor
    std: Tensor
    ratio: Tensor


def check_prototypes(prototypes: Prototypes) -> None:
    """Check a finite (C, D) matrix with C >= 2: a NaN would only look like a small distance."""
    check_matrix("prototypes", prototypes, "(C, D)")
    check_num_classes(prototypes.shape[0])
    check_all_finite(prototypes=prototypes)


def angle_matrix(prototypes: Prototypes) -> Tensor:
    r"""Angles between all pairs of prototypes, in radians.

    .. math::
        \theta_{ij} = 2\,\operatorname{atan2}(\|\hat w_i - \hat w_j\|, \|\hat w_i + \hat w_j\|)

    An arccos of a rounded cosine loses half the digits near 0 and :math:`\pi`; this form loses
    none. A zero row is at :math:`\pi/2` to every other row. The result carries no gradient.

    Args:
        prototypes: (C, D).

    Returns:
        (C, C), zero diagonal.

    Example:
        >>> angle_matrix(torch.eye(2))[0, 1]
        tensor(1.5708)
    """
    check_prototypes(prototypes)
    wide = widen(prototypes)
    zero = torch.linalg.vector_norm(wide, dim=1) < EPS
    unit = normalize(wide)
    count = prototypes.shape[0]
    angles = wide.new_empty((count, count), dtype=promote(prototypes).dtype)
    for rows in blocks(count, ANGLE_ROWS):
        apart = torch.cdist(unit[rows], unit, compute_mode=EXACT)
        together = torch.cdist(unit[rows], -unit, compute_mode=EXACT)
        block = 2 * torch.atan2(apart, together)
        block.masked_fill_(zero[rows, None] | zero, math.pi / 2)
        angles[rows] = block.to(angles.dtype)
    return angles.fill_diagonal_(0)


def class_margin(prototypes: Prototypes, *, degrees: bool = False) -> Tensor:
    r"""Class margin: the smallest angle between two prototypes (LTLM, ZHO-MC).

    .. math:: m_c(W) = \min_{i \ne j} \angle(w_i, w_j)

    At most :math:`\arccos(-1/(C-1))`, reached by the regular simplex when D >= C - 1. The closest
    pair is searched in tiles, so 100,000 classes need no C x C buffer, and its angle is measured
    with the atan2 form of :func:`angle_matrix` in float64. A zero row is at a right angle to
    everything. Differentiable: the gradient goes to the rows of one closest pair.

    Args:
        prototypes: (C, D), C >= 2. Row lengths do not matter.
        degrees: return degrees, as the tables of the paper do. Radians by default, like every
            angle of this library.

    Returns:
        0-dim tensor, radians or degrees.

    Example:
        >>> class_margin(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]), degrees=True)
        tensor(90.)
    """
    check_prototypes(prototypes)
    wide = widen(prototypes)
    kept = torch.linalg.vector_norm(wide, dim=1) >= EPS
    right_angle = wide.new_tensor(math.pi / 2)
    rows = prototypes if bool(kept.all()) else prototypes[kept]
    pair = closest_pair(normalize(wide[kept]))
    angle = right_angle
    if pair is not None:
        unit = normalize(rows[list(pair)].to(wide.dtype))
        angle = 2 * torch.atan2(safe_norm(unit[0] - unit[1]), safe_norm(unit[0] + unit[1]))
        if len(rows) < len(prototypes):
            angle = torch.minimum(angle, right_angle)
    if degrees:
        angle = torch.rad2deg(angle)
    return angle.to(promote(prototypes).dtype)


def magnitude_ratio(prototypes: Prototypes) -> Tensor:
    r"""Longest over shortest prototype, :math:`\max_j\|w_j\| / \min_j\|w_j\|` (LTLM).

    Below 1.3 in the paper's figure for networks trained with its losses. Infinite when a row is
    zero.

    Args:
        prototypes: (C, D).

    Returns:
        0-dim tensor >= 1.

    Example:
        >>> magnitude_ratio(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor(2.5000)
    """
    check_prototypes(prototypes)
    lengths = safe_norm(prototypes)
    return lengths.max() / lengths.min()


def sample_margins(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    similarity: str = "dot",
    bias: Tensor | None = None,
) -> PerSample:
    r"""Sample margin :math:`\gamma_i = s_{iy_i} - \max_{j\ne y_i} s_{ij}` (LTLM, ZHO-MS).

    Positive exactly for correctly classified samples. With ``similarity="cosine"`` it is the
    margin of the paper's theory, at most C/(C-1) for the worst class; the tables print its mean.
    The paper does not say over which data: report training and test.

    Args:
        features: (N, D).
        prototypes: (C, D), C >= 2.
        labels: (N,) class indices.
        similarity: "dot" (default: the logits as they are), "cosine", "cosine_prototypes" or
            "euclidean".
        bias: (C,), added after the similarity.

    Returns:
        (N,), differentiable.

    Example:
        >>> sample_margins(torch.tensor([[2.0, 1.0]]), torch.eye(2), torch.tensor([0]))
        tensor([1.])
    """
    check_matrix("features", features, "(N, D)")
    check_matrix("prototypes", prototypes, "(C, D)")
    check_labels(labels, features.shape[0], prototypes.shape[0], soft=False)
    stats = class_stats(
        features,
        prototypes,
        labels,
        bias=bias,
        similarity=similarity,
        want=("target", "rival"),
        precision="highest",
        relative=True,
    )
    assert stats.target is not None
    assert stats.rival is not None
    return stats.target - stats.rival


def class_minimum(values: PerSample, labels: Labels, num_classes: int) -> Tensor:
    r"""Smallest value of each class, :math:`\gamma_j = \min_{i: y_i = j} \gamma_i`.

    Args:
        values: (N,), one number per sample.
        labels: (N,) class indices.
        num_classes: C.

    Returns:
        (C,), +inf for a class without samples.

    Example:
        >>> class_minimum(torch.tensor([1.0, -2.0]), torch.tensor([0, 0]), 2)
        tensor([-2., inf])
    """
    if not isinstance(values, Tensor) or values.dim() != 1:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise LargeMarginError(f"values must be a tensor of shape (N,), but {shape} was given.")
    check_labels(labels, values.shape[0], num_classes, soft=False)
    values = promote(values)
    empty = values.new_full((num_classes,), torch.inf)
    return empty.scatter_reduce(0, labels.long(), values, "amin")


def summarize_margins(margins: PerSample, labels: Labels, num_classes: int) -> MarginSummary:
    r"""Minimum :math:`\gamma_{\min}`, mean and class minima of sample margins (LTLM, ZHO-MS).

    The table column "m_samp" of the paper is the mean of the cosine margins: with a few percent of
    test errors the minimum would be negative.

    Args:
        margins: (N,), from :func:`sample_margins`.
        labels: (N,) class indices.
        num_classes: C.

    Returns:
        ``minimum`` and ``mean`` 0-dim, ``class_minimum`` (C,) with +inf for a class without
        samples. Without any sample the minimum is +inf and the mean NaN.

    Example:
        >>> summarize_margins(torch.tensor([1.0, -2.0]), torch.tensor([0, 1]), 2).mean
        tensor(-0.5000)
    """
    per_class = class_minimum(margins, labels, num_classes)
    return MarginSummary(per_class.min(), promote(margins).mean(), per_class)


def implicit_bias(logits: Logits, labels: Labels) -> PerSample:
    r"""Margin that the softmax loss asks for by itself (LMS 7, KOB-7).

    .. math:: \hat\rho = \log\sum_{c\ne y} e^{f_c - f_{c^*}}, \qquad
        c^* = \arg\max_{c\ne y} f_c

    Cross entropy is :math:`\operatorname{softplus}(f_{c^*} - f_y + \hat\rho)`. It lies between 0
    (one rival dominates; always for C = 2) and log(C-1) (rivals level). LMS Fig. 3 shows its
    mean over the training set, epoch by epoch.

    Args:
        logits: (N, C), C >= 2.
        labels: (N,) class indices, or (N, C) soft targets for each class as the target in turn.

    Returns:
        (N,) ((N, C) for soft targets), differentiable. Measured relative to the rival, so that
        large logits cost no digits.

    Example:
        >>> implicit_bias(torch.zeros(1, 3), torch.tensor([0]))
        tensor([0.6931])
    """
    rival = class_stats_from_logits(logits, labels, want=("rival",)).rival
    assert rival is not None
    if labels.dim() == 2:
        # Two different rivals at most (the best class has the second best), so one shift serves.
        shift = rival.max(dim=1, keepdim=True).values
    else:
        shift = rival[:, None]
    relative = promote(logits) - shift.detach()
    stats = class_stats_from_logits(relative, labels, want=("rival", "rest"))
    assert stats.rest is not None
    assert stats.rival is not None
    return stats.rest - stats.rival


def margin_ratio(margins: PerSample) -> MarginRatio:
    r"""Mean over standard deviation of a margin distribution (ODN-RATIO).

    .. math:: \bar\gamma / \operatorname{std}(\gamma), \qquad
        \operatorname{std}^2 = \tfrac1N\sum_i (\gamma_i - \bar\gamma)^2

    The population standard deviation, as the paper's ratios need. Large when margins are large
    and alike. Equal margins have standard deviation 0 and ratio ±inf.

    Args:
        margins: (N,), any margins, for instance the linearised input margins of ODN.

    Returns:
        ``mean``, ``std``, ``ratio``, 0-dim.

    Example:
        >>> margin_ratio(torch.tensor([1.0, 3.0])).ratio
        tensor(2.)
    """
    margins = promote(margins)
    mean, std = margins.mean(), margins.std(correction=0)
    return MarginRatio(mean, std, mean / std)


def _wide(prototypes: Prototypes) -> Tensor:
    return promote(prototypes) if prototypes.device.type == "mps" else prototypes.double()


def min_distance(prototypes: Prototypes) -> Tensor:
    r"""Smallest distance between two prototypes, :math:`\min_{i\ne j}\|w_i - w_j\|`.

    The quantity a best packing maximises (LTLM, erratum Z1). Searched in tiles, without a C x C
    buffer. Differentiable: the gradient goes to the rows of one closest pair.

    Args:
        prototypes: (C, D), C >= 2, used as they are; pass unit rows to look at directions only.

    Returns:
        0-dim tensor.

    Example:
        >>> min_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]))
        tensor(5.)
    """
    check_prototypes(prototypes)
    pair = closest_pair(prototypes)
    assert pair is not None
    first, second = _wide(prototypes[list(pair)])
    return safe_norm(first - second).to(promote(prototypes).dtype)


def _log_energy(prototypes: Prototypes, t: float) -> Tensor:
    check_prototypes(prototypes)
    check_number("t", t, above=0)
    rows = _wide(prototypes)
    total = rows.new_tensor(-math.inf)
    for block in blocks(len(rows)):
        for other in blocks(len(rows)):
            if other.start < block.start:
                continue
            apart = torch.cdist(rows[block], rows[other], compute_mode=EXACT)
            if other.start == block.start:
                # Each pair once; the others are put at infinite distance.
                once = torch.ones_like(apart, dtype=torch.bool).triu(1)
                apart = torch.where(once, apart, torch.inf)
            total = torch.logaddexp(total, torch.logsumexp(-t * apart.log().flatten(), 0))
    return total + math.log(2)


def riesz_energy(prototypes: Prototypes, t: float) -> Tensor:
    r"""Riesz energy :math:`E_t(W) = \sum_{i\ne j} \|w_i - w_j\|^{-t}` (LTLM, ZHO-RIESZ).

    The sum runs over ordered pairs, so each pair counts twice. Minimisers tend to best packings as
    t grows (erratum Z2). Use :func:`riesz_root` for large t, where the energy overflows.

    Args:
        prototypes: (C, D), C >= 2, used as they are.
        t: exponent, > 0.

    Returns:
        0-dim tensor, differentiable; +inf when two prototypes coincide. Without gradients the
        memory is that of one tile, with them C².

    Example:
        >>> riesz_energy(torch.tensor([[0.0], [2.0]]), 1.0)
        tensor(1.)
    """
    return _log_energy(prototypes, t).exp().to(promote(prototypes).dtype)


def riesz_root(prototypes: Prototypes, t: float) -> Tensor:
    r"""Root of the Riesz energy, :math:`E_t(W)^{-1/t}`, in the log domain (LTLM, ZHO-RIESZ).

    A lower bound of :func:`min_distance` that tends to it as t grows, smooth in every prototype;
    0 when two prototypes coincide. Args as in :func:`riesz_energy`.

    Example:
        >>> riesz_root(torch.tensor([[0.0], [2.0]]), 1.0)
        tensor(1.)
    """
    return torch.exp(_log_energy(prototypes, t) / -t).to(promote(prototypes).dtype)
