"""Imbalance profiles: golden counts, and subsets that have them."""

import json

import pytest
import torch
from oracles.golden import FOLDER, decode_all

from largemargin.app.data.modify import class_counts_profile, imbalanced_subset
from largemargin.errors import LargeMarginError

CASES = json.loads((FOLDER / "BAS-IMB.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_counts(case):
    p = case["params"]
    counts = class_counts_profile(p["C"], largest=p["n_max"], ratio=p["ratio"], kind=p["kind"])
    assert counts.dtype == torch.int64
    assert counts.tolist() == decode_all(case["expected"])["counts"].tolist()


def test_cifar10_total():
    assert int(class_counts_profile(10, largest=5000, ratio=100).sum()) == 12406


@pytest.mark.parametrize("kind", ["exp", "step"])
@pytest.mark.parametrize("num_classes", [2, 3, 7, 100])
@pytest.mark.parametrize(("largest", "ratio"), [(5000, 10), (5000, 100), (1000, 1), (90, 3)])
def test_the_ends_are_exact(kind, num_classes, largest, ratio):
    counts = class_counts_profile(num_classes, largest=largest, ratio=ratio, kind=kind).tolist()
    assert counts[0] == largest
    assert counts[-1] == largest // ratio
    assert counts == sorted(counts, reverse=True)


def test_whole_numbers_are_not_rounded_down():
    """1000 / 4 is computed as 249.99999999999997."""
    found = class_counts_profile(6, largest=1000, ratio=32).tolist()
    assert found == [1000, 500, 250, 125, 62, 31]


def test_subset_has_the_counts():
    labels = torch.arange(30) % 3
    counts = class_counts_profile(3, largest=10, ratio=10)
    generator = torch.Generator().manual_seed(1)
    chosen = imbalanced_subset(labels, counts, generator=generator)
    assert torch.bincount(labels[chosen], minlength=3).tolist() == counts.tolist()
    assert chosen.unique().tolist() == chosen.tolist()
    again = imbalanced_subset(labels, counts, generator=torch.Generator().manual_seed(1))
    assert torch.equal(chosen, again)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: class_counts_profile(1, largest=10, ratio=2), "at least 2 classes"),
        (lambda: class_counts_profile(3, largest=10, ratio=0.5), "ratio must be"),
        (lambda: class_counts_profile(3, largest=10, ratio=100), "at least one sample"),
        (lambda: class_counts_profile(3, largest=10, ratio=2, kind="linear"), "kind must be"),
        (
            lambda: imbalanced_subset(torch.tensor([0, 1]), torch.tensor([2, 1])),
            r"counts\[0\] must lie in \[0, 1\]",
        ),
        (lambda: imbalanced_subset(torch.tensor([0, 2]), torch.tensor([1, 1])), "labels must lie"),
        (lambda: imbalanced_subset(torch.eye(2), torch.tensor([1, 1])), "must be class indices"),
        (lambda: imbalanced_subset(torch.tensor([0, 1]), torch.ones(1, 2)), "one entry per class"),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call()
