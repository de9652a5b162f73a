"""Kernels of ``ops.triton.rows`` against their definitions, run by Triton's interpreter."""

import math

import pytest
import torch

import largemargin as lm
import largemargin.functional as LF
from largemargin.losses.base.angles import NEAR
from largemargin.losses.base.loss import Loss
from largemargin.ops import eager_gradients
from largemargin.ops.dense import dense_stats
from largemargin.ops.norms import normalize
from largemargin.ops.row_values import RowLoss, kernel_values
from largemargin.ops.shards import ClassSample
from largemargin.ops.triton import rows

ALL = ("target", "rival", "rest", "spread", "mean")


def drawn(*shape, seed=0, factor=1.0):
    return factor * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels_of(count, classes, seed=1):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def in_order(stats):
    target, rival, index, rest, spread, mean = stats
    return (target, rival, rest, spread, mean), index


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("classes", [2, 7, 16, 5000])
def test_statistics_and_their_gradients(classes, relative):
    logits = drawn(4, classes, factor=3.0).requires_grad_()
    labels = labels_of(4, classes)
    found = rows.row_stats(logits.detach(), labels, relative)
    expected, index = in_order(dense_stats(logits, labels, ALL, relative=relative))
    assert torch.equal(found.rival, index)
    torch.testing.assert_close(found.found, torch.stack(expected), rtol=1e-5, atol=2e-6)
    for chosen in (*((name,) for name in ALL), ALL):
        grads = [drawn(4, seed=7 + place) for place in range(5)]
        given = [g if name in chosen else None for name, g in zip(ALL, grads, strict=True)]
        wanted = [each for each, name in zip(expected, ALL, strict=True) if name in chosen]
        by = [g for g in given if g is not None]
        (want,) = torch.autograd.grad(wanted, logits, by, retain_graph=True)
        got = rows.row_stats_gradient(logits.detach(), labels, found, tuple(given))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)


def test_labels_that_are_no_classes_and_logits_that_are_none():
    logits = drawn(4, 5)
    logits[3, 0] = math.nan
    labels = torch.tensor([-100, 5, 2, 1])
    found = rows.row_stats(logits, labels, False)
    assert found.found.isnan().all(0).tolist() == [True, True, False, False]
    assert found.found[1:, 3].isnan().all()
    assert not found.found[0, 3].isnan()
    ones = (torch.ones(4),) * 5
    gradient = rows.row_stats_gradient(logits, labels, found, ones)
    assert gradient[:2].eq(0).all()
    masked = torch.tensor([[1.0, -math.inf, -math.inf]])
    found = rows.row_stats(masked, torch.tensor([0]), False)
    expected, _ = in_order(dense_stats(masked, torch.tensor([0]), ("target", "rest")))
    assert float(found.found[2, 0]) == pytest.approx(float(expected[2]))


@pytest.mark.parametrize("width", [1, 5, 600, 5000])
def test_unit_rows(width):
    x = drawn(6, width) * torch.tensor([1.0, 1e-20, 1e30, 1e-10, 0.0, 1.0])[:, None]
    x.requires_grad_()
    unit, inverse = rows.unit_rows(x.detach(), torch.float32, 3.0)
    expected = 3 * normalize(x)
    torch.testing.assert_close(unit, expected, rtol=1e-5, atol=1e-6)
    grad = drawn(6, width, seed=5)
    (want,) = torch.autograd.grad(expected, x, grad)
    found = rows.unit_rows_gradient(grad, x.detach(), inverse, 3.0)
    rounding = 1e-6 * inverse * grad.abs().amax(1)  # with one dimension the gradient is 0
    for one, other, noise in zip(found, want, rounding.clamp_max(1e25), strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max()) + float(noise)
    assert rows.unit_rows(torch.full((1, 3), math.nan), torch.float32)[0].isnan().all()


@pytest.mark.parametrize("mode", ["hard", "easy", "none"])
@pytest.mark.parametrize("margin", [0.0, 0.3, 2.0])
def test_shifted_angles(mode, margin, monkeypatch):
    angles = torch.tensor([0.0, 1e-4, 0.1, 0.5, 1.6, 2.0, 3.0, math.pi - 1e-4])
    prototypes = torch.eye(3)
    features = torch.stack([torch.cos(angles), torch.sin(angles), torch.zeros(8)], 1).double()
    labels, found = torch.zeros(8, dtype=torch.long), []
    for kernels in (True, False):
        x = features.float().requires_grad_()
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(eager_gradients, "_serve", lambda _: False)
            values = LF.arcface(x, prototypes, labels, margin=margin, scale=4.0, mode=mode)
            found.append((values, *torch.autograd.grad(values.sum(), x)))
    assert NEAR < 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


LOSSES = {
    "cosface": lambda **how: lm.CosFace(margin=0.2, scale=8.0, **how),
    "arcface": lambda **how: lm.ArcFace(margin=0.2, scale=8.0, **how),
    "lm_softmax": lambda **how: lm.LMSoftmax(scale=8.0, **how),
    "sample_margin": lambda **how: lm.SampleMargin(**how),
    "kobayashi": lambda **how: lm.Kobayashi(**how),
    "cross_entropy": lambda **how: lm.CrossEntropy(**how),
    "focal": lambda **how: lm.Focal(**how),
}


@pytest.mark.parametrize("ignore", [-100, None, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_same_with_and_without_kernels(name, ignore, monkeypatch):
    labels = torch.tensor([0, 2, 1, 3, 2, -100 if ignore == -100 else 0])
    found = []
    for kernels in (True, False):
        x, w = drawn(6, 5).requires_grad_(), drawn(4, 5, seed=3).requires_grad_()
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(eager_gradients, "_serve", lambda _: False)
            value = LOSSES[name](ignore_index=ignore)(x, w, labels)
            first = torch.autograd.grad(value, (x, w), create_graph=True)
            twice = torch.autograd.grad(first[0].square().sum(), (x, w), allow_unused=True)
            plain = torch.autograd.grad(LOSSES[name](ignore_index=ignore)(x, w, labels), (x, w))
            found.append((value, *first, *twice, *plain))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


ATTACHED = {name: LOSSES[name] for name in LOSSES if name not in ("focal", "sample_margin")}


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("labels", [[0, 2, 1, 3, 2, 0], [0, -100, 1, 3, -100, 0], [-100] * 6])
@pytest.mark.parametrize("name", ATTACHED)
def test_short_steps_are_those_of_the_whole_way(name, labels, low, monkeypatch):
    labels, found = torch.tensor(labels), []
    for kernels in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 4))
        criterion = lm.attach(model, ATTACHED[name]() + 0.5 * lm.LabelSmoothing())
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(eager_gradients, "_serve", lambda _: False)
            patch.setattr(Loss, "is_usual", lambda _, short=kernels: short)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                value = criterion(model(drawn(6, 5)), labels)
            gradients = torch.autograd.grad(value, [*model.parameters()], allow_unused=True)
            found.append((value, *(g for g in gradients if g is not None)))
    assert len(found[0]) == len(found[1]) > 3
    for one, other in zip(*found, strict=True):
        near = 3e-2 if low else 1e-4
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize("name", LOSSES)
def test_labels_out_of_range_are_not_a_number_and_have_no_gradient(name):
    x, w = drawn(4, 5).requires_grad_(), drawn(3, 5, seed=3).requires_grad_()
    loss = LOSSES[name](validate=None)
    value = Loss._of_rows(loss, loss._row_logits(x, w, {}), x, w, torch.tensor([0, 7, 1, 2]))
    if name == "focal":
        assert value is None
        return
    assert value.isnan()
    rows_of, _ = torch.autograd.grad(value, (x, w))
    assert rows_of[1].eq(0).all()
    assert rows_of[0].ne(0).any()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_rows_are_the_means_of_values(name):
    x, w, labels = drawn(40, 5), drawn(7, 5, seed=3), labels_of(40, 7)
    found = []
    for reduction in ("mean", "none"):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        value = LOSSES[name](reduction=reduction)(a, b, labels).mean()
        found.append((value, *torch.autograd.grad(value, (a, b))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_classes_are_sampled_with_and_without_kernels(name, monkeypatch):
    x, w, labels = drawn(6, 5), drawn(40, 5, seed=3), labels_of(6, 40)
    found = []
    for kernels in (True, False):
        part = w.clone()
        part.class_sample = ClassSample(0.5, 0, 0)
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(eager_gradients, "_serve", lambda _: False)
            found.append(LOSSES[name]()(x, part, labels))
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-5)
    if name != "sample_margin":  # its nearest class may be in the sample
        assert float(found[0]) != pytest.approx(float(LOSSES[name]()(x, w, labels)), rel=1e-3)


def test_small_losses_keep_their_digits():
    logits = torch.tensor([[0.0, -17.0], [0.0, -60.0], [30.0, 0.0], [0.0, 3e4]])
    logits.requires_grad_()
    labels = torch.tensor([0, 0, 1, 0])
    values = kernel_values(logits, labels, RowLoss())
    expected = torch.nn.functional.softplus(torch.tensor([-17.0, -60.0, 30.0, 3e4]).double())
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)
    (found,) = torch.autograd.grad(values.sum(), logits)
    slopes = torch.sigmoid(torch.tensor([-17.0, -60.0, 30.0, 3e4]).double())
    torch.testing.assert_close(-found[range(4), labels].double(), slopes, rtol=1e-6, atol=0)
