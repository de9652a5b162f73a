"""Every pure function of the core in one place: ``import largemargin.functional as LF``.

Losses return unreduced values. Their modules, in ``largemargin``, add weights, targets and the
reduction. Unless a function says otherwise, features are (N, D), prototypes (C, D), labels (N,) or
soft targets (N, C), a bias (C,) and the result (N,); where labels may be left out, the call is
(logits, labels) with logits (N, C).
"""

import sys
from typing import TYPE_CHECKING, Any

from largemargin.heads.packing import best_packing as best_packing
from largemargin.heads.packing import packing_bound as packing_bound
from largemargin.heads.simplex import simplex as simplex
from largemargin.losses import LOSSES
from largemargin.losses import adacos_scale as adacos_scale
from largemargin.losses import adaface as adaface
from largemargin.losses import arcface as arcface
from largemargin.losses import balanced_weights as balanced_weights
from largemargin.losses import biased_softmax as biased_softmax
from largemargin.losses import center_loss as center_loss
from largemargin.losses import center_update as center_update
from largemargin.losses import centroid_margin as centroid_margin
from largemargin.losses import centroid_norm as centroid_norm
from largemargin.losses import compactness as compactness
from largemargin.losses import cosface as cosface
from largemargin.losses import cross_entropy as cross_entropy
from largemargin.losses import curricularface as curricularface
from largemargin.losses import dense_hinge as dense_hinge
from largemargin.losses import dynamic_margins as dynamic_margins
from largemargin.losses import elasticface as elasticface
from largemargin.losses import focal as focal
from largemargin.losses import gaussian_mixture as gaussian_mixture
from largemargin.losses import generalized_cross_entropy as generalized_cross_entropy
from largemargin.losses import gm_softmax as gm_softmax
from largemargin.losses import kobayashi as kobayashi
from largemargin.losses import label_smoothing as label_smoothing
from largemargin.losses import layer_margin as layer_margin
from largemargin.losses import ldam_margins as ldam_margins
from largemargin.losses import linearized_margins as linearized_margins
from largemargin.losses import lm_softmax as lm_softmax
from largemargin.losses import logit_adjusted as logit_adjusted
from largemargin.losses import logit_adjustment as logit_adjustment
from largemargin.losses import logit_norm as logit_norm
from largemargin.losses import lsoftmax as lsoftmax
from largemargin.losses import magface as magface
from largemargin.losses import margin_distribution as margin_distribution
from largemargin.losses import margin_hinge as margin_hinge
from largemargin.losses import max_hinge as max_hinge
from largemargin.losses import max_softplus as max_softplus
from largemargin.losses import noise_alignment as noise_alignment
from largemargin.losses import normface as normface
from largemargin.losses import rival_divergence as rival_divergence
from largemargin.losses import sample_margin as sample_margin
from largemargin.losses import soft_hinge as soft_hinge
from largemargin.losses import sphereface as sphereface
from largemargin.losses import sphereface_psi as sphereface_psi
from largemargin.losses import stability as stability
from largemargin.losses import super_symmetry as super_symmetry
from largemargin.losses import super_symmetry_penalty as super_symmetry_penalty
from largemargin.losses import symmetric_cross_entropy as symmetric_cross_entropy
from largemargin.losses import unified_margin as unified_margin
from largemargin.losses import vs_loss as vs_loss
from largemargin.losses import zero_centroid as zero_centroid
from largemargin.ops.boundary import signed_boundary_distance as signed_boundary_distance
from largemargin.ops.class_stats import class_stats as class_stats
from largemargin.ops.class_stats import class_stats_from_logits as class_stats_from_logits
from largemargin.ops.norms import normalize as normalize
from largemargin.ops.norms import safe_norm as safe_norm
from largemargin.ops.similarity import similarity_logits as similarity_logits

__all__ = [name for name, each in vars().items() if hasattr(each, "__qualname__") and name != "Any"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The function of a loss in ``LOSSES`` that is not imported above: its key is its name."""
        module = sys.modules[LOSSES[name].__module__] if name in LOSSES else None
        if not hasattr(module, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(module, name)
