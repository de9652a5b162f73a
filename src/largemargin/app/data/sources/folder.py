"""A folder of image files.

Either ``train/CLASS/*.jpg`` with ``val/`` (or ``validation/``, ``valid/``) and ``test/`` beside it
where they exist, or the folders of the classes alone, of which a part is then held out for
validation. ``training/`` and ``testing/`` are names of the same, in small letters or capitals.
Folders inside those of the classes are searched too.
"""

import warnings
from pathlib import Path

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.image_paths import (
    files,
    folders,
    given_folder,
    id_of,
    images,
    looks_like_image,
    name_of,
)
from largemargin.app.data.sources.source import Source, class_indices, in_files, listed
from largemargin.errors import LargeMarginError

LAYOUT = "train/CLASS/*.jpg (and val/, test/ beside it), or with CLASS/*.jpg"
NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "validation", "valid"),
    "test": ("test", "testing"),
}


def read(config: DataConfig) -> Source:
    root = given_folder(config, LAYOUT)
    parts = split_folders(root)
    classes = class_folders(parts["train"], config)
    _warn_of_unused(root, parts, classes)
    splits: dict[str, Samples] = {}
    others = 0
    for split, folder in parts.items():
        splits[split], ignored = read_split(split, folder, root, classes)
        others += ignored
    return Source(
        classes,
        splits,
        from_files=True,
        record={"other_files": others} if others else {},
    )


def split_folders(root: Path) -> dict[str, Path]:
    """The folder of every split; the root itself where there are only classes."""
    inside = folders(root)
    found = _by_split(root, inside)
    if "train" in found:
        return found
    parts = {name for names in NAMES.values() for name in names}
    if inside and all(name_of(each).lower() in parts and folders(each) for each in inside):
        raise LargeMarginError(
            f"{root} has {listed([f'{each.name}/' for each in inside])} but no train/: there is "
            "nothing to train on. Put the training images into train/CLASS beside it."
        )
    _warn_of_parts(root, inside)
    return {"train": root}


def _by_split(root: Path, inside: list[Path]) -> dict[str, Path]:
    """The folders that are called like a split; without train/ the others may be classes."""
    found: dict[str, Path] = {}
    for split, names in NAMES.items():
        present = [each for each in inside if name_of(each).lower() in names]
        if split == "train":
            # "train" may be a class too, beside "bus" and "ship": then images lie right in it.
            present = [each for each in present if folders(each)]
        if len(present) > 1 and (split == "train" or "train" in found):
            raise LargeMarginError(
                f"{root} has several folders of {split} images: "
                f"{listed([each.name for each in present])}. Keep one."
            )
        if present:
            found[split] = present[0]
    return found


def _warn_of_parts(root: Path, classes: list[Path]) -> None:
    """Folders that all hold the same folders, and no images, are rather parts than classes."""
    if len(classes) < 2:
        return
    first = {name_of(each) for each in folders(classes[0])}
    alike = first and all({name_of(part) for part in folders(each)} == first for each in classes)
    if alike and not any(looks_like_image(each) for folder in classes for each in folder.iterdir()):
        names = listed([name_of(each) for each in classes])
        warnings.warn(
            f"{names} in {root} are taken for classes, but all of them hold the same folders: "
            f"{listed(sorted(first))}. If these are the classes, name the folders around them "
            "train/, val/ and test/.",
            stacklevel=2,
        )


def class_folders(folder: Path, config: DataConfig) -> tuple[str, ...]:
    names = [name_of(each) for each in folders(folder)]
    if not names:
        raise LargeMarginError(
            f"path must be a folder with {LAYOUT}, but {config.path} has no folders in it."
        )
    inner = folders(folder)[0]
    inside = [name_of(each) for each in folders(inner)]
    if len(names) == 1 and inside:
        raise LargeMarginError(
            f"{folder} has only the folder {names[0]}, and a classifier tells classes apart. If "
            f"the folders in it are the data ({listed(inside)}), set path to {inner}."
        )
    return tuple(sorted(set(names)))


def _warn_of_unused(root: Path, parts: dict[str, Path], classes: tuple[str, ...]) -> None:
    """Images beside the class folders, and parts beside train/ by a name that means nothing."""
    for folder in parts.values():
        beside = [each.name for each in files(folder) if looks_like_image(each)]
        if beside and folders(folder):
            warnings.warn(
                f"{len(beside)} image files are not used, because they lie in {folder} beside the "
                f"folders of the classes, not in them: {listed(sorted(beside), 3)}.",
                stacklevel=2,
            )
    if parts["train"] == root:
        return
    for folder in folders(root):
        of_classes = {name_of(each) for each in folders(folder)} & set(classes)
        if of_classes and folder not in parts.values():
            warnings.warn(
                f"{folder} has folders of the same classes as train/, but is not used. Call it "
                "val/ or test/ if it should be.",
                stacklevel=2,
            )


def read_split(
    split: str, folder: Path, root: Path, classes: tuple[str, ...]
) -> tuple[Samples, int]:
    """Samples of the class folders in a folder, and the number of files that are no images."""
    paths: list[str] = []
    ids: list[str] = []
    names: list[str] = []
    others = len(files(folder))
    for each in folders(folder):
        found, ignored = images(each)
        others += ignored
        if not found and split == "train":
            raise LargeMarginError(
                f"the class folder {each} holds no image files. Remove it or fill it."
            )
        paths += [str(path) for path in found]
        ids += [id_of(path, root) for path in found]
        names += [name_of(each)] * len(found)
    if not paths and any(looks_like_image(each) for each in files(folder)):
        raise LargeMarginError(
            f"the images in {folder} lie in no folders of classes. Sort them into {folder}/CLASS, "
            f"or move {folder.name}/ elsewhere: largemargin predict takes images of unknown class."
        )
    if not paths:
        raise LargeMarginError(f"there are no image files below {folder}.")
    return in_files(paths, ids, class_indices(split, names, classes)), others
