"""Class centroids: of the batch, and with momentum in a bank (LMD section 4.4, ROB 4.4)."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_matrix,
    check_number,
    refuse_transform,
)
from largemargin.ops.centroid_terms import kernels
from largemargin.ops.distributed import all_reduce_sum, gather_ragged, world_size
from largemargin.ops.norms import promote, read_rows
from largemargin.shapes import Features, Labels
from largemargin.tracing import plain_eager, value_range

Strategy: TypeAlias = Literal["none", "both", "partial"]
FirstSeen: TypeAlias = Literal["scaled", "full"]
STRATEGIES: tuple[Strategy, ...] = ("none", "both", "partial")
FIRST_SEEN: tuple[FirstSeen, ...] = ("scaled", "full")

SHARED_SLOTS = 4096
"""Up to this many classes, ranks sum one row per class; beyond it, one per sample of the batch."""

NO_SOFT = "The centroid of a soft class is not defined; pass hard labels."


class Slots(NamedTuple):
    """Rows that hold one class each, so that no (C, D) array is needed when C is large."""

    of_sample: Tensor
    """(N,) the row of each sample's class (0 for samples that do not count)."""
    classes: Tensor
    """(K,) the class of each row."""
    counts: Tensor
    """(K,) samples of that class, over all ranks; 0 marks a row that holds nothing."""
    present: Tensor
    """(K,) whether the row holds a class. (A field: torch 2.9 compiles no property of a tuple.)"""
    means: Tensor
    """(K, D) class means with gradient, 0 where nothing is held."""
    by_class: bool
    """Row c is class c; otherwise the first sample of a class holds it."""


class BatchCentroids(NamedTuple):
    """Centroids of the classes in a batch, by the part of the loss they serve."""

    slots: Slots
    compact: Tensor
    """(K, D) for compactness and the alignment of noisy features."""
    margin: Tensor
    """(K, D) for the centroid margin and the norm."""
    all_present: bool = False
    """Every row is known to hold a class."""


def class_means(
    features: Features,
    labels: Labels,
    num_classes: int,
    valid: Tensor,
    *,
    sync: bool = False,
    complete: bool = False,
) -> Slots:
    """Means of the classes in the batch; with ``sync`` in the joined batch of all ranks.

    ``valid`` (N,) says which samples count; ``complete`` promises that all do. Rows are classes
    when there are few of them, otherwise samples: the first one of a class holds it. Shapes
    depend on N and C alone, so this compiles.
    """
    features, labels = promote(features), labels.long()
    labels = labels if complete else labels.clamp(0, num_classes - 1)
    shared = sync and world_size() > 1
    by_class = num_classes <= (SHARED_SLOTS if shared else labels.shape[0])
    if by_class:
        of_sample, classes = labels, torch.arange(num_classes, device=labels.device)
    else:
        everyone = torch.where(valid, labels, -1)
        everyone = gather_ragged(everyone, -1) if shared else everyone
        count = everyone.shape[0]
        order = torch.arange(count, device=labels.device)
        classes = everyone.clamp_min(0)
        first = order.new_full((num_classes,), count).scatter_reduce(
            0, classes, torch.where(everyone >= 0, order, count), "amin"
        )
        of_sample = torch.where(valid, first[labels], 0)
    counts, sums = (features.new_zeros(len(classes), *rest) for rest in ((), features.shape[1:]))
    if complete:  # values were looked at, so this is plain Python: in place
        counts.index_add_(0, of_sample, features.new_ones(len(labels)))
        sums.index_add_(0, of_sample, features)
    else:
        kept = torch.where(valid[:, None], features, 0)
        counts = counts.index_add(0, of_sample, valid.to(features.dtype))
        sums = sums.index_add(0, of_sample, kept)
    if shared:
        sums, counts = all_reduce_sum(sums), all_reduce_sum(counts)
    means = sums / counts.clamp_min(1)[:, None]
    return Slots(of_sample, classes, counts, counts > 0, means, by_class)


def recomputing() -> bool:
    """Inside a backward pass: activation checkpointing runs the forward code again there."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _mark(batch: Tensor) -> Tensor:
    """What batches are told apart by: a number per row."""
    mark: Tensor = torch.linalg.vector_norm(batch.detach(), dim=-1)
    return mark


class Replay:
    """What the last few forward passes read from a state before they wrote it.

    Activation checkpointing runs a forward pass again inside the backward pass, after the write.
    It must read what the first run read: the entry whose batch looks most like its own.
    """

    def __init__(self, length: int = 8) -> None:
        self.entries: deque[tuple[Tensor, tuple[Tensor, ...]]] = deque(maxlen=length)

    def remember(self, batch: Tensor, state: tuple[Tensor, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.entries.append((_mark(batch), state))

    def recall(self, batch: Tensor, shape: torch.Size) -> tuple[Tensor, ...] | None:
        """The remembered state of this shape, or None outside a recomputation."""
        if not recomputing():
            return None
        mark = _mark(batch)
        found = [
            (seen, state)
            for seen, state in reversed(self.entries)
            if seen.shape == mark.shape and state[0].shape == shape
        ]
        near = min(found, key=lambda entry: float((entry[0] - mark).abs().sum()), default=None)
        return None if near is None else near[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replay":
        return Replay()

    def __reduce__(self) -> tuple[type["Replay"], tuple[()]]:
        return Replay, ()


@contextmanager
def exact_buffers(module: nn.Module) -> Iterator[None]:
    """Undo what ``half()`` or ``bfloat16()`` does to buffers: state is float32 at least (N1)."""
    exact = {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }
    yield
    for name, buffer in exact.items():
        moved = module._buffers[name]
        if moved is not None and moved.dtype in (torch.float16, torch.bfloat16):
            module._buffers[name] = buffer.to(moved.device, torch.float32)


class CentroidBank(nn.Module):
    r"""Momentum centroids with the strategies none, both and partial (NGY-PM).

    .. math:: m_c^{cur} = \frac1{n_c}\sum_{y_n=c} q_n,\qquad
              m_c^{mom} = \gamma\,\mathrm{sg}(\mathrm{bank}_c) + (1-\gamma)\,m_c^{cur},\qquad
              \mathrm{bank}_c \leftarrow \mathrm{sg}(m_c^{mom})

    ========== ============ ============================ ================
    strategy   compactness  margin and norm              noisy alignment
    ========== ============ ============================ ================
    none       current      current                      current
    both       momentum     momentum                     momentum
    partial    momentum     current (full gradient)      momentum
    ========== ============ ============================ ================

    A class seen for the first time takes its current centroid as the previous value; it is never
    blended with zeros. Classes absent from the batch are untouched. Only training mode writes. The
    bank is kept under every strategy, so strategies can be switched.

    When it writes: once per training forward by default. With gradient accumulation set
    ``accumulate=k`` (writes at every k-th forward, from all k micro-batches) or call
    :meth:`commit_with` (writes when the optimizer steps). The recomputation of activation
    checkpointing never writes and sees the bank as the first run saw it. (``torch.compile`` around
    ``checkpoint`` around a bank is the exception: the compiler recomputes from the written bank.
    Use :meth:`commit_with` there.) A bank belongs to one loss: sharing it writes it twice a step.

    Args:
        num_classes: C.
        dim: D.
        strategy: default "partial", the method of LMD.
        momentum: gamma in [0, 1]; default 0.99 (LMD 7.1); "such as 0.9" in the text of both papers.
        first_seen: "scaled" keeps the gradient factor 1-gamma at first sight; "full" uses the
            current centroid itself there. Same value and bank.
        accumulate: micro-batches per optimisation step; None to write only in :meth:`commit`.
        sync: under torch.distributed, sum class sums and counts over the ranks with gradient, so
            that every rank has the centroids of the joined batch. False gives local centroids.

    State: ``centroids`` (C, D) float32 (float64 in a float64 model), ``seen`` and ``counts``
    (C,).
    """

    centroids: Tensor
    seen: Tensor
    counts: Tensor
    pending_sums: Tensor
    pending_counts: Tensor
    pending_steps: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        strategy: Strategy = "partial",
        momentum: float = 0.99,
        first_seen: FirstSeen = "scaled",
        accumulate: int | None = 1,
        sync: bool = True,
    ) -> None:
        super().__init__()
        check_number("num_classes", num_classes, at_least=2)
        check_number("dim", dim, at_least=1)
        check_choice("strategy", strategy, STRATEGIES)
        check_choice("first_seen", first_seen, FIRST_SEEN)
        check_number("momentum", momentum, at_least=0, at_most=1)
        if accumulate is not None:
            check_number("accumulate", accumulate, at_least=1)
        self.num_classes = num_classes
        self.dim = dim
        self.strategy: Strategy = strategy
        self.momentum = momentum
        self.first_seen: FirstSeen = first_seen
        self.accumulate = accumulate
        self.sync = sync
        self.register_buffer("centroids", torch.zeros(num_classes, dim))
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.bool))
        self.register_buffer("counts", torch.zeros(num_classes, dtype=torch.long))
        self._replay = Replay()
        if accumulate != 1:
            self._make_pending()

    def forward(
        self,
        features: Features,
        labels: Labels,
        valid: Tensor | None = None,
        *,
        complete: bool = False,
        checked: bool = False,
    ) -> BatchCentroids:
        """Centroids of the batch's classes by role; writes the bank in training mode.

        ``valid`` (N,) says which samples count; default all whose label is in range. The features
        may be ``checked`` already.
        """
        if not checked:
            self._check(features)
        labels = labels.long()
        if valid is None or not complete:
            valid = self._in_range(labels, valid)
        sync = self.sync and self.training
        slots = class_means(features, labels, self.num_classes, valid, sync=sync, complete=complete)
        again, eager = self.training and recomputing(), plain_eager()
        previous, known = self._read(slots, again, eager)
        all_known, all_present = False, False
        if eager and known.is_cpu:
            all_known, all_present = bool(known.all()), bool(slots.present.all())
        momentum = self._blend(slots.means, previous, known, all_known)
        if self.training and not again:
            self._replay.remember(slots.means, (previous, known))
            with torch.no_grad():
                self._write(slots, momentum, all_known, all_present)
        if self.first_seen == "full":
            momentum = torch.where(known[:, None], momentum, slots.means)
        return self._by_role(slots, momentum, all_present)

    def _in_range(self, labels: Tensor, valid: Tensor | None) -> Tensor:
        inside = (labels >= 0) & (labels < self.num_classes)
        return inside if valid is None else valid & inside

    def _by_role(self, slots: Slots, momentum: Tensor, all_present: bool = False) -> BatchCentroids:
        compact = slots.means if self.strategy == "none" else momentum
        margin = momentum if self.strategy == "both" else slots.means
        return BatchCentroids(slots, compact, margin, all_present)

    def _check(self, features: Features) -> None:
        refuse_transform(self)
        check_matrix("features", features, "(N, D)")
        if features.shape[1] != self.dim:
            raise LargeMarginError(
                f"features must have {self.dim} columns, the bank's dim, but their shape is "
                f"{tuple(features.shape)}. Build the bank with dim={features.shape[1]}."
            )

    def by_kernel(
        self, features: Features, labels: Labels, ignore_index: int | None
    ) -> BatchCentroids:
        """The same where ``kernels_serve``; ``classes`` of slots that are samples are labels."""
        rows = kernels().class_rows(
            *(features, labels, self.centroids, self.seen, self.counts),
            num_classes=self.num_classes,
            ignore=ignore_index,
            weight=1 - self.momentum,
            write=self.training,
        )
        if self.training:
            self._replay.remember(rows.means, (rows.previous, rows.known))
        by_class = self.num_classes <= labels.shape[0]
        slots = Slots(rows.of_sample, labels, rows.held, rows.held, rows.means, by_class)
        return self._by_role(slots, rows.blended)

    def _read(self, slots: Slots, again: bool, eager: bool) -> tuple[Tensor, Tensor]:
        """Bank rows and seen flags of the slots, as they were before this step's write."""
        if again:
            shape = torch.Size((slots.classes.shape[0], self.dim))
            remembered = self._replay.recall(slots.means, shape)
            if remembered is not None:
                return remembered[0], remembered[1]
        rows = None if slots.by_class else slots.classes
        previous = read_rows(self.centroids, rows, eager).to(slots.means.dtype)
        return previous, read_rows(self.seen, rows, eager)

    def _blend(
        self, current: Tensor, previous: Tensor, known: Tensor, all_known: bool = False
    ) -> Tensor:
        if not all_known:
            previous = torch.where(known[:, None], previous, current.detach())
        # lerp is exact where both agree: a new class must be at distance 0 from itself.
        return torch.lerp(previous, current, 1 - self.momentum)

    def _write(self, slots: Slots, blended: Tensor, all_known: bool, all_present: bool) -> None:
        # One overflowing batch must not spoil a class for good: its centroid is not stored.
        if all_present and slots.by_class and self.accumulate == 1:
            low, high = value_range(slots.means)
            if -math.inf < low and high < math.inf:
                self.centroids.copy_(blended)
                self.counts.add_(slots.counts.long())
                if not all_known:
                    self.seen.fill_(True)
                return
        present = slots.present & torch.isfinite(slots.means.abs().amax(1))
        counts = torch.where(present, slots.counts, 0).long()
        rows = blended.to(self.centroids.dtype)
        if self.accumulate != 1:
            self._collect(slots, present, counts)
        elif slots.by_class:
            self.counts.add_(counts)  # compiled, adding integers at indices costs a dozen kernels
            self.centroids.copy_(torch.where(present[:, None], rows, self.centroids))
            self.seen.logical_or_(present)
        elif slots.classes.shape[0] > 0:
            # Rows that hold nothing repeat the first one that does, or rewrite what is there.
            # (index_select with a 1-dim index: indexing by a 0-dim tensor would read it back.)
            self.counts.index_add_(0, slots.classes, counts)
            leader = present.int().argmax(0, keepdim=True)
            any_present = present.index_select(0, leader)
            order = torch.arange(present.shape[0], device=present.device)
            source = torch.where(present, order, leader)
            index = slots.classes.index_select(0, source)
            rows = torch.where(any_present, rows.index_select(0, source), self.centroids[index])
            self.centroids.index_copy_(0, index, rows)
            self.seen.index_copy_(0, index, self.seen[index] | any_present)

    def _collect(self, slots: Slots, present: Tensor, counts: Tensor) -> None:
        """Add a micro-batch to those of the step."""
        sums = torch.where(present[:, None], slots.means * slots.counts[:, None], 0)
        self.pending_sums.index_add_(0, slots.classes, sums.to(self.pending_sums.dtype))
        self.pending_counts.index_add_(0, slots.classes, counts)
        self.pending_steps.add_(1)
        if self.accumulate is not None:
            self._commit(self.pending_steps >= self.accumulate)

    def _commit(self, due: Tensor) -> None:
        current = self.pending_sums / self.pending_counts.clamp_min(1)[:, None]
        write = (self.pending_counts > 0) & due
        blended = self._blend(current, self.centroids, self.seen)
        self.centroids.copy_(torch.where(write[:, None], blended, self.centroids))
        self.counts.add_(torch.where(due, self.pending_counts, 0))
        self.seen.logical_or_(write)
        for pending in (self.pending_sums, self.pending_counts, self.pending_steps):
            pending.mul_(~due)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the centroids of all micro-batches since the last write (``accumulate`` != 1)."""
        if self.accumulate == 1:
            raise LargeMarginError(
                "commit() needs a bank with accumulate=None or accumulate > 1, but accumulate is "
                "1: it writes at every training forward already."
            )
        self._commit(torch.ones((), dtype=torch.bool, device=self.seen.device))

    def commit_with(self, optimizer: Optimizer) -> RemovableHandle:
        """Write whenever ``optimizer`` steps, however many micro-batches came before."""
        self.accumulate = None
        if not hasattr(self, "pending_sums"):
            self._make_pending()
        return optimizer.register_step_post_hook(lambda *_: self.commit())

    def _make_pending(self) -> None:
        self.register_buffer("pending_sums", torch.zeros_like(self.centroids))
        self.register_buffer("pending_counts", torch.zeros_like(self.counts))
        self.register_buffer("pending_steps", torch.zeros_like(self.counts[0]))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        load_pending(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CentroidBank":
        with exact_buffers(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.dim}, strategy={self.strategy!r}, "
            f"momentum={self.momentum}, first_seen={self.first_seen!r}, "
            f"accumulate={self.accumulate}, sync={self.sync}"
        )


def load_pending(collector: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Checkpoints load whether or not they, or this module, collect micro-batches."""
    saved = f"{prefix}pending_sums" in state_dict
    if saved and not hasattr(collector, "pending_sums"):
        collector._make_pending()
    elif not saved and hasattr(collector, "pending_sums"):
        for name in ("pending_sums", "pending_counts", "pending_steps"):
            state_dict[prefix + name] = torch.zeros_like(getattr(collector, name))


def valid_rows(
    labels: Labels, num_classes: int, ignore_index: int | None, validate: bool | None
) -> Tensor:
    """Which rows count: not ignored, and in range (checked where values are checked)."""
    everyone = torch.ones_like(labels, dtype=torch.bool)
    kept = everyone if ignore_index is None else labels != ignore_index
    checked = torch.where(kept, labels, 0)
    check_labels(
        checked, labels.shape[0], num_classes, soft=False, reason=NO_SOFT, validate=validate
    )
    return kept
