"""The tiled statistics as an operator of torch: autograd, compiler, graphs, and when to use it."""

import warnings
from typing import Any

import torch
from torch import Tensor

from largemargin.ops.dense import ORDER, Stats, dense_stats, wanted_stats
from largemargin.ops.norms import promote
from largemargin.ops.similarity import AffineForm, dense_logits
from largemargin.ops.triton.availability import HAS_TRITON, interpreted, is_too_old, settled
from largemargin.ops.triton.chunks import leaves_room
from largemargin.ops.triton.launch import MASS, MOMENT, RIVAL, TOTAL, run_backward, run_forward

BITS = {"target": 0, "rival": RIVAL, "rest": MASS, "spread": MOMENT, "mean": TOTAL}
INT32 = 2**31 - 1


def missing(features: Tensor, prototypes: Tensor) -> str | None:
    """Why the kernels cannot serve this call; None if they can."""
    if prototypes.dim() == 3:
        return "they score one vector per class, and these prototypes have sub-centers"
    if not HAS_TRITON:
        return "Triton is not installed"
    if torch.float64 in (features.dtype, prototypes.dtype):
        return "they have no float64, which the tensors are"
    device = features.device
    if device.type != "cuda":
        return None if interpreted() else f"the tensors are on {device.type!r}, not on a GPU"
    if is_too_old(device):
        return "the GPU is older than compute capability 8.0 and has no bfloat16 products"
    if max(features.shape[0], prototypes.shape[0]) > INT32:
        return "there are more than 2**31 - 1 rows"
    return None


@settled
def _tf32_is_allowed() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def precision_of(precision: str | None) -> str:
    """What torch's global setting means for the kernels, where nothing was asked for."""
    if precision is not None:
        return precision
    return "tf32" if _tf32_is_allowed() else "highest"


def tile_stats(form: AffineForm, labels: Tensor, want: tuple[str, ...]) -> Stats:
    """The statistics of ``dense_stats(dense_logits(form), labels, want)`` for hard labels."""
    bits = 0
    for name in want:
        bits |= BITS[name]
    precision = precision_of(form.precision)
    # The compiler would copy what is kept, since the backward pass writes to it.
    keeps = (
        form.columns.requires_grad
        and torch.is_grad_enabled()
        and leaves_room(form.columns, precision)
        and not torch.compiler.is_compiling()
    )
    found, rival_index, *_ = (_tile_stats_keeping if keeps else _tile_stats)(
        form.rows,
        form.columns,
        form.column_bias,
        labels.long().contiguous(),
        form.normalize_columns,
        precision,
        bits,
    )
    return wanted_stats(found[:5].unbind(), rival_index, form.row_bias, want)


@torch.library.custom_op("largemargin::tile_stats", mutates_args=())
def _tile_stats(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalize: bool,
    precision: str,
    want: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return run_forward(rows, columns, bias, labels, normalize, precision, want)


@_tile_stats.register_fake
def _shapes(
    rows: Tensor, columns: Tensor, bias: Any, labels: Tensor, normalize: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rows.new_empty(8, rows.shape[0], dtype=torch.float32),
        labels.new_empty(rows.shape[0]),
        rows.new_empty(columns.shape[0] if normalize else 0),
    )


@torch.library.custom_op("largemargin::tile_stats_keeping", mutates_args=())
def _tile_stats_keeping(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalize: bool,
    precision: str,
    want: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the array for the gradients of the columns, which holds their copies."""
    kept = torch.empty(columns.shape, dtype=columns.dtype, device=columns.device)
    found = run_forward(rows, columns, bias, labels, normalize, precision, want, kept=kept)
    return (*found, kept)


@_tile_stats_keeping.register_fake
def _(rows: Tensor, columns: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = torch.empty(columns.shape, dtype=columns.dtype, device=columns.device)
    return (*_shapes(rows, columns, *given), kept)


@torch.library.custom_op("largemargin::tile_stats_backward", mutates_args=())
def _tile_stats_backward(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    found: Tensor,
    rival_index: Tensor,
    inverse: Tensor,
    grads: Tensor,
    normalize: bool,
    precision: str,
    want: int,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = rows, columns, bias, labels, found, rival_index, inverse, grads
    return run_backward(*operands, normalize, precision, want, needs)


@_tile_stats_backward.register_fake
def _gradient_shapes(
    rows: Tensor, columns: Tensor, bias: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = given[-1]
    return (
        rows.new_empty(rows.shape if needs & 1 else 0),
        columns.new_empty(columns.shape if needs & 2 else 0),
        rows.new_empty(0) if bias is None or not needs & 4 else bias.new_empty(bias.shape),
    )


@torch.library.custom_op("largemargin::tile_stats_backward_into", mutates_args=("kept",))
def _tile_stats_backward_into(
    kept: Tensor,
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    found: Tensor,
    rival_index: Tensor,
    inverse: Tensor,
    grads: Tensor,
    normalize: bool,
    precision: str,
    want: int,
    needs: int,
) -> tuple[Tensor, Tensor]:
    """The same, with the copies in ``kept``, which becomes the gradient of the columns."""
    operands = rows, columns, bias, labels, found, rival_index, inverse, grads
    results = run_backward(*operands, normalize, precision, want, needs, kept=kept)
    return results[0], results[2]


@_tile_stats_backward_into.register_fake
def _(kept: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    grad_rows, _, grad_bias = _gradient_shapes(*given)
    return grad_rows, grad_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, columns, bias, labels, *ctx.settings = inputs
    ctx.save_for_backward(rows, columns, bias, labels, *output)
    ctx.set_materialize_grads(False)
    ctx.holds_copies = len(output) > 3


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    # The caller's autocast would reach the products here: the engine hands it on.
    with torch.autocast(grad.device.type, enabled=False):
        return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
    rows, columns, bias, labels, found, rival_index, inverse, *kept = saved
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return (*_dense_gradients(ctx, rows, columns, bias, labels, grad), None, None, None, None)
    needs = sum(bit for bit, needed in zip((1, 2, 4), ctx.needs_input_grad, strict=False) if needed)
    operands = rows, columns, bias, labels, found, rival_index, inverse, grad[:5].contiguous()
    results: tuple[Tensor, Tensor, Tensor]
    if ctx.holds_copies and needs & 2 and type(kept[0]) is Tensor:  # not one that is traced
        # Only once: with retain_graph=True a second pass makes its own copies. A tensor with a
        # version of its own, or that pass would be told that what was saved has been modified.
        ctx.holds_copies = False
        into = kept[0].data
        grad_rows, grad_bias = _tile_stats_backward_into(into, *operands, *ctx.settings, needs)
        results = grad_rows, into, grad_bias
    else:
        results = _tile_stats_backward(*operands, *ctx.settings, needs)
    given = (
        result if needs & bit else None for bit, result in zip((1, 2, 4), results, strict=True)
    )
    return (*given, None, None, None, None)


_tile_stats.register_autograd(_backward, setup_context=_setup)
_tile_stats_keeping.register_autograd(_backward, setup_context=_setup)


def _dense_gradients(
    ctx: Any, rows: Tensor, columns: Tensor, bias: Tensor | None, labels: Tensor, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, by way of all the logits."""
    normalize, precision, want = ctx.settings
    warnings.warn(
        f'A second derivative was asked for (create_graph=True): impl="triton" computes it like '
        f'impl="dense", which holds the {rows.shape[0]} x {columns.shape[0]} logits. Pass '
        'impl="dense" to have it so from the start.',
        stacklevel=2,
    )
    names = tuple(name for name in ORDER if name == "target" or want & BITS[name])
    with torch.enable_grad():
        # Aliases: a bias may be a function of the columns, and only direct paths count here.
        rows, columns = rows.view_as(rows), columns.view_as(columns)
        bias = None if bias is None else bias.view_as(bias)
        form = AffineForm(rows, promote(columns), bias, None, normalize, precision)
        target, rival, _, rest, spread, mean = dense_stats(dense_logits(form), labels, names)
        stats = dict(zip(ORDER, (target, rival, rest, spread, mean), strict=True))
        outputs = [value for value in stats.values() if value is not None]
        wanted = [grad[ORDER.index(name)] for name in names]
        needed = ctx.needs_input_grad[:3]
        given = zip((rows, columns, bias), needed, strict=True)
        inputs = [x for x, asked in given if asked and x is not None]
        found = iter(torch.autograd.grad(outputs, inputs, wanted, create_graph=True))
    return tuple(next(found) if asked else None for asked in needed)
