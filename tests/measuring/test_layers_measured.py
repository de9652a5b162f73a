"""Measurements at intermediate layers: brute force, invariances, results."""

import math
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from measuring.alike import compare_parts, same
from measuring.layer_cases import C, N, Net, layers_of
from torch import Tensor, nn

from largemargin.measuring import Geometry, compare_geometry, measure
from largemargin.measuring.layers import block_names


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return torch.rand(N, 2, 6, 5).double(), torch.arange(N) % C


def batches(x: Tensor, y: Tensor, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def by_hand(net: Net, x: Tensor) -> dict[str, Tensor]:
    """Features of layers computed without hooks."""
    with torch.no_grad():
        stem = net.stem(x)
        first = net.first(stem)
        second = net.second(first)
        hidden = net.hidden(second.mean((2, 3)))
    maps = {"stem": stem, "first": first, "second": second}
    return {**{name: each.mean((2, 3)) for name, each in maps.items()}, "hidden": hidden}


NAMES = ["stem", "first", "second", "hidden"]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_all_pairs(name: str, data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    net = Net()
    layer = layers_of(measure(net, batches(x, y), layers=NAMES, pairwise=True, radius=0.3))[name]
    q = by_hand(net, x)[name]
    means = torch.stack([q[y == c].mean(0) for c in range(C)])
    away = torch.cdist(q, means)
    own = away.gather(1, y[:, None])[:, 0]
    # Signed distance to the plane halfway between two means, pair by pair.
    distance, raw, cosine = (torch.full((N,), math.inf).double() for _ in range(3))
    middle = means.mean(0)
    angle = nn.functional.cosine_similarity((q - middle)[:, None], means - middle, dim=2)
    for i in range(N):
        for c in range(C):
            if c != y[i]:
                gap = (away[i, c] ** 2 - own[i] ** 2) / 2
                raw[i] = min(raw[i], gap)
                distance[i] = min(distance[i], gap / (means[c] - means[y[i]]).norm())
                cosine[i] = min(cosine[i], angle[i, y[i]] - angle[i, c])
    assert layer.margins is not None
    for kind, want in (("distance", distance), ("raw", raw), ("cosine", cosine)):
        found = layer.margins[kind]
        assert found.overall.mean == pytest.approx(float(want.mean()), rel=1e-9)
        assert found.overall.minimum == pytest.approx(float(want.min()), rel=1e-9)
        assert found.classes.minimum[2] == pytest.approx(float(want[y == 2].min()), rel=1e-9)
    assert layer.accuracy == float((away.argmin(1) == y).double().mean())
    assert layer.left_out_accuracy == left_out(q, y)
    within = float((q - means[y]).square().sum(1).mean())
    between = float((means - q.mean(0)).square().sum(1).mean())  # classes are of one size
    assert layer.variance.within == pytest.approx(within)
    assert layer.variance.between == pytest.approx(between)
    apart = torch.cdist(means, means)
    found_apart = torch.tensor(layer.centers.distances, dtype=torch.float64)
    torch.testing.assert_close(found_apart, apart, rtol=1e-9, atol=1e-9)
    assert layer.compactness is not None
    table = torch.cdist(q, q)
    largest = max(float(table[y == c][:, y == c].max()) for c in range(C))
    assert layer.compactness.largest_dispersion == pytest.approx(largest)
    other = y[:, None] != y
    assert layer.compactness.separation == pytest.approx(float(table[other].min()))
    assert layer.compactness.inside_radius == float((own <= 0.3).double().mean())
    assert min(layer.compactness.signed_margin) == pytest.approx(float(distance.min()))
    assert layer.collapse is not None
    centred = means - middle
    inside = (q - means[y]).T @ (q - means[y]) / N
    nc1 = float(torch.trace(inside @ torch.linalg.pinv(centred.T @ centred / C, rtol=1e-12)) / C)
    assert layer.collapse.variability == pytest.approx(nc1, rel=1e-6)
    assert math.isnan(layer.collapse.duality)
    with torch.no_grad():
        predicted = net.eval()(x).argmax(1)
    assert layer.collapse.nearest_center == float((away.argmin(1) != predicted).double().mean())
    assert layer.feature_norm.mean == pytest.approx(float(q.norm(dim=1).mean()))
    assert layer.prototypes == "class means of these samples"


def left_out(q: Tensor, y: Tensor) -> float:
    """Accuracy of the nearest class mean, means made anew for every sample."""
    right = 0
    for i in range(len(q)):
        rest = torch.arange(len(q)) != i
        means = torch.stack([q[rest & (y == c)].mean(0) for c in range(C)])
        right += int((q[i] - means).norm(dim=1).argmin()) == int(y[i])
    return right / len(q)


def test_the_head_is_measured_as_without_layers(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    alone = measure(net, batches(*data), pairwise=True)
    beside = measure(net, batches(*data), pairwise=True, layers=NAMES).to_dict()
    assert alone.layers is None
    assert beside.pop("layers")
    assert beside == {name: each for name, each in alone.to_dict().items() if name != "layers"}
    assert sum(len(m._forward_hooks) for m in net.modules()) == 0


def test_other_passes_of_the_model_are_not_looked_at(data: tuple[Tensor, Tensor]) -> None:
    """Input margins and other data run the model too, between the batches and after them."""
    net = Net()
    alone = measure(net, batches(*data), layers=NAMES, pairwise=True)
    more = measure(
        net,
        batches(*data),
        layers=NAMES,
        pairwise=True,
        input_margins=True,
        layer_margins=["first"],
        ood=[torch.randn(5, 2, 6, 5).double()],
    )
    assert more.layers == alone.layers
    assert more.layer_margins is not None


def test_batches_and_files_do_not_matter(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    net = Net()
    whole = measure(net, [data], layers=NAMES, pairwise=True)
    same(measure(net, batches(*data, 5), layers=NAMES, pairwise=True, store=tmp_path), whole)
    assert list(tmp_path.iterdir()) == []


def test_without_pairs_no_features_are_kept(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    full = measure(net, batches(*data), layers=NAMES, pairwise=True)
    g = measure(net, batches(*data), layers=NAMES)
    for name, layer in layers_of(g).items():
        other = layers_of(full)[name]
        assert (layer.margins, layer.compactness) == (None, None)
        assert math.isnan(layer.accuracy)
        assert math.isnan(layer.left_out_accuracy)
        assert layer.variance == other.variance
        assert layer.centers == other.centers
        assert layer.collapse is not None
        assert other.collapse is not None
        assert layer.collapse.variability == other.collapse.variability
    assert [note for note in g.notes if "pairwise=True" in note]


def test_rotations_and_names_of_classes_change_nothing(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    net = Net()
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    straight = layers_of(measure(net, [(x, y)], layers=["hidden"], pairwise=True))["hidden"]
    # Turned by a pooling of our own; the model itself stays.
    turned = measure(net, [(x, y)], layers={"hidden": lambda q: q @ turn}, pairwise=True)
    made = layers_of(turned)["hidden"]
    assert (made.pooling, straight.pooling) == ("given", "none")
    one, other = ({**each.to_dict(), "pooling": ""} for each in (straight, made))
    compare_parts(other, one, 1e-7)
    renamed, order = torch.randperm(C), torch.randperm(N)
    moved = measure(net, [(x[order], renamed[y[order]])], layers=["hidden"], pairwise=True)
    again = layers_of(moved)["hidden"]
    assert again.margins is not None
    assert straight.margins is not None
    for kind, margins in straight.margins.items():
        found = again.margins[kind]
        compare_parts(found.overall.to_dict(), margins.overall.to_dict(), 1e-9)
        assert [found.classes.mean[int(c)] for c in renamed] == pytest.approx(margins.classes.mean)
    assert again.accuracy == straight.accuracy
    assert again.left_out_accuracy == straight.left_out_accuracy
    assert again.variance.ratio == pytest.approx(straight.variance.ratio)


def test_means_far_from_the_origin_keep_their_digits(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    near, far = (
        layers_of(measure(net, [data], layers={"hidden": move}, pairwise=True))["hidden"]
        for move in (lambda q: q, lambda q: q + 1e6)
    )
    assert near.margins is not None
    assert far.margins is not None
    for kind in ("distance", "cosine"):
        want = near.margins[kind].overall
        assert far.margins[kind].overall.mean == pytest.approx(want.mean, rel=1e-6, abs=1e-6)
    assert far.accuracy == near.accuracy


def test_results_go_to_json_and_text_and_compare(data: tuple[Tensor, Tensor]) -> None:
    net, other = Net(), Net()
    a = measure(net, [data], layers=NAMES, pairwise=True)
    b = measure(other, [data], layers=NAMES[1:], pairwise=True)
    assert Geometry.from_json(a.to_json()) == a
    lines = str(a).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("layers, by class means"))
    assert [line.split()[0] for line in lines[start + 1 : start + 5]] == NAMES
    assert {len(line) for line in lines[start : start + 5]} == {len(lines[start])}
    assert f"{100 * layers_of(a)['stem'].accuracy:.2f} %" in lines[start + 1]
    long = "a_layer_of_a_name_longer_than_all_words_beside_it"
    named = nn.Sequential(OrderedDict([("flat", nn.Flatten()), (long, nn.Linear(60, 5)),
                                       ("fc", nn.Linear(5, C))])).double()  # fmt: skip
    lines = str(measure(named, [data], layers=["flat", long])).splitlines()
    (heads, *rows) = next(
        lines[i : i + 3] for i, line in enumerate(lines) if line.startswith("layers")
    )
    assert {len(line) for line in rows} == {len(heads)}
    assert rows[1].split()[:2] == [long, "5"]
    found = compare_geometry(a, b)
    path = "layers.second.variance.ratio"
    assert found.quantities[path].first == layers_of(a)["second"].variance.ratio
    assert found.quantities[path].second == layers_of(b)["second"].variance.ratio
    assert "layers.stem.variance.ratio" not in found.quantities
    assert "second: variance between / within" in str(found)
    assert any("layers differ" in note for note in found.notes)


def test_blocks_are_found(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    assert block_names(net, net.fc) == ("first", "second")
    g = measure(net, [data], layers="blocks")
    assert list(layers_of(g)) == ["first", "second"]
