"""Counts, means and variances of classes from one pass, exact for collapsed classes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.geometry.pairs import widen


@dataclass
class ClassSums:
    """Counts and first and second moments of each class, relative to one sample of it.

    A class whose samples are all equal has a variance of exactly 0 that way, and features far from
    the origin lose no digits.
    """

    counts: Tensor
    anchors: Tensor
    sums: Tensor
    squares: Tensor
    """(C,) sums of squared distances to the anchor."""
    outer: Tensor | None
    """(D, D) sum of outer products of differences to the anchors, where it is asked for."""
    rounding: float = torch.finfo(torch.float64).eps
    """Of the features that were added: that of float32 unless all were float64."""

    @classmethod
    def empty(cls, num_classes: int, dim: int, *, covariance: bool, like: Tensor) -> "ClassSums":
        new = like.new_zeros
        return cls(
            new(num_classes, dtype=torch.long),
            new(num_classes, dim),
            new(num_classes, dim),
            new(num_classes),
            new(dim, dim) if covariance else None,
        )

    def add(self, features: Tensor, labels: Tensor) -> None:
        count = len(labels)
        if count == 0:
            return
        if features.dtype != torch.float64:
            self.rounding = torch.finfo(torch.float32).eps
        features = widen(features)
        position = torch.arange(count, device=labels.device)
        nowhere = torch.full_like(self.counts, count)
        first = nowhere.scatter_reduce(0, labels, position, "amin")
        # In place and by sample: new (C, D) arrays for every batch would cost more than its samples
        # where there are many classes, in time and in the memory they tear holes into.
        opens = (first[labels] == position) & (self.counts[labels] == 0)
        self.anchors.index_add_(0, labels, torch.where(opens[:, None], features, 0))
        relative = features - self.anchors[labels]
        self.counts.index_add_(0, labels, torch.ones_like(labels))
        self.sums.index_add_(0, labels, relative)
        self.squares.index_add_(0, labels, relative.square().sum(1))
        if self.outer is not None:
            self.outer.addmm_(relative.T, relative)

    def merge(self, other: "ClassSums") -> None:
        """Add the sums of another part of the data, shifted to this one's anchors."""
        first = (self.counts == 0) & (other.counts > 0)
        self.anchors = torch.where(first[:, None], other.anchors, self.anchors)
        shift = torch.where((other.counts > 0)[:, None], other.anchors - self.anchors, 0)
        n = other.counts.to(shift.dtype)[:, None]
        if self.outer is not None and other.outer is not None:
            cross = other.sums.T @ shift
            self.outer = self.outer + other.outer + cross + cross.T + (n * shift).T @ shift
        self.squares = (
            self.squares
            + other.squares
            + 2 * (other.sums * shift).sum(1)
            + n[:, 0] * shift.square().sum(1)
        )
        self.rounding = max(self.rounding, other.rounding)
        self.sums = self.sums + other.sums + n * shift
        self.counts = self.counts + other.counts

    def to(self, device: torch.device | str) -> "ClassSums":
        return ClassSums(
            self.counts.to(device),
            self.anchors.to(device),
            self.sums.to(device),
            self.squares.to(device),
            None if self.outer is None else self.outer.to(device),
            self.rounding,
        )

    @property
    def means(self) -> Tensor:
        """(C, D), NaN for a class without samples."""
        mean = self.anchors + self.sums / self.counts.clamp_min(1)[:, None]
        return torch.where((self.counts > 0)[:, None], mean, torch.nan)

    @property
    def scatter(self) -> Tensor:
        """(C,) sums of squared distances to the class mean."""
        n = self.counts.clamp_min(1)
        return (self.squares - self.sums.square().sum(1) / n).clamp_min(0)

    @property
    def within(self) -> Tensor:
        """(D, D) covariance inside classes, pooled over all samples."""
        assert self.outer is not None
        n = self.counts.clamp_min(1)[:, None]
        return (self.outer - self.sums.T @ (self.sums / n)) / self.counts.sum().clamp_min(1)
