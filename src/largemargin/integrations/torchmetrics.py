"""torchmetrics: the geometry of a model as metrics, for any loop that updates and computes.

    metrics = MetricCollection({
        "cosine_margin": SampleMargin("cosine"),
        "smallest_margin": SampleMargin("distance", "minimum"),
        "class_margin": ClassMargin(),
    })
    metrics.update(features=features, labels=labels, head=model.fc)

Every metric takes ``update(features, labels, head, bias)`` and returns one number: that of
:func:`largemargin.measure_arrays` on all the data, also over several processes. ``head`` is the
classification layer, its weight, or the criterion that ``attach`` returned; where logits say it
all, ``update(logits=logits, labels=labels)`` suffices. A ``MetricCollection`` keeps once what
several metrics have in common (features, margins of one kind). Samples labelled -100 are left out;
without samples a metric is NaN. ``options`` are those of ``torchmetrics.Metric``.
"""

import math
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from largemargin.dropin.criterion import Criterion
from largemargin.dropin.model_outputs import flat_beside, rows
from largemargin.errors import (
    LargeMarginError,
    MissingPackage,
    check_choice,
    check_labels,
    check_matrix,
    check_num_classes,
    check_number,
)
from largemargin.geometry.dispersion import ideal_feature_ratio, largest_dispersion
from largemargin.geometry.margins import check_prototypes, class_margin, implicit_bias
from largemargin.geometry.pairs import blocks, closest_pair, row_distance, widen
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.batches import IGNORED, SKIP
from largemargin.measuring.calibration import auroc
from largemargin.measuring.distributions import describe, quantile_of
from largemargin.measuring.feature_geometry import measure_collapse, measure_variance
from largemargin.measuring.probe import head_view
from largemargin.measuring.scores import HeadScores, check_logits_finite
from largemargin.measuring.stream import ClassSums, check_norms, check_width
from largemargin.ops.class_stats import class_stats_from_logits

__all__ = [
    "ClassMargin",
    "Dispersion",
    "ImplicitBias",
    "MarginRejectionAUROC",
    "NeuralCollapse",
    "SampleMargin",
    "VarianceSplit",
]


if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    try:
        from torchmetrics import Metric
    except ImportError as error:
        raise MissingPackage(
            "largemargin.integrations.torchmetrics needs torchmetrics. Install it: "
            "pip install 'largemargin[torchmetrics]'"
        ) from error

Head = HeadView | Criterion | nn.Module | Tensor
"""A head, in any form in which a user holds one."""


class GeometryMetric(Metric):
    """A metric whose states are lists of flat tensors, joined over updates and processes.

    Flat, because a process without samples does not know how wide features are, and torchmetrics
    can join an empty vector with a vector only.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._dtypes: dict[str, torch.dtype] = {}

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Take a batch: its features and labels, and the head, as far as the metric needs them."""
        self._take_head(head, bias)
        self._take_features(features, labels)

    def _take_head(self, head: Head | None, bias: Tensor | None) -> None:
        """Nothing where the metric needs no head."""

    def _take_features(self, features: Tensor | None, labels: Tensor | None) -> None:
        """Nothing where the metric is of the head alone."""

    def sync(self, *args: Any, **options: Any) -> None:
        # torchmetrics would send an empty float32 tensor for a state without entries, whatever the
        # type of what other processes send: they would not understand each other.
        for name, dtype in self._dtypes.items():
            if isinstance(getattr(self, name), list) and not getattr(self, name):
                setattr(self, name, [torch.zeros(0, dtype=dtype, device=self.device)])
        super().sync(*args, **options)

    def forward(self, *args: Any, **options: Any) -> Any:
        value = super().forward(*args, **options)
        self._fold()
        return value

    def plot(self, *args: Any, **options: Any) -> Any:
        """A single value or a list of them, by torchmetrics."""
        return self._plot(*args, **options)

    def _add_column(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        self.add_state(name, default=[], dist_reduce_fx="cat")
        self._dtypes[name] = dtype

    def _column(self, name: str) -> Tensor:
        """All of a state, however many parts it is in."""
        found: Tensor | list[Tensor] = getattr(self, name)
        if isinstance(found, Tensor):
            return found
        if not found:
            return torch.zeros(0, dtype=self._dtypes[name], device=self.device)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _fold(self) -> None:
        """Make one part of those that torchmetrics has put side by side, where that is possible."""

    def _number(self, value: float) -> Tensor:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.tensor(value, dtype=dtype, device=self.device)

    def _batch(
        self, given: Tensor | None, labels: Tensor | None, num_classes: int, name: str = "features"
    ) -> tuple[Tensor, Tensor]:
        """Rows in float64 and their labels, checked, without those labelled -100.

        (N, T, D) of a sequence head become rows too.
        """
        if given is None or labels is None:
            raise LargeMarginError(
                f"{type(self).__name__} needs {name} and labels. Call "
                f"update({name}={name}, labels=labels, ...)."
            )
        if isinstance(given, Tensor) and isinstance(labels, Tensor):
            labels, given = flat_beside(labels, given), rows(given)
        check_matrix(name, given, "(N, D)" if name == "features" else "(N, C)")
        if isinstance(labels, Tensor) and labels.dim() == 1 and len(labels) == len(given):
            keep = labels.long() != IGNORED  # torch takes 156 of uint8 for -100
            given, labels = given[keep.to(given.device)], labels[keep]
        check_labels(labels, len(given), num_classes, of=name, soft=False, skip=SKIP, validate=True)
        return widen(given.to(self.device)), labels.to(self.device).long()

    def _class_vectors(self, head: Head | None, bias: Tensor | None) -> Tensor:
        """Those of the head in float64, checked; a copy, because the head goes on learning."""
        weight = as_head(head, bias, type(self).__name__).weight
        check_prototypes(weight)
        return widen(weight.to(self.device)).clone()


class HeadMetric(GeometryMetric):
    """A metric of what a head says about each sample: one of ``measuring.stream.PER_SAMPLE``."""

    def __init__(self, quantity: str, **options: Any) -> None:
        super().__init__(**options)
        self._last: HeadScores | None = None
        self.quantity = quantity
        # By quantity, so that a collection never takes margins of one kind for those of another.
        self._add_column(f"{quantity}_values")

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> None:
        """Take a batch: features, labels and head, or logits and labels where they say it all."""
        if logits is not None and self.quantity in OF_LOGITS:
            self._keep(self._of_logits(logits, labels))
        else:
            self._keep(self._labelled(features, labels, head, bias))

    def _keep(self, found: dict[str, Tensor]) -> None:
        getattr(self, f"{self.quantity}_values").append(found[self.quantity])

    def _of_logits(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        table, labels = self._batch(logits, labels, logits.shape[-1], "logits")
        check_logits_finite(table)
        predicted = table.argmax(1)
        if self.quantity == "confidence":
            values = table.softmax(1).amax(1)
        elif self.quantity == "softmax_bias":
            values = implicit_bias(table, labels)
        else:
            classes = labels if self.quantity == "raw" else predicted
            stats = class_stats_from_logits(table, classes, want=("target", "rival"))
            assert stats.target is not None
            assert stats.rival is not None
            values = stats.target - stats.rival
        return {"label": labels, "predicted": predicted, self.quantity: values}

    def _labelled(
        self, features: Tensor | None, labels: Tensor | None, head: Head | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        scores = self._scores(as_head(head, bias, type(self).__name__))
        vectors, labels = self._batch(features, labels, scores.num_classes)
        check_width(vectors, scores.dim)
        parts = [
            {"label": labels[part], **scores.labelled(vectors[part], labels[part])}
            for part in blocks(max(len(labels), 1), scores.rows_at_once)
        ]
        found = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        check_norms(found["norm"])
        return found

    def _scores(self, head: HeadView) -> HeadScores:
        """The head, ready to be asked: that of the last batch where it is still the same."""
        weight = head.weight.to(self.device, copy=True)
        bias = None if head.bias is None else head.bias.to(self.device, copy=True)
        head = HeadView(weight, bias, head.similarity, head.scale)
        if self._last is None or not _same(self._last.head, head):
            self._last = HeadScores(head)
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": None}


def as_head(head: Head | None, bias: Tensor | None, metric: str) -> HeadView:
    """Class vectors and how logits are made from them, detached."""
    if head is None:
        raise LargeMarginError(
            f"{metric} needs the head: pass the classification layer, its (C, D) weight (and "
            "bias=... where it has one) or the criterion that attach returned as head=..."
        )
    if isinstance(head, Criterion):
        head = head.head
    if isinstance(head, Tensor):
        if bias is not None and tuple(bias.shape) != tuple(head.shape[:1]):
            raise LargeMarginError(
                f"bias must have one number per row of the head, {tuple(head.shape[:1])}, but its "
                f"shape is {tuple(bias.shape)}."
            )
        return HeadView(head.detach(), None if bias is None else bias.detach())
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise LargeMarginError(
            f"head must be the classification layer itself, its weight or a criterion, but "
            f"{type(head).__name__} has no weight. Pass the layer: head=model.fc."
        )
    return head_view(head)  # type: ignore[arg-type]  # a view is read like a layer


def _same(one: HeadView, other: HeadView) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)

    return (
        (one.similarity, one.scale) == (other.similarity, other.scale)
        and equal(one.weight, other.weight)
        and equal(one.bias, other.bias)
    )


KINDS = ("raw", "cosine", "distance")
"""Of sample margins, as in ``Geometry.margins``."""

STATISTICS = ("mean", "std", "ratio", "minimum", "median", "maximum")

OF_LOGITS = ("raw", "softmax_bias", "lead_raw", "confidence")
"""What logits tell without features."""


class ClassMargin(GeometryMetric):
    """Smallest angle between two class vectors (ZHO-MC), of the head at the last update.

    Alone it needs the head only.

    Args:
        degrees: degrees (default, as :func:`largemargin.measure` has them), otherwise radians.

    Example:
        >>> metric = ClassMargin()
        >>> metric.update(head=torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> round(float(metric.compute()), 6)
        90.0
    """

    higher_is_better = True
    prototypes: list[Tensor]
    sizes: list[Tensor]

    def __init__(self, *, degrees: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.degrees = degrees
        self._add_column("prototypes")
        self._add_column("sizes", torch.long)

    def _take_head(self, head: Head | None, bias: Tensor | None) -> None:
        weight = self._class_vectors(head, bias)
        self.prototypes = [weight.reshape(-1)]
        self.sizes = [torch.tensor(weight.shape, device=self.device)]

    def compute(self) -> Tensor:
        sizes = self._column("sizes")
        if len(sizes) == 0:
            return self._number(math.nan)
        # Processes hold the same head, so that of any of them will do.
        classes, dim = sizes[-2:].tolist()
        weight = self._column("prototypes")[-classes * dim :].view(classes, dim)
        return class_margin(weight, degrees=self.degrees)

    def _fold(self) -> None:
        self.prototypes, self.sizes = self.prototypes[-1:], self.sizes[-1:]


class SampleStatistic(HeadMetric):
    """A quantity of the samples in one number."""

    def __init__(self, quantity: str, statistic: str | float, **options: Any) -> None:
        super().__init__(quantity, **options)
        if isinstance(statistic, str):
            check_choice("statistic", statistic, STATISTICS)
        else:
            check_number("statistic", statistic, at_least=0, at_most=1, hint="It is a quantile.")
        self.statistic = statistic

    def compute(self) -> Tensor:
        values = self._column(f"{self.quantity}_values")
        if isinstance(self.statistic, str):
            return self._number(getattr(describe(values, bins=1), self.statistic))
        if len(values) == 0 or bool(values.isnan().any()):
            return self._number(math.nan)
        return self._number(quantile_of(values.sort().values, self.statistic))


class SampleMargin(SampleStatistic):
    """Sample margins (ZHO-MS) of one kind, in one number.

    Keeps 8 bytes of each sample.

    Args:
        kind: "raw" (of the logits as they are), "cosine", or "distance" (signed, to the nearest
            decision boundary in feature space).
        statistic: "mean", "std", "ratio" (mean over standard deviation, ODN-RATIO), "minimum",
            "median", "maximum", or a number in [0, 1] for that quantile.

    Example:
        >>> metric = SampleMargin("raw", "minimum")
        >>> features = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
        >>> metric.update(features, torch.tensor([0, 1]), head=torch.eye(2))
        >>> float(metric.compute())
        2.0
    """

    higher_is_better = True

    def __init__(
        self, kind: str = "cosine", statistic: str | float = "mean", **options: Any
    ) -> None:
        check_choice("kind", kind, KINDS)
        super().__init__(kind, statistic, **options)


class ImplicitBias(SampleStatistic):
    """Margin the softmax loss asks for by itself (KOB-7), over the samples.

    Between 0, where one rival dominates, and log(C - 1).

    Args:
        statistic: as in :class:`SampleMargin`; default the mean, as in the paper's figure.

    Example:
        >>> metric = ImplicitBias()
        >>> metric.update(logits=torch.zeros(2, 3), labels=torch.tensor([0, 1]))
        >>> round(float(metric.compute()), 4)
        0.6931
    """

    def __init__(self, statistic: str | float = "mean", **options: Any) -> None:
        super().__init__("softmax_bias", statistic, **options)


class MarginRejectionAUROC(HeadMetric):
    """How well the lead of the predicted class tells right from wrong predictions.

    1: every right prediction leads by more than every wrong one; 0.5: the lead says nothing; NaN
    without right or without wrong predictions.

    Args:
        score: the lead in "raw" logits, in "cosine", in "distance" to the nearest boundary, or the
            "confidence" (softmax probability).

    Example:
        >>> metric = MarginRejectionAUROC()
        >>> logits = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
        >>> metric.update(logits=logits, labels=torch.tensor([0, 1, 1]))
        >>> float(metric.compute())
        1.0
    """

    higher_is_better = True
    right: list[Tensor]

    def __init__(self, score: str = "raw", **options: Any) -> None:
        check_choice("score", score, (*KINDS, "confidence"))
        super().__init__(score if score == "confidence" else f"lead_{score}", **options)
        self._add_column("right", torch.long)

    def _keep(self, found: dict[str, Tensor]) -> None:
        super()._keep(found)
        self.right.append((found["predicted"] == found["label"]).long())

    def compute(self) -> Tensor:
        leads, right = self._column(f"{self.quantity}_values"), self._column("right") == 1
        return self._number(auroc(leads[right], leads[~right]))


class Dispersion(GeometryMetric):
    """Diameters of the classes in feature space (NGY-D4), exact; needs no head.

    Keeps all features, in float64; ``compute_on_cpu=True`` keeps them off the accelerator. Time
    grows with the square of the samples.

    Args:
        num_classes: C.
        statistic: "largest" dispersion of a class; "separation", the smallest distance between
            samples of different classes (infinite with one class); or their "ratio": below 1
            features are ideal (NGY-P4.2).

    Example:
        >>> metric = Dispersion(2)
        >>> metric.update(torch.tensor([[0.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]))
        >>> float(metric.compute())
        3.0
    """

    kept: list[Tensor]
    classes: list[Tensor]

    def __init__(self, num_classes: int, statistic: str = "largest", **options: Any) -> None:
        super().__init__(**options)
        check_choice("statistic", statistic, ("largest", "separation", "ratio"))
        check_number("num_classes", num_classes, at_least=1)
        self.num_classes, self.statistic = num_classes, statistic
        self._add_column("kept")
        self._add_column("classes", torch.long)

    def _take_features(self, features: Tensor | None, labels: Tensor | None) -> None:
        found, labels = self._batch(features, labels, self.num_classes)
        check_norms(torch.linalg.vector_norm(found, dim=1))
        if len(labels) == 0:
            return
        if self.classes and len(self.classes[-1]) > 0:
            check_width(found, self.kept[-1].numel() // len(self.classes[-1]), "those before had")
        self.kept.append(found.reshape(-1))
        self.classes.append(labels)

    def compute(self) -> Tensor:
        labels = self._column("classes")
        if len(labels) == 0:
            return self._number(math.nan)
        features = self._column("kept").view(len(labels), -1)
        if self.statistic == "ratio":
            found = ideal_feature_ratio(features, labels, self.num_classes).ratio
            return self._number(float(found))
        if self.statistic == "largest":
            return self._number(float(largest_dispersion(features, labels, self.num_classes)))
        pair = closest_pair(features, labels)
        return self._number(math.inf if pair is None else float(row_distance(features, pair)))


SUMS = ("counts", "anchors", "sums", "squares")
"""Tensors of :class:`ClassSums`, beside the covariance."""


class ClassSumsMetric(GeometryMetric):
    """Counts, means and scatter of classes from one pass; features are dropped."""

    covariance = False
    counts: list[Tensor]
    outer: list[Tensor]

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(**options)
        check_num_classes(num_classes)
        self.num_classes = num_classes
        for name in SUMS:
            self._add_column(name, torch.long if name == "counts" else torch.float64)
        if self.covariance:
            self._add_column("outer")

    def _take_features(self, features: Tensor | None, labels: Tensor | None) -> None:
        found, labels = self._batch(features, labels, self.num_classes)
        check_norms(torch.linalg.vector_norm(found, dim=1))
        sums = self._sums()
        if sums is None:
            dim = found.shape[1]
            sums = ClassSums.empty(self.num_classes, dim, covariance=self.covariance, like=found)
        check_width(found, sums.sums.shape[1], "those before had")
        sums.add(found, labels)
        self._put(sums)

    def _put(self, sums: ClassSums) -> None:
        for name in SUMS:
            setattr(self, name, [getattr(sums, name).reshape(-1)])
        if self.covariance:
            self.outer = [] if sums.outer is None else [sums.outer.reshape(-1)]

    def _sums(self) -> ClassSums | None:
        """The sums of all parts; None without one."""
        counts = self._column("counts").view(-1, self.num_classes)
        if len(counts) == 0:
            return None
        anchors, sums = (self._column(name).view(*counts.shape, -1) for name in ("anchors", "sums"))
        squares = self._column("squares").view(counts.shape)
        outer: Tensor | repeat[None] = repeat(None)
        if self.covariance and len(flat := self._column("outer")) > 0:
            outer = flat.view(len(counts), sums.shape[-1], -1)
        rounding = torch.finfo(torch.float32).eps  # features come in it, whatever they are kept in
        parts = zip(counts, anchors, sums, squares, outer, strict=False)
        joined, *others = (ClassSums(*part, rounding) for part in parts)
        for each in others:
            joined.merge(each)
        return joined

    def _fold(self) -> None:
        if len(self.counts) > 1:
            sums = self._sums()
            assert sums is not None
            self._put(sums)


class VarianceSplit(ClassSumsMetric):
    """Variance of features within and between classes (ODN-VAR), in one pass; needs no head.

    Args:
        num_classes: C.
        statistic: "within", "between", "total" or the "ratio" between / within, which is infinite
            for collapsed classes.

    Example:
        >>> metric = VarianceSplit(2)
        >>> metric.update(torch.tensor([[0.0], [2.0], [4.0], [6.0]]), torch.tensor([0, 0, 1, 1]))
        >>> float(metric.compute())
        4.0
    """

    def __init__(self, num_classes: int, statistic: str = "ratio", **options: Any) -> None:
        super().__init__(num_classes, **options)
        check_choice("statistic", statistic, ("within", "between", "total", "ratio"))
        self.statistic = statistic

    def compute(self) -> Tensor:
        sums = self._sums()
        if sums is None or not bool(sums.counts.any()):
            return self._number(math.nan)
        return self._number(getattr(measure_variance(sums, []), self.statistic))


COLLAPSES = ("variability", "norm_spread", "angle_spread", "simplex_gap", "duality")


class NeuralCollapse(ClassSumsMetric):
    """Neural collapse (Papyan, Han and Donoho 2020), NC1 to NC3, in one pass.

    All statistics tend to 0 in it. Keeps a D x D covariance.

    Args:
        num_classes: C.
        statistic: "variability" (NC1; NaN beyond 4096 dimensions), "norm_spread", "angle_spread"
            or "simplex_gap" (NC2), "duality" (NC3, of the class vectors at the last update): see
            ``Geometry.collapse``.

    Example:
        >>> metric = NeuralCollapse(2, "duality")
        >>> features = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(features, torch.tensor([0, 1]), head=features)
        >>> float(metric.compute())
        0.0
    """

    higher_is_better = False
    covariance = True
    prototypes: list[Tensor]

    def __init__(self, num_classes: int, statistic: str = "variability", **options: Any) -> None:
        super().__init__(num_classes, **options)
        check_choice("statistic", statistic, COLLAPSES)
        self.statistic = statistic
        self._add_column("prototypes")

    def _take_head(self, head: Head | None, bias: Tensor | None) -> None:
        weight = self._class_vectors(head, bias)
        if len(weight) != self.num_classes:
            raise LargeMarginError(
                f"NeuralCollapse was made for {self.num_classes} classes, but the head has "
                f"{len(weight)}. Pass num_classes={len(weight)}."
            )
        self.prototypes = [weight.reshape(-1)]

    def compute(self) -> Tensor:
        sums = self._sums()
        if sums is None:
            return self._number(math.nan)
        size = sums.sums.numel()
        weight = self._column("prototypes")[-size:].view(sums.sums.shape)
        found = measure_collapse(sums, weight, None, None, [])
        return self._number(math.nan if found is None else getattr(found, self.statistic))

    def _fold(self) -> None:
        super()._fold()
        self.prototypes = self.prototypes[-1:]
