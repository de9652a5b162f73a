"""What a hyper-parameter may be: the limits a loss sets it, and the range that tuning searches."""

import math
from dataclasses import dataclass
from typing import TypeAlias, TypedDict


class Limits(TypedDict, total=False):
    """Limits of a number, open (above, below) or closed, as ``check_number`` takes them."""

    above: float
    at_least: float
    below: float
    at_most: float
    hint: str


SHARE: Limits = {"at_least": 0, "at_most": 1}
RADIANS: Limits = {
    "at_least": 0,
    "below": math.pi,
    "hint": "It is in radians; convert degrees with math.radians.",
}


def cosine_margin_limits(num_classes: int) -> Limits:
    """Of a margin in cosine units: below C/(C-1), the widest any arrangement has."""
    return {
        "at_least": 0,
        "below": num_classes / max(num_classes - 1, 1),
        "hint": f"With {num_classes} classes no arrangement has a wider cosine margin.",
    }


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; drawn by their logarithm where ``log`` is set."""

    low: float
    high: float
    log: bool = True

    def holding(self, value: float) -> "Range":
        """The range stretched to hold ``value``; one with 0 in it has no logarithm."""
        low, high = min(self.low, value), max(self.high, value)
        return Range(low, high, self.log and low > 0)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[float | None, ...]

    def holding(self, value: float | None) -> "Choice":
        return self if value in self.values else Choice((value, *self.values))


Dimension: TypeAlias = Range | Choice
