"""Row norms and row normalisation with finite gradients everywhere (rules N1, N3, N4)."""

from typing import Any

import torch
from torch import Tensor

EPS = 1e-12
"""Rows shorter than this are divided by it instead of by their norm, and carry no gradient."""


def promote(x: Tensor) -> Tensor:
    """Half precision becomes float32: no norm, exponential or angle is computed below it (N1)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _norm(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Norms of float32 rows of size 1e30 or 1e-20 survive: no square is taken in float32 alone."""
    if x.device.type == "cpu":
        norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim, dtype=torch.float64)
        return norm.to(x.dtype)
    # Accelerators have slow float64 or none: divide by the largest entry first.
    largest = x.abs().amax(dim, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    scaled: Tensor = torch.linalg.vector_norm(x / largest, dim=dim, keepdim=True)
    norm = largest * scaled
    return norm if keepdim else norm.squeeze(dim)


class _SafeNorm(torch.autograd.Function):
    """Euclidean norm whose derivative of every order is 0 at the origin.

    The unit vector is a second output, so that the backward pass is written in outputs alone and
    can be differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        norm = _norm(x, dim, keepdim=True)
        inverse = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)
        return norm, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad_norm: Tensor, grad_inverse: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        return (grad_norm - grad_inverse * inverse * inverse) * (x * inverse), None


def safe_norm(x: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    r"""Euclidean norm :math:`\|x\|` with subgradient 0 at ``x = 0`` (rule N3).

    A plain ``sqrt(sum(x**2))`` returns a NaN gradient there.

    Example:
        >>> x = torch.zeros(1, 3, requires_grad=True)
        >>> safe_norm(x).sum().backward(); x.grad
        tensor([[0., 0., 0.]])
    """
    norm: Tensor = _SafeNorm.apply(promote(x), dim)[0]
    return norm if keepdim else norm.squeeze(dim)


class _Normalize(torch.autograd.Function):
    """Rows over their norm; short rows are constants. Twice differentiable, see _SafeNorm."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = 1 / _norm(x, -1, keepdim=True).clamp_min(EPS)
        return x * inverse, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad_unit: Tensor, grad_inverse: Tensor) -> Tensor:
        unit, inverse = ctx.saved_tensors
        factor = torch.where(inverse < 1 / EPS, inverse, 0)
        along = (grad_unit * unit).sum(-1, keepdim=True) + grad_inverse * factor
        tangential = torch.addcmul(grad_unit, along, unit, value=-1)
        # In place where nothing is recorded: these matrices are as large as the prototypes.
        return tangential * factor if torch.is_grad_enabled() else tangential.mul_(factor)


def normalize(x: Tensor) -> Tensor:
    r"""Rows divided by their norm, :math:`u/\max(\|u\|, 10^{-12})` (rule N4).

    A zero row maps to the zero row. Rows shorter than 1e-12 get gradient 0; dividing by the
    small number would return gradients of size 1e12.

    Example:
        >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    unit: Tensor = _Normalize.apply(promote(x))[0]
    return unit


@torch.library.custom_op("largemargin::read_rows", mutates_args=())
def read_rows(table: Tensor, index: Tensor) -> Tensor:
    """Copies of rows of a state that is written later in the same step.

    An operator of its own, because a compiler may otherwise decide to read the rows again in the
    backward pass, when the state has moved on.
    """
    return table[index]


@read_rows.register_fake
def _(table: Tensor, index: Tensor) -> Tensor:
    return table.new_empty(index.shape[0], *table.shape[1:])


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised rows and the factor of their backward pass, outside autograd."""
    inverse = 1 / _norm(x, -1, keepdim=True).clamp_min(EPS)
    return x * inverse, torch.where(inverse < 1 / EPS, inverse, 0)
