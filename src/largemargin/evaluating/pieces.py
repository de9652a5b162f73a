"""Data of any kind, piece by piece on the device, with the position of every sample."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from largemargin.data.batches import Batch, Batches
from largemargin.data.samples import Samples
from largemargin.errors import LargeMarginError, check_count, check_labels
from largemargin.measuring.batches import IGNORED, SKIP, batches, dataset_size, given_labels
from largemargin.measuring.reading import chosen
from largemargin.ops.distributed import world_size

RANGE = 1e-3
"""How far images may lie outside [0, 1]: resizing overshoots a little."""

Source: TypeAlias = Samples | Iterable[Any]
"""A split of a data set, or a loader: whatever :func:`largemargin.measure` takes."""


class Piece(NamedTuple):
    """A batch on the device."""

    inputs: Any
    """Images (B, C, H, W) in [0, 1]; a tuple or dict for models of several inputs."""
    labels: Tensor | None
    positions: Tensor
    """(B,) on the CPU: of the samples in the data set, or in the order of arrival."""


def pieces(
    source: Source,
    *,
    batch_size: int,
    device: torch.device,
    workers: int = 0,
    shared: bool = True,
) -> Iterator[Piece]:
    """The batches of this process; all processes together have every sample once.

    Args:
        source: a split is divided between processes; a loader gives each its own part already.
        batch_size: of a split; a loader has its own.
        device: where they go.
        workers: processes that read image files of a split.
        shared: False takes the whole split, for calls on one process of several.
    """
    _check_source(source)
    if isinstance(source, Samples):
        yield from _of_split(source, batch_size, device, workers, shared)
    elif isinstance(source, Batches):
        for batch in source.epoch(0):
            yield Piece(batch.images.to(device), batch.labels.to(device), batch.indices)
    else:
        yield from _of_loader(source, device)


def count_pieces(source: Source, batch_size: int, *, shared: bool = True) -> int | None:
    """How many pieces :func:`pieces` yields; None where there is no telling."""
    check_count("batch_size", batch_size, at_least=1)
    if isinstance(source, Samples):
        first, last = _share(len(source), shared)
        return -(-(last - first) // batch_size)
    return len(source) if isinstance(source, Sized) else None


def _check_source(source: Any) -> None:
    """Refuse no data, and one batch, which would be taken apart as if its rows were batches."""
    pair = isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Tensor)
    if isinstance(source, Tensor) or (pair and source[1].dim() == 1):
        raise LargeMarginError(
            "data must be a split, or a loader that yields batches, but one batch was given. Put "
            "it into a list: [(inputs, labels)]."
        )
    if source is None:
        raise LargeMarginError("data must be a split or a loader, but there is none: it is None.")


def count_samples(source: Source) -> float:
    """Samples of the data set, of all processes; infinite where there is no telling."""
    if isinstance(source, Samples):
        return len(source)
    return len(source.samples) if isinstance(source, Batches) else dataset_size(source)


def _share(count: int, shared: bool) -> tuple[int, int]:
    """The samples of this process, from the first to the one after the last."""
    world = world_size() if shared else 1
    if world == 1:
        return 0, count
    rank = dist.get_rank()
    return count * rank // world, count * (rank + 1) // world


def _of_split(
    samples: Samples, batch_size: int, device: torch.device, workers: int, shared: bool
) -> Iterator[Piece]:
    first, last = _share(len(samples), shared)
    if first == last:
        return
    mine = samples if last - first == len(samples) else samples.subset(range(first, last))
    read = Batches(mine, batch_size, device=device, shuffle=False, workers=workers)
    for batch in read.epoch(0):
        yield Piece(batch.images, batch.labels, batch.indices + first)


def _of_loader(loader: Iterable[Any], device: torch.device) -> Iterator[Piece]:
    # Numbers of other processes begin elsewhere, so that no two samples share random draws.
    start = dist.get_rank() << 40 if world_size() > 1 else 0
    plain = loader if hasattr(loader, "sampler") else (_pair(each) for each in loader)
    for inputs, labels, positions in batches(plain, device, False):
        size = _length(inputs) if labels is None else len(labels)
        if positions is None:
            yield Piece(inputs, labels, torch.arange(start, start + size))
            start += size
            continue
        kept = (positions >= 0).nonzero()[:, 0]
        here = kept.to(device)
        yield Piece(
            chosen(inputs, here, size), None if labels is None else labels[here], positions[kept]
        )


def _pair(batch: Any) -> Any:
    return (batch.images, batch.labels) if isinstance(batch, Batch) else batch


def _length(inputs: Any) -> int:
    if isinstance(inputs, dict):
        return _length(next(iter(inputs.values())))
    return _length(inputs[0]) if isinstance(inputs, tuple) else len(inputs)


def need_labels(piece: Piece) -> Tensor:
    return given_labels(piece.labels)


def known_rows(labels: Tensor, num_classes: int) -> Tensor:
    """Which of the labels are not -100, as a mask of their shape; the others must be classes."""
    known = labels != IGNORED
    used = labels[known]
    check_labels(used, len(used), num_classes, of="logits", soft=False, skip=SKIP, validate=True)
    return known


def need_images(piece: Piece, what: str) -> Tensor:
    """The images of a piece: (B, C, H, W), floating point."""
    images = piece.inputs
    if isinstance(images, Tensor) and images.dim() == 4 and images.is_floating_point():
        return images
    given = (
        f"a {images.dtype} tensor of shape {tuple(images.shape)}"
        if isinstance(images, Tensor)
        else f"a {type(images).__name__}"
    )
    raise LargeMarginError(
        f"{what} needs images of shape (N, C, H, W) with values in [0, 1], but the data yields "
        f"{given}."
    )


def check_range(images: Tensor) -> None:
    """Noise and attacks count in [0, 1]; bytes and normalised images have other units."""
    if not images.numel():
        return
    low, high = (float(each) for each in images.aminmax())
    if low < -RANGE or high > 1 + RANGE:
        raise LargeMarginError(
            "noise and attacks are given in units of [0, 1] pixels, but the images reach from "
            f"{low:.3g} to {high:.3g}. Normalise in the model, with largemargin.models.Normalize "
            "in front of it, and pass images in [0, 1]."
        )
