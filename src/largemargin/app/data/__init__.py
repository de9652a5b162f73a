"""What is trained on: sources, modifiers, batches."""

from largemargin.app.config import DataConfig
from largemargin.app.data.augment import Augment, Draws
from largemargin.app.data.load import Data, load_data
from largemargin.app.data.modify import class_counts_profile, imbalanced_subset
from largemargin.app.data.samples import Batches, Samples
from largemargin.measuring.batches import ImageBatch

__all__ = [
    "DataConfig",
    "Data",
    "Samples",
    "load_data",
    "Batches",
    "ImageBatch",
    "Augment",
    "Draws",
    "class_counts_profile",
    "imbalanced_subset",
]
