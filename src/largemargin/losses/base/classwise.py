"""What the losses on class centroids share: their batch, their mean over classes, their limits."""

from typing import Any, ClassVar, NamedTuple, Protocol, Unpack, runtime_checkable

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_inputs,
    check_same_device,
)
from largemargin.heads.centroid_bank import (
    NO_SOFT,
    BatchCentroids,
    CentroidBank,
    Slots,
    class_means,
    valid_rows,
)
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.terms import matrix_of
from largemargin.ops.distributed import all_reduce_sum
from largemargin.tracing import values_are_checked

_NO_SOFT = "the centroid of a soft class is not defined. Pass hard labels."


class ClassBatch(NamedTuple):
    """Centroids of a batch, which of its rows count, and NaN if a label was out of range."""

    centroids: BatchCentroids
    slots: Slots
    """Those of the centroids. (A field: torch 2.9 compiles no property of a tuple.)"""
    valid: Tensor
    guard: Tensor
    weights: Tensor
    """What each slot counts in a mean over classes: 0 where its class is absent."""
    share: Tensor
    """The sum of the weights, 1 where there are none."""
    num_classes: int
    complete: bool
    """Every row is known to count, so nothing has to be masked."""

    def of_samples(self, per_slot: Tensor) -> Tensor:
        """The row of each sample's class."""
        return per_slot.index_select(0, self.slots.of_sample)

    def kept(self, features: Tensor) -> Tensor:
        """Features with zeros in the rows that do not count: those may hold anything, even NaN."""
        return features if self.complete else torch.where(self.valid[:, None], features, 0)


@runtime_checkable
class Collector(Protocol):
    """State that moves once per optimisation step, from all the micro-batches of the step."""

    accumulate: int | None
    """Micro-batches of a step; None to move only in :meth:`commit`."""

    def commit(self) -> None:
        """Move now, by what was collected."""

    def _make_pending(self) -> None:
        """Make room for what is collected."""


def collectors(module: nn.Module) -> list[Collector]:
    """The banks and centers inside a module."""
    return [each for each in module.modules() if isinstance(each, Collector)]


def set_accumulation(module: nn.Module, accumulate: int) -> None:
    """Let those that move at every forward pass collect so many."""
    for each in collectors(module):
        if each.accumulate == 1 and accumulate != 1:
            each.accumulate = accumulate
            each._make_pending()


class ClassWise(Loss):
    """A loss on class centroids: averaged inside each class first, then over the classes present.

    Every present class weighs the same, whatever its count; ``weight`` (C,) changes that. Hard
    labels only. ``sync=True`` (default) uses the centroids, counts and means of the joined batch
    of all ranks.
    """

    is_penalty: ClassVar[bool] = True

    refuses: ClassVar[dict[str, str]] = {
        "prior": "it has no logits.",
        "soft_targets": _NO_SOFT,
        "label_smoothing": _NO_SOFT,
        "sample_weight": "a class mean of weighted samples is another centroid than the paper's.",
        "class_margin": "the margin is a distance in feature space, one for all classes.",
        "chunked": "it needs no (N, C) logits; its rival search goes over classes in blocks.",
    }

    defaults: ClassVar[dict[str, Any]] = {"sync": True}

    def __init__(self, *, bank: CentroidBank | None = None, **options: Unpack[LossOptions]) -> None:
        super().__init__(**{**self.defaults, **options})
        self.bank = bank

    def batch(
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> ClassBatch:
        """Check the inputs and take the centroids of the batch; a bank is written here."""
        matrix = matrix_of(prototypes)
        self._refuse("sample_weight", sample_weight is not None)
        check_same_device(features=features, weight=self.weight)
        check_inputs(
            features, matrix, labels, bias=bias, soft=False, reason=NO_SOFT, validate=False
        )
        num_classes = matrix.shape[0]
        if self.weight is not None:
            self._check_class_weights(self.weight, num_classes)
        labels = labels.long()
        valid = valid_rows(labels, num_classes, self.ignore_index, self.validate)
        kept = torch.where(valid, labels, 0)
        if self.check_finite:
            rows = torch.where(valid[:, None], features, 0)
            check_all_finite(features=rows, prototypes=matrix, bias=bias)
        inside = (kept >= 0) & (kept < num_classes)
        guard = torch.where(inside.all(), 0.0, torch.nan)
        valid = valid & inside
        complete = values_are_checked(valid, None) and bool(valid.all())
        if self.bank is None:
            slots = class_means(
                features, kept, num_classes, valid, sync=self._synced, complete=complete
            )
            centroids = BatchCentroids(slots, slots.means, slots.means)
        else:
            if self.bank.num_classes != num_classes:
                raise LargeMarginError(
                    f"the centroid bank holds {self.bank.num_classes} classes but the prototypes "
                    f"{num_classes}. Build both with the same number of classes."
                )
            centroids = self.bank(features, kept, valid, complete=complete)
        slots = centroids.slots
        weights = slots.present.to(slots.counts.dtype)
        if self.weight is not None:
            weights = torch.where(slots.present, self.weight.to(weights.dtype)[slots.classes], 0)
        total = weights.sum()
        share = torch.where(total == 0, 1, total)
        return ClassBatch(centroids, slots, valid, guard, weights, share, num_classes, complete)

    def mean_over_samples(self, values: Tensor, batch: ClassBatch) -> Tensor:
        """Reduce (N,) values: mean inside each class, then (weighted) mean over classes."""
        slots = batch.slots
        values = torch.where(batch.valid, values * batch.weights[slots.of_sample], 0) + batch.guard
        if self.reduction == "none":
            return values
        total = (values / slots.counts.clamp_min(1)[slots.of_sample]).sum()
        if self._synced:
            total = all_reduce_sum(total)
        return self._over_classes(total, batch)

    def mean_over_classes(self, values: Tensor, batch: ClassBatch) -> Tensor:
        """Reduce (K,) values, one per slot, to their (weighted) mean over the classes present."""
        slots = batch.slots
        values = torch.where(slots.present, values, 0) * batch.weights + batch.guard
        if self.reduction == "none":
            return values.new_zeros(batch.num_classes).index_add(0, slots.classes, values)
        return self._over_classes(values.sum(), batch)

    def _over_classes(self, total: Tensor, batch: ClassBatch) -> Tensor:
        if self.reduction == "sum":
            return total
        return total / batch.share
