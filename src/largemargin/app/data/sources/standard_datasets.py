"""Published sets of small images: scikit-learn's digits, MNIST, Fashion-MNIST, CIFAR and SVHN.

Digits come with scikit-learn. MNIST and Fashion-MNIST are four idx files, packed (.gz) or not,
looked for in the folder itself and where torchvision keeps them, in ``MNIST/raw`` or
``FashionMNIST/raw`` below it. CIFAR-10, CIFAR-100 and SVHN are read by torchvision, which fetches
all but the digits. Files that are there already are used; an archive that lies in the folder is
unpacked.
"""

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.errors import LargeMarginError, optional_module

DEFAULT_FOLDER = "data"
LARGEST = 2**28
"""Bytes of the largest idx file that is read: MNIST's training images are a sixth of it."""
PREFIX = {"train": "train", "test": "t10k"}
TEN = tuple(map(str, range(10)))
GARMENTS = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


@dataclass(frozen=True)
class Known:
    """What is known of a data set.

    Args:
        title: its name in torchvision.
        place: what to place where, from the folder on.
        page: where it can be had.
        licence: terms of use.
        statistics: mean and standard deviation of its training pixels.
        folder: the folder that torchvision reads below the given one.
        archives: files that torchvision unpacks.
    """

    title: str
    place: str
    page: str
    licence: str
    statistics: tuple[tuple[float, ...], tuple[float, ...]]
    folder: str = ""
    archives: tuple[str, ...] = ()

    @property
    def whole_place(self) -> str:
        return f"{self.place} (from {self.page})"


IDX_FILES = tuple(
    f"{prefix}-{kind}-ubyte"
    for prefix in PREFIX.values()
    for kind in ("images-idx3", "labels-idx1")
)
IDX_PLACE = ", ".join(f"{name}.gz" for name in IDX_FILES)
CIFAR_LICENCE = "no formal licence; citation asked (Krizhevsky 2009)"
CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

KNOWN = {
    "mnist": Known(
        title="MNIST",
        place=IDX_PLACE,
        page="https://ossci-datasets.s3.amazonaws.com/mnist",
        licence="CC BY-SA 3.0, as usually stated (LeCun, Cortes, Burges)",
        statistics=((0.13066048,), (0.30810781,)),
    ),
    "fashion_mnist": Known(
        title="FashionMNIST",
        place=IDX_PLACE,
        page="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT (Zalando)",
        statistics=((0.28604059,), (0.35302424,)),
    ),
    "cifar10": Known(
        title="CIFAR10",
        place="cifar-10-python.tar.gz, or the folder cifar-10-batches-py that is in it",
        page=CIFAR_PAGE,
        licence=CIFAR_LICENCE,
        statistics=((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)),
        folder="cifar-10-batches-py",
        archives=("cifar-10-python.tar.gz",),
    ),
    "cifar100": Known(
        title="CIFAR100",
        place="cifar-100-python.tar.gz, or the folder cifar-100-python that is in it",
        page=CIFAR_PAGE,
        licence=CIFAR_LICENCE,
        statistics=((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)),
        folder="cifar-100-python",
        archives=("cifar-100-python.tar.gz",),
    ),
    "svhn": Known(
        title="SVHN",
        place="train_32x32.mat and test_32x32.mat (format 2, cropped digits)",
        page="http://ufldl.stanford.edu/housenumbers",
        licence="non-commercial use only (Netzer et al. 2011)",
        statistics=((0.43768, 0.44377, 0.47280), (0.19803, 0.20101, 0.19704)),
    ),
}


def read_digits(config: DataConfig) -> Source:
    """scikit-learn's digits: 1797 grey images of 8 x 8 pixels in ten classes, bundled with it.

    70 % for training and 30 % for testing, each class split alike; the split is fixed.
    """
    digits = optional_module("sklearn.datasets", "the digits come with scikit-learn").load_digits()
    from sklearn.model_selection import train_test_split

    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target, dtype=torch.long)
    train, test = train_test_split(
        list(range(len(labels))), test_size=0.3, stratify=labels.tolist(), random_state=0
    )
    return Source(
        classes=TEN,
        splits={
            "train": in_memory("train", images[train], labels[train]),
            "test": in_memory("test", images[test], labels[test]),
        },
        licence="UCI Optical Recognition of Handwritten Digits, CC BY 4.0; with scikit-learn (BSD)",
    )


def read_mnist(config: DataConfig) -> Source:
    known = KNOWN[config.name]
    folder = Path(config.path or DEFAULT_FOLDER).expanduser()
    if config.download and not all(files(folder, known).values()):
        build = getattr(torchvision_datasets(), known.title)
        attempt(partial(build, str(folder), download=True), config, folder)
    found = files(folder, known)
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise LargeMarginError(
            f"{config.name} is not whole in the folder {folder}: {', '.join(missing)} not found. "
            f"Place {known.whole_place} there, or set download: true."
        )
    paths = {name: path for name, path in found.items() if path is not None}
    return Source(
        classes=tuple(GARMENTS.split(",")) if config.name == "fashion_mnist" else TEN,
        splits={split: read_split(split, paths) for split in PREFIX},
        licence=known.licence,
        statistics=known.statistics,
    )


def files(folder: Path, known: Known) -> dict[str, Path | None]:
    """Where each of the four files is, if it is there."""
    places = (folder, folder / known.title / "raw", folder / "raw")
    found: dict[str, Path | None] = {}
    for name in IDX_FILES:
        paths = (place / each for place in places for each in (name, f"{name}.gz"))
        found[name] = next((path for path in paths if path.is_file()), None)
    return found


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


def read_torchvision(config: DataConfig) -> Source:
    known = KNOWN[config.name]
    folder = Path(config.path or DEFAULT_FOLDER).expanduser()
    if known.folder and folder.name == known.folder:  # the one inside it may be given too
        folder = folder.parent
    build = getattr(torchvision_datasets(), known.title)
    unpack = not config.download and any(is_whole(folder / name, build) for name in known.archives)

    def opened(split: str) -> Any:
        part = {"split": split} if config.name == "svhn" else {"train": split == "train"}
        return build(str(folder), download=config.download or unpack, **part)

    parts = {split: attempt(partial(opened, split), config, folder) for split in ("train", "test")}
    return Source(
        classes=tuple(getattr(parts["train"], "classes", TEN)),
        splits={split: as_samples(split, each) for split, each in parts.items()},
        licence=known.licence,
        statistics=known.statistics,
    )


def is_whole(archive: Path, kind: Any) -> bool:
    """Whether an archive is there and is the published one.

    Any other is not opened: torchvision would fetch it anew without being asked to, and what an
    archive of a stranger unpacks to is up to the stranger.
    """
    if not archive.is_file():
        return False
    from torchvision.datasets.utils import check_integrity

    if not check_integrity(archive, kind.tgz_md5):
        raise LargeMarginError(
            f"{archive} is not the published archive: its checksum is another. Fetch it again, or "
            "delete it and set download: true."
        )
    return True


def torchvision_datasets() -> Any:
    return optional_module("torchvision.datasets", "this data set is read by torchvision")


def attempt(build: Callable[[], Any], config: DataConfig, folder: Path) -> Any:
    """What ``build`` makes; where it fails, an error that says what to place where."""
    try:
        return build()
    except Exception as error:  # torchvision, the network and the file system all have their own
        why = " ".join(str(error).split()) or type(error).__name__
        failed = "cannot be downloaded" if config.download else "is not there, or not whole"
        hint = "" if config.download else ", or set download: true"
        raise LargeMarginError(
            f"{config.name} {failed} ({why}). Place {KNOWN[config.name].whole_place} in the folder "
            f"{folder}{hint}."
        ) from None


def as_samples(split: str, dataset: Any) -> Samples:
    import numpy as np

    pixels = torch.as_tensor(np.asarray(dataset.data))
    if pixels.shape[1] != 3:  # CIFAR has its channels last
        pixels = pixels.permute(0, 3, 1, 2)
    labels = getattr(dataset, "targets", None)
    labels = dataset.labels if labels is None else labels
    return in_memory(split, pixels.contiguous(), torch.as_tensor(np.asarray(labels)))
