"""One exception type, one kind of warning, and the checks of plain values.

Every message names the argument, what was given, what is allowed and what to do. Nothing here
needs torch, so that a command answers ``--help`` at once; checks of tensors are in ``errors.py``,
which hands these names on.
"""

import importlib
import math
from collections.abc import Iterable
from typing import Any

FLOAT32_END = 3.4e38


class LargeMarginError(ValueError):
    """Raised for every invalid argument; a ``ValueError``, so existing handlers keep working."""


class MissingPackage(LargeMarginError, ImportError):
    """A package is not installed that only some of the library needs; the message says which."""


def optional_module(name: str, needed: str, *, extra: str = "train") -> Any:
    """A module of a package that only some of the library needs.

    Args:
        name: with its package, as ``PIL.Image``.
        needed: what needs it, as "reading image files needs Pillow".
        extra: of this library, with which the package is installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        install = f"Install it: pip install 'largemargin[{extra}]'"
        raise MissingPackage(f"{needed}. {install}") from None


class MarginWarning(UserWarning):
    """Training as it is set up cannot reach what the loss asks for."""


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    options = tuple(allowed)
    try:
        known = value in options
    except (RuntimeError, ValueError):  # a tensor or an array is equal to nothing
        known = False
    if not known:
        listed = ", ".join(repr(option) for option in options)
        raise LargeMarginError(f"{name} must be one of {listed}, but {value!r} was given.")


def _inside(value: float, above: float | None, below: float | None) -> bool:
    """Within open limits, and of float32. (No isfinite: the compiler cannot follow it.)"""
    if not -FLOAT32_END < value < FLOAT32_END:
        return False
    return (above is None or value > above) and (below is None or value < below)


def check_number(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    hint: str = "",
) -> None:
    """Check a Python number against open (above, below) or closed (at_least, at_most) limits."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        closed = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        if closed and _inside(value, above, below):
            return
    limits = {">": above, ">=": at_least, "<": below, "<=": at_most}
    bounds = [f"{sign} {limit}" for sign, limit in limits.items() if limit is not None]
    wanted = "a finite number" + (f" {' and '.join(bounds)}" if bounds else "")
    if isinstance(value, int | float) and FLOAT32_END <= abs(value) < math.inf:
        wanted += f", below {FLOAT32_END:g} as all of float32"
    if getattr(value, "ndim", None) == 0 and not isinstance(value, int | float):
        hint = "Pass a number of Python: .item() makes one of it."  # of NumPy, or a tensor
    raise LargeMarginError(
        f"{name} must be {wanted}, but {value!r} was given.{' ' + hint if hint else ''}"
    )
