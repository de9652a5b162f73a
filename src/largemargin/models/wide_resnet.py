"""Wide residual networks with activations before convolutions (Zagoruyko and Komodakis 2016)."""

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError
from largemargin.models.network import Size, he_initialised, pooled


class Block(nn.Module):
    """Batch norm, ReLU, 3x3 convolution, twice; a 1x1 convolution around where the width changes.

    A block that changes the width activates its input for both ways, as the original does.
    """

    def __init__(self, before: int, after: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, images: Tensor) -> Tensor:
        active = torch.relu(self.norm1(images))
        inner = torch.relu(self.norm2(self.conv1(active)))
        outer = images if self.shortcut is None else self.shortcut(active)
        changed: Tensor = self.conv2(self.dropout(inner))
        return outer + changed


def wide_resnet(
    channels: int, size: Size, *, dropout: float, depth: int = 28, width: int = 10
) -> tuple[nn.Module, int]:
    """Three groups of (depth - 4) / 6 blocks with 16, 32, 64 times ``width`` channels."""
    blocks, left = divmod(depth - 4, 6)
    if left or blocks < 1:
        raise LargeMarginError(
            f"depth of a wide ResNet must be 6 n + 4 (10, 16, 22, 28, 40, ...), but {depth} was "
            "given."
        )
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
    before = 16
    for group in range(3):
        after = 16 * 2**group * width
        for index in range(blocks):
            layers.append(Block(before, after, 2 if group and not index else 1, dropout))
            before = after
    layers += [nn.BatchNorm2d(before), nn.ReLU(), *pooled()]
    return he_initialised(nn.Sequential(*layers)), before
