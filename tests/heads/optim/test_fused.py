"""The Triton kernels do what plain torch does: by Triton's interpreter here, compiled on a GPU."""

from typing import Any

import pytest
import torch
from interpreted import NEEDS_TRITON, run_interpreted
from torch import Tensor, nn
from torch.testing import assert_close

from largemargin.heads.optim import HeadSGD, RowwiseAdam

CASES: list[tuple[Any, dict[str, Any]]] = [
    (RowwiseAdam, {"weight_decay": 0.1}),
    (RowwiseAdam, {"lazy": True, "moment_dtype": None}),
    (RowwiseAdam, {"betas": (0.0, 0.99), "maximize": True}),
    (RowwiseAdam, {"stochastic_rounding": False}),
    (HeadSGD, {"weight_decay": 0.1}),
    (HeadSGD, {"lazy": True, "moment_dtype": None, "nesterov": True}),
    (HeadSGD, {"momentum": 0.0, "maximize": True}),
]


def states(
    optimizer_class: Any, options: Any, dtype: torch.dtype, fused: bool, device: str
) -> dict[str, Tensor]:
    """Parameters and state after a few steps, one of which is skipped."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(37, 11, generator=generator).to(device, dtype))
    bias = nn.Parameter(torch.randn(37, generator=generator).to(device, dtype))
    optimizer = optimizer_class([weight, bias], lr=0.05, fused=fused, **options)
    for step in range(4):
        for param in (weight, bias):
            gradient = torch.randn(param.shape, generator=generator)
            gradient[step::3] = 0
            param.grad = gradient.to(device, dtype)
        optimizer.found_inf = torch.full((1,), float(step == 2), device=device)
        optimizer.step()
    found = {"weight": weight.detach(), "bias": bias.detach()}
    return found | optimizer.state[weight]


def compare(device: str, cases: slice) -> None:
    for optimizer_class, options in CASES[cases]:
        for dtype in (torch.float32, torch.bfloat16):
            want = states(optimizer_class, options, dtype, False, device)
            got = states(optimizer_class, options, dtype, True, device)
            for name in want:
                what = f"{optimizer_class.__name__} {options} {dtype} {name}"
                # Numbers that differ in the last bit may be rounded to different neighbours.
                close = torch.isclose(got[name].float(), want[name].float(), rtol=1e-5, atol=1e-5)
                assert close.float().mean() > 0.98, what
                near = {"rtol": 2**-7, "atol": 1e-5} if got[name].dtype == torch.bfloat16 else {}
                assert_close(got[name], want[name], msg=what, **near)


@NEEDS_TRITON
@pytest.mark.parametrize(
    "cases", ["slice(0, None, 5)", pytest.param("slice(None)", marks=pytest.mark.slow)]
)
def test_interpreted_kernels_are_plain_torch(cases: str) -> None:
    program = f"from heads.optim.test_fused import compare; compare('cpu', {cases})"
    run_interpreted("-c", program)


@NEEDS_TRITON
@pytest.mark.gpu
def test_compiled_kernels_are_plain_torch() -> None:
    compare("cuda", slice(None))


@NEEDS_TRITON
@pytest.mark.gpu
def test_a_cuda_graph_holds_a_step() -> None:
    start = torch.randn(300, 64, device="cuda")
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    lrs = [torch.tensor(0.1, device="cuda") for _ in range(2)]
    optimizers = [RowwiseAdam([w], lr=lr) for w, lr in zip(weights, lrs, strict=True)]
    gradients = [torch.randn_like(start) for _ in range(4)]
    given = gradients[0].clone()
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = gradients[0].clone()
        optimizer.step()  # state is made, and the kernel compiled, outside the graph
    weights[1].grad = given
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for turn, gradient in enumerate(gradients[1:]):
        weights[0].grad = gradient
        given.copy_(gradient)
        for lr in lrs:
            lr.fill_(0.1 / (turn + 1))
        optimizers[0].step()
        graph.replay()
    assert torch.equal(*weights)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [None, False])
def test_a_step_needs_no_arrays_of_the_weights_size(fused: bool | None) -> None:
    weight = nn.Parameter(torch.randn(400_000, 128, device="cuda"))
    weight.grad = torch.randn_like(weight)
    optimizer = RowwiseAdam([weight], fused=fused)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    limit = 0.01 if fused is None else 1.0  # a few blocks of 2^22 entries and their hashes
    assert torch.cuda.max_memory_allocated() - before < limit * weight.nbytes
