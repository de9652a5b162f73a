"""Second implementation of every loss, in NumPy loops, written from the specification alone.

Function and keyword names are those of the library, so that a test can pair the two by name.
Nothing here imports the library or its tensor framework. Values are float64, shapes and defaults as
in the specification; clarity comes before speed.
"""

from oracles import (
    centroid_family,
    cosine_family,
    input_margins,
    numgrad,
    options,
    others,
    softmax_family,
    stable_centroids,
    stats,
)

# Losses that take (logits, labels) as well as (features, prototypes, labels).
LOGIT_ORACLES = {
    "cross_entropy": softmax_family.cross_entropy,
    "rival_divergence": softmax_family.rival_divergence,
    "kobayashi": softmax_family.kobayashi,
    "label_smoothing": softmax_family.label_smoothing,
    "max_hinge": softmax_family.max_hinge,
    "max_softplus": softmax_family.max_softplus,
    "dense_hinge": softmax_family.dense_hinge,
    "biased_softmax": softmax_family.biased_softmax,
    "soft_hinge": softmax_family.soft_hinge,
    "focal": softmax_family.focal,
    "generalized_cross_entropy": softmax_family.generalized_cross_entropy,
    "logit_norm": softmax_family.logit_norm,
    "symmetric_cross_entropy": softmax_family.symmetric_cross_entropy,
}

# Losses that need (features, prototypes, labels); prototypes are centers or means in two of them.
FEATURE_ORACLES = {
    "normface": cosine_family.normface,
    "cosface": cosine_family.cosface,
    "arcface": cosine_family.arcface,
    "sphereface": cosine_family.sphereface,
    "unified_margin": cosine_family.unified_margin,
    "gm_softmax": cosine_family.gm_softmax,
    "lm_softmax": cosine_family.lm_softmax,
    "sample_margin": cosine_family.sample_margin,
    "adaface": cosine_family.adaface,
    "magface": cosine_family.magface,
    "elasticface": cosine_family.elasticface,
    "curricularface": cosine_family.curricularface,
    "lsoftmax": others.lsoftmax,
    "gaussian_mixture": others.gaussian_mixture,
    "center_loss": centroid_family.center_loss,
}

# Every per-sample loss: hard labels (N,) or soft targets (N, C) last, (N,) unreduced.
ORACLES = {**LOGIT_ORACLES, **FEATURE_ORACLES}

# Everything else with a counterpart of the same name in the library.
OTHER_ORACLES = {
    "similarity_logits": stats.similarity_logits,
    "class_stats": stats.class_stats,
    "class_stats_from_logits": stats.class_stats_from_logits,
    "normalize": stats.normalize,
    "safe_norm": stats.safe_norm,
    "logit_adjustment": softmax_family.logit_adjustment,
    "logit_adjusted": softmax_family.logit_adjusted,
    "vs_loss": softmax_family.vs_loss,
    "implicit_bias": softmax_family.implicit_bias,
    "sphereface_psi": cosine_family.sphereface_psi,
    "zero_centroid": cosine_family.zero_centroid,
    "ldam_margins": cosine_family.ldam_margins,
    "balanced_weights": cosine_family.balanced_weights,
    "dynamic_margins": cosine_family.dynamic_margins,
    "adacos_scale": cosine_family.adacos_scale,
    "compactness": centroid_family.compactness,
    "noise_alignment": centroid_family.noise_alignment,
    "centroid_margin": centroid_family.centroid_margin,
    "centroid_norm": centroid_family.centroid_norm,
    "signed_boundary_distance": centroid_family.signed_boundary_distance,
    "stability": centroid_family.stability,
    "center_update": centroid_family.center_update,
    "super_symmetry": others.super_symmetry,
    "super_symmetry_penalty": others.super_symmetry_penalty,
    "margin_distribution": others.margin_distribution,
    "margin_hinge": others.margin_hinge,
}

__all__ = [
    "FEATURE_ORACLES",
    "LOGIT_ORACLES",
    "ORACLES",
    "OTHER_ORACLES",
    "centroid_family",
    "cosine_family",
    "input_margins",
    "numgrad",
    "options",
    "others",
    "softmax_family",
    "stable_centroids",
    "stats",
]
