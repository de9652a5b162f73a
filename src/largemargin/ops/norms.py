"""Row norms and row normalisation with finite gradients everywhere (rules N1, N3, N4)."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from largemargin.tracing import jit_traces, plain_eager

EPS = 1e-12
"""Rows shorter than this are divided by it instead of by their norm, and carry no gradient."""

SQUARABLE = (1e-15, 1e15)
"""Norms whose squares, and those of the entries that matter, are ordinary float32 numbers."""

BLOCK_NUMBERS = 2**22
"""Numbers of a large matrix worked on at a time, where an operation copies what it reads: 16 MiB
in float32, which the caches of a GPU hold."""


Forward = TypeVar("Forward", bound=Callable[..., Any])


def known(forward: Forward) -> Forward:
    """Work out the signature of an autograd function's ``forward`` now.

    torch asks for it at every call where there is a ``setup_context``: a third of what calling the
    function costs.
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def promote(x: Tensor) -> Tensor:
    """Half precision becomes float32: no norm, exponential or angle is computed below it (N1)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def batched_gradient(x: Tensor) -> bool:
    """Many gradients at once, by ``autograd.grad(is_grads_batched=True)``: nothing in place."""
    batched: bool = torch._C._functorch.is_legacy_batchedtensor(x)
    return batched


def all_between(x: Tensor, low: float, high: float) -> bool:
    """Whether all numbers of a tensor lie between two, of NaN not; it reads values."""
    if x.numel() == 0:
        return False
    least, most = x.aminmax()
    return low < least.item() and most.item() < high


def _rows_per_block(x: Tensor) -> int | None:
    """Rows of a matrix to work on at a time; None where all at once is right.

    Compiled code keeps no copies anyway, and transforms see a matrix as one value.
    """
    if torch.compiler.is_compiling():  # asking for the size would fix it in the compiled code
        return None
    if x.numel() <= BLOCK_NUMBERS or x.dim() != 2 or not plain_eager():
        return None
    return max(1, BLOCK_NUMBERS // x.shape[1]) if x.shape[0] > 1 else None


def _scaled_norm(x: Tensor, dim: int) -> Tensor:
    """Norms with their dimension kept, by way of the largest entries: no square overflows.

    For accelerators, which have slow float64 or none.
    """
    step = _rows_per_block(x) if dim in (-1, x.dim() - 1) else None
    if step is not None:
        norm = x.new_empty(x.shape[0], 1)
        for start in range(0, x.shape[0], step):
            norm[start : start + step] = _scaled_norm(x[start : start + step], -1)
        return norm
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=dim, keepdim=True)
    largest = largest.clamp_min(torch.finfo(x.dtype).tiny)
    scaled: Tensor = torch.linalg.vector_norm(x / largest, dim=dim, keepdim=True)
    return largest * scaled


def row_norms(x: Tensor) -> Tensor:
    """Norms (N,) of rows, in plain eager mode and outside autograd."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return _norm(x, -1, keepdim=False)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    if all_between(norm, *SQUARABLE):
        return norm
    # float64 only where a square may leave the range of float32.
    far = ~((norm > SQUARABLE[0]) & (norm < SQUARABLE[1]))
    exact = torch.linalg.vector_norm(x[far], dim=-1, dtype=torch.float64)
    return norm.masked_scatter(far, exact.to(x.dtype))


def _norm(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Norms of float32 rows of size 1e30 or 1e-20 survive: no square leaves its range."""
    on_cpu, eager = x.device.type == "cpu", x.dtype == torch.float32 and plain_eager()
    if on_cpu and eager and dim in (-1, x.dim() - 1):
        norm: Tensor = row_norms(x)
        return norm.unsqueeze(-1) if keepdim else norm
    # On a GPU as exact, in two launches for seven; slow float64 does not show in few numbers.
    if on_cpu or (eager and x.is_cuda and x.numel() <= BLOCK_NUMBERS):
        norm = torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim, dtype=torch.float64)
        return norm.to(x.dtype)
    norm = _scaled_norm(x, dim)
    return norm if keepdim else norm.squeeze(dim)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows of two matrices, (N, 1), without a third matrix of their size."""
    step = None if torch.is_grad_enabled() else _rows_per_block(a)
    if step is None:
        return (a * b).sum(-1, keepdim=True)
    products = torch.empty(a.shape[0], 1, dtype=a.dtype, device=a.device)
    for start in range(0, a.shape[0], step):
        block = slice(start, start + step)
        products[block] = (a[block] * b[block]).sum(-1, keepdim=True)
    return products


def inverse_norms(x: Tensor) -> Tensor:
    """What the rows of ``x`` are multiplied with to normalise them: (N, 1), outside autograd."""
    return _norm(x, -1, keepdim=True).clamp_min(EPS).reciprocal()


def gradient_factor(inverse: Tensor) -> Tensor:
    """What the gradients of normalised rows are multiplied with: 0 for short rows."""
    return inverse.masked_fill(inverse >= 1 / EPS, 0)


def _backwards_only() -> bool:
    return torch.compiler.is_compiling() or plain_eager()


class _SafeNorm(torch.autograd.Function):
    """Euclidean norm whose derivative of every order is 0 at the origin.

    The unit vector is a second output, so that the backward pass is written in outputs alone and
    can be differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    @known
    def forward(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        norm = _norm(x, dim, keepdim=True)
        # Of 0 and of numbers whose reciprocal is none it is 0, as the derivative there.
        return norm, norm.reciprocal().nan_to_num(nan=0.0, posinf=0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad_norm: Tensor, grad_inverse: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        factor = grad_norm - grad_inverse * inverse * inverse
        if torch.is_grad_enabled() or not plain_eager() or batched_gradient(factor):
            return factor * (x * inverse), None
        return (x * inverse).mul_(factor), None  # one array of the size of x, not two


class _SafeNormForwards(_SafeNorm):
    """Also differentiated forwards, as by ``torch.func.hessian``; the compiler refuses a jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])
        ctx.dim = inputs[1]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        x, inverse = ctx.saved_tensors
        along = (x * inverse * tangent).sum(ctx.dim, keepdim=True)
        return along, -along * inverse * inverse


def safe_norm(x: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    r"""Euclidean norm :math:`\|x\|` with subgradient 0 at ``x = 0`` (rule N3).

    A plain ``sqrt(sum(x**2))`` returns a NaN gradient there.

    Example:
        >>> x = torch.zeros(1, 3, requires_grad=True)
        >>> safe_norm(x).sum().backward(); x.grad
        tensor([[0., 0., 0.]])
    """
    kind = _SafeNorm if _backwards_only() else _SafeNormForwards
    norm: Tensor = kind.apply(promote(x), dim)[0]
    return norm if keepdim else norm.squeeze(dim)


class _Normalize(torch.autograd.Function):
    """Rows over their norm; short rows are constants. Twice differentiable, see _SafeNorm."""

    generate_vmap_rule = True

    @staticmethod
    @known
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = inverse_norms(x)
        return x * inverse, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad_unit: Tensor, grad_inverse: Tensor) -> Tensor:
        unit, inverse = ctx.saved_tensors
        factor = gradient_factor(inverse)
        along = row_products(grad_unit, unit) + grad_inverse * factor
        tangential = torch.addcmul(grad_unit, along, unit, value=-1)
        # In place where nothing is recorded: these matrices are as large as the prototypes.
        return tangential * factor if torch.is_grad_enabled() else tangential.mul_(factor)


class _NormalizeForwards(_Normalize):
    """Also differentiated forwards."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        unit, inverse = ctx.saved_tensors
        factor = gradient_factor(inverse)
        along = (unit * tangent).sum(-1, keepdim=True)
        return (tangent - along * unit) * factor, -along * factor * factor


def normalize(x: Tensor) -> Tensor:
    r"""Rows divided by their norm, :math:`u/\max(\|u\|, 10^{-12})` (rule N4).

    A zero row maps to the zero row. Rows shorter than 1e-12 get gradient 0; dividing by the
    small number would return gradients of size 1e12.

    Example:
        >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    if jit_traces():  # operators of torch alone: such a graph can be saved
        return promote(x) * inverse_norms(promote(x))
    kind = _Normalize if _backwards_only() else _NormalizeForwards
    unit: Tensor = kind.apply(promote(x))[0]
    return unit


def read_rows(table: Tensor, index: Tensor | None, eager: bool | None = None) -> Tensor:
    """Copies of rows, or of all, of a state that is written later in the same step.

    ``eager`` is what ``plain_eager`` says, where the caller knows it.
    """
    if not (plain_eager() if eager is None else eager):
        read: Tensor = _read_rows(table, index)
        return read
    return table.clone() if index is None else table.index_select(0, index)


@torch.library.custom_op("largemargin::read_rows", mutates_args=())
def _read_rows(table: Tensor, index: Tensor | None) -> Tensor:
    """An operator of its own, because a compiler may otherwise decide to read the rows again in
    the backward pass, when the state has moved on.
    """
    return table.clone() if index is None else table[index]


@_read_rows.register_fake
def _(table: Tensor, index: Tensor | None) -> Tensor:
    return table.new_empty(table.shape[0] if index is None else index.shape[0], *table.shape[1:])


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised rows and the factor of their backward pass, outside autograd."""
    inverse = inverse_norms(x)
    return x * inverse, gradient_factor(inverse)
