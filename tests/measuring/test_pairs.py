"""Closest and farthest pairs are exact, however the rows lie, on tiles of any size."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from largemargin.geometry import pairs


def rows(kind: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points and groups of very different shape."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    groups = torch.randint(4, (n,), generator=generator)
    if kind == "clusters":
        points = 20 * torch.randn(4, 3, generator=generator, dtype=torch.float64)[groups] + points
    elif kind == "tight clusters":  # distances inside are below the rounding of float32
        points = 1e4 * torch.randn(4, 3, generator=generator, dtype=torch.float64)[groups] + points
        groups = torch.randint(4, (n,), generator=generator)
    elif kind == "antipodes":  # many pairs within rounding of the farthest
        unit = points[: n // 2] / points[: n // 2].norm(dim=1, keepdim=True)
        stretch = 1 + 1e-9 * points[: n // 2, :1]
        points = torch.cat([unit * stretch, -unit, points[: n % 2] / 9])
    elif kind == "six places":  # on three axes, rows of a place one after the other
        place = torch.arange(n) * 6 // n
        ends = torch.cat([torch.eye(3), -torch.eye(3)]).double()
        points = ends[place] * (1 + 1e-9 * points[:, :1])
    elif kind == "grid":  # many equal distances, many rows that coincide
        points = (2 * points).round()
    elif kind == "far":
        points = 1e5 + 1e-3 * points
    elif kind == "nearly equal":
        points = torch.ones(n, 3, dtype=torch.float64) + 1e-9 * points
    elif kind == "float32":
        points = points.float()
    return points, groups


KINDS = (
    "cloud",
    "clusters",
    "tight clusters",
    "antipodes",
    "six places",
    "grid",
    "far",
    "nearly equal",
    "float32",
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(2, 9), st.integers(0, 10**6))
def test_pairs_are_those_of_all_distances(kind: str, n: int, tile: int, seed: int) -> None:
    points, groups = rows(kind, n, seed)
    table = torch.linalg.vector_norm(points.double()[:, None] - points.double(), dim=2)
    other = groups[:, None] != groups
    usual, many = pairs.blocks.__defaults__, pairs.TILE
    pairs.blocks.__defaults__, pairs.TILE = (tile,), tile
    try:
        far = pairs.row_distance(points, pairs.farthest_pair(points))
        near = pairs.closest_pair(points)
        between = pairs.closest_pair(points, groups)
    finally:
        pairs.blocks.__defaults__, pairs.TILE = usual, many
    torch.testing.assert_close(far, table.max(), rtol=1e-12, atol=0)
    assert near is not None
    assert near[0] < near[1]
    apart = table.masked_fill(torch.eye(n, dtype=torch.bool), torch.inf)
    torch.testing.assert_close(pairs.row_distance(points, near), apart.min(), rtol=1e-12, atol=0)
    if not other.any():
        assert between is None
    else:
        assert between is not None
        assert groups[between[0]] != groups[between[1]]
        want = table.masked_fill(~other, torch.inf).min()
        torch.testing.assert_close(pairs.row_distance(points, between), want, rtol=1e-12, atol=0)


def test_groups_far_apart_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    points, groups = rows("clusters", 400, 3)
    counted = []
    real = pairs._Screen.tile
    monkeypatch.setattr(
        pairs._Screen, "tile", lambda *args: counted.append(args[1:3]) or real(*args)
    )
    found = pairs.closest_pair(points + 100 * groups[:, None].double() ** 2, groups)
    assert found is not None
    assert len(counted) < 6  # of six pairs of groups


def test_tiles_follow_groups() -> None:
    sizes = [3, 1, 50, 2, 2, 7, 21]
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    usual = pairs.blocks.__defaults__
    pairs.blocks.__defaults__ = (20,)
    try:
        found = pairs._runs(groups)
    finally:
        pairs.blocks.__defaults__ = usual
    assert [found[0].start, found[-1].stop] == [0, sum(sizes)]
    assert all(a.stop == b.start for a, b in pairwise(found))
    assert max(each.stop - each.start for each in found) <= 20
    assert slice(0, 4) in found
    assert slice(4, 21) in found


def test_many_ties_do_not_take_long() -> None:
    """Two places only: every pair across them is the farthest."""
    points = torch.zeros(3000, 4)
    points[::2] = 1
    i, j = pairs.farthest_pair(points)
    assert (i + j) % 2 == 1
    assert pairs.farthest_pair(torch.ones(3000, 4)) == (0, 0)
    assert pairs.closest_pair(points, torch.arange(3000) % 2) is not None


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_reduced_products_are_not_trusted(precision: str) -> None:
    usual = torch.get_float32_matmul_precision()
    points, groups = rows("float32", 300, 1)
    try:
        torch.set_float32_matmul_precision(precision)
        screen = pairs._Screen(points)
        found = pairs.closest_pair(points, groups)
    finally:
        torch.set_float32_matmul_precision(usual)
    exact = screen.single.dtype == torch.float32
    assert exact == (precision == "highest")
    assert found == pairs.closest_pair(points, groups)


@pytest.mark.parametrize("word", ["none", "ieee", "tf32", "bf16"])
def test_products_reduced_on_one_backend_are_not_trusted(word: str) -> None:
    points, groups = rows("float32", 300, 1)
    want = pairs.closest_pair(points, groups)
    matmul = torch.backends.mkldnn.matmul
    usual, matmul.fp32_precision = matmul.fp32_precision, word
    try:
        exact = pairs._Screen(points).single.dtype == torch.float32
        found = pairs.closest_pair(points, groups)
    finally:
        matmul.fp32_precision = usual
    assert exact == (word in ("none", "ieee"))
    assert found == want


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_tiles_hold_small_groups_together_and_parts_of_large_ones(sizes: list[int]) -> None:
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    usual = pairs.blocks.__defaults__
    pairs.blocks.__defaults__ = (10,)
    try:
        found = pairs._runs(groups)
    finally:
        pairs.blocks.__defaults__ = usual
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])]
    assert found[-1].stop == len(groups)
    limit = min(10, len(groups))
    for each in found:
        inside = set(groups[each].tolist())
        assert 0 < each.stop - each.start <= limit
        if len(inside) > 1:
            assert sum(sizes[group] for group in inside) == each.stop - each.start
