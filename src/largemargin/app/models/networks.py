"""The networks of this library by name, :data:`MODELS`, and the functions that build them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice

Size: TypeAlias = tuple[int, int]
"""Height and width of the images."""


@dataclass(frozen=True)
class Network:
    """A network by name.

    Args:
        build: ``build(channels, size, **choices) -> (backbone, dim)``: images (N, channels, *size)
            to features (N, dim). Further keyword arguments are what ``ModelConfig.options`` may
            set.
        description: one line for ``largemargin list``.
        smallest: side of the smallest image it takes, in pixels.
        dropout: its own probability of dropout; None where it has no dropout.
        batch_norm: its own choice; None where there is none to make.
    """

    build: Callable[..., tuple[nn.Module, int]]
    description: str
    smallest: int
    dropout: float | None = None
    batch_norm: bool | None = None


def convolution(
    before: int,
    after: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    batch_norm: bool = True,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> tuple[nn.Module, ...]:
    """Convolution, batch norm where asked for, activation; padding keeps the size by default.

    Activations do not work in place, so that losses may read the layer before them.
    """
    padding = kernel // 2 if padding is None else padding
    # The bias of a convolution is removed again by the batch mean that follows it.
    layer = nn.Conv2d(before, after, kernel, stride, padding, groups=groups, bias=not batch_norm)
    norm = (nn.BatchNorm2d(after),) if batch_norm else ()
    return layer, *norm, activation()


def he_initialised(network: nn.Module, *, slope: float = 0.0) -> nn.Module:
    """He et al. (2015): variance 2 / fan-out for convolutions, biases 0; deep networks need it."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=slope, mode="fan_out")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def pooled_groups(
    channels: int, groups: Sequence[Sequence[int]], kernel: int = 3, *, batch_norm: bool
) -> list[nn.Module]:
    """Groups of convolutions of so many channels, with max pooling after each: half the size."""
    layers: list[nn.Module] = []
    for group in groups:
        for before, after in pairwise((channels, *group)):
            layers += convolution(before, after, kernel, batch_norm=batch_norm)
        layers.append(nn.MaxPool2d(2))
        channels = group[-1]
    return layers


def pooled() -> tuple[nn.Module, ...]:
    """Mean over all positions: (N, channels, h, w) to (N, channels)."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten()


def alexnet(
    channels: int, size: Size, *, dropout: float, batch_norm: bool
) -> tuple[nn.Module, int]:
    """AlexNet for 32 x 32 images (ODN Table 1).

    Five 3x3 convolutions of 64, 192, 384, 256, 256 with batch norm, max pooling after the first,
    second and fifth, and two fully connected layers of 4096 with dropout before each; ReLU
    everywhere. The paper names AlexNet and no more: kernel sizes for small images are our reading.
    """
    positions = (size[0] // 8) * (size[1] // 8)
    network = nn.Sequential(
        *pooled_groups(channels, ((64,), (192,), (384, 256, 256)), batch_norm=batch_norm),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256 * positions, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
    )
    return network, 4096


SLOPE = 0.1


def cnn13(channels: int, size: Size, *, dropout: float) -> tuple[nn.Module, int]:
    """The 13-layer network of "Large Margin In Softmax Cross-Entropy Loss" (Kobayashi 2019).

    For 32 x 32 images: three convolutions of 128 and three of 256, max pooling and dropout after
    each group; 512 without padding, then 1x1 of 256 and 128, mean over positions. Batch norm and
    leaky ReLU (0.1) after every convolution. Widths and slope are recalled from the network's
    origin, the paper does not print them.
    """
    leaky = partial(convolution, activation=partial(nn.LeakyReLU, SLOPE))
    network = nn.Sequential(
        *leaky(channels, 128),
        *leaky(128, 128),
        *leaky(128, 128),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        *leaky(128, 256),
        *leaky(256, 256),
        *leaky(256, 256),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        *leaky(256, 512, padding=0),
        *leaky(512, 256, 1),
        *leaky(256, 128, 1),
        *pooled(),
    )
    return he_initialised(network, slope=SLOPE), 128


def mlp(
    channels: int, size: Size, *, dropout: float, hidden: Sequence[int] = (256, 256)
) -> tuple[nn.Module, int]:
    """Flattened pixels, then linear layers with ReLU and dropout after each."""
    sizes = (channels * size[0] * size[1], *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers), sizes[-1]


def mnist_cnn(
    channels: int, size: Size, *, dropout: float, batch_norm: bool
) -> tuple[nn.Module, int]:
    """The small network of the margin distribution paper (ODN) for MNIST.

    Two 5x5 convolutions of 32 and 64, each with max pooling, then fc 512; ReLU everywhere. The
    paper says "simple" and no more, so this is our reading. Dropout, where switched on, stands
    before the last layer; batch norm after each convolution.
    """
    height, width = size[0] // 4, size[1] // 4
    network = nn.Sequential(
        *pooled_groups(channels, ((32,), (64,)), 5, batch_norm=batch_norm),
        nn.Flatten(),
        nn.Linear(64 * height * width, 512),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    return network, 512


BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *[(512, 1)] * 5,
    (1024, 2),
    (1024, 1),
)
"""Channels and stride of each depthwise separable convolution."""


def mobilenet(channels: int, size: Size, *, width: float = 1.0) -> tuple[nn.Module, int]:
    """MobileNet, first version (Howard et al. 2017).

    A 3x3 convolution of stride 2, thirteen depthwise separable ones, mean over positions.
    """
    before = round(32 * width)
    layers: list[nn.Module] = [*convolution(channels, before, stride=2)]
    for full, stride in BLOCKS:
        after = round(full * width)
        layers += convolution(before, before, stride=stride, groups=before)
        layers += convolution(before, after, 1)
        before = after
    return he_initialised(nn.Sequential(*layers, *pooled())), before


class ResNetBlock(nn.Module):
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
    """A ResNet for 32 x 32 images: a 3x3 stem of stride 1 and no max pooling (He et al. 2016).

    Four groups of blocks with 1, 2, 4, 8 times ``width`` channels, mean over positions.

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
            layers.append(ResNetBlock(before, after, 2 if group and not index else 1))
            before = after
    network = nn.Sequential(*layers, *pooled())
    return he_initialised(network) if initial == "he" else network, before


resnet18 = partial(resnet, blocks=(2, 2, 2, 2))
resnet34 = partial(resnet, blocks=(3, 4, 6, 3))


def small_cnn(
    channels: int, size: Size, *, width: int = 16, dim: int = 32
) -> tuple[nn.Module, int]:
    """A network small enough to train on a laptop's CPU in seconds, for 8 x 8 digits and more.

    Three convolutions with batch normalisation and a linear layer. That has no ReLU after it, so
    features may point in every direction, which prototypes at more than 90 degrees from each other
    need.
    """
    network = nn.Sequential(
        *convolution(channels, width),
        *convolution(width, 2 * width),
        nn.MaxPool2d(2),
        *convolution(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, dim),
    )
    return network, dim


GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of VGG-16's thirteen 3x3 convolutions; max pooling follows each group."""


def vgg16(channels: int, size: Size, *, dropout: float, batch_norm: bool) -> tuple[nn.Module, int]:
    """VGG-16 (Simonyan and Zisserman 2015): two fully connected layers of 4096 with dropout."""
    positions = (size[0] // 32) * (size[1] // 32)
    network = nn.Sequential(
        *pooled_groups(channels, GROUPS, batch_norm=batch_norm),
        nn.Flatten(),
        nn.Linear(512 * positions, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    return he_initialised(network), 4096


def vgg16_mod(channels: int, size: Size, *, batch_norm: bool) -> tuple[nn.Module, int]:
    """VGG-16 with the mean over positions in place of fully connected layers (Kobayashi 2019)."""
    layers = pooled_groups(channels, GROUPS, batch_norm=batch_norm)
    return he_initialised(nn.Sequential(*layers, *pooled())), 512


class WideResNetBlock(nn.Module):
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
    """A wide residual network with activations before convolutions (Zagoruyko, Komodakis 2016).

    Three groups of (depth - 4) / 6 blocks with 16, 32, 64 times ``width`` channels.
    """
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
            layers.append(WideResNetBlock(before, after, 2 if group and not index else 1, dropout))
            before = after
    layers += [nn.BatchNorm2d(before), nn.ReLU(), *pooled()]
    return he_initialised(nn.Sequential(*layers)), before


MODELS: Mapping[str, Network] = MappingProxyType(
    {
        "small_cnn": Network(small_cnn, "three convolutions, 15,000 parameters; for digits", 4),
        "mlp": Network(mlp, "two fully connected layers of 256", 1, dropout=0.0),
        "mnist_cnn": Network(
            mnist_cnn, "two 5x5 convolutions and fc 512; MNIST", 4, dropout=0.0, batch_norm=False
        ),
        "cnn13": Network(cnn13, "13-layer network of Kobayashi 2019; 32x32", 12, dropout=0.5),
        "alexnet": Network(alexnet, "AlexNet for 32x32 images", 8, dropout=0.5, batch_norm=False),
        "resnet18": Network(resnet18, "ResNet-18 for 32x32 images: 3x3 stem, no max pooling", 8),
        "resnet34": Network(resnet34, "ResNet-34 for 32x32 images: 3x3 stem, no max pooling", 8),
        "wrn28_10": Network(
            wide_resnet, "wide ResNet 28-10, 36.5 million parameters; 32x32", 8, dropout=0.0
        ),
        "vgg16": Network(
            vgg16, "VGG-16 with two fc 4096; 224x224", 32, dropout=0.5, batch_norm=False
        ),
        "vgg16_mod": Network(
            vgg16_mod, "VGG-16 with mean pooling instead of fc 4096; 224x224", 32, batch_norm=False
        ),
        "mobilenet": Network(mobilenet, "MobileNet v1; 224x224", 32),
    }
)
"""The networks of this library by name; all others are ``torchvision/NAME`` and ``timm/NAME``."""
