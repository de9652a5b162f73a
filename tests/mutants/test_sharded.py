"""Statistics of parts of the classes: on ranks that are threads, and of samples of the classes."""

import sys
import types

import pytest
import torch
from mutants.threads import Ranks

from largemargin.errors import LargeMarginError
from largemargin.ops import class_stats, sharded
from largemargin.ops.shards import ClassSample, Shard, _Whole, class_range, once, times_gradient

NAMES = ("target", "rival", "rest", "spread", "mean")
SIZES = (2, 0, 3, 1)
CLASSES, DIM = 5, 3
"""Of four ranks: 2, 2, 1 and no classes."""
LABELS = torch.tensor([0, 4, 2, 1, 3, 2])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_ranks(monkeypatch, features, weight, bias, scale, want):
    """Statistics of each rank, and gradients of features, weight, bias and scale."""
    ranks = Ranks(len(SIZES), monkeypatch)

    def shard_of(prototypes, own_bias):
        _, first = class_range(CLASSES, len(SIZES), ranks.get_rank())
        return Shard(prototypes, own_bias, first, CLASSES, "all", None)

    monkeypatch.setattr(sharded, "shard_of", shard_of)
    factors = draw(len(NAMES), sum(SIZES), seed=9)

    def task(rank):
        count, first = class_range(CLASSES, len(SIZES), rank)
        part, mine = slice(first, first + count), slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        leaves = [x.detach().clone().requires_grad_() for x in (features[mine], weight[part])]
        leaves += [] if bias is None else [bias[part].detach().clone().requires_grad_()]
        own_scale = scale
        if isinstance(scale, torch.Tensor):
            own_scale = scale.detach().clone().requires_grad_()
            leaves.append(own_scale)
        found = sharded.sharded_stats(
            class_stats,
            *leaves[:2],
            LABELS[mine],
            bias=None if bias is None else leaves[2],
            similarity="dot",
            scale=own_scale,
            want=want,
            precision=None,
            impl="dense",
        )
        assert found.keys() == {*want, *(("rival_index",) if "rival" in want else ())}
        value = sum((factors[NAMES.index(name), mine] * found[name]).sum() for name in want)
        return found, torch.autograd.grad(value, leaves)

    found = ranks.run(task)
    leaves = [x.detach().clone().requires_grad_() for x in (features, weight)]
    leaves += [] if bias is None else [bias.detach().clone().requires_grad_()]
    if isinstance(scale, torch.Tensor):
        scale = scale.detach().clone().requires_grad_()
        leaves.append(scale)
    how = {"bias": None if bias is None else leaves[2], "scale": scale, "impl": "dense"}
    whole = class_stats(*leaves[:2], LABELS, want=want, **how)._asdict()
    value = sum((factors[NAMES.index(name)] * whole[name]).sum() for name in want)
    return found, whole, torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("want", [NAMES, *((name,) for name in NAMES), ("rest", "mean")], ids=str)
@pytest.mark.parametrize("extras", [True, False], ids=["bias and scale", "neither"])
def test_ranks_have_the_statistics_of_one_process(monkeypatch, want, extras):
    """Gradients of features are whole, those of class vectors and numbers those of the mean."""
    features, weight = draw(sum(SIZES), DIM), draw(CLASSES, DIM, seed=1)
    bias = draw(CLASSES, seed=2) if extras else None
    scale = torch.tensor(1.5, dtype=torch.float64) if extras else 1.0
    found, whole, gradients = on_ranks(monkeypatch, features, weight, bias, scale, want)
    for name in found[0][0]:
        assert torch.allclose(torch.cat([stats[name] for stats, _ in found]), whole[name])
    parts = list(zip(*(made for _, made in found), strict=True))
    shares = [1, 1 / len(SIZES), 1 / len(SIZES)]
    for got, want_gradient, share in zip(parts[:3], gradients[:3], shares, strict=False):
        assert torch.allclose(torch.cat(got), share * want_gradient)
    if extras:
        assert torch.allclose(torch.stack(parts[3]).sum(), gradients[3])


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (1, 1, 2, 2, 1), (1, 1, 1, 2, 2), (2, 2, 1, 1, 1), (2, 1, 2, 1, 2)]
)
def test_of_equal_rivals_on_several_ranks_the_first_counts(monkeypatch, sizes):
    """Within a part before and after the own class, and between parts."""
    weight = torch.tensor(sizes, dtype=torch.float64)[:, None].expand(CLASSES, DIM)
    features = torch.ones(sum(SIZES), DIM, dtype=torch.float64)
    found, whole, gradients = on_ranks(monkeypatch, features, weight, None, 1.0, ("rival", "mean"))
    index = torch.cat([stats["rival_index"] for stats, _ in found])
    assert index.tolist() == whole["rival_index"].tolist()
    got = torch.cat([made[1] for _, made in found])
    assert torch.allclose(got, gradients[1] / len(SIZES))


def test_features_of_one_number_and_infinite_ones_of_other_samples(monkeypatch):
    """A rank without classes takes nothing from the features, not even the infinity of another."""
    features, weight = draw(sum(SIZES), 1), draw(CLASSES, 1, seed=1)
    features[3] = torch.inf
    found, whole, _ = on_ranks(monkeypatch, features, weight, None, 1.0, NAMES)
    finite = torch.arange(sum(SIZES)) != 3
    for name in NAMES:
        got = torch.cat([stats[name] for stats, _ in found])
        assert torch.allclose(got[finite], whole[name][finite])


def test_a_rival_that_is_no_number_is_not_hidden_by_those_of_other_ranks(monkeypatch):
    features, weight = draw(sum(SIZES), DIM), draw(CLASSES, DIM, seed=1)
    features[0] = torch.nan
    weight[4] = torch.nan
    found, _, _ = on_ranks(monkeypatch, features, weight, None, 1.0, NAMES)
    for name in NAMES[1:]:
        values = torch.cat([stats[name] for stats, _ in found])
        assert values.isnan().tolist() == (LABELS != 4).tolist()


def test_where_no_rival_is_a_number_the_index_is_one_that_exists():
    features = torch.full((1, DIM), torch.nan)
    weight = sampled(draw(CLASSES, DIM).float())
    assert class_stats(features, weight, torch.tensor([2])).rival_index.tolist() == [0]


@pytest.mark.parametrize("grad", [True, False])
def test_ranks_wait_for_those_whose_features_need_no_gradient(monkeypatch, grad):
    """An empty batch, say: the others need what its classes ask of their features."""
    ranks = Ranks(2, monkeypatch)
    weight, labels = draw(4, DIM, seed=1), torch.tensor([3, 0])
    monkeypatch.setattr(
        sharded,
        "shard_of",
        lambda columns, _: Shard(columns, None, 2 * ranks.get_rank(), 4, "all", None),
    )

    def task(rank):
        features = draw(2, DIM)[: 0 if rank else 2].requires_grad_(rank == 0)
        columns = weight[2 * rank :][:2].clone().requires_grad_()
        how = {"bias": None, "similarity": "dot", "scale": 1.0, "precision": None}
        with torch.set_grad_enabled(grad):
            given = features, columns, labels[: len(features)]
            rest = sharded.sharded_stats(class_stats, *given, want=("rest",), **how)["rest"]
        if not grad:
            assert not rest.requires_grad
            return rest, None
        rest.sum().backward()
        assert (features.grad is None) == (rank == 1)
        return rest, columns.grad

    found = ranks.run(task)
    leaf = weight.clone().requires_grad_()
    want = class_stats(draw(2, DIM), leaf, labels, want=("rest",)).rest
    assert torch.allclose(found[0][0], want)
    assert found[1][0].shape == (0,)
    if grad:
        (slope,) = torch.autograd.grad(want.sum(), leaf)
        assert torch.allclose(torch.cat([made for _, made in found]), slope / 2)


def test_second_derivatives_are_refused():
    features, labels = draw(4, DIM, seed=1).requires_grad_(), torch.tensor([0, 1, 2, 3])
    rest = class_stats(features, sampled(draw(CLASSES, DIM)), labels, want=("rest",)).rest
    (slope,) = torch.autograd.grad(rest.square().sum(), features, create_graph=True)
    with pytest.raises(LargeMarginError, match="once only"):
        torch.autograd.grad(slope.sum(), features)


def test_second_derivatives_by_class_vectors_alone_are_refused():
    """Of a sum of statistics, too: what it sends back is a constant, what follows is none."""
    weight, labels = draw(CLASSES, DIM).requires_grad_(), torch.tensor([0, 1, 2, 3])
    rest = class_stats(draw(4, DIM, seed=1), sampled(weight), labels, want=("rest",)).rest
    (slope,) = torch.autograd.grad(rest.sum(), weight, create_graph=True)
    with pytest.raises(LargeMarginError, match="once only"):
        torch.autograd.grad(slope.square().sum(), weight)


def test_second_derivatives_by_what_a_loss_adds_are_refused():
    weight, factor = draw(CLASSES, DIM).requires_grad_(), draw(4).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3])
    rest = class_stats(draw(4, DIM, seed=1), sampled(weight), labels, want=("rest",)).rest
    (slope,) = torch.autograd.grad((factor * rest).sum(), weight, create_graph=True)
    with pytest.raises(LargeMarginError, match="once only"):
        torch.autograd.grad(slope.square().sum(), factor)


def sampled(weight, rate=1.0, seed=0, number=0):
    marked = weight.view_as(weight)
    marked.class_sample = ClassSample(rate, seed, number)
    return marked


def test_labels_that_do_not_exist_have_no_statistics():
    labels = torch.tensor([-1, CLASSES, 0, 2])
    weight = sampled(draw(CLASSES, DIM))
    stats = class_stats(draw(4, DIM, seed=1), weight, labels, validate=False)
    for values in (stats.target, stats.rival, stats.rest, stats.spread, stats.mean):
        assert values.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("seed", "number", "want"),
    [
        (0, 0, [174722574, 1091358107, 1881230297, 1084043932, 136721436]),
        (13, 0, [1847333960, 1450379161, 146124523, 1868065603, 1994902072]),
        (12345, 678, [579547432, 1489221240, 661797835, 943073484, 419883545]),
        (2**60, 3, [1624649221, 607469241, 1236035740, 563777075, 709375289]),
    ],
)
def test_the_numbers_of_classes_are_the_same_ones_for_ever(seed, number, want):
    """A run that is resumed with another release draws the classes it would have drawn."""
    index = torch.tensor([0, 1, 2, 1000, 2**31 + 5])
    found = sharded._uniform(index, ClassSample(0.3, seed, number)) * 2**31
    assert found.tolist() == want


def test_a_class_is_drawn_below_the_rate():
    none = torch.tensor([], dtype=torch.long)
    score = sharded._uniform(torch.arange(50), ClassSample(0.0, 3, 4))
    third = score.sort().values[2].item()
    for rate, count in ((third, 2), (third + 1e-9, 3)):
        found = sharded.sampled_classes(ClassSample(rate, 3, 4), 0, 50, none)
        assert len(found) == count
        assert set(score.sort().indices[:count].tolist()) == set(found.tolist())


def test_results_are_marked_where_somebody_may_differentiate_them():
    result, constant = torch.ones(2), torch.ones(2)
    wanted = torch.ones(2, requires_grad=True)
    assert once(result, constant) is result
    assert once(result, constant, wanted) is not result
    with torch.no_grad():
        assert once(result, wanted) is result
    marked = once(result, wanted)
    with pytest.raises(LargeMarginError, match="once only"):
        marked.sum().backward()


def test_gradients_are_only_multiplied_by_other_numbers_than_one():
    x = torch.ones(2, requires_grad=True)
    assert times_gradient(x, 1) is x
    twice = times_gradient(x, 2)
    assert torch.equal(twice, x)
    assert torch.autograd.grad(twice.sum(), x)[0].tolist() == [2, 2]


def test_gradients_of_whole_weights_are_averaged_over_the_processes(monkeypatch):
    class DTensor:
        @staticmethod
        def from_local(mine, mesh, placements, run_check):
            assert placements == ["partial", "partial"]
            assert not run_check  # it would communicate
            return types.SimpleNamespace(redistribute=lambda placements: (mine, placements))

    fake = types.SimpleNamespace(DTensor=DTensor, Partial=lambda: "partial")
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", fake)
    mesh = types.SimpleNamespace(size=lambda: 4, ndim=2)
    made, placements = _Whole.backward(
        types.SimpleNamespace(mesh=mesh, placements=["by class"]), torch.tensor([2.0, 8.0])
    )
    assert made.tolist() == [0.5, 2]
    assert placements == ["by class"]
