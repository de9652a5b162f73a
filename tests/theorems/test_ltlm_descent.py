"""LTLM: descent on free unit vectors ends where the theorems say (Prop. 6, Thms 7 and 8)."""

import math

import pytest
import torch
from theorems.free_vectors import (
    best_descent,
    margins_reached,
    random_unit,
    unit,
    without_centroid,
)

import largemargin.functional as LF
from largemargin import geometry


def normface(z, W, y):
    return LF.normface(z, W, y, scale=4.0)


def cosface(z, W, y):
    return LF.cosface(z, W, y, scale=4.0, margin=0.35)


def arcface(z, W, y):
    return LF.arcface(z, W, y, scale=4.0, margin=0.3)


def asoftmax_2(z, W, y):
    return LF.sphereface(z, W, y, scale=4.0, margin=2)


def asoftmax_3(z, W, y):
    return LF.sphereface(z, W, y, scale=4.0, margin=3)


def gm_softmax(z, W, y):
    return LF.gm_softmax(z, W, y, scale=4.0, alpha1=0.8, beta1=-0.2, alpha2=0.6, beta2=-0.1)


def lm_softmax(z, W, y):
    return LF.lm_softmax(z, W, y, scale=10.0)


SMOOTH = [normface, cosface, asoftmax_2, asoftmax_3, gm_softmax, lm_softmax]


@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize(("C", "D"), [(2, 1), (3, 2), (4, 6)])
def test_ltlm_proposition_6_the_simplex_is_stationary(loss, C, D):
    labels = torch.arange(C).repeat(2)
    W = LF.simplex(C, D, dtype=torch.float64).requires_grad_()
    z = W.detach()[labels].requires_grad_()
    # Rows are normalised inside the losses, so these gradients are the tangential ones.
    for gradient in torch.autograd.grad(loss(z, W, labels).sum(), (z, W)):
        assert float(gradient.abs().max()) < 1e-12
    if D > 1:
        W, z = random_unit(C, D, 0).requires_grad_(), random_unit(2 * C, D, 1)
        (gradient,) = torch.autograd.grad(loss(z, W, labels).sum(), W)
        assert float(gradient.abs().max()) > 1e-2


@pytest.mark.parametrize("loss", [*SMOOTH, arcface])
@pytest.mark.parametrize(("C", "D"), [(3, 2), (4, 6)])
def test_ltlm_proposition_6_the_simplex_is_below_its_neighbours(loss, C, D):
    labels = torch.arange(C).repeat(2)
    W = LF.simplex(C, D, dtype=torch.float64)
    lowest = float(loss(W[labels], W, labels).mean())
    for seed in range(30):
        for size in (1e-3, 1e-2, 0.3):
            near_z = unit(W[labels] + size * random_unit(2 * C, D, seed))
            near_W = unit(W + size * random_unit(C, D, seed + 500))
            assert float(loss(near_z, W, labels).mean()) > lowest
            assert float(loss(near_z, near_W, labels).mean()) > lowest


@pytest.mark.parametrize("loss", [*SMOOTH, arcface])
@pytest.mark.parametrize(("C", "D"), [(3, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_ltlm_proposition_6_descent_reaches_the_simplex(loss, C, D):
    labels = torch.arange(C).repeat(2)
    z, W = best_descent(loss, labels, C, D, steps=200)
    degrees, smallest = margins_reached(z, W, labels)
    assert degrees == pytest.approx(math.degrees(math.acos(-1 / (C - 1))), abs=1)
    assert smallest == pytest.approx(C / (C - 1), abs=0.02)


@pytest.mark.parametrize(
    ("C", "D"),
    [(2, 2), (4, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, 2), (5, 6)])],
)
def test_ltlm_theorem_7_descent_on_the_sample_margin(C, D):
    labels = torch.arange(C).repeat(2)
    z, W = best_descent(LF.sample_margin, labels, C, D, steps=300)
    assert float(LF.sample_margin(z, W, labels).mean()) == pytest.approx(-C / (C - 1), abs=1e-2)
    degrees, _ = margins_reached(z, W, labels)
    assert degrees == pytest.approx(math.degrees(math.acos(-1 / (C - 1))), abs=2)


@pytest.mark.parametrize(("C", "D"), [(2, 2), (3, 2), (4, 3), (6, 2), (5, 7)])
def test_ltlm_theorem_7_bound_on_balanced_data(C, D):
    labels = torch.arange(C).repeat(3)
    for seed in range(60):
        W, z = random_unit(C, D, seed), random_unit(3 * C, D, seed + 500)
        for features in (z, W[labels], unit(W - W.mean(0))[labels]):
            value = float(LF.sample_margin(features, W, labels).mean())
            assert value >= -C / (C - 1) - 1e-12
    if C - 1 <= D:
        W = LF.simplex(C, D, dtype=torch.float64)
        value = float(LF.sample_margin(W[labels], W, labels).mean())
        assert value == pytest.approx(-C / (C - 1), abs=1e-12)


def test_ltlm_theorem_7_needs_balanced_data():
    """With one class holding all samples the margin there can reach 2."""
    W = torch.tensor([[1.0, 0.0], [-1.0, 1e-3], [-1.0, -1e-3]], dtype=torch.float64)
    assert float(LF.sample_margin(W[:1], W, torch.tensor([0]))) < -1.99


def imbalanced(z, W, y):
    return LF.cosface(z, W, y, scale=6.0, margin=0.2)


LONG_TAIL = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 20, 5, 1]))
LONG_TAIL_BOUND = {"scale": 6.0, "beta1": -0.2, "beta2": -0.2}


def test_ltlm_theorem_8_zero_centroid_descent_reaches_the_simplex():
    z, W = best_descent(imbalanced, LONG_TAIL, 4, 3, steps=300, keep=without_centroid)
    degrees, smallest = margins_reached(z, W, LONG_TAIL)
    assert degrees == pytest.approx(109.47, abs=0.5)
    assert smallest == pytest.approx(1.333, abs=5e-3)
    reached = float(imbalanced(z, W, LONG_TAIL).mean())
    bound = float(geometry.gm_softmax_bound(4, **LONG_TAIL_BOUND))
    assert reached == pytest.approx(bound, rel=2e-2)


def test_ltlm_theorem_8_without_it_the_rare_classes_are_squeezed():
    z, W = best_descent(imbalanced, LONG_TAIL, 4, 3, steps=300)
    degrees, smallest = margins_reached(z, W, LONG_TAIL)
    assert degrees == pytest.approx(80, abs=2)
    assert smallest == pytest.approx(1.05, abs=0.02)
    reached = float(imbalanced(z, W, LONG_TAIL).mean())
    assert reached < 0.7 * float(geometry.gm_softmax_bound(4, **LONG_TAIL_BOUND))


def test_ltlm_theorem_8_the_penalty_pulls_towards_the_simplex():
    def penalised(z, W, y):
        return imbalanced(z, W, y) + 0.3 * LF.zero_centroid(W)

    free = best_descent(imbalanced, LONG_TAIL, 4, 3, seeds=(0,))
    kept = best_descent(penalised, LONG_TAIL, 4, 3, seeds=(0,))
    assert margins_reached(*kept, LONG_TAIL)[0] > margins_reached(*free, LONG_TAIL)[0] + 5
    assert float(LF.zero_centroid(kept[1])) < float(LF.zero_centroid(free[1])) / 4
