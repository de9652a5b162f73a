"""A convolutional network small enough to train on a laptop's CPU in seconds."""

from torch import nn

from largemargin.models.network import Size, convolution


def small_cnn(
    channels: int, size: Size, *, width: int = 16, dim: int = 32
) -> tuple[nn.Module, int]:
    """Three convolutions with batch normalisation and a linear layer, for 8 x 8 digits and more.

    The last layer has no ReLU after it, so features may point in every direction, which prototypes
    at more than 90 degrees from each other need.
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
