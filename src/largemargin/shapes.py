"""The five shapes every signature of this library is written in.

The names are documentation for readers and type checkers; N is the batch size, C the number of
classes and D the feature dimension, everywhere.
"""

from typing import TypeAlias

from torch import Tensor

Features: TypeAlias = Tensor
"""(N, D) floating point: penultimate features, one row per sample."""

Prototypes: TypeAlias = Tensor
"""(C, D) floating point: class vectors, one row per class, the layout of ``nn.Linear.weight``."""

Labels: TypeAlias = Tensor
"""(N,) integers in ``[0, C)``, or (N, C) floating point soft targets where a loss accepts them."""

Logits: TypeAlias = Tensor
"""(N, C) floating point."""

PerSample: TypeAlias = Tensor
"""(N,) floating point: one number per sample, unreduced."""
