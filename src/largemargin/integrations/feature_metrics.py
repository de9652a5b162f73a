"""torchmetrics of features: how tight and how far apart classes are. See ``torchmetrics.py``."""

import math
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_num_classes, check_number
from largemargin.geometry import class_dispersion
from largemargin.geometry.margins import check_prototypes
from largemargin.geometry.pairs import closest_pair, row_distance, widen
from largemargin.integrations.metric_states import GeometryMetric, Head, as_head, check_width
from largemargin.measuring.features import measure_collapse, measure_variance
from largemargin.measuring.measure import COVARIANCE_DIM
from largemargin.measuring.stream import Stream, check_norms
from largemargin.measuring.sums import ClassSums
from largemargin.prototypes.form import HeadView

PAIRWISE = ("largest", "separation", "ratio")
VARIANCES = ("within", "between", "total", "ratio")
COLLAPSES = ("variability", "norm_spread", "angle_spread", "simplex_gap", "duality")


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
        check_choice("statistic", statistic, PAIRWISE)
        check_number("num_classes", num_classes, at_least=1)
        self.num_classes, self.statistic = num_classes, statistic
        self._add_column("kept")
        self._add_column("classes", torch.long)

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
    ) -> None:
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
        largest = separation = math.nan
        if self.statistic != "separation":
            diameters = class_dispersion(features, labels, self.num_classes)
            largest = float(diameters[~diameters.isnan()].max())
        if self.statistic != "largest":
            pair = closest_pair(features, labels)
            separation = math.inf if pair is None else float(row_distance(features, pair))
        if self.statistic == "ratio":
            return self._number(largest / separation if separation > 0 else math.inf)
        return self._number(largest if self.statistic == "largest" else separation)


class ClassSumsMetric(GeometryMetric):
    """Counts, means and scatter of classes from one pass; features are dropped."""

    covariance = False
    counts: list[Tensor]
    outer: list[Tensor]

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(**options)
        check_num_classes(num_classes)
        self.num_classes = num_classes
        for name in ("counts", "anchors", "sums", "squares"):
            self._add_column(name, torch.long if name == "counts" else torch.float64)
        if self.covariance:
            self._add_column("outer")

    def _add(self, features: Tensor | None, labels: Tensor | None) -> None:
        found, labels = self._batch(features, labels, self.num_classes)
        check_norms(torch.linalg.vector_norm(found, dim=1))
        sums = self._sums()
        if sums is None:
            dim = found.shape[1]
            keep = self.covariance and dim <= COVARIANCE_DIM
            sums = ClassSums.empty(self.num_classes, dim, covariance=keep, like=found)
        check_width(found, sums.sums.shape[1], "those before had")
        sums.add(found, labels)
        self._put(sums)

    def _put(self, sums: ClassSums) -> None:
        for name in ("counts", "anchors", "sums", "squares"):
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
        outer = None
        if self.covariance and len(flat := self._column("outer")) > 0:
            outer = flat.view(len(counts), sums.shape[-1], -1)
        joined: ClassSums | None = None
        for part in range(len(counts)):
            one = ClassSums(
                counts[part],
                anchors[part],
                sums[part],
                squares[part],
                None if outer is None else outer[part],
                torch.finfo(torch.float32).eps,  # in which features come, whatever they are kept in
            )
            if joined is None:
                joined = one
            else:
                joined.merge(one)
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
        check_choice("statistic", statistic, VARIANCES)
        self.statistic = statistic

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self._add(features, labels)

    def compute(self) -> Tensor:
        sums = self._sums()
        if sums is None or not bool(sums.counts.any()):
            return self._number(math.nan)
        return self._number(getattr(measure_variance(sums, []), self.statistic))


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

    def update(
        self,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        bias: Tensor | None = None,
    ) -> None:
        weight = as_head(head, bias, "NeuralCollapse").weight
        check_prototypes(weight)
        if len(weight) != self.num_classes:
            raise LargeMarginError(
                f"NeuralCollapse was made for {self.num_classes} classes, but the head has "
                f"{len(weight)}. Pass num_classes={len(weight)}."
            )
        self._add(features, labels)
        self.prototypes = [widen(weight.to(self.device)).reshape(-1).clone()]

    def compute(self) -> Tensor:
        sums = self._sums()
        if sums is None:
            return self._number(math.nan)
        size = sums.sums.numel()
        weight = self._column("prototypes")[-size:].view(sums.sums.shape)
        stream = Stream(HeadView(weight), covariance=False)
        stream.sums = sums
        found = measure_collapse(stream, [])
        return self._number(math.nan if found is None else getattr(found, self.statistic))

    def _fold(self) -> None:
        super()._fold()
        self.prototypes = self.prototypes[-1:]
