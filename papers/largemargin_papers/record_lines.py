"""One JSON line for every run that ended, in files that survive a kill at any moment."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from largemargin.errors import LargeMarginError


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line and wait until it is on the disk; a half line of a killed process is cut off."""
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            os.ftruncate(handle, os.pread(handle, size, 0).rfind(b"\n") + 1)
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def read_records(paths: Iterable[Path], needed: Sequence[str]) -> list[dict[str, Any]]:
    """All lines of these files, in order; files that are not there hold none.

    Args:
        paths: of the files.
        needed: names that every record must have.
    """
    found = []
    for path in paths:
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        # The last one is empty, or was cut short when its process was killed.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                for name in needed:
                    record[name]
            except (ValueError, KeyError, TypeError) as error:
                raise LargeMarginError(
                    f"line {number} of {path} is no record of a run ({error!r}). Remove it."
                ) from None
            found.append(record)
    return found
