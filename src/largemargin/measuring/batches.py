"""Data of any kind, batch by batch on the model's device: splits and loaders.

:func:`source_batches` gives every sample of all processes once, with its position in the data.
:func:`loader_batches` gives what a loader yields, repeated samples included.
:func:`fail_together` gathers what the processes of a distributed run found; an error of one is an
error of all.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from largemargin.errors import LargeMarginError, MissingPackage, check_count, check_labels
from largemargin.ops.distributed import world_size

IGNORED = -100
"""The label of samples to leave out, as in torch."""

SKIP = f"label them {IGNORED}"
"""What to do about labels that mark samples to leave out."""

NOTHING = f"nothing was measured: the data is empty, or all of it is labelled {IGNORED}."

LABELS = ("labels", "label", "targets", "target")
"""Names under which labels are looked for in a batch that is a dict."""

RANGE = 1e-3
"""How far images may lie outside [0, 1]: resizing overshoots a little."""

T = TypeVar("T")


def fail_together(shared: bool, work: Callable[[], T]) -> list[T]:
    """What ``work`` returns on every process, in rank order; on this one alone unless ``shared``.

    Where it fails on one process it raises on all: they would wait for each other forever.
    """
    if not shared:
        return [work()]
    try:
        mine = work()
    except Exception as error:
        gather(None, error)
        raise
    return gather(mine)


def gather(mine: Any, failure: Exception | None = None) -> list[Any]:
    """What every process holds, in rank order; raises where another one has failed."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (None if failure is None else str(failure), mine))
    if failure is not None:
        return []
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            raise LargeMarginError(f"process {rank} could not measure its part: {problem}")
    return [each for _, each in everyone]


class ImageBatch(NamedTuple):
    """Images (B, C, H, W) float32 in [0, 1] and labels (B,) on the device; indices on the CPU."""

    images: Tensor
    labels: Tensor
    indices: Tensor


@runtime_checkable
class Split(Protocol):
    """One split of a data set, as :class:`largemargin.app.data.Samples`: it can be read again and
    in parts, and every image has a name."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def ids(self) -> Sequence[str]: ...

    @property
    def extra(self) -> dict[str, Tensor]:
        """Further numbers of every image: ``camera`` of re-identification data."""
        ...

    def __len__(self) -> int: ...

    def subset(self, indices: Sequence[int]) -> Self: ...

    def read(
        self, batch_size: int, *, device: torch.device | str = "cpu", workers: int = 0
    ) -> Iterator[ImageBatch]:
        """Its images in order, without augmentation."""
        ...


@runtime_checkable
class SplitBatches(Protocol):
    """Batches of a split by epoch, as :class:`largemargin.app.data.Batches`."""

    @property
    def samples(self) -> Split: ...

    def epoch(self, epoch: int) -> Iterator[ImageBatch]: ...


Source: TypeAlias = Split | Iterable[Any]
"""A split of a data set, or a loader: whatever :func:`largemargin.measure` takes."""


class DataBatch(NamedTuple):
    """A batch on the device."""

    inputs: Any
    """A tensor, a tuple (the model's arguments) or a dict (its keyword arguments)."""
    labels: Tensor | None
    indices: Tensor
    """(B,) on the CPU: positions of the samples in the data set, or in the order of arrival; -1
    for samples that a DistributedSampler repeats."""


def source_batches(
    source: Source, *, batch_size: int, device: torch.device, workers: int = 0, shared: bool = True
) -> Iterator[DataBatch]:
    """The batches of this process; all processes together have every sample once.

    Args:
        source: a split is divided between processes; a loader gives each its own part already.
        batch_size: of a split; a loader has its own.
        device: where they go.
        workers: processes that read image files of a split.
        shared: False takes the whole split, for calls on one process of several.
    """
    _check_source(source)
    if isinstance(source, Split):
        first, last = _share(len(source), shared)
        if first == last:
            return
        mine = source if last - first == len(source) else source.subset(range(first, last))
        for images, labels, indices in mine.read(batch_size, device=device, workers=workers):
            yield DataBatch(images, labels, indices + first)
    elif isinstance(source, SplitBatches):
        for images, labels, indices in source.epoch(0):
            yield DataBatch(images.to(device), labels.to(device), indices)
    else:
        yield from _without_repeats(source, device)


def count_batches(source: Source, batch_size: int, *, shared: bool = True) -> int | None:
    """How many batches :func:`source_batches` yields; None where there is no telling."""
    check_count("batch_size", batch_size, at_least=1)
    if isinstance(source, Split):
        first, last = _share(len(source), shared)
        return -(-(last - first) // batch_size)
    return len(source) if isinstance(source, Sized) else None


def count_samples(source: Source) -> float:
    """Samples of the data set, of all processes; infinite where there is no telling."""
    if isinstance(source, Split):
        return len(source)
    if isinstance(source, SplitBatches):
        return len(source.samples)
    dataset = getattr(source, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else math.inf


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


def _share(count: int, shared: bool) -> tuple[int, int]:
    """The samples of this process, from the first to the one after the last."""
    world = world_size() if shared else 1
    if world == 1:
        return 0, count
    rank = dist.get_rank()
    return count * rank // world, count * (rank + 1) // world


def _without_repeats(loader: Iterable[Any], device: torch.device) -> Iterator[DataBatch]:
    # Numbers of other processes begin elsewhere, so that no two samples share random draws.
    start = dist.get_rank() << 40 if world_size() > 1 else 0
    positioned = has_positions(loader)
    for inputs, labels, index in loader_batches(loader, device):
        if not positioned:
            yield DataBatch(inputs, labels, index + start)
            continue
        kept = (index >= 0).nonzero()[:, 0]
        here = kept.to(device)
        known = None if labels is None else labels[here]
        yield DataBatch(take_rows(inputs, here, len(index)), known, index[kept])


def loader_batches(
    loader: Iterable[Any], device: torch.device, *, progress: bool = False
) -> Iterator[DataBatch]:
    """What a loader yields, on the device."""
    positions = _positions(loader)
    total = len(loader) if progress and isinstance(loader, Sized) else None
    start = 0
    for given in with_bar(loader, "measuring", total, progress):
        inputs, labels = _parts(given)
        inputs = to_device(inputs, device)
        labels = None if labels is None else _as_labels(labels).to(device)
        end = start + (_length(inputs) if labels is None else len(labels))
        index = torch.arange(start, end) if positions is None else positions[start:end]
        start = end
        yield DataBatch(inputs, labels, index)


def has_positions(loader: Iterable[Any]) -> bool:
    """Whether the batches of a loader come with their positions in the data set."""
    return isinstance(getattr(loader, "sampler", None), DistributedSampler)


def _positions(loader: Iterable[Any]) -> Tensor | None:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return None
    index = torch.tensor(list(iter(sampler)), dtype=torch.long)
    size = len(sampler.dataset)  # type: ignore[arg-type]
    place = torch.arange(len(index)) * sampler.num_replicas + sampler.rank
    return torch.where(place < size, index, -1)


def order_notes(loader: Iterable[Any]) -> list[str]:
    """What sample indices mean where they are not positions in the dataset."""
    sampler, batched = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if sampler is None or isinstance(sampler, DistributedSampler):
        return []
    if isinstance(sampler, SequentialSampler) and type(batched) in (BatchSampler, type(None)):
        return []
    if type(sampler).__name__ == "_InfiniteConstantSampler":  # an iterable dataset
        return []
    return ["the loader draws samples in an order of its own: indices count them as they came"]


def _parts(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels of what a loader yields; None for no labels."""
    if isinstance(batch, ImageBatch):
        return batch.images, batch.labels
    if isinstance(batch, Mapping):
        name = next((each for each in LABELS if each in batch), None)
        return {key: each for key, each in batch.items() if key != name}, batch.get(name)
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) < 2:
        return (batch[0] if batch else batch), None
    if len(batch) > 2:
        return tuple(batch[:-1]), batch[-1]
    # default_collate makes lists of tuples.
    return tuple(batch[0]) if isinstance(batch[0], list) else batch[0], batch[1]


def _as_labels(given: Any) -> Tensor:
    try:
        labels = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise LargeMarginError(
            f"labels must be class indices, but the loader yields {type(given).__name__}"
            f"{f' of {type(given[0]).__name__}' if isinstance(given, tuple | list) else ''}. Yield "
            "(inputs, labels) with labels last."
        ) from None
    if labels.dim() == 0:
        raise LargeMarginError(
            "the loader must yield batches, but it yields single samples (the label is one "
            "number). Wrap the dataset: torch.utils.data.DataLoader(dataset, batch_size=256)."
        )
    if labels.dtype == torch.uint8:
        labels = labels.long()  # torch takes class 156 for -100 there
    one_column = labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point()
    return labels[:, 0] if one_column else labels


def _length(inputs: Any) -> int:
    """Samples of a batch without labels."""
    if isinstance(inputs, dict | tuple):
        return _length(next(iter(inputs.values() if isinstance(inputs, dict) else inputs)))
    scalar = isinstance(inputs, Tensor) and inputs.dim() == 0
    return len(inputs) if isinstance(inputs, Sized) and not scalar else 1


def change_tensors(inputs: Any, change: Callable[[Tensor], Any]) -> Any:
    """Inputs of a model with all their tensors changed."""
    if isinstance(inputs, Mapping):
        return {name: change_tensors(each, change) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(change_tensors(each, change) for each in inputs)
    return change(inputs) if isinstance(inputs, Tensor) else inputs


def to_device(inputs: Any, device: torch.device) -> Any:
    """Inputs of a model with all their tensors on a device."""
    return change_tensors(inputs, lambda each: each.to(device, non_blocking=True))


def take_rows(inputs: Any, rows: Tensor, count: int) -> Any:
    """Those rows of a batch of inputs."""
    if len(rows) == count:
        return inputs
    return change_tensors(
        inputs, lambda each: each[rows] if each.dim() > 0 and len(each) == count else each
    )


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def device_for(model: nn.Module, asked: torch.device | str | None = None) -> torch.device:
    """The device asked for, by default that of the model."""
    if asked is not None:
        return torch.device(asked)
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def need_labels(labels: Tensor | None) -> Tensor:
    """The labels of a batch, which a loader may not have."""
    if labels is None:
        raise LargeMarginError(
            "the loader yields inputs without labels. Yield (inputs, labels), or dicts with "
            '"labels"; a single batch is [(inputs, labels)]. Data without labels goes to ood=.'
        )
    return labels


def known_rows(labels: Tensor, num_classes: int) -> Tensor:
    """Which of the labels are not -100, as a mask of their shape; the others must be classes."""
    known = labels != IGNORED
    used = labels[known]
    check_labels(used, len(used), num_classes, of="logits", soft=False, skip=SKIP, validate=True)
    return known


def need_images(inputs: Any, what: str) -> Tensor:
    """Inputs that are images: (B, C, H, W), floating point."""
    if isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_floating_point():
        return inputs
    given = (
        f"a {inputs.dtype} tensor of shape {tuple(inputs.shape)}"
        if isinstance(inputs, Tensor)
        else f"a {type(inputs).__name__}"
    )
    raise LargeMarginError(
        f"{what} needs images of shape (N, C, H, W) with values in [0, 1], but the data yields "
        f"{given}."
    )


def check_range(images: Tensor, hint: str = "", *, beyond: float = RANGE) -> None:
    """Noise, attacks and gradients count in [0, 1]; bytes and normalised images do not."""
    if not images.numel():
        return
    low, high = (float(each) for each in images.detach().aminmax())
    if low < -beyond or high > 1 + beyond:
        raise LargeMarginError(
            "noise, attacks and input space are in units of [0, 1] pixels, but the images reach "
            f"from {low:.3g} to {high:.3g}. If the loader normalises them, say how: "
            "normalization=(mean, std). Or normalise in the model, with "
            f"largemargin.app.models.Normalize in front of it, and pass images in [0, 1].{hint}"
        )


def digest(split: Split) -> str:
    """Of names and labels: equal where two runs saw the same images with the same labels."""
    found = hashlib.sha256("\n".join(split.ids).encode())
    found.update(split.labels.numpy().tobytes())
    return found.hexdigest()


Advance: TypeAlias = Callable[[], Any]
"""Moves a progress bar on by one pass of the model over a batch."""


@contextmanager
def bar(what: str, total: int | None, progress: bool) -> Iterator[Advance]:
    """A bar of ``total`` passes of the model over a batch, on the first process only."""
    if not progress or (world_size() > 1 and dist.get_rank() > 0):
        yield lambda: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise MissingPackage(
            "progress=True needs tqdm. Install it: pip install tqdm, or pass progress=False."
        ) from None
    with tqdm(total=total, desc=what, unit="batch", leave=False) as shown:
        yield shown.update


def with_bar(values: Iterable[T], what: str, total: int | None, progress: bool) -> Iterator[T]:
    with bar(what, total, progress) as advance:
        for each in values:
            yield each
            advance()
