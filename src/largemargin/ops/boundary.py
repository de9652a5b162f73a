"""Signed distances to the decision boundaries between pairs of classes (LMD 4.2, 4.6).

Of given pairs, of all pairs, and of the nearest one, which is searched without gradient in blocks
of classes.
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
EXACT_LIMIT = 2**20
"""Up to this many numbers, all pairs of prototypes are subtracted from each other directly."""
BLOCK = 2**22
"""Pairs of sample and class looked at together."""
GPU_BLOCK, GPU_NUMBERS = 2**24, 2**23
"""The same on a GPU, which waits for the launches of smaller blocks; and of class vectors."""
CANDIDATES = 2


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


def pair_distance(
    points: Tensor, weight: Tensor, own: Tensor, other: Tensor, bias: Tensor | None
) -> Tensor:
    """Signed distance for class pairs; ``other`` is (K,) or (K, J) rivals of each."""
    if other.dim() == 2:
        points, own = points[:, None], own[:, None]
    # One gather, so that the backward pass fills one array of the prototypes' size.
    count, index = own.numel(), torch.cat((own.flatten(), other.flatten()))
    rows = weight.index_select(0, index)
    mine = rows[:count].view(*own.shape, weight.shape[1])
    theirs = rows[count:].view(*other.shape, weight.shape[1])
    difference = None
    if bias is not None:
        biases = bias.index_select(0, index)
        difference = biases[count:].view(other.shape) - biases[:count].view(own.shape)
    return paired_boundary_distance(points, mine, theirs, difference)


def all_distances(points: Tensor, weight: Tensor, own: Tensor, bias: Tensor | None) -> Tensor:
    """(K, C) signed distances with gradient, the own column being 0."""
    if own.shape[0] * weight.numel() <= 16 * EXACT_LIMIT:
        every = torch.arange(weight.shape[0], device=own.device).expand(own.shape[0], -1)
        return pair_distance(points, weight, own, every, bias)
    return _gram_distances(points, weight, own, bias)


def _gram_distances(points: Tensor, weight: Tensor, own: Tensor, bias: Tensor | None) -> Tensor:
    """Signed distances from products of matrices, with gradient.

    Squared lengths come from a Gram matrix, so they carry a rounding error of the order of
    ``eps * ||W||^2``; lengths below that are treated as zero. The zero diagonal is replaced before
    the square root (its gradient there would be infinite).
    """
    mine = weight[own]
    logits = points @ weight.T
    own_logit = (points * mine).sum(1, keepdim=True)
    if bias is not None:
        logits, own_logit = logits + bias, own_logit + bias[own][:, None]
    sizes = safe_norm(mine).square()[:, None] + safe_norm(weight).square()
    square = (sizes - 2 * (mine @ weight.T)).scatter(1, own[:, None], 0.0)
    degenerate = square <= _noise(sizes.detach())
    length = torch.sqrt(torch.where(degenerate, 1.0, square))
    return torch.where(degenerate, 0.0, (logits - own_logit) / length)


def _noise(sizes: Tensor) -> Tensor:
    """Squared lengths from a Gram matrix mean nothing up to this."""
    return (8 * torch.finfo(sizes.dtype).eps * sizes).clamp_min(DEGENERATE**2)


def _block_size(samples: int, weight: Tensor) -> int:
    if weight.device.type == "cpu":
        return max(256, BLOCK // max(samples, 1))
    return max(256, min(GPU_BLOCK // max(samples, 1), GPU_NUMBERS // weight.shape[1]))


def nearest_rival(points: Tensor, weight: Tensor, own: Tensor, bias: Tensor | None) -> Tensor:
    """argmax over i != c of the signed distance (K,)."""
    num_classes = weight.shape[0]
    if own.shape[0] * weight.numel() <= EXACT_LIMIT:
        every = torch.arange(num_classes, device=own.device).expand(own.shape[0], -1)
        distance = pair_distance(points, weight, own, every, bias)
        return distance.scatter(1, own[:, None], -torch.inf).argmax(1)
    # Subtracting the mean row changes no difference of rows but shortens them, which keeps the
    # rounding error of the Gram matrix small; the logits' common shift is the same for all.
    middle = weight.mean(0)
    mine = weight.index_select(0, own) - middle
    own_bias = None if bias is None else bias.index_select(0, own)
    given = for_search(points, mine, own_bias, own, middle)
    size = _block_size(own.shape[0], weight)
    scores, indices = [], []
    for start in range(0, num_classes, size):
        block = slice(start, min(start + size, num_classes))
        near = None if bias is None else bias[block]
        best, index = nearest_two(given, weight[block], near, start)
        scores.append(best)
        indices.append(index)
    candidates = indices[0]
    if len(indices) > 1:
        score = torch.cat(scores, 1)
        chosen = score.topk(min(CANDIDATES, score.shape[1]), dim=1)
        candidates = torch.cat(indices, 1).gather(1, chosen.indices)
    exact = pair_distance(points, weight, own, candidates, bias)
    exact = exact.masked_fill(candidates == own[:, None], -torch.inf)
    return candidates.gather(1, exact.argmax(1, keepdim=True)).squeeze(1)


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
    best, index = gap.scatter_(1, column, kept).max(1, keepdim=True)
    if len(block) == 1:
        return best, index + start
    second, next_index = gap.scatter_(1, index, -torch.inf).max(1, keepdim=True)  # topk is slower
    return torch.cat((best, second), 1), torch.cat((index, next_index), 1) + start


def _fused(block: Tensor) -> bool:
    """Whether the kernel may be launched; on a CPU only for its interpreter, in tests."""
    if not plain_eager() or block.dtype != torch.float32 or len(block) < 2:
        return False  # compilers write such a kernel themselves
    on_device = block.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and importlib.util.find_spec("triton") is not None
