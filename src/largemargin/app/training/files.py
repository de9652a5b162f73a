"""Files of a run: whole or not there, and with the version of their format.

They are written beside their place, then renamed into it. Files without a version are format 0.
They are read: what they lack has a default. A format that can no longer be read would be told here
how to convert it.
"""

import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from largemargin.errors import LargeMarginError
from largemargin.version import __version__

DRAFT = ".draft-"
UNFINISHED = re.compile(rf"{re.escape(DRAFT)}[0-9a-f]{{8}}-.+", re.DOTALL)
"""Names that may be deleted at any time."""

KEY = "format_version"
CONFIG, CHECKPOINT, RESULT = "configuration", "checkpoint", "result"
VERSIONS = {CONFIG: 1, CHECKPOINT: 1, RESULT: 1}
"""What this release writes, by kind of file."""


DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What reading a file that was damaged or edited may end in; nesting is a ``RuntimeError``."""
DIGITS = 20
"""Of whole numbers: Python takes quadratic time to read long ones, and refuses very long ones."""


def write_text(path: Path, text: str) -> None:
    draft = path.with_name(f"{DRAFT}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        # Names of files that are not UTF-8 are no text; as escapes JSON reads them back.
        with open(draft, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        to_disk(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity, and browsers read nothing with them: they become null."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_int=_whole)
    except OSError as error:
        raise LargeMarginError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise LargeMarginError(f"{path} is damaged: {error}.") from error


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def made_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LargeMarginError(f"cannot make the folder {path}: {error.strerror}.") from error
    return path


@contextmanager
def drafted_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name ``path`` when the block ends without an error."""
    draft = path.with_name(f"{DRAFT}{uuid.uuid4().hex[:8]}-{path.name}")
    draft.mkdir(parents=True)
    try:
        yield draft
        # Names must not reach the disk before what they name: a power cut may come in between.
        for each in sorted(draft.rglob("*"), reverse=True):
            to_disk(each)
        to_disk(draft)
        os.replace(draft, path)
        to_disk(path.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Delete what an interrupted write left in a folder."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not UNFINISHED.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Turn what readers stumble over in files into an error that names them."""
    try:
        yield
    except LargeMarginError:
        raise
    except DAMAGE as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise LargeMarginError(
            f"{what} is damaged, or was not written by this library for this run ({said})."
        ) from error


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(kind: str) -> dict[str, Any]:
    """What a file of this kind begins with."""
    return {KEY: VERSIONS[kind], "largemargin": __version__}


def check_version(read: Any, kind: str, place: Path | str) -> None:
    """Refuse a file of a newer release, or one that is no such file."""
    if not isinstance(read, Mapping):
        raise LargeMarginError(f"{place} is damaged: it does not hold a {kind}.")
    version = read.get(KEY, 0)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise LargeMarginError(f"{place} is damaged: its {KEY} is {version!r}, not a number.")
    if version > VERSIONS[kind]:
        writer = read.get("largemargin")
        raise LargeMarginError(
            f"{place} was written by a newer version of largemargin"
            f"{f' ({writer})' if isinstance(writer, str) else ''}: its {kind} has format "
            f"{version}, and this one, {__version__}, reads up to {VERSIONS[kind]}. "
            "Upgrade it: pip install --upgrade largemargin"
        )
