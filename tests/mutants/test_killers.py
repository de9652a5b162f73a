"""Small tests, each of which kills mutants that survived all others."""

import importlib

import pytest
import torch

import largemargin as lm
import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.heads.centroid_bank import class_means
from largemargin.ops.dense import DENSE_LIMIT, dense_limit


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_widest_margin_of_cosface_is_that_of_the_simplex(classes):
    W = torch.eye(classes)
    label = torch.tensor([0])
    widest = classes / (classes - 1)
    assert LF.cosface(W[:1], W, label, margin=widest - 1e-6).isfinite().all()
    assert LF.cosface(W[:1], W, label, margin=0.0).isfinite().all()
    for margin in (widest, -1e-6):
        with pytest.raises(LargeMarginError, match="margin"):
            LF.cosface(W[:1], W, label, margin=margin)


def test_the_margin_that_decides_the_automatic_scale_of_cosface():
    """ψ(0) = 1 - m, of the margins by count where there are any."""
    assert lm.CosFace(margin=0.3).aligned_cosine() == pytest.approx(0.7)
    rare = lm.CosFace(margin=0.3, class_counts=[16, 1]).aligned_cosine()
    assert torch.allclose(torch.as_tensor(rare).float(), torch.tensor([0.85, 0.7]))


PER_CENTROID = {
    "compactness": (lambda m, y, **how: LF.compactness(FEATURES, m, y, **how)),
    "noise_alignment": (lambda m, y, **how: LF.noise_alignment(FEATURES, m, y, **how)),
}
FEATURES = torch.tensor([[3.0, 0.0], [0.0, 5.0], [0.0, 0.1]], dtype=torch.float64)
CENTERS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("function", PER_CENTROID.values(), ids=PER_CENTROID.keys())
def test_terms_around_given_centers(function):
    """Of more classes than dimensions: values, defaults, gradient, labels that do not exist."""
    centers = CENTERS.clone().requires_grad_()
    values = function(centers, torch.tensor([0, 1, 3]))
    assert values.tolist() == pytest.approx([6.25, 12.25, 0.0])
    (gradient,) = torch.autograd.grad(values.sum(), centers)
    assert gradient[0].tolist() == pytest.approx([-5.0, 0.0])
    assert gradient[1].tolist() == pytest.approx([0.0, -7.0])
    values = function(centers, torch.tensor([-1, 4, 0]), validate=False)
    assert values.isnan().tolist() == [True, True, False]
    linear = function(centers, torch.tensor([0, 1, 3]), radius=1.0, power=1)
    assert linear.tolist() == pytest.approx([2.0, 3.0, 0.0])
    with pytest.raises(LargeMarginError, match="soft"):
        function(centers, torch.ones(3, 4) / 4)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_terms_of_the_centroid_margin_for_labels_that_do_not_exist(aggregate):
    weight = torch.eye(4, 3)
    points = torch.ones(3, 3)
    values = LF.centroid_margin(
        points, weight, torch.tensor([-1, 4, 3]), aggregate=aggregate, validate=False
    )
    assert values.isnan().tolist() == [True, True, False]
    with pytest.raises(LargeMarginError, match="soft"):
        LF.centroid_margin(points, weight, torch.ones(3, 4) / 4, aggregate=aggregate)


@pytest.mark.parametrize("function", [LF.dense_hinge, LF.soft_hinge, LF.max_hinge, LF.kobayashi])
def test_terms_of_logits_for_labels_that_do_not_exist(function):
    logits = torch.tensor([[1.0, 2.0, 0.5]]).repeat(5, 1)
    values = function(logits, torch.tensor([-1, 3, 0, 1, 2]), validate=False)
    assert values.isnan().tolist() == [True, True, False, False, False]
    assert len(set(values[2:].tolist())) == 3


def test_logits_are_kept_up_to_a_number_of_them(monkeypatch):
    """One number more and the classes are gone over in blocks; soft targets need them all."""
    module = importlib.import_module("largemargin.ops.class_stats")
    assert dense_limit("cpu", None) == DENSE_LIMIT == 2**22
    assert dense_limit("cuda", "bf16") == 2**25
    assert dense_limit("cuda", None) == dense_limit("cuda", "tf32") == 2**27
    monkeypatch.setattr(module, "dense_limit", lambda *_: 12)
    features, prototypes = torch.ones(3, 20), torch.ones(4, 20)
    assert module._choose(features, prototypes, False, None) == "dense"
    assert module._choose(features, torch.ones(5, 20), False, "bf16") == "chunked"
    assert module._choose(torch.ones(4, 20), prototypes, False, None) == "chunked"
    assert module._choose(torch.ones(4, 20), prototypes, True, None) == "dense"


def test_the_first_sample_that_counts_holds_its_class():
    """More classes than samples: rows are samples, and one left out holds nothing."""
    features = torch.tensor([[9.0], [1.0], [5.0], [3.0]], requires_grad=True)
    labels, valid = torch.tensor([0, 0, 4, 0]), torch.tensor([False, True, True, True])
    slots = class_means(features, labels, 5, valid)
    assert not slots.by_class
    assert slots.of_sample.tolist() == [0, 1, 2, 1]
    assert slots.classes.tolist() == [0, 0, 4, 0]
    assert slots.counts.tolist() == [0, 2, 1, 0]
    assert slots.present.tolist() == [False, True, True, False]
    assert slots.means.flatten().tolist() == [0, 2, 5, 0]
    (gradient,) = torch.autograd.grad(slots.means.sum(), features)
    assert gradient.flatten().tolist() == [0, 0.5, 1, 0.5]
    few = class_means(features, labels.clamp_max(3), 4, valid)
    assert few.by_class
    assert few.of_sample.tolist() == [0, 0, 3, 0]
    assert few.classes.tolist() == [0, 1, 2, 3]
    assert few.counts.tolist() == [2, 0, 0, 1]
    assert few.means.flatten().tolist() == [2, 0, 0, 5]


@pytest.mark.parametrize("classes", [2, 9])
def test_ranks_are_only_asked_where_that_was_asked_for(monkeypatch, classes):
    """Two ranks with the same batch: the same means of twice as many samples."""
    module = importlib.import_module("largemargin.heads.centroid_bank")
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module, "all_reduce_sum", lambda x: 2 * x)
    monkeypatch.setattr(module, "gather_ragged", lambda x, _: torch.cat((x, x)))
    monkeypatch.setattr(module, "SHARED_SLOTS", 2)
    given = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1]), classes
    valid = torch.ones(3, dtype=torch.bool)
    alone, together = (class_means(*given, valid, **how) for how in ({}, {"sync": True}))
    assert alone.counts.sum() == 3
    assert together.counts.sum() == 6
    for slots in (alone, together):
        assert slots.means[slots.of_sample].flatten().tolist() == [2, 2, 7]


def test_only_banks_that_collect_keep_what_is_pending():
    kept = {"centroids", "seen", "counts"}
    pending = {"pending_sums", "pending_counts", "pending_steps"}
    assert lm.CentroidBank(3, 2).state_dict().keys() == kept
    for accumulate in (2, None):
        bank = lm.CentroidBank(3, 2, accumulate=accumulate)
        assert bank.state_dict().keys() == kept | pending


def test_a_bank_leaves_out_labels_that_do_not_count_unless_told_that_all_do():
    bank = lm.CentroidBank(2, 1)
    bank(torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, -100]))
    assert bank.centroids.flatten().tolist() == [1, 0]
    assert bank.counts.tolist() == [1, 0]


def test_squares_that_overflow_are_no_fault_of_the_features():
    """The message names what was given, not what the loss has made of it."""
    loss = lm.GaussianMixture(2, 2, learn_variances=True, check_finite=True)
    with pytest.raises(LargeMarginError, match="not finite, though its inputs are"):
        loss(torch.full((1, 2), 1e25), torch.ones(2, 2), torch.tensor([0]))


@pytest.mark.parametrize("function", [LF.dense_hinge, LF.soft_hinge, LF.max_hinge])
def test_infinity_is_only_looked_for_where_that_was_asked_for(function):
    given = torch.tensor([[torch.nan, 1.0]]), torch.eye(2), torch.tensor([0])
    assert function(*given).isnan().all()
    with pytest.raises(LargeMarginError, match="finite"):
        function(*given, check_finite=True)
