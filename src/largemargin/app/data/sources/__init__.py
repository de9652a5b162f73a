"""Where images come from: one short file each, with ``read(config) -> Source``."""

from collections.abc import Callable

from largemargin.app.config import DataConfig
from largemargin.app.data.sources import (
    arrays,
    csv_file,
    digits,
    folder,
    hugging_face_hub,
    market1501,
    mnist,
    rscd,
    torchvision_datasets,
)
from largemargin.app.data.sources.source import Source

SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "digits": digits.read,
    "cifar10": torchvision_datasets.read,
    "cifar100": torchvision_datasets.read,
    "svhn": torchvision_datasets.read,
    "mnist": mnist.read,
    "fashion_mnist": mnist.read,
    "folder": folder.read,
    "csv": csv_file.read,
    "arrays": arrays.read,
    "huggingface": hugging_face_hub.read,
    "rscd": rscd.read,
    "market1501": market1501.read,
    "dukemtmc": market1501.read,
}

__all__ = ["SOURCES", "Source"]
