"""Image files below a folder."""

import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from largemargin.app.config import DataConfig
from largemargin.errors import LargeMarginError

FORMATS = "avif bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tga tif tiff webp"
EXTENSIONS = tuple(f".{name}" for name in FORMATS.split())
"""Names that end so are taken for images; what is in them is found out by reading."""


def given_folder(config: DataConfig, layout: str) -> Path:
    """The folder that ``path`` names; ``layout`` says what should be in it."""
    if config.path is None:
        raise LargeMarginError(f"data {config.name!r} needs path: a folder with {layout}.")
    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        kind = "it is a file" if folder.exists() else "there is none"
        raise LargeMarginError(f"path must be a folder with {layout}, but {kind} at {config.path}.")
    return folder


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
