"""From settings to images: ``load_data`` reads, checks, modifies and records a data set.

Headers of all image files are looked at. Files that fit into memory are then decoded once; larger
sets are decoded batch by batch, and fully checked beforehand only under ``corrupt: skip``, because
an image can be left out only before the batches are planned. An unreadable image is never silent:
it is an error that names it, or it is counted, named in the record and warned of.

Below that: images that the data holds twice, byte for byte (in two parts of it, or under two
labels), mean and standard deviation of the pixels, and images in memory brought to another size.
"""

import difflib
import hashlib
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.app.config import DataConfig
from largemargin.app.data.augment import Augment
from largemargin.app.data.image_files import (
    ImageFiles,
    UnreadableImage,
    bombs_are_errors,
    lies_on_its_side,
    open_image,
    read_pixels,
    read_rgb,
)
from largemargin.app.data.modify import modified
from largemargin.app.data.samples import Samples, as_float
from largemargin.app.data.sources import SOURCES
from largemargin.app.data.sources.source import Source
from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.batches import digest
from largemargin.measuring.sample_draws import generator_for

CROPPED = ("cifar10", "cifar100", "svhn", "market1501", "dukemtmc")
"""Data sets that are usually trained on random crops and mirror images."""

NAMED_PAIRS = 20
"""Pairs that the record names."""
MOST_COMPARED = 200_000
"""Images up to which duplicates are looked for: beyond, reading them takes minutes."""

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Of ImageNet's training images, as every pretrained model of torchvision takes them."""
GREY_IMAGENET: Statistics = ((0.449,), (0.226,))
"""Means over the three channels, for images with one."""
MOST_FILES = 2000
"""Image files that are read to compute statistics; images in memory are all used."""
IN_MEMORY = 2 * 2**30
"""Bytes up to which ``resident: auto`` keeps images in memory."""
USUAL_SIZE = (224, 224)
"""(H, W) of image files, that of ImageNet's models."""
SMALL = 64
"""Image files that all have one size of at most this side keep it."""
AT_ONCE = 256
"""Files that a thread takes at a time."""
NAMED = 10
"""Files that a message names."""


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

    @property
    def about(self) -> str:
        """How many images of which size, and why of this one."""
        parts = ("", self.train), (" to validate", self.validation), (" to test", self.test)
        images = ", ".join(f"{len(each):,} images{what}" for what, each in parts if each)
        resized = self.record.get("resized")
        why = f" ({resized}; --data.size N for another)" if resized else ""
        height, width = self.size
        return f"{images}: {len(self.classes):,} classes, {height} x {width} pixels{why}"


def load_data(config: DataConfig) -> Data:
    """The data set that ``config`` describes.

    Images are read and checked, then changed in this order: classes, test and validation part,
    fraction, imbalance, label noise.

    Example:
        >>> data = load_data(DataConfig("digits"))
        >>> len(data.train), len(data.validation), len(data.test), data.size
        (1131, 126, 540, (8, 8))
    """
    check_data_config(config)
    source, skipped = readable(SOURCES[config.name](config), config)
    # Crops of another size are cut from whole pictures, which memory does not hold.
    keep = ("train",) if augment_of(source, config).kind == "resized_crop" else ()
    source = wholly_readable(source, config, keep, skipped)
    others = [name for name in source.splits if name != "train"]
    own = source.from_files or config.name == "arrays"  # data of people's own, not a known set
    same = duplicates(source, others) | contradictions(source) if own else {}
    source = in_memory(source, config, keep, skipped)
    source, modifiers = modified(source, config)
    # Of two copies of an image, one may have been held out.
    held_out = [name for name in ("validation", "test") if name not in others]
    same |= duplicates(source, held_out) if own else {}
    contents = {name: contents_of(each) for name, each in source.splits.items()}
    # What was too large as a whole may fit now.
    source = without_files(in_memory(source, config, keep, skipped))
    if skipped:
        why = failures_text(skipped)
        warnings.warn(f"{len(skipped)} unreadable images are left out: {why}.", stacklevel=2)
    if not source.from_files:  # files are decoded to their size
        source = source.with_splits(
            {name: resized(samples, config) for name, samples in source.splits.items()}
        )
    for name in source.classes:
        check_text("the name of a class", name)
    check_one_shape(source)
    channels, size = shape_of(source.train)
    mean, std = normalization(source, config, channels)
    augment = augment_of(source, config)
    made = {"modifiers": modifiers, "skipped": skipped, "duplicates": same, "contents": contents}
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


def check_text(place: str, text: str) -> None:
    """Refuse what no file can hold: halves of characters, and the null byte."""
    if not re.fullmatch("[^\0\ud800-\udfff]*", text):
        raise LargeMarginError(
            f"{place} must be text, but {text!r} holds characters that are none. If it is the name "
            "of a file or folder, give it one in UTF-8."
        )


def check_data_config(config: DataConfig) -> None:
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
    large = source.from_files and max(shape_of(source.train)[1]) > SMALL
    usual = {"rscd": "perspective_flip", "fashion_mnist": "flip"}
    usual |= dict.fromkeys(CROPPED, "crop_flip")
    return Augment(usual.get(config.name, "resized_crop" if large else "none"))


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
                f"the {name} images have {shape_text(shape)}, but the training images have "
                f"{shape_text(shapes['train'])}. Store all of them with the same channels, and at "
                "one size or with size set."
            )


def shape_text(shape: tuple[int, tuple[int, int]]) -> str:
    channels, (height, width) = shape
    return f"{channels} channel{'s' * (channels > 1)} of {height} x {width} pixels"


def record_of(source: Source, config: DataConfig) -> dict[str, Any]:
    """Where the data comes from and how much of it there is."""
    splits, classes = source.splits, source.classes
    sizes = {
        name: torch.bincount(splits[name].labels, minlength=len(classes)).tolist()
        for name in ("train", "validation", "test")
        if name in splits
    }
    return {
        "source": config.name,
        "path": config.path,
        "licence": source.licence,
        "classes": list(classes),
        "images": {name: len(samples) for name, samples in splits.items()},
        "counts": {name: dict(zip(classes, each, strict=True)) for name, each in sizes.items()},
        "digests": {name: digest(samples) for name, samples in splits.items()},
        "in_memory": {name: samples.pixels is not None for name, samples in splits.items()},
        **source.record,
    }


def samples_text(data: Data, split: str, samples: Samples) -> str:
    """Which images these are, for results that outlive the run."""
    return f"{data.name}, {split} images, digest {digest(samples)[:12]}"


Skipped = list[dict[str, str]]
"""Images left out, as the record has them."""


def readable(source: Source, config: DataConfig) -> tuple[Source, Skipped]:
    """The source with images of one size and without those whose headers cannot be read."""
    skipped: Skipped = []
    splits = {name: each for name, each in source.splits.items() if each.files is not None}
    sizes: Counter[tuple[int, int]] = Counter()
    for name, samples in splits.items():
        found, failures = each_file(samples, header)
        splits[name] = without_failures(source, name, failures, config, skipped)
        sizes.update(found.values())
    size = decoded_size(source, config, set(sizes))
    for name, samples in splits.items():
        assert samples.files is not None
        splits[name] = replace(samples, files=replace(samples.files, size=size))
    if config.size is None and sizes.keys() - {size}:
        source.record["resized"] = resizing(sizes, size)
    return source.with_splits(splits), skipped


def resizing(sizes: "Counter[tuple[int, int]]", size: tuple[int, int]) -> str:
    """Why files are brought to a size that nobody asked for."""
    shown = ", ".join(f"{count:,} of {h} x {w}" for (h, w), count in sizes.most_common(3))
    more = f" and {len(sizes) - 3:,} other sizes" if len(sizes) > 3 else ""
    return f"files of different or large sizes ({shown}{more}) become {size[0]} x {size[1]}"


def wholly_readable(
    source: Source, config: DataConfig, keep: tuple[str, ...], skipped: Skipped
) -> Source:
    """Under ``corrupt: skip``, the source without images whose pixels cannot be decoded.

    Splits that :func:`in_memory` decodes are checked there. Arguments are the same.
    """
    if config.corrupt != "skip":
        return source
    now = to_decode(source, config, keep)
    checked_later = now if fits(now, config) else {}
    splits = {
        name: without_failures(source, name, each_file(each, decoded)[1], config, skipped)
        for name, each in source.splits.items()
        if each.files is not None and name not in checked_later
    }
    return source.with_splits(splits)


def in_memory(
    source: Source, config: DataConfig, keep: tuple[str, ...], skipped: Skipped
) -> Source:
    """The source with its images decoded, beside their files, where asked for and they fit.

    Splits to ``keep`` stay in files unless ``resident`` is yes; ``skipped`` takes what is left out.
    """
    splits = to_decode(source, config, keep)
    if not fits(splits, config):
        return source
    for name, samples in splits.items():
        assert samples.files is not None
        pixels = torch.empty((len(samples), 3, *samples.files.size), dtype=torch.uint8)
        _, failures = each_file(samples, partial(decode_into, pixels))
        # Without failures nothing is left out, and the pixels need not be copied.
        source = source.with_splits({name: replace(samples, pixels=pixels)})
        if failures:
            kept = without_failures(source, name, failures, config, skipped)
            source = source.with_splits({name: kept})
    return source


def without_files(source: Source) -> Source:
    """The source without the files of images in memory."""
    held = {name: each for name, each in source.splits.items() if each.pixels is not None}
    return source.with_splits({name: replace(each, files=None) for name, each in held.items()})


def to_decode(source: Source, config: DataConfig, keep: tuple[str, ...]) -> dict[str, Samples]:
    """The splits in files alone that are decoded where they fit."""
    return {
        name: each
        for name, each in source.splits.items()
        if each.pixels is None and (name not in keep or config.resident == "yes")
    }


def fits(splits: dict[str, Samples], config: DataConfig) -> bool:
    files = [each.files for each in splits.values() if each.files is not None]
    total = sum(3 * len(each) * each.size[0] * each.size[1] for each in files)
    return config.resident == "yes" or (config.resident == "auto" and total <= IN_MEMORY)


Look = Callable[[ImageFiles, int], Any]


def header(files: ImageFiles, index: int) -> tuple[int, int]:
    """(H, W) of an image, from the first bytes of its file.

    Upright where it may decide on the size of all; of large ones only whether it can be had counts.
    """
    with open_image(files.source(index)) as image:
        turned = max(image.size) <= SMALL and lies_on_its_side(image)
        return (image.width, image.height) if turned else (image.height, image.width)


def decoded(files: ImageFiles, index: int) -> None:
    """Decode an image only to see whether that is possible: JPEG files at an eighth."""
    read_rgb(files.source(index), (1, 1))


def decode_into(pixels: torch.Tensor, files: ImageFiles, index: int) -> None:
    """Decode an image to its place in ``pixels``."""
    pixels[index] = read_pixels(files.source(index), files.size, files.stretch)


def each_file(samples: Samples, look: Look) -> tuple[dict[int, Any], dict[int, str]]:
    """What ``look`` finds at every index, and why it failed where it did."""
    files = samples.files
    assert files is not None

    def part(first: int) -> list[tuple[int, Any, str | None]]:
        found: list[tuple[int, Any, str | None]] = []
        for index in range(first, min(first + AT_ONCE, len(files))):
            try:
                found.append((index, look(files, index), None))
            except UnreadableImage as error:
                found.append((index, None, str(error)))
        return found

    threads = min(8, os.cpu_count() or 1)
    with bombs_are_errors(), ThreadPoolExecutor(threads) as pool:
        rows = [row for rows in pool.map(part, range(0, len(files), AT_ONCE)) for row in rows]
    return (
        {index: found for index, found, why in rows if why is None},
        {index: why for index, _, why in rows if why is not None},
    )


def without_failures(
    source: Source, split: str, failures: dict[int, str], config: DataConfig, skipped: Skipped
) -> Samples:
    """The samples of a split that can be read; an error where ``corrupt`` says so.

    The error names those of all splits, also those that a look at their header does not tell.
    """
    samples = source.splits[split]
    if not failures:
        return samples
    if config.corrupt == "error":
        held = {name: each for name, each in source.splits.items() if each.files is not None}
        files = [
            each
            for name, part in held.items()
            for each in listed_failures(
                part, name, each_file(part, decoded)[1] | (failures if name == split else {})
            )
        ]
        raise LargeMarginError(
            f"{len(files)} of {sum(map(len, held.values()))} images cannot be read: "
            f"{failures_text(files)}. Repair or remove them, or leave them out: --data.corrupt "
            "skip (in Python and YAML corrupt: skip)."
        )
    skipped.extend(listed_failures(samples, split, failures))
    return samples.subset([index for index in range(len(samples)) if index not in failures])


def listed_failures(samples: Samples, split: str, failures: dict[int, str]) -> Skipped:
    return [
        {"file": samples.ids[index], "split": split, "reason": why}
        for index, why in sorted(failures.items())
    ]


def failures_text(files: list[dict[str, str]]) -> str:
    shown = "; ".join(f"{each['file']} ({each['reason']})" for each in files[:NAMED])
    return shown if len(files) <= NAMED else f"{shown}; and {len(files) - NAMED} more"


def decoded_size(
    source: Source, config: DataConfig, found: set[tuple[int, int]]
) -> tuple[int, int]:
    """(H, W) to decode to: what is asked for, usual for the data, or the images' own if small."""
    height, width = source.size or USUAL_SIZE
    if config.size is not None:
        return config.size, config.width or max(1, round(config.size * width / height))
    if source.size is None and len(found) == 1 and max(next(iter(found))) <= SMALL:
        return next(iter(found))
    return height, width


def duplicates(source: Source, others: list[str]) -> dict[str, Any]:
    """Training images that are images of these parts too."""
    parts = {name: source.splits[name] for name in others if name in source.splits}
    found = {f"train and {name}": shared_images(source.train, each) for name, each in parts.items()}
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


def contradictions(source: Source) -> dict[str, Any]:
    """Training images that are there under two labels, before any are replaced on purpose."""
    found = contradicting_labels(source.train)
    if found.get("count"):
        pairs = "; ".join(f"{a} and {b}" for a, b in found["pairs"][:2])
        warnings.warn(
            f"the same training image has two labels, byte for byte, {found['count']} times: "
            f"{pairs}. No classifier is right about both; remove the wrong ones.",
            stacklevel=3,
        )
    return {"train under two labels": found}


def shared_images(train: Samples, other: Samples) -> dict[str, Any]:
    """How many images of ``other`` are in ``train``, and the first pairs (train, other).

    Files of different lengths are different images, so most of them are never read.
    """
    if len(train) + len(other) > MOST_COMPARED:
        return {"looked_for": False, "reason": f"more than {MOST_COMPARED} images"}
    lengths, other_lengths = image_lengths(train), image_lengths(other)
    common = set(lengths) & set(other_lengths)
    known = {image_digest(train, i): i for i, each in enumerate(lengths) if each in common}
    wanted = [i for i, each in enumerate(other_lengths) if each in common]
    pairs = [(known[found], i) for i in wanted if (found := image_digest(other, i)) in known]
    named = [[train.ids[a], other.ids[b]] for a, b in pairs[:NAMED_PAIRS]]
    return {"looked_for": True, "count": len(pairs), "pairs": named}


def contradicting_labels(train: Samples) -> dict[str, Any]:
    """How many images have more than one label, and the first pairs that say so.

    Only files as long as one of another class are read.
    """
    if len(train) > MOST_COMPARED:
        return {"looked_for": False, "reason": f"more than {MOST_COMPARED} images"}
    lengths, labels = image_lengths(train), train.labels.tolist()
    seen: defaultdict[int, set[int]] = defaultdict(set)
    for each, label in zip(lengths, labels, strict=True):
        seen[each].add(label)
    first: dict[bytes, int] = {}
    pairs: dict[bytes, tuple[int, int]] = {}
    for i, each in enumerate(lengths):
        if len(seen[each]) > 1:
            same = image_digest(train, i)
            before = first.setdefault(same, i)
            if labels[before] != labels[i]:
                pairs.setdefault(same, (before, i))
    named = [[train.ids[a], train.ids[b]] for a, b in list(pairs.values())[:NAMED_PAIRS]]
    return {"looked_for": True, "count": len(pairs), "pairs": named}


def image_lengths(samples: Samples) -> list[int]:
    """Bytes of every stored image."""
    if samples.files is None:
        assert samples.pixels is not None
        return [samples.pixels[0].nbytes] * len(samples)
    sources = (samples.files.source(i) for i in range(len(samples)))
    return [os.stat(one).st_size if isinstance(one, str) else len(one or b"") for one in sources]


def contents_of(samples: Samples) -> str:
    """A digest of the stored images: the bytes of their files, or their pixels.

    Of images that are larger together than what is kept in memory it covers all lengths, and the
    contents of some that are spread over the split; of very many files those of some alone.
    """
    step, count = max(1, len(samples) // MOST_FILES), len(samples)
    if samples.files is not None and count > MOST_COMPARED:
        samples = samples.subset(range(0, count, step))
    lengths = image_lengths(samples)
    if sum(lengths) <= IN_MEMORY:
        step = 1
    whole = hashlib.blake2b(f"{count} {lengths}".encode(), digest_size=32)
    if samples.files is None:
        assert samples.pixels is not None
        for part in torch.split(samples.pixels[::step], AT_ONCE):
            whole.update(part.contiguous().numpy().data)
        return whole.hexdigest()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for each in pool.map(partial(image_digest, samples), range(0, len(samples), step)):
            whole.update(each)
    return whole.hexdigest()


def image_digest(samples: Samples, index: int) -> bytes:
    if samples.files is None:
        return hashlib.blake2b(samples.raw(index).numpy().tobytes()).digest()
    source = samples.files.source(index)
    content = Path(source).read_bytes() if isinstance(source, str) else source
    return hashlib.blake2b(content or b"").digest()


def normalization(source: Source, config: DataConfig, channels: int) -> Statistics:
    """Mean and standard deviation per channel, as ``config.normalize`` asks."""
    kind = config.normalize
    if kind == "auto":
        if source.statistics is not None:
            return source.statistics
        kind = "imagenet" if source.from_files else "computed"
    if kind == "none":
        return (0.0,) * channels, (1.0,) * channels
    if kind == "imagenet":
        return IMAGENET if channels == 3 else GREY_IMAGENET
    return pixel_statistics(source.train, config.seed)


def pixel_statistics(samples: Samples, seed: int = 0) -> Statistics:
    """Of all pixels in memory, or of up to ``MOST_FILES`` files drawn at random.

    Example:
        >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
        >>> pixel_statistics(Samples(torch.tensor([0, 1]), ("a", "b"), pixels))
        ((0.5,), (0.5,))
    """
    parts: Iterable[Tensor]
    if samples.pixels is not None:
        parts = torch.split(samples.pixels, 1024)
    else:
        order = torch.randperm(len(samples), generator=generator_for(seed, "statistics"))
        # One after the other: what is in files may not fit into memory.
        parts = (samples.raw(i)[None] for i in order[:MOST_FILES].tolist())
    total = torch.stack([pixel_moments(part) for part in parts]).sum(0)
    mean = total[1] / total[0]
    # A channel that is the same everywhere must not be divided by zero.
    std = (total[2] / total[0] - mean**2).clamp(min=0).sqrt()
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    return tuple(mean.tolist()), tuple(std.tolist())


def pixel_moments(part: Tensor) -> Tensor:
    """Number, sum and sum of squares of the pixels per channel, (3, C) float64."""
    whole = part.dtype == torch.uint8
    values = part.int() if whole else part.double()
    axes, top = (0, 2, 3), 255 if whole else 1
    # Sums of bytes are exact in whole numbers.
    exact = torch.int64 if whole else torch.float64
    first = values.sum(axes, dtype=exact).double() / top
    second = values.square().sum(axes, dtype=exact).double() / top**2
    return torch.stack([torch.full_like(first, part[:, 0].numel()), first, second])


def resized(samples: Samples, config: DataConfig) -> Samples:
    """The samples at ``config.size``; where that is not set, or theirs, as they are."""
    pixels, side = samples.pixels, config.size
    if pixels is None or side is None:
        return samples
    size = (side, config.width or side)
    if tuple(pixels.shape[2:]) == size:
        return samples
    needed = pixels[:, :, 0, 0].numel() * size[0] * size[1] * pixels.element_size()
    if needed > IN_MEMORY and config.resident != "yes":
        raise LargeMarginError(
            f"{len(pixels)} images of {size[0]} x {size[1]} pixels take {needed / 2**30:.1f} GiB "
            "in memory. Set resident: yes if there is room for them (on the training device too), "
            "or a smaller size or fraction."
        )
    return replace(samples, pixels=interpolated(pixels, size))


def interpolated(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, smoothed before it is made smaller; same dtype."""
    new = torch.empty((*pixels.shape[:2], *size), dtype=pixels.dtype)
    for first in range(0, len(pixels), 512):
        part = as_float(pixels[first : first + 512])
        part = F.interpolate(part, size, mode="bilinear", antialias=True)
        if pixels.dtype == torch.uint8:
            part = part.mul(255).round().clamp(0, 255)
        new[first : first + 512] = part.to(pixels.dtype)
    return new
