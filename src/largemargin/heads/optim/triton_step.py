"""When a step is one Triton kernel, and how it is launched. torch alone is enough without it."""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.heads.optim.row_optimizer import Rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 8192
"""Entries of a row that one program holds at most."""
TILE = 2048
"""Entries a program works on, where rows are shorter than that."""


def usable(rows: Rows, fused: bool | None) -> bool:
    """Whether the kernel takes this parameter; ``fused=True`` makes a reason against an error."""
    if fused is False or torch.compiler.is_compiling():
        return False  # compilers write the same kernel themselves
    if fused is None and rows.param.device.type != "cuda":
        return False
    reason = _against(rows)
    if reason and fused:
        raise LargeMarginError(f"fused=True was asked for, but {reason}. Pass fused=None.")
    return not reason


def _against(rows: Rows) -> str:
    arrays = [rows.param, rows.grad, *rows.state.values()]
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if rows.param.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the parameters are on {rows.param.device.type}, not on a CUDA device"
    if any(array.dtype not in DTYPES for array in arrays):
        return f"dtypes are {sorted({str(array.dtype) for array in arrays})}"
    if not all(array.is_contiguous() for array in arrays):
        return "a parameter or its gradient is not contiguous"
    if rows.param.shape[1:].numel() > WIDEST:
        return f"rows of {rows.param.shape[1:].numel()} entries are longer than {WIDEST}"
    return ""


def _rounding(array: Tensor | None, group: dict[str, Any]) -> int:
    """How the kernel rounds before it stores; other dtypes are left to the hardware."""
    if array is None or array.dtype != torch.bfloat16:
        return 0
    return 2 if group["stochastic_rounding"] else 1


def _launch(
    kernel: Any,
    rows: Rows,
    moment: Tensor | None,
    group: dict[str, Any],
    *arguments: Any,
    **options: Any,
) -> None:
    count, width = rows.param.shape[0], max(rows.param.shape[1:].numel(), 1)
    columns = 1 << (width - 1).bit_length()
    block = max(1, TILE // columns)
    device = rows.param.device.index if rows.param.device.type == "cuda" else -1
    with torch.cuda.device(device):  # triton launches on the current one; -1 leaves it alone
        kernel[(-(-count // block),)](
            rows.param,
            rows.grad,
            rows.param if moment is None else moment,
            *arguments,
            count,
            width,
            rows.first_entry,
            HAS_MOMENT=moment is not None,
            LAZY=group["lazy"],
            ROUND_PARAM=_rounding(rows.param, group),
            ROUND_MOMENT=_rounding(moment, group),
            **options,
            BLOCK_ROWS=block,
            BLOCK_COLUMNS=columns,
        )


def adam(rows: Rows, numbers: Tensor, group: dict[str, Any]) -> None:
    from largemargin.heads.optim.triton_kernels import adam_rows

    beta1, beta2 = group["betas"]
    arguments = rows.state["second"], numbers, 1 - beta1, 1 - beta2, group["eps"]
    _launch(adam_rows, rows, rows.state.get("first"), group, *arguments)


def sgd(rows: Rows, numbers: Tensor, group: dict[str, Any]) -> None:
    from largemargin.heads.optim.triton_kernels import sgd_rows

    arguments = numbers, group["momentum"], group["weight_decay"]
    moment = rows.state.get("momentum")
    _launch(sgd_rows, rows, moment, group, *arguments, NESTEROV=group["nesterov"])
