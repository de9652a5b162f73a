"""Identities of the cosine losses: items 1, 2, 3, 13 and 19 of the property list."""

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from properties.drawn import CHECKED, SCALES, SEEDS, close, gradients, problems

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

SHARES = st.floats(0.0, 0.99)
ANGLES = st.floats(0.0, 1.5)


@CHECKED
@given(problems(), SCALES)
def test_item_01_normface_is_softplus_of_lm(p, s):
    close(LF.normface(*p.inputs, scale=s), F.softplus(s * LF.lm_softmax(*p.inputs, scale=s)))


@CHECKED
@given(problems(), SCALES, SHARES)
def test_item_01_cosface_is_softplus_of_lm(p, s, share):
    m = share * p.num_classes / (p.num_classes - 1)
    found = LF.cosface(*p.inputs, margin=m, scale=s)
    close(found, F.softplus(s * (LF.lm_softmax(*p.inputs, scale=s) + m)))
    cosines = LF.similarity_logits(p.features, p.prototypes, similarity="cosine")
    close(LF.biased_softmax(s * cosines, p.labels, margin=s * m), found)
    form = {"similarity": "cosine", "scale": s}
    close(LF.biased_softmax(*p.inputs, margin=s * m, **form), found)
    close(LF.gm_softmax(*p.inputs, beta1=-m, beta2=-m, scale=s), found)


@CHECKED
@given(problems(), SCALES)
def test_item_01_cosface_with_a_margin_per_class(p, s):
    own = p.margins[p.labels]
    expected = F.softplus(s * (LF.lm_softmax(*p.inputs, scale=s) + own))
    close(LF.cosface(*p.inputs, margin=p.margins, scale=s), expected)


@CHECKED
@given(problems(), SCALES)
def test_item_02_lm_is_the_sample_margin_up_to_log_c_over_s(p, s):
    loss = LF.lm_softmax(*p.inputs, scale=s)
    margin = geometry.sample_margins(*p.inputs, similarity="cosine")
    close(LF.sample_margin(*p.inputs), -margin)
    assert bool((loss >= -margin - 1e-12).all())
    assert bool((loss <= -margin + math.log(p.num_classes - 1) / s + 1e-12).all())
    if p.num_classes == 2:
        close(loss, -margin)


@CHECKED
@given(problems(), SCALES)
def test_item_02_mean_lm_is_below_its_joint_form(p, s):
    sides = geometry.lm_softmax_inequality(*p.inputs, scale=s)
    N = len(p.labels)
    close(sides.right, LF.lm_softmax(*p.inputs, scale=s).mean() + math.log(N) / s)
    close(sides.gamma_min, -LF.sample_margin(*p.inputs).max())
    assert float(sides.left) >= float(sides.right) - 1e-12
    above = float(sides.left + sides.gamma_min)
    assert -1e-12 <= above <= math.log(N * (p.num_classes - 1)) / s + 1e-12


@CHECKED
@given(problems(), SCALES, SEEDS)
def test_item_02_lengths_do_not_matter(p, s, seed):
    generator = torch.Generator().manual_seed(seed)

    def stretch(rows):
        factors = 10 ** (4 * torch.rand(len(rows), 1, dtype=rows.dtype, generator=generator) - 2)
        return factors * rows

    q, W = stretch(p.features), stretch(p.prototypes)
    close(LF.lm_softmax(q, W, p.labels, scale=s), LF.lm_softmax(*p.inputs, scale=s))
    close(LF.sample_margin(q, W, p.labels), LF.sample_margin(*p.inputs))
    close(geometry.class_margin(W), geometry.class_margin(p.prototypes), atol=1e-7)
    close(LF.zero_centroid(W), LF.zero_centroid(p.prototypes))
    raw = LF.sample_margin(*p.inputs, normalize=False)
    close(LF.sample_margin(3 * p.features, p.prototypes, p.labels, normalize=False), 3 * raw)


def turned_simplex(C, D, seed):
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=generator)).Q
    return LF.simplex(C, D, dtype=torch.float64) @ rotation


SIMPLICES = st.integers(2, 8).flatmap(
    lambda C: st.builds(turned_simplex, st.just(C), st.integers(C - 1, C + 3), SEEDS)
)


@CHECKED
@given(SIMPLICES, SCALES)
def test_item_03_values_at_the_simplex(W, s):
    C = len(W)
    y = torch.arange(C)
    ones = torch.ones(C, dtype=torch.float64)
    optimum = geometry.simplex_optimum(C, scale=s)
    close(geometry.class_margin(W), ones[0] * math.acos(-1 / (C - 1)), atol=1e-7)
    close(ones[0] * optimum.class_margin, ones[0] * math.acos(-1 / (C - 1)))
    close(geometry.sample_margins(W, W, y), ones * C / (C - 1))
    close(LF.lm_softmax(W, W, y, scale=s), ones * (-C / (C - 1) + math.log(C - 1) / s))
    close(LF.lm_softmax(W, W, y, scale=s), ones * optimum.lm_softmax)
    close(LF.sample_margin(W, W, y), -ones * optimum.sample_margin)
    close(LF.zero_centroid(W), 0 * ones[0])
    close(LF.super_symmetry(2.5 * W), 0 * ones[0])


@CHECKED
@given(SIMPLICES, SCALES, st.floats(0.5, 1.5), st.floats(0, 1), st.floats(-1, 1), st.floats(-1, 1))
def test_item_03_gm_softmax_equals_its_bound_at_the_simplex(W, s, alpha1, less, beta1, beta2):
    lines = {"alpha1": alpha1, "beta1": beta1, "alpha2": alpha1 - less, "beta2": beta2}
    found = LF.gm_softmax(W, W, torch.arange(len(W)), scale=s, **lines)
    bound = geometry.gm_softmax_bound(len(W), scale=s, **lines)
    close(found, bound.expand(len(W)), rtol=1e-8)


@CHECKED
@given(SIMPLICES, SCALES)
def test_item_03_gradients_vanish_at_the_simplex(W, s):
    y = torch.arange(len(W))
    for loss in (
        lambda q, V: LF.normface(q, V, y, scale=s),
        lambda q, V: LF.cosface(q, V, y, scale=s, margin=0.3),
        lambda q, V: LF.sphereface(q, V, y, scale=s, margin=2),
        lambda q, V: LF.gm_softmax(q, V, y, scale=s, alpha1=0.8, alpha2=0.5, beta2=0.1),
        lambda q, V: LF.lm_softmax(q, V, y, scale=s),
        lambda q, V: LF.zero_centroid(V),
        lambda q, V: LF.super_symmetry_penalty(V),
    ):
        for gradient in gradients(loss, W, W):
            assert float(gradient.abs().max()) < 1e-10


@CHECKED
@given(problems(), SCALES, ANGLES)
def test_item_13_unified_margin_contains_the_others(p, s, m):
    close(LF.unified_margin(*p.inputs, scale=s), LF.normface(*p.inputs, scale=s), atol=1e-5)
    cosface = LF.cosface(*p.inputs, margin=m / 2, scale=s)
    close(LF.unified_margin(*p.inputs, m3=m / 2, scale=s), cosface, atol=1e-5)
    for factor in (1, 2, 3, 4):
        integer = LF.sphereface(*p.inputs, margin=factor, scale=s)
        close(LF.unified_margin(*p.inputs, m1=float(factor), scale=s), integer, atol=1e-4)
    cosines = LF.similarity_logits(p.features, p.prototypes, similarity="cosine")
    theta = cosines.gather(1, p.labels[:, None])[:, 0].clamp(-1, 1).arccos()
    inside = theta + m < math.pi - 1e-6
    unified = LF.unified_margin(*p.inputs, m2=m, scale=s)
    for mode in ("none", "hard"):
        arcface = LF.arcface(*p.inputs, margin=m, scale=s, mode=mode)
        close(unified[inside], arcface[inside], atol=1e-5)


@CHECKED
@given(problems(), SCALES)
def test_item_13_neutral_settings_of_the_cosine_losses(p, s):
    plain = LF.normface(*p.inputs, scale=s)
    close(LF.cosface(*p.inputs, margin=0.0, scale=s), plain)
    close(LF.arcface(*p.inputs, margin=0.0, scale=s), plain)
    close(LF.gm_softmax(*p.inputs, scale=s), plain)
    close(LF.sphereface(*p.inputs, margin=1, scale=s), plain)
    close(LF.cross_entropy(*p.inputs, similarity="cosine", scale=s), plain)
    half = LF.cross_entropy(*p.inputs, similarity="cosine_prototypes")
    close(LF.sphereface(*p.inputs, margin=1), half)
    close(LF.lsoftmax(*p.inputs, margin=1), LF.cross_entropy(*p.inputs))
    heavy = LF.lsoftmax(*p.inputs, margin=4, annealing=1e9)
    close(heavy, LF.cross_entropy(*p.inputs), atol=1e-5)


@CHECKED
@given(problems(), SCALES, st.integers(1, 500))
def test_item_13_ldam_with_equal_counts_is_cosface(p, s, count):
    loss = lm.LDAM([count] * p.num_classes, scale=s, reduction="none").double()
    close(loss(*p.inputs), LF.cosface(*p.inputs, margin=0.5, scale=s))
    loss.reweight()
    close(loss(*p.inputs), LF.cosface(*p.inputs, margin=0.5, scale=s), rtol=1e-6)


@CHECKED
@given(problems(), st.floats(0.05, 1.0), st.floats(0.0, 0.9999))
def test_item_13_ldam_margins_and_weights(p, largest, beta):
    counts = p.counts.double()
    margins = LF.ldam_margins(p.counts, max_margin=largest, dtype=torch.float64)
    close(margins * counts**0.25, (largest * counts.min() ** 0.25).expand_as(counts))
    close(margins.max(), torch.tensor(largest, dtype=torch.float64))
    weights = LF.balanced_weights(p.counts, beta=beta, dtype=torch.float64)
    close(weights.sum(), torch.tensor(float(p.num_classes), dtype=torch.float64))
    effective = (1 - beta**counts) / (1 - beta)  # 1 + beta + ... + beta^(n-1)
    close(weights * effective, (weights * effective)[:1].expand_as(counts))
    equal = LF.balanced_weights(p.counts, beta=0.0, dtype=torch.float64)
    close(equal, torch.ones_like(equal))


@CHECKED
@given(problems(), st.floats(1, 20))
def test_item_13_sphereface_lengths_are_its_scale(p, length):
    features = length * F.normalize(p.features)
    with_length = LF.sphereface(features, p.prototypes, p.labels, margin=3)
    close(with_length, LF.sphereface(*p.inputs, margin=3, scale=length), atol=1e-7)
    W = F.normalize(p.prototypes)
    close(LF.lsoftmax(features, W, p.labels, margin=3), with_length, atol=1e-7)


@CHECKED
@given(problems(), SCALES, ANGLES, st.sampled_from(["hard", "easy", "none"]))
def test_item_19_detached_arcface_is_cosface_with_a_constant_shift(p, s, m, mode):
    settings = {"margin": m, "scale": s, "mode": mode}
    exact = LF.arcface(*p.inputs, **settings)
    close(LF.arcface(*p.inputs, gradient="detached", **settings), exact)

    def detached(q, W):
        return LF.arcface(q, W, p.labels, gradient="detached", **settings)

    def shifted(q, W):
        logits = LF.similarity_logits(q, W, similarity="cosine", scale=s)
        target = logits.detach().gather(1, p.labels[:, None])[:, 0]
        rest = torch.logsumexp(p.rivals(logits.detach()), 1)
        # softplus(rest - penalised) = exact, solved for the penalised logit in a stable form.
        penalised = rest - (exact + torch.log(-torch.expm1(-exact)))
        change = F.one_hot(p.labels, p.num_classes) * (penalised - target)[:, None]
        return LF.cross_entropy(logits + change, p.labels)

    if float(exact.min()) > 1e-6:  # otherwise the shift cannot be read off the value
        for found, expected in zip(
            gradients(detached, p.features, p.prototypes),
            gradients(shifted, p.features, p.prototypes),
            strict=True,
        ):
            close(found, expected, rtol=1e-6, atol=1e-6)
