"""MarginDistribution on a model: bands measured from its own margins, dead inputs, batch norm."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import largemargin as lm
import largemargin.functional as LF
from largemargin import LargeMarginError
from largemargin.dropin import MarginWarning
from largemargin.dropin.training_warnings import Watch

W = torch.tensor([[2.0, 0.0], [-1.0, 0.5], [0.0, -3.0]])


def batch(seed, samples=9):
    x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return x @ W.T, torch.arange(samples) % 3, x


def numbers(logits, labels):
    """Gaps, and norms of their gradients, of the linear model, in NumPy."""
    z, w = logits.detach().numpy(), W.numpy()
    gaps, norms = [], []
    for row, y in zip(z, labels.tolist(), strict=True):
        rival = max((c for c in range(3) if c != y), key=lambda c: row[c])
        gaps.append(row[y] - row[rival])
        norms.append(np.linalg.norm(w[y] - w[rival]))
    return np.array(gaps, float), np.array(norms, float)


def lower_median(values):
    return np.sort(values)[(len(values) - 1) // 2]


def test_auto_measures_the_models_own_margins_then_holds_them():
    loss = lm.MarginDistribution(r="auto", measured_steps=30)
    reach = slope = 0.0
    for step in range(40):
        logits, labels, x = batch(step)
        value = loss(logits, labels, x)
        gaps, norms = numbers(logits, labels)
        if step < 30:
            margins = gaps / (norms + 1e-6 + 0.1 * norms.mean())
            share = max(1 / (step + 1), 0.05)
            reach += share * (lower_median(margins[margins > 0]) - reach)
            slope += share * (norms.mean() - slope)
        if step < 30:
            want = LF.cross_entropy(logits, labels).mean()
        else:
            r = reach / (1 - 7 / 12)
            margins = torch.tensor(gaps / (norms + 1e-6 + 0.1 * slope))
            want = LF.margin_distribution(margins, r=float(r), theta=float(r * 7 / 12)).mean()
        assert value.item() == pytest.approx(want.item(), rel=1e-4), step
        assert loss.measured.tolist() == pytest.approx([min(step + 1, 30), reach, slope], rel=1e-4)


def test_evaluation_and_copies_leave_the_measures_alone():
    loss = lm.MarginDistribution(r="auto", measured_steps=5)
    for step in range(3):
        loss(*batch(step))
    before = loss.measured.clone()
    loss.eval()(*batch(9))
    assert torch.equal(loss.measured, before)
    fresh = lm.MarginDistribution(r="auto", measured_steps=5)
    fresh.load_state_dict(loss.state_dict())
    for again in (fresh, copy.deepcopy(loss).train(), pickle.loads(pickle.dumps(loss)).train()):
        for step in (3, 4, 5):
            again(*batch(step))
        assert again.measured[0] == 5
    assert torch.equal(fresh.measured, again.measured)
    assert eval(repr(fresh), {"MarginDistribution": lm.MarginDistribution}).r == "auto"
    assert "measured" not in lm.MarginDistribution().state_dict()


def test_a_batch_without_a_right_sample_says_nothing_of_the_reach():
    loss = lm.MarginDistribution(r="auto", measured_steps=3)
    x = torch.eye(2).requires_grad_()
    wrong, right = (x @ W.T, torch.tensor([2, 0]), x), (x @ W.T, torch.tensor([0, 1]), x)
    loss(*wrong)
    assert loss.measured.tolist()[:2] == [1, 0]
    loss(*right)
    assert loss.measured[1] > 0
    all_ignored = (x @ W.T, torch.tensor([-100, -100]), x)
    before = loss.measured[1:].clone()
    assert loss(*all_ignored) == 0
    assert torch.equal(loss.measured[1:], before)
    assert all(share == 0 for share in loss.observed.values())


class Dead(nn.Module):
    """No input has a gradient, and the logits are those of the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        nn.init.constant_(self.body.bias, -100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def test_a_dead_network_survives_an_eps_of_its_former_slope():
    torch.manual_seed(0)
    loss = lm.MarginDistribution(r="auto", measured_steps=1)
    loss(*batch(0))
    model = Dead()
    x = torch.randn(6, 2, requires_grad=True)
    small = lm.MarginDistribution(eps=1e-6)
    values = [each(model(x), torch.arange(6) % 3, x) for each in (loss, small)]
    assert values[1] > 1e4
    assert values[0] < 100
    (gradient,) = torch.autograd.grad(values[0], model.head.bias)
    assert bool(torch.isfinite(gradient).all())
    loss.reduction, right = "none", model(x).argmax(1)
    assert bool((loss(model(x), right, x) < loss(model(x), (right + 1) % 3, x)).all())


def test_the_band_as_measured_lies_between_one_and_nineteen_fifths_of_the_reach():
    loss = lm.MarginDistribution(r="auto", measured_steps=1)
    loss(*batch(0))
    _, reach, slope = loss.measured.tolist()
    x = torch.tensor([[1.0, 0.0]])
    _, norms = numbers(x @ W.T, torch.tensor([0]))
    per_unit = 2 / (norms[0] + 1e-6 + 0.1 * slope)  # of gap along the first axis, W[0] - W[2]
    for factor, branch in ((0.98, "below"), (1.02, "inside"), (3.75, "inside"), (3.85, "above")):
        scaled = (x * (factor * reach / per_unit)).requires_grad_()
        loss(scaled @ W.T, torch.tensor([0]), scaled)
        assert loss.observed[branch] == 1, factor


def test_without_batch_norm_per_sample_gradients_are_the_others():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, labels = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.arange(5) % 3
    for kind in (lm.MarginHinge, lm.MarginDistribution):
        for second in (False, True):
            values = [
                kind(differentiable_norm=second, per_sample_gradients=alone)(model(x), labels, x)
                for alone in (False, True)
            ]
            torch.testing.assert_close(*values)
            slopes = [torch.autograd.grad(value, model[0].weight)[0] for value in values]
            torch.testing.assert_close(*slopes)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_per_sample_gradients_do_not_mix_the_batch():
    model, labels = net(), torch.arange(7) % 3
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def margins(**options):
        return LF.linearized_margins(model(x), labels, x, eps=0.0, **options).margins

    found = margins(per_sample_gradients=True)
    own = []
    for row in range(7):
        logits = model(x)
        rival = logits[row].detach().clone()
        rival[labels[row]] = -torch.inf
        gap = logits[row, labels[row]] - logits[row, rival.argmax()]
        own.append((gap / torch.autograd.grad(gap, x)[0][row].norm()).item())
    torch.testing.assert_close(found, torch.tensor(own, dtype=torch.float64))
    assert (margins() / found - 1).abs().max() > 0.01
    model[1].eval()
    torch.testing.assert_close(margins(), margins(per_sample_gradients=True))
    for kind in (lm.MarginHinge, lm.MarginDistribution):
        loss = kind(per_sample_gradients=True)
        want = kind()(model(x), labels, x)
        assert loss(model(x), labels, x).item() == pytest.approx(want.item())


def test_shares_of_the_branches_are_shown_beside_the_terms():
    loss = lm.MarginDistribution(r=1.0, theta=0.5, eps=0.0)
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0], [9.0, 9.0]], requires_grad=True)
    logits, labels = x @ torch.tensor([[0.5, 0.0], [-0.5, 0.0]]).T, torch.tensor([0, 0, 0, -100])
    loss(logits, labels, x)
    assert {k: v.item() for k, v in loss.observed.items()} == pytest.approx(
        {"below": 1 / 3, "inside": 1 / 3, "above": 1 / 3}
    )
    model = nn.Linear(2, 3)
    criterion = lm.attach(model, 0.5 * lm.MarginDistribution(), gradient_norms=True)
    criterion(model(torch.randn(5, 2)), torch.arange(5) % 3).backward()
    shares = [f"margin_distribution.{branch}" for branch in ("below", "inside", "above")]
    assert list(criterion.terms) == ["margin_distribution", *shares]
    assert sum(criterion.terms[name].item() for name in shares) == pytest.approx(1)
    assert list(criterion.gradient_norms) == ["margin_distribution"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"r": 60.0}, "below its band"), ({"r": 1e-6, "theta": 0.0}, "below or above"), ({}, None)],
)
def test_a_band_that_no_margin_is_in_is_warned_of(settings, said):
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    criterion = lm.attach(model, lm.MarginDistribution(**settings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(100):
            criterion(model(2 * torch.randn(16, 2)), torch.arange(16) % 3)
    messages = [str(each.message) for each in caught if each.category is MarginWarning]
    messages = [each for each in messages if "band" in each]
    assert len(messages) == (said is not None)
    assert said is None or said in messages[0]


def test_a_band_that_all_margins_are_inside_is_warned_of():
    """The loss is 0 there, and trains nothing."""
    criterion = lm.attach(nn.Linear(2, 3), lm.MarginDistribution())
    watch = Watch(patience=1)
    shares = {"below": 0.0, "inside": 1.0, "above": 0.0}
    for above, warned in ((0.1, False), (0.0, True)):
        shares["above"] = above
        criterion.objective.terms["margin_distribution"].observed = {
            name: torch.tensor(share) for name, share in shares.items()
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch._look_at_branches(criterion.objective, True)
        assert ["lies inside its band" in str(each.message) for each in caught] == [True] * warned


def test_margins_of_several_calls_are_seen_of_every_term():
    bands = {"one": lm.MarginDistribution(), "two": lm.MarginDistribution()}
    objective = lm.attach(nn.Linear(2, 3), lm.Objective(**bands)).objective
    watch = Watch(bands_after=2)
    for inside, due in ((1.0, False), (0.0, True)):  # the first call has seen some inside
        for loss in objective.terms.values():
            loss.observed = {"inside": torch.tensor(inside), "above": torch.tensor(0.5)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            watch._look_at_branches(objective, due)


def test_each_of_several_bands_is_looked_at():
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    good, far = lm.MarginDistribution(), lm.MarginDistribution(r=60.0)
    criterion = lm.attach(model, lm.Objective(plain=lm.CrossEntropy(), good=good, far=far))
    criterion._watch = Watch(bands_after=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(100):
            criterion(model(2 * torch.randn(16, 2)), torch.arange(16) % 3)
    assert [each for each in caught if "term 'far'" in str(each.message)]


def test_wrong_settings():
    for settings in (
        {"measured_steps": 0},
        {"measured_steps": 1.5},
        {"r": "automatic"},
        {"r": 0.5},
        {"eps": -1.0},
    ):
        with pytest.raises(LargeMarginError, match=next(iter(settings))):
            lm.MarginDistribution(**settings)


@pytest.mark.parametrize(
    ("loss", "reach"),
    [
        (lm.MarginDistribution(), 0.5),
        (lm.MarginDistribution(r=30.0, theta=0.7), 29.3),
        (lm.MarginHinge(threshold=0.25), 0.25),
        (lm.LayerMargin(gamma=2.0), 2.0),
    ],
    ids=repr,
)
def test_a_dead_input_pulls_at_most_ten_times_as_hard_as_cross_entropy(loss, reach):
    bias = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    x = torch.ones(1, 3, requires_grad=True)
    last = [x] if isinstance(loss, lm.LayerMargin) else x
    value = loss(0 * x + bias, torch.tensor([1]), last)
    (pull,) = torch.autograd.grad(value, bias)
    zero = 1.0 if isinstance(loss, lm.MarginDistribution) else reach  # of a margin of 0
    # The gap is -0.5 and the margin -0.5 / eps with eps = 0.1 / reach.
    assert value.item() == pytest.approx(zero * (1 + 5.0))
    assert pull.tolist() == pytest.approx([10 * zero, -10 * zero, 0.0])


def test_an_eps_that_is_given_is_the_one_used():
    logits, labels, x = batch(3)
    small = lm.MarginDistribution(eps=0.0)(logits, labels, x)
    margins = LF.linearized_margins(logits, labels, x, eps=0.0).margins
    assert small.item() == pytest.approx(LF.margin_distribution(margins).mean().item())
    own = lm.MarginDistribution(r=1.2, theta=0.7)(logits, labels, x)
    margins = LF.linearized_margins(logits, labels, x, eps=0.1 / 0.5).margins
    assert own.item() == pytest.approx(LF.margin_distribution(margins).mean().item())
    assert lm.MarginHinge(threshold=-1.0)(logits, labels, x).isfinite()
