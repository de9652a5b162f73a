"""Center loss where its neighbours do not look: bad batches, recomputed steps, labels without a
class."""

import importlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import largemargin as lm
import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.losses.center import center_update


def test_centers_are_constants_and_targets_are_hard():
    centers = torch.zeros(2, 2, requires_grad=True)
    assert not LF.center_loss(torch.ones(1, 2), centers, torch.tensor([1])).requires_grad
    with pytest.raises(LargeMarginError, match="soft"):
        LF.center_loss(torch.ones(1, 2), centers, torch.ones(1, 2) / 2)


def test_features_that_are_not_finite_move_no_center():
    features = torch.tensor([[4.0, 4.0], [torch.inf, 1.0], [torch.nan, 1.0]])
    centers = torch.ones(4, 2)
    moved = center_update(features, centers, torch.tensor([0, 1, 2]))
    assert moved.tolist() == [[1.75, 1.75], [1, 1], [1, 1], [1, 1]]


def test_other_ranks_are_only_asked_where_that_was_asked_for(monkeypatch):
    module = importlib.import_module("largemargin.prototypes.centroids")
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module, "all_reduce_sum", lambda x: 2 * x)
    given = torch.tensor([[3.0]]), torch.zeros(1, 1), torch.tensor([0])
    assert center_update(*given).item() == pytest.approx(0.5 * 3 / 2)
    assert center_update(*given, sync=True).item() == pytest.approx(0.5 * 3 * 2 / 3)


def test_a_step_that_is_computed_again_sees_the_centers_of_its_first_time():
    found = []
    for way in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        loss = lm.CenterLoss(2, 1, strength=1.0)
        loss.centers.fill_(1.0)
        features = torch.tensor([[3.0], [5.0]], requires_grad=True)
        labels = torch.tensor([0, 1])
        value = way(lambda x, loss=loss, labels=labels: loss(x * 2, labels), features)
        value.backward()
        found.append((features.grad.flatten().tolist(), loss.centers.flatten().tolist()))
    assert found[0] == found[1] == ([10.0, 18.0], [2.25, 3.25])


def test_labels_without_a_class_move_no_center():
    loss = lm.CenterLoss(2, 1, validate=False)
    assert loss.rate == 0.5
    loss(torch.tensor([[4.0], [8.0], [8.0], [8.0]]), torch.tensor([0, -1, 2, -100]))
    assert loss.centers.flatten().tolist() == [1, 0]
