"""A folder of image files.

Either ``train/CLASS/*.jpg`` with ``val/`` (or ``validation/``, ``valid/``) and ``test/`` beside it
where they exist, or the folders of the classes alone, of which a part is then held out for
validation. ``training/`` and ``testing/`` are names of the same, in small letters or capitals.
Folders inside those of the classes are searched too.
"""

import os
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, class_indices, in_files, listed
from largemargin.errors import LargeMarginError

LAYOUT = "train/CLASS/*.jpg (and val/, test/ beside it), or with CLASS/*.jpg"
FORMATS = "avif bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tga tif tiff webp"
EXTENSIONS = tuple(f".{name}" for name in FORMATS.split())
"""Names that end so are taken for images; what is in them is found out by reading."""
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
        splits[split], ignored = read_split(split, folder, root, classes, config.classes)
        others += ignored
    return Source(
        classes, splits, from_files=True, record={"other_files": others} if others else {}
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
    inside = {frozenset(map(name_of, folders(each))) for each in classes}
    if len(classes) < 2 or len(inside) > 1 or frozenset() in inside:
        return
    (parts,) = inside
    if not any(looks_like_image(each) for folder in classes for each in folder.iterdir()):
        names = listed(list(map(name_of, classes)))
        warnings.warn(
            f"{names} in {root} are taken for classes, but all of them hold the same folders: "
            f"{listed(sorted(parts))}. If these are the classes, name the folders around them "
            "train/, val/ and test/.",
            stacklevel=2,
        )


def class_folders(folder: Path, config: DataConfig) -> tuple[str, ...]:
    names = [name_of(each) for each in folders(folder)]
    if not names:
        bare = any(looks_like_image(each) for each in folder.iterdir())
        hint = (
            " It holds images without labels: put those of each class into a folder of its own, "
            "or, if it is one class, name the folder around it."
        )
        raise LargeMarginError(
            f"path must be a folder with {LAYOUT}, but {config.path} has no folders in it."
            + (hint if bare else "")
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
    split: str,
    folder: Path,
    root: Path,
    classes: tuple[str, ...],
    wanted: tuple[str, ...] | None = None,
) -> tuple[Samples, int]:
    """Samples of the class folders in a folder, and the number of files that are no images.

    Folders of classes that are not ``wanted`` may be empty.
    """
    paths: list[str] = []
    ids: list[str] = []
    names: list[str] = []
    others = len(files(folder))
    for each in folders(folder):
        found, ignored = images(each)
        others += ignored
        if not found and split == "train" and name_of(each) in (wanted or classes):
            others_named = [name for name in classes if name != name_of(each)]
            raise LargeMarginError(
                f"the class folder {each} holds no image files. Remove it or fill it, or name the "
                f"classes to keep: --data.classes '[{listed(others_named).replace(', ', ',')}]'."
            )
        paths += [str(path) for path in found]
        ids += [id_of(path, root) for path in found]
        names += [name_of(each)] * len(found)
    if not paths:
        raise _nothing_in(folder)
    return in_files(paths, ids, class_indices(split, names, classes)), others


def _nothing_in(folder: Path) -> LargeMarginError:
    """Of a folder without images of classes."""
    if any(looks_like_image(each) for each in files(folder)):
        return LargeMarginError(
            f"the images in {folder} lie in no folders of classes. Sort them into {folder}/CLASS, "
            f"or move {folder.name}/ elsewhere: largemargin predict takes images of unknown class."
        )
    return LargeMarginError(f"there are no image files below {folder}.")


def given_folder(config: DataConfig, layout: str) -> Path:
    """The folder that ``path`` names; ``layout`` says what should be in it."""
    return _given(config, f"a folder with {layout}", Path.is_dir)


def given_file(config: DataConfig) -> Path:
    """The file that ``path`` names."""
    return _given(config, "a file", Path.is_file)


def _given(config: DataConfig, wanted: str, is_right: Callable[[Path], bool]) -> Path:
    if config.path is None:
        raise LargeMarginError(f"data {config.name!r} needs path: {wanted}.")
    path = Path(config.path).expanduser()
    if not is_right(path):
        other = "it is a file" if path.is_file() else "there is none"
        kind = "it is a folder" if path.is_dir() else other
        raise LargeMarginError(f"path must be {wanted}, but {kind} at {config.path}.")
    return path


def folders(folder: Path) -> list[Path]:
    """Visible folders in a folder, by name."""
    with listing(folder) as entries:
        found = [Path(each.path) for each in entries if not hidden(each.name) and is_folder(each)]
    return sorted(found, key=in_order)


def files(folder: Path) -> list[Path]:
    """Files right in a folder, links to files too."""
    with listing(folder) as entries:
        return [Path(each.path) for each in entries if os.path.isfile(each.path)]


def images(folder: Path) -> tuple[list[Path], int]:
    """Image files below a folder, by name, and the number of other files.

    Links to folders are followed, but no folder is entered twice, by whatever way it is reached.
    Pipes and devices count as other files: reading them may never end.
    """
    found: list[Path] = []
    others = 0
    for path, is_file in _files(folder, set()):
        if is_file and looks_like_image(path):
            found.append(path)
        else:
            others += 1
    return sorted(found, key=in_order), others


def holds_images(folder: Path) -> bool:
    """Whether there is an image file below a folder."""
    return any(is_file and looks_like_image(path) for path, is_file in _files(folder, set()))


def looks_like_image(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() in EXTENSIONS and not hidden(path.name)


def _files(folder: Path, entered: set[tuple[int, int]]) -> Iterator[tuple[Path, bool]]:
    """Everything that is no folder, and whether it is a file; a link that leads nowhere is one."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in entered:
        return
    entered.add(here)
    with listing(folder) as entries:
        inside = sorted(entries, key=lambda each: each.name)
    for entry in inside:
        if not is_folder(entry):
            yield Path(entry.path), is_file(entry)
        elif not hidden(entry.name):
            yield from _files(Path(entry.path), entered)


@contextmanager
def listing(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    """``os.scandir``, with an error that names the folder it cannot look into."""
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise LargeMarginError(
            f"the folder {folder} cannot be read: {error.strerror or error}. Allow this user to "
            "read it, or take it out of the data."
        ) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether reading it will end; links to nothing are reported when they are read."""
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:
        return True


def hidden(name: str) -> bool:
    """``.DS_Store``, ``._photo.jpg`` and the like."""
    return name.startswith((".", "__MACOSX"))


def name_of(path: Path) -> str:
    """The last part of a path as text that can be printed, accents composed."""
    return printable(path.name)


def printable(text: str) -> str:
    """Names that are no UTF-8 get a mark where they are not; é is one letter on every system."""
    return unicodedata.normalize("NFC", os.fsencode(text).decode("utf-8", "replace"))


def in_order(path: Path) -> tuple[str, str]:
    """What paths are sorted by: what is drawn by position must not depend on the file system.

    One writes é as one letter, which comes after z, another as e and an accent, before f.
    """
    return printable(path.as_posix()), os.fspath(path)


def id_of(path: Path, root: Path) -> str:
    return printable(path.relative_to(root).as_posix())
