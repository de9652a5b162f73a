"""largemargin: losses that separate classes by a wide margin, and measures that prove it.

    import largemargin as lm

    loss = lm.CosFace(scale=16.0)
    value = loss(features, linear, labels)

Modules live here, pure functions in :mod:`largemargin.functional`, measures in
:mod:`largemargin.geometry`, perturbations in :mod:`largemargin.measuring.robust`.
"""

from typing import TYPE_CHECKING

from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError
from largemargin.heads.centroid_bank import CentroidBank
from largemargin.heads.class_head import ClassHead
from largemargin.heads.memory_estimate import MemoryEstimate, estimate_memory
from largemargin.heads.packing import Packing, best_packing
from largemargin.heads.sharded_class_head import ShardedClassHead
from largemargin.heads.simplex import SimplexHead, simplex
from largemargin.losses import LOSSES
from largemargin.losses.arcface import ArcFace
from largemargin.losses.base.loss import Loss, LossValue
from largemargin.losses.base.objective import Objective
from largemargin.losses.center import CenterLoss
from largemargin.losses.centroid_margin import CentroidMargin, CentroidNorm
from largemargin.losses.compactness import Compactness
from largemargin.losses.cosface import CosFace
from largemargin.losses.cross_entropy import CrossEntropy
from largemargin.losses.discriminative import Discriminative, RobustDiscriminative
from largemargin.losses.focal import Focal
from largemargin.losses.gaussian_mixture import GaussianMixture
from largemargin.losses.gm_softmax import GMSoftmax
from largemargin.losses.hinges import DenseHinge, MaxHinge, MaxSoftplus, SoftHinge
from largemargin.losses.input_margin import MarginDistribution, MarginHinge
from largemargin.losses.kobayashi import BiasedSoftmax, Kobayashi, RivalDivergence
from largemargin.losses.label_smoothing import LabelSmoothing
from largemargin.losses.layer_margin import LayerMargin
from largemargin.losses.ldam import LDAM
from largemargin.losses.lm_softmax import LMSoftmax
from largemargin.losses.normface import NormFace
from largemargin.losses.prototype_penalties import SuperSymmetry, ZeroCentroid
from largemargin.losses.sample_margin import SampleMargin
from largemargin.losses.sphereface import LSoftmax, SphereFace
from largemargin.losses.stability import Stability
from largemargin.losses.stable_discriminative import StableDiscriminative
from largemargin.losses.unified_margin import UnifiedMargin
from largemargin.ops.class_stats import ClassStats, class_stats, class_stats_from_logits
from largemargin.version import __version__

if TYPE_CHECKING:
    from largemargin import export, functional, geometry, measuring
    from largemargin.app.config import RunConfig
    from largemargin.app.predict import predict
    from largemargin.app.report.write import report
    from largemargin.app.training.engine import train
    from largemargin.app.training.presets import Preset, preset
    from largemargin.app.training.runs import Run
    from largemargin.integrations.scikit_learn import LargeMarginClassifier
    from largemargin.losses.base import schedules
    from largemargin.measuring import robust
    from largemargin.measuring.compare_geometry import compare_geometry
    from largemargin.measuring.embed import embed
    from largemargin.measuring.evaluate import Evaluation, evaluate
    from largemargin.measuring.geometry_result import Geometry
    from largemargin.measuring.measure import measure, measure_arrays

_MODULES = {
    "export": "export",
    "functional": "functional",
    "geometry": "geometry",
    "measuring": "measuring",
    "robust": "measuring.robust",
    "schedules": "losses.base.schedules",
}
_HOMES = {
    "Evaluation": "measuring.evaluate",
    "Geometry": "measuring.geometry_result",
    "LargeMarginClassifier": "integrations.scikit_learn",
    "Preset": "app.training.presets",
    "Run": "app.training.runs",
    "RunConfig": "app.config",
    "compare_geometry": "measuring.compare_geometry",
    "embed": "measuring.embed",
    "evaluate": "measuring.evaluate",
    "measure": "measuring.measure",
    "measure_arrays": "measuring.measure",
    "predict": "app.predict",
    "preset": "app.training.presets",
    "report": "app.report.write",
    "train": "app.training.engine",
}
"""Where names live that training a model does not need: imported when they are first asked for."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"largemargin.{_MODULES[name]}")
    if name in _HOMES:
        value = getattr(import_module(f"largemargin.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    for loss in LOSSES.values():
        if loss.__name__ == name:
            return loss
    raise AttributeError(f"module 'largemargin' has no attribute {name!r}{_meant(name)}")


def _meant(name: str) -> str:
    """``ArcFaceLoss`` of another library is ``ArcFace`` here."""
    from difflib import get_close_matches

    from largemargin import functional

    if name in functional.__all__:
        return f". It is lm.functional.{name}"
    close = get_close_matches(name.removesuffix("Loss"), __all__, n=1, cutoff=0.75)
    return f". Did you mean {close[0]}?" if close and name[0] != "_" else ""


def __dir__() -> list[str]:
    """Public names only, so that an interpreter completes ``lm.mea`` and shows no machinery."""
    return sorted(__all__)


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
]

if not TYPE_CHECKING:
    from importlib.util import find_spec as _find_spec

    __all__ += sorted({loss.__name__ for loss in LOSSES.values()}.difference(__all__))
    if _find_spec("sklearn") is None:  # help(lm) and `import *` ask for every name
        __all__.remove("LargeMarginClassifier")
