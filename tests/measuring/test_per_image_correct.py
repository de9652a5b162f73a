"""Which images are right: kept with results, and what two models differ by on the same ones."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from measuring.small_runs import NONE
from torch import nn

from largemargin.app.cli import main
from largemargin.app.data import Samples
from largemargin.app.training import Run
from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Correct,
    Evaluation,
    EvaluationConfig,
    accuracy,
    accuracy_of,
    evaluate,
    paired_counts,
    paired_interval,
)
from largemargin.measuring.accuracy import AccuracyCounter
from largemargin.measuring.batches import DataBatch, digest
from largemargin.measuring.logit_model import LogitModel

QUIET = EvaluationConfig(perturbations="none", gaussian=(), uniform=(), attacks=(), batch_size=5)


@pytest.fixture
def samples() -> Samples:
    labels = torch.arange(23) % 3
    return Samples(labels, [f"{at}" for at in range(23)], torch.rand(23, 1, 3, 3))


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 3)).eval()


def truth(model: nn.Module, samples: Samples) -> list[bool]:
    assert samples.pixels is not None
    found: list[bool] = (model(samples.pixels).argmax(1) == samples.labels).tolist()
    return found


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 1001])
def test_bits_come_back(count: int) -> None:
    right = torch.rand(count) < 0.7
    found = Correct.of(right, "abc")
    assert torch.equal(found.right(), right)
    assert Correct.from_json(found.to_json()) == found
    assert len(found.bits) <= 4 * math.ceil(math.ceil(count / 8) / 3)


@pytest.mark.parametrize("bits", ["oA", "oAAA", "no bits", "o*A==", ""])
def test_damaged_bits_are_an_error(bits: str) -> None:
    with pytest.raises(LargeMarginError, match=r"damaged|3 images"):
        Correct("abc", 3, bits).right()


def test_results_keep_which_images_are_right(model: nn.Module, samples: Samples) -> None:
    for found in (
        accuracy_of(model, samples, batch_size=4),
        evaluate(model, samples, config=QUIET).clean,
        evaluate(model, samples, config=replace(QUIET, retrieval=False)).clean,
    ):
        assert found.correct is not None
        assert found.correct.right().tolist() == truth(model, samples)
        assert found.correct.digest == digest(samples)


def test_of_several_processes_it_is_put_together(model: nn.Module, samples: Samples) -> None:
    right = torch.tensor(truth(model, samples))
    assert samples.pixels is not None
    reader = LogitModel(model)
    one, other = (AccuracyCounter(reader, samples, 15, torch.device("cpu")) for _ in range(2))
    for counter, first, last in ((one, 12, 20), (one, 20, 23), (other, 0, 12)):
        rows = torch.arange(first, last)
        batch = DataBatch(samples.pixels[rows], samples.labels[rows], rows)
        counter.add_logits(batch, model(batch.inputs))
    found = one.result([one.sums(), other.sums()]).correct
    assert found is not None
    assert torch.equal(found.right(), right)


def test_nothing_is_kept_of_other_data(
    model: nn.Module, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader has no names, a skipped sample is neither right nor wrong, and a million is much."""
    assert samples.pixels is not None
    assert accuracy_of(model, [(samples.pixels, samples.labels)]).correct is None
    labels = samples.labels.clone()
    labels[3] = -100
    assert accuracy_of(model, replace(samples, labels=labels)).correct is None
    monkeypatch.setattr(accuracy, "MOST", len(samples))
    assert accuracy_of(model, samples).correct is not None
    monkeypatch.setattr(accuracy, "MOST", len(samples) - 1)
    assert accuracy_of(model, samples).correct is None


def test_a_run_and_its_evaluation_keep_it(of_photos: Run) -> None:
    assert "correct" not in of_photos.result  # there are no test images
    assert main(["evaluate", str(of_photos.folder), *NONE]) == 0
    path = of_photos.folder / "evaluation.json"
    found = Evaluation.load(path)
    validation = of_photos.data().validation
    assert validation is not None
    assert found.clean.correct is not None
    assert found.clean.correct.digest == digest(validation)
    assert found.clean.correct.right().double().mean() == found.clean.accuracy
    old = json.loads(path.read_text())
    del old["clean"]["correct"]
    assert Evaluation.from_dict(old).clean.correct is None


def test_two_models_are_crossed_on_the_same_images_only() -> None:
    one = Correct.of(torch.tensor([1, 1, 1, 0, 0, 0, 0]).bool(), "abc")
    other = Correct.of(torch.tensor([1, 0, 0, 1, 0, 0, 0]).bool(), "abc")
    assert paired_counts(one, other) == (1, 2, 1, 3)
    assert paired_counts(one, replace(other, digest="abd")) is None


def test_the_interval_is_the_published_one() -> None:
    """Newcombe 1998, paired data, Table II: 36, 12, 2, 0."""
    assert paired_interval(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    low, high = paired_interval(36, 12, 2, 0)
    assert paired_interval(36, 2, 12, 0) == pytest.approx((-high, -low))


@pytest.mark.parametrize("first", [60, 75, 90, 110])
def test_it_is_clear_where_the_exact_test_is(first: int) -> None:
    """McNemar's: whether the images that one alone is right about are tosses of a fair coin."""
    stats = pytest.importorskip("scipy.stats")
    low, _ = paired_interval(9700, first, 60, 240 - first)
    p = stats.binomtest(first, first + 60).pvalue
    assert (low > 0) == (p < 0.05)


def test_with_many_samples_it_is_that_of_a_mean_of_differences() -> None:
    _, first, second, _ = counts = (970_000, 9_000, 6_000, 15_000)
    n = sum(counts)
    middle = (first - second) / n
    half = 1.959964 * math.sqrt((first + second) / n - middle**2) / math.sqrt(n)
    assert paired_interval(*counts) == pytest.approx((middle - half, middle + half), abs=2e-5)


@pytest.mark.parametrize(
    ("n", "shares"),
    [
        (360, (0.90, 0.05, 0.02, 0.03)),
        (1000, (0.60, 0.10, 0.10, 0.20)),
        (10_000, (0.98, 0.005, 0.003, 0.012)),
        (100, (0.80, 0.10, 0.05, 0.05)),
    ],
)
def test_it_covers_what_it_says(n: int, shares: tuple[float, ...]) -> None:
    drawn = np.random.default_rng(0).multinomial(n, shares, 2000)
    true = shares[1] - shares[2]
    found = [paired_interval(*map(int, row)) for row in drawn]
    covered = sum(low <= true <= high for low, high in found) / len(found)
    assert 0.94 <= covered <= 0.975


@pytest.mark.parametrize("counts", [(10, 0, 0, 0), (0, 0, 0, 10), (0, 10, 0, 0), (0, 5, 5, 0)])
def test_empty_cells(counts: tuple[int, int, int, int]) -> None:
    low, high = paired_interval(*counts)
    assert -1 <= low < high <= 1


def test_equal_models_do_not_differ_much() -> None:
    low, high = paired_interval(950, 0, 0, 50)
    assert low == -high
    assert 0 < high < 0.005


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(LargeMarginError, match="second"):
        paired_interval(1, 2, -1, 0)
    with pytest.raises(LargeMarginError, match="number of samples"):
        paired_interval(0, 0, 0, 0)
