"""Class vectors that are not learned: the regular simplex, the best there is when it fits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_num_classes, check_number
from largemargin.heads.class_head import head_logits
from largemargin.heads.topk import TopClasses, flat_features, top_classes
from largemargin.shapes import Logits, Prototypes

torch.fx.wrap("head_logits")


def simplex(
    num_classes: int,
    dim: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Prototypes:
    r"""Unit vectors at equal and largest possible angles, :math:`w_i\cdot w_j = -1/(C-1)`.

    Rows of :math:`\sqrt{C/(C-1)}\,(I - 11^\top/C)` in the Helmert basis of the sum-zero
    hyperplane, :math:`h_k \propto (1, \dots, 1, -k, 0, \dots, 0)` with k ones, k = 1..C-1, padded
    with zeros to D. No pair of C <= D + 1 unit vectors can be further apart (LTLM Lemma 1). The
    entries are rounded once, from float64, so inner products are exact to the rounding of
    ``dtype``; time and memory are those of writing the matrix.

    Args:
        num_classes: C, at least 2.
        dim: D, at least C - 1.
        device, dtype: of the result; torch's defaults.

    Returns:
        (C, D).

    Raises:
        LargeMarginError: if D < C - 1. No simplex exists there;
            :func:`largemargin.heads.packing.best_packing` finds the next best thing.

    Example:
        >>> simplex(3, 2, dtype=torch.float64)
        tensor([[ 0.8660,  0.5000],
                [-0.8660,  0.5000],
                [ 0.0000, -1.0000]], dtype=torch.float64)
    """
    check_num_classes(num_classes)
    check_number("dim", dim, at_least=1)
    if dim < num_classes - 1:
        raise LargeMarginError(
            f"dim must be >= num_classes - 1 = {num_classes - 1} for a simplex of {num_classes} "
            f"classes, but {dim} was given. Use best_packing({num_classes}, {dim}).prototypes, "
            "which spreads the classes as far as that dimension allows, or widen the features."
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise LargeMarginError(
            f"dtype must be floating point, but {dtype} was given. Use torch.float32."
        )
    k = torch.arange(1, num_classes, device=device, dtype=torch.float64)
    length = num_classes / (num_classes - 1)
    ones = (length / (k * (k + 1))).sqrt().to(dtype)
    minus_k = -(length * k / (k + 1)).sqrt().to(dtype)
    rows = torch.zeros((num_classes, dim), device=device, dtype=dtype)
    square = rows[:, : num_classes - 1]
    square.copy_(ones.expand_as(square)).triu_()
    square.diagonal(-1).copy_(minus_k)
    return rows


class SimplexHead(nn.Module):
    r"""A classifier whose prototypes are a fixed simplex times one learned positive number.

    .. math:: l_j(q) = \langle a S_j, q\rangle, \qquad a = e^{\alpha} > 0

    The super-symmetric classifier of LMS section 3, :math:`w_c\cdot w_c = v`,
    :math:`w_c\cdot w_{c'} = -v/(C-1)`, at every step of training. The supplement that describes
    how LMS trained it is not available; fixed S and learned a is our reading. a starts at 1.

    ``weight`` is the (C, D) matrix a S, connected to a in the graph, so the head can stand wherever
    prototypes are taken from a head. S is a buffer and part of the state dict: features are trained
    against these very directions.

    Args:
        in_features: D, at least C - 1.
        num_classes: C, at least 2.
        device, dtype: of S and a.

    Shape:
        features (..., D) give logits (..., C).

    Example:
        >>> head = SimplexHead(2, 3)
        >>> head(head.weight).detach()
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]])
    """

    __call__: Callable[..., Logits]
    simplex: Tensor
    similarity = "dot"
    scale = 1.0
    bias: None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.num_classes = num_classes
        directions = simplex(num_classes, in_features, device=device, dtype=dtype)
        self.register_buffer("simplex", directions)
        self.log_scale = nn.Parameter(directions.new_zeros(()))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set a to 1 and write S again, as needed after ``to_empty``."""
        like = self.simplex
        like.copy_(
            simplex(self.num_classes, self.in_features, device=like.device, dtype=like.dtype)
        )
        self.log_scale.zero_()

    @property
    def weight(self) -> Prototypes:
        """a S, (C, D)."""
        return self.log_scale.exp() * self.simplex

    def logits(self, features: Tensor) -> Logits:
        """Logits (..., C) of features (..., D), float32 or float64."""
        return head_logits(features, self.simplex, None, "dot", self._float_scale())

    def forward(self, features: Tensor) -> Logits:
        return self.logits(features)

    def predict(self, features: Tensor, k: int = 1, *, chunk_size: int | None = None) -> TopClasses:
        """The k best classes and their logits, each (..., k); see
        :func:`largemargin.heads.topk.top_classes`."""
        best = top_classes(
            flat_features(features, self.in_features),
            self.simplex,
            scale=self._float_scale(),
            k=k,
            chunk_size=chunk_size,
        )
        return TopClasses(*(part.reshape(*features.shape[:-1], k) for part in best))

    def param_groups(
        self, *, lr: float | None = None, weight_decay: float | None = 0.0
    ) -> list[dict[str, Any]]:
        """One optimizer group, log a. Decay would pull a towards 1, so by default there is none;
        ``None`` leaves a setting to the optimizer."""
        settings = {"lr": lr, "weight_decay": weight_decay}
        given = {name: value for name, value in settings.items() if value is not None}
        return [{"params": [self.log_scale], **given}]

    def _float_scale(self) -> Tensor:
        wide = torch.promote_types(self.log_scale.dtype, torch.float32)
        return self.log_scale.to(wide).exp()

    def extra_repr(self) -> str:
        dtype = self.simplex.dtype
        return f"in_features={self.in_features}, num_classes={self.num_classes}" + (
            "" if dtype == torch.get_default_dtype() else f", dtype={dtype}"
        )
