"""One JSON line for every measured run, written when it ends; and back into ``measured/``."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from largemargin_papers import record_lines

NEEDED = ("run", "status", "places", "numbers")


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line; numbers that are not finite become null."""
    record_lines.append_record(path, finite(record))


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines of these files, in order."""
    return record_lines.read_records(paths, NEEDED)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
