"""What is trained on: sources, modifiers, batches."""

from largemargin.app.config import DataConfig
from largemargin.app.data.augment import Augment, Draws
from largemargin.app.data.epoch_batches import Batch, Batches
from largemargin.app.data.load import Data, load_data
from largemargin.app.data.modify import class_counts_profile, imbalanced_subset
from largemargin.app.data.samples import Samples

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
