"""Image files checked, sized and, where they fit, decoded into memory.

Headers of all files are looked at. Files that fit into memory are then decoded once; larger sets
are decoded batch by batch, and fully checked beforehand only under ``corrupt: skip``, because an
image can be left out only before the batches are planned. An unreadable image is never silent: it
is an error that names it, or it is counted, named in the record and warned of.
"""

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.image_files import (
    UnreadableImage,
    bombs_are_errors,
    lies_on_its_side,
    open_image,
    read_pixels,
    read_rgb,
)
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source
from largemargin.errors import LargeMarginError

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


@dataclass
class Skipped:
    """Images left out, as the record has them."""

    files: list[dict[str, str]] = field(default_factory=list)

    def warn(self) -> None:
        if self.files:
            warnings.warn(
                f"{len(self.files)} unreadable images are left out: {failures_text(self.files)}.",
                stacklevel=3,
            )


def readable(source: Source, config: DataConfig) -> tuple[Source, Skipped]:
    """The source with images of one size and without those whose headers cannot be read."""
    skipped = Skipped()
    splits = {name: each for name, each in source.splits.items() if each.files is not None}
    sizes: set[tuple[int, int]] = set()
    for name, samples in splits.items():
        found, failures = each_file(samples, header)
        splits[name] = without_failures(samples, failures, name, config, skipped)
        sizes.update(found.values())
    size = decoded_size(source, config, sizes)
    for name, samples in splits.items():
        assert samples.files is not None
        splits[name] = replace(samples, files=replace(samples.files, size=size))
    return source.with_splits(splits), skipped


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
        name: without_failures(each, each_file(each, decoded)[1], name, config, skipped)
        for name, each in source.splits.items()
        if each.files is not None and name not in checked_later
    }
    return source.with_splits(splits)


def in_memory(
    source: Source, config: DataConfig, keep: tuple[str, ...], skipped: Skipped
) -> Source:
    """The source with its images decoded, beside their files, where asked for and they fit.

    Args:
        source: after :func:`wholly_readable`.
        config: says whether.
        keep: splits that stay in files unless ``resident`` is yes.
        skipped: takes the images left out.
    """
    splits = to_decode(source, config, keep)
    if not fits(splits, config):
        return source
    for name, samples in splits.items():
        assert samples.files is not None
        pixels = torch.empty((len(samples), 3, *samples.files.size), dtype=torch.uint8)
        _, failures = each_file(samples, decode_into(pixels))
        # Without failures nothing is left out, and the pixels need not be copied.
        held = replace(samples, pixels=pixels)
        splits[name] = without_failures(held, failures, name, config, skipped) if failures else held
    return source.with_splits(splits)


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


Look = Callable[[Samples, int], Any]


def header(samples: Samples, index: int) -> tuple[int, int]:
    """(H, W) of an image, from the first bytes of its file.

    Upright where it may decide on the size of all; of large ones only whether it can be had counts.
    """
    assert samples.files is not None
    with open_image(samples.files.source(index)) as image:
        turned = max(image.size) <= SMALL and lies_on_its_side(image)
        return (image.width, image.height) if turned else (image.height, image.width)


def decoded(samples: Samples, index: int) -> None:
    """Decode an image only to see whether that is possible: JPEG files at an eighth."""
    assert samples.files is not None
    read_rgb(samples.files.source(index), (1, 1))


def decode_into(pixels: torch.Tensor) -> Look:
    """Decode every image to its place in ``pixels``."""

    def look(samples: Samples, index: int) -> None:
        files = samples.files
        assert files is not None
        pixels[index] = read_pixels(files.source(index), files.size, files.stretch)

    return look


def each_file(samples: Samples, look: Look) -> tuple[dict[int, Any], dict[int, str]]:
    """What ``look`` finds at every index, and why it failed where it did."""

    def part(first: int) -> list[tuple[int, Any, str | None]]:
        found: list[tuple[int, Any, str | None]] = []
        for index in range(first, min(first + AT_ONCE, len(samples))):
            try:
                found.append((index, look(samples, index), None))
            except UnreadableImage as error:
                found.append((index, None, str(error)))
        return found

    threads = min(8, os.cpu_count() or 1)
    with bombs_are_errors(), ThreadPoolExecutor(threads) as pool:
        rows = [row for rows in pool.map(part, range(0, len(samples), AT_ONCE)) for row in rows]
    return (
        {index: found for index, found, why in rows if why is None},
        {index: why for index, _, why in rows if why is not None},
    )


def without_failures(
    samples: Samples, failures: dict[int, str], split: str, config: DataConfig, skipped: Skipped
) -> Samples:
    """The samples that can be read; an error where ``corrupt`` says so."""
    if not failures:
        return samples
    files = [
        {"file": samples.ids[index], "split": split, "reason": why}
        for index, why in sorted(failures.items())
    ]
    if config.corrupt == "error":
        raise LargeMarginError(
            f"{len(files)} of {len(samples)} {split} images cannot be read: "
            f"{failures_text(files)}. Repair or remove them, or set corrupt: skip to leave them "
            "out."
        )
    skipped.files.extend(files)
    return samples.subset([index for index in range(len(samples)) if index not in failures])


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
