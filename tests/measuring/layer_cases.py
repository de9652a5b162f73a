"""Networks and data for tests of layers."""

from torch import Tensor, nn

from largemargin.measuring import Geometry, LayerGeometry

N, C = 36, 4


class Net(nn.Module):
    """A small convolutional network: images, blocks of channels, a hidden layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.first = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh())
        self.second = nn.Sequential(nn.Conv2d(5, 7, 3, padding=1, stride=2), nn.ReLU(inplace=True))
        self.hidden = nn.Linear(7, 6)
        self.fc = nn.Linear(6, C)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.second(self.first(self.stem(x)))
        return self.fc(self.hidden(maps.mean((2, 3))).relu_())


def layers_of(g: Geometry) -> dict[str, LayerGeometry]:
    assert g.layers is not None
    return {each.name: each for each in g.layers}
