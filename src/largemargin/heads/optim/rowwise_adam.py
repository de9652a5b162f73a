"""``RowwiseAdam``: Adam with one second moment for a row, for heads with many classes."""

import math
from typing import Any

import torch
from torch import Tensor

import largemargin.heads.optim.triton_step as triton_step
from largemargin.errors import LargeMarginError, check_number
from largemargin.heads.optim.row_optimizer import (
    MOMENT,
    PARAMETER,
    RowOptimizer,
    Rows,
    compute_dtype,
    rate,
    row_zeros,
    seed_of,
    store,
)


class RowwiseAdam(RowOptimizer):
    r"""Adam whose second moment is one number a row, and whose first may be half as large.

    For row c of a (C, D) parameter, with gradient g (decoupled decay, as AdamW):

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g,\qquad
        v_c \leftarrow \beta_2 v_c + (1-\beta_2)\,\tfrac1D\|g\|^2,\qquad
        W_c \leftarrow (1 - \eta\lambda) W_c
            - \eta\,\frac{m/(1-\beta_1^t)}{\sqrt{v_c/(1-\beta_2^t)} + \epsilon}

    **Why.** Of a head with a million classes of 512 numbers, Adam reads and writes 13.4 GiB in
    every step: weight, gradient and two moments of the same size in float32. This one moves 7.6 GiB
    with a first moment in bfloat16, 5.7 GiB without one, and keeps 0.95 GiB or 4 MB of state
    instead of 3.8 GiB. On a GPU a step is one kernel.

    **What it loses against Adam.** Entries of a row share one step size. Adam gives larger steps to
    *features* whose gradients are small; this one to *classes* whose gradients are small, those
    rarely hit. In return a step does not depend on the choice of coordinates: rotating the features
    rotates the update. With D = 1 (a bias) it is AdamW.

    **Rows without gradient.** As with Adam, a class absent from the batch still moves: its gradient
    is small, not 0, and m goes on. Where gradients are exactly 0 (``sample_rate`` below 1, hinges),
    ``lazy=True`` leaves such rows alone: no decay, no momentum, moments as they were, and bias
    correction by the common step, as ``torch.optim.SparseAdam``. It also saves their traffic.

    Args:
        params: parameters or groups. Rows run along the first dimension, (C, D) as in
            ``nn.Linear.weight``; vectors have rows of one entry. ``DTensor`` parameters cut between
            rows are stepped where they are.
        lr: eta, a number or a tensor; default 1e-3 (Adam's).
        betas: beta_1 and beta_2 in [0, 1); default (0.9, 0.999) (Adam's). ``betas=(0, b)`` keeps no
            first moment at all.
        eps: default 1e-8 (Adam's).
        weight_decay: lambda; default 0.
        moment_dtype: of the first moment; default bfloat16. None: that of the parameter.
        stochastic_rounding: round bfloat16 numbers, moments and parameters, at random, so that
            small changes are not lost. Default True. The same seed-free hash on every device.
        lazy: leave rows alone whose gradient is exactly 0. Default False.
        maximize: ascend. Default False.
        fused: None (default) takes the Triton kernel on a GPU where it can; True insists; False
            works in blocks of rows in plain torch, with temporary arrays of a block.

    State: ``step``, ``second`` (C,) float32, ``first`` in ``moment_dtype``. Steps can be captured
    in a CUDA graph (pass ``lr`` as a tensor to change it) and compiled. ``GradScaler`` skips steps
    without reading anything back.

    Example:
        >>> head = ClassHead(8, 5)
        >>> optimizer = RowwiseAdam(head.param_groups(), lr=0.01)
        >>> head(torch.randn(3, 8)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[head.weight]["second"].shape
        torch.Size([5])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moment_dtype: torch.dtype | None = torch.bfloat16,
        stochastic_rounding: bool = True,
        lazy: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        if not (isinstance(betas, tuple | list) and len(betas) == 2):
            raise LargeMarginError(f"betas must be two numbers, but {betas!r} was given.")
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_number(name, beta, at_least=0, below=1)
        check_number("eps", eps, at_least=0)
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            moment_dtype=moment_dtype,
            stochastic_rounding=stochastic_rounding,
            lazy=lazy,
            maximize=maximize,
            fused=fused,
        )

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = {"second": row_zeros(param, compute_dtype(param))}
        if group["betas"][0] > 0:
            dtype = group["moment_dtype"] or param.dtype
            state["first"] = torch.zeros_like(
                param, dtype=dtype, memory_format=torch.preserve_format
            )
        return state

    def _update(self, rows: Rows, group: dict[str, Any], scale: Tensor, keep: Tensor) -> None:
        beta1, beta2 = group["betas"]
        lr, step = rate(group, scale), rows.state["step"][0]
        numbers = torch.stack(
            [
                scale,
                keep,
                1 - lr * group["weight_decay"],
                lr / _bias(beta1, step, scale.dtype),
                _bias(beta2, step, scale.dtype).rsqrt(),
                step.to(scale.dtype),
            ]
        )
        if triton_step.usable(rows, group["fused"]):
            triton_step.adam(rows, numbers, group)
        else:
            _adam(rows, numbers, group)


def _bias(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor:
    """1 - beta^t, exact also where beta is close to 1; of skipped first steps 1."""
    if beta == 0:
        return torch.ones((), dtype=dtype, device=step.device)
    found = -torch.expm1(step.to(dtype) * math.log(beta))
    return torch.where(step > 0, found, 1)


def _adam(rows: Rows, numbers: Tensor, group: dict[str, Any]) -> None:
    """The step in plain torch, in blocks of rows."""
    scale, keep, shrink, size, root, step = numbers.unbind()
    beta1, beta2 = group["betas"]
    width = max(rows.param.shape[1:].numel(), 1)
    at_random = group["stochastic_rounding"]
    seeds = [seed_of(step, array) if at_random else None for array in (PARAMETER, MOMENT)]
    for block in rows.blocks():
        param, second = rows.param[block], rows.state["second"][block]
        grad = rows.grad[block].to(numbers.dtype) * scale
        square = grad.square().view(grad.shape[0], -1).mean(1)
        new_second = torch.lerp(square, second.to(square.dtype), beta2)
        moment = grad
        if "first" in rows.state:
            moment = torch.lerp(grad, rows.state["first"][block].to(grad.dtype), beta1)
        factor = size / (new_second.sqrt() * root + group["eps"])
        changed = param.to(grad.dtype) * shrink - rows.by_row(factor) * moment
        touched = keep.to(torch.bool).expand(grad.shape[0])
        if group["lazy"]:
            touched = touched & (grad != 0).view(grad.shape[0], -1).any(1)
        second.copy_(torch.where(touched, new_second, second))
        entries, here = rows.by_row(touched), rows.first_entry + (block.start or 0) * width
        _write(param, changed, entries, seeds[0], here)
        if "first" in rows.state:
            _write(rows.state["first"][block], moment, entries, seeds[1], here)


def _write(
    target: Tensor, value: Tensor, touched: Tensor, seed: Tensor | None, first_entry: int
) -> None:
    # What was stored is exactly representable, so rounding leaves rows that are not touched.
    store(target, torch.where(touched, value, target.to(value.dtype)), seed, first_entry)
