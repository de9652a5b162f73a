"""ResNets for 32 x 32 images: a 3x3 stem of stride 1 and no max pooling (He et al. 2016)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from largemargin.errors import check_choice
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
    channels: int, size: Size, *, blocks: Sequence[int], width: int = 64, initial: str = "he"
) -> tuple[nn.Module, int]:
    """Four groups of blocks with 1, 2, 4, 8 times ``width`` channels, mean over positions.

    ``initial``: weights of the convolutions as in He et al. ("he"), or as torch draws them
    ("torch"), with a sixth of the variance. Batch norm takes the factor out again, but a step of
    the same learning rate turns smaller weights further: with learning rates that are too small, as
    some papers have them, networks that begin with smaller weights get much better.
    """
    check_choice("initial", initial, ("he", "torch"))
    layers: list[nn.Module] = [*convolution(channels, width)]
    before = width
    for group, count in enumerate(blocks):
        after = width * 2**group
        for index in range(count):
            layers.append(Block(before, after, 2 if group and not index else 1))
            before = after
    network = nn.Sequential(*layers, *pooled())
    return he_initialised(network) if initial == "he" else network, before


resnet18 = partial(resnet, blocks=(2, 2, 2, 2))
resnet34 = partial(resnet, blocks=(3, 4, 6, 3))
