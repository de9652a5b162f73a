"""Losses that the statistics of a row of logits determine, and what it takes to compute them."""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

KINDS = ("softplus", "rest", "rival")

ANYWHERE = sys.float_info.max
"""The reach of cosines to which something of any size was added."""


class Angle(NamedTuple):
    """A margin on the angle of cosines times ``scale``: the target is s cos(theta + m)."""

    scale: float
    margin: float
    mode: str
    """Where theta + m leaves [0, pi]: "hard" goes on along a line, "easy" leaves the cosine."""
    near: float
    """Cosines beyond it are taken from chords between the unit vectors."""
    least: float
    """A sine below it is a rounding error."""
    definition: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """The same of (N,) targets s cos(theta), features, prototypes and labels, differentiable."""


class RowLoss(NamedTuple):
    """softplus(rest - target + required), (rest - target) factor or (rival - target) factor.

    With ``strength`` times (spread - mean) added.
    """

    kind: str = "softplus"
    required: float = 0.0
    strength: float = 0.0
    factor: float = 1.0
    reach: float = math.inf
    """Of cosines times a scale: how far the target and a rival can be apart, at most."""
    angle: Angle | None = None
