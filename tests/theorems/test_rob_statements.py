"""ROB: curvature of the loss under Gaussian noise (Theorem 6.1, equation 21, section 7.3)."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

LABEL = torch.tensor([0])


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def quadratic(seed, size):
    """Symmetric H, slope g and the per-sample loss x^T H x / 2 + g^T x."""
    H, g = draw(seed, size, size), draw(seed + 1, size)
    H = H + H.T
    return H, g, lambda outputs, labels: (outputs @ H * outputs).sum(1) / 2 + outputs @ g


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sigma", [0.1, 1.0, 2.5])
def test_rob_theorem_6_1_identity_of_a_quadratic_loss(seed, sigma):
    """E[(l(x+e) - l(x))^2] = s^2 |grad|^2 + s^4/4 (2 |H|_F^2 + (tr H)^2), by exact quadrature."""
    _, _, loss = quadratic(seed, 3)
    x = draw(seed + 2, 1, 3)
    points = list(itertools.product((-math.sqrt(3), 0.0, math.sqrt(3)), repeat=3))
    nodes = torch.tensor(points, dtype=torch.float64)
    weights = (1 / 6 + nodes.eq(0).double() / 2).prod(1)
    change = loss(x + sigma * nodes, None) - loss(x, None)
    expected = float((weights * change.square()).sum())
    gradient = geometry.input_gradient(nn.Identity(), x, LABEL, loss=loss).gradient
    exact = geometry.exact_curvature(nn.Identity(), x, LABEL, loss=loss)
    squares, trace = float(exact.sum_of_squares), float(exact.eigenvalues.sum())
    found = sigma**2 * float(gradient.square().sum())
    found += sigma**4 / 4 * (2 * squares + trace**2)
    assert found == pytest.approx(expected, rel=1e-9)
    assert trace**2 <= float(exact.sum_of_absolutes) ** 2 + 1e-9  # the step to the lower bound


@pytest.mark.parametrize("seed", range(4))
def test_rob_equation_21_erratum_r2_the_expectation_is_needed(seed):
    H, _, loss = quadratic(seed, 4)
    x = draw(seed + 2, 1, 4)
    axes = torch.linalg.qr(draw(seed + 3, 4, 4)).Q * 2  # |axis|^2 = 4, mean of e e^T = I
    for step in (1e-3, 0.5, 10.0):
        options = {"directions": axes, "step": step, "loss": loss}
        mean = geometry.curvature(nn.Identity(), x, LABEL, **options)
        assert float(mean) == pytest.approx(float(H.square().sum()), rel=1e-6)
    single = geometry.curvature_limit(nn.Identity(), x, LABEL, directions=axes[:1], loss=loss)
    assert float(single) == pytest.approx(float((H @ axes[0]).square().sum()))
    assert abs(float(single) - float(H.square().sum())) > 1e-2 * float(H.square().sum())


def tanh_network(seed):
    A, a, W, b = draw(seed, 5, 4), draw(seed + 1, 5), draw(seed + 2, 3, 5), draw(seed + 3, 3)
    return (lambda x: torch.tanh(x @ A.T + a)), W, b, draw(seed + 4, 1, 4)


def bounds_of(seed, sigma, radius=0.5):
    backbone, W, b, x = tanh_network(seed)
    return geometry.curvature_bounds(
        backbone, W, x, LABEL, bias=b, sigma=sigma, radius=radius, noise=draw(seed + 5, 400, 4)
    )


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_rob_theorem_6_1_holds_for_small_noise(seed):
    for sigma in (0.01, 0.03, 0.1):
        found = bounds_of(seed, sigma)
        assert float(found.lhs_upper) <= float(found.upper)
        assert float(found.lhs_lower) >= float(found.lower)


def test_rob_theorem_6_1_erratum_r3_fails_for_large_noise():
    found = [bounds_of(seed, 8.0) for seed in range(0, 60, 10)]
    assert any(float(each.lhs_upper) > float(each.upper) for each in found)
    found = [bounds_of(seed, 0.3) for seed in range(0, 60, 10)]
    assert any(float(each.lhs_lower) < float(each.lower) for each in found)


@pytest.mark.parametrize("seed", range(6))
def test_rob_theorem_6_1_erratum_r3_sharper_constant(seed):
    """Inside a ball of features the loss changes by at most max_j |W_j - W_y| delta."""
    W, q, delta = draw(seed, 4, 5), draw(seed + 10, 1, 5), 0.3
    labels = torch.full((500,), seed % 4)
    moved = q + delta * F.normalize(draw(seed + 20, 500, 5))
    change = (LF.cross_entropy(moved, W, labels) - LF.cross_entropy(q, W, labels[:1])).abs()
    sharp = delta * float((W - W[seed % 4]).norm(dim=1).max())
    printed = 2 * delta * float(W.norm(dim=1).max())
    assert float(change.max()) <= sharp <= printed
    assert float(change.max()) > 0.2 * sharp


def test_rob_theorem_6_1_erratum_r4_nothing_leaves_the_ball():
    found = bounds_of(0, 0.1, radius=50.0)
    assert float(found.eta) == 1
    assert math.isnan(float(found.l_out))
    expected = -4 / 0.1**2 * float(found.grad_sq)
    assert float(found.lower) == pytest.approx(expected)
    assert float(found.lower) < 0
    assert float(found.upper) == pytest.approx(8 / 0.1**4 * (float(found.w_2inf) * 50) ** 2)


def test_rob_section_7_3_erratum_r5_strict_subsets():
    flat = torch.tensor([3.0, 1.0, 2.0, 4.0])
    right = torch.tensor([True, True, False, False])
    found = geometry.low_curvature_accuracy(flat, right, [0.0, 1.0])
    assert found.size_strict.tolist() == [0, 3]
    assert found.size_weak.tolist() == [1, 4]
    assert math.isnan(float(found.strict[0]))
    assert float(found.strict[1]) == pytest.approx(2 / 3)
    assert float(found.weak[1]) == pytest.approx(1 / 2)


def test_rob_equation_12_aligns_noisy_features_with_clean_centroids():
    """At zero clean and noisy loss every noisy feature is within 2 delta_v of every clean one."""
    q = draw(0, 30, 3)
    labels = torch.arange(30) % 3
    centroids = 4 * draw(1, 3, 3)
    radius = 0.5
    clean = centroids[labels] + radius * 0.999 * F.normalize(q)
    noisy = centroids[labels] - radius * 0.999 * F.normalize(draw(2, 30, 3))
    for features in (clean, noisy):
        assert float(LF.noise_alignment(features, centroids, labels, radius=radius).max()) == 0
    same = labels[:, None] == labels
    assert float(torch.cdist(clean, noisy)[same].max()) <= 2 * radius
    far = LF.noise_alignment(centroids[labels] + 1.5, centroids, labels, radius=radius)
    expected = (1.5 * math.sqrt(3) - radius) ** 2
    torch.testing.assert_close(far, torch.full_like(far, expected))


@pytest.mark.parametrize("seed", range(3))
def test_rob_equation_13_is_the_weighted_sum(seed):
    """L_S + alpha L_compact + beta L_margin + gamma L_reg + lambda L_noisy, centroids clean."""
    q, W, b = draw(seed, 12, 3), draw(seed + 1, 4, 3), draw(seed + 2, 4)
    noisy, y = q + draw(seed + 3, 12, 3), torch.arange(12) % 4
    options = {"alpha": 2.0, "beta": 0.5, "gamma_reg": 0.1, "radius": 0.1, "margin": 5.0}
    robust = lm.RobustDiscriminative(4, 3, noise_weight=0.7, **options).double()
    clean = lm.Discriminative(4, 3, momentum=0.9, **options).double()
    means = torch.stack([q[y == c].mean(0) for c in range(4)])  # equal counts, first sight
    aligned = LF.noise_alignment(noisy, means, y, radius=0.1).mean()
    softmax = F.cross_entropy(q @ W.T + b, y)
    expected = softmax + clean(q, W, y, bias=b) + 0.7 * aligned
    value = robust.named_terms(q, W, y, noisy, bias=b)
    torch.testing.assert_close(value.total, expected)
    torch.testing.assert_close(value.terms["noisy"], aligned)
    torch.testing.assert_close(value.terms["softmax"], softmax)
