"""Where class vectors live: learned heads, centroids of features, fixed arrangements."""

from largemargin.prototypes.centroids import BatchCentroids, CentroidBank, class_means
from largemargin.prototypes.fixed import SimplexHead, simplex
from largemargin.prototypes.head import ClassHead
from largemargin.prototypes.packing import Packing, best_packing, packing_bound
from largemargin.prototypes.planning import MemoryEstimate, estimate_memory, most_classes
from largemargin.prototypes.sharded import ShardedClassHead

__all__ = [
    "BatchCentroids",
    "CentroidBank",
    "ClassHead",
    "MemoryEstimate",
    "Packing",
    "ShardedClassHead",
    "SimplexHead",
    "best_packing",
    "class_means",
    "estimate_memory",
    "most_classes",
    "packing_bound",
    "simplex",
]
