"""A few samples of every class, drawn from a loader in one pass."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_labels, check_number
from largemargin.measuring.batches import IGNORED, SKIP, batches, given_labels
from largemargin.measuring.draws import SampleDraws


@dataclass(frozen=True)
class Drawn:
    """Samples of a subset in the order of their indices; inputs as the model takes them."""

    inputs: list[Any]
    labels: Tensor
    index: Tensor


class Quotas:
    """As many samples of each class as fit into ``samples``, those of the smallest random key.

    A key belongs to the seed and the index of a sample. So the choice depends neither on batches
    nor on the model, and two models are seen on the same samples.
    """

    def __init__(
        self, samples: int, num_classes: int, classes: Sequence[int] | None, seed: int
    ) -> None:
        check_number("max_samples", samples, at_least=1)
        wanted = range(num_classes) if classes is None else classes
        wrong = [each for each in wanted if not 0 <= int(each) < num_classes]
        if wrong or len(set(wanted)) != len(wanted) or len(wanted) == 0:
            raise LargeMarginError(
                f"classes must be different class indices in [0, {num_classes}), but "
                f"{list(wanted)} were given."
            )
        if samples < len(wanted):
            raise LargeMarginError(
                f"max_samples must be at least {len(wanted)}, one for each class, but {samples} "
                "was given. Ask for more, or for some classes: classes=[...]."
            )
        share, rest = divmod(int(samples), len(wanted))
        self.sizes = {int(each): share + (rank < rest) for rank, each in enumerate(wanted)}
        self.draws = SampleDraws(seed, "subset")
        self.heaps: dict[int, list[tuple[int, int, Any]]] = {each: [] for each in self.sizes}

    def offer(self, labels: Tensor, index: Tensor, inputs: Any) -> None:
        count = len(labels)
        for row, (label, key) in enumerate(
            zip(labels.tolist(), self.draws.keys(index), strict=True)
        ):
            heap = self.heaps.get(label)
            if heap is None or int(index[row]) < 0:
                continue
            full = len(heap) >= self.sizes[label]
            if full and -key <= heap[0][0]:
                continue
            entry = (-key, int(index[row]), _row(inputs, row, count))
            if full:
                heapq.heapreplace(heap, entry)
            else:
                heapq.heappush(heap, entry)

    def drawn(self) -> Drawn:
        found = [
            (index, label, inputs)
            for label, heap in self.heaps.items()
            for _, index, inputs in heap
        ]
        if not found:
            raise LargeMarginError(
                f"nothing was found to embed: the loader is empty, or has no sample of the classes "
                f"{sorted(self.sizes)[:8]}."
            )
        found.sort(key=lambda each: each[0])
        index, labels, inputs = zip(*found, strict=True)
        return Drawn(list(inputs), torch.tensor(labels), torch.tensor(index))

    def notes(self) -> list[str]:
        """Classes that have fewer samples than there was room for."""
        short = [label for label, heap in self.heaps.items() if len(heap) < self.sizes[label]]
        if not short:
            return []
        kept = sum(len(heap) for heap in self.heaps.values())
        listed = ", ".join(str(each) for each in short[:8]) + (", ..." if len(short) > 8 else "")
        return [
            f"{kept} of {sum(self.sizes.values())} samples: there are no more of class {listed}"
        ]


def draw_from(
    loader: Iterable[Any],
    quotas: Quotas,
    *,
    num_classes: int,
    progress: bool = False,
) -> Drawn:
    """The samples of a loader that the quotas take; they stay on the CPU."""
    arrived = 0
    for inputs, labels, index in batches(loader, torch.device("cpu"), progress):
        labels = given_labels(labels)
        if labels.dim() != 1:
            raise LargeMarginError(
                "embeddings need one label per sample, but the labels' shape is "
                f"{tuple(labels.shape)}."
            )
        labels = labels.cpu()
        used = labels[labels != IGNORED]
        check_labels(used, len(used), num_classes, soft=False, skip=SKIP, validate=True)
        if index is None:
            index = torch.arange(arrived, arrived + len(labels))
        arrived += len(labels)
        quotas.offer(labels, index, inputs)
    return quotas.drawn()


def joined(samples: list[Any]) -> Any:
    """Single samples as a batch."""
    first = samples[0]
    if isinstance(first, dict):
        return {name: joined([each[name] for each in samples]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(list(each)) for each in zip(*samples, strict=True))
    if not isinstance(first, _Row):
        return first
    rows = [each.value for each in samples]
    if len({tuple(row.shape) for row in rows}) > 1:
        shapes = sorted({tuple(row.shape) for row in rows})
        raise LargeMarginError(
            f"samples must be of one shape to stand in one batch, but {shapes[:4]} were found. Let "
            "the loader bring them to one shape."
        )
    return torch.stack(rows)


@dataclass(frozen=True)
class _Row:
    """The part of a batch that belongs to one sample; anything else is shared by all."""

    value: Tensor


def _row(inputs: Any, row: int, count: int) -> Any:
    if isinstance(inputs, dict):
        return {name: _row(each, row, count) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_row(each, row, count) for each in inputs)
    own = isinstance(inputs, Tensor) and inputs.dim() > 0 and inputs.shape[0] == count
    return _Row(inputs[row].clone()) if own else inputs
