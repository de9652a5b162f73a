"""One pass of a model over a loader, into a stream."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largemargin.dropin.outputs import flat_beside, rows
from largemargin.errors import LargeMarginError, check_matrix
from largemargin.measuring.batches import IGNORED, batches, dataset_size, given_labels, order_note
from largemargin.measuring.capture import Capture, differs
from largemargin.measuring.layers import LayerStreams
from largemargin.measuring.parts import InputParts
from largemargin.measuring.scores import LEADS
from largemargin.measuring.stream import Stream


@dataclass
class Passed:
    """What a pass has to say beside its stream."""

    samples: int = 0
    """That came, each sequence one."""
    rows: int = 0
    """That came, those that were skipped among them."""
    skipped: int = 0
    """Labelled -100."""
    numbered: bool = False
    """Samples came with their positions in the dataset."""
    own_logits: bool = False
    """The head does not do what its weight and bias say."""


class Samples:
    """Takes the samples of a loader through a model into a stream."""

    def __init__(
        self,
        capture: Capture,
        stream: Stream,
        device: torch.device,
        progress: bool,
        beside: InputParts | None = None,
        layers: LayerStreams | None = None,
    ) -> None:
        self.capture = capture
        self.beside = beside
        """What else is measured of every batch."""
        self.layers = layers
        self.stream = stream
        self.device = device
        self.progress = progress
        self.passed = Passed()

    def read(self, loader: Iterable[Any]) -> Passed:
        for inputs, labels, index in batches(loader, self.device, self.progress):
            labels = given_labels(labels)
            if self.layers is not None:
                self.layers.reader.expect(labels)
            features, outputs = self.capture.read(inputs)
            if self.passed.rows == 0 and self.capture.source is None:
                self.passed.own_logits = differs(self.stream.head, features, outputs)
            self.passed.samples += len(labels)
            flat = flat_beside(labels, features).to(features.device)
            self._add(rows(features), flat, index)
            if self.beside is not None:
                self.beside.add(inputs, labels, index)
        return self.passed

    def _add(self, features: Tensor, labels: Tensor, index: Tensor | None) -> None:
        """Rows to measure and their indices: no ignored ones, no repeated ones."""
        count = len(features)
        if len(labels) != count or labels.dim() != 1:
            self.stream.add(features, labels)  # which says what is wrong
            return
        if index is None:
            where = torch.arange(self.passed.rows, self.passed.rows + count)
        else:
            self.passed.numbered = True
            # Positions of a sequence follow each other.
            length = count // max(len(index), 1)
            inside = torch.arange(length) + length * index[:, None]
            where = torch.where(index[:, None] < 0, -1, inside).flatten()
        where = where.to(features.device)
        ignored = labels == IGNORED
        self.passed.rows += count
        self.passed.skipped += int((ignored & (where >= 0)).sum())
        keep = ~ignored & (where >= 0)
        whole = bool(keep.all())
        if not whole:
            features, labels, where = features[keep], labels[keep], where[keep]
        if self.layers is not None:
            self.layers.select(None if whole else keep, where)
        self.stream.add(features, labels, where)
        if self.layers is not None:
            self.layers.add(labels)

    def number(self, passes: list[Passed]) -> None:
        """Count on from the processes before this one, where samples had no number."""
        if not any(each.numbered for each in passes):
            before = sum(each.rows for each in passes[: dist.get_rank()])
            parts = self.stream.columns["index"]
            self.stream.columns["index"] = [each + before for each in parts]

    def read_strangers(self, loader: Iterable[Any]) -> dict[str, Tensor]:
        def parts() -> Iterator[Tensor]:
            for inputs, _, index in batches(loader, self.device, self.progress):
                flat = rows(self.capture.read(inputs)[0])
                if index is not None and len(index) == len(flat):
                    flat = flat[(index >= 0).to(flat.device)]
                yield flat

        return leads(self.stream, parts())

    def notes(self, loader: Iterable[Any], passes: list[Passed]) -> list[str]:
        """What a reader of the result has to know about how it was read."""
        found = []
        order = order_note(loader)
        if order is not None:
            found.append(order)
        if len(passes) > 1 and not any(each.numbered for each in passes):
            found.append(
                "indices count the samples of one process after those of another; use a "
                "DistributedSampler for positions in the dataset"
            )
            more = sum(each.samples for each in passes) - dataset_size(loader)
            if more > 0:
                found.append(
                    f"the processes read {more} samples more than the dataset has: those that were "
                    "repeated to fill up batches count more than once"
                )
        skipped = sum(each.skipped for each in passes)
        if skipped:
            found.append(skipped_note(skipped))
        if any(each.own_logits for each in passes):
            found.append(
                f"the head {self.capture.head_name!r} makes other logits than its weight and bias "
                "do: accuracy, loss and margins are those of its weight as a plain "
                f"{self.stream.head.similarity!r} head"
            )
        if self.capture.source is not None:
            found.append(
                f"features are those of {self.capture.features_name!r}; accuracy, loss and margins "
                "are those of the head on them"
            )
        return found


def skipped_note(count: int) -> str:
    return f"{count} samples labelled {IGNORED} were skipped"


def leads(stream: Stream, parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """Scores of features of other data than the stream's."""
    scores = stream.scores
    found: dict[str, list[Tensor]] = {name: [torch.zeros(0).double()] for name in LEADS}
    for features in parts:
        check_matrix("ood", features, "(N, D)")
        if features.shape[1] != stream.dim:
            raise LargeMarginError(
                f"features of the data given as ood must have {stream.dim} columns, as the head's "
                f"weight has, but their shape is {tuple(features.shape)}."
            )
        for part in torch.split(features.to(scores.weight.device), scores.rows_at_once):
            each = scores.unlabelled(part)
            if not bool(torch.isfinite(each["lead_raw"]).all()):
                raise LargeMarginError(
                    "features must be finite, but the data given as ood has NaN or infinite ones."
                )
            for name in LEADS:
                found[name].append(each[name].double().cpu())
    return {name: torch.cat(each) for name, each in found.items()}
