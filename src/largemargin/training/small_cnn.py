"""A convolutional network small enough to train on a laptop's CPU in seconds."""

from torch import Tensor, nn

from largemargin.prototypes import ClassHead


class SmallCNN(nn.Module):
    """Three convolutions with batch normalisation, a linear feature layer and a class head.

    Input (N, 1, 8, 8), the size of scikit-learn's digits; any even size from 4 upwards works.
    ``features(x)`` gives (N, dim), ``forward(x)`` the logits (N, num_classes) of ``head``, without
    any margin. The feature layer has no ReLU after it, so features may point in every direction,
    which prototypes at more than 90 degrees from each other need.

    >>> network = SmallCNN(dim=32, num_classes=10)
    >>> network(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int = 32,
        num_classes: int = 10,
        *,
        width: int = 16,
        similarity: str = "dot",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width),
            *_block(width, 2 * width),
            nn.MaxPool2d(2),
            *_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, dim),
        )
        self.head = ClassHead(dim, num_classes, similarity=similarity, scale=scale)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def _block(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    # The bias of a convolution is removed again by the batch mean that follows it.
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()
