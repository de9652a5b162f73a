"""The learned class vectors of a classifier, and prediction with them.

A head holds prototypes and turns features into margin-free logits: the margin belongs to the loss,
so that ``model(x)`` predicts with the geometry it was trained with and never needs a label.
"""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_num_classes,
    check_number,
)
from largemargin.ops import SIMILARITIES, normalize, similarity_logits
from largemargin.ops.moving import live
from largemargin.shapes import Features, Logits, Prototypes

CHUNK_ELEMENTS = 2**24
"""Scores held at a time by a prediction that is not told its chunk size: 64 MiB in float32."""


class Prediction(NamedTuple):
    """The best classes of each sample, best first."""

    scores: Tensor
    """(..., k) logits."""
    classes: Tensor
    """(..., k) int64 class indices."""


def flat_features(features: Tensor, in_features: int) -> Features:
    """Features of shape (..., D) as the (N, D) matrix the operators take."""
    if not isinstance(features, Tensor):
        raise LargeMarginError(
            f"features must be a tensor of shape (..., {in_features}), but "
            f"{type(features).__name__} was given. Convert arrays with torch.as_tensor."
        )
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise LargeMarginError(
            f"features must have shape (..., D) with D = in_features = {in_features}, but their "
            f"shape is {tuple(features.shape)}. Pass the output of the layer before the head, or "
            "build the head with the width of that output."
        )
    return features.unsqueeze(0) if features.dim() == 1 else features.flatten(0, -2)


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, ties in favour of the lower column."""
    if k == 1:
        values, columns = scores.max(dim=1, keepdim=True)  # documented to return the first one
        return values, columns
    values, columns = scores.topk(k, dim=1)
    last = values[:, -1:]
    if bool(((scores == last).sum(1) > (values == last).sum(1)).any()):
        # topk returned some of the entries that tie for the last place; a stable sort, ten times
        # slower, tells which come first.
        values, columns = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :k], columns[:, :k]
    columns = columns.sort(dim=1).values
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


@torch.no_grad()
def top_classes(
    features: Features,
    prototypes: Prototypes,
    *,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    k: int = 1,
    chunk_size: int | None = None,
) -> Prediction:
    """The k classes of largest logit for each sample, without an (N, C) buffer and without graph.

    Classes are scored ``chunk_size`` at a time and merged into a running best. Equal scores are
    ordered by class index, whatever the chunk size; note that chunks of different width may round
    a matrix product differently, so scores agree across chunk sizes to rounding.

    Args:
        features: (N, D).
        prototypes: (C, D).
        bias, similarity, scale: as in :func:`largemargin.ops.similarity_logits`.
        k: classes per sample, 1 to C.
        chunk_size: classes scored at a time; by default as many as keep N times it below 2**24.

    Example:
        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> top_classes(torch.tensor([[3.0, 4.0]]), W, k=2, chunk_size=1)
        Prediction(scores=tensor([[4., 3.]]), classes=tensor([[1, 0]]))
    """
    num_samples, num_classes = features.shape[0], prototypes.shape[0]
    check_number(
        "k", k, at_least=1, at_most=num_classes, hint=f"There are {num_classes} classes to rank."
    )
    if chunk_size is None:
        chunk_size = max(CHUNK_ELEMENTS // max(num_samples, 1), 256)
    check_number("chunk_size", chunk_size, at_least=1, hint="It counts classes.")
    best: tuple[Tensor, Tensor] | None = None
    for start in range(0, num_classes, chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = similarity_logits(
            features,
            prototypes[chunk],
            bias=None if bias is None else bias[chunk],
            similarity=similarity,
            scale=scale,
        )
        scores, classes = best_of(logits, min(k, logits.shape[1]))
        classes = classes + start
        if best is not None:
            # The running best holds lower class indices and stands to the left, so ties keep it.
            scores, classes = torch.cat((best[0], scores), 1), torch.cat((best[1], classes), 1)
            scores, order = best_of(scores, min(k, scores.shape[1]))
            classes = classes.gather(1, order)
        best = scores, classes
    assert best is not None
    return Prediction(*best)


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

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        check_number("in_features", in_features, at_least=1)
        check_num_classes(num_classes)
        check_choice("similarity", similarity, SIMILARITIES)
        check_number("scale", scale, above=0, hint="It multiplies every logit.")
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
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
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
        logits = similarity_logits(
            flat_features(features, self.in_features),
            self.weight,
            bias=self.bias,
            similarity=self.similarity,
            scale=live(self, "scale"),
        )
        if features.dim() == 2:
            return logits  # not a view of itself: FSDP warns about views
        return logits.reshape(*features.shape[:-1], self.num_classes)

    def forward(self, features: Tensor) -> Logits:
        return self.logits(features)

    def predict(self, features: Tensor, k: int = 1, *, chunk_size: int | None = None) -> Prediction:
        """The k best classes and their logits, each (..., k), best first, without gradient.

        Never holds all logits: see :func:`top_classes`, also for ``chunk_size``.
        """
        best = top_classes(
            flat_features(features, self.in_features),
            self.weight,
            bias=self.bias,
            similarity=self.similarity,
            scale=self.scale,
            k=k,
            chunk_size=chunk_size,
        )
        return Prediction(*(part.reshape(*features.shape[:-1], k) for part in best))

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
