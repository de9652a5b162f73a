"""Rows of a batch that do not count, and banks with more classes than the batch has samples."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from largemargin import CenterLoss, CentroidMargin, Compactness, Discriminative
from largemargin.functional import centroid_margin

LARGE = 100_000


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def run(loss: Any, features: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    value = loss(features, weight, labels)
    return [value.detach(), *torch.autograd.grad(value, (features, weight))]


@pytest.mark.parametrize("strategy", ["none", "both", "partial"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_more_classes_than_samples_gives_the_same_as_fewer(strategy: str, accumulate: int) -> None:
    # Ignored rows fill the batch up to C, where the bank switches from samples to classes as rows.
    C, D, weight = 9, 3, normal(9, 3, seed=5)
    options = {"strategy": strategy, "momentum": 0.75, "accumulate": accumulate}
    short, padded = (Discriminative(C, D, **options).double() for _ in range(2))
    for step, rows in enumerate([[8, 2, 8], [2, 2], [0, 8, 5, 2, 5, 0, 1, 7], [4], []]):
        labels = torch.tensor(rows, dtype=torch.long)
        features = normal(len(rows), D, seed=step)
        filler = torch.full((C - len(rows), D), torch.nan, dtype=torch.float64)
        long = torch.cat([features.detach(), filler]).requires_grad_()
        ignored = torch.full((C - len(rows),), -100)
        got = run(short, features, weight, labels)
        want = run(padded, long, weight, torch.cat([labels, ignored]))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1][: len(rows)])
        torch.testing.assert_close(got[2], want[2])
        assert (want[1][len(rows) :] == 0).all()
        for name, value in short.bank.state_dict().items():
            torch.testing.assert_close(value, padded.bank.state_dict()[name], msg=name)


@pytest.mark.parametrize("C", [3, 12])
def test_ignored_rows_touch_nothing(C: int) -> None:
    D, weight = 3, normal(C, 3, seed=5)
    labels = torch.tensor([0, -100, 1, 1, -100, 2])
    features = normal(6, D)
    with torch.no_grad():
        features[labels == -100] = torch.nan
    kept = features.detach()[labels >= 0].requires_grad_()
    loss, other = Discriminative(C, D).double(), Discriminative(C, D).double()
    for _ in range(2):
        got, want = (
            run(loss, features, weight, labels),
            run(other, kept, weight, labels[labels >= 0]),
        )
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1][labels >= 0], want[1])
        assert (got[1][labels == -100] == 0).all()
        torch.testing.assert_close(got[2], want[2])
        for name, value in loss.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], msg=name)


@pytest.mark.parametrize("C", [3, 12])
@pytest.mark.parametrize("labels", [[], [-100, -100, -100, -100]])
def test_nothing_that_counts_is_zero_and_leaves_the_bank_alone(C: int, labels: list[int]) -> None:
    loss, weight = Discriminative(C, 3).double(), normal(C, 3, seed=5)
    loss(normal(2, 3, seed=1), weight, torch.tensor([0, 1]))
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    got = run(loss, normal(len(labels), 3), weight, torch.tensor(labels, dtype=torch.long))
    for tensor in got:
        assert (tensor == 0).all()
    for name, value in loss.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("bad", [-1, 12, 10**6])
@pytest.mark.parametrize("kind", [Discriminative, Compactness, CentroidMargin, CenterLoss])
def test_an_unchecked_label_out_of_range_is_nan_and_never_reaches_the_state(
    kind: Any, bad: int
) -> None:
    C, D = 12, 3
    sized = kind in (Discriminative, CenterLoss)
    loss = kind(*((C, D) if sized else ()), validate=False).double()
    features, labels = normal(4, D), torch.tensor([0, 1, bad, 1])
    given = (features, labels) if kind is CenterLoss else (features, normal(C, D, seed=5), labels)
    assert torch.isnan(loss(*given))
    untouched = range(2, C)
    for name, value in loss.state_dict().items():
        assert torch.isfinite(value.double()).all(), name
        assert (value[list(untouched)] == 0).all(), name


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 1, 0, 1, 0, 1]])
def test_unreduced_class_terms_have_one_entry_per_class(labels: list[int]) -> None:
    C = 6
    loss = CentroidMargin(reduction="none").double()
    value = loss(normal(len(labels), 3), normal(C, 3, seed=5), torch.tensor(labels))
    assert value.shape == (C,)
    assert (value[2:] == 0).all()


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return out


def test_a_hundred_thousand_classes_are_quick_and_small() -> None:
    D, N = 16, 64
    loss = Discriminative(LARGE, D)
    weight = normal(LARGE, D, seed=1, dtype=torch.float32)
    bias = normal(LARGE, seed=2, dtype=torch.float32)
    features = normal(N, D, dtype=torch.float32)
    labels = torch.randint(LARGE, (N,), generator=torch.Generator().manual_seed(3))
    saved: list[int] = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.numel()) or t, lambda t: t
        ),
    ):
        value = loss(features, weight, labels, bias=bias)
        gradients = torch.autograd.grad(value, (features, weight, bias))
    assert largest.numel <= 5_000_000 < N * LARGE  # and C x C would be 10^10
    assert max(saved) <= weight.numel()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert int(loss.bank.seen.sum()) == len(labels.unique())
    start = time.perf_counter()
    loss(features, weight, labels, bias=bias).backward()
    assert time.perf_counter() - start < 10  # seconds where 0.1 is usual


def brute_force(
    points: Tensor,
    weight: Tensor,
    own: Tensor,
    bias: Tensor,
    margin: float,
    aggregate: str = "max",
) -> Tensor:
    """Every prototype subtracted from every other, in float64."""
    values = []
    for m, c in zip(points.double(), own.tolist(), strict=True):
        normals = weight.double() - weight[c].double()
        length = normals.norm(dim=1)
        s = (normals @ m + bias.double() - bias[c].double()) / length.clamp_min(1e-30)
        s[length <= 1e-12] = 0
        hinge = (margin + s).clamp_min(0)
        hinge[c] = 0
        values.append(hinge.max() if aggregate == "max" else hinge.sum() / (len(weight) - 1))
    return torch.stack(values)


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_rival_among_a_hundred_thousand_is_the_right_one(offset: float) -> None:
    # An offset common to all prototypes changes no boundary but ruins a naive Gram matrix.
    D, K = 16, 20
    weight = (normal(LARGE, D, seed=1) + offset).float().detach()
    bias = normal(LARGE, seed=2).float().detach()
    points = normal(K, D, seed=3).float().detach()
    own = torch.randint(LARGE, (K,), generator=torch.Generator().manual_seed(4))
    got = centroid_margin(points, weight, own, bias=bias, margin=50.0)
    want = brute_force(points, weight, own, bias, 50.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_copies_of_a_prototype_hide_no_rival(aggregate: str) -> None:
    # Equal prototypes with other biases have no boundary (O17): the constant 0, at any C.
    D, K, copies, margin = 16, 20, 10, 50.0
    weight = normal(LARGE, D, seed=1).float().detach()
    bias = 0.01 * normal(LARGE, seed=2).float().detach()
    own = torch.arange(K)
    weight[K : K + copies * K] = weight[:K].repeat(copies, 1)
    bias[K : K + copies * K] = 1.0
    weight.requires_grad_()
    points = normal(K, D, seed=3).float().detach()
    got = centroid_margin(points, weight, own, bias=bias, margin=margin, aggregate=aggregate)
    (gradient,) = torch.autograd.grad(got.sum(), weight)
    want = brute_force(points, weight.detach(), own, bias, margin, aggregate)
    torch.testing.assert_close(got.detach().double(), want, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() < 1e3
