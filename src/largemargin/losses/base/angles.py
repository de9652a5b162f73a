"""Functions of an angle given by its cosine, finite with their gradients at 0 and pi (rule N5)."""

import math

import torch
from torch import Tensor

from largemargin.ops.matmul import resolve_precision
from largemargin.ops.norms import inverse_norms, normalize
from largemargin.ops.shards import is_shared
from largemargin.ops.similarity import in_one_dtype
from largemargin.tracing import values_are_checked

NEAR = 0.99
"""Cosines from which on the sine is not made of the cosine: it would lose two digits and more."""

NOISE = {"bf16": 2.0**-8, "tf32": 2.0**-10}
"""Angles that the rounding of a product's factors makes; otherwise that of the dtype does."""


def clipped(cosine: Tensor) -> Tensor:
    """In [-1, 1], with the gradient of what rounding has carried out of it."""
    known = cosine.detach()
    return cosine + (known.clamp(-1, 1) - known)


def cosine_and_sine(
    target: Tensor,
    scale: float | Tensor,
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    precision: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Of the angles to the targets, whose logits are ``scale`` times their cosines."""
    cosine = clipped(target / scale)
    return cosine, sine_of_target(cosine, features, prototypes, labels, precision)


def sine_of_target(
    cosine: Tensor,
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    precision: str | None = None,
) -> Tensor:
    r"""sin(theta) >= 0 of the angles to the targets, whose (clipped) cosines are given.

    Near 0 and pi sqrt(1 - cos^2) keeps nothing of a small sine: the rounding error of the cosine,
    1e-7, becomes an angle of 4e-4. There the value comes from the chord between the unit vectors,
    :math:`\sin\theta = c\sqrt{1 - c^2/4},\ c = \|u \mp w\|`, and only the derivative, -cos/sin,
    from the cosine. Angles that are rounding errors themselves are constants. Soft targets, and
    prototypes of which this process has a part, have no chords here.
    """
    known = cosine.detach()
    near = known.abs() > NEAR
    if labels.dim() == 2 or is_shared(prototypes):
        return _safe_sine(cosine)
    # Known to be far from aligned, as most batches are, where asking costs nothing.
    if values_are_checked(near, None) and not bool(near.any()):
        return _safe_sine(cosine)
    rows = prototypes.detach().index_select(0, labels.long().clamp(0, prototypes.shape[0] - 1))
    points, rows = in_one_dtype(features.detach(), rows)
    if rows.dim() == 3:
        nearest = (normalize(rows) * points[:, None]).sum(2).argmax(1)
        rows = rows[torch.arange(len(rows), device=rows.device), nearest]
    both = torch.cat((points, rows))
    u, w = (both * inverse_norms(both)).chunk(2)
    chord = torch.minimum(
        torch.linalg.vector_norm(u - w, dim=1), torch.linalg.vector_norm(u + w, dim=1)
    )
    small = chord * torch.sqrt(1 - chord * chord / 4)
    constant = near & (small <= noise_of_angles(small.dtype, features, prototypes, precision))
    square = torch.where(near, small * small, 1 - known * known)
    square = torch.where(constant, 1, square + (known * known - cosine * cosine))
    return torch.where(constant, small, torch.sqrt(square))


def noise_of_angles(
    dtype: torch.dtype, features: Tensor, prototypes: Tensor, precision: str | None
) -> float:
    """Sines up to this are rounding errors of the cosine or of the factors of its product."""
    rounding = NOISE.get(resolve_precision(precision, features, prototypes) or "", 0.0)
    return max(8 * torch.finfo(dtype).eps, rounding)


def _safe_sine(cosine: Tensor) -> Tensor:
    """sqrt(1 - cos^2), and 0 with gradient 0 where that is rounding noise."""
    square = 1 - cosine * cosine
    inside = square > (1e-12 if cosine.dtype == torch.float64 else 4e-7)
    return torch.where(inside, torch.sqrt(torch.where(inside, square, 1)), 0)


def continued_cosine(phi: Tensor) -> Tensor:
    r"""Monotone continuation :math:`T(\phi) = (-1)^k\cos\phi - 2k,\ k = \lfloor\phi/\pi\rfloor`.

    Equals the cosine on [0, pi] and goes on falling after it. k is a constant for the gradient.
    """
    k = torch.floor(phi / math.pi)
    return (1 - 2 * torch.remainder(k, 2)) * torch.cos(phi) - 2 * k


def chebyshev(cosine: Tensor, order: int) -> Tensor:
    """cos(order * theta) as a polynomial in cos(theta): no arccos, so no singular gradient."""
    previous, current = torch.ones_like(cosine), cosine
    for _ in range(order - 1):
        previous, current = current, 2 * cosine * current - previous
    return current


def multiplied_angle(cosine: Tensor, margin: int) -> Tensor:
    r"""A-Softmax's :math:`\psi(\theta) = (-1)^k\cos(m\theta) - 2k` from cos(theta)."""
    theta = torch.arccos(cosine.detach().clamp(-1, 1))
    k = torch.floor(margin * theta / math.pi).clamp(max=margin - 1)
    return (1 - 2 * torch.remainder(k, 2)) * chebyshev(cosine, margin) - 2 * k
