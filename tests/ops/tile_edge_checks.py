"""Corners of the tiled statistics: labels, norms, ties, layouts (test_tiles_interpreted.py)."""

import dataclasses
from typing import Any

import pytest
import torch
from ops.tile_problems import STATISTICS, Problem, check_budget, made, outcome
from torch import Tensor

from largemargin import class_stats
from largemargin.ops.triton.op import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")

SLOW = pytest.mark.slow
PRECISIONS = ("bf16", pytest.param("highest", marks=SLOW))


def tiled(*args: Any, **options: Any) -> Any:
    return class_stats(*args, impl="triton", **options)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value), name


@pytest.mark.parametrize(
    "bad", [-1, 9, 2**32 + 3, *(pytest.param(x, marks=SLOW) for x in (-100, 10**6, -(2**40)))]
)
def test_a_label_out_of_range_is_nan_in_its_row_alone(bad: int) -> None:
    problem = made(5, 9, 3)
    problem.labels[2] = bad
    stats = tiled(problem.features, problem.prototypes, problem.labels, validate=False)
    good = torch.arange(5) != 2
    whole = tiled(problem.features[good], problem.prototypes, problem.labels[good])
    for name in STATISTICS:
        value = getattr(stats, name)
        assert value[2].isnan(), name
        assert torch.equal(value[good], getattr(whole, name)), name
    assert 0 <= int(stats.rival_index[2]) < 9


def test_a_row_that_is_dropped_afterwards_leaves_no_gradient() -> None:
    """NaN for the row, and a mask over the values."""
    problem = made(5, 9, 3)
    problem.labels[2] = -100
    gradients = []
    for rows in (torch.arange(5), torch.tensor([0, 1, 3, 4])):
        features = problem.features[rows].requires_grad_()
        prototypes = problem.prototypes.clone().requires_grad_()
        labels = problem.labels[rows]
        stats = tiled(features, prototypes, labels, similarity="cosine", validate=False)
        value = torch.where(labels >= 0, stats.rest - 2 * stats.target, 0).sum()
        gradients.append(torch.autograd.grad(value, (features, prototypes)))
    assert not gradients[0][0][2].any()
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("similarity", ["cosine", "cosine_prototypes"])
@pytest.mark.parametrize("size", [0.0, *(pytest.param(x, marks=SLOW) for x in (1e-20, 1e-13))])
def test_short_prototypes_have_no_gradient(similarity: str, size: float) -> None:
    problem = made(6, 9, 4)
    problem.prototypes[2] *= size
    problem.labels[0] = 2
    got = check_budget(problem, similarity=similarity)
    assert not got["d prototypes"][2].any()
    assert got["d prototypes"][3].any()


@pytest.mark.parametrize("size", [1e30, *(pytest.param(x, marks=SLOW) for x in (1e-10, 1e15))])
def test_prototypes_of_any_length(size: float) -> None:
    problem = made(6, 9, 4)
    expected = outcome(problem, impl="triton", similarity="cosine")
    problem.prototypes[2] *= size
    got = outcome(problem, impl="triton", similarity="cosine")
    got["d prototypes"][2] *= size
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sign", [1, -1], ids=["aligned", "opposite"])
def test_features_on_and_opposite_their_prototypes(sign: int, precision: str) -> None:
    problem = made(7, 40, 6, scale=64.0, bias=False)
    aligned = sign * 3 * problem.prototypes[problem.labels]
    problem = dataclasses.replace(problem, features=aligned)
    got = check_budget(problem, precision=precision, similarity="cosine")
    near = torch.full((7,), 64.0 * sign)
    torch.testing.assert_close(
        got["target"], near, rtol=1e-2 if precision == "bf16" else 1e-6, atol=0
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_large_logits(similarity: str, precision: str) -> None:
    problem = made(5, 40, 6, bias=False)
    features, prototypes = 100 * problem.features, 100 * problem.prototypes
    problem = dataclasses.replace(problem, features=features, prototypes=prototypes)
    got = check_budget(problem, precision=precision, similarity=similarity)
    assert got["rest"].abs().max() > 1e4
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_biases_beyond_the_exponential(shift: float, precision: str) -> None:
    """Samples and classes that only fill a tile up must not overflow into the others' sums."""
    problem = made(5, 9, 3)
    assert problem.bias is not None
    problem = dataclasses.replace(problem, bias=problem.bias + shift)
    check_budget(problem, precision=precision, similarity="cosine")


def test_equal_rivals_give_the_first_class() -> None:
    """Within a tile, across tiles and across the groups that go through them."""
    prototypes = torch.zeros(100, 4)
    prototypes[:, 1] = -1.0
    for tied in ([3, 40, 70], [70, 99], [5, 6]):
        weight = prototypes.clone()
        weight[tied] = torch.tensor([2.0, 0.0, 0.0, 0.0])
        features = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2, requires_grad=True)
        labels = torch.tensor([0, tied[0]])
        for times in (1, 10) if tied[0] == 3 else (1,):  # three groups of tiles, and one
            stats = tiled(features.repeat(times, 1), weight, labels.repeat(times))
            assert stats.rival_index.tolist() == tied[:2] * times
    leaf = weight.requires_grad_()
    tiled(features, leaf, torch.tensor([0, 0]), want=("rival",)).rival.sum().backward()
    assert leaf.grad.any(1).nonzero().flatten().tolist() == [5]


def test_all_logits_equal() -> None:
    features, labels = torch.ones(3, 4), torch.tensor([0, 1, 34])
    got = tiled(features, torch.ones(35, 4), labels)
    assert got.rival_index.tolist() == [1, 0, 0]
    for name in ("target", "rival", "spread", "mean"):
        torch.testing.assert_close(getattr(got, name), torch.full((3,), 4.0))
    torch.testing.assert_close(got.rest, 4.0 + torch.full((3,), 34.0).log())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_classes_of_bias_minus_infinity_are_not_there(precision: str) -> None:
    """A whole tile of them and some of the next; spread and mean have no number then."""
    problem, want = made(4, 70, 3), ("target", "rival", "rest")
    assert problem.bias is not None
    hidden = torch.arange(70).lt(35) | torch.arange(70).eq(50)
    problem.bias[hidden] = -torch.inf
    problem.labels[:] = torch.tensor([36, 69, 40, 51])
    how: dict[str, Any] = {"impl": "triton", "precision": precision, "similarity": "cosine"}
    got = outcome(problem, want, **how)
    fewer = Problem(
        problem.features,
        problem.prototypes[~hidden],
        torch.searchsorted((~hidden).nonzero().flatten(), problem.labels),
        problem.bias[~hidden],
        problem.scale,
    )
    expected = outcome(fewer, want, **how)
    for name in (*want, "d features"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        got["d prototypes"][~hidden], expected["d prototypes"], rtol=1e-4, atol=1e-4
    )
    assert not got["d prototypes"][hidden].any()
    assert not got["d bias"][hidden].any()


@pytest.mark.parametrize("where", ["features", "prototypes"])
def test_nan_is_not_hidden(where: str) -> None:
    problem = made(4, 40, 3, bias=False)
    problem.labels[:] = 7
    getattr(problem, where)[1, 1] = torch.nan
    stats = tiled(problem.features, problem.prototypes, problem.labels)
    broken = torch.arange(4) == 1 if where == "features" else torch.full((4,), True)
    for name in ("rival", "rest", "spread", "mean"):
        assert torch.equal(getattr(stats, name).isnan(), broken), name
    assert torch.equal(stats.target.isnan(), broken & (where == "features"))
    assert bool(((stats.rival_index >= 0) & (stats.rival_index < 40)).all())


def laid_out_otherwise(x: Tensor, how: str) -> Tensor:
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "every second":
        return torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]
    if how == "wide rows":
        filler = x.new_full((len(x), 3), torch.nan)
        return torch.cat([filler, x, filler], 1)[:, 3:-3]
    flat = torch.cat([x.new_full((1,), torch.nan), x.flatten()])
    return flat[1:].view_as(x)


@pytest.mark.parametrize(
    "how",
    [
        "transposed",
        "off by one",
        *(pytest.param(x, marks=SLOW) for x in ("every second", "wide rows")),
    ],
)
@pytest.mark.parametrize("which", ["features", "prototypes"])
@pytest.mark.parametrize("dim", [8, pytest.param(3, marks=SLOW)])
def test_layout_does_not_matter(which: str, how: str, dim: int) -> None:
    problem = made(5, 9, dim, scale=1.0)
    options: dict[str, Any] = {"impl": "triton", "scale": 1.0, "needs": ("features", "prototypes")}
    expected = outcome(problem, **options)
    changed = laid_out_otherwise(getattr(problem, which), how)
    assert not changed.is_contiguous() or how == "off by one"
    got = outcome(dataclasses.replace(problem, **{which: changed}), **options)
    assert_same(got, expected)


@pytest.mark.parametrize(
    "kind", ["every second", *(pytest.param(x, marks=SLOW) for x in ("expanded", "int32", "uint8"))]
)
def test_layout_of_labels(kind: str) -> None:
    problem = made(6, 9, 3)
    labels = problem.labels if kind != "expanded" else problem.labels[:1].repeat(6)
    expected = outcome(dataclasses.replace(problem, labels=labels), impl="triton")
    changed = {
        "every second": lambda: torch.stack([labels, labels + 1], 1)[:, 0],
        "expanded": lambda: problem.labels[:1].expand(6),
        "int32": lambda: labels.int(),
        "uint8": lambda: labels.to(torch.uint8),
    }[kind]()
    assert_same(outcome(dataclasses.replace(problem, labels=changed), impl="triton"), expected)


def test_layout_of_biases() -> None:
    problem = made(6, 9, 3)
    assert problem.bias is not None
    for bias in (torch.stack([problem.bias] * 2, 1)[:, 1], problem.bias[:1].expand(9)):
        expected = outcome(dataclasses.replace(problem, bias=bias.clone()), impl="triton")
        assert_same(outcome(dataclasses.replace(problem, bias=bias), impl="triton"), expected)


def test_expanded_prototypes() -> None:
    problem = made(5, 9, 8, bias=False)
    one = problem.prototypes[:1]
    expected = outcome(dataclasses.replace(problem, prototypes=one.repeat(9, 1)), impl="triton")
    got = outcome(dataclasses.replace(problem, prototypes=one.expand(9, -1)), impl="triton")
    assert_same(got, expected)
