"""Kernels of ``ops.triton.centroids`` against the definition: interpreted, or on a GPU."""

import copy
import math
import os

import pytest
import torch

import largemargin as lm
from largemargin.losses import discriminative

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SETTINGS = {
    "partial": {},
    "both": {"strategy": "both", "momentum": 0.4},
    "none": {"strategy": "none", "compact_power": 1, "margin_power": 2, "gamma_reg": 0.5},
}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def labels_of(count, classes, seed=1):
    drawn_labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))
    return drawn_labels.to(DEVICE)


def head_of(classes, width, bias=True):
    torch.manual_seed(5)
    return lm.ClassHead(width, classes, bias=bias).to(DEVICE)


def discriminative_of(classes, width, **settings):
    return lm.Discriminative(classes, width, **settings).to(DEVICE)


class ByKernels:
    """Counts how often the kernels were taken; ``allowed`` says whether they may be."""

    def __init__(self, monkeypatch):
        self.calls, self.allowed = 0, True
        taken, serve = discriminative.kernel_terms, discriminative.kernels_serve

        def counted(*args):
            self.calls += 1
            return taken(*args)

        monkeypatch.setattr(discriminative, "kernel_terms", counted)
        monkeypatch.setattr(
            discriminative, "kernels_serve", lambda *args: self.allowed and serve(*args)
        )


@pytest.fixture
def by_kernels(monkeypatch):
    return ByKernels(monkeypatch)


def one_step(loss, head, features, labels):
    """Terms and gradients of a call by a head that has made its logits."""
    features = features.clone().requires_grad_()
    head.zero_grad()
    model = torch.nn.Sequential(torch.nn.Identity(), head)
    criterion = lm.attach(model, lm.Objective(lmd=loss), warn=False)
    total = criterion(model(features), labels)
    total.backward()
    terms = dict(criterion.terms)
    criterion.undo()
    bias = None if head.bias is None else head.bias.grad
    return total.detach(), terms, (features.grad, head.weight.grad, bias)


def both_ways(by_kernels, loss, head, features, labels, calls=1):
    """The same call by kernels and by the definition, each from the same state."""
    other, twin = copy.deepcopy(loss), copy.deepcopy(head)
    by_kernels.allowed = True
    found = one_step(loss, head, features, labels)
    assert by_kernels.calls == calls
    by_kernels.allowed = False
    wanted = one_step(other, twin, features, labels)
    assert by_kernels.calls == calls
    by_kernels.calls, by_kernels.allowed = 0, True
    return found, wanted, other


def assert_same(found, wanted, **tolerance):
    tolerance = {"rtol": 2e-5, "atol": 2e-6, **tolerance}
    torch.testing.assert_close(found[0], wanted[0], **tolerance)
    torch.testing.assert_close(found[1], wanted[1], **tolerance)
    for mine, theirs in zip(found[2], wanted[2], strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def assert_same_bank(loss, other):
    mine, theirs = loss.bank.state_dict(), other.bank.state_dict()
    torch.testing.assert_close(mine["centroids"], theirs["centroids"], rtol=1e-5, atol=1e-6)
    assert torch.equal(mine["seen"], theirs["seen"])
    assert torch.equal(mine["counts"], theirs["counts"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("count", "classes", "width"), [(12, 4, 5), (7, 40, 33), (40, 3, 130)])
def test_terms_gradients_and_bank(by_kernels, count, classes, width, name, bias):
    loss = discriminative_of(classes, width, margin=1.0, **SETTINGS[name])
    head = head_of(classes, width, bias)
    for step in range(3):
        features, labels = drawn(count, width, seed=step), labels_of(count, classes, step)
        found, wanted, other = both_ways(by_kernels, loss, head, features, labels)
        assert_same(found, wanted)
        assert_same_bank(loss, other)
    assert loss.bank.counts.sum() == 3 * count
    state = copy.deepcopy(loss.bank.state_dict())
    found, wanted, _ = both_ways(by_kernels, loss.eval(), head.eval(), features, labels)
    assert_same(found, wanted)
    assert all(torch.equal(state[k], v) for k, v in loss.bank.state_dict().items())


@pytest.mark.parametrize("tail", [0.1, 0.5, math.inf])
def test_the_stable_form(by_kernels, tail):
    loss = lm.StableDiscriminative(5, 9, tail=tail).to(DEVICE)
    found, wanted, other = both_ways(
        by_kernels, loss, head_of(5, 9), 3 * drawn(11, 9), labels_of(11, 5)
    )
    assert_same(found, wanted)
    assert_same_bank(loss, other)


@pytest.mark.parametrize("classes", [4, 40])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_ignored_labels(by_kernels, classes, ignore):
    loss = discriminative_of(classes, 6, margin=1.0, ignore_index=ignore)
    features, labels = drawn(9, 6), labels_of(9, 4)
    labels[[1, 4]] = ignore
    features[labels == ignore] = math.nan
    found, wanted, other = both_ways(by_kernels, loss, head_of(classes, 6), features, labels)
    assert_same((*found[:2], found[2][:1]), (*wanted[:2], wanted[2][:1]))
    assert found[2][0][labels == ignore].eq(0).all()
    assert_same_bank(loss, other)
    everything = torch.full_like(labels, ignore)
    found, wanted, _ = both_ways(by_kernels, loss, head_of(classes, 6), features, everything)
    assert found[0] == wanted[0] == 0
    assert found[2][0].eq(0).all()


@pytest.mark.parametrize("classes", [4, 40])
def test_labels_that_are_no_classes_spoil_the_value_and_not_the_bank(by_kernels, classes):
    loss = discriminative_of(classes, 6)
    labels = labels_of(9, 4)
    labels[3] = classes
    total, terms, _ = one_step(loss, head_of(classes, 6), drawn(9, 6), labels)
    assert by_kernels.calls == 1
    assert total.isnan()
    assert all(term.isnan() for term in terms.values())
    assert loss.bank.centroids.isfinite().all()
    assert loss.bank.counts.sum() == 8


def test_batches_that_overflow_are_not_stored(by_kernels):
    loss, head = discriminative_of(3, 4), head_of(3, 4)
    one_step(loss, head, drawn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE))
    before = loss.bank.centroids.clone()
    features = drawn(6, 4, seed=3)
    features[0, 0] = math.inf
    one_step(loss, head, features, torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE))
    assert by_kernels.calls == 2
    assert torch.equal(loss.bank.centroids[0], before[0])
    assert not torch.equal(loss.bank.centroids[1], before[1])
    assert loss.bank.counts.tolist() == [2, 4, 4]


@pytest.mark.parametrize("factor", [1e-20, 1e20, 1e30])
def test_sizes_far_from_one(by_kernels, factor):
    loss, head = discriminative_of(4, 6, compact_power=1, margin=1.0), head_of(4, 6)
    with torch.no_grad():
        head.weight.mul_(factor)
    features = factor * drawn(12, 6)
    found, wanted, _ = both_ways(by_kernels, loss, head, features, labels_of(12, 4))
    torch.testing.assert_close(found[1]["lmd.compact"], wanted[1]["lmd.compact"])
    torch.testing.assert_close(found[1]["lmd.reg"], wanted[1]["lmd.reg"])


def test_prototypes_that_coincide_and_samples_on_their_centroid(by_kernels):
    loss, head = discriminative_of(3, 4, margin=1.0), head_of(3, 4)
    with torch.no_grad():
        head.weight[1] = head.weight[0]
        head.bias.zero_()
    features = drawn(1, 4).expand(4, 4)
    found, wanted, _ = both_ways(
        by_kernels, loss, head, features, torch.tensor([0, 0, 1, 1], device=DEVICE)
    )
    assert_same(found, wanted)
    assert all(each.isfinite().all() for each in found[2])


def test_half_precision(by_kernels):
    loss, head = discriminative_of(5, 8, margin=1.0), head_of(5, 8)
    features, labels = drawn(10, 8).bfloat16(), labels_of(10, 5)
    found, wanted, _ = both_ways(by_kernels, loss, head, features, labels)
    assert_same(found, wanted, rtol=1e-2, atol=1e-3)
    assert found[2][0].dtype == torch.bfloat16


def test_features_that_are_a_part_of_a_matrix(by_kernels):
    loss, head = discriminative_of(3, 4, margin=1.0), head_of(3, 4)
    wide, labels = drawn(8, 9), labels_of(8, 3)
    model = torch.nn.Sequential(torch.nn.Identity(), head)
    values = []
    for features in (wide[:, 2:6], wide[:, 2:6].contiguous(), wide[:, 2:6].T.contiguous().T):
        criterion = lm.attach(model, copy.deepcopy(loss), warn=False)
        values.append(criterion(model(features), labels))
        criterion.undo()
    assert by_kernels.calls == 3
    assert values[0] == values[1] == values[2]


def test_second_derivatives_are_those_of_the_definition(by_kernels):
    results = []
    for allowed in (True, False):
        by_kernels.allowed = allowed
        for count in (6, 2):  # slots are classes, slots are samples
            loss, head = discriminative_of(3, 4, margin=1.0, momentum=0.5), head_of(3, 4)
            model = torch.nn.Sequential(torch.nn.Identity(), head)
            criterion = lm.attach(model, loss, warn=False)
            features = drawn(count, 4).requires_grad_()
            total = criterion(
                model(features), torch.tensor([0, 1, 2, 0, 1, 2], device=DEVICE)[:count]
            )
            inputs = (features, head.weight, head.bias)
            first = torch.autograd.grad(total, inputs, create_graph=True)
            size = sum(each.square().sum() for each in first)
            results.append([*first, *torch.autograd.grad(size, inputs)])
    assert by_kernels.calls == 2
    for mine, theirs in zip(results[:2], results[2:], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_call_without_attach(by_kernels):
    head, labels = head_of(3, 4), labels_of(8, 3)
    found = discriminative_of(3, 4)(drawn(8, 4), head, labels)
    assert by_kernels.calls == 1
    wanted = discriminative_of(3, 4, impl="dense")(drawn(8, 4), head, labels)
    assert by_kernels.calls == 1
    torch.testing.assert_close(found, wanted)


def test_a_frozen_classifier(by_kernels):
    loss = discriminative_of(3, 4, margin=1.0, detach_classifier=True)
    found, wanted, _ = both_ways(by_kernels, loss, head_of(3, 4), drawn(8, 4), labels_of(8, 3))
    torch.testing.assert_close(found[2][0], wanted[2][0])
    assert found[2][1] is None
    assert wanted[2][1] is None


def test_runs_are_equal_to_the_last_bit(by_kernels):
    runs = []
    for _ in range(2):
        loss = discriminative_of(4, 6, margin=1.0)
        runs.append(one_step(loss, head_of(4, 6), drawn(12, 6), labels_of(12, 4)))
    assert by_kernels.calls == 2
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][2], runs[1][2], strict=True))
