"""What is trained on: sources, modifiers, batches."""

from largemargin.data.augment import Augment, Draws
from largemargin.data.batches import Batch, Batches
from largemargin.data.config import DataConfig
from largemargin.data.data import Data
from largemargin.data.imbalance import class_counts_profile, imbalanced_subset
from largemargin.data.load import load_data
from largemargin.data.samples import Samples

__all__ = [
    "DataConfig",
    "Data",
    "Samples",
    "load_data",
    "Batches",
    "Batch",
    "Augment",
    "Draws",
    "class_counts_profile",
    "imbalanced_subset",
]
