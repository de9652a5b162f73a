"""VGG-16 (Simonyan and Zisserman 2015) and its form with mean pooling (Kobayashi 2019, Table 4)."""

from torch import nn

from largemargin.models.network import Size, convolution, he_initialised, pooled

GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def convolutions(channels: int, batch_norm: bool) -> list[nn.Module]:
    """Thirteen 3x3 convolutions in five groups with max pooling after each: 1/32 of the size."""
    layers: list[nn.Module] = []
    before = channels
    for group in GROUPS:
        for after in group:
            layers += convolution(before, after, batch_norm=batch_norm)
            before = after
        layers.append(nn.MaxPool2d(2))
    return layers


def vgg16(channels: int, size: Size, *, dropout: float, batch_norm: bool) -> tuple[nn.Module, int]:
    """Convolutions, then two fully connected layers of 4096 with ReLU and dropout."""
    positions = (size[0] // 32) * (size[1] // 32)
    network = nn.Sequential(
        *convolutions(channels, batch_norm),
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
    """Convolutions, then the mean over positions in place of the fully connected layers."""
    return he_initialised(nn.Sequential(*convolutions(channels, batch_norm), *pooled())), 512
