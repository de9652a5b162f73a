"""What a source of images gives: splits as they are stored, before any modifier."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from largemargin.app.data.image_files import ImageFiles
from largemargin.app.data.samples import Samples
from largemargin.errors import LargeMarginError

UNKNOWN_LICENCE = "not known to largemargin"


@dataclass(frozen=True, eq=False)
class Source:
    """Splits of a data set as they are stored.

    Args:
        classes: names in the order of the labels.
        splits: train and, where the data has them, validation, test, query and gallery.
        licence: terms of use.
        statistics: (mean, std) per channel of [0, 1] training pixels, where published.
        size: (H, W) for image files where the data set has a usual one.
        from_files: the images are files of people's own making, of many sizes, in colour.
        record: what else is worth knowing: files, counts of what was ignored.
    """

    classes: tuple[str, ...]
    splits: dict[str, Samples]
    licence: str = UNKNOWN_LICENCE
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    size: tuple[int, int] | None = None
    from_files: bool = False
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def train(self) -> Samples:
        return self.splits["train"]

    def with_splits(self, splits: dict[str, Samples]) -> "Source":
        """With these splits in place of those of the same names."""
        return replace(self, splits={**self.splits, **splits})


def in_memory(split: str, pixels: Tensor, labels: Tensor) -> Samples:
    """Samples called "train/0", "train/1" and so on."""
    ids = tuple(f"{split}/{i}" for i in range(len(labels)))
    return Samples(labels.long(), ids, pixels)


def in_files(
    paths: list[str], ids: list[str], labels: list[int], *, stretch: bool = False
) -> Samples:
    files = ImageFiles(paths, range(len(paths)), stretch=stretch)
    return Samples(torch.tensor(labels, dtype=torch.long), tuple(ids), files=files)


def class_indices(split: str, names: list[str], classes: tuple[str, ...]) -> list[int]:
    """Labels given as names, as indices of ``classes``."""
    index = {name: i for i, name in enumerate(classes)}
    strange = sorted(set(names) - index.keys())
    if strange:
        raise LargeMarginError(
            f"the {split} images have classes that no training image has: "
            f"{listed(strange)}. The training images have {listed(classes)}."
        )
    return [index[name] for name in names]


def ordered(labels: set[str]) -> tuple[str, ...]:
    """Whole numbers by value, so that 10 comes after 9; everything else by alphabet.

    Numbers of one value (1 and 01) by alphabet: a set has another order in every process.
    """
    numbers = all(label.removeprefix("-").isdecimal() for label in labels)
    names = sorted(labels)
    return tuple(sorted(names, key=int) if numbers else names)


def listed(names: tuple[str, ...] | list[str], at_most: int = 8) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
