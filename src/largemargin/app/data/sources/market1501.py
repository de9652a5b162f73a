"""Market-1501 (Zheng et al. 2015) and DukeMTMC-reID, which has its layout: people under cameras.

``bounding_box_train/`` is what is trained on; ``query/`` is searched in ``bounding_box_test/``. The
name of a file begins with the identity and the camera: ``0002_c1s1_000451_03.jpg``,
``0005_c2_f0046985.jpg``. Identity -1 is junk (neither right nor wrong when found), 0 a distractor
(always wrong).
"""

import re
from dataclasses import replace
from pathlib import Path

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.image_folders import folders, given_folder, id_of, images
from largemargin.app.data.sources.source import Source, in_files
from largemargin.errors import LargeMarginError

FOLDERS = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
LAYOUT = "bounding_box_train/*.jpg, query/*.jpg and bounding_box_test/*.jpg"
NAME = re.compile(r"(-?\d+)_c(\d+)")
SIZE = (256, 128)
"""(H, W) usual in re-identification."""
LICENCES = {
    "market1501": "not stated by its authors; for research, citation asked",
    "dukemtmc": "withdrawn by its authors in 2019; was CC BY-NC-SA 4.0, non-commercial",
}


def read(config: DataConfig) -> Source:
    root = inner(given_folder(config, LAYOUT))
    people = {split: read_people(root / name, root, config) for split, name in FOLDERS.items()}
    train = people["train"]
    # Trained on by number, junk and distractors left out; elsewhere identities stay the labels.
    train = train.subset((train.labels > 0).nonzero().flatten())
    identities, labels = torch.unique(train.labels, return_inverse=True)
    return Source(
        classes=tuple(f"{identity:04d}" for identity in identities.tolist()),
        splits={**people, "train": replace(train, labels=labels)},
        licence=LICENCES[config.name],
        size=SIZE,
        from_files=True,
    )


def inner(folder: Path) -> Path:
    """The folder with the three: this one, or the one in it that the archive makes."""
    first = FOLDERS["train"]
    return next((each for each in (folder, *folders(folder)) if (each / first).is_dir()), folder)


def read_people(folder: Path, root: Path, config: DataConfig) -> Samples:
    if not folder.is_dir():
        raise LargeMarginError(
            f"path must be a folder with {LAYOUT}, but {config.path} has no {folder.name}."
        )
    found, _ = images(folder)
    matches = [NAME.match(path.name) for path in found]
    strange = [path.name for path, match in zip(found, matches, strict=True) if match is None]
    if strange or not found:
        what = f"{strange[0]} does not" if strange else "there are no image files"
        raise LargeMarginError(
            f"the files in {folder} must be called like 0002_c1s1_000451_03.jpg (identity, "
            f"camera), but {what}."
        )
    numbers = torch.tensor([[int(each) for each in match.groups()] for match in matches if match])
    ids = [id_of(path, root) for path in found]
    samples = in_files([str(path) for path in found], ids, numbers[:, 0].tolist(), stretch=True)
    return replace(samples, extra={"camera": numbers[:, 1].contiguous()})
