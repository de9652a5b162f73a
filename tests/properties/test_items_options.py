"""Item 17: options common to the losses. Neutral ones change nothing, the others follow torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from properties.drawn import BRIEFLY, CHECKED, close, gradients, problems

import largemargin as lm

LOSSES = {
    "cross_entropy": (lm.CrossEntropy, {}),
    "kobayashi": (lm.Kobayashi, {"strength": 0.5}),
    "biased_softmax": (lm.BiasedSoftmax, {"strength": 0.2}),
    "rival_divergence": (lm.RivalDivergence, {}),
    "label_smoothing": (lm.LabelSmoothing, {}),
    "focal": (lm.Focal, {}),
    "max_hinge": (lm.MaxHinge, {}),
    "max_softplus": (lm.MaxSoftplus, {}),
    "dense_hinge": (lm.DenseHinge, {}),
    "soft_hinge": (lm.SoftHinge, {}),
    "normface": (lm.NormFace, {"scale": 6.0}),
    "cosface": (lm.CosFace, {"scale": 6.0}),
    "arcface": (lm.ArcFace, {"scale": 6.0}),
    "sphereface": (lm.SphereFace, {"margin": 3}),
    "lsoftmax": (lm.LSoftmax, {"margin": 2}),
    "unified_margin": (lm.UnifiedMargin, {"scale": 6.0, "m1": 1.3, "m2": 0.2, "m3": 0.1}),
    "gm_softmax": (lm.GMSoftmax, {"scale": 6.0, "alpha1": 0.8, "beta1": -0.2, "alpha2": 0.6}),
    "lm_softmax": (lm.LMSoftmax, {"scale": 6.0}),
    "sample_margin": (lm.SampleMargin, {}),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def build(name, **options):
    kind, settings = LOSSES[name]
    return kind(**settings, **options).double()


def both(loss, p, labels=None, **options):
    """The value and its gradients to features and prototypes."""
    labels = p.labels if labels is None else labels

    def value(q, W):
        return loss(q, W, labels, **options)

    return value(p.features, p.prototypes), *gradients(value, p.features, p.prototypes)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        close(one, other, rtol=1e-8, atol=1e-9)


@every_loss
@BRIEFLY
@given(p=problems())
def test_item_17_one_hot_targets_are_hard_labels(name, p):
    hot = F.one_hot(p.labels, p.num_classes).double()
    for reduction in ("mean", "sum", "none"):
        loss = build(name, reduction=reduction)
        same(both(loss, p, hot), both(loss, p))


@every_loss
@BRIEFLY
@given(p=problems())
def test_item_17_soft_targets_are_expectations(name, p):
    soft = F.softmax(p.features @ p.bank.T, 1)
    loss = build(name, reduction="none")
    by_class = torch.stack(
        [
            loss(p.features, p.prototypes, torch.full_like(p.labels, c))
            for c in range(p.num_classes)
        ],
        dim=1,
    )
    close(loss(p.features, p.prototypes, soft), (soft * by_class).sum(1), rtol=1e-8, atol=1e-9)
    smoothed = build(name, reduction="none", label_smoothing=0.3)
    hot = F.one_hot(p.labels, p.num_classes).double()
    target = 0.7 * hot + 0.3 / p.num_classes
    close(smoothed(*p.inputs), (target * by_class).sum(1), rtol=1e-8, atol=1e-9)


@every_loss
@BRIEFLY
@given(p=problems())
def test_item_17_neutral_options_change_nothing(name, p):
    ones = torch.ones(p.num_classes, dtype=torch.float64)
    plain = both(build(name), p)
    neutral = build(name, weight=ones, label_smoothing=0.0, ignore_index=-7)
    same(both(neutral, p, sample_weight=torch.ones_like(p.share)), plain)
    same(both(build(name, ignore_index=None), p), plain)
    same(both(build(name, weight=3 * ones), p), plain)
    same(
        both(build(name, weight=p.margins), p, sample_weight=5 * p.share),
        both(build(name, weight=7 * p.margins), p, sample_weight=p.share),
    )


@every_loss
@BRIEFLY
@given(p=problems(N=(2, 6)))
def test_item_17_ignored_rows_are_dropped_rows(name, p):
    keep = p.share > p.share.median()
    keep[p.share.argmax()] = True
    kept = p._replace(features=p.features[keep], labels=p.labels[keep], share=p.share[keep])
    expected, to_features, to_prototypes = both(build(name), kept)
    full = torch.zeros_like(p.features)
    full[keep] = to_features
    poisoned = p._replace(features=torch.where(keep[:, None], p.features, torch.nan))
    marked = torch.where(keep, p.labels, -100)
    same(both(build(name), poisoned, marked), (expected, full, to_prototypes))
    zeroed = both(build(name), p, sample_weight=keep.double())
    same(zeroed, (expected, full, to_prototypes))
    weighted = both(build(name, weight=p.margins), kept, sample_weight=kept.share)[0]
    found = both(build(name, weight=p.margins), p, marked, sample_weight=p.share)[0]
    close(found, weighted, rtol=1e-8)


@every_loss
@BRIEFLY
@given(p=problems())
def test_item_17_nothing_left_is_zero(name, p):
    zero = torch.zeros((), dtype=torch.float64)
    nothing = (zero, torch.zeros_like(p.features), torch.zeros_like(p.prototypes))
    same(both(build(name), p, torch.full_like(p.labels, -100)), nothing)
    same(both(build(name), p, sample_weight=torch.zeros_like(p.share)), nothing)


@every_loss
@BRIEFLY
@given(p=problems())
def test_item_17_reductions(name, p):
    settings = {"weight": p.margins, "label_smoothing": 0.2}
    values = build(name, reduction="none", **settings)(*p.inputs, sample_weight=p.share)
    total = build(name, reduction="sum", **settings)(*p.inputs, sample_weight=p.share)
    mean = build(name, **settings)(*p.inputs, sample_weight=p.share)
    assert values.shape == p.labels.shape
    close(total, values.sum(), rtol=1e-8, atol=1e-9)
    close(mean, values.sum() / (p.share * p.margins[p.labels]).sum(), rtol=1e-8, atol=1e-9)


@CHECKED
@given(
    problems(N=(2, 6)),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from(["hard", "ignored", "soft"]),
)
def test_item_17_softmax_with_any_option_is_torchs(p, weighted, smoothing, reduction, kind):
    options = {"label_smoothing": smoothing, "reduction": reduction}
    if weighted:
        options["weight"] = p.margins
    labels = p.labels.clone()
    if kind == "ignored":
        labels[0] = -100
    elif kind == "soft":
        labels = F.softmax(p.features @ p.bank.T, 1)

    def ours(f):
        return lm.CrossEntropy(**options).double()(f, labels)

    def torchs(f):
        return F.cross_entropy(f, labels, **options)

    f = p.logits
    close(ours(f), torchs(f), rtol=1e-8, atol=1e-9)
    same(gradients(ours, f), gradients(torchs, f))
    head = lm.CrossEntropy(**options).double()
    close(head(p.features, p.prototypes, labels, bias=p.bias), torchs(f), rtol=1e-8, atol=1e-9)
