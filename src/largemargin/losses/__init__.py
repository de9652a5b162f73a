"""Losses: one paper term, one file, a pure function and a module each.

A new loss is one file and one line here, its import: ``LOSSES``, ``lm.X``, ``lm.functional.x``,
the command line, the docs and the contract tests find it by its ``key``. For type checkers and the
API reference its names are also imported in ``largemargin/__init__.py`` and ``functional.py``.
"""
# ruff: noqa: F401

from largemargin.losses.adacos import AdaCos
from largemargin.losses.adaface import AdaFace, adaface
from largemargin.losses.arcface import ArcFace, arcface
from largemargin.losses.base.class_counts import balanced_weights, dynamic_margins, ldam_margins
from largemargin.losses.base.loss import Loss, LossValue
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.scale import adacos_scale
from largemargin.losses.center import CenterLoss, center_loss, center_update
from largemargin.losses.centroid_margin import (
    CentroidMargin,
    CentroidNorm,
    centroid_margin,
    centroid_norm,
)
from largemargin.losses.compactness import Compactness, compactness, noise_alignment
from largemargin.losses.cosface import CosFace, cosface
from largemargin.losses.cross_entropy import CrossEntropy, cross_entropy
from largemargin.losses.curricularface import CurricularFace, curricularface
from largemargin.losses.discriminative import (
    Discriminative,
    RobustDiscriminative,
    StableDiscriminative,
)
from largemargin.losses.elasticface import ElasticFace, elasticface
from largemargin.losses.focal import Focal, focal
from largemargin.losses.gaussian_mixture import GaussianMixture, gaussian_mixture
from largemargin.losses.gm_softmax import GMSoftmax, gm_softmax
from largemargin.losses.hinges import (
    DenseHinge,
    MaxHinge,
    MaxSoftplus,
    SoftHinge,
    dense_hinge,
    max_hinge,
    max_softplus,
    soft_hinge,
)
from largemargin.losses.input_margin import (
    InputMargins,
    MarginDistribution,
    MarginHinge,
    linearized_margins,
    margin_distribution,
    margin_hinge,
)
from largemargin.losses.kobayashi import (
    BiasedSoftmax,
    Kobayashi,
    RivalDivergence,
    biased_softmax,
    kobayashi,
    rival_divergence,
)
from largemargin.losses.label_smoothing import LabelSmoothing, label_smoothing
from largemargin.losses.layer_margin import LayerMargin, layer_margin
from largemargin.losses.ldam import LDAM
from largemargin.losses.lm_softmax import LMSoftmax, lm_softmax
from largemargin.losses.logit_adjustment import (
    LogitAdjustment,
    VSLoss,
    logit_adjusted,
    logit_adjustment,
    vs_loss,
)
from largemargin.losses.logit_norm import LogitNorm, logit_norm
from largemargin.losses.magface import MagFace, magface
from largemargin.losses.noisy_labels import (
    GeneralizedCrossEntropy,
    SymmetricCrossEntropy,
    generalized_cross_entropy,
    symmetric_cross_entropy,
)
from largemargin.losses.normface import NormFace, normface
from largemargin.losses.prototype_penalties import (
    SuperSymmetry,
    ZeroCentroid,
    super_symmetry,
    super_symmetry_penalty,
    zero_centroid,
)
from largemargin.losses.sample_margin import SampleMargin, sample_margin
from largemargin.losses.sphereface import LSoftmax, SphereFace, lsoftmax, sphereface, sphereface_psi
from largemargin.losses.stability import Stability, stability
from largemargin.losses.unified_margin import UnifiedMargin, unified_margin

LOSSES: dict[str, type[Loss]] = {
    kind.key: kind
    for kind in sorted(
        (each for each in vars().values() if isinstance(each, type) and issubclass(each, Loss)),
        key=lambda kind: kind.key,
    )
    if kind is not Loss
}
"""Every loss by its name."""

__all__ = ["LOSSES"]
__all__ += [name for name, each in vars().items() if hasattr(each, "__qualname__")]
