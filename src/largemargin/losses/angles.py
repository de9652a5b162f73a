"""Functions of an angle given by its cosine, finite with their gradients at 0 and pi (rule N5)."""

import math

import torch
from torch import Tensor


def _tiny(x: Tensor) -> float:
    # Below this, 1 - cos^2 is rounding noise: the angle counts as 0 or pi and is held constant.
    return 1e-12 if x.dtype == torch.float64 else 4e-7


def safe_sin(cosine: Tensor) -> Tensor:
    """sin(theta) >= 0 from cos(theta); exactly 0 with gradient 0 at theta = 0 and pi."""
    square = 1 - cosine * cosine
    inside = square > _tiny(cosine)
    return torch.where(inside, torch.sqrt(torch.where(inside, square, 1)), 0)


def safe_arccos(cosine: Tensor) -> Tensor:
    """theta in [0, pi] from cos(theta), gradient 0 at both ends instead of infinite."""
    inside = 1 - cosine * cosine > _tiny(cosine)
    ends = torch.where(cosine > 0, 0.0, math.pi)
    return torch.where(inside, torch.arccos(torch.where(inside, cosine, 0)), ends)


def continued_cosine(phi: Tensor) -> Tensor:
    r"""Monotone continuation :math:`T(\phi) = (-1)^k\cos\phi - 2k,\ k = \lfloor\phi/\pi\rfloor`.

    Equals the cosine on [0, pi] and goes on falling after it. k is a constant for the gradient.
    """
    k = torch.floor(phi.detach() / math.pi)
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
