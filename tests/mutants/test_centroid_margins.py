"""Centroid margins of many classes, searched by Gram matrices and in blocks, against all pairs."""

import importlib

import pytest
import torch

from largemargin.losses import CentroidMargin
from largemargin.ops.boundary import signed_boundary_distance

# The function of this name hides the module of this name.
module = importlib.import_module("largemargin.losses.centroid_margin")


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


@pytest.mark.parametrize("with_bias", [True, False])
def test_distances_from_gram_matrices_and_their_gradients(with_bias):
    points, weight, own, bias = many(classes=6, dim=3, count=4)
    weight[2] = weight[own[0]]  # a pair without a boundary
    bias = bias if with_bias else None
    leaves = [x.requires_grad_() for x in (points, weight, bias) if x is not None]
    found = []
    for way in (all_pairs, module._gram_distances, module._all_distances):
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
    module._all_distances(points, weight, own, bias)
    assert not used
    monkeypatch.setattr(module, "EXACT_LIMIT", 6 * 3 * 4 / 16 - 1)
    module._all_distances(points, weight, own, bias)
    assert len(used) == 1


def test_detached_classifiers_get_no_gradient():
    points, weight, _, bias = many(classes=6, dim=3, count=4)
    labels = torch.tensor([0, 1, 1, 5])
    leaves = [x.requires_grad_() for x in (points, weight, bias)]
    for detach in (True, False):
        loss = CentroidMargin(detach_classifier=detach)(points, weight, labels, bias=bias)
        got = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert [grad is None for grad in got] == [False, detach, detach]
