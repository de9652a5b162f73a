"""What is counted of predictions, on the device they are made on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.dropin.outputs import flat_beside, rows
from largemargin.errors import LargeMarginError, check_labels, check_number
from largemargin.evaluating.correct import Correct
from largemargin.geometry.pairs import widen
from largemargin.measuring.batches import IGNORED, SKIP
from largemargin.measuring.records import Record
from largemargin.measuring.reliability import Calibration

CONFUSION_CLASSES = 2048
"""Up to this many classes the confusion table is kept: 32 MiB."""


@dataclass(frozen=True)
class Accuracy(Record):
    """How often predictions are right: see :func:`accuracy_of`."""

    samples: int
    accuracy: float
    balanced: float
    """Mean of the accuracies of the classes that have samples."""
    worst_class: int
    """Class of lowest accuracy; the first of several."""
    worst: float
    """Its accuracy."""
    loss: float
    """Mean cross entropy of the logits, natural logarithm."""
    ece: float
    """Expected calibration error: see ``calibration``."""
    per_class: tuple[float, ...]
    """Accuracy of each class (its recall); NaN for a class without samples."""
    counts: tuple[int, ...]
    """Samples of each class."""
    confusion: tuple[tuple[int, ...], ...] | None
    """Row: true class, column: predicted class. None above 2048 classes."""
    calibration: Calibration
    skipped: int = 0
    """Samples labelled -100, which count nowhere."""
    broken: int = 0
    """Samples with NaN logits: they count as wrong and stand in no column of ``confusion``."""
    correct: Correct | None = None
    """Which images are right, where the data is a split of up to 1,000,000 of them."""

    def __str__(self) -> str:
        left_out = f", {self.skipped:,} skipped" if self.skipped else ""
        broken = f", {self.broken:,} with NaN logits" if self.broken else ""
        return (
            f"{self.samples:,} samples{left_out}{broken}: accuracy {self.accuracy:.2%}, balanced "
            f"{self.balanced:.2%}, worst class {self.worst_class} with {self.worst:.2%}, cross "
            f"entropy {self.loss:.4g}, calibration error {self.ece:.2%}"
        ).replace("%", " %")


class Counts:
    """Sums over samples from which an :class:`Accuracy` is made; nothing waits for the device.

    Args:
        num_classes: C.
        bins: equally wide bins of confidence, 15 as in Guo et al. 2017.
        device: of the logits to come.
    """

    def __init__(
        self, num_classes: int, *, bins: int = 15, device: torch.device | str = "cpu"
    ) -> None:
        check_number("bins", bins, at_least=1)
        self.num_classes, self.bins = num_classes, bins
        where = torch.device(device)
        self.wide = torch.float32 if where.type == "mps" else torch.float64
        keeps_table = num_classes <= CONFUSION_CLASSES
        sizes = {
            # One cell more, for samples that are left out.
            "class_size": num_classes + 1,
            "class_right": num_classes + 1,
            "table": num_classes**2 + 1 if keeps_table else 0,
            "bin_size": bins + 1,
            "bin_right": bins + 1,
            "skipped": 1,
            "strange": 1,
            "broken": 1,
        }
        self.whole = {
            name: torch.zeros(size, dtype=torch.long, device=where) for name, size in sizes.items()
        }
        self.real = {
            name: torch.zeros(size, dtype=self.wide, device=where)
            for name, size in (("loss", 1), ("bin_confidence", bins + 1))
        }
        self.edges = torch.arange(1, bins, dtype=self.wide, device=where) / bins

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (N, C) or (N, T, C), labels (N,) or (N, T)."""
        flat = flat_beside(labels, logits)
        scores = rows(logits.detach())
        keep = flat != IGNORED
        known = torch.where(keep, flat, 0)
        check_labels(known, len(scores), self.num_classes, of="logits", soft=False, skip=SKIP)
        self._count(widen(scores), flat.long(), keep)

    def _count(self, logits: Tensor, labels: Tensor, keep: Tensor) -> None:
        classes, bins = self.num_classes, self.bins
        inside = (labels >= 0) & (labels < classes)
        strange = keep & ~inside
        keep = keep & inside
        label = torch.where(keep, labels, 0)
        sound = ~logits.isnan().any(1)
        top, predicted = logits.max(1)
        right = (predicted == label) & sound
        nowhere = torch.full_like(label, classes)
        self._tally("class_size", torch.where(keep, label, nowhere))
        self._tally("class_right", torch.where(keep & right, label, nowhere))
        if len(self.whole["table"]):
            cell = torch.where(keep & sound, label * classes + predicted, classes**2)
            self._tally("table", cell)
        self.whole["skipped"] += (labels == IGNORED).sum()
        self.whole["strange"] += strange.sum()
        self.whole["broken"] += (keep & ~sound).sum()
        below = logits - top[:, None]
        total = below.exp().sum(1)
        loss = total.log() - below.gather(1, label[:, None])[:, 0]
        self.real["loss"] += torch.where(keep, loss, 0).sum()
        confidence = total.reciprocal()  # exp(-log 6) is above 1/6
        # A confidence that is a border belongs to the bin below it.
        place = torch.where(keep, torch.bucketize(confidence, self.edges), bins)
        self._tally("bin_size", place)
        self._tally("bin_right", torch.where(right, place, bins))
        self.real["bin_confidence"].index_add_(0, place, confidence.to(self.wide))

    def _tally(self, name: str, cells: Tensor) -> None:
        # Not bincount, which waits for the device to know how many cells there are.
        self.whole[name].index_add_(0, cells, torch.ones_like(cells))

    def sums(self) -> dict[str, Tensor]:
        """Everything counted so far, on the CPU."""
        return {name: each.cpu() for name, each in (self.whole | self.real).items()}

    def result(self, parts: list[dict[str, Tensor]] | None = None) -> Accuracy:
        """The accuracy of these counts, or of the given :meth:`sums` of several processes."""
        every = parts or [self.sums()]
        total = {name: torch.stack([each[name] for each in every]).sum(0) for name in every[0]}
        if int(total["strange"]):
            raise LargeMarginError(
                f"labels must lie in [0, {self.num_classes}), but {int(total['strange'])} of them "
                f"do not. If they mark samples to skip, {SKIP}."
            )
        return self._described(total)

    def _described(self, total: dict[str, Tensor]) -> Accuracy:
        classes = self.num_classes
        size, right = total["class_size"][:classes], total["class_right"][:classes]
        samples = int(size.sum())
        if samples == 0:
            raise LargeMarginError(
                "nothing was evaluated: the data is empty, or all of it is labelled -100."
            )
        share = (right.double() / size).masked_fill(size == 0, math.nan)
        worst = int(torch.where(size > 0, share, math.inf).argmin())
        table = total["table"]
        calibration = self._calibration(total)
        return Accuracy(
            samples=samples,
            accuracy=int(right.sum()) / samples,
            balanced=float(share[size > 0].mean()),
            worst_class=worst,
            worst=float(share[worst]),
            loss=float(total["loss"]) / samples,
            ece=calibration.expected_error,
            per_class=tuple(share.tolist()),
            counts=tuple(size.tolist()),
            confusion=(
                tuple(tuple(row) for row in table[:-1].view(classes, classes).tolist())
                if len(table)
                else None
            ),
            calibration=calibration,
            skipped=int(total["skipped"]),
            broken=int(total["broken"]),
        )

    def _calibration(self, total: dict[str, Tensor]) -> Calibration:
        bins = self.bins
        counts = total["bin_size"][:bins]
        safe = counts.clamp_min(1)
        mean = total["bin_confidence"][:bins].double() / safe
        right = total["bin_right"][:bins].double() / safe
        gaps = torch.where(counts > 0, (right - mean).abs(), 0)
        empty = counts == 0
        return Calibration(
            float((gaps * counts).sum() / counts.sum()),
            float(gaps.max()),
            tuple(each / bins for each in range(bins + 1)),
            tuple(counts.tolist()),
            tuple(mean.masked_fill(empty, math.nan).tolist()),
            tuple(right.masked_fill(empty, math.nan).tolist()),
        )
