"""Linearised margins of models: exact cases, brute force, layers, dead units, bad input."""

import inspect
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.losses.input_margin import linearized_margins
from largemargin.losses.layer_margin import layer_margin
from largemargin.measuring.input_margins import InputMarginResult, measure_input_margins


class Net(nn.Module):
    """Images to logits, with an in-place ReLU, batch norm and dropout on the way."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.body = nn.Sequential(nn.Linear(5 * 16, 6), nn.Tanh())
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        h = self.act(self.norm(self.conv(x)))
        return self.fc(self.body(self.drop(h).flatten(1)))


def data(n=11, classes=4, batch=4):
    x, y = torch.rand(n, 2, 4, 4, dtype=torch.float64), torch.arange(n) % classes
    return x, y, list(zip(x.split(batch), y.split(batch), strict=True))


def trained():
    net = Net().double()
    net(torch.randn(8, 2, 4, 4).double())  # batch statistics other than 0 and 1
    return net


def by_hand(after, h, y, p=2.0):
    """(N, C) distances of every rival from explicit Jacobians of what follows the layer."""
    rows = []
    for point, label in zip(h, y, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z: after(z[None])[0], point)
        logits = after(point[None])[0]
        slopes = (jacobian[label] - jacobian).flatten(1)
        lengths = torch.linalg.vector_norm(slopes, {2: 2, 1: math.inf, math.inf: 1}[p], dim=1)
        rows.append((logits[label] - logits) / (lengths + 1e-6))
    return torch.stack(rows).detach()


def without_own(distances, y):
    return distances.scatter(1, y[:, None], torch.inf)


def test_a_linear_model_has_its_exact_distances():
    model = nn.Linear(3, 4).double()
    x, y = torch.randn(20, 3).double(), torch.arange(20) % 4
    found = measure_input_margins(model, [(x, y)], layer_margins=["input"], eps=0.0)
    logits, W = model(x).detach(), model.weight.detach()
    gaps = logits.gather(1, y[:, None]) - logits
    distance = without_own(gaps / torch.cdist(W, W)[y].clamp_min(1e-9), y).amin(1)
    rival = without_own(gaps, y).argmin(1)
    odn = (gaps / torch.cdist(W, W)[y].clamp_min(1e-9)).gather(1, rival[:, None])
    assert found.input is not None
    assert found.layers is not None
    assert found.input.overall.mean == pytest.approx(float(odn.mean()), rel=1e-9)
    assert found.input.overall.minimum == pytest.approx(float(odn.min()), rel=1e-9)
    ratio = float(odn.mean() / odn.std(correction=0))
    assert found.input.overall.ratio == pytest.approx(ratio, rel=1e-9)
    assert found.layers["input"].overall.mean == pytest.approx(float(distance.mean()), rel=1e-9)
    by_class = [float(distance[y == c].mean()) for c in range(4)]
    assert found.layers["input"].classes.mean == pytest.approx(by_class, rel=1e-9)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_layers_against_explicit_jacobians(norm):
    net, (x, y, loader) = trained(), data()
    found = measure_input_margins(net, loader, layer_margins=["norm", "body.0", "input"], norm=norm)
    net.eval()
    first = net.norm(net.conv(x))
    hidden = net.body[0](torch.relu(first).flatten(1))
    after = {
        "norm": (first, lambda h: net.fc(net.body(torch.relu(h).flatten(1)))),
        "body.0": (hidden, lambda h: net.fc(torch.tanh(h))),
        "input": (x, net),
    }
    assert found.layers is not None
    for name, (h, rest) in after.items():
        want = without_own(by_hand(rest, h.detach(), y, norm), y).amin(1)
        got = found.layers[name]
        assert got.rival == "closest of 3"
        assert got.norm == norm
        assert got.overall.mean == pytest.approx(float(want.mean()), rel=1e-7)
        assert got.overall.minimum == pytest.approx(float(want.min()), rel=1e-7)
        assert got.overall.std == pytest.approx(float(want.std(correction=0)), rel=1e-7)


def test_they_are_what_the_losses_train():
    net, (x, y, loader) = trained(), data()
    found = measure_input_margins(net, loader, layer_margins=["input"])
    net.eval()
    leaf = x.clone().requires_grad_()
    margins = linearized_margins(net(leaf), y, leaf).margins.detach()
    assert found.input is not None
    assert found.layers is not None
    assert found.input.overall.mean == pytest.approx(float(margins.mean()), rel=1e-9)
    hinge = layer_margin(net(leaf), y, [leaf], gamma=100.0, eps=1e-6)  # every hinge is open
    mean = found.layers["input"].overall.mean
    assert mean == pytest.approx(float(100 - hinge.detach().mean()), rel=1e-9)


def test_fewer_rivals_never_make_margins_smaller():
    net, (_, _, loader) = trained(), data()
    every = measure_input_margins(net, loader, layer_margins=["input"]).layers["input"]
    one = measure_input_margins(net, loader, layer_margins=["input"], topk=1)
    assert one.layers["input"].overall.mean >= every.overall.mean
    assert one.layers["input"].rival == "closest of 1"
    assert one.layers["input"].overall.mean == one.input.overall.mean


def test_batches_do_not_matter_and_the_model_is_left_alone():
    net = trained().train()
    net.norm.eval()
    x, y, loader = data()
    modes = [module.training for module in net.modules()]
    state = {name: each.clone() for name, each in net.state_dict().items()}
    whole = measure_input_margins(net, [(x, y)], layer_margins=["body"])
    parts = measure_input_margins(net, loader, layer_margins=["body"])
    assert whole.input.overall.mean == pytest.approx(parts.input.overall.mean, rel=1e-12)
    assert whole.layers["body"].classes.mean == pytest.approx(parts.layers["body"].classes.mean)
    assert [module.training for module in net.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(bool((state[name] == each).all()) for name, each in net.state_dict().items())
    assert not net.conv._forward_hooks
    assert not net.fc._forward_hooks


def test_only_the_first_samples():
    net, (x, y, loader) = trained(), data()
    few = measure_input_margins(net, loader, max_samples=5).input
    assert few.samples == 5
    same = measure_input_margins(net, [(x[:5], y[:5])]).input
    assert few.overall.mean == pytest.approx(same.overall.mean, rel=1e-12)


def test_units_before_normalisation():
    net, (x, y, _) = trained(), data()
    std, mean = torch.tensor([[0.5, 0.25], [0.1, 0.2]]).double()
    mean = mean.view(1, 2, 1, 1)
    given = [((x - mean) / std.view(1, 2, 1, 1), y)]
    raw = measure_input_margins(net, given, normalization=((0.1, 0.2), (0.5, 0.25)), eps=0.0)
    leaf = x.clone().requires_grad_()
    logits = net.eval()((leaf - mean) / std.view(1, 2, 1, 1))
    want = linearized_margins(logits, y, leaf, eps=0.0).margins.detach()
    assert raw.input.overall.mean == pytest.approx(float(want.mean()), rel=1e-9)


def test_dead_samples_are_counted_not_averaged():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2)).double()
    model[0].weight.data.copy_(torch.eye(2))
    model[2].weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    model[2].bias.data.zero_()
    x = torch.tensor([[3.0, 1.0], [-1.0, -1.0], [3.0, 1.0]]).double()
    loader = [(x, torch.tensor([0, 0, 0]))]
    found = measure_input_margins(model, loader).input
    assert (found.samples, found.dead, found.overall.count) == (3, 1, 2)
    notes = lm.measure(model, loader, input_margins=True).notes
    assert any("1 of 3 samples have no linearised margin" in note for note in notes)
    assert found.overall.mean == pytest.approx(2 / math.sqrt(2), rel=1e-5)
    assert math.isnan(found.classes.mean[1])


def test_token_models_have_margins_at_a_layer():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.fc = nn.Linear(3, 2)

        def forward(self, ids, scale=1.0):
            return {"logits": self.fc(self.embed(ids).tanh().mean(1) * scale)}

    net = Words().double()
    ids, y = torch.randint(0, 7, (6, 4)), torch.arange(6) % 2
    loader = [{"ids": ids, "labels": y}]
    with pytest.raises(LargeMarginError, match=r"layer_margins=\['embeddings'\]"):
        measure_input_margins(net, loader)
    from largemargin.measuring.input_margins import MarginCollector
    from largemargin.measuring.input_space import InputSpace, read_columns
    from largemargin.measuring.probe import Probe

    space = InputSpace(Probe(net))
    collector = MarginCollector(space, input_margins=False, layer_margins=["embed"])
    columns = read_columns(collector, loader, None, None, progress=False)
    found = collector.result(columns, [], 50).layers["embed"]
    h = net.embed(ids).detach()
    want = without_own(by_hand(lambda z: net.fc(z.tanh().mean(1)), h, y), y).amin(1)
    assert found.overall.mean == pytest.approx(float(want.mean()), rel=1e-9)


def test_a_layer_may_be_called_like_another_column():
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    layers = OrderedDict(label=nn.Linear(3, 4), index=nn.Tanh(), head=nn.Linear(4, 2))
    net, plain = nn.Sequential(layers), nn.Sequential(*layers.values())
    found = measure_input_margins(net, [(x, y)], layer_margins=["label", "index"]).layers
    want = measure_input_margins(plain, [(x, y)], layer_margins=["0", "1"]).layers
    assert [found[n].overall for n in ("label", "index")] == [want[n].overall for n in ("0", "1")]


def test_settings_that_are_not_given():
    taken = inspect.signature(measure_input_margins).parameters.items()
    given = {name: each.default for name, each in taken if each.default is not each.empty}
    wanted = {"layer_margins": (), "norm": 2, "eps": 1e-6, "bins": 50}
    nothing = ("layer", "topk", "max_samples", "normalization", "device")
    assert given == {**wanted, **dict.fromkeys(nothing), "progress": False}
    found = measure_input_margins(nn.Linear(2, 2), [(torch.rand(3, 2), torch.tensor([0, 1, 1]))])
    assert found.input is not None
    assert found.input.samples == 3


def test_results_come_back_from_json():
    net, (_, _, loader) = trained(), data()
    found = measure_input_margins(net, loader, layer_margins=["body"])
    assert InputMarginResult.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layer_margins": "body"}, "list of names"),
        ({"layer_margins": ["nowhere"]}, "has no layer"),
        ({"norm": 3}, "norm"),
        ({"topk": 0}, "topk"),
        ({"normalization": (0.0, (1.0, 0.0))}, "positive"),
        ({"normalization": (0.0, (1.0, 1.0, 1.0))}, "channels"),
    ],
)
def test_bad_settings(how, message):
    net, (_, _, loader) = trained(), data()
    with pytest.raises(LargeMarginError, match=message):
        measure_input_margins(net, loader, **how)


class Whole(nn.Module):
    def forward(self, x):
        return x.long()


def test_bad_data():
    net, (x, y, _) = trained(), data()
    for loader, message in (
        ([], "empty"),
        ([x], "without labels"),
        ([(x, y + 3)], "label"),
        ([(x * math.nan, y)], "finite"),
    ):
        with pytest.raises(LargeMarginError, match=message):
            measure_input_margins(net, loader)
    lookup = [nn.Flatten(), Whole(), nn.Embedding(2, 3), nn.Flatten(), nn.Linear(96, 4)]
    with pytest.raises(LargeMarginError, match="'1' must give a floating point tensor"):
        measure_input_margins(nn.Sequential(*lookup).double(), [(x, y)], layer_margins=["1"])
    twice = nn.Sequential(nn.Flatten(), net.act, nn.Linear(32, 4), net.act, nn.Linear(4, 4))
    with pytest.raises(LargeMarginError, match="several times"):
        measure_input_margins(twice.double(), [(x, y)], layer_margins=["1"])
