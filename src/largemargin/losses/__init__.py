"""Losses: one paper term, one file, a pure function and a module each."""

from largemargin.losses.arcface import ArcFace, arcface
from largemargin.losses.base.class_counts import balanced_weights, ldam_margins
from largemargin.losses.base.loss import Loss, LossValue
from largemargin.losses.base.objective import Objective
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
from largemargin.losses.discriminative import Discriminative, RobustDiscriminative
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
from largemargin.losses.stable_discriminative import StableDiscriminative
from largemargin.losses.unified_margin import UnifiedMargin, unified_margin

LOSSES: dict[str, type[Loss]] = {
    "arcface": ArcFace,
    "biased_softmax": BiasedSoftmax,
    "center": CenterLoss,
    "centroid_margin": CentroidMargin,
    "centroid_norm": CentroidNorm,
    "compactness": Compactness,
    "cosface": CosFace,
    "cross_entropy": CrossEntropy,
    "dense_hinge": DenseHinge,
    "discriminative": Discriminative,
    "focal": Focal,
    "gaussian_mixture": GaussianMixture,
    "gm_softmax": GMSoftmax,
    "kobayashi": Kobayashi,
    "label_smoothing": LabelSmoothing,
    "layer_margin": LayerMargin,
    "ldam": LDAM,
    "lm_softmax": LMSoftmax,
    "lsoftmax": LSoftmax,
    "margin_distribution": MarginDistribution,
    "margin_hinge": MarginHinge,
    "max_hinge": MaxHinge,
    "max_softplus": MaxSoftplus,
    "normface": NormFace,
    "rival_divergence": RivalDivergence,
    "robust_discriminative": RobustDiscriminative,
    "sample_margin": SampleMargin,
    "soft_hinge": SoftHinge,
    "sphereface": SphereFace,
    "stability": Stability,
    "stable_discriminative": StableDiscriminative,
    "super_symmetry": SuperSymmetry,
    "unified_margin": UnifiedMargin,
    "zero_centroid": ZeroCentroid,
}
"""Every loss by its name; a new one adds its file and a line here."""

__all__ = [
    "LDAM",
    "LOSSES",
    "ArcFace",
    "BiasedSoftmax",
    "CenterLoss",
    "CentroidMargin",
    "CentroidNorm",
    "Compactness",
    "CosFace",
    "CrossEntropy",
    "DenseHinge",
    "Discriminative",
    "Focal",
    "GMSoftmax",
    "GaussianMixture",
    "InputMargins",
    "Kobayashi",
    "LMSoftmax",
    "LSoftmax",
    "LabelSmoothing",
    "LayerMargin",
    "Loss",
    "LossValue",
    "MarginDistribution",
    "MarginHinge",
    "MaxHinge",
    "MaxSoftplus",
    "NormFace",
    "Objective",
    "RivalDivergence",
    "RobustDiscriminative",
    "SampleMargin",
    "SoftHinge",
    "SphereFace",
    "Stability",
    "StableDiscriminative",
    "SuperSymmetry",
    "UnifiedMargin",
    "ZeroCentroid",
    "arcface",
    "balanced_weights",
    "biased_softmax",
    "center_loss",
    "center_update",
    "centroid_margin",
    "centroid_norm",
    "compactness",
    "cosface",
    "cross_entropy",
    "dense_hinge",
    "focal",
    "gaussian_mixture",
    "gm_softmax",
    "kobayashi",
    "label_smoothing",
    "layer_margin",
    "ldam_margins",
    "linearized_margins",
    "lm_softmax",
    "lsoftmax",
    "margin_distribution",
    "margin_hinge",
    "max_hinge",
    "max_softplus",
    "noise_alignment",
    "normface",
    "rival_divergence",
    "sample_margin",
    "soft_hinge",
    "sphereface",
    "sphereface_psi",
    "stability",
    "super_symmetry",
    "super_symmetry_penalty",
    "unified_margin",
    "zero_centroid",
]
