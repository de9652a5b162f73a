"""Launching small kernels by what was compiled for arguments of the same kind.

Triton binds and specialises all arguments anew at every launch, which takes longer than a small
kernel runs. Here arguments that would be specialised alike are recognised by one tuple.
"""

from typing import Any

import torch
from torch import Tensor

from largemargin.ops.triton.availability import INTERPRETED

WIDE = 2**31
"""From here on numbers are compiled as 64-bit ones."""


class Kernel:
    """``kernel(grid, *args, num_warps=...)`` of a jitted function: all of its arguments, in order.

    Numbers that are not ``constexpr`` must be int or float as the function means them.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.constant = tuple(each.is_constexpr for each in getattr(function, "params", ()))

    def __call__(self, grid: tuple[int, int, int], *args: Any, num_warps: int) -> None:
        if INTERPRETED:
            self.function[grid](*args, num_warps=num_warps)
            return
        key: list[Any] = [torch.cuda.current_device(), num_warps]
        for arg, constant in zip(args, self.constant, strict=True):
            if isinstance(arg, Tensor):
                key.append((arg.dtype, arg.data_ptr() % 16 == 0))
            elif constant or type(arg) is float:
                key.append(arg if constant else float)
            else:
                key.append((arg == 1, arg % 16 == 0, -WIDE <= arg < WIDE))
        found = tuple(key)
        compiled = self.compiled.get(found)
        if compiled is None:
            self.compiled[found] = self.function[grid](*args, num_warps=num_warps)
        else:
            compiled[grid](*args)
