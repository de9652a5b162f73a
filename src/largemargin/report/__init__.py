"""The HTML report: what a model is worth, to look at. ``largemargin.report(run, "report.html")``.

The room and its function share a name, so the room itself can be called.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from largemargin.report.subjects import Reportable
from largemargin.report.write import report


class _Callable(ModuleType):
    def __call__(self, given: Reportable, path: str | Path = "report.html", **options: Any) -> Path:
        return report(given, path, **options)


sys.modules[__name__].__class__ = _Callable

__all__ = ["report"]
