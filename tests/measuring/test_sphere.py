"""Three dimensions: points on a sphere."""

import math
import sys

import pytest
import torch
from torch import nn

from largemargin.errors import LargeMarginError
from largemargin.measuring import Geometry, measure, measure_arrays


def test_points_and_angles_are_those_of_the_features() -> None:
    weight, labels = torch.randn(4, 3).double(), torch.arange(20) % 4
    features = weight[labels] + torch.randn(20, 3).double()
    g = measure_arrays(features, labels, weight, sphere=True)
    assert g.sphere is not None
    points = torch.tensor(g.sphere.points, dtype=torch.float64)
    torch.testing.assert_close(points, features / features.norm(dim=1, keepdim=True))
    prototypes = torch.tensor(g.sphere.prototypes, dtype=torch.float64)
    torch.testing.assert_close(prototypes, weight / weight.norm(dim=1, keepdim=True))
    table = torch.rad2deg(torch.acos((points @ prototypes.T).clamp(-1, 1)))
    own = table[range(20), labels]
    others = table.scatter(1, labels[:, None], math.inf).amin(1)
    assert g.sphere.angles == pytest.approx(own.tolist(), abs=1e-5)
    assert g.sphere.rival_angles == pytest.approx(others.tolist(), abs=1e-5)
    assert g.sphere.labels == tuple(labels.tolist())
    assert g.sphere.predicted == tuple((features @ weight.T).argmax(1).tolist())
    assert g.sphere.index == tuple(range(20))
    assert Geometry.from_json(g.to_json()) == g
    assert measure_arrays(features, labels, weight).sphere is None


def test_a_model_with_three_features() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4)).double()
    x, y = torch.randn(30, 5).double(), torch.arange(30) % 4
    whole = measure(net, [(x, y)], sphere=True)
    parts = measure(net, list(zip(x.split(7), y.split(7), strict=True)), sphere=True)
    assert whole.sphere is not None
    assert parts.sphere is not None
    assert parts.sphere.labels == whole.sphere.labels
    with torch.no_grad():
        want = nn.functional.normalize(net[0](x))
    torch.testing.assert_close(torch.tensor(parts.sphere.points, dtype=torch.float64), want)
    assert whole.compactness is None


def test_many_samples_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["largemargin.measuring.feature_geometry"], "POINTS", 12)
    features, labels = torch.randn(40, 3), torch.arange(40) % 2
    g = measure_arrays(features, labels, torch.eye(2, 3), sphere=True)
    assert g.sphere is not None
    assert g.sphere.samples == 40
    assert len(g.sphere.points) == len(set(g.sphere.index)) == 12
    assert list(g.sphere.index) == sorted(g.sphere.index)
    assert "the sphere shows 12 of 40 samples, seed 0" in g.notes
    kept = features[list(g.sphere.index)].double()
    unit = kept / kept.norm(dim=1, keepdim=True)
    torch.testing.assert_close(torch.tensor(g.sphere.points, dtype=torch.float64), unit)
    again = measure_arrays(features, labels, torch.eye(2, 3), sphere=True, batch_size=7)
    assert again.sphere == g.sphere


def test_zero_vectors_have_no_direction() -> None:
    features = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    g = measure_arrays(features, torch.tensor([0, 1]), torch.eye(2, 3), sphere=True)
    assert g.sphere is not None
    assert g.sphere.points == ((0.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    assert math.isnan(g.sphere.angles[0])
    assert math.isnan(g.sphere.rival_angles[0])
    assert (g.sphere.angles[1], g.sphere.rival_angles[1]) == (0.0, pytest.approx(90.0))
    assert any("no place on the sphere" in note for note in g.notes)
    g = measure_arrays(
        features, torch.tensor([0, 1]), torch.eye(2, 3) * torch.eye(3)[0], sphere=True
    )
    assert g.sphere is not None
    assert g.sphere.prototypes == ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert math.isnan(g.sphere.angles[1])
    assert g.sphere.rival_angles[1] == pytest.approx(90.0)


@pytest.mark.parametrize("dim", [2, 4])
def test_other_dimensions_are_refused(dim: int) -> None:
    with pytest.raises(LargeMarginError, match=f"these have {dim}. Train the model with a feature"):
        measure_arrays(torch.ones(2, dim), torch.tensor([0, 1]), torch.eye(2, dim), sphere=True)
    with pytest.raises(LargeMarginError, match=r"lm\.measuring\.embed"):
        measure(nn.Linear(dim, 3), [(torch.ones(2, dim), torch.tensor([0, 1]))], sphere=True)
