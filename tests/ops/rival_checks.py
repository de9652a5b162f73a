"""Kernels of the search for rival boundaries, on few numbers (test_tiles_interpreted.py)."""

import pytest
import torch
from torch.testing import assert_close

from largemargin.ops.boundary import for_search, nearest_two
from largemargin.ops.triton import rival_boundaries
from largemargin.ops.triton.op import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("order", ["EXACT", "SHORT"])
def test_products_of_split_numbers(order):
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(5, 11, generator=generator), torch.randn(7, 11, generator=generator)
    middle = columns.mean(0)
    left, right = getattr(rival_boundaries, order)
    parts = rival_boundaries.split(rows, None, left, 1.0)[0]
    others, sizes = rival_boundaries.split(columns, middle, right, 0.5)
    centred = columns.double() - middle.double()
    bound = 1e-6 if order == "EXACT" else 2e-3
    assert_close(
        rival_boundaries.product(parts, others).double(), rows.double() @ centred.T,
        rtol=0, atol=bound,
    )  # fmt: skip
    assert_close(sizes.double(), 0.5 * centred.square().sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_nearest_two_boundaries(with_bias):
    generator = torch.Generator().manual_seed(1)
    weight, points = torch.randn(9, 6, generator=generator), torch.randn(4, 6, generator=generator)
    bias = torch.randn(9, generator=generator) if with_bias else None
    own = torch.tensor([0, 3, 8, 3])

    def search(wide):
        as_wide = [None if x is None else x.to(wide) for x in (points, weight, bias)]
        x, w, b = as_wide
        middle = w.mean(0)
        given = for_search(x, w[own] - middle, None if b is None else b[own], own, middle)
        assert (given.parts is None) == (wide == torch.float64)
        return nearest_two(given, w[2:], None if b is None else b[2:], 2)

    (values, classes), (exact, expected) = search(torch.float32), search(torch.float64)
    assert torch.equal(classes, expected)
    assert_close(values.double(), exact, rtol=1e-5, atol=1e-5)
