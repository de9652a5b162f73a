"""Identities of input margins, curvature and divergences: items 11, 12 and 14."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from properties.drawn import CHECKED, SEEDS, close, problems
from torch import nn

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

RANGES = st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 30.0)).map(lambda t: (t[0] + t[1], t[0]))


@CHECKED
@given(RANGES, st.floats(0.01, 1.0), st.booleans())
def test_item_11_margin_distribution_at_its_corners(band, mu, squared):
    r, theta = band
    settings = {"r": r, "theta": theta, "mu": mu, "squared": squared}
    margins = torch.tensor([0.0, r - theta, r, r + theta], dtype=torch.float64)
    corners = LF.margin_distribution(margins, **settings)
    close(corners, torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    below, above = (
        LF.margin_distribution(torch.tensor([g], dtype=torch.float64), **settings)
        for g in (-(r - theta), 3 * (r + theta))
    )
    close(below, torch.tensor([4.0 if squared else 2.0], dtype=torch.float64))
    close(above, torch.tensor([4 * mu], dtype=torch.float64))
    grid = torch.linspace(-r, r - theta, 20, dtype=torch.float64)
    assert bool((LF.margin_distribution(grid, **settings).diff() < 0).all())


@CHECKED
@given(problems(), st.floats(0.1, 50.0))
def test_item_11_linear_models_have_exact_distances(p, factor):
    x = p.features.clone().requires_grad_()
    logits = x @ p.prototypes.T + p.bias
    found = LF.linearized_margins(logits, p.labels, x, eps=0.0)
    rows = torch.arange(len(x))
    distance = LF.signed_boundary_distance(p.features, p.prototypes, p.bias)
    close(found.margins.detach(), -distance[rows, p.labels, found.rival_index], rtol=1e-8)
    scaled = LF.linearized_margins(factor * logits, p.labels, x, eps=0.0)
    close(scaled.margins.detach(), found.margins.detach(), rtol=1e-8)
    assert scaled.rival_index.equal(found.rival_index)


@CHECKED
@given(problems(), st.floats(0.1, 50.0))
def test_item_11_networks_margins_do_not_depend_on_the_scale_of_logits(p, factor):
    x = p.features.clone().requires_grad_()
    logits = torch.tanh(x) @ p.prototypes.T + p.bias
    found = LF.linearized_margins(logits, p.labels, x, eps=0.0).margins
    scaled = LF.linearized_margins(factor * logits, p.labels, x, eps=0.0).margins
    close(scaled.detach(), found.detach(), rtol=1e-7)
    right = logits.detach().argmax(1) == p.labels
    assert right.equal(found.detach() > 0)


@CHECKED
@given(problems(), st.floats(0.1, 3.0))
def test_item_11_losses_on_margins(p, threshold):
    x = p.features.clone().requires_grad_()
    logits = torch.tanh(x) @ p.prototypes.T + p.bias
    margins = LF.linearized_margins(logits, p.labels, x, eps=1e-6).margins.detach()
    hinge = lm.MarginHinge(threshold=threshold, eps=1e-6)(logits, p.labels, x)
    close(hinge.detach(), (threshold - margins).clamp_min(0).mean(), atol=1e-8)
    loss = lm.MarginDistribution(eps=1e-6)(logits, p.labels, x)
    close(loss.detach(), LF.margin_distribution(margins).mean(), rtol=1e-7)
    # The rival by logit is one of the rivals by distance, so the layer margin asks for no less.
    by_distance = LF.layer_margin(logits, p.labels, [x], gamma=threshold, eps=1e-6)
    assert bool((by_distance.detach() >= (threshold - margins).clamp_min(0) - 1e-9).all())
    if p.num_classes == 2:
        close(by_distance.detach(), (threshold - margins).clamp_min(0), atol=1e-8)


@CHECKED
@given(problems(), st.floats(0.1, 5.0))
def test_item_11_layer_margin_sums_over_layers_and_rivals(p, gamma):
    x = p.features.clone().requires_grad_()
    hidden = torch.tanh(x)
    logits = hidden @ p.prototypes.T + p.bias
    settings = {"gamma": gamma, "eps": 0.0}
    each = [LF.layer_margin(logits, p.labels, [h], **settings).detach() for h in (x, hidden)]
    both = LF.layer_margin(logits, p.labels, [x, hidden], **settings).detach()
    close(both, each[0] + each[1])
    summed = LF.layer_margin(logits, p.labels, [x], aggregate="sum", **settings).detach()
    assert bool((summed >= each[0] - 1e-12).all())
    assert bool((summed <= (p.num_classes - 1) * each[0] * (1 + 1e-12)).all())
    # At the last hidden layer the network is linear: distances to the pairwise boundaries.
    distance = LF.signed_boundary_distance(hidden.detach(), p.prototypes, p.bias)
    own = distance[torch.arange(len(x)), p.labels]
    others = p.rivals(own)
    close(each[1], (gamma + others).clamp_min(0).max(1).values, rtol=1e-8)


@CHECKED
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.floats(0.01, 10), SEEDS)
def test_item_12_curvature_of_a_quadratic_does_not_depend_on_the_step(D, N, K, step, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    H, g, x, directions = draw(D, D), draw(D), draw(N, D), draw(K, D)
    H = H + H.T

    def loss(outputs, labels):
        return (outputs @ H * outputs).sum(1) / 2 + outputs @ g

    labels = torch.zeros(N).long()
    expected = (directions @ H).square().sum(1).mean().expand(N)
    options = {"directions": directions, "loss": loss}
    found = geometry.curvature(nn.Identity(), x, labels, step=step, **options)
    close(found, expected, rtol=1e-6, atol=1e-7)
    close(geometry.curvature_limit(nn.Identity(), x, labels, **options), expected)
    exact = geometry.exact_curvature(nn.Identity(), x, labels, loss=loss)
    close(exact.sum_of_squares, H.square().sum().expand(N))
    close(exact.eigenvalues.sum(1), H.trace().expand(N))


@CHECKED
@given(problems(N=(1, 12)))
def test_item_14_variances_add_up(p):
    split = geometry.variance_split(p.features, p.labels)
    close(split.within + split.between, split.total)
    close(split.total, (p.features - p.features.mean(0)).square().sum(1).mean())
    centers = torch.stack([p.features[p.labels == y].mean(0) for y in p.labels])
    close(split.within, (p.features - centers).square().sum(1).mean())


@CHECKED
@given(st.integers(2, 8), st.floats(0.5, 1.0), SEEDS)
def test_item_14_divergence_of_separated_distributions(size, tau, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(2, size, dtype=torch.float64, generator=generator) + 1e-3
    p, q = torch.zeros(2, 2 * size, dtype=torch.float64)
    # p has mass tau on the first half, q on the second; elsewhere they share the rest.
    p[:size], p[size:] = tau * raw[0], (1 - tau) * raw[1]
    q[size:], q[:size] = tau * raw[1], (1 - tau) * raw[0]
    p, q = p / p.sum(), q / q.sum()
    mass = min(float(p[:size].sum()), float(q[size:].sum()))
    divergence = float(geometry.jensen_shannon(p, q))
    assert divergence <= math.log(2) + 1e-12
    if mass >= 0.5:
        bound = geometry.jsd_lower_bound(mass)
        assert divergence >= bound.tight - 1e-12
        assert bound.tight >= bound.paper - 1e-15 == (2 * mass - 1) ** 2 / 2 - 1e-15
    close(geometry.jensen_shannon(q, p), geometry.jensen_shannon(p, q))
    assert float(geometry.jensen_shannon(p, p)) == 0


@CHECKED
@given(problems(N=(2, 6)))
def test_item_14_margin_ratio(p):
    found = geometry.margin_ratio(p.share)
    close(found.mean, p.share.mean())
    close(found.std.square(), p.share.square().mean() - p.share.mean().square(), atol=1e-9)
    close(found.ratio, found.mean / found.std)
