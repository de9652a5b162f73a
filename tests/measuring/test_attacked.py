"""Accuracy under attacks: counted right, spread over the data, the model left as it was."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Evaluation,
    EvaluationConfig,
    attack_curve,
    attacked_accuracy,
    evaluate,
)
from largemargin.measuring.accuracy import wilson
from largemargin.measuring.robust import Attack, fgsm
from largemargin.measuring.robust.attacks import Ball
from largemargin.measuring.robust_accuracy import attacks_of, stride_for

N = 101


def line(n: int = N) -> Samples:
    """Images of one pixel, from 0 to 1; bright ones are of class 1."""
    pixels = torch.linspace(0, 1, n).view(n, 1, 1, 1)
    labels = (pixels.flatten() > 0.5).long()
    return Samples(labels, [str(i) for i in range(n)], pixels)


def at_half() -> nn.Sequential:
    """Calls what is above 0.5 class 1."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    model[1].weight.data = torch.tensor([[-1.0], [1.0]])
    model[1].bias.data = torch.tensor([0.5, -0.5])
    return model


@pytest.mark.parametrize("kind", ["fgsm", "pgd", "apgd"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_line_by_hand(kind: str, norm: str) -> None:
    """Within epsilon of the boundary everything falls, beyond it nothing does."""
    for epsilon in (0.0, 0.105, 0.305):
        attack = Attack(kind, norm, epsilon, steps=5)
        (got,) = attacked_accuracy(at_half(), line(), [attack])
        fallen = sum(abs(i / 100 - 0.5) < epsilon for i in range(N))
        assert got.accuracy == pytest.approx((N - fallen) / N)
        assert (got.attack, got.norm, got.epsilon) == (attack.name, norm, epsilon)
        assert (got.low, got.high) == wilson(N - fallen, N)


def test_counts_are_those_of_the_attack_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.rand(40, 2, 5, 5), torch.randint(3, (40,))
    (got,) = attacked_accuracy(model, [(x, y)], [Attack("fgsm", epsilon=0.05)])
    changed = fgsm(model, x, y, epsilon=0.05)
    assert got.accuracy == float((model(changed).argmax(1) == y).double().mean())
    one, other = (
        attacked_accuracy(model, [(x, y)], [Attack("pgd", epsilon=0.05, steps=3)], seed=seed)
        for seed in (1, 1)
    )
    assert one == other


@pytest.mark.parametrize("kind", ["pgd", "pgd_l2", "apgd"])
def test_batches_do_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are attacked from the same points, whatever batch they are in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    samples = Samples(torch.arange(40) % 3, [str(i) for i in range(40)], torch.rand(40, 2, 3, 3))
    starts: list[Tensor] = []
    plain = Ball.random
    monkeypatch.setattr(Ball, "random", lambda *a, **k: starts.append(plain(*a, **k)) or starts[-1])
    attacks = attacks_of([kind], linf=[0.1], l2=[0.3], steps=3)
    found = []
    for size in (40, 7, 16):
        starts.clear()
        result = attacked_accuracy(model, samples, attacks, batch_size=size, max_samples=20)
        found.append((result, torch.cat(starts)))
    for result, points in found[1:]:
        assert result == found[0][0]
        assert torch.equal(points, found[0][1])


def test_a_curve_falls() -> None:
    curve = attack_curve(at_half(), line(), Attack("pgd", steps=5), [0.0, 0.1, 0.2, 0.6])
    assert [each.epsilon for each in curve] == [0.0, 0.1, 0.2, 0.6]
    shares = [each.accuracy for each in curve]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert shares[-1] == 0


@pytest.mark.parametrize("at_most", [1, 10, 50, 101, 500])
def test_fewer_samples_are_spread_over_the_data(at_most: int) -> None:
    (got,) = attacked_accuracy(
        at_half(), line(), [Attack(epsilon=0.0)], max_samples=at_most, batch_size=7
    )
    assert got.samples <= at_most
    assert got.samples >= min(at_most, N) / 2
    assert stride_for(line(), None, name="max_samples", every="max_samples=None") == 1
    with pytest.raises(LargeMarginError, match="max_samples must be a finite number >= 1"):
        attacked_accuracy(at_half(), line(), [Attack(epsilon=0.0)], max_samples=0)


def test_a_loader_of_unknown_size_is_told_how_to_attack_all_of_it() -> None:
    loader = [(torch.rand(4, 1, 1, 1), torch.tensor([0, 1, 0, 1]))]
    with pytest.raises(
        LargeMarginError, match=r"Pass config=EvaluationConfig\(attack_samples=None"
    ):
        lm.evaluate(at_half(), loader, config=EvaluationConfig(perturbations="none"))
    with pytest.raises(LargeMarginError, match=r"^max_samples needs .* Pass max_samples=None"):
        attacked_accuracy(at_half(), loader, [Attack(epsilon=0.0)], max_samples=2)


def test_the_model_is_left_as_it_was() -> None:
    model = at_half()
    model[1].bias.requires_grad_(False)
    attacked_accuracy(model, line(), [Attack("pgd", epsilon=0.1, steps=2)])
    assert model.training
    assert all(each.grad is None for each in model.parameters())
    assert [each.requires_grad for each in model.parameters()] == [True, False]


class Dropping(nn.Module):
    """Outputs in a dict, and a dropout that would make attacks random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = at_half(), nn.Dropout(0.9)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": x.flatten(1), "scores": self.inner(self.drop(x))}


def test_any_kind_of_output() -> None:
    attack = Attack("pgd", epsilon=0.105, steps=5)
    want = attacked_accuracy(at_half(), line(), [attack])
    assert attacked_accuracy(Dropping(), line(), [attack]) == want


def test_labels_to_skip() -> None:
    samples = line()
    assert samples.pixels is not None
    labels = samples.labels.clone()
    labels[:50] = -100
    loader = [(samples.pixels[:50], labels[:50]), (samples.pixels[50:], labels[50:])]
    (got,) = attacked_accuracy(at_half(), loader, [Attack("fgsm", epsilon=0.105)])
    assert got.samples == 51
    assert got.accuracy == pytest.approx((51 - 11) / 51)


def test_inside_an_evaluation() -> None:
    config = EvaluationConfig(
        perturbations="none",
        gaussian=(),
        uniform=(),
        attacks=("fgsm", "pgd_l2"),
        linf=(0.0, 0.105),
        l2=(0.205,),
        attack_steps=4,
        attack_samples=None,
        retrieval=False,
    )
    got = evaluate(at_half(), line(), config=config)
    attacks = attacks_of(config.attacks, linf=config.linf, l2=config.l2, steps=4)
    assert got.attacked == attacked_accuracy(at_half(), line(), attacks)
    assert [each.attack for each in got.attacked] == [
        "fgsm linf 0",
        "fgsm linf 0.105",
        "pgd-4 l2 0.205",
    ]
    assert got.attacked[0].accuracy == got.clean.accuracy
    assert attacks_of("pgd", linf=[0.1], l2=[], steps=2) == attacks_of(
        ["pgd"], linf=[0.1], l2=[], steps=2
    )
    assert "  pgd-4 l2 0.205 " in str(got)
    assert Evaluation.from_json(got.to_json()) == got


def test_bad_attacks() -> None:
    model, samples = at_half(), line()
    with pytest.raises(LargeMarginError, match="every attack must be one of 'fgsm'"):
        attacks_of(["square"], linf=[0.1], l2=[], steps=2)
    with pytest.raises(LargeMarginError, match="attack_steps"):
        attacks_of(["pgd"], linf=[0.1], l2=[], steps=0)
    with pytest.raises(LargeMarginError, match="epsilon must be"):
        attacks_of(["pgd"], linf=[-0.1], l2=[], steps=2)
    wrong: Any
    for wrong in (Attack(), "pgd", "", ["pgd"]):
        with pytest.raises(LargeMarginError, match="attacks must be a list of attacks"):
            attacked_accuracy(model, samples, wrong)
    with pytest.raises(LargeMarginError, match="data is empty"):
        attacked_accuracy(model, [], [Attack()])
    chosen = Samples(torch.tensor([-100, 0, -100, 0]), list("abcd"), torch.rand(4, 1, 3, 3))
    with pytest.raises(LargeMarginError, match="-100, or all that was chosen of it is"):
        attacked_accuracy(model, chosen, [Attack()], max_samples=2)
    with pytest.raises(LargeMarginError, match="does not say how many"):
        attacked_accuracy(model, iter([]), [Attack()], max_samples=5)
    rows: Any = [(torch.rand(3, 1), torch.zeros(3).long())]
    with pytest.raises(LargeMarginError, match=r"an attack needs images of shape \(N, C, H, W\)"):
        attacked_accuracy(model, rows, [Attack()])
    nn.init.constant_(model[1].weight, math.nan)
    with pytest.raises(LargeMarginError, match="robustness cannot be measured"):
        attacked_accuracy(model, samples, [Attack("fgsm")])
