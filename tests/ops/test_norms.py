"""Norms of rows: the ways that ordinary sizes never take, each against float64."""

import pytest
import torch

from largemargin.ops import norms

SIZES = [1.0, 1e-16, 1e16, 1e-25, 1e30, 3e38, 1e-38]


def matrix(count, width, dtype=torch.float32):
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, width, generator=draw, dtype=dtype)


def exact(x, dim=-1, keepdim=False):
    return torch.linalg.vector_norm(x.double(), dim=dim, keepdim=keepdim)


def close(got, want, tolerance=1e-6):
    assert got.shape == want.shape
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=0), (got, want)


def test_half_precision_alone_is_promoted():
    for dtype in (torch.float16, torch.bfloat16):
        assert norms.promote(torch.ones(2, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        assert norms.promote(torch.ones(2, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("norm", [norms._norm, lambda x, dim, keep: norms._scaled_norm(x, dim)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_norms_along_both_dimensions(norm, dim):
    x = matrix(4, 3)
    for keep in (True, False) if norm is norms._norm else (True,):
        close(norm(x, dim, keep), exact(x, dim, keep))
        close(norm(x.double(), dim, keep), exact(x.double(), dim, keep), 1e-14)


@pytest.mark.parametrize("size", SIZES)
def test_norms_of_extreme_rows_among_ordinary_ones(size):
    x = matrix(3, 4) / 4
    x[1] = x[1] / exact(x[1]).float() * size * 0.9
    close(norms._norm(x, -1, False), exact(x))
    close(norms._norm(x, -1, True), exact(x, keepdim=True))
    close(norms._scaled_norm(x, -1), exact(x, keepdim=True))


def test_squares_are_only_trusted_inside_their_range():
    low, high = norms.SQUARABLE
    # The smallest part must still have a square, 1e-38 being the smallest ordinary number.
    assert 1e-31 <= low**2 <= 1e-29
    assert 1e29 <= high**2 <= 1e31


def test_rows_per_block(monkeypatch):
    monkeypatch.setattr(norms, "BLOCK_NUMBERS", 6)
    assert norms._rows_per_block(torch.ones(5, 3)) == 2
    assert norms._rows_per_block(torch.ones(2, 3)) is None
    assert norms._rows_per_block(torch.ones(7, 1)) == 6
    assert norms._rows_per_block(torch.ones(2, 100)) == 1
    assert norms._rows_per_block(torch.ones(1, 100)) is None
    assert norms._rows_per_block(torch.ones(2, 2, 3)) is None


def test_blocks_give_what_the_whole_gives(monkeypatch):
    a, b = matrix(7, 3), matrix(7, 3).flip(0)
    whole = (a * b).sum(1, keepdim=True)
    monkeypatch.setattr(norms, "BLOCK_NUMBERS", 6)
    seen = []
    unwatched = norms._rows_per_block
    monkeypatch.setattr(norms, "_rows_per_block", lambda x: seen.append(x) or unwatched(x))
    with torch.no_grad():
        assert torch.equal(norms.row_products(a, b), whole)
    assert len(seen) == 1
    assert torch.equal(norms.row_products(a, b), whole)
    assert len(seen) == 1, "blocks are for passes that record nothing"
    close(norms._scaled_norm(a, -1), exact(a, keepdim=True))
    close(norms._scaled_norm(a, 1), exact(a, keepdim=True))
    close(norms._scaled_norm(a, 0), exact(a, 0, keepdim=True))
    assert len(seen) == 1 + 5 + 5, "each block once, none along the columns"


def test_short_rows_are_divided_by_the_least_norm_and_carry_no_gradient():
    x = torch.tensor([[3.0, 4.0], [0.0, 1e-13], [0.0, 0.0]], dtype=torch.float64)
    inverse = norms.inverse_norms(x)
    assert inverse.flatten().tolist() == pytest.approx([0.2, 1e12, 1e12])
    assert norms.gradient_factor(inverse).flatten().tolist() == pytest.approx([0.2, 0, 0], abs=0)
    unit, factor = norms.unit_rows(x)
    assert torch.allclose(unit, x * inverse)
    assert torch.equal(factor, norms.gradient_factor(inverse))


@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_with_and_without_a_graph_of_their_own(recorded):
    x = matrix(3, 4, torch.float64).requires_grad_()
    weight = matrix(3, 4, torch.float64).flip(1)
    length = x.norm(dim=1, keepdim=True)
    want = torch.autograd.grad((x / length * weight).sum() + length.sum(), x)[0]
    value = (norms.normalize(x) * weight).sum() + norms.safe_norm(x).sum()
    got = torch.autograd.grad(value, x, create_graph=recorded)[0]
    assert torch.allclose(got, want, rtol=1e-12)


def test_rows_are_read_as_copies():
    table = matrix(4, 2)
    for index in (None, torch.tensor([2, 0])):
        for read in (norms.read_rows, norms._read_rows):
            copy = read(table, index)
            assert torch.equal(copy, table if index is None else table[index])
            assert copy.data_ptr() != table.data_ptr()
    table, index = torch.ones(4, 2, device="meta"), torch.ones(3, dtype=torch.long, device="meta")
    assert norms._read_rows(table, None).shape == (4, 2)
    assert norms._read_rows(table, index).shape == (3, 2)


def test_shapes_of_norms_on_another_device():
    x = torch.ones(4, 3, device="meta")
    assert norms._norm(x, -1, True).shape == (4, 1)
    assert norms._norm(x, -1, False).shape == (4,)
    assert norms._norm(x, 0, True).shape == (1, 3)
    assert norms._norm(x, 0, False).shape == (3,)


def test_several_gradients_of_one_graph_at_a_time():
    x = matrix(3, 4, torch.float64).requires_grad_()
    for function in (norms.safe_norm, lambda x: norms.normalize(x).sum(1)):
        value = function(x)
        single = [torch.autograd.grad(v, x, retain_graph=True)[0] for v in value]
        _, back = torch.func.vjp(function, x.detach())
        with torch.no_grad():
            (several,) = torch.func.vmap(back)(torch.eye(3).double())
        assert torch.allclose(several, torch.stack(single), rtol=1e-12)


def test_many_gradients_of_norms_at_once() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)
    many = torch.autograd.grad(norms.safe_norm(x), x, torch.eye(2), is_grads_batched=True)[0]
    one = [torch.autograd.grad(norms.safe_norm(x)[i], x)[0] for i in range(2)]
    assert torch.equal(many, torch.stack(one))
