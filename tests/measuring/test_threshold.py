"""Thresholds that keep a share of right predictions, or reach an accuracy; intervals."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring.accuracy import paired_interval, wilson
from largemargin.measuring.calibrate import Threshold, calibrate_threshold, threshold_of


def drawn(n: int = 400, levels: int | None = None) -> tuple[Tensor, Tensor]:
    """Margins, and predictions that are right the more often the larger they are."""
    generator = torch.Generator().manual_seed(0)
    margins = torch.rand(n, generator=generator, dtype=torch.float64)
    right = torch.rand(n, generator=generator) < 0.6 + 0.4 * margins
    return (margins * levels).floor() if levels else margins, right


@pytest.mark.parametrize("target", [0.5, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("levels", [None, 7])
def test_keep_is_the_largest_that_keeps_enough(target: float, levels: int | None) -> None:
    margins, right = drawn(levels=levels)
    got = threshold_of(margins, right, target=target)
    mine = margins[right].numpy()
    enough = [t for t in np.unique(mine) if np.mean(mine >= t) >= target]
    assert got.value == max(enough)
    kept = margins >= got.value
    assert got.accepted == float(kept.double().mean())
    assert got.accepted_accuracy == float(right[kept].double().mean())
    assert got.errors_found == pytest.approx(float((~kept)[~right].double().mean()))
    assert got.accuracy == float(right.double().mean())


@pytest.mark.parametrize("target", [0.7, 0.85, 0.9])
@pytest.mark.parametrize("levels", [None, 7])
def test_accuracy_is_the_smallest_that_reaches_it(target: float, levels: int | None) -> None:
    margins, right = drawn(levels=levels)
    got = threshold_of(margins, right, rule="accuracy", target=target)
    reached = [
        float(t) for t in margins.unique() if right[margins >= t].double().mean() >= target - 1e-12
    ]
    assert got.value == min(reached)
    assert got.accepted_accuracy >= target - 1e-12


def test_a_model_on_validation_data() -> None:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    pixels = torch.rand(200, 1, 3, 3, generator=generator)
    labels = model(pixels).argmax(1)
    labels[::4] = (labels[::4] + 1) % 3
    samples = Samples(labels, [str(i) for i in range(200)], pixels)
    got = calibrate_threshold(model, samples, target=0.9)
    with torch.no_grad():
        logits = model(pixels).double()
    weight = model[1].weight.detach().double()
    top = logits.argmax(1)
    gaps = logits.gather(1, top[:, None]) - logits
    lengths = (weight[top][:, None] - weight).norm(dim=2)
    distances = (gaps / lengths).scatter(1, top[:, None], math.inf).amin(1)
    want = threshold_of(distances, top == labels, target=0.9)
    assert (got.margin, got.samples, got.accuracy) == ("distance", 200, 0.75)
    assert got.value == pytest.approx(want.value, rel=1e-5)
    assert Threshold.from_json(got.to_json()) == got
    assert "distance margin" in str(got)
    lm.attach(model, lm.CosFace(scale=4.0))
    assert calibrate_threshold(model, samples).margin == "cosine"


def test_labels_to_skip_are_skipped() -> None:
    model = nn.Linear(2, 2)
    x, y = torch.randn(100, 2), torch.zeros(100, dtype=torch.long)
    y[50:] = -100
    assert calibrate_threshold(model, [(x, y)], target=0.5).samples == 50


def test_refusals() -> None:
    model, margins = nn.Linear(2, 2), torch.arange(10.0)
    everything, nothing = torch.ones(10, dtype=torch.bool), torch.zeros(10, dtype=torch.bool)
    with pytest.raises(LargeMarginError, match="on validation data, but there is none"):
        calibrate_threshold(model, None)
    with pytest.raises(LargeMarginError, match="but it is empty"):
        calibrate_threshold(model, [])
    with pytest.raises(LargeMarginError, match=r"at least 20 of them, but .* has 10"):
        threshold_of(margins, everything, target=0.95)
    with pytest.raises(LargeMarginError, match="no threshold brings the accuracy"):
        threshold_of(margins, nothing, rule="accuracy", target=0.5)
    with pytest.raises(LargeMarginError, match="has the model diverged"):
        threshold_of(margins * math.nan, everything, target=0.5)
    with pytest.raises(LargeMarginError, match="rule must be one of"):
        calibrate_threshold(model, [], rule="best")
    with pytest.raises(LargeMarginError, match="target must be"):
        calibrate_threshold(model, [], target=1.5)
    assert threshold_of(margins, everything, target=0.9).accepted >= 0.9  # ten suffice
    alright = threshold_of(margins, everything, target=0.5)
    assert math.isnan(alright.errors_found)


@pytest.mark.parametrize(("right", "samples"), [(0, 5), (5, 5), (1, 2), (937, 1000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_wilson_equals_scipy(right: int, samples: int, confidence: float) -> None:
    want = binomtest(right, samples).proportion_ci(confidence, method="wilson")
    assert wilson(right, samples, confidence=confidence) == pytest.approx((want.low, want.high))


def test_wilson_refuses() -> None:
    for right, samples in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(LargeMarginError):
            wilson(right, samples)
    for confidence in (0.0, 1.0):
        with pytest.raises(LargeMarginError, match="confidence must be"):
            wilson(1, 2, confidence=confidence)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize(
    ("counts", "phi"),
    [
        # With a continuity correction: (both * neither - first * second - n / 2) / root.
        ((20, 4, 2, 14), (20 * 14 - 4 * 2 - 20) / math.sqrt(24 * 16 * 22 * 18)),
        ((900, 10, 0, 90), (900 * 90 - 500) / math.sqrt(910 * 90 * 900 * 100)),
        ((3, 1, 2, 1), 0.0),  # smaller than the correction
        ((4, 2, 2, 1), 0.0),
        ((1, 9, 8, 2), (1 * 2 - 9 * 8) / math.sqrt(10 * 10 * 9 * 11)),  # negative: none
        ((20, 0, 0, 0), 0.0),
    ],
)
def test_paired_intervals_know_what_the_two_have_in_common(
    counts: tuple[int, int, int, int], phi: float, confidence: float
) -> None:
    """Newcombe's method 10, from scipy's intervals of both shares."""
    both, first, second, _ = counts
    n = sum(counts)
    one, other = (
        binomtest(right, n).proportion_ci(confidence, method="wilson")
        for right in (both + first, both + second)
    )
    p, q = (both + first) / n, (both + second) / n
    down = math.sqrt(
        (p - one.low) ** 2 - 2 * phi * (p - one.low) * (other.high - q) + (other.high - q) ** 2
    )
    up = math.sqrt(
        (one.high - p) ** 2 - 2 * phi * (one.high - p) * (q - other.low) + (q - other.low) ** 2
    )
    found = paired_interval(*counts, confidence=confidence)
    assert found == pytest.approx((p - q - down, p - q + up), abs=1e-12)


def test_paired_intervals_refuse() -> None:
    wrong: Any
    for wrong in ((0, 0, 0, 0), (3, -1, 0, 0), (3, 0.5, 0, 0)):
        with pytest.raises(LargeMarginError):
            paired_interval(*wrong)


def test_counts_of_numpy_are_counts() -> None:
    counts = (90_000, 60_000, 50_000, 80_000)
    assert wilson(*np.array([9, 10])) == wilson(9, 10)
    assert paired_interval(*np.array(counts)) == paired_interval(*counts)


@pytest.mark.parametrize("rule", ["keep", "accuracy"])
def test_right_predictions_as_numbers(rule: str) -> None:
    """As indices they would choose the first two margins again and again."""
    margins, right = torch.arange(40.0), torch.arange(40) > 3
    found = threshold_of(margins, right.long(), rule=rule, target=0.9)
    assert found == threshold_of(margins, right, rule=rule, target=0.9)
    for wrong in (0.0, 1.5):
        with pytest.raises(LargeMarginError, match="target must be a finite number > 0 and <= 1"):
            threshold_of(margins, right, rule=rule, target=wrong)


def test_without_wrong_predictions_no_share_of_them_is_told() -> None:
    found = threshold_of(torch.arange(40.0), torch.ones(40).bool(), target=0.95)
    assert math.isnan(found.errors_found)
    assert "nan" not in str(found)
    assert "5.0 % are flagged; there are no wrong predictions; accuracy 100.00 %" in str(found)
    wrong = threshold_of(torch.arange(40.0), torch.arange(40) > 1, target=0.95)
    assert ", 100.0 % of the wrong predictions among them; accuracy" in str(wrong)
