"""Optimizers for heads with many classes: one number a row where Adam keeps one an entry."""

from largemargin.heads.optim.head_sgd import HeadSGD
from largemargin.heads.optim.in_backward import InBackward, apply_in_backward
from largemargin.heads.optim.rowwise_adam import RowwiseAdam

__all__ = ["HeadSGD", "InBackward", "RowwiseAdam", "apply_in_backward"]
