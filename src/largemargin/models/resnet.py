"""ResNets for 32 x 32 images: a 3x3 stem of stride 1 and no max pooling (He et al. 2016)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from largemargin.models.network import Size, convolution, he_initialised, pooled


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(images)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


def resnet(
    channels: int, size: Size, *, blocks: Sequence[int], width: int = 64
) -> tuple[nn.Module, int]:
    """Four groups of blocks with 1, 2, 4, 8 times ``width`` channels, mean over positions."""
    layers: list[nn.Module] = [*convolution(channels, width)]
    before = width
    for group, count in enumerate(blocks):
        after = width * 2**group
        for index in range(count):
            layers.append(Block(before, after, 2 if group and not index else 1))
            before = after
    return he_initialised(nn.Sequential(*layers, *pooled(before))), before


resnet18 = partial(resnet, blocks=(2, 2, 2, 2))
resnet34 = partial(resnet, blocks=(3, 4, 6, 3))
