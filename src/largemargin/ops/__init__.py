"""How class statistics are computed: the one operator that the losses are functions of."""

from largemargin.ops.boundary import signed_boundary_distance
from largemargin.ops.class_stats import (
    ClassStats,
    ComputeOptions,
    class_stats,
    class_stats_from_logits,
)
from largemargin.ops.norms import normalize, safe_norm
from largemargin.ops.similarity import SIMILARITIES, similarity_logits

__all__ = [
    "SIMILARITIES",
    "ClassStats",
    "ComputeOptions",
    "class_stats",
    "class_stats_from_logits",
    "normalize",
    "safe_norm",
    "signed_boundary_distance",
    "similarity_logits",
]
