"""One split of a data set: labels, names and images in memory or in files, and its batches.

Order and augmentation of an epoch depend on (seed, epoch) alone. The number of processes, of
workers and the step a run is resumed at change nothing: the order and the draws of an epoch are
made at once for all processes, and each takes its rows.
"""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from largemargin.app.data.augment import Augment, Draws, Mix, transforms
from largemargin.app.data.image_files import ImageFiles
from largemargin.errors import LargeMarginError, check_number
from largemargin.measuring.batches import ImageBatch
from largemargin.measuring.sample_draws import generator_for


@dataclass(frozen=True, eq=False)
class Samples:
    """Images with labels. ``len(samples)`` is N.

    Args:
        labels: (N,) int64 class indices on the CPU.
        ids: N names: paths below the folder of the data, or "train/123".
        pixels: (N, C, H, W) uint8 or float32 in [0, 1], on the CPU, where images are in memory.
        files: the images where they are not.
        extra: further numbers per image, (N, ...): ``camera`` of re-identification data,
            ``clean_label`` under label noise.

    Example:
        >>> pixels = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
        >>> samples = Samples(torch.tensor([0, 1]), ("a", "b"), pixels)
        >>> len(samples), samples.image(1).max().item(), samples.subset([1]).ids
        (2, 1.0, ('b',))
    """

    labels: Tensor
    ids: Sequence[str]
    pixels: Tensor | None = None
    files: ImageFiles | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        images = self.files if self.pixels is None else self.pixels
        if images is None or len({len(images), len(self.labels), len(self.ids)}) > 1:
            raise LargeMarginError(
                "a split needs as many images as labels and ids, but there are "
                f"{'no' if images is None else len(images)} images, {len(self.labels)} labels and "
                f"{len(self.ids)} ids."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        where = "files" if self.pixels is None else f"memory as {self.pixels.dtype}"
        return f"Samples({len(self)} images in {where})"

    def image(self, index: int) -> Tensor:
        """One image without augmentation, (C, H, W) float32 in [0, 1]."""
        raw = self.raw(index)
        return as_float(raw) if raw.dtype == torch.uint8 else raw.clone()

    def raw(self, index: int) -> Tensor:
        """One image as it is stored: (C, H, W), uint8 or float32 in [0, 1]."""
        if self.pixels is not None:
            return self.pixels[index]
        assert self.files is not None
        return self.files.pixels(index)

    def subset(self, indices: Tensor | Sequence[int]) -> "Samples":
        """These samples in this order; images in memory are copied."""
        index = torch.as_tensor(indices, dtype=torch.long)
        return replace(
            self,
            labels=self.labels[index],
            ids=tuple(self.ids[i] for i in index.tolist()),
            pixels=None if self.pixels is None else self.pixels[index],
            files=None if self.files is None else self.files.subset(index.tolist()),
            extra={name: each[index] for name, each in self.extra.items()},
        )

    def read(
        self, batch_size: int, *, device: torch.device | str = "cpu", workers: int = 0
    ) -> Iterator[ImageBatch]:
        """All of them in order and without augmentation, batch by batch on the device."""
        return Batches(self, batch_size, device=device, shuffle=False, workers=workers).epoch(0)


def as_float(images: Tensor) -> Tensor:
    """Bytes 0..255 as float32 in [0, 1]; float32 stays as it is.

    A product, because GPUs and CPUs round division by a number differently.
    """
    return images.float().mul_(1 / 255) if images.dtype == torch.uint8 else images.float()


class Plan(NamedTuple):
    """An epoch of images in memory: the samples in order (N,) and what is drawn for each.

    ``others`` are the draws of a second image of each.
    """

    order: Tensor
    draws: Draws
    others: Draws | None = None


EVALUATION_BATCH = 1000
"""Images at a time where nothing is trained."""


class Batches:
    """Batches of a split.

    Images in memory are copied to the device once and changed there; others are read by workers.

    Args:
        samples: the split.
        batch_size: images per step over all processes; a multiple of ``world``.
        device: where batches go.
        seed: of order and augmentation.
        shuffle: another order every epoch; False for evaluation.
        augment: changes of the images; None for none.
        rank: of this process: it takes rows ``rank * b / world`` to ``(rank + 1) * b / world`` of a
            batch of b.
        world: number of processes.
        workers: processes that read files; 0 reads them here.
        drop_last: leave out the last batch where it is smaller; otherwise it is cut to a multiple
            of ``world``.
        twice: change every image twice, independently: a batch of b labels has 2 b images, the
            second ones after the first. Only of images in memory.
        mix: mixes the images of every batch, whose labels are soft targets then.

    Example:
        >>> pixels = torch.zeros(5, 1, 4, 4)
        >>> samples = Samples(torch.arange(5), tuple("abcde"), pixels)
        >>> batches = Batches(samples, 2, shuffle=False)
        >>> [labels.tolist() for images, labels in batches]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        drop_last: bool = False,
        twice: bool = False,
        mix: Mix | None = None,
    ) -> None:
        check_number("batch_size", batch_size, at_least=1)
        check_number("world", world, at_least=1)
        check_number("rank", rank, at_least=0, below=world)
        if batch_size % world:
            raise LargeMarginError(
                f"batch_size is that of all processes together and must be a multiple of their "
                f"number, {world}, but {batch_size} was given."
            )
        self.samples = samples
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.seed = seed
        self.shuffle = shuffle
        self.augment = augment or Augment("none")
        self.rank = rank
        self.world = world
        self.workers = workers
        self.drop_last = drop_last
        self.pixels: Tensor | None = None
        """All images on the device, as stored; None where batches are read by a loader."""
        self.labels = samples.labels.to(self.device)
        """All labels on the device."""
        if samples.pixels is not None and self.augment.batched:
            self.pixels = samples.pixels.to(self.device)
        self.mix = mix
        self.twice = twice
        if twice and self.pixels is None:
            raise LargeMarginError(
                "noise.crop own needs images in memory and one of the augmentations none, flip and "
                "crop_flip, which are made for a whole batch. Use noise.crop same."
            )
        self._loader: _Loader | None = None

    def __len__(self) -> int:
        """Steps of an epoch, the same for every process."""
        full, left = divmod(len(self.samples), self.batch_size)
        return full + (left >= self.world and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``(images, labels)`` of epoch 0, as loaders give them."""
        return ((batch.images, batch.labels) for batch in self.epoch(0))

    def order(self, epoch: int) -> Tensor:
        """(N,) indices of the samples in the order of this epoch, on the CPU."""
        if not self.shuffle:
            return torch.arange(len(self.samples))
        generator = generator_for(self.seed, epoch, "order")
        return torch.randperm(len(self.samples), generator=generator)

    def plan(self, epoch: int) -> Plan:
        """Order and draws of an epoch, on the device: all that a step of a CUDA graph needs.

        Step k of this process uses rows ``rows(k)`` of it.
        """
        generator = generator_for(self.seed, epoch, "augment")
        draws = self.augment.draw(len(self.samples), generator=generator)
        plan = Plan(self.order(epoch).to(self.device), draws.to(self.device))
        if not self.twice:
            return plan
        generator = generator_for(self.seed, epoch, "augment again")
        others = self.augment.draw(len(self.samples), generator=generator)
        return plan._replace(others=others.to(self.device))

    def rows(self, step: int) -> tuple[int, int]:
        """First row and the row after the last that this process takes of an epoch's order."""
        first = step * self.batch_size
        size = min(self.batch_size, len(self.samples) - first) // self.world
        return first + self.rank * size, first + (self.rank + 1) * size

    def epoch(self, epoch: int, start: int = 0) -> Iterator[ImageBatch]:
        """The batches of an epoch from step ``start`` on."""
        check_number("start", start, at_least=0, at_most=len(self))
        if self.pixels is None:
            batches = self._read(epoch, start)
        else:
            batches = self._take(self.pixels, epoch, start)
        return batches if self.mix is None else self._mixed(self.mix, batches, epoch, start)

    def mixtures(self, epoch: int) -> Tensor:
        """(steps, 5) what is drawn for each step, on the device; (0, 5) where nothing is mixed."""
        if self.mix is None:
            return torch.zeros(0, 5, device=self.device)
        size = (self.samples.raw(0).shape[-2], self.samples.raw(0).shape[-1])
        places = ((self.seed, epoch, step) for step in range(len(self)))
        return torch.tensor([self.mix.draw(size, place) for place in places]).to(self.device)

    def _mixed(
        self, mix: Mix, batches: Iterator[ImageBatch], epoch: int, start: int
    ) -> Iterator[ImageBatch]:
        for batch, mixture in zip(batches, self.mixtures(epoch)[start:], strict=True):
            images, labels = mix.apply(batch.images, batch.labels, mixture)
            yield batch._replace(images=images, labels=labels)

    def _take(self, pixels: Tensor, epoch: int, start: int) -> Iterator[ImageBatch]:
        plan, order = self.plan(epoch), self.order(epoch)
        for step in range(start, len(self)):
            first, last = self.rows(step)
            index = plan.order[first:last]
            draws = [each.rows(first, last) for each in plan[1:] if each is not None]
            yield ImageBatch(self.take(pixels, index, draws), self.labels[index], order[first:last])

    def take(self, pixels: Tensor, index: Tensor, draws: Sequence[Draws]) -> Tensor:
        """These images in [0, 1] with the changes drawn for them, once for each of the draws."""
        images = [as_float(self.augment.take(pixels, index, each)) for each in draws]
        return images[0] if len(images) == 1 else torch.cat(images)

    def _read(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        if self._loader is None:
            self._loader = _Loader(self)
        order = self.order(epoch)
        parts = [order[slice(*self.rows(step))] for step in range(start, len(self))]
        for index, raw in zip(parts, self._loader.read(epoch, parts), strict=True):
            images = as_float(raw.to(self.device, non_blocking=True))
            labels = self.samples.labels[index].to(self.device, non_blocking=True)
            yield ImageBatch(images, labels, index)


@dataclass
class _Images(Dataset[Tensor]):
    """Images by (epoch, index), so that workers may live longer than an epoch."""

    samples: Samples
    augment: Augment
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        epoch, index = key
        if self.augment.kind == "none":
            return self.samples.raw(index)
        return self.augment.one(self.samples, index, self.seed, epoch)


class _Keys:
    """The batches of one epoch as (epoch, index), set anew every epoch.

    Apart from the loader: two objects that hold each other would keep its workers alive until the
    garbage collector finds them, and hand them to processes that are forked meanwhile.
    """

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Loader:
    """A DataLoader whose workers live as long as it does, over all epochs."""

    def __init__(self, batches: Batches) -> None:
        if batches.augment.kind != "none":
            transforms()  # imported once here, so that not every worker has to
        self.keys = _Keys()
        images = _Images(batches.samples, batches.augment, batches.seed)
        self.loader: DataLoader[Any] = DataLoader(
            images,
            batch_sampler=self.keys,
            num_workers=batches.workers,
            persistent_workers=batches.workers > 0,
            pin_memory=batches.device.type == "cuda",
            worker_init_fn=_leave_signals,
            # Its own: a loader draws a seed for its workers, and the model's draws come after it.
            generator=torch.Generator(),
        )
        self.turn = 0

    def read(self, epoch: int, parts: list[Tensor]) -> Iterator[Tensor]:
        self.keys.batches = [[(epoch, index) for index in part.tolist()] for part in parts]
        self.turn += 1
        turn = self.turn
        try:
            for images in self.loader:
                yield images
                # Workers read for one epoch at a time: the next images would be those of another.
                if turn != self.turn and self.loader.num_workers:
                    raise LargeMarginError(
                        f"epoch {epoch} of these batches cannot go on: another was begun. "
                        "Finish one before the next, make two Batches, or set workers=0."
                    )
        except LargeMarginError as error:
            # A worker's error comes with its whole traceback as text.
            said = str(error).rpartition("LargeMarginError: ")[2].strip()
            raise LargeMarginError(said) from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise LargeMarginError(
                f"a process that reads images ended ({' '.join(str(error).split())}). Mostly there "
                "was not enough memory: set fewer data.workers."
            ) from error


def _leave_signals(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; what to do about it the first one decides.

    SIGTERM is left to torch, which has put its own handler in place of the first process's: a
    worker that its parent ends has not failed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
