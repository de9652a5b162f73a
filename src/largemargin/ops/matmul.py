"""The matrix product behind every logit, at a stated precision.

``precision=None`` leaves the product to torch and its global settings. ``"highest"`` and
``"tf32"`` fix the float32 product whatever those settings are; ``"bf16"`` rounds both factors to
bfloat16 and accumulates in float32. Sums, exponentials and statistics are never below float32.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from largemargin.errors import check_choice
from largemargin.ops.norms import known

Precision: TypeAlias = Literal["highest", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = ("highest", "tf32", "bf16")


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Where autocast does not reach operations on a tensor; free where there is none."""
    kind = tensor.device.type
    kind = "cpu" if kind == "meta" else kind  # "meta" has no autocast, so any other will do
    if not torch.is_autocast_enabled(kind):
        return _NOTHING
    return torch.autocast(kind, enabled=False)


_NOTHING = nullcontext()


def resolve_precision(precision: str | None, *tensors: Tensor) -> str | None:
    """What a product of these tensors is computed in: the caller's word, autocast, or the dtype.

    Autocast means bfloat16 products even when its dtype is float16: prototypes are raw parameters
    and float16 would overflow at 65504.
    """
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
        return precision
    kind = tensors[0].device.type
    if torch.is_autocast_enabled("cpu" if kind == "meta" else kind):
        return "bf16"
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            return None
    return "bf16"


@torch.library.custom_op("largemargin::matmul_fp32", mutates_args=())
def _matmul_fp32(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    """a @ b with TF32 allowed or forbidden; opaque to the compiler because it sets a flag."""
    backend: Any = torch.backends.cuda if a.device.type == "cuda" else torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    wanted = "tf32" if tf32 and a.device.type == "cuda" else "ieee"
    if before == wanted:
        return a @ b
    backend.matmul.fp32_precision = wanted
    try:
        return a @ b
    finally:
        backend.matmul.fp32_precision = before


@_matmul_fp32.register_fake
def _(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def multiply(a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """``a @ b`` at the given precision, outside autograd."""
    if precision is None or (precision != "bf16" and a.dtype != torch.float32):
        return a @ b
    if precision == "bf16":
        dtype = torch.promote_types(a.dtype, torch.float32)
        return _wide(a.to(torch.bfloat16), b.to(torch.bfloat16), dtype)
    product: Tensor = _matmul_fp32(a, b, precision == "tf32")
    return product


def _wide(low_a: Tensor, low_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of bfloat16 matrices, summed up and returned in float32 or float64."""
    if low_a.device.type == "cuda":
        exact: Tensor = torch.mm(low_a, low_b, out_dtype=torch.float32)
        return exact.to(dtype)
    return low_a.to(dtype) @ low_b.to(dtype)


@torch.library.custom_op("largemargin::matmul_bf16", mutates_args=())
def _matmul_bf16(low_a: Tensor, low_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The wide product, opaque to the compiler."""
    return _wide(low_a, low_b, dtype)


@_matmul_bf16.register_fake
def _(low_a: Tensor, low_b: Tensor, dtype: torch.dtype) -> Tensor:
    return low_a.new_empty(low_a.shape[0], low_b.shape[1], dtype=dtype)


class _Product(torch.autograd.Function):
    """a @ b whose two backward products run at the same precision.

    ``torch.mm(..., out_dtype=...)`` has no derivative, and torch 2.11 takes the result of a forward
    pass that it traces for a constant then: the gradient is 0 without a word. So compiled code
    calls an operator of our own here, which is taken as it is.
    """

    @staticmethod
    @known
    def forward(a: Tensor, b: Tensor, precision: str) -> Tensor:
        if precision == "bf16" and torch.compiler.is_compiling():
            dtype = torch.promote_types(a.dtype, torch.float32)
            out: Tensor = _matmul_bf16(a.to(torch.bfloat16), b.to(torch.bfloat16), dtype)
            return out
        return multiply(a, b, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.precision = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        # The caller's autocast would reach the products here: the engine runs in its thread.
        with without_autocast(grad):
            return matmul(grad, b.T, ctx.precision), matmul(a.T, grad, ctx.precision), None


def matmul(a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """``a @ b`` at the given precision, differentiable any number of times."""
    if precision is None:
        return a @ b
    out: Tensor = _Product.apply(a, b, precision)
    return out
