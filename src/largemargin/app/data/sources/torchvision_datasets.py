"""CIFAR-10, CIFAR-100 and SVHN, read and fetched by torchvision.

Files that are there already are used. An archive that lies in the folder is unpacked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.errors import LargeMarginError, MissingPackage

DEFAULT_FOLDER = "data"


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


CIFAR_LICENCE = "no formal licence; citation asked (Krizhevsky 2009)"

KNOWN = {
    "cifar10": Known(
        title="CIFAR10",
        place="cifar-10-python.tar.gz, or the folder cifar-10-batches-py that is in it",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence=CIFAR_LICENCE,
        statistics=((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)),
        folder="cifar-10-batches-py",
        archives=("cifar-10-python.tar.gz",),
    ),
    "cifar100": Known(
        title="CIFAR100",
        place="cifar-100-python.tar.gz, or the folder cifar-100-python that is in it",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
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


def read(config: DataConfig) -> Source:
    known = KNOWN[config.name]
    folder = folder_of(config, known)
    build = getattr(torchvision_datasets(), known.title)
    unpack = not config.download and any(is_whole(folder / name, build) for name in known.archives)

    def opened(split: str) -> Any:
        part = {"split": split} if config.name == "svhn" else {"train": split == "train"}
        return build(str(folder), download=config.download or unpack, **part)

    place = f"{known.place} (from {known.page})"
    parts = {
        split: attempt(partial(opened, split), config, folder, place) for split in ("train", "test")
    }
    classes = tuple(getattr(parts["train"], "classes", None) or map(str, range(10)))
    return Source(
        classes=classes,
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


def folder_of(config: DataConfig, known: Known) -> Path:
    """The folder to look in; the one inside it that torchvision looks for may be given too."""
    folder = Path(config.path or DEFAULT_FOLDER).expanduser()
    return folder.parent if known.folder and folder.name == known.folder else folder


def torchvision_datasets() -> Any:
    try:
        from torchvision import datasets
    except ImportError:
        raise MissingPackage(
            "this data set is read by torchvision. Install it: pip install 'largemargin[train]'"
        ) from None
    return datasets


def attempt(build: Callable[[], Any], config: DataConfig, folder: Path, place: str) -> Any:
    """What ``build`` makes; where it fails, an error that says what to place where."""
    try:
        return build()
    except Exception as error:  # torchvision, the network and the file system all have their own
        why = " ".join(str(error).split()) or type(error).__name__
        failed = "cannot be downloaded" if config.download else "is not there, or not whole"
        hint = "" if config.download else ", or set download: true"
        raise LargeMarginError(
            f"{config.name} {failed} ({why}). Place {place} in the folder {folder}{hint}."
        ) from None


def as_samples(split: str, dataset: Any) -> Samples:
    import numpy as np

    pixels = torch.as_tensor(np.asarray(dataset.data))
    if pixels.shape[1] != 3:  # CIFAR has its channels last
        pixels = pixels.permute(0, 3, 1, 2)
    labels = getattr(dataset, "targets", None)
    labels = dataset.labels if labels is None else labels
    return in_memory(split, pixels.contiguous(), torch.as_tensor(np.asarray(labels)))
