"""Centroid margins of many classes, searched by Gram matrices and in blocks, against all pairs."""

import importlib

import pytest
import torch

from largemargin import functional
from largemargin.losses import CentroidMargin
from largemargin.ops.boundary import signed_boundary_distance

module = importlib.import_module("largemargin.ops.boundary")


def many(classes=600, dim=5, count=7):
    draw = torch.Generator().manual_seed(classes)
    weight, points = (
        torch.randn(n, dim, generator=draw, dtype=torch.float64) for n in (classes, count)
    )
    own = torch.randint(classes, (count,), generator=draw)
    bias = torch.randn(classes, generator=draw, dtype=torch.float64)
    return points, weight, own, bias


def all_pairs(points, weight, own, bias):
    distance = signed_boundary_distance(points, weight, bias)
    return distance[torch.arange(len(own)), own]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("block", [1, 2**22])
def test_the_nearest_rival_among_many(monkeypatch, block, with_bias):
    points, weight, own, bias = many()
    bias = bias if with_bias else None
    want = all_pairs(points, weight, own, bias)
    want[torch.arange(len(own)), own] = -torch.inf
    monkeypatch.setattr(module, "BLOCK", block)
    for limit in (0, module.EXACT_LIMIT):
        monkeypatch.setattr(module, "EXACT_LIMIT", limit)
        rival = module.nearest_rival(points, weight, own, bias)
        assert rival.tolist() == want.argmax(1).tolist()


def test_the_search_takes_blocks_of_a_bounded_size(monkeypatch):
    points, weight, own, bias = many()
    sizes = []
    unwatched = module.nearest_two

    def watched(given, block, *rest):
        sizes.append(len(block))
        return unwatched(given, block, *rest)

    monkeypatch.setattr(module, "nearest_two", watched)
    monkeypatch.setattr(module, "EXACT_LIMIT", 0)
    monkeypatch.setattr(module, "BLOCK", 7 * 300)
    module.nearest_rival(points, weight, own, bias)
    assert sizes == [300, 300]
    sizes.clear()
    monkeypatch.setattr(module, "BLOCK", 1)
    module.nearest_rival(points, weight, own, bias)
    assert sizes == [256, 256, 88]


@pytest.mark.parametrize(
    ("samples", "device", "dim", "size"),
    [
        (0, "cpu", 8, 2**22),
        (1, "cpu", 8, 2**22),
        (2**15, "cpu", 8, 256),
        (0, "meta", 1, 2**23),
        (1, "meta", 2, 2**22),
        (4, "meta", 1, 2**22),
        (3, "meta", 1, 2**24 // 3),
        (2**20, "meta", 8, 256),
        (1, "meta", 2**20, 256),
    ],
)
def test_sizes_of_blocks(samples, device, dim, size):
    """At least 256; so many similarities, and on a GPU so many numbers of the prototypes."""
    assert module._block_size(samples, torch.empty(1, dim, device=device)) == size


def test_of_two_classes_one_is_the_rival(monkeypatch):
    points, weight, _, bias = many(classes=2)
    own = torch.tensor([0, 1, 0, 1, 1, 0, 0])
    for limit in (0, module.EXACT_LIMIT):
        monkeypatch.setattr(module, "EXACT_LIMIT", limit)
        assert module.nearest_rival(points, weight, own, bias).tolist() == (1 - own).tolist()


@pytest.mark.parametrize("with_bias", [True, False])
def test_distances_from_gram_matrices_and_their_gradients(with_bias):
    points, weight, own, bias = many(classes=6, dim=3, count=4)
    weight[2] = weight[own[0]]  # a pair without a boundary
    bias = bias if with_bias else None
    leaves = [x.requires_grad_() for x in (points, weight, bias) if x is not None]
    found = []
    for way in (all_pairs, module._gram_distances, module.all_distances):
        values = way(points, weight, own, bias)
        factor = torch.arange(values.numel(), dtype=torch.float64).view_as(values)
        found.append((values.detach(), *torch.autograd.grad((values * factor).sum(), leaves)))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


def test_squared_lengths_below_their_rounding_error_are_zero():
    sizes = torch.tensor([4.0, 0.0], dtype=torch.float64)
    noise = module._noise(sizes)
    assert noise.tolist() == pytest.approx([32 * 2.0**-52, 1e-24], rel=1e-12, abs=0)


def test_large_means_over_rivals_go_by_gram_matrices(monkeypatch):
    points, weight, own, bias = many(classes=6, dim=3, count=4)
    used = []
    monkeypatch.setattr(module, "_gram_distances", lambda *given: used.append(given))
    monkeypatch.setattr(module, "EXACT_LIMIT", 6 * 3 * 4 / 16)
    module.all_distances(points, weight, own, bias)
    assert not used
    monkeypatch.setattr(module, "EXACT_LIMIT", (6 * 3 * 4 - 1) / 16)
    module.all_distances(points, weight, own, bias)
    assert len(used) == 1


def test_few_pairs_are_searched_without_gram_matrices(monkeypatch):
    points, weight, own, bias = many(classes=6, dim=3, count=4)
    searched = []
    unwatched = module.nearest_two
    monkeypatch.setattr(
        module, "nearest_two", lambda *given: searched.append(given) or unwatched(*given)
    )
    for limit, times in ((6 * 3 * 4, 0), (6 * 3 * 4 - 1, 1)):
        monkeypatch.setattr(module, "EXACT_LIMIT", limit)
        module.nearest_rival(points, weight, own, bias)
        assert len(searched) == times


def test_the_own_class_is_at_distance_zero_and_not_at_a_rounding_error():
    points, weight, own, bias = many(classes=6, dim=64, count=8)
    found = module._gram_distances(1e6 * points, weight, own, bias)
    assert found.gather(1, own[:, None]).unique().tolist() == [0]


def test_prototypes_as_far_apart_as_their_rounding_error_have_no_boundary():
    """||w - v||^2 = 2^-48 = 8 eps (||w||^2 + ||v||^2), without rounding."""
    weight = torch.tensor([[1, 0], [1 - 2**-49, 2**-24]], dtype=torch.float64)
    points = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    apart = module._gram_distances(points, weight, torch.tensor([0]), None)
    assert apart.tolist() == [[0, 0]]
    weight[1, 1] *= 2
    assert module._gram_distances(points, weight, torch.tensor([0]), None)[0, 1] > 0.9


def test_products_keep_their_digits_where_others_are_rounded(monkeypatch):
    points, weight, own, bias = many(classes=6, dim=3, count=4)
    monkeypatch.setattr(module, "EXACT_LIMIT", 0)
    want = functional.centroid_margin(points, weight, own, bias=bias, aggregate="mean")
    short = [x.float() for x in (points, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        found = functional.centroid_margin(*short[:2], own, bias=short[2], aggregate="mean")
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(want.tolist(), rel=1e-5)


def test_of_two_candidates_the_exactly_nearer_one_is_taken(monkeypatch):
    """Whichever of them the search held for the nearer one; two, of however many blocks."""
    points, weight, own, bias = many(count=1)
    compared = []
    search, distances = module.nearest_two, module.pair_distance
    monkeypatch.setattr(module, "nearest_two", lambda *given: [x.flip(1) for x in search(*given)])
    monkeypatch.setattr(
        module, "pair_distance", lambda *given: compared.append(given[3]) or distances(*given)
    )
    monkeypatch.setattr(module, "EXACT_LIMIT", 0)
    want = all_pairs(points, weight, own, bias)
    want[0, own] = -torch.inf
    for block in (2**22, 1):
        monkeypatch.setattr(module, "BLOCK", block)
        assert module.nearest_rival(points, weight, own, bias).item() == want.argmax()
    assert [candidates.shape for candidates in compared] == [(1, 2), (1, 2)]


def test_detached_classifiers_get_no_gradient():
    points, weight, _, bias = many(classes=6, dim=3, count=4)
    labels = torch.tensor([0, 1, 1, 5])
    leaves = [x.requires_grad_() for x in (points, weight, bias)]
    for detach in (True, False):
        loss = CentroidMargin(detach_classifier=detach)(points, weight, labels, bias=bias)
        got = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert [grad is None for grad in got] == [False, detach, detach]
