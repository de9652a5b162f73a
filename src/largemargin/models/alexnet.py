"""AlexNet for 32 x 32 images, with dropout and batch norm to switch (ODN Table 1)."""

from torch import nn

from largemargin.models.network import Size, convolution


def alexnet(
    channels: int, size: Size, *, dropout: float, batch_norm: bool
) -> tuple[nn.Module, int]:
    """Five 3x3 convolutions of 64, 192, 384, 256, 256 and two fully connected layers of 4096.

    Max pooling after the first, second and fifth; ReLU everywhere; dropout before each fully
    connected layer; batch norm after each convolution. The paper names AlexNet and no more: kernel
    sizes for small images are our reading.
    """
    positions = (size[0] // 8) * (size[1] // 8)
    network = nn.Sequential(
        *convolution(channels, 64, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        *convolution(64, 192, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        *convolution(192, 384, batch_norm=batch_norm),
        *convolution(384, 256, batch_norm=batch_norm),
        *convolution(256, 256, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256 * positions, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
    )
    return network, 4096
