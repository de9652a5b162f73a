"""RSCD, the Road Surface Classification Dataset (Zhao et al. 2023): 27 classes, a million images.

As it is published: ``train/`` with a folder per class (``dry_asphalt_smooth``), and ``vali_20k/``
and ``test_50k/`` without folders, the class in the name of the file, after the first hyphen and
with hyphens for underscores: ``2022012523413511-wet-asphalt-smooth.jpg``. A folder around these
three, as the archive has it, is fine; so are class folders in the validation and test parts.
"""

from pathlib import Path

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.image_folders import (
    folders,
    given_folder,
    id_of,
    images,
    name_of,
    read_split,
)
from largemargin.app.data.sources.source import Source, class_indices, in_files
from largemargin.errors import LargeMarginError

LAYOUT = "train/CLASS/*.jpg, vali_20k/*.jpg and test_50k/*.jpg"
NAMES = {"validation": ("vali_20k", "vali", "val", "validation"), "test": ("test_50k", "test")}


def read(config: DataConfig) -> Source:
    root = inner(given_folder(config, LAYOUT), config)
    classes = tuple(name_of(each) for each in folders(root / "train"))
    splits: dict[str, Samples] = {}
    splits["train"], others = read_split("train", root / "train", root, classes)
    for split, names in NAMES.items():
        folder = next((root / name for name in names if (root / name).is_dir()), None)
        if folder is not None:
            reader = read_split if folders(folder) else read_flat
            splits[split], ignored = reader(split, folder, root, classes)
            others += ignored
    return Source(
        classes,
        splits,
        from_files=True,
        licence="not known to largemargin: see the authors' page, thu-rsxd.com",
        record={"other_files": others} if others else {},
    )


def inner(folder: Path, config: DataConfig) -> Path:
    """The folder with ``train`` in it: this one, or the only one in it that has."""
    for each in (folder, *folders(folder)):
        if (each / "train").is_dir() and folders(each / "train"):
            return each
    raise LargeMarginError(
        f"path must be RSCD's folder with {LAYOUT}, but {config.path} has no train/CLASS folders."
    )


def read_flat(
    split: str, folder: Path, root: Path, classes: tuple[str, ...]
) -> tuple[Samples, int]:
    found, others = images(folder)
    if not found:
        raise LargeMarginError(f"there are no image files in {folder}.")
    names = [class_of(path) for path in found]
    ids = [id_of(path, root) for path in found]
    labels = class_indices(split, names, classes)
    return in_files([str(path) for path in found], ids, labels), others


def class_of(path: Path) -> str:
    """``2022012523413511-wet-asphalt-smooth.jpg`` -> ``wet_asphalt_smooth``."""
    _, hyphen, name = path.stem.partition("-")
    if not hyphen:
        raise LargeMarginError(
            f"the name of {path} must hold its class after a hyphen, as "
            "2022012523413511-wet-asphalt-smooth.jpg does."
        )
    return name_of(Path(name)).replace("-", "_")
