"""largemargin: losses that separate classes by a wide margin, and measures that prove it.

    import largemargin as lm

    loss = lm.CosFace(scale=16.0)
    value = loss(features, linear, labels)

Modules live here, pure functions in :mod:`largemargin.functional`, measures in
:mod:`largemargin.geometry`, perturbations in :mod:`largemargin.measuring.robust`.
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from largemargin.version import __version__ as __version__

if TYPE_CHECKING:
    from largemargin import export as export
    from largemargin import functional as functional
    from largemargin import geometry as geometry
    from largemargin import measuring as measuring
    from largemargin.app.config import RunConfig as RunConfig
    from largemargin.app.predict import predict as predict
    from largemargin.app.report.page import report as report
    from largemargin.app.training.advice import Advice as Advice
    from largemargin.app.training.advice import advise as advise
    from largemargin.app.training.engine import train as train
    from largemargin.app.training.presets import Preset as Preset
    from largemargin.app.training.presets import preset as preset
    from largemargin.app.training.runs import Run as Run
    from largemargin.dropin.attach import attach as attach
    from largemargin.dropin.criterion import Criterion as Criterion
    from largemargin.exceptions import LargeMarginError as LargeMarginError
    from largemargin.heads.centroid_bank import CentroidBank as CentroidBank
    from largemargin.heads.class_head import ClassHead as ClassHead
    from largemargin.heads.memory_estimate import MemoryEstimate as MemoryEstimate
    from largemargin.heads.memory_estimate import estimate_memory as estimate_memory
    from largemargin.heads.packing import Packing as Packing
    from largemargin.heads.packing import best_packing as best_packing
    from largemargin.heads.sharded_class_head import ShardedClassHead as ShardedClassHead
    from largemargin.heads.simplex import SimplexHead as SimplexHead
    from largemargin.heads.simplex import simplex as simplex
    from largemargin.heads.sub_center_head import SubCenterHead as SubCenterHead
    from largemargin.integrations.scikit_learn import LargeMarginClassifier as LargeMarginClassifier
    from largemargin.losses import LDAM as LDAM
    from largemargin.losses import LOSSES as LOSSES
    from largemargin.losses import AdaCos as AdaCos
    from largemargin.losses import AdaFace as AdaFace
    from largemargin.losses import ArcFace as ArcFace
    from largemargin.losses import BiasedSoftmax as BiasedSoftmax
    from largemargin.losses import CenterLoss as CenterLoss
    from largemargin.losses import CentroidMargin as CentroidMargin
    from largemargin.losses import CentroidNorm as CentroidNorm
    from largemargin.losses import Compactness as Compactness
    from largemargin.losses import CosFace as CosFace
    from largemargin.losses import CrossEntropy as CrossEntropy
    from largemargin.losses import CurricularFace as CurricularFace
    from largemargin.losses import DenseHinge as DenseHinge
    from largemargin.losses import Discriminative as Discriminative
    from largemargin.losses import ElasticFace as ElasticFace
    from largemargin.losses import Focal as Focal
    from largemargin.losses import GaussianMixture as GaussianMixture
    from largemargin.losses import GeneralizedCrossEntropy as GeneralizedCrossEntropy
    from largemargin.losses import GMSoftmax as GMSoftmax
    from largemargin.losses import Kobayashi as Kobayashi
    from largemargin.losses import LabelSmoothing as LabelSmoothing
    from largemargin.losses import LayerMargin as LayerMargin
    from largemargin.losses import LMSoftmax as LMSoftmax
    from largemargin.losses import LogitAdjustment as LogitAdjustment
    from largemargin.losses import LogitNorm as LogitNorm
    from largemargin.losses import Loss as Loss
    from largemargin.losses import LossValue as LossValue
    from largemargin.losses import LSoftmax as LSoftmax
    from largemargin.losses import MagFace as MagFace
    from largemargin.losses import MarginDistribution as MarginDistribution
    from largemargin.losses import MarginHinge as MarginHinge
    from largemargin.losses import MaxHinge as MaxHinge
    from largemargin.losses import MaxSoftplus as MaxSoftplus
    from largemargin.losses import NormFace as NormFace
    from largemargin.losses import Objective as Objective
    from largemargin.losses import RivalDivergence as RivalDivergence
    from largemargin.losses import RobustDiscriminative as RobustDiscriminative
    from largemargin.losses import SampleMargin as SampleMargin
    from largemargin.losses import SoftHinge as SoftHinge
    from largemargin.losses import SphereFace as SphereFace
    from largemargin.losses import Stability as Stability
    from largemargin.losses import StableDiscriminative as StableDiscriminative
    from largemargin.losses import SuperSymmetry as SuperSymmetry
    from largemargin.losses import SymmetricCrossEntropy as SymmetricCrossEntropy
    from largemargin.losses import UnifiedMargin as UnifiedMargin
    from largemargin.losses import VSLoss as VSLoss
    from largemargin.losses import ZeroCentroid as ZeroCentroid
    from largemargin.losses.base import schedules as schedules
    from largemargin.measuring import robust as robust
    from largemargin.measuring.embed import embed as embed
    from largemargin.measuring.evaluate import Evaluation as Evaluation
    from largemargin.measuring.evaluate import evaluate as evaluate
    from largemargin.measuring.geometry_result import Geometry as Geometry
    from largemargin.measuring.geometry_result import compare_geometry as compare_geometry
    from largemargin.measuring.measure import measure as measure
    from largemargin.measuring.measure import measure_arrays as measure_arrays
    from largemargin.ops.class_stats import ClassStats as ClassStats
    from largemargin.ops.class_stats import class_stats as class_stats
    from largemargin.ops.class_stats import class_stats_from_logits as class_stats_from_logits
_MODULES = {
    "export": "export",
    "functional": "functional",
    "geometry": "geometry",
    "measuring": "measuring",
    "robust": "measuring.robust",
    "schedules": "losses.base.schedules",
}
_HOMES = {
    "Advice": "app.training.advice",
    "advise": "app.training.advice",
    "attach": "dropin.attach",
    "best_packing": "heads.packing",
    "CentroidBank": "heads.centroid_bank",
    "class_stats": "ops.class_stats",
    "class_stats_from_logits": "ops.class_stats",
    "ClassHead": "heads.class_head",
    "ClassStats": "ops.class_stats",
    "compare_geometry": "measuring.geometry_result",
    "Criterion": "dropin.criterion",
    "embed": "measuring.embed",
    "estimate_memory": "heads.memory_estimate",
    "evaluate": "measuring.evaluate",
    "Evaluation": "measuring.evaluate",
    "Geometry": "measuring.geometry_result",
    "LargeMarginClassifier": "integrations.scikit_learn",
    "LargeMarginError": "exceptions",
    "Loss": "losses",
    "LOSSES": "losses",
    "LossValue": "losses",
    "measure": "measuring.measure",
    "measure_arrays": "measuring.measure",
    "MemoryEstimate": "heads.memory_estimate",
    "Objective": "losses",
    "Packing": "heads.packing",
    "predict": "app.predict",
    "Preset": "app.training.presets",
    "preset": "app.training.presets",
    "report": "app.report.page",
    "Run": "app.training.runs",
    "RunConfig": "app.config",
    "ShardedClassHead": "heads.sharded_class_head",
    "simplex": "heads.simplex",
    "SimplexHead": "heads.simplex",
    "SubCenterHead": "heads.sub_center_head",
    "train": "app.training.engine",
}
"""Where names live beside those of the losses: imported when they are first asked for, torch with
them, so that ``largemargin --help`` need not wait for it."""

_ROOMS = ("dropin", "errors", "heads", "losses", "ops")
"""Where the core lies, as ``lm.heads.optim``."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES or name in _ROOMS:
        return import_module(f"largemargin.{_MODULES.get(name, name)}")
    if name in _HOMES:
        value = getattr(import_module(f"largemargin.{_HOMES[name]}"), name)
    elif name == "__all__":
        value = _public()
    elif _is_plain(name) or (value := _losses().get(name)) is None:
        raise AttributeError(f"module 'largemargin' has no attribute {name!r}{_meant(name)}")
    globals()[name] = value
    return value


def _is_plain(name: str) -> bool:
    """Surely no loss: tools ask for dunder names, jsonargparse for every class of settings."""
    return name[0] == "_" or name.endswith("Config")


def _losses() -> dict[str, object]:
    from largemargin.losses import LOSSES

    return {loss.__name__: loss for loss in LOSSES.values()}


def _public() -> list[str]:
    names = {*_MODULES, *_HOMES, *_losses(), "__version__"}
    if _find_spec("sklearn") is None:  # help(lm) and `import *` ask for every name
        names.remove("LargeMarginClassifier")
    return sorted(names)


def _meant(name: str) -> str:
    """``ArcFaceLoss`` of another library is ``ArcFace`` here."""
    from difflib import get_close_matches

    if _is_plain(name):
        return ""
    from largemargin import functional
    from largemargin.losses.base.constructor_arguments import method_called

    if name in functional.__all__:
        return f". It is lm.functional.{name}"
    close = get_close_matches(name.removesuffix("Loss"), _public(), n=1, cutoff=0.75)
    meant = method_called(name) or "".join(close)
    return f". Did you mean {meant}?" if meant else ""


def __dir__() -> list[str]:
    """Public names only, so that an interpreter completes ``lm.mea`` and shows no machinery."""
    return _public()
