"""Norms and unit rows of large matrices go over them in blocks: same numbers, no copies."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from largemargin.ops import normalize, norms, safe_norm
from largemargin.ops.norms import _scaled_norm, row_products


def extreme(count: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of sizes 1e-30 to 1e30, one of them 0."""
    sizes = 10.0 ** torch.linspace(-30, 30, count)
    x = torch.randn(count, dim) * sizes[:, None]
    x[count // 2] = 0
    return x.to(dtype)


def largest_allocation(function) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = seen.profiler.kineto_results.events()
    return max((e.nbytes() for e in events if e.name() == "[memory]"), default=0)


@pytest.mark.parametrize("numbers", [1, 50, 70, 10_000])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    x, other = extreme(37, 7), torch.randn(37, 7)
    monkeypatch.setattr(norms, "BLOCK_NUMBERS", numbers)
    exact = torch.linalg.vector_norm(x.double(), dim=1, keepdim=True)
    assert_close(_scaled_norm(x, -1).double(), exact, rtol=1e-6, atol=0)
    with torch.no_grad():
        assert_close(row_products(other, other), other.square().sum(1, keepdim=True))


@pytest.mark.parametrize("function", [normalize, safe_norm], ids=lambda f: f.__name__)
def test_gradients_of_blocks(monkeypatch: pytest.MonkeyPatch, function) -> None:
    monkeypatch.setattr(norms, "BLOCK_NUMBERS", 20)
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(function(x))
    (once,) = torch.autograd.grad((function(x) * weights).sum(), x)
    (again,) = torch.autograd.grad((function(x) * weights).sum(), x, create_graph=True)
    assert_close(once, again)
    assert torch.autograd.gradgradcheck(function, (x,))


def test_no_copy_of_a_large_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "BLOCK_NUMBERS", 2**12)
    x = torch.randn(4096, 64)
    assert largest_allocation(lambda: _scaled_norm(x, -1)) <= 4 * 2**12
    with torch.no_grad():
        assert largest_allocation(lambda: row_products(x, x)) <= 4 * 2**12


@pytest.mark.gpu
def test_a_gpu_allocates_what_it_returns() -> None:
    x = torch.randn(200_000, 256, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    normalize(x).backward(gradient)  # allocates x.grad
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    unit = normalize(x)
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * x.nbytes
    assert_close(unit[:7], torch.nn.functional.normalize(x[:7]))
    unit.backward(gradient)
    assert torch.cuda.max_memory_allocated() - before <= 2.2 * x.nbytes
