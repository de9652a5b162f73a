"""A data set ready for training: splits, classes, normalisation, augmentation, provenance."""

from dataclasses import dataclass, field
from typing import Any

from largemargin.data.augment import Augment
from largemargin.data.samples import Samples


@dataclass(frozen=True, eq=False)
class Data:
    """What :func:`load_data` returns.

    Args:
        name: of the source, as in :class:`DataConfig`.
        classes: names in the order of the labels.
        channels: 1 or 3.
        size: (H, W) of the images.
        mean: per channel, of [0, 1] pixels; what the model's first layer subtracts.
        std: per channel; what it divides by.
        licence: terms under which the images may be used, as far as they are known.
        train: training images, after all modifiers.
        validation: images held out from training; None where there are none.
        test: images for the final result; None where the data has none.
        augment: what training does to the images.
        record: where the data comes from and what was done to it, ready for JSON.
        query: queries of re-identification data; labels are identities.
        gallery: what they are searched in; identity -1 is junk, 0 a distractor.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    train: Samples
    validation: Samples | None
    test: Samples | None
    augment: Augment
    record: dict[str, Any] = field(repr=False)
    query: Samples | None = None
    gallery: Samples | None = None
