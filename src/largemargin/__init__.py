"""largemargin: losses that separate classes by a wide margin, and measures that prove it.

    import largemargin as lm

    loss = lm.CosFace(scale=16.0)
    value = loss(features, linear, labels)

Modules live here, pure functions in :mod:`largemargin.functional`, measures in
:mod:`largemargin.geometry`, perturbations in :mod:`largemargin.robust`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from largemargin.errors import LargeMarginError
from largemargin.losses import (
    LDAM,
    LOSSES,
    ArcFace,
    BiasedSoftmax,
    CenterLoss,
    CentroidMargin,
    CentroidNorm,
    Compactness,
    CosFace,
    CrossEntropy,
    DenseHinge,
    Discriminative,
    Focal,
    GaussianMixture,
    GMSoftmax,
    Kobayashi,
    LabelSmoothing,
    LayerMargin,
    LMSoftmax,
    Loss,
    LossValue,
    LSoftmax,
    MarginDistribution,
    MarginHinge,
    MaxHinge,
    MaxSoftplus,
    NormFace,
    Objective,
    RivalDivergence,
    RobustDiscriminative,
    SampleMargin,
    SoftHinge,
    SphereFace,
    Stability,
    SuperSymmetry,
    UnifiedMargin,
    ZeroCentroid,
)
from largemargin.ops import ClassStats, class_stats, class_stats_from_logits
from largemargin.prototypes import (
    CentroidBank,
    ClassHead,
    Packing,
    SimplexHead,
    best_packing,
    simplex,
)

if TYPE_CHECKING:
    from largemargin import functional, geometry, robust

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Rooms that training does not need are imported when they are first asked for."""
    if name in ("functional", "geometry", "robust"):
        return import_module(f"largemargin.{name}")
    raise AttributeError(f"module 'largemargin' has no attribute {name!r}")


__all__ = [
    "LDAM",
    "LOSSES",
    "ArcFace",
    "BiasedSoftmax",
    "CenterLoss",
    "CentroidBank",
    "CentroidMargin",
    "CentroidNorm",
    "ClassHead",
    "ClassStats",
    "Compactness",
    "CosFace",
    "CrossEntropy",
    "DenseHinge",
    "Discriminative",
    "Focal",
    "GMSoftmax",
    "GaussianMixture",
    "Kobayashi",
    "LMSoftmax",
    "LSoftmax",
    "LabelSmoothing",
    "LargeMarginError",
    "LayerMargin",
    "Loss",
    "LossValue",
    "MarginDistribution",
    "MarginHinge",
    "MaxHinge",
    "MaxSoftplus",
    "NormFace",
    "Objective",
    "Packing",
    "RivalDivergence",
    "RobustDiscriminative",
    "SampleMargin",
    "SimplexHead",
    "SoftHinge",
    "SphereFace",
    "Stability",
    "SuperSymmetry",
    "UnifiedMargin",
    "ZeroCentroid",
    "__version__",
    "best_packing",
    "class_stats",
    "class_stats_from_logits",
    "functional",
    "geometry",
    "robust",
    "simplex",
]
