"""Where images come from: functions of a ``DataConfig`` that return a ``Source``."""

from collections.abc import Callable

from largemargin.app.config import DataConfig
from largemargin.app.data.sources import (
    arrays,
    csv_file,
    hugging_face_hub,
    image_folders,
    published_folders,
    standard_datasets,
)
from largemargin.app.data.sources.source import Source

SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "digits": standard_datasets.read_digits,
    "cifar10": standard_datasets.read_torchvision,
    "cifar100": standard_datasets.read_torchvision,
    "svhn": standard_datasets.read_torchvision,
    "mnist": standard_datasets.read_mnist,
    "fashion_mnist": standard_datasets.read_mnist,
    "folder": image_folders.read,
    "csv": csv_file.read,
    "arrays": arrays.read,
    "huggingface": hugging_face_hub.read,
    "rscd": published_folders.read_rscd,
    "market1501": published_folders.read_people,
    "dukemtmc": published_folders.read_people,
}

__all__ = ["SOURCES", "Source"]
