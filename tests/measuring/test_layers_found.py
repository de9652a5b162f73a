"""Which layers can be measured: pooling, sequences, blocks of a network, bad layers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from measuring.layer_cases import C, N, layers_of
from torch import Tensor, nn

from largemargin.errors import LargeMarginError
from largemargin.measuring import measure
from largemargin.measuring.layers import block_names, pool_output


@pytest.mark.parametrize(
    ("module", "shape", "how", "dims"),
    [
        (nn.Linear(4, 4), (3, 4), "none", ()),
        (nn.Conv2d(4, 4, 1), (3, 4, 2, 5), "mean over space", (2, 3)),
        (nn.Conv3d(4, 4, 1), (3, 4, 2, 5, 2), "mean over space", (2, 3, 4)),
        (nn.TransformerEncoderLayer(4, 1), (3, 5, 4), "mean over positions", (1,)),
        (nn.Conv1d(4, 4, 1), (3, 4, 5), "mean over positions, the last dimension", (2,)),
        (
            nn.Sequential(nn.Conv1d(5, 5, 1), nn.Linear(4, 4)),
            (3, 5, 4),
            "mean over positions",
            (1,),
        ),
        (
            nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU()),
            (3, 4, 5),
            "mean over positions, the last dimension",
            (2,),
        ),
    ],
)
def test_pooling(
    module: nn.Module, shape: tuple[int, ...], how: str, dims: tuple[int, ...]
) -> None:
    output = torch.randn(shape)
    rows, said = pool_output(output, module)
    assert said == how
    torch.testing.assert_close(rows, output.mean(dims) if dims else output)
    half, _ = pool_output(output.half(), module)
    assert half.dtype == (torch.float32 if dims else torch.float16)


class Words(nn.Module):
    """Tokens, a sequence of vectors, a head on all positions or on their mean."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.positions = positions
        self.embed, self.mix, self.fc = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, C)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.mix(self.embed(ids))
        return self.fc(mixed if self.positions else mixed.mean(1))


def test_sequences() -> None:
    ids = torch.randint(9, (N, 5))
    pairs = Words(positions=False)
    g = measure(pairs, [(ids, torch.arange(N) % C)], layers=["mix"], pairwise=True)
    layer = layers_of(g)["mix"]
    assert (layer.shape, layer.dim, layer.pooling) == ((5, 4), 4, "mean over positions")
    assert layer.variance == g.variance  # the head reads that mean too
    labels = torch.randint(C, (N, 5))
    labels[0, :3] = -100
    g = measure(Words(positions=True), [(ids, labels)], layers=["mix"], pairwise=True)
    layer = layers_of(g)["mix"]
    assert layer.feature_norm.count == g.samples == 5 * N - 3
    assert layer.pooling == "none, one row per position"
    assert layer.variance == g.variance


class Many(nn.Module):
    """A block that gives several things."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Odd(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any] = lambda x: x, times: int = 1) -> None:
        super().__init__()
        self.odd, self.never, self.fc = Many(make), nn.Linear(3, 3), nn.Linear(3, C)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            self.odd(x)
        return self.fc(x)


X, Y = torch.randn(8, 3), torch.arange(8) % C


@pytest.mark.parametrize(
    ("net", "layers", "message"),
    [
        (Odd(), ["od"], "has no layer 'od'. Closest: 'odd'"),
        (Odd(), ["never"], "'never' cannot be measured: the model does not call it"),
        (Odd(times=2), ["odd"], "'odd' cannot be measured: the model calls it several times"),
        (Odd(lambda x: "text"), ["odd"], "must give a floating point tensor, but it gives str"),
        (Odd(lambda x: x.long()), ["odd"], "a tensor of torch.int64"),
        (Odd(lambda x: x.mean()), ["odd"], r"\(8, ...\), but the shape of its output is \(\)"),
        (Odd(lambda x: x[:, 0]), ["odd"], r"but the shape of its output is \(8,\)"),
        (Odd(lambda x: x.T), ["odd"], r"but the shape of its output is \(3, 8\)"),
        (Odd(lambda x: x / 0), ["odd"], "features at layer 'odd' must be finite, but sample 0"),
        (Odd(), "odd", r"Write \['odd'\]"),
        (Odd(), ["odd", "odd"], "layers must differ"),
        (Odd(), [3], "layers must be names, but int"),
        (Odd(), {"odd": 3}, "map names to functions"),
        (Odd(), {"odd": lambda x: x[:2]}, r"must return floating point \(8, D\), but it returns"),
        (nn.Linear(3, C), "blocks", "no layers before its head"),
    ],
)
def test_layers_that_cannot_be_measured(net: nn.Module, layers: Any, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        measure(net, [(X, Y)], layers=layers)
    assert sum(len(m._forward_hooks) for m in net.modules()) == 0
    with pytest.raises(LargeMarginError, match=r"empty|no layer|layers|names|Write"):
        measure(net, [], layers=layers)


def test_features_of_changing_width_are_refused() -> None:
    widths: Iterator[int] = iter((3, 2))
    net = Odd(lambda x: x[:, : next(widths)])
    with pytest.raises(LargeMarginError, match="gave 3 features at first and 2 now"):
        measure(net, [(X, Y), (X, Y)], layers=["odd"])


def test_what_is_doubtful_is_said() -> None:
    g = measure(Odd(lambda x: (x, x + 1)), [(X, Y)], layers=["odd"])
    assert "layer 'odd': it gives 2 tensors; the first one is measured" in g.notes
    last = Odd(lambda x: x[:, None, None].expand(-1, 2, 2, -1))
    g = measure(last, [(X, Y)], layers=["odd"])
    assert any("may have channels last" in note for note in g.notes)
    mine = measure(last, [(X, Y)], layers={"odd": lambda x: x.mean((1, 2))}, pairwise=True)
    assert layers_of(mine)["odd"].variance == mine.variance
    assert not any("channels" in note for note in mine.notes)


def test_one_class_and_a_class_without_samples() -> None:
    g = measure(Odd(), [(X, Y * 0)], layers=["odd"], pairwise=True)
    layer = layers_of(g)["odd"]
    assert (layer.margins, layer.collapse) == (None, None)
    assert math.isnan(layer.accuracy)
    assert any("layer 'odd': margins to class means need" in note for note in g.notes)
    str(g)
    some = torch.tensor([0, 3] * 4)
    g = measure(Odd(), [(X, some)], layers=["odd"], pairwise=True)
    layer = layers_of(g)["odd"]
    assert layer.margins is not None
    assert [math.isnan(each) for each in layer.margins["raw"].classes.mean] == [0, 1, 1, 0]
    means = torch.stack([X[some == c].mean(0) for c in (0, 3)]).double()
    nearest = torch.cdist(X.double(), means).argmin(1) * 3
    assert layer.accuracy == float((nearest == some).double().mean())


class Stages(nn.Module):
    """As transformers have it: a list inside an encoder beside an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"patch": nn.Linear(3, 3)})
        encoder = nn.Module()
        encoder.layer = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in "abc"])
        self.encoder, self.fc = encoder, nn.Linear(3, C)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.encoder.layer[:2]:
            x = each(x)
        return self.fc(x)


def test_blocks_that_do_not_run_are_left_out() -> None:
    net = Stages()
    names = tuple(f"encoder.layer.{each}" for each in range(3))
    assert block_names(net, net.fc) == names
    g = measure(net, [(X, Y)], layers="blocks")
    assert tuple(layers_of(g)) == names[:2]
    assert any("'encoder.layer.2' is left out: the model does not call it" in n for n in g.notes)


def stack(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(blocks)))


@pytest.mark.parametrize(
    ("net", "want"),
    [
        (nn.Sequential(stack(3), stack(1), nn.Linear(3, 2)), ("0.0", "0.1", "0.2")),
        (nn.Sequential(stack(3), stack(2), nn.Linear(3, 2)), ("0", "1")),
        (nn.Sequential(stack(3), stack(1), stack(1), nn.Linear(3, 2)), ("0", "1", "2")),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2)), ("1", "2")),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Linear(2, 2)),
            ("2",),
        ),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Linear(2, 2)), ("0.1",)),
    ],
)  # fmt: skip
def test_blocks_of_plain_networks(net: nn.Sequential, want: tuple[str, ...]) -> None:
    assert block_names(net, net[-1]) == want
