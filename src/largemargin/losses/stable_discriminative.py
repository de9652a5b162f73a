"""The discriminative loss in units of the feature scale, for ordinary learning rates."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_all_finite, check_choice, check_inputs, check_number
from largemargin.heads.centroid_bank import NO_SOFT, FirstSeen, Strategy
from largemargin.losses.base.classwise import ClassBatch
from largemargin.losses.base.loss import LossOptions, MarginCeiling
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.centroid_margin import Aggregate
from largemargin.losses.compactness import hinge_to_center
from largemargin.losses.discriminative import Discriminative
from largemargin.ops.distributed import all_reduce_sum, gather_numbers
from largemargin.ops.norms import EPS, promote, safe_norm

Gradient: TypeAlias = Literal["bounded", "exact", "detached"]
GRADIENTS: tuple[Gradient, ...] = ("bounded", "exact", "detached")


class StableDiscriminative(Discriminative):
    r"""The discriminative loss (NGY-4.3) in units of the feature scale, with bounded gradients.

    .. math:: L = \alpha\,\frac1{|C_B|}\sum_c\frac1{n_c}\sum_{y_n=c}
                  h_\tau\!\left(\left[\|m_c - z_n\| - \delta_v\right]_+\right)
                + \beta\,\frac1{|C_B|}\sum_c\max_{i\ne c}\,[\delta_d + s_{ci}(m_c)]_+

    .. math:: z_n = \frac{q_n}{\sigma},\quad
              \sigma = \sqrt{\tfrac1N\textstyle\sum_n\|q_n\|^2},\quad
              s_{ci}(m) = \frac{\langle W_i - W_c, m\rangle + (b_i - b_c)/\sigma}{\|W_c - W_i\|},
              \quad h_\tau(u) = \begin{cases}u^2 & u\le\tau\\ 2\tau u-\tau^2 & u>\tau\end{cases}

    The centroids m_c are those of the scaled features z, also in the bank. Train with
    ``CrossEntropy`` beside it: ``Objective(softmax=CrossEntropy(),
    lmd=StableDiscriminative(10, 512))``. The same defaults serve every backbone.

    Why each change (measured by ``benchmarks/discriminative_stability.py``):

    * *Units.* The printed loss measures in feature units: a margin of 6 and a radius of 0.5
      whatever the features' size. Here (q, b) and any multiple of it, the map T_alpha of LMD Prop.
      4.4, have the same loss, as they have the same predictions: neither growing nor shrinking
      features pays.
    * *Bounded gradient* (default): the derivative of the above is of size 1 / sigma, which kills a
      network whose features start tiny, and does not care how long the prototypes are, while those
      of a head that starts at zero point nowhere. It is multiplied by min(1, sigma) and min(1,
      omega), omega the root mean square distance of prototypes, as the softmax loss's own gradient
      is; in b / sigma the scale is a constant. So no gradient points along the features' common
      scale (:math:`\sum_n\langle q_n,\nabla_{q_n}L\rangle = 0`).
    * *Linear tail.* Centroids of the bank stay behind when features move; the square of that
      distance is what makes the printed form diverge. Beyond tau the pull is constant, 2 tau = 1,
      as strong as the margin pushes a centroid.
    * *Detached classifier.* The margin moves features, the softmax loss moves the boundaries. With
      gradient, prototypes and bias get 1 / \|W_c - W_i\| and 1 / sigma of it.
    * *No norm term.* L_reg holds the growth that the margin causes; here it causes none.

    Args:
        num_classes: C.
        dim: D, the feature dimension.
        alpha, beta: weights of the terms; 1 and 1 (LMD section 7).
        radius: delta_v in units of sigma, default 0.05.
        margin: delta_d in units of sigma, default 0.6: with the radius the ratio 12 of LMD 7.3 (6
            and 0.5). Balanced classes can reach :math:`\sqrt{C/(2(C-1))}` at most (0.745 for
            C = 10, ``loss.ceiling``): every pair needs :math:`\|m_c-m_i\|\ge2\delta_d`, while the
            mean of :math:`\|m_c-m_i\|^2` over all pairs is at most 2 C / (C - 1).
        tail: tau in units of sigma, default 0.5; ``math.inf`` for the plain square.
        gradient: "bounded" (default); "exact", the derivative of the value; "detached", the
            derivative with sigma as a constant.
        aggregate, strategy, momentum, first_seen, accumulate: as :class:`Discriminative`.
        detach_classifier: keep the margin from training prototypes and bias. Default True.
        options: those of every :class:`Loss`.

    Departures: all of the above from LMD (4.3), on purpose; :class:`Discriminative` is exact.
    Props. 4.1 and 4.2 hold in units of sigma.

    Example:
        Features four times as long cost the same, and nothing where they meet the margin:

        >>> loss, labels = StableDiscriminative(2, 2).eval(), torch.tensor([0, 1])
        >>> loss(torch.eye(2), torch.eye(2), labels), loss(4 * torch.eye(2), torch.eye(2), labels)
        (tensor(0.), tensor(0.))
        >>> loss(torch.eye(2).flip(0), torch.eye(2), labels)
        tensor(1.3071)
    """

    key: ClassVar[str] = "stable_discriminative"
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "margin": Range(0.2, 0.7, log=False),
        "radius": Range(0.01, 0.3),
        "tail": Range(0.1, 2.0),
    }
    has_norm: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        radius: float = 0.05,
        margin: float = 0.6,
        tail: float = 0.5,
        gradient: Gradient = "bounded",
        aggregate: Aggregate = "max",
        strategy: Strategy = "partial",
        momentum: float = 0.99,
        first_seen: FirstSeen = "scaled",
        accumulate: int | None = 1,
        detach_classifier: bool = True,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(
            num_classes,
            dim,
            alpha=alpha,
            beta=beta,
            gamma_reg=0.0,
            radius=radius,
            margin=margin,
            aggregate=aggregate,
            strategy=strategy,
            momentum=momentum,
            first_seen=first_seen,
            accumulate=accumulate,
            detach_classifier=detach_classifier,
            **options,
        )
        if tail != math.inf:
            check_number("tail", tail, above=0)
        check_choice("gradient", gradient, GRADIENTS)
        self.tail = tail
        self.gradient: Gradient = gradient

    @property
    def ceiling(self) -> float:
        """The widest margin that balanced classes can reach, in units of the feature scale."""
        return math.sqrt(self.num_classes / (2 * (self.num_classes - 1)))

    @property
    def part_weights(self) -> dict[str, float]:
        return {"compact": self.alpha, "margin": self.beta}

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("margin (in units of the feature scale)", self.margin, self.ceiling)]

    def _in_units(
        self, features: Tensor, matrix: Tensor, labels: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Features and bias over the scale of the features that count."""
        check_inputs(
            features, matrix, labels, bias=bias, soft=False, reason=NO_SOFT, validate=False
        )
        valid = (labels >= 0) & (labels < matrix.shape[0])
        if self.ignore_index is not None:
            valid = valid & (labels != self.ignore_index)
        kept = promote(torch.where(valid[:, None], features, 0))
        if self.check_finite:
            check_all_finite(features=kept)
        scale = _scale_of(kept, valid.to(kept.dtype), self._synced)
        held = scale.detach()
        positive = held > EPS
        inverse = torch.where(positive, 1 / torch.where(positive, held, 1), 0)
        # The number 1 with the gradient of the scale: no square of the scale is ever formed.
        unit = torch.where(positive, scale * inverse, 1)
        scaled, offset = kept * inverse, None if bias is None else promote(bias) * inverse
        if self.gradient != "detached":
            scaled = scaled / unit
        if self.gradient == "exact" and offset is not None:
            offset = offset / unit
        if self.gradient == "bounded":
            factor = held.clamp_max(1) * _typical_distance(matrix).clamp_max(1)
            scaled = _stretch(scaled, factor)
            offset = None if offset is None else _stretch(offset, factor)
        return scaled, offset

    def _to_center(self, features: Tensor, batch: ClassBatch) -> Tensor:
        centers = batch.of_samples(batch.centroids.compact)
        hinge = hinge_to_center(batch.kept(features), centers, self.radius, 1)
        return linear_tail(hinge, self.tail)


def feature_scale(features: Tensor, *, sync: bool = False) -> Tensor:
    r"""Root mean square of the features' norms, :math:`\sigma = \sqrt{\frac1N\sum_n\|q_n\|^2}`.

    With ``sync`` over the joined batch of all ranks. Subgradient 0 where all features are 0.

    Example:
        >>> feature_scale(torch.tensor([[3.0, 4.0], [5.0, 0.0]]))
        tensor(5.)
    """
    return _scale_of(features, torch.ones_like(features[:, 0]), sync)


def linear_tail(hinge: Tensor, tail: float) -> Tensor:
    """The square up to ``tail``, from there the tangent: slope at most 2 ``tail``."""
    capped = hinge.clamp_max(tail)
    return capped * (2 * hinge - capped)


def _scale_of(features: Tensor, weights: Tensor, sync: bool) -> Tensor:
    """The scale of the rows with weight 1; the others are zero already."""
    # One zero more: the norm of an empty batch is 0 too.
    size, count = safe_norm(F.pad(safe_norm(features), (0, 1))), promote(weights).sum()
    if sync:
        # Not the sum of squares, which may leave the range of float32.
        size, count = safe_norm(gather_numbers(size)), all_reduce_sum(count)
    return size / count.clamp_min(1).sqrt()


def _typical_distance(matrix: Tensor) -> Tensor:
    """Root mean square of the distances between prototypes."""
    rows = promote(matrix.detach())
    spread = _scale_of(rows - rows.mean(0), torch.ones_like(rows[:, 0]), False)
    return spread * math.sqrt(2 * rows.shape[0] / (rows.shape[0] - 1))


def _stretch(x: Tensor, factor: Tensor) -> Tensor:
    """``x``, with its gradient multiplied by ``factor``."""
    stretched = factor * x
    return x.detach() + (stretched - stretched.detach())
