"""Every pure function of the core in one place: ``import largemargin.functional as LF``.

Losses return unreduced values. Their modules, in ``largemargin``, add weights, targets and the
reduction.
"""

import sys
from typing import TYPE_CHECKING, Any

from largemargin.heads.packing import best_packing, packing_bound
from largemargin.heads.simplex import simplex
from largemargin.losses.arcface import arcface
from largemargin.losses.base.class_counts import balanced_weights, ldam_margins
from largemargin.losses.center import center_loss, center_update
from largemargin.losses.centroid_margin import centroid_margin, centroid_norm
from largemargin.losses.compactness import compactness, noise_alignment
from largemargin.losses.cosface import cosface
from largemargin.losses.cross_entropy import cross_entropy
from largemargin.losses.focal import focal
from largemargin.losses.gaussian_mixture import gaussian_mixture
from largemargin.losses.gm_softmax import gm_softmax
from largemargin.losses.hinges import dense_hinge, max_hinge, max_softplus, soft_hinge
from largemargin.losses.input_margin import linearized_margins, margin_distribution, margin_hinge
from largemargin.losses.kobayashi import biased_softmax, kobayashi, rival_divergence
from largemargin.losses.label_smoothing import label_smoothing
from largemargin.losses.layer_margin import layer_margin
from largemargin.losses.lm_softmax import lm_softmax
from largemargin.losses.normface import normface
from largemargin.losses.prototype_penalties import (
    super_symmetry,
    super_symmetry_penalty,
    zero_centroid,
)
from largemargin.losses.sample_margin import sample_margin
from largemargin.losses.sphereface import lsoftmax, sphereface, sphereface_psi
from largemargin.losses.stability import stability
from largemargin.losses.unified_margin import unified_margin
from largemargin.ops.boundary import signed_boundary_distance
from largemargin.ops.class_stats import class_stats, class_stats_from_logits
from largemargin.ops.norms import normalize, safe_norm
from largemargin.ops.similarity import similarity_logits

__all__ = [
    "arcface",
    "balanced_weights",
    "best_packing",
    "biased_softmax",
    "center_loss",
    "center_update",
    "centroid_margin",
    "centroid_norm",
    "class_stats",
    "class_stats_from_logits",
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
    "normalize",
    "normface",
    "packing_bound",
    "rival_divergence",
    "safe_norm",
    "sample_margin",
    "signed_boundary_distance",
    "similarity_logits",
    "simplex",
    "soft_hinge",
    "sphereface",
    "sphereface_psi",
    "stability",
    "super_symmetry",
    "super_symmetry_penalty",
    "unified_margin",
    "zero_centroid",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The function of a loss in ``LOSSES`` that is not imported above: its key is its name."""
        from largemargin.losses import LOSSES

        module = sys.modules[LOSSES[name].__module__] if name in LOSSES else None
        if not hasattr(module, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(module, name)
