"""The learned class vectors of a classifier, and prediction with them.

A head holds prototypes and turns features into margin-free logits: the margin belongs to the loss,
so that ``model(x)`` predicts with the geometry it was trained with and never needs a label.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_count,
    check_num_classes,
    check_number,
    refuse_script,
)
from largemargin.heads.topk import TopClasses, flat_features, top_classes
from largemargin.ops.eager_gradients import cosine_logits
from largemargin.ops.matmul import resolve_precision
from largemargin.ops.norms import normalize
from largemargin.ops.scheduled_values import current
from largemargin.ops.similarity import SIMILARITIES, check_scale, similarity_logits
from largemargin.shapes import Logits
from largemargin.tracing import plain_eager


def head_logits(
    features: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    similarity: str,
    scale: float | Tensor,
) -> Logits:
    """Logits (..., C) of features (..., D); to torch.fx one operation, which it does not enter."""
    num_classes, dim = prototypes.shape[0], prototypes.shape[-1]
    if (
        similarity == "cosine"
        and bias is None
        and type(scale) is float
        and isinstance(features, Tensor)
        and features.is_floating_point()
        and features.shape[1:] == (dim,)
        and plain_eager()
    ):
        precision = resolve_precision(None, features, prototypes)
        return cosine_logits(features, prototypes, scale, precision)
    logits = similarity_logits(
        flat_features(features, dim),
        prototypes,
        bias=bias,
        similarity=similarity,
        scale=scale,
        checked=True,
    )
    if features.dim() == 2:
        return logits  # not a view of itself: FSDP warns about views
    return logits.reshape(*features.shape[:-1], num_classes)


torch.fx.wrap("head_logits")


class ClassHead(nn.Module):
    r"""Learned prototypes W, one row per class, and margin-free logits.

    .. math:: l_j(q) = s\,(\mathrm{sim}(q, W_j) + b_j)

    with the four similarities of :func:`largemargin.ops.similarity_logits`: ``"dot"`` is a plain
    linear classifier (LMD 3.3), ``"cosine"`` that of NormFace, CosFace and ArcFace (LTLM),
    ``"cosine_prototypes"`` that of A-Softmax, ``"euclidean"`` a classifier by distance. Products,
    norms and logits are never below float32, under autocast and for half precision parameters
    alike. ``weight`` and ``bias`` have the names and layout of ``nn.Linear``, so state dicts of
    the two can be exchanged.

    Args:
        in_features: D.
        num_classes: C, at least 2.
        similarity: sim; ``"dot"`` by default, the classifier of the papers' softmax baseline.
        scale: s > 0, 1 by default. Multiplies similarity and bias. A margin loss brings its own
            scale; give the head the same one if the size of the logits matters (probabilities).
        bias: whether b is learned. By default only for ``"dot"``: LTLM has no bias, and under
            ``"cosine"`` one would break the symmetry of the classes.
        device, dtype: of the parameters.

    Shape:
        ``weight`` (C, D), ``bias`` (C,) or None; features (..., D) give logits (..., C).

    Example:
        >>> head = ClassHead(2, 2, similarity="cosine", scale=10.0)
        >>> with torch.no_grad():
        ...     _ = head.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> head(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[6., 8.]])
        >>> head.predict(torch.tensor([[3.0, 4.0]])).classes
        tensor([[1]])
    """

    __call__: Callable[..., Logits]
    weight: nn.Parameter
    bias: nn.Parameter | None

    shaped_by_attach: bool = False
    """Whether similarity and scale are those that ``attach`` gave it, for a loss."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        similarity: str = "dot",
        scale: float = 1.0,
        bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("in_features", in_features, at_least=1)
        check_count("num_classes", num_classes, at_least=0)
        check_num_classes(num_classes)
        check_choice("similarity", similarity, SIMILARITIES)
        check_number("scale", scale, above=0, hint="It multiplies every logit.")
        check_scale(scale)
        check_choice("bias", bias, (None, True, False))
        self.in_features = in_features
        self.num_classes = num_classes
        self.similarity = similarity
        self.scale = float(scale)
        self.weight = nn.Parameter(
            torch.empty((num_classes, in_features), device=device, dtype=dtype)
        )
        if similarity == "dot" if bias is None else bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise ``"dot"`` as ``nn.Linear`` does, draw for draw.

        The others start from isotropic rows of norm about 1 (normal, standard deviation
        1/sqrt(D)): the gradient of a cosine is inversely proportional to the norm. Their bias
        starts at 0.
        """
        if self.weight.is_meta:
            return  # no numbers to draw, and pretending to would import the compiler: seconds
        bound = 1 / math.sqrt(self.in_features)
        if self.similarity == "dot":
            nn.init.kaiming_uniform_(self.weight.flatten(0, -2), a=math.sqrt(5))
            if self.bias is not None:
                nn.init.uniform_(self.bias, -bound, bound)
        else:
            nn.init.normal_(self.weight, std=bound)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        similarity: str = "dot",
        scale: float = 1.0,
        bias: bool | None = None,
    ) -> Self:
        """A head on the parameters of ``linear``: the same objects, so both train together.

        ``bias=None`` keeps the layer's bias under ``"dot"`` and leaves it out otherwise;
        ``True`` shares it under any similarity, ``False`` never.

        Example:
            >>> linear = nn.Linear(8, 3)
            >>> ClassHead.from_linear(linear, similarity="cosine").weight is linear.weight
            True
        """
        if not isinstance(linear, nn.Linear) or not isinstance(linear.weight, nn.Parameter):
            raise LargeMarginError(
                "linear must be an nn.Linear with a plain parameter as weight, but "
                f"{type(linear).__name__} was given. Remove parametrizations such as weight norm "
                "first, or build ClassHead(in_features, num_classes) and copy the weight into it."
            )
        if bias and linear.bias is None:
            raise LargeMarginError(
                "bias=True shares the bias of linear, but this nn.Linear has none. Pass bias=None."
            )
        head = cls(
            linear.in_features,
            linear.out_features,
            similarity=similarity,
            scale=scale,
            bias=False,
            device="meta",
        )
        head.weight = linear.weight
        if similarity == "dot" if bias is None else bias:
            head.bias = linear.bias
        return head.train(linear.training)

    def logits(self, features: Tensor) -> Logits:
        """Margin-free logits (..., C) of features (..., D), float32 or float64."""
        scale = current(self, "scale")
        return head_logits(features, self.weight, self.bias, self.similarity, scale)

    __prepare_scriptable__ = refuse_script

    def forward(self, features: Tensor) -> Logits:
        scale = current(self, "scale")
        return head_logits(features, self.weight, self.bias, self.similarity, scale)

    def predict(
        self,
        features: Tensor,
        k: int = 1,
        *,
        chunk_size: int | None = None,
        precision: str | None = None,
    ) -> TopClasses:
        """The k best classes and their logits, each (..., k), best first, without gradient.

        Never holds all logits: see :func:`top_classes`, also for ``chunk_size`` and ``precision``.
        """
        best = top_classes(
            flat_features(features, self.in_features),
            self.weight,
            bias=self.bias,
            similarity=self.similarity,
            scale=self.scale,
            k=k,
            chunk_size=chunk_size,
            precision=precision,
        )
        return TopClasses(*(part.reshape(*features.shape[:-1], k) for part in best))

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        r"""A plain ``nn.Linear`` that predicts the same classes, for export and serving.

        ========================  ==================================  ===========================
        similarity                weight, bias                        its output
        ========================  ==================================  ===========================
        ``"dot"``                 :math:`sW_j,\ sb_j`                 equals :math:`l`
        ``"cosine_prototypes"``   :math:`s\hat W_j,\ sb_j`            equals :math:`l`
        ``"euclidean"``           :math:`sW_j,\ s(b_j-½\|W_j\|^2)`    :math:`l + s½\|q\|^2`: same
                                                                      softmax and order
        ``"cosine"``              :math:`s\hat W_j`                   :math:`\|q\|\,l`: same order;
                                                                      equals :math:`l` for unit q
        ========================  ==================================  ===========================

        The layer owns copies in the head's dtype. A cosine head with a bias has no such layer,
        because the factor :math:`\|q\|` would not reach the bias, and raises.
        """
        if self.similarity == "cosine" and self.bias is not None:
            raise LargeMarginError(
                "to_linear needs bias=None under similarity='cosine', but this head has a bias: "
                "a linear layer would multiply the cosines, not the bias, by the feature norm and "
                "predict other classes. Export the head itself, or normalise the features and "
                "use similarity='cosine_prototypes'."
            )
        weight, bias = self.weight.detach(), self.bias
        if self.similarity.startswith("cosine"):
            weight = normalize(weight)
        offset = None if bias is None else self.scale * bias
        if self.similarity == "euclidean":
            wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
            half_square = -0.5 * self.scale * wide.square().sum(1)
            offset = half_square if offset is None else offset + half_square
        linear = nn.Linear(
            self.in_features,
            self.num_classes,
            bias=offset is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        linear.weight.copy_(self.scale * weight)
        if offset is not None:
            linear.bias.copy_(offset)
        return linear.train(self.training)

    def param_groups(
        self,
        *,
        lr: float | None = None,
        weight_decay: float | None = None,
        bias_weight_decay: float | None = 0.0,
    ) -> list[dict[str, Any]]:
        """Optimizer groups for the head: the weight, then the bias where there is one.

        ``None`` leaves a setting to the optimizer's default. The bias is not decayed unless asked
        for: decay would pull class priors towards uniform. Under the cosine similarities decay
        does not change the logits, it only keeps the norms, and so the step in angle, from
        drifting.

        Example:
            >>> head = ClassHead(8, 3)
            >>> optimizer = torch.optim.SGD(head.param_groups(lr=0.1, weight_decay=5e-4), lr=0.01)
            >>> [group["weight_decay"] for group in optimizer.param_groups]
            [0.0005, 0.0]
        """
        groups: list[dict[str, Any]] = []
        for parameter, decay in ((self.weight, weight_decay), (self.bias, bias_weight_decay)):
            if parameter is None:
                continue
            settings = {"lr": lr, "weight_decay": decay}
            given = {name: value for name, value in settings.items() if value is not None}
            groups.append({"params": [parameter], **given})
        return groups

    def extra_repr(self) -> str:
        dtype = self.weight.dtype
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, "
            f"similarity={self.similarity!r}, scale={self.scale}, bias={self.bias is not None}"
            + ("" if dtype == torch.get_default_dtype() else f", dtype={dtype}")
        )
