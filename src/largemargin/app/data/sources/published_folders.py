"""Published sets of images in folders: RSCD, Market-1501 and DukeMTMC-reID.

RSCD as it is published: ``train/`` with a folder per class (``dry_asphalt_smooth``), and
``vali_20k/`` and ``test_50k/`` without folders, the class in the name of the file, after the first
hyphen and with hyphens for underscores: ``2022012523413511-wet-asphalt-smooth.jpg``. Class folders
in the validation and test parts are fine too.

Of people under cameras, ``bounding_box_train/`` is what is trained on; ``query/`` is searched in
``bounding_box_test/``. The name of a file begins with the identity and the camera:
``0002_c1s1_000451_03.jpg``, ``0005_c2_f0046985.jpg``. Identity -1 is junk (neither right nor wrong
when found), 0 a distractor (always wrong).

A folder around the parts, as archives have it, is fine.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch

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

ROADS = "train/CLASS/*.jpg, vali_20k/*.jpg and test_50k/*.jpg"
ROAD_PARTS = {"validation": ("vali_20k", "vali", "val", "validation"), "test": ("test_50k", "test")}
PEOPLE_PARTS = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
PEOPLE = "bounding_box_train/*.jpg, query/*.jpg and bounding_box_test/*.jpg"
PERSON = re.compile(r"(-?\d+)_c(\d+)")
PEOPLE_SIZE = (256, 128)
"""(H, W) usual in re-identification."""
LICENCES = {
    "market1501": "not stated by its authors; for research, citation asked",
    "dukemtmc": "withdrawn by its authors in 2019; was CC BY-NC-SA 4.0, non-commercial",
}


def read_rscd(config: DataConfig) -> Source:
    """RSCD, the Road Surface Classification Dataset (Zhao et al. 2023): 27 classes, a million
    images.
    """
    root = inner(given_folder(config, ROADS), "train")
    if not (root / "train").is_dir() or not folders(root / "train"):
        raise LargeMarginError(
            f"path must be RSCD's folder with {ROADS}, but {config.path} has no train/CLASS "
            "folders."
        )
    classes = tuple(name_of(each) for each in folders(root / "train"))
    splits: dict[str, Samples] = {}
    splits["train"], others = read_split("train", root / "train", root, classes)
    for split, names in ROAD_PARTS.items():
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


def inner(folder: Path, part: str) -> Path:
    """The folder with the parts: this one, or the one in it that the archive makes."""
    return next((each for each in (folder, *folders(folder)) if (each / part).is_dir()), folder)


def read_flat(
    split: str, folder: Path, root: Path, classes: tuple[str, ...]
) -> tuple[Samples, int]:
    found, others = images(folder)
    if not found:
        raise LargeMarginError(f"there are no image files in {folder}.")
    ids = [id_of(path, root) for path in found]
    labels = class_indices(split, list(map(class_of, found)), classes)
    return in_files(list(map(str, found)), ids, labels), others


def class_of(path: Path) -> str:
    """``2022012523413511-wet-asphalt-smooth.jpg`` -> ``wet_asphalt_smooth``."""
    _, hyphen, name = path.stem.partition("-")
    if not hyphen:
        raise LargeMarginError(
            f"the name of {path} must hold its class after a hyphen, as "
            "2022012523413511-wet-asphalt-smooth.jpg does."
        )
    return name_of(Path(name)).replace("-", "_")


def read_people(config: DataConfig) -> Source:
    """Market-1501 (Zheng et al. 2015) and DukeMTMC-reID, which has its layout: people under
    cameras.
    """
    root = inner(given_folder(config, PEOPLE), PEOPLE_PARTS["train"])
    people = {split: people_of(root / name, root, config) for split, name in PEOPLE_PARTS.items()}
    train = people["train"]
    # Trained on by number, junk and distractors left out; elsewhere identities stay the labels.
    train = train.subset((train.labels > 0).nonzero().flatten())
    identities, labels = torch.unique(train.labels, return_inverse=True)
    return Source(
        classes=tuple(f"{identity:04d}" for identity in identities.tolist()),
        splits={**people, "train": replace(train, labels=labels)},
        licence=LICENCES[config.name],
        size=PEOPLE_SIZE,
        from_files=True,
    )


def people_of(folder: Path, root: Path, config: DataConfig) -> Samples:
    if not folder.is_dir():
        raise LargeMarginError(
            f"path must be a folder with {PEOPLE}, but {config.path} has no {folder.name}."
        )
    found, _ = images(folder)
    matches = [PERSON.match(path.name) for path in found]
    strange = [path.name for path, match in zip(found, matches, strict=True) if match is None]
    if strange or not found:
        what = f"{strange[0]} does not" if strange else "there are no image files"
        raise LargeMarginError(
            f"the files in {folder} must be called like 0002_c1s1_000451_03.jpg (identity, "
            f"camera), but {what}."
        )
    numbers = torch.tensor([[int(each) for each in match.groups()] for match in matches if match])
    ids = [id_of(path, root) for path in found]
    samples = in_files(list(map(str, found)), ids, numbers[:, 0].tolist(), stretch=True)
    return replace(samples, extra={"camera": numbers[:, 1].contiguous()})
