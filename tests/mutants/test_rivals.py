"""The two nearest boundaries of a block of classes, with and without kernels, against all pairs."""

import math
import sys
import types

import pytest
import torch

from largemargin.ops import boundary
from largemargin.ops.boundary import signed_boundary_distance

CLASSES, DIM = 7, 4


class OnDevice(torch.Tensor):
    """Takes itself for a tensor on a GPU."""

    is_cuda = True


def problem(with_bias=True):
    """Three points of every class near its own row, off a common middle."""
    draw = torch.Generator().manual_seed(0)
    weight, noise = (torch.randn(n, DIM, generator=draw) for n in (CLASSES, 3 * CLASSES))
    weight, own = weight + 5, torch.arange(3 * CLASSES) % CLASSES
    bias = torch.randn(CLASSES, generator=draw) if with_bias else None
    points = weight[own] - 5 + 0.3 * noise
    return points.double(), weight.double(), own, None if bias is None else bias.double()


def searched(points, weight, own, bias):
    middle = weight.mean(0)
    own_bias = None if bias is None else bias[own]
    return boundary.for_search(points, weight[own] - middle, own_bias, own, middle)


def all_pairs(points, weight, own, bias, block):
    distance = signed_boundary_distance(points, weight, bias)[torch.arange(len(own)), own]
    distance[torch.arange(len(own)), own] = -torch.inf
    found = distance[:, block].topk(min(2, block.stop - block.start), dim=1)
    return found.values, found.indices + block.start


@pytest.fixture
def kernels(monkeypatch):
    """In place of those for a GPU: whole numbers instead of split ones."""

    def split(x, middle, order, share):
        rows = x if middle is None else x - middle
        sizes = share * rows.square().sum(1)
        return (rows, sizes) if order == "left" else (rows.flip(1), sizes)

    def launch(square, gap, sizes, bias, own_size, own_logit, own, start):
        square, gap = square + sizes + own_size, gap - own_logit
        gap = gap if bias is None else gap + bias
        distance = torch.where(square <= 1e-24, 0, gap / square.sqrt())
        is_own = torch.arange(start, start + gap.shape[1]) == own[:, None]
        found = distance.masked_fill(is_own, -torch.inf).topk(min(2, gap.shape[1]), dim=1)
        return found.values, found.indices + start

    fake = types.SimpleNamespace(
        split=split,
        launch=launch,
        orders=lambda: ("left", "right"),
        product=lambda rows, columns: rows @ columns.flip(1).T,
    )
    monkeypatch.setitem(sys.modules, "largemargin.ops.triton.rival_boundaries", fake)
    monkeypatch.setattr(boundary, "_fused", lambda _: True)


BLOCKS = [slice(0, 7), slice(0, 4), slice(2, 5), slice(4, 7), slice(3, 4), slice(6, 7)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_two_nearest_of_a_block(block, with_bias):
    points, weight, own, bias = problem(with_bias)
    given = searched(points, weight, own, bias)
    assert given.parts is None
    near = None if bias is None else bias[block]
    values, indices = boundary.nearest_two(given, weight[block], near, block.start)
    want, where = all_pairs(points, weight, own, bias, block)
    known = want.isfinite()
    assert torch.allclose(values, want)
    assert torch.equal(indices[known], where[known])
    alone = boundary.nearest_two(searched(points[:1], weight, own[:1], bias), weight, bias, 0)
    assert alone[0].shape == (1, 2)


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_same_by_kernels(kernels, with_bias, split):
    points, weight, own, bias = problem(with_bias)
    given = searched(points, weight, own, bias)
    assert given.parts is not None
    given = given if split else given._replace(parts=None)
    for block in BLOCKS[:4]:
        near = None if bias is None else bias[block]
        values, indices = boundary.nearest_two(given, weight[block], near, block.start)
        want, where = all_pairs(points, weight, own, bias, block)
        assert torch.allclose(values, want)
        assert torch.equal(indices, where)


@pytest.mark.parametrize("count", [boundary.MANY_POINTS - 1, boundary.MANY_POINTS])
def test_on_a_gpu_numbers_are_split_for_many_points(kernels, count):
    points, own = torch.ones(count, DIM), torch.zeros(count, dtype=torch.long)
    mine = torch.ones(count, DIM).as_subclass(OnDevice)
    given = boundary.for_search(points, mine, None, own, torch.zeros(DIM))
    assert (given.parts is not None) == (count == boundary.MANY_POINTS)


def nearest_of(own, other, point):
    """Signed distance to the boundary of two classes, with nothing taken off their rows."""
    weight = torch.tensor([own, other], dtype=torch.float64)
    points = torch.tensor([point], dtype=torch.float64)
    middle, zero = torch.zeros_like(weight[0]), torch.tensor([0])
    given = boundary.for_search(points, weight[:1], None, zero, middle)._replace(parts=None)
    return boundary.nearest_two(given, weight[1:], None, 1)[0].item()


@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_lengths_up_to_their_rounding_error_are_zero(request, by):
    """||w - v||^2 of 16 and of 17 rounding errors, where 8 (||w||^2 + ||v||^2) are 16."""
    if by == "kernels":
        request.getfixturevalue("kernels")
    for errors, side in ((16, False), (17, True)):
        other = [1 - errors * 2.0**-53, (errors * 2.0**-52) ** 0.5]
        found = nearest_of([1.0, 0.0], other, [0.0, 1.0])
        assert (found > 0.1) == side
        assert found > 0.1 or found == 0


def test_short_differences_are_zero():
    """||w - v||^2 of just the limit, 1e-24, of less and of more."""
    share = 1 - 8 * 2.0**-52
    own = 35e-14
    other = math.sqrt((1e-12**2 - share * own**2) / share)
    assert share * other**2 + share * own**2 == 1e-12**2
    assert nearest_of([own, 0.0], [0.0, other], [0.0, 1.0]) == 0
    assert nearest_of([0.0, 0.0], [0.0, 1e-13], [0.0, 1.0]) == 0
    assert nearest_of([0.0, 0.0], [0.0, 1.1e-12], [0.0, 1.0]) == pytest.approx(1)


class Block:
    """So many rows on a GPU."""

    dtype, device = torch.float32, types.SimpleNamespace(type="cuda")

    def __len__(self):
        return 2


def test_where_kernels_are_launched(monkeypatch):
    found = object()
    monkeypatch.setattr(boundary.importlib.util, "find_spec", lambda _: found)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    two = torch.ones(2, DIM)
    assert boundary._fused(Block())
    assert not boundary._fused(two)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert boundary._fused(two)
    assert not boundary._fused(two[:1])
    assert not boundary._fused(two.double())
    with monkeypatch.context() as compiling:
        compiling.setattr(boundary, "plain_eager", lambda: False)
        assert not boundary._fused(two)
    found = None
    assert not boundary._fused(two)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not boundary._fused(Block())
