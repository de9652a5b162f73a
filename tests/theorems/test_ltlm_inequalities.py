"""LTLM: bounds on GM-Softmax and LM-Softmax, as corrected, and where the printed ones fail."""

import math

import pytest
import torch
from theorems.free_vectors import random_unit, unit, without_centroid

import largemargin.functional as LF
from largemargin import geometry

EXAMPLE = {"scale": 4.0, "alpha1": 0.8, "beta1": -0.2, "alpha2": 0.6, "beta2": -0.1}
LINES = [
    {"alpha1": 1.0, "beta1": 0.0, "alpha2": 1.0, "beta2": 0.0},
    {"alpha1": 1.0, "beta1": -0.35, "alpha2": 1.0, "beta2": -0.35},
    {"alpha1": 0.8, "beta1": -0.2, "alpha2": 0.6, "beta2": -0.1},
    {"alpha1": 0.5, "beta1": 0.1, "alpha2": -0.3, "beta2": 0.4},
]


def printed_bound(C, s, alpha1, beta1, alpha2, beta2, *, inner):
    """Thm 5 (inner = -1) and Thm 8 (inner = +1) as printed: the sign of 1/(C-1), and the first
    exponent with the two lines exchanged."""
    first = s * (alpha1 + beta1 - alpha2 - beta2)
    second = -s * (inner / (C - 1) + alpha1 + beta1)
    return math.log(math.exp(first) + (C - 1) * math.exp(second))


def risk(z, W, labels, **lines):
    return float(LF.gm_softmax(z, W, labels, **lines).mean())


@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize(("C", "D", "scale"), [(2, 1, 3.0), (3, 5, 1.0), (5, 4, 4.0), (4, 3, 10.0)])
def test_ltlm_theorem_5_with_erratum_z6(C, D, scale, lines):
    bound = float(geometry.gm_softmax_bound(C, scale=scale, **lines))
    W = LF.simplex(C, D, dtype=torch.float64)
    balanced = torch.arange(C).repeat(3)
    assert risk(W[balanced], W, balanced, scale=scale, **lines) == pytest.approx(bound, rel=1e-9)
    for seed in range(40):
        other, z = random_unit(C, D, seed), random_unit(3 * C, D, seed + 500)
        assert risk(z, other, balanced, scale=scale, **lines) >= bound - 1e-12
        assert risk(other[balanced], other, balanced, scale=scale, **lines) >= bound - 1e-12
        # Near the optimum, where a wrong sign would show first.
        if D > 1:
            near_W, near_z = unit(W + 0.05 * other), unit(W[balanced] + 0.05 * z)
            assert risk(near_z, near_W, balanced, scale=scale, **lines) > bound


def test_ltlm_theorem_5_erratum_z6_example():
    W = LF.simplex(5, 4, dtype=torch.float64)
    at_simplex = risk(W, W, torch.arange(5), **EXAMPLE)
    assert at_simplex == pytest.approx(-0.21839, abs=5e-6)
    assert float(geometry.gm_softmax_bound(5, **EXAMPLE)) == pytest.approx(at_simplex, abs=1e-12)
    lines = {"C": 5, "s": 4.0, **{k: v for k, v in EXAMPLE.items() if k != "scale"}}
    assert printed_bound(**lines, inner=-1) == pytest.approx(0.90754, abs=5e-6)
    assert at_simplex < printed_bound(**lines, inner=-1)


@pytest.mark.parametrize("C", [3, 5, 8])
def test_ltlm_theorem_5_holds_from_the_alpha_its_proof_needs(C):
    """The rival of the simplex: all prototypes in one place, all features opposite to it."""
    least, balanced = (C - 2) / (2 * (C - 1)), torch.arange(C)
    together = torch.zeros(C, C - 1, dtype=torch.float64)
    together[:, 0] = 1

    def gap(alpha, z, W):
        lines = {"scale": 6.0, "alpha1": alpha, "alpha2": alpha, "check": False}
        return risk(z, W, balanced, **lines) - float(geometry.gm_softmax_bound(C, **lines))

    assert gap(least, -together, together) == pytest.approx(0, abs=1e-12)
    assert gap(least - 0.05, -together, together) < -1e-3
    assert gap(0.5, -together, together) > 1e-3
    for seed in range(100):
        W, z = random_unit(C, C - 1, seed), random_unit(C, C - 1, seed + 500)
        for features in (z, W, unit(W - W.mean(0)), unit(z - 3 * together)):
            assert gap(least, features, W) >= -1e-12


def test_ltlm_theorem_8_erratum_z7():
    W = LF.simplex(5, 4, dtype=torch.float64)
    at_simplex = risk(W, W, torch.arange(5), **EXAMPLE)
    lines = {"C": 5, "s": 4.0, **{k: v for k, v in EXAMPLE.items() if k != "scale"}}
    assert printed_bound(**lines, inner=+1) == pytest.approx(0.48570, abs=5e-6)
    assert at_simplex < printed_bound(**lines, inner=+1)


@pytest.mark.parametrize(("C", "D"), [(3, 2), (4, 3), (5, 6)])
def test_ltlm_theorem_8_per_sample_lines_and_any_counts(C, D):
    labels = torch.repeat_interleave(torch.arange(C), torch.tensor([9, 4, 1, 1, 2])[:C])
    generator = torch.Generator().manual_seed(C)
    draw = torch.rand(4, len(labels), dtype=torch.float64, generator=generator)
    lines = {
        "alpha1": 0.5 + draw[0],
        "beta1": draw[1] - 0.5,
        "alpha2": 0.4 * draw[2],
        "beta2": draw[3] - 0.5,
        "scale": 5.0,
    }
    bound = float(geometry.gm_softmax_bound(C, **lines))
    W = LF.simplex(C, D, dtype=torch.float64)
    assert risk(W[labels], W, labels, **lines) == pytest.approx(bound, rel=1e-9)
    for seed in range(40):
        centred = without_centroid(random_unit(C, D, seed), rounds=400)
        assert float(LF.zero_centroid(centred)) < 1e-16
        for z in (centred[labels], random_unit(len(labels), D, seed + 500)):
            assert risk(z, centred, labels, **lines) >= bound - 1e-7


def test_ltlm_theorem_8_needs_the_zero_centroid():
    """One class has all the data: the others may retreat to its antipode, below the bound."""
    W = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1]], dtype=torch.float64)
    labels = torch.zeros(4, dtype=torch.long)
    bound = float(geometry.gm_softmax_bound(3, scale=5.0))
    assert risk(W[labels], W, labels, scale=5.0) < bound
    assert float(LF.zero_centroid(W)) > 0.1


def test_ltlm_gm_softmax_erratum_z5():
    """The scale multiplies beta: only then does the loss at the simplex equal the bound."""
    W, labels = LF.simplex(5, 4, dtype=torch.float64), torch.arange(5)
    s, a1, b1, a2, b2 = EXAMPLE.values()
    cosines = W @ W.T
    target = cosines.diagonal()
    rest = torch.logsumexp(s * cosines.masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf), 1)
    printed = torch.logaddexp(rest, s * a2 * target + b2) - s * a1 * target - b1
    bound = float(geometry.gm_softmax_bound(5, **EXAMPLE))
    assert risk(W, W, labels, **EXAMPLE) == pytest.approx(bound, abs=1e-12)
    assert abs(float(printed.mean()) - bound) > 0.1


def target_curve(theta, *, scale=1.0, **margins):
    """T(m1 theta + m2) - m3, read off the loss with two opposite prototypes."""
    W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    z = torch.stack([theta.cos(), theta.sin()], 1)
    loss = LF.unified_margin(z, W, torch.zeros(len(z)).long(), scale=scale, **margins)
    return (-scale * theta.cos() - torch.expm1(loss).log()) / scale


def test_ltlm_unified_margin_erratum_z3():
    """s multiplies m3 as well, which makes (1, 0, m) CosFace."""
    W, z, labels = random_unit(5, 4, 0), random_unit(7, 4, 1), torch.arange(7) % 5
    s, m = 6.0, 0.3
    unified = LF.unified_margin(z, W, labels, m3=m, scale=s)
    torch.testing.assert_close(unified, LF.cosface(z, W, labels, margin=m, scale=s))
    logits = s * (z @ W.T)
    printed = logits - m * torch.nn.functional.one_hot(labels, 5)
    assert float((LF.cross_entropy(printed, labels) - unified).abs().max()) > 0.1


@pytest.mark.parametrize("m1", [1.0, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("m2", [0.0, 0.3, math.pi / 3])
def test_ltlm_unified_margin_erratum_z4(m1, m2):
    theta = torch.linspace(1e-3, math.pi - 1e-3, 400, dtype=torch.float64)
    line = math.cos(m2) * theta.cos()
    continued = target_curve(theta, m1=m1, m2=m2)
    if m1 == 1 and m2 == 0:
        torch.testing.assert_close(continued, line)  # equality everywhere, not only at 0
    else:
        assert bool((continued < line).all())
    assert bool((continued.diff() < 0).all())
    printed = torch.cos(m1 * theta + m2)
    if m1 > 1:
        assert float((printed - line).max()) > 0.1
    if m1 == 2 and m2 == 0:
        assert float((printed - line).max()) == pytest.approx(2, abs=1e-2)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_ltlm_a_softmax_curve_falls_from_1_to_1_minus_2m(m):
    theta = torch.linspace(0.01, math.pi - 0.01, 400, dtype=torch.float64)
    W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    z = torch.stack([theta.cos(), theta.sin()], 1)
    loss = LF.sphereface(z, W, torch.zeros(400).long(), margin=m, scale=1.0)
    curve = -theta.cos() - torch.expm1(loss).log()
    torch.testing.assert_close(curve, LF.sphereface_psi(theta, m))
    assert bool((curve.diff() < 0).all())
    assert float(-curve.diff().min()) < 0.01 * m  # continuous: no step exceeds m times the grid's
    corners = torch.arange(m + 1, dtype=torch.float64) * math.pi / m
    expected = 1 - 2 * torch.arange(m + 1, dtype=torch.float64)
    torch.testing.assert_close(LF.sphereface_psi(corners, m), expected)


def arcface_at(theta, **settings):
    """The loss with two opposite prototypes, as a function of the angle to the target."""
    W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    z = torch.stack([theta.cos(), theta.sin()], 1)
    return LF.arcface(z, W, torch.zeros(len(z)).long(), scale=2.0, **settings)


@pytest.mark.parametrize("m", [0.1, 0.5, 1.0])
def test_ltlm_arcface_past_pi(m):
    """Hard falls everywhere with a jump of cos m + m sin m - 1, easy jumps up by sin m."""
    theta = torch.linspace(1e-3, math.pi - 1e-3, 500, dtype=torch.float64)
    curves = {}
    for mode in ("none", "hard", "easy"):
        loss = arcface_at(theta, margin=m, mode=mode)
        curves[mode] = -theta.cos() - torch.expm1(loss).log() / 2
    torch.testing.assert_close(curves["none"], torch.cos(theta + m))
    inside = theta < math.pi - m
    torch.testing.assert_close(curves["hard"][inside], curves["none"][inside])
    assert bool((curves["hard"].diff() < 0).all())
    assert float(curves["none"].diff().max()) > 0
    ends = torch.tensor([math.pi - m - 1e-9, math.pi - m + 1e-9], dtype=torch.float64)
    before, after = -ends.cos() - torch.expm1(arcface_at(ends, margin=m)).log() / 2
    jump = math.cos(m) + m * math.sin(m) - 1
    assert float(before - after) == pytest.approx(jump, abs=1e-7)
    assert m != 0.5 or jump == pytest.approx(0.1173, abs=5e-5)
    assert float(curves["easy"].diff().max()) == pytest.approx(math.sin(m), abs=2e-2)


@pytest.mark.parametrize("m", [0.1, 0.5])
def test_ltlm_arcface_gradient_exact_and_detached(m):
    """d loss / d theta = p_other s (sin theta + T'), with T' = sin(theta + m) or sin theta."""
    theta = torch.linspace(0.1, 2.5, 20, dtype=torch.float64, requires_grad=True)
    for gradient, slope in (("exact", torch.sin(theta + m)), ("detached", torch.sin(theta))):
        loss = arcface_at(theta, margin=m, gradient=gradient)
        (found,) = torch.autograd.grad(loss.sum(), theta)
        expected = -torch.expm1(-loss) * 2.0 * (torch.sin(theta) + slope)
        torch.testing.assert_close(found, expected.detach())


def test_zho_lmj_erratum_z8():
    violated = 0
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        N, C, D = (int(torch.randint(2, top, (), generator=generator)) for top in (9, 7, 6))
        s = float(64 ** torch.rand((), generator=generator))
        W, noise = random_unit(C, D, seed + 1000), random_unit(N, D, seed + 2000)
        labels = torch.randint(C, (N,), generator=generator)
        z = unit(W[labels] + 2 * torch.rand((), generator=generator) * noise)
        sides = geometry.lm_softmax_inequality(z, W, labels, scale=s)
        losses = LF.lm_softmax(z, W, labels, scale=s)
        corrected = float(losses.mean()) + math.log(N) / s
        printed = float(losses.sum()) / (s * N) + math.log(N) / s
        excess = s * (z @ W.T - (z * W[labels]).sum(1, keepdim=True))
        excess[torch.arange(N), labels] = -torch.inf
        left = float(torch.logsumexp(excess.flatten(), 0)) / s
        assert float(sides.left) == pytest.approx(left, rel=1e-9, abs=1e-12)
        assert float(sides.right) == pytest.approx(corrected, rel=1e-9, abs=1e-12)
        assert left >= corrected - 1e-12
        violated += left < printed - 1e-9
        assert -1e-9 <= left + float(sides.gamma_min) <= math.log(N * (C - 1)) / s + 1e-9
    assert violated > 60


def test_zho_lmj_left_side_tends_to_minus_the_smallest_margin():
    W, z, labels = random_unit(5, 3, 0), random_unit(8, 3, 1), torch.arange(8) % 5
    smallest = float(geometry.sample_margins(z, W, labels, similarity="cosine").min())
    gaps = []
    for s in (1.0, 10.0, 100.0, 1e4):
        sides = geometry.lm_softmax_inequality(z, W, labels, scale=s)
        assert float(sides.gamma_min) == pytest.approx(smallest, abs=1e-12)
        gaps.append(float(sides.left) + smallest)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3
