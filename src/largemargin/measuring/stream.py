"""One pass over features: numbers of each sample, and sums over classes.

Features are dropped batch by batch unless a ``FeatureStore`` keeps them. ``ClassSums`` has counts,
means and variances of classes from one pass, exact for collapsed classes.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largemargin.errors import LargeMarginError, check_labels, check_matrix
from largemargin.geometry.pairs import blocks, widen
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.batches import SKIP, gather
from largemargin.measuring.scores import LEADS, HeadScores
from largemargin.ops.distributed import world_size

COVARIANCE_DIM = 4096
"""Widest features whose D x D covariance (NC1) is kept: 128 MiB in float64."""


@dataclass
class FeatureStore:
    """Features of all samples, in memory or in a file that is mapped into it.

    Half precision is kept as float32, float64 as it is.
    """

    path: Path | None = None
    parts: list[Tensor] = field(default_factory=list)
    rows: int = 0
    width: int = 0
    dtype: torch.dtype = torch.float32

    def add(self, features: Tensor) -> None:
        features = features.detach().cpu()
        if self.rows == 0 and features.dtype == torch.float64:
            self.dtype = torch.float64
        # A copy always: a loader may fill the same buffer again.
        features = features.to(self.dtype, copy=True).contiguous()
        self.rows, self.width = self.rows + features.shape[0], features.shape[1]
        if self.path is None:
            self.parts.append(features)
            return
        with self.path.open("ab") as file:
            file.write(features.numpy().tobytes())

    def all(self) -> Tensor:
        """(N, D); from a file, pages are read when they are needed."""
        if self.path is None:
            if len(self.parts) > 1:
                self.parts = [torch.cat(self.parts)]
            return self.parts[0] if self.parts else torch.zeros(0, self.width, dtype=self.dtype)
        if self.rows == 0:
            return torch.zeros(0, self.width, dtype=self.dtype)
        size = self.rows * self.width
        flat = torch.from_file(str(self.path), shared=False, size=size, dtype=self.dtype)
        return flat.view(self.rows, self.width)


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
    """(D, D) sum of outer products of differences to the anchors, where it is asked for and D is
    at most ``COVARIANCE_DIM``."""
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
            new(dim, dim) if covariance and dim <= COVARIANCE_DIM else None,
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
        moved: dict[str, Any] = {
            name: each.to(device) for name, each in vars(self).items() if isinstance(each, Tensor)
        }
        return replace(self, **moved)

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


CLASSES = ("index", "label", "predicted", "rival")

PER_SAMPLE = (
    *CLASSES,
    *("raw", "cosine", "distance", "boundary", "loss", "softmax_bias", "norm"),
    *LEADS,
)
"""Columns kept of every sample, 15 numbers; those of ``CLASSES`` are integers."""


class Stream:
    """What a pass over labelled features leaves behind."""

    def __init__(
        self, head: HeadView, *, covariance: bool = True, store: FeatureStore | None = None
    ) -> None:
        self.head = head
        self.scores = HeadScores(head)
        self.num_classes, self.dim = self.scores.weight.shape
        self.store = store
        self.columns: dict[str, list[Tensor]] = {name: [] for name in PER_SAMPLE}
        self.sums = ClassSums.empty(
            self.num_classes, self.dim, covariance=covariance, like=self.scores.weight
        )
        self.seen = 0

    def add(self, features: Tensor, labels: Tensor, index: Tensor | None = None) -> None:
        """Take in one batch: (N, D) features, (N,) labels and, where known, sample indices."""
        check_matrix("features", features, "(N, D)")
        check_width(features, self.dim)
        check_labels(labels, len(features), self.num_classes, soft=False, skip=SKIP, validate=True)
        device = self.scores.weight.device
        features, labels = features.detach().to(device), labels.to(device).long()
        if index is None:
            index = torch.arange(self.seen, self.seen + len(features))
        index = index.to(device)
        # Made before the large tables of many classes: small tensors that stay between those would
        # keep their memory from being used again.
        new = self.scores.weight.new_empty
        kept = {
            name: new(len(features), dtype=torch.long if name in CLASSES else None)
            for name in PER_SAMPLE
        }
        for part in blocks(len(features), self.scores.rows_at_once):
            self._take(features[part], labels[part], index[part], kept, part)
        for name in PER_SAMPLE:
            append(self.columns[name], kept[name])
        self.seen += len(features)
        if self.store is not None:
            self.store.add(features)

    def _take(
        self, features: Tensor, labels: Tensor, index: Tensor, kept: dict[str, Tensor], part: slice
    ) -> None:
        columns = self.scores.labelled(features, labels) | {"index": index, "label": labels}
        if features.device.type == "cpu":  # elsewhere the check waits for the end of the pass
            check_norms(columns["norm"], index)
        for name in PER_SAMPLE:
            kept[name][part] = columns[name]
        self.sums.add(features, labels)

    def merged(self) -> "Stream":
        """The stream of all processes together, the same on each; itself outside a group."""
        if world_size() == 1:
            return self
        mine = {name: self.column(name) for name in PER_SAMPLE}, self.sums.to("cpu")
        everyone = gather(mine)
        device = self.scores.weight.device
        joined = Stream(self.head, covariance=self.sums.outer is not None)
        for columns, sums in everyone:
            joined.sums.merge(sums.to(device))
            for name in PER_SAMPLE:
                joined.columns[name].append(columns[name])
        joined.seen = sum(len(columns["label"]) for columns, _ in everyone)
        if self.store is not None:
            joined.store = gather_store(self.store)
        return joined

    @property
    def kept(self) -> Tensor | None:
        """(N, D) features of all samples; None where they were dropped."""
        return None if self.store is None else self.store.all()

    def column(self, name: str) -> Tensor:
        """(N,) values of one column, on the CPU."""
        parts = self.columns[name]
        if len(parts) > 1:
            parts = self.columns[name] = [torch.cat(parts)]
        if parts:
            return parts[0].cpu()
        return torch.zeros(0, dtype=torch.long if name in CLASSES else torch.float64)


def append(parts: list[Tensor], part: Tensor) -> None:
    """Add a part to a column and join it with those before it that are not longer.

    A few long parts instead of many short ones, at log N copies of each number.
    """
    while parts and len(parts[-1]) <= len(part):
        part = torch.cat([parts.pop(), part])
    parts.append(part)


def check_width(
    features: Tensor, dim: int, reason: str = "the head's weight has", what: str = "features"
) -> None:
    if features.shape[1] != dim:
        raise LargeMarginError(
            f"{what} must have {dim} columns, as {reason}, but their shape is "
            f"{tuple(features.shape)}."
        )


def check_norms(norms: Tensor, index: Tensor | None = None, what: str = "features") -> None:
    """Refuse features that are not finite, or so long that their norm is not."""
    bad = ~torch.isfinite(norms)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        which = f"sample {row if index is None else int(index[row])}"
        raise LargeMarginError(
            f"{what} must be finite, but {which} has NaN or infinite ones. Look for a diverged "
            "model or broken inputs."
        )


SENT_ROWS = 65_536
"""Features sent at a time."""


def gather_store(mine: FeatureStore) -> FeatureStore:
    """The features of all processes in rank order, where this one keeps its own."""
    path = None if mine.path is None else mine.path.with_name(f"everyone.{mine.path.name}")
    joined = FeatureStore(path)
    own = mine.all()
    for rank, rows in enumerate(gather(mine.rows)):
        for part in blocks(rows, SENT_ROWS):
            sent: list[Tensor | None] = [own[part].clone() if dist.get_rank() == rank else None]
            dist.broadcast_object_list(sent, src=rank)
            assert sent[0] is not None
            joined.add(sent[0])
    joined.width = joined.width or mine.width  # a process without samples knows no width
    return joined
