"""Signed distances to the decision boundaries between pairs of classes (LMD 4.2, 4.6).

The two nearest decision boundaries among a block of classes, searched without gradient.
"""

import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import check_classifier, check_num_classes
from largemargin.ops.norms import promote, safe_norm
from largemargin.tracing import plain_eager

DEGENERATE = 1e-12
"""Prototypes closer than this have no boundary between them."""


def paired_boundary_distance(
    points: Tensor,
    own: Tensor,
    other: Tensor,
    bias_difference: Tensor | None = None,
    *,
    eps: float = DEGENERATE,
) -> Tensor:
    r"""Signed distance :math:`(z_i - z_c)/\|W_c - W_i\|`, for given pairs, in any batch shape.

    ``bias_difference`` is :math:`b_i - b_c`. Negative on the side of class c. A pair of prototypes
    within ``eps`` of each other has no boundary: the constant 0, without gradient (O17).
    """
    normal = other - own
    length = safe_norm(normal)
    gap = (normal * points).sum(-1)
    if bias_difference is not None:
        gap = gap + bias_difference
    degenerate = length <= eps
    return torch.where(degenerate, 0.0, gap / torch.where(degenerate, 1.0, length))


def signed_boundary_distance(
    points: Tensor, prototypes: Tensor, bias: Tensor | None = None, *, eps: float = DEGENERATE
) -> Tensor:
    r"""Signed distance of points to the boundaries of all pairs of classes (NGY-4.6).

    .. math:: s_{ci}(m) = \frac{z_i(m) - z_c(m)}{\|W_c - W_i\|}, \qquad z(m) = W m + b

    Negative on the side of class c; its absolute value is the distance of LMD (4.6), which prints
    the sign separately and so has no gradient on the boundary. The diagonal, and pairs of
    prototypes closer than ``eps``, are the constant 0.

    Args:
        points: (N, D).
        prototypes: (C, D).
        bias: (C,) or None.

    Returns:
        (N, C, C), entry [n, c, i]. For large C use the losses, which never form this array.

    Example:
        >>> signed_boundary_distance(torch.tensor([[1.0, 0.0]]), torch.eye(2))[0, 0, 1]
        tensor(-0.7071)
    """
    check_classifier(points, prototypes, bias, name="points")
    check_num_classes(prototypes.shape[0])
    points, prototypes = promote(points), promote(prototypes)
    difference = None if bias is None else bias[None, :] - bias[:, None]
    return paired_boundary_distance(
        points[:, None, None, :],
        prototypes[:, None, :],
        prototypes[None, :, :],
        difference,
        eps=eps,
    )


class Centroids(NamedTuple):
    """K points, and the rows and logits of their own classes."""

    points: Tensor
    """(K, D)."""
    doubled: Tensor
    """(K, D), -2 times the own rows."""
    own_size: Tensor
    """(K, 1), squared norms of the own rows."""
    own_logit: Tensor
    """(K, 1)."""
    own: Tensor
    """(K,), the own classes."""
    middle: Tensor
    """(D,), taken off the rows before they are multiplied."""
    parts: Tensor | None = None
    """(2 K, 6 D) or (2 K, 3 D), points and doubled rows split for the kernels."""


MANY_POINTS = 64
"""From so many on products of split numbers pay on a GPU."""


def for_search(
    points: Tensor, mine: Tensor, own_bias: Tensor | None, own: Tensor, middle: Tensor
) -> Centroids:
    """Points (K, D), the rows of their classes less the ``middle``, their biases and classes."""
    own_logit = (points * mine).sum(1, keepdim=True)
    if own_bias is not None:
        own_logit += own_bias[:, None]
    own_size = torch.linalg.vector_norm(mine, dim=1, keepdim=True).square()
    doubled, parts = -2 * mine, None
    if _fused(mine) and (len(points) >= MANY_POINTS or not mine.is_cuda):
        from largemargin.ops.triton.rival_boundaries import orders, split

        parts = split(torch.cat((points, doubled)), None, orders()[0], 1.0)[0]
    return Centroids(points, doubled, own_size, own_logit, own, middle, parts)


def nearest_two(
    given: Centroids, block: Tensor, bias: Tensor | None, start: int
) -> tuple[Tensor, Tensor]:
    r"""Signed distances to the two nearest boundaries, and the classes beyond them, (K, 2) each.

    .. math:: s_{ci} = \frac{z_i - z_c}{\|W_c - W_i\|},\qquad
              \|W_c - W_i\|^2 = \|W_c\|^2 + \|W_i\|^2 - 2\langle W_c, W_i\rangle

    over the classes ``start``, ``start + 1``, ... whose rows are ``block`` (B, D), but the own;
    the ``middle`` is taken off the rows.
    Squared lengths from products carry an error of the order of ``eps`` times the sizes. They are
    made smaller by that share, so that one comparison with 0 tells which pairs have no boundary:
    their distance is 0, as in :func:`~largemargin.ops.boundary.paired_boundary_distance`. NaN
    counts as the nearest, so that it is not hidden. On a GPU all but the two products is one
    kernel, and the products of many points are those of numbers split into three bfloat16.
    """
    share = 1 - 8 * torch.finfo(block.dtype).eps
    if _fused(block):
        from largemargin.ops.triton.rival_boundaries import launch, orders, product, split

        if given.parts is None:
            block = block - given.middle
            sizes = share * torch.linalg.vector_norm(block, dim=1).square()
            square, gap = given.doubled @ block.T, given.points @ block.T
        else:
            columns, sizes = split(block, given.middle, orders()[1], share)
            gap, square = product(given.parts, columns).chunk(2)
        own_size = share * given.own_size
        found: tuple[Tensor, Tensor] = launch(
            square, gap, sizes, bias, own_size, given.own_logit, given.own, start
        )
        return found
    block = block - given.middle
    sizes = share * torch.linalg.vector_norm(block, dim=1).square()
    square = torch.addmm(sizes, given.doubled, block.T).add_(share * given.own_size)
    gap = given.points @ block.T if bias is None else torch.addmm(bias, given.points, block.T)
    degenerate = square <= DEGENERATE**2
    gap.sub_(given.own_logit).mul_(square.rsqrt_()).masked_fill_(degenerate, 0.0)
    inside = (given.own >= start) & (given.own < start + len(block))
    column = (given.own - start).clamp(0, len(block) - 1)[:, None]
    kept = gap.gather(1, column).masked_fill(inside[:, None], -torch.inf)
    best, index = _best_two(gap.scatter_(1, column, kept))
    return best, index + start


def _best_two(distance: Tensor) -> tuple[Tensor, Tensor]:
    """The two largest of each row and where they are; overwrites. (topk is slower.)"""
    best = distance.max(1, keepdim=True)
    if distance.shape[1] == 1:
        return best.values, best.indices
    second = distance.scatter_(1, best.indices, -torch.inf).max(1, keepdim=True)
    values = torch.cat((best.values, second.values), 1)
    return values, torch.cat((best.indices, second.indices), 1)


def _fused(block: Tensor) -> bool:
    """Whether the kernel may be launched; on a CPU only for its interpreter, in tests."""
    if not plain_eager() or block.dtype != torch.float32 or len(block) < 2:
        return False  # compilers write such a kernel themselves
    on_device = block.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and importlib.util.find_spec("triton") is not None
