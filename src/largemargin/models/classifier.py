"""What every network of this library is: normalisation, backbone, feature layer, linear head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError


class Normalize(nn.Module):
    """(x - mean) / std of each channel of images (N, C, H, W); without arguments the identity.

    >>> Normalize((0.5,), (0.25,))(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise LargeMarginError(
                f"mean and std must be given together, one number per channel, but mean is {mean} "
                f"and std is {std}."
            )
        if std is not None and min(std) <= 0:
            raise LargeMarginError(
                f"std must be positive in every channel, but {tuple(std)} was given. A channel "
                "that never changes has std 0: use 1 for it."
            )
        self.register_buffer("mean", _per_channel(mean))
        self.register_buffer("std", _per_channel(std))

    def forward(self, images: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return images
        return (images - self.mean) / self.std

    def extra_repr(self) -> str:
        if self.mean is None or self.std is None:
            return "identity"
        mean, std = (
            [round(x, 4) for x in each.flatten().tolist()] for each in (self.mean, self.std)
        )
        return f"mean={mean}, std={std}"


class Classifier(nn.Module):
    """``head(feature_layer(backbone(normalize(images))))``: images in [0, 1] to logits (N, C).

    ``features(images)`` gives what the head sees, (N, D). ``notes`` says in sentences what was
    changed to make a network fit, such as a first convolution for grey images.
    """

    def __init__(
        self,
        normalize: nn.Module,
        backbone: nn.Module,
        head: nn.Module,
        *,
        feature_layer: nn.Module | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        self.feature_layer = nn.Identity() if feature_layer is None else feature_layer
        self.head = head
        self.notes = tuple(notes)

    def features(self, images: Tensor) -> Tensor:
        """What enters the head, (N, D), of images (N, channels, H, W) in [0, 1]."""
        features: Tensor = self.feature_layer(self.backbone(self.normalize(images)))
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def _per_channel(values: Sequence[float] | None) -> Tensor | None:
    return (
        None if values is None else torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
    )
