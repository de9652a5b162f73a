"""Where images come from: one short file each, with ``read(config) -> Source``."""

from collections.abc import Callable

from largemargin.data.config import DataConfig
from largemargin.data.sources import (
    arrays,
    csv_file,
    digits,
    folder,
    hugging_face,
    known,
    market1501,
    mnist,
    rscd,
)
from largemargin.data.sources.source import Source

SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "digits": digits.read,
    "cifar10": known.read,
    "cifar100": known.read,
    "svhn": known.read,
    "mnist": mnist.read,
    "fashion_mnist": mnist.read,
    "folder": folder.read,
    "csv": csv_file.read,
    "arrays": arrays.read,
    "huggingface": hugging_face.read,
    "rscd": rscd.read,
    "market1501": market1501.read,
    "dukemtmc": market1501.read,
}

__all__ = ["SOURCES", "Source"]
