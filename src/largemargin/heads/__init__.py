"""Where class vectors live: learned heads, centroids of features, fixed arrangements."""

from largemargin.heads.centroid_bank import BatchCentroids, CentroidBank, class_means
from largemargin.heads.class_head import ClassHead
from largemargin.heads.memory_estimate import MemoryEstimate, estimate_memory, most_classes
from largemargin.heads.packing import Packing, best_packing, packing_bound
from largemargin.heads.sharded_class_head import ShardedClassHead
from largemargin.heads.simplex import SimplexHead, simplex
from largemargin.heads.sub_center_head import DominantCenters, SubCenterHead

__all__ = [
    "BatchCentroids",
    "CentroidBank",
    "ClassHead",
    "DominantCenters",
    "MemoryEstimate",
    "Packing",
    "ShardedClassHead",
    "SimplexHead",
    "SubCenterHead",
    "best_packing",
    "class_means",
    "estimate_memory",
    "most_classes",
    "packing_bound",
    "simplex",
]
