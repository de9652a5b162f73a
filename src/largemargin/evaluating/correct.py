"""Which images of a split a model is right about: a bit each, kept with the result."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.data.load import digest
from largemargin.data.samples import Samples
from largemargin.errors import LargeMarginError
from largemargin.evaluating.pieces import Piece, Source, need_labels
from largemargin.measuring.batches import IGNORED
from largemargin.measuring.records import Record

MOST = 1_000_000
"""Images up to which the bits are kept: 170 kB of text."""

Seen = list[tuple[Tensor, Tensor]]
"""Positions and whether the model is right there, batch by batch."""


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) bool: whether the largest logit is that of the label; never where a logit is NaN."""
    return (logits.argmax(1) == labels) & ~logits.isnan().any(1)


@dataclass(frozen=True)
class Correct(Record):
    """Which images of a split a model is right about, so that two models can be told apart on the
    same ones."""

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
        packed = (bits.view(-1, 8) * _places()).sum(1, dtype=torch.uint8)
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
        found: Tensor = (each & _places()).ne(0).flatten()[: self.samples]
        return found


def _places() -> Tensor:
    """Of the bits in a byte, highest first."""
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)


class Rights:
    """Collects them in a pass over a split; of other data nothing is kept."""

    def __init__(self, data: Source) -> None:
        self.samples: Samples | None = None
        if isinstance(data, Samples) and 0 < len(data) <= MOST:
            self.samples = None if bool((data.labels == IGNORED).any()) else data
        self.seen: Seen = []

    def add(self, piece: Piece, logits: Tensor) -> None:
        if self.samples is not None:
            self.seen.append((piece.positions, is_right(logits, need_labels(piece))))

    def found(self) -> Seen:
        """What this process has, on the CPU."""
        return [(positions, right.cpu()) for positions, right in self.seen]

    def result(self, parts: Sequence[Seen]) -> Correct | None:
        """Of all processes together."""
        if self.samples is None:
            return None
        right = torch.zeros(len(self.samples), dtype=torch.bool)
        for positions, own in (each for part in parts for each in part):
            right[positions] = own
        return Correct.of(right, digest(self.samples))


def crossed(one: Correct, other: Correct) -> tuple[int, int, int, int] | None:
    """Images that both are right about, the first alone, the second alone, and neither.

    None where they are of different images.
    """
    if (one.digest, one.samples) != (other.digest, other.samples):
        return None
    a, b = one.right(), other.right()
    counts = (a & b, a & ~b, ~a & b, ~a & ~b)
    both, first, second, neither = (int(each.sum()) for each in counts)
    return both, first, second, neither
