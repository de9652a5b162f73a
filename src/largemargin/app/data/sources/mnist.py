"""MNIST and Fashion-MNIST: four idx files, packed (.gz) or not.

They are looked for in the folder itself and where torchvision keeps them, in ``MNIST/raw`` or
``FashionMNIST/raw`` below it; torchvision fetches them.
"""

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.app.data.sources.torchvision_datasets import (
    DEFAULT_FOLDER,
    Known,
    attempt,
    torchvision_datasets,
)
from largemargin.errors import LargeMarginError

LARGEST = 2**28
"""Bytes of the largest file that is read: MNIST's training images are a sixth of it."""
PREFIX = {"train": "train", "test": "t10k"}
PLACE = (
    "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
    "t10k-labels-idx1-ubyte.gz"
)
KNOWN = {
    "mnist": Known(
        title="MNIST",
        place=PLACE,
        page="https://ossci-datasets.s3.amazonaws.com/mnist",
        licence="CC BY-SA 3.0, as usually stated (LeCun, Cortes, Burges)",
        statistics=((0.13066048,), (0.30810781,)),
    ),
    "fashion_mnist": Known(
        title="FashionMNIST",
        place=PLACE,
        page="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT (Zalando)",
        statistics=((0.28604059,), (0.35302424,)),
    ),
}
GARMENTS = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


def read(config: DataConfig) -> Source:
    known = KNOWN[config.name]
    folder = Path(config.path or DEFAULT_FOLDER).expanduser()
    place = f"{known.place} (from {known.page})"
    if config.download and not all(files(folder, known).values()):
        build = getattr(torchvision_datasets(), known.title)
        attempt(lambda: build(str(folder), download=True), config, folder, place)
    found = files(folder, known)
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise LargeMarginError(
            f"{config.name} is not whole in the folder {folder}: {', '.join(missing)} not found. "
            f"Place {place} there, or set download: true."
        )
    paths = {name: path for name, path in found.items() if path is not None}
    names = GARMENTS.split(",") if config.name == "fashion_mnist" else map(str, range(10))
    return Source(
        classes=tuple(names),
        splits={split: read_split(split, paths) for split in PREFIX},
        licence=known.licence,
        statistics=known.statistics,
    )


def files(folder: Path, known: Known) -> dict[str, Path | None]:
    """Where each of the four files is, if it is there."""
    places = (folder, folder / known.title / "raw", folder / "raw")
    names = [
        f"{prefix}-{kind}-ubyte"
        for prefix in PREFIX.values()
        for kind in ("images-idx3", "labels-idx1")
    ]
    return {
        name: next(
            (
                path
                for place in places
                for path in (place / name, place / f"{name}.gz")
                if path.is_file()
            ),
            None,
        )
        for name in names
    }


def read_split(split: str, paths: dict[str, Path]) -> Samples:
    prefix = PREFIX[split]
    images = read_idx(paths[f"{prefix}-images-idx3-ubyte"], axes=3)
    labels = read_idx(paths[f"{prefix}-labels-idx1-ubyte"], axes=1)
    return in_memory(split, images.unsqueeze(1), labels)


def read_idx(path: Path, axes: int) -> Tensor:
    """Bytes of an idx file: 0, 0, 8 (bytes), number of axes, lengths of them, values."""
    start = 4 + 4 * axes
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(start)
            lengths = [int.from_bytes(head[i : i + 4]) for i in range(4, start, 4)]
            # One byte more than there should be, and no more: a few bytes may unpack to any size.
            values = file.read(min(math.prod(lengths), LARGEST) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise LargeMarginError(f"{path} cannot be read: {error}. Fetch it again.") from None
    if head[:4] != bytes((0, 0, 8, axes)) or len(values) != math.prod(lengths):
        raise LargeMarginError(
            f"{path} is no idx file of {axes} axes of bytes, or not a whole one. Fetch it again."
        )
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(lengths)
