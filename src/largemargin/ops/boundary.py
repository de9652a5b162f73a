"""Signed distances to the decision boundaries between pairs of classes (LMD 4.2, 4.6)."""

import torch
from torch import Tensor

from largemargin.errors import check_classifier, check_num_classes
from largemargin.ops.rows import promote, safe_norm

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
