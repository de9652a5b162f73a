"""Products at a stated precision, in compiled code too."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from largemargin.ops.matmul import PRECISIONS, _matmul_bf16, matmul


def factors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(7, 6, generator=generator, dtype=dtype)
    b = torch.randn(6, 5, generator=generator, dtype=dtype)
    return a.requires_grad_(), b.requires_grad_()


def gradients(function: Any, *given: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.autograd.grad(function(*given), given)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_compiled_products_have_the_gradients_of_plain_ones(
    precision: str | None, dtype: torch.dtype
) -> None:
    a, b = factors(dtype)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return matmul(2 * a, b, precision).logsumexp(1).mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    want, got = gradients(loss, a, b), gradients(compiled, a, b)
    assert all(each.norm() > 0.1 for each in want)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_bf16_products_are_an_operator_of_our_own(dtype: torch.dtype) -> None:
    """torch's product with ``out_dtype`` has no derivative: torch 2.11 traces a constant."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    a, b = factors(dtype)
    out = torch.compile(lambda a, b: matmul(a, b, "bf16"), backend=backend, fullgraph=True)(a, b)
    out.sum().backward()
    assert out.dtype == dtype
    called = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    own = [names.count("largemargin.matmul_bf16.default") for names in called]
    assert own == [1, 2]
    assert not any("aten.mm" in name for names in called for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_is_what_its_shapes_say(dtype: torch.dtype) -> None:
    a, b = (each.detach().bfloat16() for each in factors())
    torch.library.opcheck(
        _matmul_bf16, (a, b, dtype), test_utils=("test_schema", "test_faketensor")
    )
    torch.testing.assert_close(_matmul_bf16(a, b, dtype), a.to(dtype) @ b.to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_products_on_the_device(precision: str, backend: str) -> None:
    a, b = (each.detach().cuda().requires_grad_() for each in factors())

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return matmul(2 * a, b, precision).logsumexp(1).mean()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    torch.testing.assert_close(
        gradients(compiled, a, b), gradients(loss, a, b), rtol=1e-2, atol=1e-3
    )
