"""Identities of the logit losses and class statistics: items 4, 5, 6, 13 and 16."""

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from properties.drawn import CHECKED, SCALES, close, gradients, problems

import largemargin.functional as LF
from largemargin import geometry

SPREADS = st.floats(0.1, 30.0)
SIMILARITIES = st.sampled_from(["dot", "cosine", "cosine_prototypes", "euclidean"])
IMPLS = st.sampled_from(["dense", "chunked"])

CE_TYPE = {
    "cross_entropy": LF.cross_entropy,
    "kobayashi": lambda f, y: LF.kobayashi(f, y, strength=0.7),
    "biased_softmax": lambda f, y: LF.biased_softmax(f, y, margin=2.0, strength=0.4),
    "label_smoothing": lambda f, y: LF.label_smoothing(f, y, smoothing=0.3),
    "focal": lambda f, y: LF.focal(f, y, gamma=2.0),
    "rival_divergence": LF.rival_divergence,
    "rivals_to_uniform": lambda f, y: LF.rival_divergence(f, y, kind="rivals_to_uniform"),
    "uniform_to_rivals": lambda f, y: LF.rival_divergence(f, y, kind="uniform_to_rivals"),
    "max_hinge": LF.max_hinge,
    "max_softplus": LF.max_softplus,
    "dense_hinge": LF.dense_hinge,
}


@CHECKED
@given(problems(), SPREADS)
def test_item_04_divergences_are_not_negative(p, spread):
    f = spread * p.logits
    found = {
        kind: LF.rival_divergence(f, p.labels, kind=kind)
        for kind in ("symmetric", "rivals_to_uniform", "uniform_to_rivals")
    }
    for values in found.values():
        assert float(values.min()) >= -1e-11 * spread
    sides = found["rivals_to_uniform"] + found["uniform_to_rivals"]
    close(found["symmetric"], sides / 2, atol=1e-10 * (1 + spread))
    if p.num_classes == 2:
        assert float(found["symmetric"].abs().max()) <= 1e-11 * spread
    elif p.num_classes > 2:
        assert float(found["symmetric"].max()) > 0


@CHECKED
@given(problems(), st.floats(-50, 50))
def test_item_04_divergence_sees_only_differences_of_rivals(p, shift):
    f = p.logits
    divergence = LF.rival_divergence(f, p.labels)
    close(LF.rival_divergence(f + shift, p.labels), divergence, atol=1e-9)
    target = f.gather(1, p.labels[:, None])
    close(LF.rival_divergence(f.scatter(1, p.labels[:, None], shift), p.labels), divergence)
    level = torch.full_like(f, shift).scatter(1, p.labels[:, None], target)
    close(LF.rival_divergence(level, p.labels), torch.zeros_like(divergence))
    (gradient,) = gradients(lambda logits: LF.rival_divergence(logits, p.labels), f)
    close(gradient.gather(1, p.labels[:, None]), torch.zeros_like(target))


@CHECKED
@given(problems(), SPREADS, st.floats(-50, 50))
def test_item_04_logit_gradients_sum_to_zero(p, spread, shift):
    f = spread * p.logits
    for name, loss in CE_TYPE.items():
        (gradient,) = gradients(lambda logits, loss=loss: loss(logits, p.labels), f)
        sums = gradient.sum(1)
        torch.testing.assert_close(sums, 0 * sums, rtol=0, atol=1e-10, msg=name)
        close(loss(f + shift, p.labels), loss(f, p.labels), rtol=1e-8, atol=1e-8)
        if name != "rival_divergence" and "uniform" not in name:
            own = gradient.gather(1, p.labels[:, None])
            if name != "label_smoothing":  # which pulls a confident target back
                assert float(own.max()) <= 1e-12, name


@CHECKED
@given(problems(), SPREADS)
def test_item_05_cross_entropy_is_a_margin_loss_with_an_implicit_bias(p, spread):
    f = spread * p.logits
    bias = geometry.implicit_bias(f, p.labels)
    assert float(bias.min()) >= 0
    assert float(bias.max()) <= math.log(p.num_classes - 1) + 1e-12
    target = f.gather(1, p.labels[:, None])[:, 0]
    rival = p.rivals(f).max(1).values
    close(LF.cross_entropy(f, p.labels), F.softplus(rival - target + bias))
    close(LF.cross_entropy(f, p.labels), F.cross_entropy(f, p.labels, reduction="none"))


@CHECKED
@given(problems(), SPREADS, st.floats(0, 5))
def test_item_06_order_of_the_hinges(p, spread, margin):
    f = spread * p.logits
    largest = LF.max_hinge(f, p.labels, margin=margin)
    smooth = LF.max_softplus(f, p.labels, margin=margin)
    mean = LF.dense_hinge(f, p.labels, margin=margin)
    assert bool((largest <= smooth).all())
    assert bool((smooth <= largest + math.log(2) + 1e-12).all())
    assert bool((mean <= largest + 1e-12).all())
    assert bool((largest <= (p.num_classes - 1) * mean + 1e-9).all())
    softmax = LF.biased_softmax(f, p.labels, margin=margin)
    assert bool((smooth <= softmax + 1e-12).all())
    if p.num_classes == 2:
        close(mean, largest)
        close(smooth, softmax)
    own = 10 * p.margins[p.labels]
    each = {"margin": 10 * p.margins}
    lowered = f.scatter_add(1, p.labels[:, None], -own[:, None])
    for loss in (LF.max_hinge, LF.max_softplus, LF.dense_hinge, LF.biased_softmax):
        close(loss(f, p.labels, **each), loss(lowered, p.labels, margin=0.0), atol=1e-9)


@CHECKED
@given(problems(), SPREADS)
def test_item_13_neutral_settings_of_the_logit_losses(p, spread):
    f = spread * p.logits
    plain = LF.cross_entropy(f, p.labels)
    close(LF.focal(f, p.labels, gamma=0.0), plain)
    close(LF.label_smoothing(f, p.labels, smoothing=0.0), plain)
    close(LF.kobayashi(f, p.labels, strength=0.0), plain)
    close(LF.biased_softmax(f, p.labels, margin=0.0), plain)
    ones = torch.ones(p.num_classes, dtype=torch.float64)
    close(LF.focal(f, p.labels, gamma=2.0, alpha=ones), LF.focal(f, p.labels))
    p_y = f.softmax(1).gather(1, p.labels[:, None])[:, 0]
    close(LF.focal(f, p.labels, gamma=1.5), (1 - p_y).pow(1.5) * plain, rtol=1e-6, atol=1e-9)


@CHECKED
@given(problems(), st.floats(0, 2), st.floats(0, 2))
def test_item_13_gaussian_mixture(p, alpha, weight):
    neutral = LF.gaussian_mixture(*p.inputs, alpha=0.0, likelihood_weight=0.0)
    close(neutral, LF.cross_entropy(*p.inputs, similarity="euclidean"))
    half_square = -0.5 * p.prototypes.square().sum(1)
    close(neutral, LF.cross_entropy(*p.inputs, bias=half_square))
    settings = {"alpha": alpha, "likelihood_weight": weight}
    unit = torch.zeros_like(p.prototypes)
    found = LF.gaussian_mixture(*p.inputs, log_variances=unit, **settings)
    close(found, LF.gaussian_mixture(*p.inputs, **settings), atol=1e-9)
    square = (p.features[:, None] - p.prototypes).square()
    distance = 0.5 * (square * torch.exp(-p.log_variances)).sum(2)
    half_logdet = 0.5 * p.log_variances.sum(1)
    own = F.one_hot(p.labels, p.num_classes).double()
    logits = -(1 + alpha * own) * distance - half_logdet
    likelihood = ((distance + half_logdet) * own).sum(1)
    expected = F.cross_entropy(logits, p.labels, reduction="none") + weight * likelihood
    found = LF.gaussian_mixture(*p.inputs, log_variances=p.log_variances, **settings)
    close(found, expected, rtol=1e-8, atol=1e-8)


@CHECKED
@given(problems(), st.floats(0.01, 2))
def test_item_13_gaussian_mixture_margin_and_likelihood(p, step):
    def loss(alpha, weight):
        settings = {"alpha": alpha, "likelihood_weight": weight}
        return LF.gaussian_mixture(*p.inputs, log_variances=p.log_variances, **settings)

    # A wider margin never costs less, and the likelihood enters linearly with slope -log N.
    assert bool((loss(step, 0.0) >= loss(0.0, 0.0)).all())
    normal = torch.distributions.Normal(p.prototypes, (p.log_variances / 2).exp())
    density = normal.log_prob(p.features[:, None]).sum(2).gather(1, p.labels[:, None])[:, 0]
    constant = p.features.shape[1] * math.log(2 * math.pi) / 2
    slope = (loss(0.5, step) - loss(0.5, 0.0)) / step
    close(slope, -density - constant, rtol=1e-7, atol=1e-7)


@CHECKED
@given(problems(), SIMILARITIES, SCALES, IMPLS)
def test_item_16_statistics_are_ordered(p, similarity, s, impl):
    stats = LF.class_stats(*p.inputs, bias=p.bias, similarity=similarity, scale=s, impl=impl)
    slack = 1e-9 * (1 + float(stats.rest.abs().max()))
    assert bool((stats.mean <= stats.spread + slack).all())
    assert bool((stats.spread <= stats.rival + slack).all())
    assert bool((stats.rival <= stats.rest + slack).all())
    assert bool((stats.rest <= stats.rival + math.log(p.num_classes - 1) + slack).all())
    if p.num_classes == 2:
        for other in (stats.rest, stats.spread, stats.mean):
            close(other, stats.rival)


@CHECKED
@given(problems(), SIMILARITIES, SCALES, IMPLS)
def test_item_16_statistics_are_their_definition(p, similarity, s, impl):
    form = {"bias": p.bias, "similarity": similarity, "scale": s}
    stats = LF.class_stats(*p.inputs, impl=impl, **form)
    logits = LF.similarity_logits(p.features, p.prototypes, **form)
    others = p.rivals(logits)
    q = others.softmax(1)
    close(stats.target, logits.gather(1, p.labels[:, None])[:, 0])
    close(stats.rival, others.max(1).values)
    close(stats.rest, torch.logsumexp(others, 1))
    close(stats.spread, (q * others).sum(1), rtol=1e-8)
    close(stats.mean, others.mean(1))
    assert bool((stats.rival_index != p.labels).all())
    close(logits.gather(1, stats.rival_index[:, None])[:, 0], stats.rival)
    every = LF.class_stats(p.features, p.prototypes, torch.zeros_like(logits), **form)
    for name in ("target", "rival", "rest", "spread", "mean"):
        column = getattr(every, name).gather(1, p.labels[:, None])[:, 0]
        close(column, getattr(stats, name), rtol=1e-8, atol=1e-8)


@CHECKED
@given(problems(), SCALES)
def test_item_16_losses_rebuilt_from_five_numbers(p, s):
    stats = LF.class_stats(*p.inputs, bias=p.bias)
    f = p.logits
    close(LF.cross_entropy(f, p.labels), F.softplus(stats.rest - stats.target))
    close(geometry.implicit_bias(f, p.labels), stats.rest - stats.rival)
    close(LF.rival_divergence(f, p.labels), (stats.spread - stats.mean) / 2)
    cosine = LF.class_stats(*p.inputs, similarity="cosine", scale=s)
    close(LF.lm_softmax(*p.inputs, scale=s), (cosine.rest - cosine.target) / s)
    close(LF.sample_margin(*p.inputs), (cosine.rival - cosine.target) / s)


@CHECKED
@given(problems(), SIMILARITIES, IMPLS)
def test_item_16_gradients_of_the_statistics(p, similarity, impl):
    logits = LF.similarity_logits(p.features, p.prototypes, similarity=similarity)
    own = F.one_hot(p.labels, p.num_classes).bool()
    q = logits.masked_fill(own, -torch.inf).softmax(1)
    spread = (q * logits).sum(1, keepdim=True)
    expected = {
        "rest": q,
        "spread": q * (1 + logits - spread),
        "mean": (~own).double() / (p.num_classes - 1),
        "target": own.double(),
    }
    for name, to_logits in expected.items():
        found = gradients(
            lambda q, W, name=name: getattr(
                LF.class_stats(q, W, p.labels, similarity=similarity, impl=impl), name
            ),
            p.features,
            p.prototypes,
        )
        by_chain = gradients(
            lambda q, W, to_logits=to_logits: (
                to_logits * LF.similarity_logits(q, W, similarity=similarity)
            ),
            p.features,
            p.prototypes,
        )
        for one, other in zip(found, by_chain, strict=True):
            close(one, other, rtol=1e-8, atol=1e-9)
