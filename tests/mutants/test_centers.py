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
    module = importlib.import_module("largemargin.heads.centroid_bank")
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


def test_micro_batches_move_centers_as_one_batch():
    """Classes of several samples, in unequal parts, one of them absent and one not finite."""
    features = torch.tensor([[4.0, 2.0], [8.0, 0.0], [1.0, 1.0], [6.0, 4.0], [torch.nan, 1.0]])
    labels = torch.tensor([0, 0, 1, 0, 2])
    kept = torch.arange(4)
    loss = lm.CenterLoss(4, 2, accumulate=2, strength=1.0)
    loss.centers.fill_(1.0)
    want = center_update(features[kept], torch.ones(4, 2), labels[kept])
    parts = features.requires_grad_()[:3], features[3:]
    loss(parts[0], labels[:3])
    assert loss.centers.tolist() == [[1.0, 1.0]] * 4
    assert loss.pending_counts.tolist() == [2, 1, 0, 0]
    assert loss.pending_sums.tolist() == [[12.0, 2.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    loss(parts[1], labels[3:])
    torch.testing.assert_close(loss.centers, want)
    for state in loss.buffers():
        assert not state.requires_grad
    assert loss.pending_counts.sum() == loss.pending_steps == loss.pending_sums.abs().sum() == 0


def test_a_part_of_infinite_features_counts_for_nothing():
    loss = lm.CenterLoss(2, 2, accumulate=None)
    loss(torch.tensor([[torch.inf, 1.0], [2.0, 2.0]]), torch.tensor([0, 1]))
    assert loss.pending_counts.tolist() == [0, 1]
    assert loss.pending_sums.tolist() == [[0.0, 0.0], [2.0, 2.0]]
    loss.commit()
    assert loss.centers.tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_parts_of_a_step_are_counted_from_one():
    lm.CenterLoss(2, 2, accumulate=None)
    for wrong in (0, -1, 0.5):
        with pytest.raises(LargeMarginError, match="accumulate must be"):
            lm.CenterLoss(2, 2, accumulate=wrong)
