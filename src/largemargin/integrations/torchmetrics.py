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
all, ``update(logits=logits, labels=labels)`` will do. What several metrics keep alike (features,
margins of one kind) a ``MetricCollection`` keeps once. Samples labelled -100 are left out; without
samples a metric is NaN. ``options`` are those of ``torchmetrics.Metric``.
"""

import math
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.geometry import class_margin, implicit_bias
from largemargin.geometry.margins import check_prototypes
from largemargin.geometry.pairs import widen
from largemargin.integrations.feature_metrics import Dispersion, NeuralCollapse, VarianceSplit
from largemargin.integrations.metric_states import GeometryMetric, Head, HeadMetric, as_head
from largemargin.measuring.distributions import describe
from largemargin.measuring.reliability import auroc
from largemargin.ops import class_stats_from_logits

__all__ = [
    "ClassMargin",
    "Dispersion",
    "ImplicitBias",
    "MarginRejectionAUROC",
    "NeuralCollapse",
    "SampleMargin",
    "VarianceSplit",
]

KINDS = ("raw", "cosine", "distance")
"""Of sample margins, as in ``Geometry.margins``."""

STATISTICS = ("mean", "std", "ratio", "minimum", "median", "maximum")


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

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
    ) -> None:
        weight = as_head(head, bias, "ClassMargin").weight
        check_prototypes(weight)
        self.prototypes = [widen(weight.to(self.device)).reshape(-1).clone()]
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


class SampleMargin(HeadMetric):
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
        super().__init__(**options)
        check_choice("kind", kind, KINDS)
        self.kind, self.statistic = kind, _checked(statistic)
        # By kind, so that a collection never takes margins of one kind for those of another.
        self._column_name = f"{kind}_margins"
        self._add_column(self._column_name)

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> None:
        if logits is not None and self.kind == "raw":
            table, labels = self._batch(logits, labels, logits.shape[-1], "logits")
            values = _logit_margins(table, labels)
        else:
            values = self._labelled(features, labels, head, bias)[self.kind]
        getattr(self, self._column_name).append(values)

    def compute(self) -> Tensor:
        return self._number(_summary(self._column(self._column_name), self.statistic))


class ImplicitBias(HeadMetric):
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

    biases: list[Tensor]

    def __init__(self, statistic: str | float = "mean", **options: Any) -> None:
        super().__init__(**options)
        self.statistic = _checked(statistic)
        self._add_column("biases")

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> None:
        if logits is not None:
            table, labels = self._batch(logits, labels, logits.shape[-1], "logits")
            _logit_margins(table, labels)
            self.biases.append(implicit_bias(table, labels))
        else:
            self.biases.append(self._labelled(features, labels, head, bias)["softmax_bias"])

    def compute(self) -> Tensor:
        return self._number(_summary(self._column("biases"), self.statistic))


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
        super().__init__(**options)
        check_choice("score", score, (*KINDS, "confidence"))
        self.score = score
        self._column_name = f"{score}_leads"
        self._add_column(self._column_name)
        self._add_column("right", torch.long)

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> None:
        if logits is not None and self.score in ("raw", "confidence"):
            table, labels = self._batch(logits, labels, logits.shape[-1], "logits")
            predicted = table.argmax(1)
            leads = _logit_margins(table, predicted)
            if self.score == "confidence":
                leads = table.softmax(1).amax(1)
        else:
            found = self._labelled(features, labels, head, bias)
            name = self.score if self.score == "confidence" else f"lead_{self.score}"
            leads, predicted, labels = found[name], found["predicted"], found["label"]
        getattr(self, self._column_name).append(leads)
        self.right.append((predicted == labels).long())

    def compute(self) -> Tensor:
        leads, right = self._column(self._column_name), self._column("right") == 1
        return self._number(auroc(leads[right], leads[~right]))


def _checked(statistic: str | float) -> str | float:
    if isinstance(statistic, str):
        check_choice("statistic", statistic, STATISTICS)
    else:
        check_number("statistic", statistic, at_least=0, at_most=1, hint="It is a quantile.")
    return statistic


def _summary(values: Tensor, statistic: str | float) -> float:
    if isinstance(statistic, str):
        return float(getattr(describe(values, bins=1), statistic))
    if len(values) == 0 or bool(values.isnan().any()):
        return math.nan
    ordered = values.sort().values
    position = statistic * (len(values) - 1)
    low, high = float(ordered[math.floor(position)]), float(ordered[math.ceil(position)])
    return low if low == high else low + (position % 1) * (high - low)


def _logit_margins(logits: Tensor, classes: Tensor) -> Tensor:
    """By how much the logit of a class is above all others."""
    if not bool(torch.isfinite(logits).all()):
        raise LargeMarginError(
            "logits must be finite, but some are NaN or infinite. Look for a diverged model or "
            "broken inputs."
        )
    stats = class_stats_from_logits(logits, classes, want=("target", "rival"))
    assert stats.target is not None
    assert stats.rival is not None
    return stats.target - stats.rival
