"""One pass over features: what is kept of each sample, and sums over classes.

Features themselves are dropped batch by batch.
"""

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_labels, check_matrix
from largemargin.geometry.pairs import blocks
from largemargin.measuring.batches import SKIP
from largemargin.measuring.ranks import gather, gather_store
from largemargin.measuring.scores import LEADS, Scores
from largemargin.measuring.store import FeatureStore
from largemargin.measuring.sums import ClassSums
from largemargin.ops.distributed import world_size
from largemargin.prototypes.form import HeadView

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
        self,
        head: HeadView,
        *,
        covariance: bool = True,
        store: FeatureStore | None = None,
    ) -> None:
        self.head = head
        self.scores = Scores(head)
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
        if features.shape[1] != self.dim:
            raise LargeMarginError(
                f"features must have {self.dim} columns, as the head's weight has, but their shape "
                f"is {tuple(features.shape)}."
            )
        check_labels(labels, len(features), self.num_classes, soft=False, skip=SKIP, validate=True)
        device = self.scores.weight.device
        features, labels = features.detach().to(device), labels.to(device).long()
        if index is None:
            index = torch.arange(self.seen, self.seen + len(features))
        index = index.to(device)
        # Made before the large tables of many classes: small tensors that stay between those would
        # keep their memory from being used again.
        kept = {name: self._new(name, len(features)) for name in PER_SAMPLE}
        for part in blocks(len(features), self.scores.rows_at_once):
            self._take(features[part], labels[part], index[part], kept, part)
        for name in PER_SAMPLE:
            append(self.columns[name], kept[name])
        self.seen += len(features)
        if self.store is not None:
            self.store.add(features)

    def _new(self, name: str, size: int) -> Tensor:
        dtype = torch.long if name in CLASSES else self.scores.weight.dtype
        return torch.empty(size, dtype=dtype, device=self.scores.weight.device)

    def _take(
        self,
        features: Tensor,
        labels: Tensor,
        index: Tensor,
        kept: dict[str, Tensor],
        part: slice,
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
