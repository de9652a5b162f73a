"""How well prototypes are spread: smallest distance and Riesz energy."""

import math

import torch
from torch import Tensor

from largemargin.errors import check_number
from largemargin.geometry.margins import check_prototypes
from largemargin.geometry.pairs import blocks, closest_pair
from largemargin.ops import safe_norm
from largemargin.ops.rows import promote
from largemargin.shapes import Prototypes


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
    rows = _wide(prototypes)
    total = rows.new_tensor(-math.inf)
    for block in blocks(len(rows)):
        for other in blocks(len(rows)):
            if other.start < block.start:
                continue
            apart = torch.cdist(
                rows[block], rows[other], compute_mode="donot_use_mm_for_euclid_dist"
            )
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
    check_prototypes(prototypes)
    check_number("t", t, above=0)
    return _log_energy(prototypes, t).exp().to(promote(prototypes).dtype)


def riesz_root(prototypes: Prototypes, t: float) -> Tensor:
    r"""Root of the Riesz energy, :math:`E_t(W)^{-1/t}`, in the log domain (LTLM, ZHO-RIESZ).

    A lower bound of :func:`min_distance` that tends to it as t grows, smooth in every prototype.

    Args:
        prototypes: (C, D), C >= 2, used as they are.
        t: exponent, > 0.

    Returns:
        0-dim tensor, differentiable; 0 when two prototypes coincide.

    Example:
        >>> riesz_root(torch.tensor([[0.0], [2.0]]), 1.0)
        tensor(1.)
    """
    check_prototypes(prototypes)
    check_number("t", t, above=0)
    return torch.exp(_log_energy(prototypes, t) / -t).to(promote(prototypes).dtype)
