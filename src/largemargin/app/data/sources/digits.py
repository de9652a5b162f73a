"""scikit-learn's digits: 1797 grey images of 8 x 8 pixels in ten classes, bundled with it."""

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.errors import MissingPackage


def read(config: DataConfig) -> Source:
    """70 % for training and 30 % for testing, each class split alike; the split is fixed."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise MissingPackage(
            "the digits come with scikit-learn. Install it: pip install 'largemargin[train]'"
        ) from None
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target, dtype=torch.long)
    train, test = train_test_split(
        list(range(len(labels))), test_size=0.3, stratify=labels.tolist(), random_state=0
    )
    return Source(
        classes=tuple(str(digit) for digit in range(10)),
        splits={
            "train": in_memory("train", images[train], labels[train]),
            "test": in_memory("test", images[test], labels[test]),
        },
        licence="UCI Optical Recognition of Handwritten Digits, CC BY 4.0; with scikit-learn (BSD)",
    )
