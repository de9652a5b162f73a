"""Image files below a folder."""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from largemargin.data.config import DataConfig
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
    found = [each for each in folder.iterdir() if not hidden(each.name) and each.is_dir()]
    return sorted(found, key=lambda each: name_of(each))


def images(folder: Path) -> tuple[list[Path], int]:
    """Image files below a folder, by name, and the number of other files.

    Links to folders are followed, but never back into a folder they lie in.
    """
    found: list[Path] = []
    others = 0
    for path in _files(folder, ()):
        if path.suffix.lower() in EXTENSIONS and not hidden(path.name):
            found.append(path)
        else:
            others += 1
    return sorted(found, key=os.fspath), others


def _files(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir():
                if not hidden(entry.name):
                    yield from _files(Path(entry.path), (*above, here))
            else:
                yield Path(entry.path)


def hidden(name: str) -> bool:
    """``.DS_Store``, ``._photo.jpg`` and the like."""
    return name.startswith((".", "__MACOSX"))


def name_of(path: Path) -> str:
    """The last part of a path as text that can be printed, accents composed."""
    return printable(path.name)


def printable(text: str) -> str:
    """Names that are no UTF-8 get a mark where they are not; é is one letter on every system."""
    return unicodedata.normalize("NFC", os.fsencode(text).decode("utf-8", "replace"))


def id_of(path: Path, root: Path) -> str:
    return printable(path.relative_to(root).as_posix())
