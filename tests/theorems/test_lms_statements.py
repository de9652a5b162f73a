"""LMS: the softmax loss as a margin loss, and the divergence that widens its margin (1)-(15)."""

import math

import pytest
import torch
import torch.nn.functional as F

import largemargin.functional as LF
from largemargin import geometry

SHAPES = [(6, 2), (5, 3), (7, 10)]


def problem(N, C, seed=0, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(N, C, dtype=torch.float64, generator=generator)
    return logits, torch.randint(C, (N,), generator=generator)


def rivals(logits, labels):
    """Logits of the classes other than the label, (N, C-1)."""
    others = torch.ones_like(logits, dtype=torch.bool).scatter(1, labels[:, None], False)
    return logits[others].view(len(logits), -1)


@pytest.mark.parametrize(("N", "C"), SHAPES)
@pytest.mark.parametrize("spread", [0.1, 4.0, 300.0])
def test_lms_equations_4_to_7_and_12(N, C, spread):
    logits, labels = problem(N, C, spread=spread)
    target = logits.gather(1, labels[:, None])[:, 0]
    others = rivals(logits, labels)
    rival = others.max(1).values
    bias = geometry.implicit_bias(logits, labels)
    torch.testing.assert_close(bias, (others - rival[:, None]).exp().sum(1).log())
    assert float(bias.min()) >= 0
    assert float(bias.max()) <= math.log(C - 1) + 1e-12
    loss = LF.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, F.softplus(rival - target + bias))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="none"))
    for strength in (0.0, 0.3, 1.0):
        f = logits.clone().requires_grad_()
        LF.kobayashi(f, labels, strength=strength).sum().backward()
        expected = gradient_12(logits, labels, strength, logits)
        torch.testing.assert_close(f.grad, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(f.grad.sum(1), torch.zeros_like(target), rtol=0, atol=1e-11)


def gradient_12(logits, labels, strength, x):
    """LMS (12), in which ``x`` is printed where the logits are meant (erratum K1)."""
    C = logits.shape[1]
    hot = F.one_hot(labels, C).bool()
    q = logits.masked_fill(hot, -torch.inf).softmax(1)
    pull = q * (x - (q * x).sum(1, keepdim=True)) + q - 1 / (C - 1)
    return logits.softmax(1) - hot.double() + strength / 2 * pull.masked_fill(hot, 0)


def test_lms_equation_12_erratum_k1():
    """Read literally, x_c is a coordinate of the features; that is not the gradient."""
    features, labels = problem(5, 4, seed=1, spread=1.0)
    W, _ = problem(4, 4, seed=2, spread=1.0)
    logits = (features @ W.T).requires_grad_()
    LF.kobayashi(logits, labels, strength=1.0).sum().backward()
    f = logits.detach()
    torch.testing.assert_close(logits.grad, gradient_12(f, labels, 1.0, f), rtol=1e-12, atol=1e-14)
    literal = gradient_12(f, labels, 1.0, features)
    assert float((logits.grad - literal).abs().max()) > 1e-2


def test_lms_equation_4_erratum_k2_no_strict_inequality_for_two_classes():
    logits, labels = problem(5, 2)
    hinge = LF.max_softplus(logits, labels, margin=0.0)
    torch.testing.assert_close(LF.cross_entropy(logits, labels), hinge)
    torch.testing.assert_close(
        geometry.implicit_bias(logits, labels), torch.zeros(5, dtype=torch.float64)
    )
    logits, labels = problem(5, 3)
    strict = LF.cross_entropy(logits, labels) - LF.max_softplus(logits, labels, margin=0.0)
    assert float(strict.min()) > 0


@pytest.mark.parametrize("C", [2, 3, 10])
def test_lms_equation_7_ends_of_the_bias(C):
    logits = torch.zeros(2, C, dtype=torch.float64)
    logits[1, 1] = 800.0  # one rival far above the others
    bias = geometry.implicit_bias(logits, torch.tensor([0, 0]))
    assert bias.tolist() == pytest.approx([math.log(C - 1), 0], abs=1e-12)


@pytest.mark.parametrize(("N", "C"), SHAPES)
def test_lms_equations_8_to_10(N, C):
    logits, labels = problem(N, C, spread=2.0)
    q = rivals(logits, labels).softmax(1)
    to_uniform = (q * ((C - 1) * q).log()).sum(1)
    from_uniform = -((C - 1) * q).log().mean(1)
    symmetric = 0.5 * ((q - 1 / (C - 1)) * q.log()).sum(1)
    torch.testing.assert_close(symmetric, (to_uniform + from_uniform) / 2)
    for kind, expected in (
        ("rivals_to_uniform", to_uniform),
        ("uniform_to_rivals", from_uniform),
        ("symmetric", symmetric),
    ):
        found = LF.rival_divergence(logits, labels, kind=kind)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert float(found.min()) >= -1e-12


def test_lms_equation_11_equal_rivals_have_the_widest_bias():
    """The regularizer vanishes exactly where the softmax loss asks for its widest margin."""
    logits, labels = problem(6, 5, spread=1.0)
    level = logits.scatter(1, labels[:, None], 0.0).sum(1, keepdim=True) / 4
    equal = level.expand(-1, 5).scatter(1, labels[:, None], logits.gather(1, labels[:, None]))
    assert float(LF.rival_divergence(equal, labels).abs().max()) < 1e-12
    torch.testing.assert_close(
        geometry.implicit_bias(equal, labels), torch.full((6,), math.log(4), dtype=torch.float64)
    )
    assert float(LF.rival_divergence(logits, labels).min()) > 0
    assert float(geometry.implicit_bias(logits, labels).max()) < math.log(4)
    with_it = LF.kobayashi(logits, labels, strength=0.3)
    without = LF.cross_entropy(logits, labels)
    torch.testing.assert_close(with_it - without, 0.3 * LF.rival_divergence(logits, labels))


def test_lms_section_3_a_super_symmetric_classifier_has_equal_rivals():
    W = 2.5 * LF.simplex(6, 7, dtype=torch.float64)
    labels = torch.arange(6)
    assert float(LF.super_symmetry(W)) < 1e-12
    assert float(LF.rival_divergence(W, W, labels).abs().max()) < 1e-12
    bent = W.clone()
    bent[0, 0] += 0.5
    assert float(LF.super_symmetry(bent)) > 0.1
    torch.testing.assert_close(LF.super_symmetry(3 * bent), LF.super_symmetry(bent))


@pytest.mark.parametrize(("N", "C"), SHAPES)
@pytest.mark.parametrize("margin", [0.5, 1.0, 3.0])
def test_lms_equations_1_14_and_15(N, C, margin):
    logits, labels = problem(N, C)
    others = rivals(logits, labels)
    gaps = others - logits.gather(1, labels[:, None])
    hinge = F.relu(gaps.max(1).values + margin)
    torch.testing.assert_close(LF.max_hinge(logits, labels, margin=margin), hinge)
    smooth = F.softplus(gaps.max(1).values + margin)
    torch.testing.assert_close(LF.max_softplus(logits, labels, margin=margin), smooth)
    dense = LF.dense_hinge(logits, labels, margin=margin)
    torch.testing.assert_close(dense, F.relu(gaps + margin).mean(1))
    torchs = F.multi_margin_loss(logits, labels, margin=margin, reduction="none")
    torch.testing.assert_close(dense, torchs * C / (C - 1))
    lowered = logits - margin * F.one_hot(labels, C)
    torch.testing.assert_close(
        LF.biased_softmax(logits, labels, margin=margin),
        F.cross_entropy(lowered, labels, reduction="none"),
    )


@pytest.mark.parametrize(("N", "C"), SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_lms_equation_13(N, C, smoothing):
    logits, labels = problem(N, C)
    logs = logits.log_softmax(1)
    own = logs.gather(1, labels[:, None])[:, 0]
    expected = -(1 - smoothing) * own - smoothing / C * logs.sum(1)
    found = LF.label_smoothing(logits, labels, smoothing=smoothing)
    torch.testing.assert_close(found, expected)
