"""Generalization quantities: against formulas by hand, labels, networks they are not about."""

import itertools
import math

import pytest
import torch
from torch import nn

from largemargin import geometry as g
from largemargin.errors import LargeMarginError
from largemargin.measuring import measure
from largemargin.measuring.generalization import BROKEN, MET, OPEN, Bound, BoundSettings


def chain(bias=False):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 8, bias=bias),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 5, bias=bias),
        nn.ReLU(),
        nn.Linear(5, 3, bias=bias),
    ).double()


def data(n=40, classes=3, batch=16, shape=(6,)):
    x, y = torch.randn(n, *shape).double(), torch.arange(n) % classes
    return x, y, list(zip(x.split(batch), y.split(batch), strict=True))


def found(model, loader, **settings):
    result = measure(model, loader, bounds=BoundSettings(**settings)).bounds
    return {bound.name.split()[0]: bound for bound in result}


def features_of(model, x):
    model.eval()
    q = model[:-1](x).detach()
    return q, model[-1].weight.detach(), model[-1].bias


def test_pairs_by_hand():
    """(5.2) and (5.3) of every pair of classes from explicit margins of its samples."""
    model, (x, y, loader) = chain(bias=True), data()
    rho, delta = 0.7, 0.1
    got = found(model, loader, rho=rho, delta=delta)
    q, W, b = features_of(model, x)
    b = b.detach()
    worst = {"fixed": -math.inf, "union": -math.inf}
    for i, j in itertools.combinations(range(3), 2):
        side = torch.cat([q[y == i] @ (W[i] - W[j]) + b[i] - b[j],
                          q[y == j] @ (W[j] - W[i]) + b[j] - b[i]])  # fmt: skip
        means = torch.stack([q[y == i].mean(0), q[y == j].mean(0)])
        both = torch.cat([q[y == i] - means[0], q[y == j] - means[1]])
        gap = torch.cat([W[i] - W[j], (b[i] - b[j])[None]])
        bound = g.linear_margin_bound(
            side,
            rho=rho,
            weight_norm=float(gap.norm()),
            radius=float(both.norm(dim=1).max()),
            centroid_norm=float(means.norm(dim=1).max()),
            delta=delta,
        )
        for name in worst:
            worst[name] = max(worst[name], float(getattr(bound, name)))
    assert got["NGY-5.2"].value == pytest.approx(worst["fixed"], rel=1e-9)
    assert got["NGY-5.3"].value == pytest.approx(worst["union"], rel=1e-9)
    assert not got["NGY-5.3"].informative
    assert "never informative" in got["NGY-5.3"].verdict


def test_balls_by_hand():
    model, (x, y, loader) = chain(), data()
    got = found(model, loader, radius=0.4)["NGY-5.4"]
    q, _, _ = features_of(model, x)
    worst = -math.inf
    for c in range(3):
        mean = q[y == c].mean(0)
        h = 2 * 0.4**2 - (q[y == c] - mean).square().sum(1)
        bound = g.ball_bound(
            h,
            rho=0.4**2,
            feature_norm=float(q.norm(dim=1).max()),
            centroid_norm=float(mean.norm()),
            radius=math.sqrt(2) * 0.4,
        )
        worst = max(worst, float(bound.bound))
    assert got.value == pytest.approx(worst, rel=1e-9)
    assert not got.informative
    assert "N8" in got.verdict


def test_divergence_of_tight_and_loose_classes():
    """Features that are inputs: what the balls hold is what was put into them."""
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2)).double()
    centers = torch.tensor([[0.0, 0.0], [10.0, 0.0]]).double()
    tight = centers.repeat_interleave(10, 0) + 0.1 * torch.randn(20, 2).double()
    y = torch.arange(2).repeat_interleave(10)
    got = found(model, [(tight, y)], radius=1.0)["NGY-6.1"]
    assert got.informative
    assert {a.state for a in got.assumptions} == {MET}
    assert got.value == pytest.approx(math.log(2))
    assert got.parts["tau"] == 1
    assert got.parts["paper"] == pytest.approx(0.5)
    assert got.parts["largest_possible"] == pytest.approx(math.log(2))
    alone = found(model, [(tight[:10], y[:10])], radius=1.0)["NGY-6.1"]
    assert math.isnan(alone.value)
    assert "one class only" in alone.verdict
    spread = tight.clone()
    spread[[0, 1]] += torch.tensor([[0.0, 5.0], [0.0, -5.0]]).double()  # 8 of 10 stay
    partly = found(model, [(spread, y)], radius=1.0)["NGY-6.1"]
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert partly.value == pytest.approx(math.log(2) - entropy)
    assert partly.parts["paper"] == pytest.approx(0.6**2 / 2)
    turns = torch.arange(5) * (2 * math.pi / 5)
    spread[:5] = tight[:5] + 5 * torch.stack([turns.cos(), turns.sin()], 1)  # 5 of 10 stay
    half = found(model, [(spread, y)], radius=1.0)["NGY-6.1"]
    assert half.value == 0
    assert not half.informative
    assert "a divergence is at least 0 anyway" in half.verdict
    for radius, message in ((6.0, "apart"), (0.001, "% of its samples")):
        broken = found(model, [(tight, y)], radius=radius)["NGY-6.1"]
        assert math.isnan(broken.value)
        assert not broken.informative
        assert broken.verdict.startswith("does not apply")
        assert message in broken.verdict


def test_networks_by_hand():
    model, (x, _, loader) = chain(), data()
    for layer in (model[1], model[4]):  # of two opposite units one is on, whatever comes
        layer.weight.data[1] = -layer.weight.data[0]
    y = model.eval()(x).argmax(1)
    loader = list(zip(x.split(16), y.split(16), strict=True))
    got = found(model.train(), loader, trained_on=True, r=0.5, theta=0.3)
    weights = [model[i].weight.detach() for i in (1, 4, 6)]
    spectral = g.spectral_complexity(weights)
    assert got["ODN-SPEC"].value == pytest.approx(float(spectral.complexity))
    assert not got["ODN-SPEC"].informative
    cushions = g.noise_cushions(weights, x)
    complexity = g.cushion_complexity(cushions, num_samples=40, r=0.5, theta=0.3)
    logits = model.eval()(x).detach()
    top = logits.topk(2, dim=1).values
    margins = top[:, 0] - top[:, 1]
    outside = ((margins <= 0.2) | (margins >= 0.8)).double().mean()
    bound = got["ODN-BOUND"]
    assert bound.value == pytest.approx(float(outside + complexity.derived))
    assert bound.parts["complexity_as_printed"] == pytest.approx(float(complexity.printed))
    assert {a.state for a in bound.assumptions} == {MET, OPEN}
    # The PAC-Bayes step on the same network with factors moved until all norms are equal.
    level = spectral.spectral_norms.prod() ** (1 / 3)
    moved = [w * level / n for w, n in zip(weights, spectral.spectral_norms, strict=True)]
    even = g.pac_bayes_quantities(
        margins,
        torch.cat([w.flatten() for w in moved]),
        cushions.layer_cushion,
        cushions.minimal_interlayer_cushion,
        num_samples=40,
        width=8,
        contraction=float(cushions.activation_contraction),
        spectral_norm=float(level),
        r=0.5,
        theta=0.3,
    )
    assert bound.parts["lemma_1_bound"] == pytest.approx(float(even.bound_lemma1))
    assert bound.parts["pac_bayes_bound"] == pytest.approx(float(even.bound_pac_bayes))


def test_networks_that_switch_a_layer_off_have_no_contraction():
    model = chain()
    x = torch.cat([torch.ones(1, 6), torch.randn(5, 6)]).double()
    model[1].weight.data[:] = -model[1].weight.data.abs()
    bound = found(model, [(x, torch.arange(6) % 3)], trained_on=True)["ODN-BOUND"]
    assert math.isnan(bound.value)
    assert "whole layer off" in bound.verdict


class Skip(nn.Module):
    """Linear layers only, but not a chain."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 6, bias=False)
        self.fc = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.fc(torch.relu(self.hidden(x)) + x)


@pytest.mark.parametrize(
    ("make", "shape", "reason"),
    [
        (lambda: chain(bias=True), (6,), "biases"),
        (Skip, (6,), "not a chain"),
        (
            lambda: nn.Sequential(
                nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
            ),
            (1, 3, 3),
            "BatchNorm2d, Conv2d",
        ),
        (
            lambda: nn.Sequential(
                nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)
            ),
            (6,),
            "not a chain",
        ),
    ],
)
def test_no_number_for_networks_the_theorem_is_not_about(make, shape, reason):
    _, _, loader = data(shape=shape)
    got = found(make().double(), loader)
    for name in ("ODN-SPEC", "ODN-BOUND"):
        assert math.isnan(got[name].value)
        assert not got[name].informative
        assert "without biases" in got[name].verdict
        assert reason in got[name].verdict


def test_labels_follow_what_is_known_about_the_data():
    model, (_, _, loader) = chain(), data()
    states = {}
    for trained_on in (None, True, False):
        got = found(model, loader, trained_on=trained_on)
        states[trained_on] = got["NGY-5.2"].assumptions[0].state
        odn = [a.state for a in got["ODN-BOUND"].assumptions if "trained on" in a.text]
        assert odn == [{None: OPEN, True: MET, False: BROKEN}[trained_on]]
    assert states == {None: OPEN, True: BROKEN, False: MET}


def test_a_bound_below_one_is_called_informative_only_with_its_conditions():
    """Wide margins, small features, many samples: (5.2) can say something."""
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 2, bias=False)).double()
    model[1].weight.data.copy_(torch.tensor([[0.5], [-0.5]]))
    y = torch.arange(20_000) % 2
    x = (1.0 - 2.0 * y[:, None]).double()
    held_out = found(model, [(x, y)], trained_on=False, rho=1.0)["NGY-5.2"]
    assert held_out.value < 0.1
    assert held_out.informative
    assert "cannot be checked" in held_out.verdict
    trained = found(model, [(x, y)], trained_on=True, rho=1.0)["NGY-5.2"]
    assert trained.value == held_out.value
    assert not trained.informative
    assert trained.verdict.startswith("does not apply")


def test_few_samples_for_the_cushions_are_said():
    model, (_, _, loader) = chain(), data()
    result = measure(model, loader, bounds=True, max_samples=10).bounds
    odn = next(bound for bound in result if bound.name.startswith("ODN-BOUND"))
    assert "10 of 40 samples" in odn.verdict or "whole layer off" in odn.verdict


def test_records_and_bad_settings():
    model, (_, _, loader) = chain(), data()
    for bound in measure(model, loader, bounds=True).bounds:
        assert Bound.from_json(bound.to_json()) == bound
        assert bound.verdict
        assert bound.assumptions
        assert str(bound).startswith(bound.name)
    for settings, message in (({"rho": 0.0}, "rho"), ({"r": 0.1}, "r"), ({"delta": 1.0}, "delta")):
        with pytest.raises(LargeMarginError, match=message):
            found(model, loader, **settings)
