"""The discriminative loss, its robust sequel and its stable form (LMD 4.3; ROB 7, 13)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_choice,
    check_inputs,
    check_number,
    refuse_transform,
)
from largemargin.heads.centroid_bank import (
    NO_SOFT,
    BatchCentroids,
    CentroidBank,
    FirstSeen,
    Strategy,
    class_means,
    recomputing,
)
from largemargin.heads.head_spec import HeadView
from largemargin.losses.base.classwise import ClassBatch, ClassWise
from largemargin.losses.base.loss import LossOptions, LossValue, MarginCeiling, all_count
from largemargin.losses.base.schedules import Ramp, Schedule, share_of
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.base.settings import size_as_built
from largemargin.losses.centroid_margin import (
    AGGREGATES,
    Aggregate,
    centroid_margin,
    centroid_norm,
    classifier_of,
)
from largemargin.losses.compactness import check_hinge, hinge_to_center
from largemargin.losses.cross_entropy import CrossEntropy
from largemargin.losses.stability import check_noisy
from largemargin.ops.centroid_terms import (
    CentroidTerms,
    centroid_terms,
    gradients_again,
    kernel_terms,
    kernels_serve,
)
from largemargin.ops.distributed import all_reduce_sum, gather_numbers
from largemargin.ops.matmul import without_autocast
from largemargin.ops.norms import EPS, batched_gradient, promote, safe_norm
from largemargin.ops.scheduled_values import current
from largemargin.tracing import plain_eager, value_range, values_are_checked

Gradient: TypeAlias = Literal["bounded", "exact", "detached"]
GRADIENTS: tuple[Gradient, ...] = ("bounded", "exact", "detached")
WEIGHTS = {"compact": "alpha", "margin": "beta", "reg": "gamma_reg"}


class Discriminative(ClassWise):
    r"""Large-margin discriminative loss (NGY-4.3; LMD 4.3).

    .. math:: L = \alpha L_{compact} + \beta L_{margin} + \gamma_{reg} L_{reg}

    Compactness pulls features into a ball of radius delta_v around their class centroid
    (:class:`Compactness`), the margin pushes centroids delta_d away from every decision boundary
    (:class:`CentroidMargin`), the norm keeps them from growing (:class:`CentroidNorm`). Train with
    ``CrossEntropy`` beside it: ``Objective(softmax=CrossEntropy(), lmd=Discriminative(10, 30))``.
    It can diverge at learning rates above 0.001: clip gradients, or take
    :class:`~largemargin.StableDiscriminative`.

    Args:
        num_classes: C.
        dim: D, the feature dimension.
        alpha, beta, gamma_reg: weights of the terms; 1, 1 and 1e-3 (LMD section 7).
        radius: delta_v, default 0.5 (LMD 7.2).
        margin: delta_d, default 6.0 (LMD 7.3). Only delta_d / delta_v matters up to a rescaling of
            the network (LMD Prop. 4.4); delta_d > 2 delta_v makes ideal features (Prop. 4.2).
        compact_power, margin_power: 2 and 1 (LMD 4.5).
        aggregate: over rivals, "max" (default) or "mean".
        strategy: of the centroids: "partial" (default), "both", "none".
        momentum: gamma, default 0.99 (LMD 7.1).
        first_seen, accumulate: of the bank, see ``CentroidBank``.
        detach_classifier: keep the margin from training prototypes and bias (O3).
        options: those of every :class:`Loss`.

    Departures: errata N1, N2 (no claim about the classifier's gradient).

    Example:
        >>> loss = Discriminative(2, 2, margin=1.0)
        >>> loss(4 * torch.eye(2), torch.eye(2), torch.tensor([0, 1]))
        tensor(0.0040)
    """

    key: ClassVar[str] = "discriminative"
    gathers_classes: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "margin": Range(1.0, 12.0),
        "radius": Range(0.05, 2.0),
        "alpha": Range(0.05, 5.0),
        "beta": Range(0.05, 5.0),
        "gamma_reg": Range(1e-5, 1e-2),
    }
    uses_bias: ClassVar[bool] = True

    tail: float | None = None
    """From where on compactness grows linearly; None for its power."""

    has_norm: ClassVar[bool] = True
    """Whether there is a term L_reg."""

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma_reg: float = 1e-3,
        radius: float = 0.5,
        margin: float = 6.0,
        compact_power: int = 2,
        margin_power: int = 1,
        aggregate: Aggregate = "max",
        strategy: Strategy = "partial",
        momentum: float = 0.99,
        first_seen: FirstSeen = "scaled",
        accumulate: int | None = 1,
        detach_classifier: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        for name, value in (("alpha", alpha), ("beta", beta), ("gamma_reg", gamma_reg)):
            check_number(name, value, at_least=0)
        check_hinge(radius, compact_power, "compact_power")
        check_number("margin", margin, at_least=0)
        check_choice("margin_power", margin_power, (1, 2))
        check_choice("aggregate", aggregate, AGGREGATES)
        self.bank: CentroidBank = CentroidBank(
            num_classes,
            dim,
            strategy=strategy,
            momentum=momentum,
            first_seen=first_seen,
            accumulate=accumulate,
            sync=self.sync,
        )
        if self.reduction == "none":
            raise LargeMarginError(
                'reduction must be "mean" or "sum" here: the three terms are per sample and per '
                "class and cannot be added unreduced. Use Compactness, CentroidMargin and "
                "CentroidNorm for the single ones."
            )
        self.num_classes = num_classes
        self.dim = dim
        self.alpha = alpha
        self.beta = beta
        self.gamma_reg = gamma_reg
        self.radius = radius
        self.margin = margin
        self.compact_power = compact_power
        self.margin_power = margin_power
        self.aggregate: Aggregate = aggregate
        self.detach_classifier = detach_classifier

    @property
    def strategy(self) -> Strategy:
        return self.bank.strategy

    @property
    def momentum(self) -> float:
        return self.bank.momentum

    @property
    def first_seen(self) -> FirstSeen:
        return self.bank.first_seen

    @property
    def accumulate(self) -> int | None:
        return self.bank.accumulate

    @property
    def part_weights(self) -> dict[str, float]:
        """What each of the named terms is multiplied by."""
        return {"compact": self.alpha, "margin": self.beta, "reg": self.gamma_reg}

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """delta_d from 0, linearly over the first 10 %: ours, the papers have none."""
        steps = share_of(total_steps, 0.1)
        return (
            [Ramp(f"{term}.margin", 0.0, steps=steps)] if size_as_built(self, "margin") > 0 else []
        )

    def named_terms(
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> LossValue:
        """The total and its unweighted terms compact, margin, reg."""
        if sample_weight is not None:
            self._refuse("sample_weight", True)
        features, matrix, bias = self._classifier(features, prototypes, labels, bias)
        view = prototypes if isinstance(prototypes, HeadView) else None
        value = self._by_hand(features, matrix, labels, bias, view)
        return self._by_batch(features, matrix, labels, bias)[0] if value is None else value

    def _classifier(
        self, features: Tensor, prototypes: Tensor | nn.Module, labels: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features, class vectors and bias as the terms see them."""
        matrix, bias = classifier_of(prototypes, bias)
        if self.detach_classifier:
            matrix, bias = matrix.detach(), None if bias is None else bias.detach()
        features, bias = self._in_units(features, matrix, labels, bias)
        return features, matrix, bias

    def _by_batch(
        self, features: Tensor, matrix: Tensor, labels: Tensor, bias: Tensor | None
    ) -> tuple[LossValue, ClassBatch]:
        """The terms by autograd, for all settings; and the batch they are of."""
        batch = self.batch(features, matrix, labels, bias=bias)
        compact = self.mean_over_samples(self._to_center(features, batch), batch)
        distances = centroid_margin(
            batch.centroids.margin,
            matrix,
            batch.slots.classes,
            bias=bias,
            margin=current(self, "margin"),
            power=self.margin_power,
            aggregate=self.aggregate,
            validate=False,
        )
        margin, norm = self.mean_over_classes(distances, batch), None
        if self.has_norm:
            norm = self.mean_over_classes(centroid_norm(batch.centroids.margin), batch)
        return self._weighed(compact, margin, norm), batch

    def _by_hand(
        self,
        features: Tensor,
        matrix: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        view: HeadView | None,
    ) -> LossValue | None:
        """The usual case in plain eager mode, with one backward pass for all terms.

        What a head has multiplied already fits: features, matrix and bias.
        """
        if not self._is_usual():
            return None
        if view is None or view.made is None or not _is_beside(labels, features):
            check_inputs(
                features, matrix, labels, bias=bias, soft=False, reason=NO_SOFT, validate=False
            )
        if self._has_kernels(features, matrix, labels):
            return self._by_kernels(features, matrix, labels, bias)
        rows = self._usual_rows(labels, matrix.shape[0], view.label_range if view else None)
        if rows is None:
            return None
        if self.check_finite:
            check_all_finite(features=features, prototypes=matrix, bias=bias)
        return self._by_operators(*_promoted(features, matrix, bias), labels.long(), *rows)

    def _by_operators(
        self,
        features: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        known: Tensor | None,
        guard: Tensor | None,
    ) -> LossValue | None:
        """The terms of rows that are ``known`` to count; None where the bank does not fit."""
        bank = self.bank
        if matrix.shape != bank.centroids.shape or features.dtype != matrix.dtype:
            return None
        valid = torch.ones_like(labels, dtype=torch.bool) if known is None else known
        with torch.no_grad():
            found = bank(features, labels, valid, complete=known is None, checked=True)
        terms = self._centroid_terms(bank, found, known)

        def definition(q: Tensor, weight: Tensor, offset: Tensor | None) -> tuple[Tensor, ...]:
            return _defined(terms, labels, valid, q, weight, offset)

        with without_autocast(features):
            compact, margin, norm = centroid_terms(definition, terms, features, matrix, bias)
        if guard is not None:
            compact, margin = compact + guard, margin + guard
            norm = None if norm is None else norm + guard
        return self._weighed(compact, margin, norm)

    def _has_kernels(self, features: Tensor, matrix: Tensor, labels: Tensor) -> bool:
        bank, centroids = self.bank, self.bank.centroids
        return (
            self.impl == "auto"
            and not self.check_finite
            and kernels_serve(features, matrix, labels)
            and features.shape[1] == bank.dim
            and matrix.shape == centroids.shape
            and centroids.dtype is torch.float32
            and centroids.device == features.device
            and not recomputing()
        )

    def _by_kernels(
        self, features: Tensor, matrix: Tensor, labels: Tensor, bias: Tensor | None
    ) -> LossValue:
        """The same by two kernels each way."""
        labels, ignored = labels.contiguous(), self.ignore_index
        with torch.no_grad():
            found = self.bank.by_kernel(features, labels, ignored)
        t = self._centroid_terms(self.bank, found, None)._replace(by_class=found.slots.by_class)

        def definition(q: Tensor, weight: Tensor, offset: Tensor | None) -> tuple[Tensor, ...]:
            count = weight.shape[0]
            valid = (labels >= 0) & (labels < count)
            valid = valid if ignored is None else valid & (labels != ignored)
            kept = torch.where(valid, labels, 0)
            classes = torch.arange(count, device=labels.device) if t.by_class else kept
            of_sample = torch.where(valid, t.of_sample, 0)
            masked = t._replace(of_sample=of_sample, classes=classes, valid=valid)
            offset = None if offset is None else promote(offset)
            return _defined(masked, kept, valid, promote(q), promote(weight), offset)

        compact, margin, *norm = kernel_terms(
            *(definition, t, labels, ignored, features, matrix, bias)
        )
        return self._weighed(compact, margin, norm[0] if norm else None)

    def _centroid_terms(
        self, bank: CentroidBank, found: BatchCentroids, known: Tensor | None
    ) -> CentroidTerms:
        slots, blended = found.slots, 1 - bank.momentum
        return CentroidTerms(
            slots.of_sample,
            slots.classes,
            slots.means,
            found.compact,
            found.margin,
            slots.counts,
            known,
            slots.by_class and known is None and found.all_present,
            through_compact=1.0 if bank.strategy == "none" else blended,
            through_points=blended if bank.strategy == "both" else 1.0,
            radius=self.radius,
            power=self.compact_power if self.tail is None else 0,
            tail=self.tail or 0.0,
            margin=self.margin,
            margin_power=self.margin_power,
            with_norm=self.has_norm,
        )

    def _weighed(self, compact: Tensor, margin: Tensor, norm: Tensor | None) -> LossValue:
        parts = {"compact": compact, "margin": margin}
        if norm is not None:
            parts["reg"] = norm
        total: Tensor | None = None
        read = current if torch.compiler.is_compiling() else getattr
        for name, term in parts.items():
            weight = read(self, WEIGHTS[name])
            weighted = term if type(weight) is float and weight == 1 else weight * term
            total = weighted if total is None else total + weighted
        assert total is not None
        return LossValue(total, parts)

    def _is_usual(self) -> bool:
        """Whether these settings are those that ``centroid_terms`` knows."""
        bank = self.bank
        return (
            plain_eager()
            and (self.reduction, self.aggregate) == ("mean", "max")
            and (bank.first_seen, bank.accumulate) == ("scaled", 1)
            and self.weight is None
            and not self._synced
        )

    def _usual_rows(
        self, labels: Tensor, num_classes: int, held: tuple[float, float] | None
    ) -> tuple[Tensor | None, Tensor | None] | None:
        """Which rows count (None: all), and a number that is NaN if a label is no class.

        None where labels are of another kind, or known to be ignored or wrong.
        """
        if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
            return None
        ignored = self.ignore_index
        if labels.numel() == 0:
            return None
        if held is None and values_are_checked(labels, None):
            held = value_range(labels)
        if held is not None:
            return (None, None) if all_count(held, num_classes, ignored) else None
        labels = labels.long()
        inside = labels.clamp(0, num_classes - 1) == labels
        counted = inside | True if ignored is None else labels != ignored
        wrong = (counted & ~inside).any()
        return inside & counted, torch.zeros_like(wrong, dtype=torch.float).masked_fill(
            wrong, math.nan
        )

    def _in_units(
        self, features: Tensor, matrix: Tensor, labels: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Features and bias in the units that radius and margin are given in: as they are."""
        return features, bias

    def _to_center(self, features: Tensor, batch: ClassBatch) -> Tensor:
        centers = batch.of_samples(batch.centroids.compact)
        return hinge_to_center(batch.kept(features), centers, self.radius, self.compact_power)

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        return self.named_terms(
            features, prototypes, labels, bias=bias, sample_weight=sample_weight
        ).total


class RobustDiscriminative(Discriminative):
    r"""Total loss of robust training (NGR-13; ROB 13).

    .. math:: L = L_S + \alpha L_{compact} + \beta L_{margin} + \gamma_{reg} L_{reg}
                + \lambda L_{noisy}

    ``noisy`` holds the features of the noised inputs, row by row beside the clean ones, from a
    second pass through the network. The softmax loss sees clean features only; the centroids are
    those of clean features; noisy features are aligned to them (:func:`noise_alignment`).

    Args:
        num_classes, dim and the rest: as :class:`Discriminative`.
        noise_weight: lambda, default 1 (ROB H.1).
        margin: default 5.0 (ROB H.1).
        momentum: default 0.9 (O5: ROB names no value; "such as 0.9").
        softmax_weight: of L_S, default 1; 0 leaves it to another term of an ``Objective``.
        options: those of every :class:`Loss`.

    Example:
        The clean feature and its noisy copy are on the centroid, on the boundary of two equal
        classes: log 2 of the softmax loss and the whole margin.

        >>> loss, q = RobustDiscriminative(2, 2, gamma_reg=0.0), torch.ones(1, 2)
        >>> loss(q, torch.eye(2), torch.tensor([0]), q)
        tensor(5.6931)
    """

    key: ClassVar[str] = "robust_discriminative"
    is_penalty: ClassVar[bool] = False  # it has a softmax loss in it
    search_space: ClassVar[Mapping[str, Dimension]] = {"noise_weight": Range(0.1, 5.0)}
    not_tuned: ClassVar[Mapping[str, str]] = {
        "softmax_weight": "with the other weights it only changes the learning rate"
    }
    needs: ClassVar[tuple[str, ...]] = ("features", "prototypes", "labels", "noisy")

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        noise_weight: float = 1.0,
        softmax_weight: float = 1.0,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma_reg: float = 1e-3,
        radius: float = 0.5,
        margin: float = 5.0,
        compact_power: int = 2,
        margin_power: int = 1,
        aggregate: Aggregate = "max",
        strategy: Strategy = "partial",
        momentum: float = 0.9,
        first_seen: FirstSeen = "scaled",
        accumulate: int | None = 1,
        detach_classifier: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(
            num_classes,
            dim,
            alpha=alpha,
            beta=beta,
            gamma_reg=gamma_reg,
            radius=radius,
            margin=margin,
            compact_power=compact_power,
            margin_power=margin_power,
            aggregate=aggregate,
            strategy=strategy,
            momentum=momentum,
            first_seen=first_seen,
            accumulate=accumulate,
            detach_classifier=detach_classifier,
            **options,
        )
        check_number("noise_weight", noise_weight, at_least=0)
        check_number("softmax_weight", softmax_weight, at_least=0)
        self.noise_weight = noise_weight
        self.softmax_weight = softmax_weight
        self._softmax = CrossEntropy(**options)
        self._softmax.sync = self.sync

    @property
    def part_weights(self) -> dict[str, float]:
        softmax = {"softmax": self.softmax_weight} if self.softmax_weight else {}
        return {**softmax, **super().part_weights, "noisy": self.noise_weight}

    def named_terms(  # type: ignore[override]
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        noisy: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> LossValue:
        """The total and its unweighted terms softmax, compact, margin, reg, noisy."""
        self._refuse("sample_weight", sample_weight is not None)
        check_noisy(features, noisy)
        if self.check_finite:
            counted = (
                labels != self.ignore_index if self.ignore_index is not None else labels == labels
            )
            check_all_finite(noisy=torch.where(counted[:, None], noisy, 0))
        clean = self._classifier(features, prototypes, labels, bias)
        value, batch = self._by_batch(clean[0], clean[1], labels, clean[2])
        aligned = self.mean_over_samples(self._to_center(noisy, batch), batch)
        total = value.total + self.noise_weight * aligned
        terms = {**value.terms, "noisy": aligned}
        if self.softmax_weight:
            softmax = self._softmax(features, prototypes, labels, bias=bias)
            total = total + self.softmax_weight * softmax
            terms = {"softmax": softmax, **terms}
        return LossValue(total, terms)

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        noisy: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        return self.named_terms(
            features, prototypes, labels, noisy, bias=bias, sample_weight=sample_weight
        ).total


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
        refuse_transform(self)
        check_inputs(
            features, matrix, labels, bias=bias, soft=False, reason=NO_SOFT, validate=False
        )
        labels = labels.long()
        valid = (labels >= 0) & (labels < matrix.shape[0])
        if self.ignore_index is not None:
            valid = valid & (labels != self.ignore_index)
        distance = _typical_distance(matrix).clamp_max(1) if self.gradient == "bounded" else None

        def definition(q: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return self._scaled(q, offset, valid, distance)

        if self.check_finite:
            check_all_finite(features=torch.where(valid[:, None], features, 0))
        if not plain_eager() or self._synced or not _has_float64(features):
            return definition(features, bias)
        complete = values_are_checked(valid, None) and bool(valid.all())
        how = None if complete else valid, self.gradient, distance
        found: tuple[Tensor, Tensor | None] = _InUnits.apply(definition, *how, features, bias)
        return found

    def _scaled(
        self, features: Tensor, bias: Tensor | None, valid: Tensor, distance: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Features and bias over the scale, by autograd; ``distance`` is that of prototypes."""
        kept = promote(torch.where(valid[:, None], features, 0))
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
        if distance is not None:
            factor = held.clamp_max(1) * distance
            scaled = _stretch(scaled, factor)
            offset = None if offset is None else _stretch(offset, factor)
        return scaled, offset

    def _to_center(self, features: Tensor, batch: ClassBatch) -> Tensor:
        centers = batch.of_samples(batch.centroids.compact)
        hinge = hinge_to_center(batch.kept(features), centers, self.radius, 1)
        return linear_tail(hinge, self.tail or 0.0)


def _promoted(
    features: Tensor, matrix: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    kinds = {features.dtype, matrix.dtype, matrix.dtype if bias is None else bias.dtype}
    if kinds == {torch.float32}:
        return features, matrix, bias
    return promote(features), promote(matrix), None if bias is None else promote(bias)


def _is_beside(labels: Tensor, features: Tensor) -> bool:
    same = isinstance(labels, Tensor) and labels.shape == features.shape[:1]
    return same and labels.device == features.device


def _defined(
    t: CentroidTerms,
    labels: Tensor,
    valid: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """What ``centroid_terms`` computes, by autograd."""
    slots = class_means(features, labels, weight.shape[0], valid, complete=t.valid is None)
    moved = slots.means - slots.means.detach()
    points = t.points + t.through_points * moved
    centers = (t.compact + t.through_compact * moved).index_select(0, t.of_sample)
    share = slots.present.to(slots.means.dtype)
    share = share / share.sum().clamp_min(1)
    each = torch.where(valid, (share / t.counts.clamp_min(1)).index_select(0, t.of_sample), 0)
    kept = torch.where(valid[:, None], features, 0)
    hinge = hinge_to_center(kept, centers, t.radius, max(t.power, 1))
    compact = ((hinge if t.power else linear_tail(hinge, t.tail)) * each).sum()
    settings: dict[str, Any] = {"margin": t.margin, "power": t.margin_power, "validate": False}
    margin = (centroid_margin(points, weight, t.classes, bias=bias, **settings) * share).sum()
    if not t.with_norm:
        return compact, margin
    return compact, margin, (centroid_norm(points) * share).sum()


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
    return _size(rows - rows.mean(0)) * math.sqrt(2 / (rows.shape[0] - 1))


def _has_float64(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "cuda", "meta")


def _size(x: Tensor) -> Tensor:
    """The norm of all numbers of a matrix, outside autograd; no square leaves its range."""
    if not _has_float64(x):
        return safe_norm(safe_norm(x))
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.to(x.dtype)


class _InUnits(torch.autograd.Function):
    """``StableDiscriminative._scaled`` in a third of the operators."""

    @staticmethod
    def forward(
        ctx: Any,
        definition: Callable[..., Any],
        valid: Tensor | None,
        gradient: Gradient,
        distance: Tensor | None,
        features: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        kept = promote(features)
        if valid is None:
            count: Tensor | int = max(len(kept), 1)
            scale = _size(kept) * (1 / math.sqrt(count))
        else:
            kept = kept.masked_fill(~valid[:, None], 0.0)
            count = valid.sum().clamp_min(1)
            scale = _size(kept) * count.to(kept.dtype).rsqrt()
        inverse = scale.reciprocal().masked_fill_(scale <= EPS, 0.0)
        scaled, offset = kept * inverse, None if bias is None else promote(bias) * inverse
        factor = None if distance is None else scale.clamp_max(1).mul_(distance)
        ctx.save_for_backward(features, bias, valid, scaled, offset, inverse, factor)
        ctx.definition, ctx.gradient, ctx.count = definition, gradient, count
        return scaled, offset

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_offset: Tensor) -> tuple[Tensor | None, ...]:
        features, bias, valid, scaled, offset, inverse, factor = ctx.saved_tensors
        nothing = (None,) * 4
        if torch.is_grad_enabled() or batched_gradient(grad):
            given, grads = (features, bias), (grad, grad_offset)
            return *nothing, *gradients_again(
                ctx.definition, grads, given, ctx.needs_input_grad[4:]
            )
        stretched = inverse if factor is None else inverse * factor
        found = grad * stretched
        if ctx.gradient != "detached":
            along = (grad * scaled).sum()
            if ctx.gradient == "exact" and offset is not None:
                along += (grad_offset * offset).sum()
            found.addcmul_(scaled, along * (stretched / ctx.count), value=-1)
        if valid is not None:
            found.masked_fill_(~valid[:, None], 0.0)
        g_bias = None if bias is None else (grad_offset * stretched).to(bias.dtype)
        return *nothing, found.to(features.dtype), g_bias


def _stretch(x: Tensor, factor: Tensor) -> Tensor:
    """``x``, with its gradient multiplied by ``factor``."""
    stretched = factor * x
    return x.detach() + (stretched - stretched.detach())
