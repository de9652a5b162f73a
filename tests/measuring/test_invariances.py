"""What must not change: rotations, names of classes, order, size, memory."""

import math
from pathlib import Path

import pytest
import torch
from measuring.alike import compare_parts, same
from torch import Tensor, nn

from largemargin.geometry import rescale_network
from largemargin.measuring import Geometry, measure, measure_arrays

N, C, D = 60, 4, 6


@pytest.fixture
def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = torch.randn(C, D, dtype=torch.float64)
    labels = torch.randint(C, (N,))
    return weight[labels] + torch.randn(N, D).double(), labels, weight, torch.randn(C).double()


def test_rotations_change_nothing(problem: tuple[Tensor, ...]) -> None:
    features, labels, weight, bias = problem
    turn = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64)).Q
    straight = measure_arrays(features, labels, weight, bias, pairwise=True)
    turned = measure_arrays(features @ turn, labels, weight @ turn, bias, pairwise=True)
    same(turned, straight, rtol=1e-7)


def test_names_of_classes_and_order_of_samples_change_nothing(problem: tuple[Tensor, ...]) -> None:
    features, labels, weight, bias = problem
    first = measure_arrays(features, labels, weight, bias, pairwise=True)
    renamed, order = torch.randperm(C), torch.randperm(N)
    old = renamed.argsort()
    second = measure_arrays(
        features[order], renamed[labels[order]], weight[old], bias[old], pairwise=True
    )
    for name in ("raw", "cosine", "distance"):
        one, other = first.margins[name], second.margins[name]
        compare_parts(other.overall.to_dict(), one.overall.to_dict(), 1e-9)
        assert [other.classes.mean[int(c)] for c in renamed] == pytest.approx(one.classes.mean)
    for part in ("variance", "collapse", "calibration", "errors", "feature_norm", "softmax_bias"):
        one, other = getattr(first, part), getattr(second, part)
        compare_parts(other.to_dict(), one.to_dict(), 1e-9, part)
    assert first.compactness is not None
    assert second.compactness is not None
    assert [second.compactness.dispersion[int(c)] for c in renamed] == pytest.approx(
        first.compactness.dispersion
    )
    assert second.compactness.separation == pytest.approx(first.compactness.separation)
    assert second.prototypes.class_margin == pytest.approx(first.prototypes.class_margin)
    assert [int(order[each.index]) for each in second.worst] == [each.index for each in first.worst]


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_rescaling_the_network(factor: float) -> None:
    """T_alpha (NGY-P4.4): distances are multiplied, ratios and predictions stay."""
    net = nn.Sequential(nn.Linear(5, D), nn.ReLU(), nn.Linear(D, C)).double()
    data = [(torch.randn(40, 5).double(), torch.arange(40) % C)]
    before = measure(net, data, pairwise=True, radius=1.0)
    weight, bias, head_bias = rescale_network(
        net[0].weight.data, net[0].bias.data, net[2].bias.data, factor=factor
    )
    net[0].weight.data, net[0].bias.data, net[2].bias.data = weight, bias, head_bias
    after = measure(net, data, pairwise=True, radius=factor)
    assert after.accuracy == before.accuracy
    assert [each.predicted for each in after.worst] == [each.predicted for each in before.worst]
    scaled = (
        lambda g: g.margins["raw"].overall.mean,
        lambda g: g.margins["distance"].overall.minimum,
        lambda g: g.margins["distance"].overall.std,
        lambda g: g.feature_norm.mean,
        lambda g: g.compactness.largest_dispersion,
        lambda g: g.compactness.separation,
        lambda g: min(g.compactness.signed_margin),
        lambda g: g.centers.smallest_distance,
        lambda g: math.sqrt(g.variance.within),
    )
    for quantity in scaled:
        assert quantity(after) == pytest.approx(factor * quantity(before), rel=1e-9)
    kept = (
        lambda g: g.margins["distance"].overall.ratio,
        lambda g: g.compactness.ideal_ratio,
        lambda g: g.compactness.inside_radius,
        lambda g: min(g.compactness.signed_margin) / g.compactness.largest_dispersion,
        lambda g: g.variance.ratio,
        lambda g: g.collapse.variability,
        lambda g: g.collapse.duality,
        lambda g: g.errors.auroc["lead_distance"],
        lambda g: g.prototypes.class_margin,
    )
    for quantity in kept:
        assert quantity(after) == pytest.approx(quantity(before), rel=1e-9)
    assert after.loss != pytest.approx(before.loss)


def test_cosine_heads_do_not_see_lengths(problem: tuple[Tensor, ...]) -> None:
    features, labels, weight, _ = problem
    lengths = torch.rand(C, 1).double() + 0.5
    first = measure_arrays(features, labels, weight, similarity="cosine", scale=4.0)
    second = measure_arrays(features, labels, lengths * weight, similarity="cosine", scale=4.0)
    compare_parts(
        {name: each.to_dict() for name, each in second.margins.items()},
        {name: each.to_dict() for name, each in first.margins.items()},
        1e-9,
    )


def test_a_file_holds_what_memory_holds(tmp_path: Path) -> None:
    net = nn.Linear(5, 3)
    data = [(torch.randn(9, 5), torch.arange(9) % 3) for _ in range(4)]
    inside = measure(net, data, pairwise=True)
    folder = tmp_path / "features"
    assert measure(net, data, pairwise=True, store=folder) == inside
    assert list(folder.iterdir()) == []
    double = [(x.double(), y) for x, y in data]
    wide = measure(net.double(), double, pairwise=True)
    assert measure(net, double, pairwise=True, store=folder) == wide
    assert measure(net, double, pairwise=False, store=folder).compactness is None


def test_without_pairs_the_rest_is_the_same(problem: tuple[Tensor, ...]) -> None:
    features, labels, weight, bias = problem
    with_pairs = measure_arrays(features, labels, weight, bias, pairwise=True).to_dict()
    without = measure_arrays(features, labels, weight, bias).to_dict()
    assert with_pairs.pop("compactness") is not None
    assert without.pop("compactness") is None
    assert without["collapse"].pop("nearest_center") == "NaN"
    assert with_pairs["collapse"].pop("nearest_center") != "NaN"
    assert with_pairs == without


def test_a_result_is_frozen_and_hashable(problem: tuple[Tensor, ...]) -> None:
    features, labels, weight, bias = problem
    g = measure_arrays(features, labels, weight, bias)
    with pytest.raises(AttributeError):
        g.accuracy = 1.0  # type: ignore[misc]
    assert hash(g) == hash(Geometry.from_json(g.to_json()))
