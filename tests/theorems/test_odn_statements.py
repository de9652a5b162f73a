"""ODN: the margin distribution loss, its competitors' signs, and the quantities of its bounds."""

import math

import pytest
import torch
import torch.nn.functional as F

import largemargin.functional as LF
from largemargin import geometry


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def orthogonal(seed, size):
    return torch.linalg.qr(draw(seed, size, size)).Q


def layers(seed, widths=(4, 10, 8, 3)):
    return [draw(seed + i, widths[i + 1], widths[i]) for i in range(len(widths) - 1)]


@pytest.mark.parametrize("norm", ["rows", "columns"])
def test_odn_equation_3_scales_with_every_layer(norm):
    weights, factors = layers(0), (0.3, 2.0, 5.0)
    before = geometry.spectral_complexity(weights, reference="zero", norm=norm)
    scaled = [factor * weight for factor, weight in zip(factors, weights, strict=True)]
    after = geometry.spectral_complexity(scaled, reference="zero", norm=norm)
    torch.testing.assert_close(after.complexity, math.prod(factors) * before.complexity)
    torch.testing.assert_close(after.product, math.prod(factors) * before.product)


@pytest.mark.parametrize("sizes", [(4,), (3, 3), (5, 5, 5)])
def test_odn_equation_3_of_orthogonal_layers(sizes):
    found = geometry.spectral_complexity(
        [orthogonal(i, size) for i, size in enumerate(sizes)], reference="zero"
    )
    # Row norms are 1, so a layer of n units has (2,1) norm n.
    expected = sum(size ** (2 / 3) for size in sizes) ** 1.5
    assert float(found.complexity) == pytest.approx(expected)
    assert float(found.product) == pytest.approx(1)


def test_odn_equation_3_by_definition_and_at_the_reference():
    weights = layers(3)
    found = geometry.spectral_complexity(weights)
    total = 0.0
    for weight in weights:
        off = weight - torch.eye(*weight.shape, dtype=torch.float64)
        ratio = off.norm(dim=1).sum() / torch.linalg.svdvals(weight)[0]
        total += float(ratio) ** (2 / 3)
    product = math.prod(float(torch.linalg.svdvals(weight)[0]) for weight in weights)
    assert float(found.complexity) == pytest.approx(product * total**1.5)
    identity = [torch.eye(3, dtype=torch.float64)] * 2
    assert float(geometry.spectral_complexity(identity).complexity) == 0
    assert float(geometry.spectral_complexity(identity, reference="zero").complexity) > 1


SETTINGS = {"width": 6, "contraction": 1.7, "spectral_norm": 2.0, "r": 1.2, "theta": 0.7}


def pac_bayes(num_samples=1000, size=1.0, **changed):
    cushion = torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64)
    settings = {**SETTINGS, **changed}
    return geometry.pac_bayes_quantities(
        draw(0, 50), size * draw(1, 20), cushion, cushion - 0.2, num_samples=num_samples, **settings
    )


def test_odn_equation_2_and_lemma_1_slack():
    for name, factor in (("slack_pac_bayes", 2), ("slack_lemma1", 1)):
        by_samples = [float(getattr(pac_bayes(m), name)) for m in (10, 100, 1000, 10**6)]
        assert by_samples == sorted(by_samples, reverse=True)
        by_size = [float(getattr(pac_bayes(size=s), name)) for s in (0.1, 0.5, 1.0, 3.0)]
        assert by_size == sorted(by_size)
        found = pac_bayes()
        inside = {"slack_pac_bayes": 1000 / 0.05, "slack_lemma1": 3 * 1000 / 0.05}[name]
        expected = math.sqrt((float(found.kl) + math.log(inside)) / (factor * 999))
        assert float(getattr(found, name)) == pytest.approx(expected)


@pytest.mark.parametrize(("r", "theta"), [(1.2, 0.7), (30.0, 0.7), (2.0, 0.0)])
def test_odn_lemma_1_sigma_solves_its_equation(r, theta):
    found = pac_bayes(r=r, theta=theta)
    products = [0.5 * 0.3, 0.4 * 0.2, 0.3 * 0.1]
    moved = sum(float(found.perturbation_norm) / (2.0 * product) for product in products)
    assert 1.7 * (r + theta) * moved == pytest.approx((r - theta) / 4)
    growth = math.sqrt(2 * 6 * math.log(4 * 3 * 6))
    assert float(found.perturbation_norm) == pytest.approx(float(found.sigma) * growth)
    squared = float(draw(1, 20).square().sum())
    assert float(found.kl) == pytest.approx(squared / (2 * float(found.sigma) ** 2))


def test_odn_equation_2_empirical_parts_count_both_ends():
    margins = torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.9, 3.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    found = geometry.pac_bayes_quantities(
        margins, one, one, one, num_samples=100, **{**SETTINGS, "r": 1.2, "theta": 0.7}
    )
    assert float(found.emp_zero_one) == pytest.approx(2 / 6)
    low, high = (margins <= 1.2 - 0.7).sum(), (margins >= 1.2 + 0.7).sum()
    assert float(found.emp_margin) == pytest.approx(float(low + high) / 6)


def test_odn_theorem_1_erratum_d8_the_derived_form_is_the_kl_of_the_proof():
    """With one spectral norm for all layers: derived^2 m - ln(Lm/delta) = KL/16."""
    weights = [2.0 * w / torch.linalg.svdvals(w)[0] for w in layers(5)]
    cushions = geometry.noise_cushions(weights, draw(9, 40, 4))
    m, r, theta = 5000, 1.2, 0.7
    found = geometry.cushion_complexity(cushions, num_samples=m, r=r, theta=theta)
    step = geometry.pac_bayes_quantities(
        draw(0, 9),
        torch.cat([w.flatten() for w in weights]),
        cushions.layer_cushion,
        cushions.minimal_interlayer_cushion,
        num_samples=m,
        width=cushions.width,
        contraction=float(cushions.activation_contraction),
        spectral_norm=2.0,
        r=r,
        theta=theta,
    )
    inside = float(found.derived) ** 2 * m - math.log(3 * m / 0.05)
    assert inside == pytest.approx(float(step.kl) / 16)
    printed = float(found.printed) ** 2 * m * (r - theta) ** 2 - math.log(3 * m / 0.05)
    assert printed != pytest.approx(float(step.kl) / 16, rel=0.1)


def relu_network(weights, x):
    for weight in weights[:-1]:
        x = F.relu(x @ weight.T)
    return x @ weights[-1].T


def lemma_2_ratio(weights, changes, inputs, *, norm):
    """Largest change of the output over |f(x)| sum_i |U_i|_2 / (|W_i| mu_i mu_i->)."""
    cushions = geometry.noise_cushions(weights, inputs)
    right = sum(
        float(torch.linalg.svdvals(change)[0] / norm(weight) / mu / after)
        for change, weight, mu, after in zip(
            changes,
            weights,
            cushions.layer_cushion,
            cushions.minimal_interlayer_cushion,
            strict=True,
        )
    )
    moved = [weight + change for weight, change in zip(weights, changes, strict=True)]
    output = relu_network(weights, inputs)
    change = (relu_network(moved, inputs) - output).norm(dim=1)
    return float((change / output.norm(dim=1)).max()) / right


@pytest.mark.parametrize("seed", range(5))
def test_odn_lemma_2(seed, record_property):
    """The hidden constant is at most 1 to first order; for steps as large as printed, reported."""
    weights, inputs = layers(10 * seed), draw(10 * seed + 5, 20, 4)
    changes = [draw(10 * seed + 6 + i, *weight.shape) for i, weight in enumerate(weights)]
    changes = [change / torch.linalg.svdvals(change)[0] for change in changes]
    tiny = [1e-7 * change for change in changes]
    assert lemma_2_ratio(weights, tiny, inputs, norm=torch.linalg.matrix_norm) <= 1
    for i in range(3):
        alone = [change if i == j else 0 * change for j, change in enumerate(tiny)]
        assert 0 < lemma_2_ratio(weights, alone, inputs, norm=torch.linalg.matrix_norm) <= 1
    allowed = [
        change * torch.linalg.svdvals(w)[0] / 3 for change, w in zip(changes, weights, strict=True)
    ]
    printed = lemma_2_ratio(weights, allowed, inputs, norm=lambda w: torch.linalg.svdvals(w)[0])
    record_property("change over the printed right side, c = 1", printed)


def test_odn_definition_2_erratum_d7():
    """With |f^i| in the denominator the term j = i is 1/sqrt(width), as the next line claims."""
    weights, inputs = layers(2), draw(8, 30, 4)
    cushions = geometry.noise_cushions(weights, inputs)
    widths = torch.tensor([10.0, 8.0, 3.0], dtype=torch.float64)
    assert float(cushions.minimal_interlayer_cushion[-1]) == pytest.approx(1 / math.sqrt(3))
    assert bool((cushions.minimal_interlayer_cushion <= 1 / widths.sqrt() + 1e-12).all())
    for weight, rank in zip(weights, cushions.stable_rank, strict=True):
        # The paper calls |W|_F/|W|_2 the stable rank, which is its square root.
        printed = torch.linalg.matrix_norm(weight) / torch.linalg.svdvals(weight)[0]
        torch.testing.assert_close(rank, printed.square())
    hidden = F.relu(F.relu(inputs @ weights[0].T) @ weights[1].T)
    output = hidden @ weights[2].T
    printed = (output.norm(dim=1) / (math.sqrt(3) * hidden.norm(dim=1))).min()
    assert abs(float(printed) - 1 / math.sqrt(3)) > 0.1


def test_odn_hinge_erratum_d1():
    margins = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    LF.margin_hinge(margins, threshold=1.0).sum().backward()
    assert margins.grad.tolist() == [-1, -1, 0]  # descent raises the margins below the threshold
    printed = F.relu(margins.detach() - 1.0)
    assert printed.tolist() == [0, 0, 2]  # and this would punish the one that is wide enough
    assert LF.margin_hinge(margins.detach(), threshold=1.0).tolist() == [2, 0.5, 0]


def printed_soft_hinge(f, y):
    others = torch.cat([f[:y], f[y + 1 :]])
    return -(F.softplus(-f[y]) - F.softplus(-others).sum()) / len(f)


def test_odn_soft_hinge_erratum_d2():
    f = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    (wrong,) = torch.autograd.grad(printed_soft_hinge(f, 0), f)
    assert float(wrong[0]) == pytest.approx(0.0397, abs=5e-5)  # raising the target costs
    (right,) = torch.autograd.grad(LF.soft_hinge(f[None], torch.tensor([0])).sum(), f)
    assert float(right[0]) == pytest.approx(-0.0397, abs=5e-5)
    assert bool((right[1:] > 0).all())
    hot = F.one_hot(torch.tensor([0]), 3).double()
    expected = F.multilabel_soft_margin_loss(f.detach()[None], hot, reduction="none")
    torch.testing.assert_close(LF.soft_hinge(f.detach()[None], torch.tensor([0])), expected)


def test_odn_soft_hinge_erratum_d2_the_outer_sign_alone_does_not_help():
    f = torch.tensor([0.0, -500.0, -500.0], dtype=torch.float64)
    assert float(-printed_soft_hinge(f, 0)) < -300  # unbounded below
    assert float(LF.soft_hinge(f[None], torch.tensor([0]))) >= 0


@pytest.mark.parametrize("label", [0, 1, 2])
def test_odn_soft_hinge_is_bounded_and_zero_only_when_right(label):
    best = torch.full((1, 3), -60.0, dtype=torch.float64)
    best[0, label] = 60.0
    assert float(LF.soft_hinge(best, torch.tensor([label]))) == pytest.approx(0, abs=1e-20)
    assert float(LF.soft_hinge(best, torch.tensor([(label + 1) % 3]))) > 30


def test_odn_tables_2_and_3_erratum_d3():
    """The ratio that grows with compactness is between/within: the row labels are exchanged."""
    tight = torch.tensor([[-10.0], [-10.1], [10.0], [10.1]], dtype=torch.float64)
    loose = torch.tensor([[-10.0], [5.0], [10.0], [-4.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])
    compact, spread = (geometry.variance_split(e, labels) for e in (tight, loose))
    assert float(compact.ratio) > 1 > float(spread.ratio)
    assert float(compact.ratio) == pytest.approx(float(compact.between / compact.within))


@pytest.mark.parametrize(("r", "theta", "mu"), [(1.2, 0.7, 0.1), (30.0, 0.7, 1.0), (2.0, 0.0, 0.5)])
def test_odn_equation_1_erratum_d4(r, theta, mu):
    margins = torch.tensor([0.0, r - theta, r, r + theta, 2 * (r + theta)], dtype=torch.float64)
    losses = LF.margin_distribution(margins, r=r, theta=theta, mu=mu)
    # Twice the upper end costs mu: the upper branch is scaled by (r+theta)^2, not (r-theta)^2.
    assert losses.tolist() == pytest.approx([1, 0, 0, 0, mu], abs=1e-12)
    printed_in_appendix = mu * (r + theta) ** 2 / (r - theta) ** 2
    assert theta == 0 or printed_in_appendix != pytest.approx(mu, rel=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_odn_margin_erratum_d5_is_a_distance(seed):
    """Divided by the *norm* of the gradient difference: the signed distance of a linear model."""
    W, b, x = draw(seed, 4, 3), draw(seed + 1, 4), draw(seed + 2, 5, 3).requires_grad_()
    labels = torch.arange(5) % 4
    logits = x @ W.T + b
    found = LF.linearized_margins(logits, labels, x, eps=0.0)
    for n in range(5):
        y, rival = int(labels[n]), int(found.rival_index[n])
        normal = W[rival] - W[y]
        foot = x.detach()[n] + found.margins.detach()[n] * normal / normal.norm()
        on_boundary = foot @ W[y] + b[y] - foot @ W[rival] - b[rival]
        assert abs(float(on_boundary)) < 1e-12
        others = logits.detach()[n].clone()
        others[y] = -torch.inf
        assert rival == int(others.argmax())
