"""MixUp and CutMix: every training image of a batch with some of the one before it.

What torchvision's ``v2.MixUp`` and ``v2.CutMix`` do, with parameters that are drawn apart from the
images and lie in a tensor, so that a CUDA graph can hold the step.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.measuring.sample_draws import seed_for


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

        Args:
            size: (H, W) of the images.
            place: seed, epoch and step, on which alone it depends.
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
