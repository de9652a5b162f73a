"""The small network of the margin distribution paper (ODN) for MNIST."""

from torch import nn

from largemargin.models.network import Size, convolution


def mnist_cnn(
    channels: int, size: Size, *, dropout: float, batch_norm: bool
) -> tuple[nn.Module, int]:
    """Two 5x5 convolutions of 32 and 64, each with max pooling, then fc 512; ReLU everywhere.

    The paper says "simple" and no more, so this is our reading. Dropout, where switched on, stands
    before the last layer; batch norm after each convolution.
    """
    height, width = size[0] // 4, size[1] // 4
    network = nn.Sequential(
        *convolution(channels, 32, 5, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        *convolution(32, 64, 5, batch_norm=batch_norm),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * height * width, 512),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    return network, 512
