"""Feature scales: of empty batches, of several ranks, of features that are all but 0."""

import importlib

import pytest
import torch

import largemargin as lm
from largemargin.ops import distributed, norms
from largemargin.ops.norms import EPS

module = importlib.import_module("largemargin.losses.discriminative")

FEATURES = torch.tensor([[3.0, 4.0], [5.0, 0.0]])


def never(*_):
    raise AssertionError("the ranks were asked")


def test_scales_of_few_numbers():
    assert module.feature_scale(torch.zeros(0, 3)) == 0
    assert module.feature_scale(torch.full((4, 1), -2.0)) == 2


def test_empty_batches_have_a_scale_on_accelerators_too(monkeypatch):
    """Norms by way of the largest entry, of which no entries have none."""

    def norm(x, dim, keepdim):
        found = norms._scaled_norm(x, dim)
        return found if keepdim else found.squeeze(dim)

    monkeypatch.setattr(norms, "_norm", norm)
    assert module.feature_scale(torch.zeros(0, 3)) == 0
    assert module.feature_scale(FEATURES) == 5


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_join_their_scales(monkeypatch, rank):
    """Three with the same batch have the scale of one; each writes to its own place."""

    def all_reduce_sum(x):
        if x.dim() == 0:
            return 3 * x
        assert x.shape == (3,)
        assert x.nonzero().flatten().tolist() == [rank]
        return x[rank].expand(3)

    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(distributed.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed._AllReduceSum, "apply", all_reduce_sum)
    assert module.feature_scale(FEATURES, sync=True).item() == pytest.approx(5)


def test_ranks_are_only_asked_where_there_are_some(monkeypatch):
    monkeypatch.setattr(distributed._AllReduceSum, "apply", never)
    monkeypatch.setattr(distributed.dist, "get_rank", never)
    assert module.feature_scale(FEATURES, sync=True) == 5
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    assert module.feature_scale(FEATURES) == 5
    assert module._typical_distance(FEATURES).item() == pytest.approx(20**0.5)


def test_features_that_are_all_but_zero_are_zero_in_units_of_their_scale():
    """And so is the bias: there is no unit to measure it in."""
    loss = lm.StableDiscriminative(2, 2)
    bias, labels = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0])
    for size in (0.0, EPS / 2, EPS):
        features = torch.tensor([[size, 0.0]], dtype=torch.float64)
        scaled, offset = loss._in_units(features, torch.eye(2).double(), labels, bias)
        assert scaled.tolist() == [[0, 0]]
        assert offset.tolist() == [0, 0]
    features = torch.tensor([[2 * EPS, 0.0]], dtype=torch.float64)
    scaled, _ = loss._in_units(features, torch.eye(2).double(), labels, bias)
    assert scaled.tolist() == [[pytest.approx(1), 0]]


def test_a_term_that_is_not_there_weighs_nothing():
    assert lm.StableDiscriminative(2, 2).gamma_reg == 0
