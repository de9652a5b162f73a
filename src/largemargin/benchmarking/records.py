"""One JSON line for every run, written when it ends, whole or not at all."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from largemargin.errors import LargeMarginError


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line; what a killed process left half written is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        _cut_half_line(handle)
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_half_line(handle: int) -> None:
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        whole = os.pread(handle, size, 0).rfind(b"\n") + 1
        os.ftruncate(handle, whole)


def read_records(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """All runs in these files by their keys; of a run in two files the first counts."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        # The last one is empty, or half written by a process that was killed.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                found.setdefault(record["key"], record)
            except (ValueError, KeyError, TypeError) as error:
                raise LargeMarginError(
                    f"line {number} of {path} is no record of a run ({error!r}). Remove it."
                ) from None
    return found


def merge(source: Path, target: Path) -> int:
    """Add the runs of one file that another does not have; returns how many there were."""
    known = read_records([target])
    new = [each for key, each in read_records([source]).items() if key not in known]
    for each in new:
        append_record(target, each)
    return len(new)
