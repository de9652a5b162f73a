"""Bounds: closed forms, inequalities, monotonicity, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largemargin import geometry as g
from largemargin.errors import LargeMarginError

SETTINGS = {"rho": 0.7, "radius": 0.5, "centroid_norm": 2.0}


@given(st.floats(-5, 5), st.floats(0.01, 4))
def test_ramp_is_between_the_two_errors(x, rho):
    value = float(g.ramp_loss(torch.tensor(x, dtype=torch.float64), rho=rho))
    assert float(x <= 0) <= value <= float(x < rho) + 1e-12


def test_the_union_bound_is_never_informative():
    h = torch.linspace(-3, 3, 101).double()
    size = 1.2 * math.sqrt((0.5 + 2.0) ** 2 + 1)
    bound = g.linear_margin_bound(h.clamp(-size, size), weight_norm=1.2, **SETTINGS)
    assert float(bound.union) >= 1 + size / SETTINGS["rho"]
    assert float(bound.fixed) < float(bound.union)


def test_bounds_shrink_with_the_sample_size():
    h = torch.rand(9).double()
    small, large = (
        g.linear_margin_bound(h, weight_norm=1.0, num_samples=n, **SETTINGS) for n in (100, 10_000)
    )
    assert float(large.fixed - large.empirical) == pytest.approx(
        float(small.fixed - small.empirical) / 10
    )
    assert float(g.linear_margin_bound(h, weight_norm=1.0, **SETTINGS).confidence) == float(
        g.linear_margin_bound(h, weight_norm=1.0, num_samples=9, **SETTINGS).confidence
    )


@pytest.mark.parametrize("part", ["empirical", "union", "fixed"])
def test_bounds_have_the_gradient_of_their_formula(part):
    h = torch.tensor([-0.4, 0.1, 0.3, 0.6, 1.4], dtype=torch.float64, requires_grad=True)
    how = {"weight_norm": 1.2, "num_samples": 50, **SETTINGS}
    assert torch.autograd.gradcheck(lambda x: getattr(g.linear_margin_bound(x, **how), part), h)
    ball = {"rho": 0.7, "feature_norm": 1.0, "centroid_norm": 1.0, "radius": 2.0}
    assert torch.autograd.gradcheck(lambda x: g.ball_bound(x, **ball).bound, h)


def test_when_the_ball_bound_is_informative():
    h = torch.full((10**6,), 100.0)
    tight = g.ball_bound(h, rho=100.0, feature_norm=0.01, centroid_norm=1.0, radius=10.0)
    assert tight.informative
    assert float(tight.bound) < 1
    assert not g.ball_bound(h, rho=1.0, feature_norm=1.0, centroid_norm=1.0, radius=2.0).informative


def distributions(seed, size):
    raw = torch.rand(2, size, generator=torch.Generator().manual_seed(seed)).double()
    raw[0, 0] = 0
    return raw / raw.sum(1, keepdim=True)


@given(st.integers(2, 9), st.integers(0, 10**6))
def test_divergences_are_ordered(size, seed):
    p, q = distributions(seed, size)
    jsd, tv = float(g.jensen_shannon(p, q)), float(g.total_variation(p, q))
    assert 0 <= jsd <= math.log(2) + 1e-12
    assert jsd == pytest.approx(float(g.jensen_shannon(q, p)))
    assert tv**2 / 2 - 1e-12 <= jsd <= tv * math.log(2) + 1e-12
    assert 2 * tv**2 <= float(g.kl_divergence(p, q)) + 1e-12
    assert float(g.jensen_shannon(p, p)) == pytest.approx(0, abs=1e-12)
    assert float(g.kl_divergence(q, p)) == math.inf
    stacked = g.jensen_shannon(torch.stack([p, p]), torch.stack([q, p]))
    torch.testing.assert_close(stacked, torch.tensor([jsd, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("divergence", [g.kl_divergence, g.total_variation, g.jensen_shannon])
def test_divergences_have_the_gradient_of_their_formula(divergence):
    p, q = ((1 + row) / (1 + row).sum() for row in distributions(0, 4))
    assert torch.autograd.gradcheck(divergence, (p.requires_grad_(), q.requires_grad_()))


def test_outcomes_of_probability_0_have_no_gradient_of_their_own():
    p = torch.tensor([0.0, 0.25, 0.75], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    (found,) = torch.autograd.grad(g.kl_divergence(p, q), p)
    wanted = torch.tensor([0.0, 1.0, 1.0 + math.log(3)], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)


@given(st.floats(0.5, 1.0))
def test_jsd_bounds_are_ordered_and_reached(tau):
    bound = g.jsd_lower_bound(tau)
    assert 0 <= bound.paper <= bound.tight + 1e-15
    assert bound.tight <= math.log(2)
    p = torch.tensor([tau, 1 - tau], dtype=torch.float64)
    assert float(g.jensen_shannon(p, p.flip(0))) == pytest.approx(bound.tight, abs=1e-12)


@given(st.integers(2, 20), st.floats(0.1, 100.0))
def test_gm_bound_of_cosface_is_its_value_at_the_simplex(num_classes, scale):
    margin = 0.35
    bound = g.gm_softmax_bound(num_classes, scale=scale, beta1=-margin, beta2=-margin)
    gap = scale * (num_classes / (num_classes - 1) - margin)
    value = math.log1p((num_classes - 1) * math.exp(-gap))
    assert float(bound) == pytest.approx(value, rel=1e-6, abs=1e-12)
    logits = torch.full((1, num_classes), -scale / (num_classes - 1), dtype=torch.float64)
    logits[0, 0] = scale * (1 - margin)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0]))
    assert float(bound) == pytest.approx(float(loss), rel=1e-6, abs=1e-12)


def test_gm_bound_averages_per_sample_parameters():
    alpha = torch.tensor([0.6, 1.0])
    each = [g.gm_softmax_bound(4, scale=3.0, alpha1=float(a), alpha2=float(a)) for a in alpha]
    found = g.gm_softmax_bound(4, scale=3.0, alpha1=alpha, alpha2=alpha)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(sum(each)) / 2, rel=1e-6)
    assert math.isfinite(g.gm_softmax_bound(4, alpha1=0.1, alpha2=0.1, check=False))


@given(st.integers(1, 4), st.floats(0.2, 5.0), st.integers(0, 10**6))
def test_spectral_complexity_scales_with_each_layer(depth, factor, seed):
    generator = torch.Generator().manual_seed(seed)
    widths = torch.randint(1, 5, (depth + 1,), generator=generator).tolist()
    weights = [
        torch.randn(widths[i + 1], widths[i], generator=generator).double() for i in range(depth)
    ]
    before = g.spectral_complexity(weights, reference="zero")
    scaled = [factor * weights[0], *weights[1:]]
    after = g.spectral_complexity(scaled, reference="zero")
    torch.testing.assert_close(after.complexity, factor * before.complexity)
    torch.testing.assert_close(after.product, factor * before.product)
    ratios = (before.norms_21 / before.spectral_norms).pow(2 / 3).sum().pow(3 / 2)
    torch.testing.assert_close(before.complexity, before.product * ratios)


def test_spectral_complexity_of_orthogonal_and_zero_layers():
    layers = [torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (3, 3)]
    found = g.spectral_complexity(layers, reference="zero")
    assert float(found.complexity) == pytest.approx((2 * 3 ** (2 / 3)) ** 1.5)
    assert float(g.spectral_complexity([torch.zeros(2, 2)]).complexity) == pytest.approx(2)
    rows = torch.tensor([[3.0, 4.0]])
    assert float(g.spectral_complexity([rows], reference="zero", norm="rows").norms_21) == 5
    assert float(g.spectral_complexity([rows], reference="zero", norm="columns").norms_21) == 7


def test_cushions_are_their_definition():
    weights = [torch.randn(s, dtype=torch.float64) for s in ((5, 4), (6, 5), (3, 6))]
    inputs = torch.randn(150, 4, dtype=torch.float64)
    found = g.noise_cushions(weights, inputs)
    assert found.width == 6
    assert g.noise_cushions(weights[:1], inputs[:, :4]).width == 5  # outputs, whatever the inputs
    assert g.noise_cushions([weights[1].T], inputs.new_ones(2, 6)).width == 5

    def outputs(start, f):
        """Pre-activations of the layers after ``start``, given those of layer ``start``."""
        for weight in weights[start:]:
            f = weight @ f.relu()
            yield f

    smallest = [math.inf] * 3
    for x in inputs:
        f = weights[0] @ x
        for i in range(3):
            later = list(outputs(i + 1, f))
            for j, g_j in enumerate(later):
                jacobian = torch.func.jacrev(lambda z, i=i, j=j: list(outputs(i + 1, z))[j])(f)
                smallest[i] = min(smallest[i], float(g_j.norm() / (jacobian.norm() * f.norm())))
            smallest[i] = min(smallest[i], 1 / math.sqrt(len(f)))
            f = later[0] if later else f
    torch.testing.assert_close(
        found.minimal_interlayer_cushion, torch.tensor(smallest, dtype=torch.float64)
    )
    assert found.width == 6
    assert (found.layer_cushion <= 1 / found.stable_rank.sqrt() + 1e-12).all()


def test_contraction_at_its_ends():
    assert float(g.noise_cushions([torch.eye(2)], torch.ones(1, 2)).activation_contraction) == 1
    dead = g.noise_cushions([-torch.eye(2), torch.eye(2)], torch.ones(1, 2))
    assert dead.activation_contraction.isnan()
    both = g.noise_cushions([-torch.eye(2), torch.eye(2)], torch.tensor([[1.0, 1.0], [-1.0, -2.0]]))
    alone = g.noise_cushions([-torch.eye(2), torch.eye(2)], torch.tensor([[-1.0, -2.0]]))
    torch.testing.assert_close(both.layer_cushion, alone.layer_cushion)


def pac_bayes(num_samples=1000, w=None, r=1.2):
    cushions = torch.tensor([0.4, 0.3], dtype=torch.float64)
    w = torch.ones(5, dtype=torch.float64) if w is None else w
    return g.pac_bayes_quantities(
        torch.randn(30, dtype=torch.float64),
        w,
        cushions,
        cushions + 0.1,
        num_samples=num_samples,
        width=7,
        contraction=1.5,
        spectral_norm=2.0,
        r=r,
    )


def test_sigma_solves_the_equation_it_comes_from():
    found = pac_bayes()
    cushions = torch.tensor([0.4 * 0.5, 0.3 * 0.4], dtype=torch.float64)
    moved = 1.5 * (1.2 + 0.7) * (found.perturbation_norm / (2.0 * cushions)).sum()
    assert float(moved) == pytest.approx((1.2 - 0.7) / 4)


def test_slack_falls_with_samples_and_grows_with_the_weights():
    few, many = pac_bayes(1000), pac_bayes(4000)
    heavy = pac_bayes(1000, w=3 * torch.ones(5, dtype=torch.float64))
    for name in ("slack_pac_bayes", "slack_lemma1"):
        assert getattr(many, name) < getattr(few, name) < getattr(heavy, name)


@pytest.mark.parametrize("part", ["sigma", "kl", "slack_pac_bayes", "bound_lemma1"])
def test_the_pac_bayes_step_has_the_gradient_of_its_formula(part):
    margins = torch.tensor([-0.3, 0.2, 0.9], dtype=torch.float64)
    w, layers, between = (
        torch.linspace(low, 1.0, n, dtype=torch.float64, requires_grad=True)
        for low, n in ((0.5, 4), (0.3, 2), (0.4, 2))
    )
    settings = {"num_samples": 90, "width": 7, "contraction": 1.5, "spectral_norm": 2.0}

    def value(*given):
        return getattr(g.pac_bayes_quantities(margins, *given, **settings), part)

    assert torch.autograd.gradcheck(value, (w, layers, between))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: g.ramp_loss(torch.ones(2), rho=0.0), "rho must be"),
        (lambda: g.ramp_loss(torch.ones(2).long(), rho=1.0), "but torch.int64 was given"),
        (lambda: g.ramp_loss(0.5, rho=1.0), "margins must be .* but float was given"),
        (lambda: g.linear_margin_bound(torch.ones(2), weight_norm=-1.0, **SETTINGS), "weight_norm"),
        (
            lambda: g.linear_margin_bound(torch.ones(2), weight_norm=1.0, delta=1.0, **SETTINGS),
            "delta must be",
        ),
        (
            lambda: g.ball_bound(torch.ones(0), feature_norm=1.0, **SETTINGS),
            "num_samples must be",
        ),
        (lambda: g.jsd_lower_bound(0.4), "tau must be"),
        (lambda: g.jensen_shannon(torch.ones(2), torch.ones(2)), "sum to 1"),
        (lambda: g.kl_divergence(torch.ones(1), torch.ones(2) / 2), "same shape"),
        (lambda: g.total_variation(torch.ones(1).long(), torch.ones(1).long()), "p must be"),
        (lambda: g.simplex_optimum(1), "at least 2 classes"),
        (lambda: g.simplex_optimum(3, scale=0.0), "scale must be"),
        (lambda: g.gm_softmax_bound(3, alpha1=0.3, alpha2=0.3), "alpha1 must be >= 1/2"),
        (lambda: g.gm_softmax_bound(3, alpha1=0.6, alpha2=0.7), "alpha2 <= alpha1"),
        (lambda: g.spectral_complexity([]), "at least one layer"),
        (lambda: g.spectral_complexity([torch.eye(2)], reference="one"), "reference must be"),
        (lambda: g.spectral_complexity([torch.eye(2)], norm="both"), "norm must be"),
        (lambda: g.spectral_complexity([torch.eye(2), torch.eye(3)]), "must fit together"),
        (lambda: g.spectral_complexity([torch.ones(2, 2, 3, 3)]), r"weights\[0\] must have shape"),
        (lambda: g.noise_cushions([torch.eye(2)], torch.ones(1, 3)), "inputs must have shape"),
        (lambda: g.noise_cushions([torch.eye(2)], torch.ones(0, 2)), r"theirs is \(0, 2\)"),
        (lambda: pac_bayes(num_samples=1), "num_samples must be"),
        (lambda: pac_bayes(r=0.5), "r must be"),
        (
            lambda: g.cushion_complexity(
                g.noise_cushions([torch.eye(2)], torch.ones(1, 2)), num_samples=9, theta=-1.0
            ),
            "theta must be",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call()
