"""LMD section 4: what zero losses imply, what momentum does to gradients, what scaling changes."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry


class Network(NamedTuple):
    """x -> relu(x layer^T + layer_bias) = features -> features head^T + head_bias."""

    inputs: Tensor
    labels: Tensor
    layer: Tensor
    layer_bias: Tensor
    head: Tensor
    head_bias: Tensor

    @property
    def features(self):
        return F.relu(self.inputs @ self.layer.T + self.layer_bias)

    def rescaled(self, factor):
        moved = geometry.rescale_network(self.layer, self.layer_bias, self.head_bias, factor=factor)
        return self._replace(layer=moved.weight, layer_bias=moved.bias, head_bias=moved.head_bias)

    @property
    def moved_parameters(self):
        return torch.cat([p.flatten() for p in (self.layer, self.layer_bias, self.head_bias)])

    def margins(self):
        return geometry.boundary_margins(
            self.features, self.head, self.labels, bias=self.head_bias
        ).unsigned

    def dispersions(self):
        return geometry.class_dispersion(self.features, self.labels, len(self.head))


def network(seed, samples=12, classes=3, width=4):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    labels = torch.arange(samples) % classes
    return Network(
        draw(samples, 3), labels, draw(width, 3), draw(width), draw(classes, width), draw(classes)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("grow", "shrink"), [(1.5, 1.1), (2.0, 2.0), (30.0, 7.0)])
def test_lmd_corollary_4_1(seed, grow, shrink):
    net = network(seed)
    away = net.rescaled(grow).moved_parameters - net.moved_parameters
    back = net.rescaled(1 / shrink).moved_parameters - net.moved_parameters
    torch.testing.assert_close(away, (grow - 1) * net.moved_parameters, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        back, -(1 - 1 / shrink) * net.moved_parameters, rtol=1e-12, atol=1e-14
    )
    assert float(F.cosine_similarity(away, back, dim=0)) == pytest.approx(-1, abs=1e-12)


@pytest.mark.parametrize("factor", [1e-3, 0.3, 1.0, 4.0, 1e3])
def test_lmd_corollary_4_1_margin_over_dispersion_never_changes(factor):
    for seed in range(5):
        before, after = network(seed), network(seed).rescaled(factor)
        ratio = [net.margins()[:, None] / net.dispersions() for net in (before, after)]
        torch.testing.assert_close(ratio[1], ratio[0], rtol=1e-9, atol=0)
        # Hence no factor makes margins grow and dispersions shrink.
        grown = torch.sign(after.margins() - before.margins())
        assert bool((grown == torch.sign(after.dispersions() - before.dispersions())).all())


@pytest.mark.parametrize("factor", [1e-2, 0.5, 3.0, 1e2])
def test_lmd_proposition_4_4_and_erratum_n10(factor):
    for seed in range(5):
        before, after = network(seed), network(seed).rescaled(factor)
        torch.testing.assert_close(after.features, factor * before.features)
        torch.testing.assert_close(after.margins(), factor * before.margins())
        torch.testing.assert_close(after.dispersions(), factor * before.dispersions())
        logits, losses = [], []
        for net in (before, after):
            head = {"bias": net.head_bias}
            logits.append(LF.similarity_logits(net.features, net.head, **head))
            losses.append(LF.cross_entropy(net.features, net.head, net.labels, **head).mean())
        assert logits[0].argmax(1).equal(logits[1].argmax(1))
        # "The same model output" means the same argmax: the softmax loss is another one.
        assert abs(float(losses[1] - losses[0])) > 1e-2


def test_lmd_proposition_4_4_erratum_n6_negative_factors_do_not_pass_a_relu():
    net = network(0)
    flipped = F.relu(net.inputs @ (-2 * net.layer).T - 2 * net.layer_bias)
    assert float((flipped + 2 * net.features).abs().max()) > 0.1
    with pytest.raises(lm.LargeMarginError, match="factor"):
        net.rescaled(-2.0)


def separated(seed, *, radius, margin, samples=15, classes=3):
    """Features in balls of radius ``radius`` around centroids ``margin`` away from boundaries.

    Both limits are reached: the widest feature lies on its sphere, and the closest centroid of
    each class exactly ``margin`` from a boundary.
    """
    net = network(seed, samples, classes, width=3)
    W, b, labels = F.normalize(net.head), 0.3 * net.head_bias, net.labels
    centroids = torch.zeros_like(W)
    for c in range(classes):
        others = [i for i in range(classes) if i != c]
        along = 1 - W[others] @ W[c]
        needed = margin * (W[others] - W[c]).norm(dim=1) + b[others] - b[c]
        centroids[c] = ((needed / along).max() + 1e-9) * W[c]
    offsets = network(seed + 100, samples).inputs
    for c in range(classes):
        mine = labels == c
        offsets[mine] -= offsets[mine].mean(0)
        offsets[mine] *= (1 - 1e-9) * radius / offsets[mine].norm(dim=1).max()
    return centroids[labels] + offsets, W, b, labels


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("radius", "margin"), [(0.5, 6.0), (0.5, 0.8), (1.0, 2.5)])
def test_lmd_propositions_4_1_and_4_2(seed, radius, margin):
    q, W, b, y = separated(seed, radius=radius, margin=margin)
    assert float(lm.Compactness(radius=radius)(q, W, y)) == 0
    assert float(lm.CentroidMargin(margin=margin)(q, W, y, bias=b)) == 0
    assert float(lm.Compactness(radius=0.9 * radius)(q, W, y)) > 0
    assert float(lm.CentroidMargin(margin=1.01 * margin)(q, W, y, bias=b)) > 0
    ratio = geometry.ideal_feature_ratio(q, y, 3)
    assert float(ratio.dispersion) <= 2 * radius
    margins = geometry.boundary_margins(q, W, y, bias=b)
    assert float(margins.smallest_signed) >= margin - radius - 1e-6
    assert float(ratio.separation) >= 2 * (margin - radius) - 1e-6
    if margin > 2 * radius:
        assert float(ratio.ratio) < 1


def drifted():
    """Two mirror classes whose momentum centroid lags 0.4 behind: compact and margin loss are 0."""
    loss = lm.Discriminative(2, 2, radius=0.5, margin=3.0, momentum=0.9, strategy="partial")
    loss = loss.double()
    x = torch.tensor([3.1] * 9 + [2.1], dtype=torch.float64)
    x = torch.cat([x, -x])
    q = torch.stack([x, torch.zeros_like(x)], 1)
    W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    loss.bank.seen.fill_(True)
    loss.bank.centroids.copy_(W * (2.6 - 0.1 * 3.0) / 0.9)
    return loss, q, W, torch.tensor([0] * 10 + [1] * 10)


def test_lmd_proposition_4_2_erratum_n11_slack_of_partial_momentum():
    loss, q, W, y = drifted()
    terms = loss.named_terms(q, W, y).terms
    assert float(terms["compact"]) < 1e-24
    assert float(terms["margin"]) < 1e-12
    lag = float((loss.bank.centroids - 3.0 * W).norm(dim=1).max())
    assert lag == pytest.approx(0.4)
    margins = geometry.boundary_margins(q, W, y)
    # As printed the margin would be at least 3.0 - 0.5.
    assert float(margins.smallest_signed) == pytest.approx(3.0 - (0.5 + lag))
    assert float(geometry.largest_dispersion(q, y, 2)) <= 2 * 0.5 + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_lmd_proposition_4_2_with_partial_momentum(seed):
    radius, margin = 0.5, 3.0
    q, W, b, y = separated(seed, radius=0.2, margin=margin)
    loss = lm.Discriminative(3, 3, radius=radius, margin=margin, momentum=0.8).double()
    current = torch.stack([q[y == c].mean(0) for c in range(3)])
    shift = 0.3 * F.normalize(network(seed + 50, width=3).head)
    loss.bank.centroids.copy_(current + shift / 0.8)
    loss.bank.seen.fill_(True)
    terms = loss.named_terms(q, W, y, bias=b).terms
    assert float(terms["compact"]) == 0
    assert float(terms["margin"]) == 0
    lag = (loss.bank.centroids - current).norm(dim=1)
    torch.testing.assert_close(lag, torch.full_like(lag, 0.3))
    margins = geometry.boundary_margins(q, W, y, bias=b).signed
    assert bool((margins >= margin - (radius + lag)).all())


@pytest.mark.parametrize("seed", range(3))
def test_lmd_equation_4_3_is_the_weighted_sum(seed):
    net = network(seed)
    W, b, y = net.head, net.head_bias, net.labels
    loss = lm.Discriminative(3, 4, alpha=2.0, beta=0.5, gamma_reg=0.1, radius=0.1, strategy="none")
    value = loss.double()(net.features, W, y, bias=b)
    compact = lm.Compactness(radius=0.1)(net.features, W, y)
    margin = lm.CentroidMargin(margin=6.0)(net.features, W, y, bias=b)
    centroids = torch.stack([net.features[y == c].mean(0) for c in range(3)])
    reg = centroids.norm(dim=1).mean()
    assert min(float(compact), float(margin), float(reg)) > 0
    torch.testing.assert_close(value, 2.0 * compact + 0.5 * margin + 0.1 * reg)


def margin_gradients(inputs, labels, layer, head, bias, bank_rows, *, strategy, momentum, margin):
    """Gradients of L_margin to the layer that makes the features, and to the classifier."""
    bank = lm.CentroidBank(len(head), head.shape[1], strategy=strategy, momentum=momentum).double()
    bank.centroids.copy_(bank_rows)
    bank.seen.fill_(True)
    layer, head, bias = (t.clone().requires_grad_() for t in (layer, head, bias))
    loss = lm.CentroidMargin(margin=margin, bank=bank)
    loss(inputs @ layer.T, head, labels, bias=bias).backward()
    return layer.grad, head.grad, bias.grad


@pytest.mark.parametrize("momentum", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(3))
def test_lmd_proposition_4_3_and_erratum_n3(seed, momentum):
    net = network(seed, width=4)
    features = net.inputs @ net.layer.T
    current = torch.stack([features[net.labels == c].mean(0) for c in range(3)])
    bank = current + 1e-3 * network(seed + 9).head
    own = torch.arange(3)
    nearest = []
    for points in (current, momentum * bank + (1 - momentum) * current):
        distance = LF.signed_boundary_distance(points, net.head, net.head_bias)[own, own]
        nearest.append(distance.masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf).argmax(1))
    assert nearest[0].equal(nearest[1])  # the condition under which the proposition holds
    common = (net.inputs, net.labels, net.layer, net.head, net.head_bias, bank)
    by_none = margin_gradients(*common, strategy="none", momentum=momentum, margin=50.0)
    by_both = margin_gradients(*common, strategy="both", momentum=momentum, margin=50.0)
    by_partial = margin_gradients(*common, strategy="partial", momentum=momentum, margin=50.0)
    torch.testing.assert_close(by_both[0], (1 - momentum) * by_none[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(by_partial[0], by_none[0], rtol=1e-12, atol=0)
    # Appendix B prints the factor on the other side.
    assert float((by_none[0] - (1 - momentum) * by_both[0]).abs().max()) > 1e-3
    # Nothing of the kind for the classifier: the bias gradient is not scaled at all.
    torch.testing.assert_close(by_both[2], by_none[2], rtol=1e-9, atol=1e-12)
    assert float((by_both[1] - (1 - momentum) * by_none[1]).abs().max()) > 1e-3


def test_lmd_proposition_4_3_erratum_n2_counterexample():
    head = torch.tensor([[0.0, 0.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    rows = torch.zeros(3, 2, dtype=torch.float64)
    rows[0] = torch.tensor([0.2, 1.0])

    def gradient(strategy):
        q = torch.tensor([[1.0, 0.3]], dtype=torch.float64, requires_grad=True)
        bank = lm.CentroidBank(3, 2, strategy=strategy, momentum=0.9).double()
        bank.centroids.copy_(rows)
        bank.seen.fill_(True)
        lm.CentroidMargin(margin=2.0, bank=bank)(q, head, torch.tensor([0])).backward()
        return q.grad[0]

    torch.testing.assert_close(gradient("none"), torch.tensor([0.0, -1.0]).double())
    torch.testing.assert_close(gradient("both"), torch.tensor([-0.1, 0.0]).double())


def test_lmd_equation_4_5_erratum_n1_coordinates_are_not_logits():
    W = -torch.eye(2, dtype=torch.float64)
    m = torch.tensor([[-2.0, 0.0]], dtype=torch.float64)  # logits (2, 0): well inside class 0
    distance = 2 / 2**0.5
    printed = 6.0 + float(torch.sign(m[0, 1] - m[0, 0])) * distance
    assert printed == pytest.approx(6.0 + distance)
    value = float(LF.centroid_margin(m, W, torch.tensor([0]), margin=6.0))
    assert value == pytest.approx(6.0 - distance)


def test_lmd_equation_4_5_erratum_n1_gradient_on_the_boundary():
    W = torch.tensor([[2.0, 1.0], [-1.0, 5.0]], dtype=torch.float64)
    b = torch.tensor([0.5, -0.5], dtype=torch.float64)
    normal = W[1] - W[0]
    on_boundary = (b[0] - b[1]) * normal / normal.square().sum()
    m = on_boundary.clone()[None].requires_grad_()
    value = LF.centroid_margin(m, W, torch.tensor([0]), bias=b, margin=6.0).sum()
    assert value.item() == pytest.approx(6.0)
    (gradient,) = torch.autograd.grad(value, m)
    torch.testing.assert_close(gradient[0], normal / normal.norm())
    gap = (m * normal).sum() + b[1] - b[0]
    printed = F.relu(6.0 + torch.sign(gap.detach().round(decimals=9)) * gap.abs() / normal.norm())
    assert float(torch.autograd.grad(printed, m)[0].norm()) == 0
