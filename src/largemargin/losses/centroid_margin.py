"""Centroid margin: keep class centroids away from every decision boundary (LMD 4.5, 4.7)."""

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import check_choice, check_inputs, check_matrix, check_number
from largemargin.heads.centroid_bank import NO_SOFT, CentroidBank
from largemargin.heads.head_spec import boundary_form
from largemargin.losses.base.classwise import ClassWise
from largemargin.losses.base.loss import LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.base.terms import check_setting, matrix_of
from largemargin.ops.boundary import all_distances, nearest_rival, pair_distance
from largemargin.ops.matmul import without_autocast
from largemargin.ops.norms import promote, safe_norm
from largemargin.ops.scheduled_values import current
from largemargin.ops.shards import refuse_sharded
from largemargin.shapes import Labels, Prototypes

Aggregate: TypeAlias = Literal["max", "mean"]
AGGREGATES: tuple[Aggregate, ...] = ("max", "mean")

_PAIRS = "it compares class vectors with each other."


class CentroidMargin(ClassWise):
    r"""Centroid margin (NGY-4.5): the mean over the classes present, each at its centroid m_c.

    .. math:: \max_{i\ne c}\,[\delta_d + s_{ci}(m_c)]_+,\qquad
              s_{ci}(m) = \frac{z_i(m) - z_c(m)}{\|W_c - W_i\|}

    s is the signed distance of the centroid to the boundary between c and i, negative on its own
    side; i runs over all C classes, in the batch or not. Gradients go to the centroids, to the
    prototypes and to the bias, through numerator and denominator (O3).

    The nearest rival is searched without gradient, in blocks of classes, and only the winning pair
    is computed with gradient: no (C, C) array, and no zero diagonal whose square root has a NaN
    gradient. Large problems are searched by Gram matrices and the best few candidates compared
    exactly.

    Args:
        margin: delta_d; 6.0 (default, LMD 7.3), 5.0 (ROB H.1), 3.0 (ROB H.2), 1.5 (LMD Fig. 1).
        power: 1 (default: the pull stays constant until the margin is reached) or 2.
        aggregate: "max" (default); "mean" is an ablation: hinge first, then the mean over rivals.
        detach_classifier: train the features only, not prototypes and bias (O3). Default False.
        bank: a ``CentroidBank``; under its strategies none and partial the batch's own centroids
            are used, with full gradient.
        options: those of every :class:`Loss`.

    Departures: erratum N1, the signed ratio instead of sign times distance, which has no gradient
    on the boundary. Two prototypes that coincide have no boundary: the constant delta_d (O17).

    Example:
        A centroid on the boundary costs the whole margin:

        >>> CentroidMargin()(torch.ones(1, 2), torch.eye(2), torch.tensor([0]))
        tensor(6.)
    """

    key: ClassVar[str] = "centroid_margin"
    search_space: ClassVar[Mapping[str, Dimension]] = {"margin": Range(1.0, 12.0)}
    uses_bias: ClassVar[bool] = True

    def __init__(
        self,
        *,
        margin: float = 6.0,
        power: int = 1,
        aggregate: Aggregate = "max",
        detach_classifier: bool = False,
        bank: CentroidBank | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(bank=bank, **options)
        check_number("margin", margin, at_least=0)
        check_choice("power", power, (1, 2))
        check_choice("aggregate", aggregate, AGGREGATES)
        self.margin = margin
        self.power = power
        self.aggregate: Aggregate = aggregate
        self.detach_classifier = detach_classifier

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        matrix, bias = classifier_of(prototypes, bias)
        batch = self.batch(features, matrix, labels, bias=bias, sample_weight=sample_weight)
        if self.detach_classifier:
            matrix, bias = matrix.detach(), None if bias is None else bias.detach()
        values = centroid_margin(
            batch.centroids.margin,
            matrix,
            batch.slots.classes,
            bias=bias,
            margin=current(self, "margin"),
            power=self.power,
            aggregate=self.aggregate,
            validate=False,
        )
        return self.mean_over_classes(values, batch)


def centroid_margin(
    centroids: Prototypes,
    prototypes: Prototypes,
    classes: Labels,
    *,
    bias: Tensor | None = None,
    margin: float = 6.0,
    power: int = 1,
    aggregate: Aggregate = "max",
    validate: bool | None = None,
) -> Tensor:
    """Centroid margin of given centroids; the equation and the settings: :class:`CentroidMargin`.

    Args:
        centroids: (K, D), one per class listed.
        prototypes: (C, D), the rows of the linear classifier.
        classes: (K,), the class of each centroid.
        bias: (C,).

    Returns:
        (K,).
    """
    check_setting("margin", margin, at_least=0)
    check_choice("power", power, (1, 2))
    check_choice("aggregate", aggregate, AGGREGATES)
    refuse_sharded(prototypes, "centroid_margin", _PAIRS)
    check_inputs(
        centroids, prototypes, classes, bias=bias, soft=False, reason=NO_SOFT, validate=validate
    )
    with without_autocast(centroids):
        points, weight = promote(centroids), promote(prototypes)
        bias = None if bias is None else promote(bias)
        own = classes.long().clamp(0, weight.shape[0] - 1)
        if aggregate == "max":
            with torch.no_grad():
                rival = nearest_rival(points, weight, own, bias)
            hinge = F.relu(margin + pair_distance(points, weight, own, rival, bias))
            values = hinge if power == 1 else hinge.square()
        else:
            hinge = F.relu(margin + all_distances(points, weight, own, bias))
            hinge = hinge if power == 1 else hinge.square()
            values = hinge.scatter(1, own[:, None], 0.0).sum(1) / (weight.shape[0] - 1)
        return values.masked_fill(own != classes.long(), torch.nan)


class CentroidNorm(ClassWise):
    r"""Centroid norm (NGY-4.7; LMD 4.7, ROB 11), :math:`\|m_c\|`, mean over the classes present.

    Not squared. Keeps the margin loss from growing the features without limit; its weight is 1e-3
    in LMD. Subgradient 0 at the origin.

    Args:
        bank: a ``CentroidBank``; None uses the batch's own centroids.
        options: those of every :class:`Loss`.

    Example:
        >>> CentroidNorm()(torch.tensor([[3.0, 4.0]]), torch.eye(2), torch.tensor([0]))
        tensor(5.)
    """

    key: ClassVar[str] = "centroid_norm"

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        batch = self.batch(features, prototypes, labels, sample_weight=sample_weight)
        return self.mean_over_classes(centroid_norm(batch.centroids.margin), batch)


def centroid_norm(centroids: Prototypes) -> Tensor:
    """Norm of each centroid (K, D), of shape (K,): see :class:`CentroidNorm`."""
    check_matrix("centroids", centroids, "(K, D)")
    return safe_norm(centroids)


def classifier_of(
    prototypes: Tensor | nn.Module, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the linear classifier whose boundaries are those of the head."""
    if bias is None and not isinstance(prototypes, Tensor):
        bias = getattr(prototypes, "bias", None)
    matrix = matrix_of(prototypes)
    refuse_sharded(matrix, "the centroid margin", _PAIRS)
    return boundary_form(prototypes, matrix, bias)
