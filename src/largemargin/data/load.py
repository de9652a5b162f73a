"""From settings to images: read, check, modify, record."""

import difflib
import hashlib
import warnings
from typing import Any, get_args, get_type_hints

import torch

from largemargin.data.augment import Augment
from largemargin.data.config import DataConfig
from largemargin.data.data import Data
from largemargin.data.duplicates import contradicted, shared
from largemargin.data.modify import modified
from largemargin.data.reading import SMALL, in_memory, let_go, readable, wholly_readable
from largemargin.data.resize import resized
from largemargin.data.samples import Samples
from largemargin.data.sources import SOURCES, Source
from largemargin.data.statistics import normalization
from largemargin.errors import LargeMarginError, check_choice, check_number

CROPPED = ("cifar10", "cifar100", "svhn", "market1501", "dukemtmc")
"""Data sets that are usually trained on random crops and mirror images."""


def load_data(config: DataConfig) -> Data:
    """The data set that ``config`` describes.

    Images are read and checked, then changed in this order: classes, validation part, fraction,
    imbalance, label noise.

    Example:
        >>> data = load_data(DataConfig("digits"))
        >>> len(data.train), len(data.validation), len(data.test), data.size
        (1131, 126, 540, (8, 8))
    """
    check(config)
    source, skipped = readable(SOURCES[config.name](config), config)
    # Crops of another size are cut from whole pictures, which memory does not hold.
    keep = ("train",) if augment_of(source, config).kind == "resized_crop" else ()
    source = wholly_readable(source, config, keep, skipped)
    others = [name for name in source.splits if name != "train"]
    same = duplicates(source, config, others) | contradictions(source, config)
    source = in_memory(source, config, keep, skipped)
    source, modifiers = modified(source, config)
    # Of two copies of an image, one may have been held out.
    same |= duplicates(source, config, [name for name in ("validation",) if name not in others])
    # What was too large as a whole may fit now.
    source = let_go(in_memory(source, config, keep, skipped))
    skipped.warn()
    if not source.from_files:  # files are decoded to their size
        source = source.with_splits(
            {name: resized(samples, config) for name, samples in source.splits.items()}
        )
    check_one_shape(source)
    channels, size = shape_of(source.train)
    mean, std = normalization(source, config, channels)
    augment = augment_of(source, config)
    made = {"modifiers": modifiers, "skipped": skipped.files, "duplicates": same}
    looks = {"channels": channels, "size": list(size), "mean": list(mean), "std": list(std)}
    return Data(
        name=config.name,
        classes=source.classes,
        channels=channels,
        size=size,
        mean=mean,
        std=std,
        licence=source.licence,
        train=source.train,
        validation=source.splits.get("validation"),
        test=source.splits.get("test"),
        query=source.splits.get("query"),
        gallery=source.splits.get("gallery"),
        augment=augment,
        record={**record_of(source, config), **looks, "augment": augment.kind, **made},
    )


def check(config: DataConfig) -> None:
    """Names and numbers that are wrong whatever the data is."""
    if config.name not in SOURCES:
        close = difflib.get_close_matches(str(config.name), SOURCES, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise LargeMarginError(
            f"there is no data called {config.name!r}, but {', '.join(SOURCES)}.{hint}"
        )
    if config.name == "digits" and config.path is not None:
        raise LargeMarginError(
            f"data.path is {config.path!r}, but data.name is digits, its default, whose images "
            f"come with scikit-learn and have no path. Say what lies there: --data {config.path} "
            "for a folder or a file of your own, or data.name cifar10, mnist, ..."
        )
    hints = get_type_hints(DataConfig)
    for name in ("imbalance", "augment", "normalize", "corrupt", "resident"):
        check_choice(name, getattr(config, name), get_args(hints[name]))
    if config.size is not None:
        check_number("size", config.size, at_least=1)
    if config.width is not None:
        check_number("width", config.width, at_least=1)
        if config.size is None:
            raise LargeMarginError("width goes with size, the height of the images; set both.")
    check_number("workers", config.workers, at_least=0)


def augment_of(source: Source, config: DataConfig) -> Augment:
    """The augmentation asked for; ``auto`` mirrors nothing that might be digits or letters."""
    if config.augment != "auto":
        return Augment(config.augment)
    if config.name in CROPPED:
        return Augment("crop_flip")
    if config.name == "rscd":
        return Augment("perspective_flip")
    if config.name == "fashion_mnist":
        return Augment("flip")
    large = source.from_files and max(shape_of(source.train)[1]) > SMALL
    return Augment("resized_crop" if large else "none")


def shape_of(samples: Samples) -> tuple[int, tuple[int, int]]:
    """Channels and (H, W)."""
    if samples.pixels is None:
        assert samples.files is not None
        return 3, samples.files.size
    return samples.pixels.shape[1], (samples.pixels.shape[2], samples.pixels.shape[3])


def check_one_shape(source: Source) -> None:
    """Found out here, not by the first batch of a test after hours of training."""
    shapes = {name: shape_of(samples) for name, samples in source.splits.items()}
    for name, shape in shapes.items():
        if shape != shapes["train"]:
            raise LargeMarginError(
                f"the {name} images have {in_pixels(shape)}, but the training images have "
                f"{in_pixels(shapes['train'])}. Store all of them with the same channels, and at "
                "one size or with size set."
            )


def in_pixels(shape: tuple[int, tuple[int, int]]) -> str:
    channels, (height, width) = shape
    return f"{channels} channel{'s' * (channels > 1)} of {height} x {width} pixels"


def duplicates(source: Source, config: DataConfig, others: list[str]) -> dict[str, Any]:
    """Training images that are images of these parts too; only of data of people's own."""
    if not of_their_own(source, config):
        return {}
    parts = {name: source.splits[name] for name in others if name in source.splits}
    found = {f"train and {name}": shared(source.train, each) for name, each in parts.items()}
    same = {name: each for name, each in found.items() if each.get("count")}
    if same:
        counts = ", ".join(
            f"{each['count']} in {name} (such as {each['pairs'][0][1]})"
            for name, each in same.items()
        )
        warnings.warn(
            f"some images are in two parts of the data, byte for byte: {counts}. Results on them "
            "say nothing about new images.",
            stacklevel=3,
        )
    return found


def contradictions(source: Source, config: DataConfig) -> dict[str, Any]:
    """Training images that are there under two labels, before any are replaced on purpose."""
    if not of_their_own(source, config):
        return {}
    found = contradicted(source.train)
    if found.get("count"):
        pairs = "; ".join(f"{a} and {b}" for a, b in found["pairs"][:2])
        warnings.warn(
            f"the same training image has two labels, byte for byte, {found['count']} times: "
            f"{pairs}. No classifier is right about both; remove the wrong ones.",
            stacklevel=3,
        )
    return {"train under two labels": found}


def of_their_own(source: Source, config: DataConfig) -> bool:
    """Data of people's own, not a known set."""
    return source.from_files or config.name == "arrays"


def record_of(source: Source, config: DataConfig) -> dict[str, Any]:
    """Where the data comes from and how much of it there is."""
    splits = source.splits
    return {
        "source": config.name,
        "path": config.path,
        "licence": source.licence,
        "classes": list(source.classes),
        "images": {name: len(samples) for name, samples in splits.items()},
        "counts": {
            name: counts(splits[name], source.classes)
            for name in ("train", "validation", "test")
            if name in splits
        },
        "digests": {name: digest(samples) for name, samples in splits.items()},
        "in_memory": {name: samples.pixels is not None for name, samples in splits.items()},
        **source.record,
    }


def counts(samples: Samples, classes: tuple[str, ...]) -> dict[str, int]:
    """Images of every class."""
    sizes = torch.bincount(samples.labels, minlength=len(classes)).tolist()
    return dict(zip(classes, sizes, strict=True))


def in_words(data: Data, split: str, samples: Samples) -> str:
    """Which images these are, for results that outlive the run."""
    return f"{data.name}, {split} images, digest {digest(samples)[:12]}"


def digest(samples: Samples) -> str:
    """Of names and labels: equal where two runs saw the same images with the same labels."""
    found = hashlib.sha256("\n".join(samples.ids).encode())
    found.update(samples.labels.numpy().tobytes())
    return found.hexdigest()
