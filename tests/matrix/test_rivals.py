"""The search for the nearest boundary, in blocks and on a GPU: what a direct search finds."""

import pytest
import torch
from interpreted import NEEDS_TRITON, run_interpreted
from torch import Tensor
from torch.testing import assert_close

from largemargin.ops import boundary as module
from largemargin.ops.boundary import nearest_rival, paired_boundary_distance


def problem(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """More classes than two blocks, some of them twice, their mean far from the origin."""
    generator = torch.Generator().manual_seed(0)
    weight = 30 + torch.randn(700, 64, generator=generator)
    weight[600:620] = weight[:20]
    points = 2 * torch.randn(24, 64, generator=generator)
    own = torch.randperm(700, generator=generator)[:24]
    own[:3] = torch.tensor([0, 599, 610])
    bias = torch.randn(700, generator=generator)
    return points.to(device), weight.to(device), own.to(device), bias.to(device)


def compare(device: str, atol: float = 1e-4) -> None:
    for with_bias in (True, False):
        points, weight, own, bias = problem(device)
        assert points.shape[0] * weight.numel() > module.EXACT_LIMIT  # searched by products
        found = nearest_rival(points, weight, own, bias if with_bias else None)
        wide = [x.double().cpu() for x in (points, weight, bias)]
        mine = own.cpu()
        gaps = (wide[2][None] - wide[2][mine][:, None]) if with_bias else None
        exact = paired_boundary_distance(wide[0][:, None], wide[1][mine][:, None], wide[1], gaps)
        exact.scatter_(1, mine[:, None], -torch.inf)
        got = exact.gather(1, found.cpu()[:, None]).squeeze(1)
        assert_close(got, exact.amax(1), rtol=0, atol=atol)
        assert not torch.any(found.cpu() == mine)


@pytest.mark.parametrize("block", [2**8, 2**22])
def test_blocks_find_the_nearest(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(module, "BLOCK", block)  # 256 classes at a time, or all
    compare("cpu")


@NEEDS_TRITON
@pytest.mark.slow
def test_the_interpreted_kernel_finds_the_nearest() -> None:
    program = (
        "from matrix.test_rivals import compare, module;"
        "import largemargin.ops.triton.rival_boundaries as kernels;"
        "module.BLOCK = 256; kernels.COLUMNS = 128; compare('cpu');"
        "kernels.orders = lambda: kernels.SHORT; compare('cpu')"
    )
    run_interpreted("-c", program)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("points", [1, 1000])
def test_a_gpu_finds_the_nearest(
    monkeypatch: pytest.MonkeyPatch, precision: str, points: int
) -> None:
    """By plain products of few points, and of numbers split into parts."""
    monkeypatch.setattr(module, "MANY_POINTS", points)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        compare("cuda", atol=1e-4 if precision == "highest" or points == 1 else 1e-1)
    finally:
        torch.set_float32_matmul_precision(before)
