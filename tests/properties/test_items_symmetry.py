"""Item 15: the order of the samples and the names of the classes do not matter to any loss."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from properties.drawn import BRIEFLY, SCALES, SEEDS, close, problems

import largemargin as lm
import largemargin.functional as LF

LOGIT_LOSSES = {
    "cross_entropy": lambda p: {},
    "kobayashi": lambda p: {"strength": 0.7},
    "biased_softmax": lambda p: {"margin": 5 * p.margins, "strength": 0.2},
    "rival_divergence": lambda p: {},
    "label_smoothing": lambda p: {"smoothing": 0.2},
    "focal": lambda p: {"alpha": p.margins},
    "max_hinge": lambda p: {"margin": 5 * p.margins},
    "max_softplus": lambda p: {"margin": 5 * p.margins},
    "dense_hinge": lambda p: {"margin": 5 * p.margins},
    "soft_hinge": lambda p: {},
    "generalized_cross_entropy": lambda p: {"q": 0.4},
    "symmetric_cross_entropy": lambda p: {"alpha": 0.5},
    "logit_norm": lambda p: {"temperature": 0.5},
    "logit_adjustment": lambda p: {"class_counts": 0.1 + p.margins, "tau": 0.8},
    "vs_loss": lambda p: {"class_counts": 0.1 + p.margins, "gamma": 0.4},
}
COSINE_LOSSES = {
    "normface": lambda p, s: {"scale": s},
    "lm_softmax": lambda p, s: {"scale": s},
    "cosface": lambda p, s: {"scale": s, "margin": p.margins},
    "arcface": lambda p, s: {"scale": s, "margin": p.margins, "mode": "none"},
    "adaface": lambda p, s: {"scale": s, "margin": p.margins, "norm_mean": 2.0, "norm_std": 0.5},
    "magface": lambda p, s: {"scale": s, "min_norm": 1.0, "max_norm": 3.0, "mode": "none"},
    "elasticface": lambda p, s: {"scale": s, "margin": p.margins, "noise": p.share},
    "curricularface": lambda p, s: {"scale": s, "margin": p.margins, "progress": 0.3},
    "unified_margin": lambda p, s: {"scale": s, "m1": 1.5, "m2": p.margins, "m3": p.margins},
    "sphereface": lambda p, s: {"scale": s, "margin": 3},
    "lsoftmax": lambda p, s: {"margin": 2, "annealing": 0.5},
    "gm_softmax": lambda p, s: {"scale": s, "alpha1": 0.5 + p.share, "beta2": -p.share},
    "sample_margin": lambda p, s: {},
    "gaussian_mixture": lambda p, s: {"log_variances": p.log_variances},
}


def logit_loss(name, options):
    function = getattr(LF, name)
    return lambda p, s: function(*p.inputs, bias=p.bias, **options(p))


def cosine_loss(name, options):
    function = getattr(LF, name)
    return lambda p, s: function(*p.inputs, **{**options(p, s), **settings_of(name)})


def settings_of(name):
    return {"check": False} if name == "gm_softmax" else {}


def input_margin(name):
    def values(p, s):
        x = p.features.clone().requires_grad_()
        logits = torch.tanh(x) @ p.prototypes.T + p.bias
        if name == "layer_margin":
            return LF.layer_margin(logits, p.labels, [x], aggregate="sum", topk=2).detach()
        return lm.LOSSES[name](reduction="none")(logits, p.labels, x).detach()

    return values


PER_SAMPLE = {
    **{name: logit_loss(name, options) for name, options in LOGIT_LOSSES.items()},
    **{name: cosine_loss(name, options) for name, options in COSINE_LOSSES.items()},
    "compactness": lambda p, s: LF.compactness(p.features, p.bank, p.labels),
    "noise_alignment": lambda p, s: LF.noise_alignment(p.noisy, p.bank, p.labels),
    "center_loss": lambda p, s: LF.center_loss(p.features, p.bank, p.labels),
    "stability": lambda p, s: LF.stability(p.features, p.noisy),
    "centroid_margin": lambda p, s: LF.centroid_margin(*p.inputs, bias=p.bias),
    "margin_distribution": input_margin("margin_distribution"),
    "margin_hinge": input_margin("margin_hinge"),
    "layer_margin": input_margin("layer_margin"),
}


def with_bank(p, loss):
    loss = loss.double()
    loss.bank.centroids.copy_(p.bank)
    loss.bank.seen.copy_(p.seen)
    return loss


def discriminative(p, s):
    loss = lm.Discriminative(*p.prototypes.shape, momentum=0.7, weight=p.margins)
    value = with_bank(p, loss)(*p.inputs, bias=p.bias)
    return value, loss.bank.centroids


def stable(p, s):
    loss = lm.StableDiscriminative(*p.prototypes.shape, momentum=0.7, weight=p.margins)
    value = with_bank(p, loss)(*p.inputs, bias=p.bias)
    return value, loss.bank.centroids


def robust(p, s):
    loss = lm.RobustDiscriminative(*p.prototypes.shape, strategy="both", momentum=0.7)
    value = with_bank(p, loss)(*p.inputs, p.noisy, bias=p.bias)
    return value, loss.bank.centroids


def center(p, s):
    loss = lm.CenterLoss(*p.prototypes.shape).double()
    loss.centers.copy_(p.bank)
    return loss(p.features, p.labels), loss.centers


def ldam(p, s):
    loss = lm.LDAM(p.counts, scale=s).double()
    loss.reweight()
    return loss(*p.inputs, sample_weight=p.share), loss.margins


REDUCED = {
    "discriminative": discriminative,
    "stable_discriminative": stable,
    "robust_discriminative": robust,
    "center": center,
    "ldam": ldam,
    "adacos": lambda p, s: (lm.AdaCos(max(p.num_classes, 3)).double()(*p.inputs), p.counts),
    "centroid_norm": lambda p, s: (lm.CentroidNorm()(*p.inputs), p.counts),
    "zero_centroid": lambda p, s: (LF.zero_centroid(p.prototypes), p.counts),
    "super_symmetry": lambda p, s: (LF.super_symmetry(p.prototypes), p.counts),
    "weighted": lambda p, s: (
        lm.CosFace(scale=s, weight=p.margins, label_smoothing=0.1).double()(
            *p.inputs, sample_weight=p.share
        ),
        p.counts,
    ),
}


def permutation(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PER_SAMPLE)
@BRIEFLY
@given(p=problems(), s=SCALES, seed=SEEDS)
def test_item_15_per_sample_losses(name, p, s, seed):
    values = PER_SAMPLE[name]
    expected = values(p, s)
    assert expected.shape == p.labels.shape
    order = permutation(len(p.labels), seed)
    close(values(p.shuffled(order), s), expected[order], rtol=1e-8, atol=1e-8)
    renamed = p.relabelled(permutation(p.num_classes, seed))
    close(values(renamed, s), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [*LOGIT_LOSSES, *COSINE_LOSSES])
@BRIEFLY
@given(p=problems(), s=SCALES, seed=SEEDS)
def test_item_15_soft_targets(name, p, s, seed):
    values = PER_SAMPLE[name]
    soft = F.softmax(3 * p.features @ p.bank.T, 1)
    expected = values(p._replace(labels=soft), s)
    order = permutation(len(p.labels), seed)
    close(values(p._replace(labels=soft).shuffled(order), s), expected[order], rtol=1e-8, atol=1e-8)
    new_label = permutation(p.num_classes, seed)
    renamed = p.relabelled(new_label)._replace(labels=soft[:, new_label.argsort()])
    close(values(renamed, s), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", REDUCED)
@BRIEFLY
@given(p=problems(), s=SCALES, seed=SEEDS)
def test_item_15_reduced_losses_and_their_state(name, p, s, seed):
    """The state belongs to classes: it moves with their names and ignores the samples' order."""
    values = REDUCED[name]
    expected, state = values(p, s)
    found, after = values(p.shuffled(permutation(len(p.labels), seed)), s)
    close(found, expected, rtol=1e-8, atol=1e-8)
    close(after, state, rtol=1e-8, atol=1e-8)
    new_label = permutation(p.num_classes, seed)
    found, after = values(p.relabelled(new_label), s)
    close(found, expected, rtol=1e-8, atol=1e-8)
    close(after[new_label], state, rtol=1e-8, atol=1e-8)


def test_item_15_covers_every_loss():
    assert set(lm.LOSSES) <= {*PER_SAMPLE, *REDUCED}
