"""How often a model is right, in one pass that does not wait for the device.

``Counts`` sums over samples on the device; ``Correct`` keeps a bit per image of a split, so that
models can be compared image by image; :func:`wilson` and :func:`paired_interval` say how far an
accuracy, or a difference of two, may be off because the test data is only a sample.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Unpack

import torch
from torch import Tensor, nn

from largemargin.dropin.model_outputs import flat_beside, rows
from largemargin.errors import LargeMarginError, check_count, check_labels, check_number
from largemargin.geometry.pairs import widen
from largemargin.measuring.batches import (
    IGNORED,
    SKIP,
    Advance,
    DataBatch,
    Source,
    Split,
    digest,
    need_labels,
)
from largemargin.measuring.calibration import Calibration, calibration_of_bins
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, count_over
from largemargin.measuring.records import Record

CONFUSION_CLASSES = 2048
"""Up to this many classes the confusion table is kept: 32 MiB."""

MOST = 1_000_000
"""Images up to which the bits are kept: 170 kB of text."""

BITS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Of a byte, the highest first."""

Seen = list[tuple[Tensor, Tensor]]
"""Positions and whether the model is right there, batch by batch."""


@dataclass(frozen=True)
class Correct(Record):
    """Which images of a split a model classifies correctly, to compare models image by image."""

    digest: str
    """Of names and labels of the images."""
    samples: int
    bits: str
    """One bit per image in the order of the split, the first one highest in its byte; base64."""

    @classmethod
    def of(cls, right: Tensor, digest: str) -> "Correct":
        """Of (N,) bool.

        Example:
            >>> Correct.of(torch.tensor([True, False, True]), "abc").bits
            'oA=='
        """
        bits = torch.zeros(-(-len(right) // 8) * 8, dtype=torch.uint8)
        bits[: len(right)] = right
        packed = (bits.view(-1, 8) * bits.new_tensor(BITS)).sum(1, dtype=torch.uint8)
        return cls(digest, len(right), base64.b64encode(bytes(packed.tolist())).decode("ascii"))

    def right(self) -> Tensor:
        """(N,) bool."""
        try:
            packed = base64.b64decode(self.bits, validate=True)
        except ValueError as error:
            raise LargeMarginError(f"the bits of {self.samples} images are damaged.") from error
        if len(packed) != -(-self.samples // 8):
            raise LargeMarginError(
                f"there are {len(packed)} bytes of bits, but {self.samples} images."
            )
        each = torch.tensor(list(packed), dtype=torch.uint8)[:, None]
        found: Tensor = (each & each.new_tensor(BITS)).ne(0).flatten()[: self.samples]
        return found


def paired_counts(one: Correct, other: Correct) -> tuple[int, int, int, int] | None:
    """Images that both are right about, the first alone, the second alone, and neither.

    None where they are of different images.
    """
    if (one.digest, one.samples) != (other.digest, other.samples):
        return None
    a, b = one.right(), other.right()
    counts = (a & b, a & ~b, ~a & b, ~a & ~b)
    both, first, second, neither = (int(each.sum()) for each in counts)
    return both, first, second, neither


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


def accuracy_of(
    model: nn.Module,
    data: Source,
    *,
    num_classes: int | None = None,
    bins: int = 15,
    layer: str | None = None,
    **options: Unpack[ReadingOptions],
) -> Accuracy:
    """Accuracy by class, confusion, cross entropy and calibration of a classifier.

    One pass in evaluation mode; modes are restored. Sums are kept on the model's device and read
    once, at the end. Call it under ``torch.autocast`` to evaluate in half precision: sums are
    float64 in any case.

    Under torch.distributed every process evaluates its part and all return the result of the
    whole; samples a ``DistributedSampler`` repeats to fill up count once. Where one process fails
    all raise.

    Args:
        model: any model :func:`largemargin.attach` can read, attached or not, wrapped or not.
        data: a split, or a loader of (inputs, labels) or whatever else :func:`largemargin.measure`
            takes. Labels are class indices; those that are -100 are skipped.
        num_classes: C; default the width of the model's head.
        bins: of the calibration.
        layer: name of the head; default found by what the model returns.
        options: ``batch_size`` of a split, default 256 (a loader has its own); ``device`` to send
            batches to, default that of the model; ``workers``, processes that read image files of
            a split; ``sync=False`` to evaluate this process alone, for calls on one process of
            several; ``progress=True`` for a progress bar (needs tqdm).

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> data = [(torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 1, 1]))]
        >>> found = accuracy_of(model, data)
        >>> found.per_class, found.balanced, found.confusion
        ((1.0, 0.5), 0.75, ((1, 0), (1, 1)))
    """

    def make_counter(reader: LogitModel, where: torch.device) -> AccuracyCounter:
        return AccuracyCounter(reader, data, bins, where)

    return count_over(
        model, data, make_counter, "accuracy", num_classes=num_classes, layer=layer, **options
    )


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
        sizes = {
            # One cell more, for samples that are left out.
            **dict.fromkeys(("class_size", "class_right"), num_classes + 1),
            "table": num_classes**2 + 1 if num_classes <= CONFUSION_CLASSES else 0,
            **dict.fromkeys(("bin_size", "bin_right"), bins + 1),
            **dict.fromkeys(("skipped", "strange", "broken"), 1),
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
        classes = self.num_classes
        size, right = total["class_size"][:classes], total["class_right"][:classes]
        samples = int(size.sum())
        if samples == 0:
            raise LargeMarginError(
                "nothing was evaluated: the data is empty, or all of it is labelled -100."
            )
        share = (right.double() / size).masked_fill(size == 0, math.nan)
        worst = int(torch.where(size > 0, share, math.inf).argmin())
        confusion = None
        if len(total["table"]):
            table = total["table"][:-1].view(classes, classes)
            confusion = tuple(tuple(row) for row in table.tolist())
        bins = (total[name][: self.bins] for name in ("bin_size", "bin_confidence", "bin_right"))
        calibration = calibration_of_bins(*bins)
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
            confusion=confusion,
            calibration=calibration,
            skipped=int(total["skipped"]),
            broken=int(total["broken"]),
        )


class AccuracyCounter:
    """Counts and, of a split, which images are right; of other data those are not kept."""

    passes = 1

    def __init__(self, reader: LogitModel, data: Source, bins: int, device: torch.device) -> None:
        self.reader = reader
        self.counts = Counts(reader.num_classes, bins=bins, device=device)
        self.split: Split | None = None
        if isinstance(data, Split) and 0 < len(data) <= MOST:
            self.split = None if bool((data.labels == IGNORED).any()) else data
        self.seen: Seen = []

    def add(self, batch: DataBatch, advance: Advance) -> None:
        self.add_logits(batch, self.reader(batch.inputs))
        advance()

    def add_logits(self, batch: DataBatch, logits: Tensor) -> None:
        labels = need_labels(batch.labels)
        self.counts.add(logits, labels)
        if self.split is not None:
            self.seen.append((batch.indices, is_right(logits, labels)))

    def sums(self) -> tuple[dict[str, Tensor], Seen]:
        """What this process has, on the CPU."""
        return self.counts.sums(), [(positions, right.cpu()) for positions, right in self.seen]

    def result(self, parts: Sequence[tuple[dict[str, Tensor], Seen]]) -> Accuracy:
        """Of all processes together."""
        found = self.counts.result([sums for sums, _ in parts])
        if self.split is None:
            return found
        right = torch.zeros(len(self.split), dtype=torch.bool)
        for positions, own in (each for _, seen in parts for each in seen):
            right[positions] = own
        return replace(found, correct=Correct.of(right, digest(self.split)))


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) bool: whether the largest logit is that of the label; never where a logit is NaN."""
    return (logits.argmax(1) == labels) & ~logits.isnan().any(1)


def wilson(right: int, samples: int, *, confidence: float = 0.95) -> tuple[float, float]:
    r"""Wilson's score interval of a share (Wilson 1927).

    .. math:: \frac{p + z^2/2n \pm z\sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}

    Unlike p ± z·std it stays inside [0, 1] and keeps its width where p is near 1. It tells where
    the accuracy of this model on unlimited data of the same kind may lie. On another test set of
    this size it varies more, by about a factor of 1.4; another training run changes it too.

    Example:
        >>> low, high = wilson(9, 10)
        >>> round(low, 3), round(high, 3)
        (0.596, 0.982)
    """
    check_count("samples", samples, at_least=1)
    check_count("right", right, at_least=0, at_most=samples)
    check_number("confidence", confidence, above=0, below=1)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / samples, z * z / samples
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / samples + spread / (4 * samples))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # At 0 and 1 the formula gives them up to rounding.
    return max(low, 0.0) if right else 0.0, min(high, 1.0) if right < samples else 1.0


def paired_interval(
    both: int, first: int, second: int, neither: int, *, confidence: float = 0.95
) -> tuple[float, float]:
    r"""Interval of the difference of two shares of the same samples (Newcombe 1998, method 10).

    From Wilson's intervals of both shares, squared and added, less what they have in common:
    with :math:`l_i, u_i` the distances from share i to its limits,

    .. math:: p_1 - p_2 - \sqrt{l_1^2 - 2\phi l_1 u_2 + u_2^2}\quad\text{to}\quad
              p_1 - p_2 + \sqrt{u_1^2 - 2\phi u_1 l_2 + l_2^2}

    where :math:`\phi` is the correlation of the two, with a continuity correction where it is
    positive. Two models are mostly right about the same images, so it is much narrower than one
    that takes the images as drawn for each. R. G. Newcombe, "Improved confidence intervals for the
    difference between binomial proportions based on paired data", Statistics in Medicine 17 (1998).

    Args:
        both: samples that both are right about.
        first: that the first alone is right about.
        second: that the second alone is right about.
        neither: that neither is right about.
        confidence: of the interval.

    Example:
        >>> low, high = paired_interval(36, 12, 2, 0)
        >>> round(low, 4), round(high, 4)
        (0.0569, 0.3404)
    """
    counts = {"both": both, "first": first, "second": second, "neither": neither}
    for name, count in counts.items():
        check_count(name, count, at_least=0)
    # Numbers of Python: a product of four may be too large for those of NumPy.
    both, first, second, neither = (int(count) for count in counts.values())
    samples = both + first + second + neither
    check_count("the number of samples", samples, at_least=1)
    shares = (both + first) / samples, (both + second) / samples
    (low, high), (other_low, other_high) = (
        wilson(both + each, samples, confidence=confidence) for each in (first, second)
    )
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    common = float(both * neither - first * second)
    if common > 0:
        common = max(common - samples / 2, 0.0)
    phi = common / math.sqrt(product) if product else 0.0
    difference = (first - second) / samples
    down = _joined(shares[0] - low, other_high - shares[1], phi)
    up = _joined(high - shares[0], shares[1] - other_low, phi)
    return difference - down, difference + up


def _joined(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))
