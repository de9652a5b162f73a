"""Putting a loss on a model that exists already, without rebuilding its training."""

from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.errors import MarginWarning

__all__ = ["Criterion", "MarginWarning", "attach"]
