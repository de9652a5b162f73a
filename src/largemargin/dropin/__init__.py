"""Putting a loss on a model that exists already, without rebuilding its training."""

from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.dropin.training_warnings import MarginWarning

__all__ = ["Criterion", "MarginWarning", "attach"]
