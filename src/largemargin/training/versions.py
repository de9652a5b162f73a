"""The version that every file of a run carries, and what to do about another one.

Files without a version are of the first releases, format 0. They are read: what they lack has a
default. A format that could no longer be read would be told here how to convert it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import largemargin
from largemargin.errors import LargeMarginError

KEY = "format_version"
CONFIG, CHECKPOINT, RESULT = "configuration", "checkpoint", "result"
VERSIONS = {CONFIG: 1, CHECKPOINT: 1, RESULT: 1}
"""What this release writes, by kind of file."""


def stamp(kind: str) -> dict[str, Any]:
    """What a file of this kind begins with."""
    return {KEY: VERSIONS[kind], "largemargin": largemargin.__version__}


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
            f"{version}, and this one, {largemargin.__version__}, reads up to {VERSIONS[kind]}. "
            "Upgrade it: pip install --upgrade largemargin"
        )
