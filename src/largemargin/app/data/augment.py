"""Random changes of training images.

Crops and mirror images of images in memory are made for a whole batch on the device, by indexing
alone: no loop, no value read back, shapes that depend on nothing drawn, so a CUDA graph can hold
them. Everything else is torchvision's, image by image in the processes that read files.

MixUp and CutMix are what torchvision's ``v2.MixUp`` and ``v2.CutMix`` do: every image of a batch
with some of the one before it. Their parameters are drawn apart from the images and lie in a
tensor, for the same reason.
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.app.data.image_files import ImageFiles
from largemargin.errors import LargeMarginError, check_choice, check_number, optional_module
from largemargin.measuring.sample_draws import seed_for

KINDS = ("none", "crop_flip", "flip", "resized_crop", "perspective_flip", "road")
BATCHED = ("none", "crop_flip", "flip")
"""Kinds that are made for a whole batch at once."""


class StoredImages(Protocol):
    """Images in memory or in files, as :class:`largemargin.app.data.Samples` holds them."""

    @property
    def pixels(self) -> Tensor | None: ...

    @property
    def files(self) -> ImageFiles | None: ...

    def raw(self, index: int) -> Tensor: ...


class Draws(NamedTuple):
    """What was drawn for n images: where the crop starts (0 to twice the padding), mirror or not.

    ``draws[rows]`` of a tuple would be a field, so rows are taken with :meth:`rows`.
    """

    dy: Tensor
    dx: Tensor
    flip: Tensor

    def rows(self, start: int, stop: int) -> "Draws":
        return Draws(*(each[start:stop] for each in self))

    def to(self, device: torch.device | str) -> "Draws":
        return Draws(*(each.to(device, non_blocking=True) for each in self))


@dataclass(frozen=True)
class Augment:
    """What training does to its images.

    Args:
        kind: none; crop_flip (a crop of the padded image, mirrored or not: LMD F.1); flip;
            resized_crop (8 % to 100 % of the image, mirrored or not: torchvision's defaults);
            perspective_flip (perspective, mirrored or not: LMD F.2); road (colour 0.3, rotation up
            to 10 degrees, perspective, mirrored or not: ROB H.2).
        padding: black pixels around the image before the crop; 4 (LMD, ROB).

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0]]]])
        >>> one = torch.ones(1, dtype=torch.long)
        >>> Augment("crop_flip", padding=1).apply(image, Draws(one, one, torch.tensor([True])))
        tensor([[[[2., 1.]]]])
    """

    kind: str = "none"
    padding: int = 4

    def __post_init__(self) -> None:
        check_choice("augment", self.kind, KINDS)

    @property
    def batched(self) -> bool:
        return self.kind in BATCHED

    def draw(
        self, n: int, size: tuple[int, int] = (0, 0), generator: torch.Generator | None = None
    ) -> Draws:
        """Draws for n images, on the generator's device.

        Args:
            n: images.
            size: (H, W) of the images; crops keep it, so nothing depends on it yet.
            generator: random numbers; default torch's global ones.
        """
        self._check_batched()
        device = torch.device("cpu") if generator is None else generator.device
        widest = 2 * self.padding + 1 if self.kind == "crop_flip" else 1
        dy = torch.randint(widest, (n,), generator=generator, device=device)
        dx = torch.randint(widest, (n,), generator=generator, device=device)
        sides = 1 if self.kind == "none" else 2
        flip = torch.randint(sides, (n,), generator=generator, device=device).bool()
        return Draws(dy, dx, flip)

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Images (n, C, H, W) of any dtype after the changes drawn for them, same shape."""
        self._check_batched()
        if self.kind == "none":
            return images
        return self.take(images, torch.arange(len(images), device=images.device), draws)

    def take(self, pixels: Tensor, index: Tensor, draws: Draws) -> Tensor:
        """``apply(pixels[index], draws)`` in one step, without the copy in between.

        The result has the channels last in memory, which convolutions on GPUs like best.
        """
        if self.kind == "none":
            return pixels[index]
        height, width = pixels.shape[-2:]
        padding = self.padding if self.kind == "crop_flip" else 0
        x = torch.arange(width, device=pixels.device)
        x = torch.where(draws.flip[:, None], width - 1 - x, x) + draws.dx[:, None] - padding
        y = torch.arange(height, device=pixels.device) + draws.dy[:, None] - padding
        taken = pixels[
            index[:, None, None],
            :,
            y.clamp(0, height - 1)[:, :, None],
            x.clamp(0, width - 1)[:, None, :],
        ]
        if padding:
            inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
            taken = taken * inside[..., None]
        return taken.permute(0, 3, 1, 2)

    def one(self, samples: StoredImages, index: int, seed: int, epoch: int) -> Tensor:
        """One image (C, H, W) after changes that depend on (seed, epoch, index) alone."""
        # Only the CPU's generator: torch.manual_seed would disturb that of the GPU too.
        generator = torch.default_generator
        state = generator.get_state()
        generator.manual_seed(seed_for(seed, epoch, index, "augment"))
        try:
            return self._change(samples, index)
        finally:
            generator.set_state(state)

    def _change(self, samples: StoredImages, index: int) -> Tensor:
        files = samples.files
        if self.kind == "resized_crop" and samples.pixels is None and files is not None:
            # Cut from the whole picture, not from what is left of it at the final size.
            picture = self._transform(files.size)(files.picture(index))
            return files.fitted(picture)
        raw = samples.raw(index)
        changed: Tensor = self._transform((raw.shape[-2], raw.shape[-1]))(raw)
        return changed

    def _transform(self, size: tuple[int, int]) -> Any:
        v2 = transforms()
        if self.kind == "none":
            return v2.Identity()
        colour = v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3)
        before = {
            "flip": (),
            "crop_flip": (v2.RandomCrop(size, padding=self.padding),),
            "resized_crop": (v2.RandomResizedCrop(size, antialias=True),),
            "perspective_flip": (v2.RandomPerspective(),),
            "road": (colour, v2.RandomRotation(10), v2.RandomPerspective()),
        }
        return v2.Compose([*before[self.kind], v2.RandomHorizontalFlip()])

    def _check_batched(self) -> None:
        if not self.batched:
            raise LargeMarginError(
                f"augment {self.kind!r} is made image by image, by Batches; only "
                f"{', '.join(BATCHED)} are made for a whole batch."
            )


def transforms() -> Any:
    return optional_module("torchvision.transforms.v2", "this augmentation needs torchvision")


@dataclass(frozen=True)
class Mix:
    """Mixes images of a batch, and their labels as far: soft targets (N, C).

    Where both are asked for, each step takes one of them by chance. Several processes mix their
    own parts of a batch.

    Args:
        num_classes: C.
        mixup: alpha of the Beta distribution of an image's share (Zhang et al. 2018); 0 for none.
        cutmix: the same for the area outside of the rectangle (Yun et al. 2019).

    Example:
        >>> images, labels = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1), torch.tensor([0, 1])
        >>> quarter = torch.tensor([0.25, 0, 1, 0, 1])  # of the other image, in the whole of it
        >>> mixed, targets = Mix(2, mixup=1.0).apply(images, labels, quarter)
        >>> mixed.flatten(), targets[0]
        (tensor([0.2500, 0.7500]), tensor([0.7500, 0.2500]))
    """

    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        check_number("data.mixup", self.mixup, at_least=0)
        check_number("data.cutmix", self.cutmix, at_least=0)

    def draw(self, size: tuple[int, int], place: tuple[int, ...]) -> tuple[float, ...]:
        """The other image's weight, and where: top, bottom, left and right of the rectangle.

        It depends on the place alone, (seed, epoch, step); ``size`` is (H, W) of the images.
        """
        rng, (height, width) = random.Random(seed_for(*place, "mix")), size
        cuts = self.cutmix > 0 and (self.mixup == 0 or rng.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        own = rng.betavariate(alpha, alpha)
        if not cuts:
            return 1 - own, 0, height, 0, width
        half = 0.5 * (1 - own) ** 0.5
        y, x = rng.randrange(height), rng.randrange(width)
        up, side = int(half * height), int(half * width)
        return 1.0, max(0, y - up), min(height, y + up), max(0, x - side), min(width, x + side)

    def apply(self, images: Tensor, labels: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed images and targets of a step; ``images`` may hold several images of every label."""
        weight, top, bottom, left, right = drawn.unbind()
        y = torch.arange(images.shape[-2], device=images.device)
        x = torch.arange(images.shape[-1], device=images.device)
        rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
        other = weight * (rows[:, None] & columns)
        copies = images.reshape(-1, len(labels), *images.shape[1:])
        mixed = torch.lerp(copies, copies.roll(1, 1), other).flatten(0, 1)
        targets = F.one_hot(labels, self.num_classes).float()
        return mixed, torch.lerp(targets, targets.roll(1, 0), other.mean())
