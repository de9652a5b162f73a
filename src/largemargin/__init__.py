"""largemargin: losses that separate classes by a wide margin, and measures that prove it.

    import largemargin as lm

    loss = lm.CosFace(scale=16.0)
    value = loss(features, linear, labels)

Modules live here, pure functions in :mod:`largemargin.functional`, measures in
:mod:`largemargin.geometry`, perturbations in :mod:`largemargin.robust`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from largemargin.dropin import Criterion, attach
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
    StableDiscriminative,
    SuperSymmetry,
    UnifiedMargin,
    ZeroCentroid,
)
from largemargin.ops import ClassStats, class_stats, class_stats_from_logits
from largemargin.prototypes import (
    CentroidBank,
    ClassHead,
    MemoryEstimate,
    Packing,
    ShardedClassHead,
    SimplexHead,
    best_packing,
    estimate_memory,
    simplex,
)

if TYPE_CHECKING:
    from largemargin import evaluating, export, functional, geometry, measuring, robust, training
    from largemargin.evaluating import Evaluation, evaluate, predict
    from largemargin.integrations.scikit_learn import LargeMarginClassifier
    from largemargin.losses import schedules
    from largemargin.measuring import Geometry, compare_geometry, embed, measure, measure_arrays
    from largemargin.report.write import report
    from largemargin.training import Preset, Run, RunConfig, preset, train

__version__ = "0.1.0"

ROOMS = (
    "evaluating",
    "export",
    "functional",
    "geometry",
    "measuring",
    "report",
    "robust",
    "training",
)
LATER = {
    "measuring": ("Geometry", "compare_geometry", "embed", "measure", "measure_arrays"),
    "evaluating": ("Evaluation", "evaluate", "predict"),
    "training": ("Preset", "Run", "RunConfig", "preset", "train"),
}


def __getattr__(name: str) -> object:
    """Rooms that training does not need are imported when they are first asked for."""
    if name in ROOMS:
        return import_module(f"largemargin.{name}")
    if name == "schedules":
        return import_module("largemargin.losses.schedules")
    if name == "LargeMarginClassifier":
        return import_module("largemargin.integrations.scikit_learn").LargeMarginClassifier
    for room, names in LATER.items():
        if name in names:
            return getattr(import_module(f"largemargin.{room}"), name)
    raise AttributeError(f"module 'largemargin' has no attribute {name!r}{_meant(name)}")


def _meant(name: str) -> str:
    """``ArcFaceLoss`` of another library is ``ArcFace`` here."""
    from difflib import get_close_matches

    if name in import_module("largemargin.functional").__all__:
        return f". It is lm.functional.{name}"
    close = get_close_matches(name.removesuffix("Loss"), __all__, n=1, cutoff=0.75)
    return f". Did you mean {close[0]}?" if close and name[0] != "_" else ""


def __dir__() -> list[str]:
    """Those too, so that an interpreter completes ``lm.mea``."""
    return sorted({*globals(), *__all__})


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
    "Criterion",
    "CrossEntropy",
    "DenseHinge",
    "Discriminative",
    "Evaluation",
    "Focal",
    "GMSoftmax",
    "GaussianMixture",
    "Geometry",
    "Kobayashi",
    "LMSoftmax",
    "LSoftmax",
    "LabelSmoothing",
    "LargeMarginClassifier",
    "LargeMarginError",
    "LayerMargin",
    "Loss",
    "LossValue",
    "MarginDistribution",
    "MarginHinge",
    "MaxHinge",
    "MaxSoftplus",
    "MemoryEstimate",
    "NormFace",
    "Objective",
    "Packing",
    "Preset",
    "RivalDivergence",
    "RobustDiscriminative",
    "Run",
    "RunConfig",
    "SampleMargin",
    "ShardedClassHead",
    "SimplexHead",
    "SoftHinge",
    "SphereFace",
    "Stability",
    "StableDiscriminative",
    "SuperSymmetry",
    "UnifiedMargin",
    "ZeroCentroid",
    "__version__",
    "attach",
    "best_packing",
    "class_stats",
    "class_stats_from_logits",
    "compare_geometry",
    "embed",
    "estimate_memory",
    "evaluate",
    "evaluating",
    "export",
    "functional",
    "geometry",
    "measure",
    "measure_arrays",
    "measuring",
    "predict",
    "preset",
    "report",
    "robust",
    "schedules",
    "simplex",
    "train",
    "training",
]

if not TYPE_CHECKING and find_spec("sklearn") is None:
    __all__.remove("LargeMarginClassifier")  # help(lm) and `import *` ask for every name
