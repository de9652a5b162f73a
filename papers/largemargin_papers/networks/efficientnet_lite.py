"""EfficientNet-Lite0: features of images, as the published ImageNet weights have them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Stage(NamedTuple):
    """Equal blocks: only the first has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    width: int


LITE0 = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
STEM, FEATURES = 32, 1280


class SameConv(nn.Conv2d):
    """Convolution with TensorFlow's padding SAME: what is odd comes after the image."""

    def forward(self, input: Tensor) -> Tensor:
        pads = [
            max((-(-side // stride) - 1) * stride + kernel - side, 0)
            for side, stride, kernel in zip(
                input.shape[2:], self.stride, self.kernel_size, strict=True
            )
        ]
        high, wide = pads
        if high or wide:
            input = F.pad(input, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        return super().forward(input)


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, groups: int = 1, act: bool = True
) -> list[nn.Module]:
    made: list[nn.Module] = [
        SameConv(inputs, outputs, kernel, stride, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    ]
    return [*made, nn.ReLU6()] if act else made


class Block(nn.Module):
    """Expansion, depthwise convolution, projection; the input is added where shapes agree."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        width = inputs * stage.expansion
        expand = convolution(inputs, width, 1) if stage.expansion > 1 else []
        self.layers = nn.Sequential(
            *expand,
            *convolution(width, width, stage.kernel, stride, groups=width),
            *convolution(width, stage.width, 1, act=False),
        )
        self.adds = stride == 1 and inputs == stage.width

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return images + found if self.adds else found


class EfficientNetLite0(nn.Module):
    """Features (N, 1280) of images (N, 3, H, W) in [0, 1]; 3.4 million parameters.

    Args:
        size: to which images are enlarged first, bicubic; None: as they are.
    """

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size
        layers = convolution(3, STEM, 3, 2)
        inputs = STEM
        for stage in LITE0:
            for number in range(stage.blocks):
                layers.append(Block(inputs, stage, 1 if number else stage.stride))
                inputs = stage.width
        self.layers = nn.Sequential(*layers, *convolution(inputs, FEATURES, 1))

    def forward(self, images: Tensor) -> Tensor:
        if self.size is not None:
            images = F.interpolate(images, (self.size,) * 2, mode="bicubic", align_corners=False)
        features: Tensor = self.layers((images * 255 - 127) / 128)
        return features.mean((2, 3))


def renamed(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published state without its classifier, by the names of :class:`EfficientNetLite0`.

    Both define the same layers in the same order.
    """
    names = list(EfficientNetLite0().state_dict())
    tensors = [each for name, each in published.items() if not name.startswith("_fc.")]
    return {name: each.contiguous() for name, each in zip(names, tensors, strict=True)}
