"""Hinge-center compactness: stay within a ball around the class centroid (LMD 4.4, ROB 8, 12)."""

from collections.abc import Mapping
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import check_choice, check_inputs, check_number
from largemargin.heads.centroid_bank import NO_SOFT, CentroidBank
from largemargin.losses.base.classwise import ClassWise
from largemargin.losses.base.loss import LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.ops.norms import promote, safe_norm
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class Compactness(ClassWise):
    r"""Hinge-center compactness loss (NGY-4.4; LMD 4.4, ROB 8).

    .. math:: L = \frac1{|C_B|}\sum_{c\in C_B}\frac1{n_c}\sum_{y_n=c}[\|m_c - q_n\| - \delta_v]_+^2

    Centroids are those of the batch, or of ``bank`` by its strategy. ``prototypes`` only tells the
    number of classes here. At zero it bounds every class's dispersion by 2 delta_v (LMD Prop. 4.1).

    Args:
        radius: delta_v, default 0.5 (LMD 7.2, ROB H.1).
        power: 2 (default) or 1: the squared hinge fades out near the ball and grows with outliers
            (LMD 4.5, ROB A.1).
        bank: a ``CentroidBank``; None uses the batch's own centroids.
        options: those of every :class:`Loss`.

    Departures: none.

    Example:
        Both features are 2 from their centroid, 1.5 outside the ball:

        >>> features = torch.tensor([[1.0, 0.0], [5.0, 0.0]])
        >>> Compactness()(features, torch.eye(2), torch.tensor([0, 0]))
        tensor(2.2500)
    """

    key: ClassVar[str] = "compactness"
    gathers_classes: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {"radius": Range(0.05, 2.0)}

    def __init__(
        self,
        *,
        radius: float = 0.5,
        power: int = 2,
        bank: CentroidBank | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(bank=bank, **options)
        check_hinge(radius, power)
        self.radius = radius
        self.power = power

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        batch = self.batch(features, prototypes, labels, sample_weight=sample_weight)
        centers = batch.of_samples(batch.centroids.compact)
        return self.mean_over_samples(
            hinge_to_center(batch.kept(features), centers, self.radius, self.power), batch
        )


def compactness(
    features: Features,
    centroids: Prototypes,
    labels: Labels,
    *,
    radius: float = 0.5,
    power: int = 2,
    validate: bool | None = None,
) -> PerSample:
    """Hinge-center compactness per sample, without the means over classes of :class:`Compactness`.

    Features (N, D), centroids (C, D) with or without gradient, labels (N,); returns (N,).
    """
    check_hinge(radius, power)
    check_inputs(features, centroids, labels, soft=False, reason=NO_SOFT, validate=validate)
    labels = labels.long()
    centers = promote(centroids)[labels.clamp(0, centroids.shape[0] - 1)]
    outside = (labels < 0) | (labels >= centroids.shape[0])
    return hinge_to_center(features, centers, radius, power).masked_fill(outside, torch.nan)


def noise_alignment(
    noisy_features: Features,
    centroids: Prototypes,
    labels: Labels,
    *,
    radius: float = 0.5,
    power: int = 2,
    validate: bool | None = None,
) -> PerSample:
    r"""Terms of the alignment of noisy features (NGR-12; ROB 12).

    .. math:: [\|m_{y_n} - \tilde q_n\| - \delta_v]_+^2

    The features of noised inputs are drawn to the centroids of the clean ones: the formula, the
    centroids and the radius of :func:`compactness`, with gradient to the clean features through
    the centroid (O2).

    Example:
        >>> noise_alignment(torch.tensor([[2.5, 0.0]]), torch.zeros(2, 2), torch.tensor([1]))
        tensor([4.])
    """
    return compactness(
        noisy_features, centroids, labels, radius=radius, power=power, validate=validate
    )


def hinge_to_center(features: Tensor, centers: Tensor, radius: float, power: int) -> PerSample:
    """[||center_n - feature_n|| - radius]_+ ** power, row by row."""
    hinge = F.relu(safe_norm(centers - promote(features)) - radius)
    return hinge if power == 1 else hinge.square()


def check_hinge(radius: float, power: int, name: str = "power") -> None:
    check_number("radius", radius, at_least=0)
    check_choice(name, power, (1, 2))
