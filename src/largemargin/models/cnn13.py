"""The 13-layer network of "Large Margin In Softmax Cross-Entropy Loss" (Kobayashi 2019)."""

from functools import partial

from torch import nn

from largemargin.models.network import Size, convolution, he_initialised, pooled

SLOPE = 0.1


def cnn13(channels: int, size: Size, *, dropout: float) -> tuple[nn.Module, int]:
    """Nine convolutions in three groups, for 32 x 32; features of dimension 128.

    Three of 128, max pool, dropout; three of 256, max pool, dropout; 512 without padding, then 1x1
    of 256 and 128, mean over positions. Batch norm and leaky ReLU (0.1) after every convolution.
    Widths and slope are recalled from the network's origin, the paper does not print them.
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
