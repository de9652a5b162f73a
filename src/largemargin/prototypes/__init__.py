"""Where class vectors live: learned heads, centroids of features, fixed arrangements."""

from largemargin.prototypes.centroids import BatchCentroids, CentroidBank, class_means
from largemargin.prototypes.fixed import SimplexHead, simplex
from largemargin.prototypes.head import ClassHead
from largemargin.prototypes.packing import Packing, best_packing, packing_bound

__all__ = [
    "BatchCentroids",
    "CentroidBank",
    "ClassHead",
    "Packing",
    "SimplexHead",
    "best_packing",
    "class_means",
    "packing_bound",
    "simplex",
]
