"""The runs of the benchmark by their keys, in files of one JSON line each."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from largemargin_papers import record_lines
from largemargin_papers.record_lines import append_record

__all__ = ["append_record", "merge", "read_records"]


def read_records(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """All runs in these files by their keys; of a run in two files the first counts."""
    found: dict[str, dict[str, Any]] = {}
    for record in record_lines.read_records(paths, ["key"]):
        found.setdefault(record["key"], record)
    return found


def merge(source: Path, target: Path) -> int:
    """Add the runs of one file that another does not have; returns how many there were."""
    known = read_records([target])
    new = [each for key, each in read_records([source]).items() if key not in known]
    for each in new:
        append_record(target, each)
    return len(new)
