"""Out-of-distribution scores against scikit-learn and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor, nn

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.measuring.confidence import (
    SCORES,
    OODScores,
    Scored,
    Scorer,
    detect_ood,
    false_positive_rate,
)
from largemargin.measuring.logit_model import LogitModel


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    known = 2 * torch.randn(53, 5, generator=generator, dtype=torch.float64)
    return model, known, torch.randn(31, 5, generator=generator, dtype=torch.float64)


def scored(model: nn.Module, x: Tensor) -> Scored:
    reader = LogitModel(model)
    with reader.evaluating():
        return Scorer(reader)(x)


def test_scores_by_hand() -> None:
    model, x, _ = problem()
    got = scored(model, x)
    with torch.no_grad():
        features, logits = model[:2](x), model(x)
    weight, bias = model[2].weight.detach().numpy(), model[2].bias.detach().numpy()
    for n, q in enumerate(features.numpy()):
        best = int(np.argmax(weight @ q + bias))
        distances = [
            ((weight[best] - weight[i]) @ q + bias[best] - bias[i])
            / np.linalg.norm(weight[best] - weight[i])
            for i in range(3)
            if i != best
        ]
        assert int(got.predicted[n]) == best
        assert float(got.margin[n]) == pytest.approx(min(distances), rel=1e-12)
    top = logits.sort(descending=True).values
    assert torch.allclose(got.probability, logits.softmax(1).amax(1))
    assert torch.allclose(got.max_logit, top[:, 0])
    assert torch.allclose(got.logit_margin, top[:, 0] - top[:, 1])
    assert torch.allclose(got.energy, logits.logsumexp(1))


def test_cosine_heads_have_a_cosine_margin() -> None:
    model, x, _ = problem()
    lm.attach(model, lm.CosFace(scale=8.0))
    reader = LogitModel(model)
    assert Scorer(reader).margin == "cosine"
    with torch.no_grad():
        cosines = nn.functional.normalize(model[:2](x)) @ nn.functional.normalize(model[2].weight).T
    top = cosines.sort(descending=True).values
    assert torch.allclose(scored(model, x).margin, top[:, 0] - top[:, 1])


def test_auroc_and_false_positives_equal_scikit_learn() -> None:
    model, known, strange = problem()
    got = detect_ood(model, list(known.split(10)), list(strange.split(7)))
    ours, theirs = scored(model, known), scored(model, strange)
    truth = np.r_[np.ones(len(known)), np.zeros(len(strange))]
    for name in SCORES:
        scores = np.r_[getattr(ours, name).numpy(), getattr(theirs, name).numpy()]
        rates, kept, _ = roc_curve(truth, scores, drop_intermediate=False)
        assert got.auroc[name] == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
        assert got.fpr95[name] == pytest.approx(rates[kept >= 0.95].min())
    assert (got.known, got.ood, got.margin) == (53, 31, "distance")
    assert OODScores.from_json(got.to_json()) == got


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95, 1.0])
def test_ties(keep: float) -> None:
    generator = torch.Generator().manual_seed(1)
    known, strange = (torch.randint(6, (40,), generator=generator) for _ in range(2))
    scores = torch.cat([known, strange]).numpy()
    rates, kept, _ = roc_curve([1] * 40 + [0] * 40, scores, drop_intermediate=False)
    assert false_positive_rate(known, strange, keep=keep) == rates[kept >= keep - 1e-12].min()


def test_nothing_to_compare_is_nan() -> None:
    assert math.isnan(false_positive_rate(torch.ones(3), torch.ones(0)))
    assert math.isnan(false_positive_rate(torch.tensor([math.nan]), torch.ones(2)))


def test_bad_ood() -> None:
    model, known, _ = problem()
    with pytest.raises(LargeMarginError, match="given as ood is empty"):
        detect_ood(model, [known], [])
    with pytest.raises(LargeMarginError, match="one row of logits per sample"):
        detect_ood(model, [known[None]], [known])
    with pytest.raises(LargeMarginError, match="no linear layer"):
        detect_ood(nn.Sequential(nn.Tanh()), [known], [known])


def test_results_of_earlier_versions_are_read() -> None:
    """They called the out-of-distribution samples strangers."""
    model, known, strange = problem()
    got = detect_ood(model, [known], [strange])
    saved = got.to_dict()
    saved["strangers"] = saved.pop("ood")
    assert OODScores.from_dict(saved) == got


class ByNorm(nn.Module):
    """Logits as they are, of a head that attach can read."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight.data.copy_(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def test_validation_chooses_the_score() -> None:
    """Known data has large logits and small margins; the other data is told by one of these."""
    known = torch.tensor([[9.0, 8.0, 0.0], [8.0, 9.5, 0.0]])
    weak = torch.tensor([[5.0, 0.0, 0.0], [0.0, 6.0, 0.0]])  # wide margins, small logits
    level = torch.tensor([[9.2, 9.2, 0.0], [9.7, 9.7, 0.0]])  # large logits, no margin
    model = ByNorm()
    got = detect_ood(model, [known], [level], validation=([known], [weak]))
    assert got.chosen == "max_logit"
    assert got.validation is not None
    assert got.validation["max_logit"] == 1
    assert got.validation["margin"] == 0
    assert got.auroc["margin"] == 1  # of the data itself, which does not choose
    assert got.auroc["max_logit"] < 0.5
    again = detect_ood(model, [known], [weak], validation=([known], [level]))
    assert again.chosen == "probability"  # the first of equals
    assert OODScores.from_json(got.to_json()) == got
    plain = detect_ood(model, [known], [level])
    assert (plain.chosen, plain.validation) == (None, None)
    with pytest.raises(LargeMarginError, match="two sources of data"):
        detect_ood(model, [known], [level], validation=[known])  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match="given as validation ood is empty"):
        detect_ood(model, [known], [level], validation=([known], []))


def test_measure_has_the_levels_beside_the_margins() -> None:
    known = torch.tensor([[9.0, 8.0, 0.0], [8.0, 9.5, 0.0]])
    weak = torch.tensor([[5.0, 0.0, 0.0], [0.0, 6.0, 0.0]])
    found = lm.measure(ByNorm(), [(known, torch.tensor([0, 1]))], ood=[weak])
    assert found.ood is not None
    assert found.ood.auroc["lead_raw"] == 0
    assert found.ood.auroc["max_logit"] == found.ood.auroc["energy"] == 1
    model, x, strange = problem()
    both = lm.measure(model, [(x, torch.arange(53) % 3)], ood=[strange]).ood
    wanted = detect_ood(model, [x], [strange]).auroc
    assert both is not None
    for name in ("max_logit", "energy"):
        assert both.auroc[name] == pytest.approx(wanted[name], abs=1e-9)
