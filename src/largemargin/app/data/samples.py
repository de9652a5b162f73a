"""One split of a data set: labels, names and images, in memory or in files."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from largemargin.app.data.image_files import ImageFiles
from largemargin.errors import LargeMarginError


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


def as_float(images: Tensor) -> Tensor:
    """Bytes 0..255 as float32 in [0, 1]; float32 stays as it is.

    A product, because GPUs and CPUs round division by a number differently.
    """
    return images.float().mul_(1 / 255) if images.dtype == torch.uint8 else images.float()
