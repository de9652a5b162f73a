"""Identities of the centroid losses and the bank: items 7, 8, 9, 10 and 18."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from properties.drawn import CHECKED, SEEDS, close, gradients, make_problem, problems

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

MOMENTA = st.floats(0.0, 1.0)
STRATEGIES = ("none", "both", "partial")


def filled(p, loss):
    """A loss with a bank, in float64, whose bank holds the problem's rows."""
    loss = loss.double()
    loss.bank.centroids.copy_(p.bank)
    loss.bank.seen.copy_(p.seen)
    return loss


def discriminative(p, **settings):
    return filled(p, lm.Discriminative(p.num_classes, p.features.shape[1], **settings))


def class_means(p):
    present = torch.unique(p.labels)
    return torch.stack([p.features[p.labels == c].mean(0) for c in present]), present


def dense_margin(m, W, classes, b, *, margin, power=1, aggregate="max"):
    """NGY-4.5 from all pairs; entry [k, i] belongs to the pair (classes[k], i)."""
    rows = torch.arange(len(classes))
    distance = LF.signed_boundary_distance(m, W, b)[rows, classes]
    hinge = F.relu(margin + distance) ** power
    own = F.one_hot(classes, len(W)).bool()
    if aggregate == "max":
        return hinge.masked_fill(own, -torch.inf).max(1).values
    return hinge.masked_fill(own, 0).sum(1) / (len(W) - 1)


@CHECKED
@given(problems(N=(2, 6), C=(2, 4)), st.floats(1.0, 20.0))
def test_item_07_zero_losses_bound_dispersion_margin_and_separation(p, size):
    """The radius and margin are those that the features just satisfy."""
    W = F.normalize(p.prototypes)
    q = size * W[p.labels] + 0.2 * p.features
    p = p._replace(features=q, prototypes=W)
    means, present = class_means(p)
    centers = torch.zeros_like(W)
    centers[present] = means
    radius = float((q - centers[p.labels]).norm(dim=1).max()) * (1 + 1e-9) + 1e-12
    margin = 1e3 - float(LF.centroid_margin(means, W, present, bias=p.bias, margin=1e3).max())
    assume(margin > 1e-3)
    margin *= 1 - 1e-9
    assert float(lm.Compactness(radius=radius)(q, W, p.labels)) == 0
    assert float(lm.CentroidMargin(margin=margin)(q, W, p.labels, bias=p.bias)) == 0
    ratio = geometry.ideal_feature_ratio(q, p.labels, p.num_classes)
    assert float(ratio.dispersion) <= 2 * radius
    if margin > radius:
        smallest = geometry.boundary_margins(q, W, p.labels, bias=p.bias).smallest_signed
        assert float(smallest) >= margin - radius - 1e-6
        assert float(ratio.separation) >= 2 * (margin - radius) - 1e-6
    if margin > 2 * radius and len(present) > 1:
        assert float(ratio.ratio) < 1


@CHECKED
@given(problems(), st.floats(0.01, 0.99), st.sampled_from(["max", "mean"]))
def test_item_08_momentum_scales_the_margin_gradient(p, momentum, aggregate):
    """A class seen for the first time has bank = current, where the factor is exact."""
    D = p.features.shape[1]

    def gradient(strategy, first_seen="scaled"):
        bank = lm.CentroidBank(
            p.num_classes, D, strategy=strategy, momentum=momentum, first_seen=first_seen
        ).double()
        loss = lm.CentroidMargin(bank=bank, aggregate=aggregate)
        return gradients(lambda q: loss(q, p.prototypes, p.labels, bias=p.bias), p.features)[0]

    current = gradient("none")
    close(gradient("both"), (1 - momentum) * current)
    close(gradient("both", "full"), current)
    close(gradient("partial"), current)
    assert float(current.abs().max()) > 0


@CHECKED
@given(problems())
def test_item_08_no_momentum_makes_all_strategies_equal(p):
    found = []
    for strategy in STRATEGIES:
        loss = discriminative(p, momentum=0.0, strategy=strategy, radius=0.1)

        def total(q, W, b, loss=loss):
            return loss(q, W, p.labels, bias=b)

        found.append((total(p.features, p.prototypes, p.bias), *gradients(total, *p[:1], *p[4:6])))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            close(one, two)


@CHECKED
@given(problems(), MOMENTA)
def test_item_08_which_centroid_serves_which_term(p, momentum):
    values = {
        strategy: discriminative(p, momentum=momentum, strategy=strategy, radius=0.1)
        .named_terms(*p.inputs, bias=p.bias)
        .terms
        for strategy in STRATEGIES
    }
    close(values["partial"]["compact"], values["both"]["compact"])
    close(values["partial"]["margin"], values["none"]["margin"])
    close(values["partial"]["reg"], values["none"]["reg"])
    means, present = class_means(p)
    close(values["none"]["reg"], means.norm(dim=1).mean())
    close(
        values["none"]["margin"],
        dense_margin(means, p.prototypes, present, p.bias, margin=6.0).mean(),
    )
    terms = [
        ((p.features[p.labels == c] - mean).norm(dim=1) - 0.1).clamp_min(0).square().mean()
        for c, mean in zip(present, means, strict=True)
    ]
    close(values["none"]["compact"], torch.stack(terms).mean())


@CHECKED
@given(problems(), st.floats(0.01, 100), SEEDS)
def test_item_09_rescaling_keeps_predictions(p, factor, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = torch.randn(4, p.features.shape[1], dtype=torch.float64, generator=generator)
    offset = torch.randn(4, dtype=torch.float64, generator=generator)
    head = torch.randn(p.num_classes, 4, dtype=torch.float64, generator=generator)
    found = []
    for scale in (1.0, factor):
        moved = geometry.rescale_network(layer, offset, p.bias, factor=scale)
        q = F.relu(p.features @ moved.weight.T + moved.bias)
        margins = geometry.boundary_margins(q, head, p.labels, bias=moved.head_bias)
        dispersion = geometry.class_dispersion(q, p.labels, p.num_classes)
        predicted = LF.similarity_logits(q, head, bias=moved.head_bias).argmax(1)
        found.append((margins.unsigned, margins.signed, dispersion, predicted))
    for before, after in zip(found[0][:3], found[1][:3], strict=True):
        torch.testing.assert_close(
            after, factor * before, rtol=1e-8, atol=1e-8 * factor, equal_nan=True
        )
    assert found[0][3].equal(found[1][3])


@CHECKED
@given(problems(), MOMENTA, st.sampled_from(STRATEGIES))
def test_item_10_bank_moves_by_its_rule(p, momentum, strategy):
    loss = discriminative(p, momentum=momentum, strategy=strategy)
    means, present = class_means(p)
    expected = p.bank.clone()
    previous = torch.where(p.seen[present, None], p.bank[present], means)
    for _ in range(2):  # the same batch twice
        loss(*p.inputs, bias=p.bias)
        previous = momentum * previous + (1 - momentum) * means
        expected[present] = previous
        close(loss.bank.centroids, expected)
    absent = torch.ones(p.num_classes, dtype=torch.bool)
    absent[present] = False
    assert loss.bank.centroids[absent].equal(p.bank[absent])
    assert loss.bank.seen.equal(p.seen | ~absent)
    assert loss.bank.counts.equal(2 * torch.bincount(p.labels, minlength=p.num_classes))
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    loss.eval()
    loss(*p.inputs, bias=p.bias)
    for name, value in loss.state_dict().items():
        assert value.equal(before[name]), name


@CHECKED
@given(problems(), MOMENTA, st.sampled_from(["scaled", "full"]))
def test_item_10_no_gradient_through_the_bank(p, momentum, first_seen):
    loss = discriminative(p, momentum=momentum, strategy="both", first_seen=first_seen)
    q = p.features.clone().requires_grad_()
    batch = loss.bank(q, p.labels)
    for state in (loss.bank.centroids, loss.bank.seen, loss.bank.counts):
        assert not state.requires_grad
        assert state.grad_fn is None
    (found,) = torch.autograd.grad(batch.compact.sum(), q)
    counts = torch.bincount(p.labels, minlength=p.num_classes)[p.labels].double()
    share = torch.full_like(counts, 1 - momentum)
    if first_seen == "full":
        share = torch.where(p.seen[p.labels], share, 1.0)
    close(found, (share / counts)[:, None].expand_as(q))


@CHECKED
@given(problems(), MOMENTA)
def test_item_10_state_dict_round_trip(p, momentum):
    first = discriminative(p, momentum=momentum)
    first(*p.inputs, bias=p.bias)
    second = lm.Discriminative(p.num_classes, p.features.shape[1], momentum=momentum).double()
    state = first.state_dict()
    assert "bank.seen" in state
    second.load_state_dict(state)
    again = p.shuffled(torch.arange(len(p.labels)).flip(0))._replace(features=p.noisy)
    close(second(*again.inputs, bias=p.bias), first(*again.inputs, bias=p.bias))
    close(second.bank.centroids, first.bank.centroids)


@CHECKED
@given(problems(), st.floats(0.0, 1.0))
def test_item_10_centers_move_by_their_rule(p, rate):
    loss = lm.CenterLoss(*p.prototypes.shape, rate=rate, strength=2.0).double()
    loss.centers.copy_(p.bank)
    expected = p.bank.clone()
    for c in range(p.num_classes):
        mine = p.features[p.labels == c]
        expected[c] -= rate * (p.bank[c] - mine).sum(0) / (1 + len(mine))
    terms = LF.compactness(p.features, p.bank, p.labels, radius=0.0, power=2)
    close(loss(p.features, p.labels), terms.sum())
    close(loss.centers, expected)
    settings = {"centers": p.bank, "labels": p.labels, "strength": 2.0}
    (to_features,) = gradients(lambda q: LF.center_loss(q, **settings), p.features)
    close(to_features, 2 * (p.features - p.bank[p.labels]))


@CHECKED
@given(problems(N=(2, 6)))
def test_item_10_stability_is_alignment_with_ones_own_clean_feature(p):
    each = torch.arange(len(p.labels))
    for squared in (False, True):
        own = {"radius": 0.0, "power": 2 if squared else 1}
        aligned = LF.noise_alignment(p.noisy, p.features, each, **own)
        close(LF.stability(p.features, p.noisy, squared=squared), aligned)
        close(lm.Stability(strength=3.0, squared=squared)(p.features, p.noisy), 3 * aligned.mean())


@CHECKED
@given(problems(), st.floats(0.0, 3.0), st.sampled_from([1, 2]))
def test_item_18_gradient_of_one_compactness_term(p, radius, power):
    def terms(q):
        return LF.compactness(q, p.prototypes, p.labels, radius=radius, power=power)

    distance = (p.features - p.prototypes[p.labels]).norm(dim=1)
    excess = (distance - radius).clamp_min(0)
    close(terms(p.features), excess**power)
    expected = (excess > 0).double() if power == 1 else 2 * excess
    close(gradients(terms, p.features)[0].norm(dim=1), expected)
    aligned = LF.noise_alignment(p.features, p.prototypes, p.labels, radius=radius, power=power)
    close(aligned, excess**power)


@CHECKED
@given(problems(), st.floats(0.0, 8.0), st.sampled_from([1, 2]))
def test_item_18_gradient_of_one_margin_term(p, margin, power):
    def terms(m):
        settings = {"bias": p.bias, "margin": margin, "power": power}
        return LF.centroid_margin(m, p.prototypes, p.labels, **settings)

    hinge = dense_margin(*p.inputs, p.bias, margin=margin)
    close(terms(p.features), hinge**power)
    expected = (hinge > 0).double() if power == 1 else 2 * hinge
    close(gradients(terms, p.features)[0].norm(dim=1), expected)


def assert_dense_and_sparse_agree(p, **settings):
    """Values, and gradients to centroids, prototypes and bias."""

    def sparse(m, W, b):
        return LF.centroid_margin(m, W, p.labels, bias=b, **settings)

    def dense(m, W, b):
        return dense_margin(m, W, p.labels, b, **settings)

    arguments = (p.features, p.prototypes, p.bias)
    close(sparse(*arguments), dense(*arguments), rtol=1e-8, atol=1e-8)
    for one, other in zip(gradients(sparse, *arguments), gradients(dense, *arguments), strict=True):
        close(one, other, rtol=1e-7, atol=1e-8)


@CHECKED
@given(
    problems(),
    st.floats(0.0, 8.0),
    st.sampled_from([1, 2]),
    st.sampled_from(["max", "mean"]),
    st.booleans(),
)
def test_item_18_sparse_form_equals_dense_form(p, margin, power, aggregate, by_gram_matrices):
    module = importlib.import_module("largemargin.ops.boundary")
    with pytest.MonkeyPatch.context() as patch:
        if by_gram_matrices:  # the search of large problems
            patch.setattr(module, "EXACT_LIMIT", 0)
        assert_dense_and_sparse_agree(p, margin=margin, power=power, aggregate=aggregate)


def many_classes(monkeypatch):
    """700 classes, searched in blocks of 256 by Gram matrices."""
    module = importlib.import_module("largemargin.ops.boundary")
    monkeypatch.setattr(module, "EXACT_LIMIT", 0)
    monkeypatch.setattr(module, "BLOCK", 1)
    return make_problem(9, 700, 5, seed=3)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_item_18_search_over_several_blocks_of_classes(monkeypatch, aggregate):
    p = many_classes(monkeypatch)
    assert_dense_and_sparse_agree(p, margin=1.0, aggregate=aggregate)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_item_18_a_pair_without_boundary_among_many_classes(monkeypatch, aggregate):
    p = many_classes(monkeypatch)
    p.prototypes[600] = p.prototypes[int(p.labels[0])]
    assert_dense_and_sparse_agree(p, margin=1.0, aggregate=aggregate)
