"""What the optimizers of heads share: state by rows, shards, scaled gradients, loading, rounding.

A bfloat16 number has 8 significant bits. Rounded to nearest, a change below 1/512 of a number is
lost, every time; rounded up or down at random it arrives with the probability that makes its mean
right. The random bits are a hash of entry, step and array, so a step can be repeated, on any device
and over any number of processes, bit for bit.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largemargin.errors import LargeMarginError, check_number
from largemargin.ops.shards import class_range, is_sharded, local_part

BLOCK_NUMBERS = {"cpu": 2**18}
"""Entries updated at a time without a fused kernel: what the cache of a core holds, ..."""
OTHER_BLOCK = 2**22
"""... or that of a GPU."""


class Rows(NamedTuple):
    """A parameter on this process, its gradient and state, all with rows along dimension 0."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    first_entry: int
    """Entries that stand before it, on other processes."""

    def blocks(self) -> Iterator[slice]:
        """Parts of the rows; large ones for a compiler, which needs no copies."""
        count, width = self.param.shape[0], self.param.shape[1:].numel()
        most = BLOCK_NUMBERS.get(self.param.device.type, OTHER_BLOCK)
        if torch.compiler.is_compiling():
            most = 2**30  # as many as 32 bits can number
        step = max(1, most // max(width, 1))
        for start in range(0, count, step):
            yield slice(start, start + step)

    def by_row(self, per_row: Tensor) -> Tensor:
        """(R,) numbers in the shape that multiplies rows."""
        return per_row.view(-1, *[1] * (self.param.dim() - 1))


class RowOptimizer(Optimizer):
    """Steps parameter by parameter, row by row; see the two that are made of it."""

    # GradScaler then hands over scale and overflow as tensors instead of reading them back.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, **defaults: Any) -> None:
        lr, dtype = defaults["lr"], defaults["moment_dtype"]
        if not isinstance(lr, Tensor):
            check_number("lr", lr, at_least=0)
        elif lr.numel() != 1:
            raise LargeMarginError(
                f"lr must be a number or a tensor of one, but its shape is {tuple(lr.shape)}."
            )
        check_number("weight_decay", defaults["weight_decay"], at_least=0)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise LargeMarginError(
                "moment_dtype must be a floating point torch.dtype, as torch.bfloat16, or None for "
                f"that of the parameters, but {dtype!r} was given."
            )
        # The step counter lives on the device, so a CUDA graph may hold a step.
        super().__init__(params, {**defaults, "capturable": True})

    @abstractmethod
    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of one parameter, beside ``step``."""

    @abstractmethod
    def _update(self, rows: Rows, group: dict[str, Any], scale: Tensor, keep: Tensor) -> None:
        """One step of one parameter.

        ``scale`` multiplies the gradient (its sign included), ``keep`` is 1, or 0 where the step
        is to be skipped: 0-dim tensors in the dtype of the computation.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` does, where one is given to compute the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group)
        return loss

    def _step_one(self, param: Tensor, group: dict[str, Any]) -> None:
        _check(param)
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state.update(self._new_state(param, group))
        rows = _local_rows(param, state)
        like: Any = {"dtype": compute_dtype(param), "device": rows.param.device}
        scale = torch.full((), -1.0 if group["maximize"] else 1.0, **like)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if grad_scale is not None:
            scale = scale / grad_scale.to(**like)
        keep = torch.ones((), **like)
        if found_inf is not None:
            keep = keep - found_inf.to(**like).view(())
        state["step"].add_(keep.to(torch.float32))
        if rows.param.numel() > 0:  # a process without rows counts its steps all the same
            self._update(rows, group, scale, keep)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps the dtype it was saved in, whatever the parameters' is."""
        seen: list[dict[str, Any]] = []
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved, groups = seen[-1], self.param_groups
        names = [name for group in saved["param_groups"] for name in group["params"]]
        params = [param for group in groups for param in group["params"]]
        for name, param in zip(names, params, strict=True):
            for key, value in saved["state"].get(name, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[param][key].dtype:
                    self.state[param][key] = value.to(param.device, copy=True)


def rate(group: dict[str, Any], like: Tensor) -> Tensor:
    """The learning rate as a 0-dim tensor beside ``like``."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        return lr.to(device=like.device, dtype=like.dtype).view(())
    return torch.full_like(like, lr)


def row_zeros(param: Any, dtype: torch.dtype) -> Tensor:
    """One 0 for every row, cut over processes as the rows are."""
    if not is_sharded(param):
        return torch.zeros(_as_rows(param).shape[0], dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor

    local = torch.zeros(param.to_local().shape[0], dtype=dtype, device=param.device)
    shape = torch.Size((param.shape[0],))
    zeros: Tensor = DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=(1,)
    )
    return zeros


def compute_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _check(param: Any) -> None:
    if param.grad.is_sparse:
        raise LargeMarginError(
            "gradients must be dense, but a sparse one was given (nn.Embedding with sparse=True?). "
            "Rows whose gradient is 0 are left alone with lazy=True."
        )
    if not param.is_floating_point():
        raise LargeMarginError(f"parameters must be real numbers, but one is {param.dtype}.")
    if is_sharded(param) and not all(
        place.is_replicate() or place.is_shard(dim=0) for place in param.placements
    ):
        raise LargeMarginError(
            "a sharded parameter must be cut between its rows, with placements Shard(0), because "
            f"a row is stepped as one, but its placements are {list(param.placements)}."
        )


def _as_rows(x: Tensor) -> Tensor:
    return x.view(1) if x.dim() == 0 else x


def _local_rows(param: Any, state: dict[str, Tensor]) -> Rows:
    grad, first = param.grad, 0
    if is_sharded(param):
        if is_sharded(grad) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        mesh = param.device_mesh
        if mesh.ndim == 1 and param.placements[0].is_shard(dim=0):
            _, first = class_range(param.shape[0], mesh.size(), mesh.get_local_rank())
            first *= param.shape[1:].numel()
    local = {name: _as_rows(local_part(value)) for name, value in state.items()}
    return Rows(_as_rows(local_part(param)), _as_rows(local_part(grad)), local, first)


FACTORS = (0x7FEB352D, 0x846CA68B)
"""Of a 32-bit mixing function with three shifts, 16, 15 and 16."""
STRIDE = 0x9E3779B1
"""Sets apart the hashes of consecutive steps."""
PARAMETER, MOMENT = 1, 2
"""Arrays that are rounded in the same step and must not be rounded alike."""


def _signed(number: int) -> int:
    """The int32 with the bits of an unsigned number, modulo 2^32: torch has no arithmetic of
    unsigned numbers everywhere, but multiplies signed ones modulo 2^32 all the same.
    """
    return (number + 2**31) % 2**32 - 2**31


def mixed(x: Tensor) -> Tensor:
    """A hash of int32 numbers, in place; masks make up for the sign that shifts bring in."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(FACTORS[0])
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(FACTORS[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def seed_of(step: Tensor, array: int) -> Tensor:
    """What the hashes of one step and one array start from, 0-dim."""
    return mixed(step.int() * _signed(STRIDE) + array)


def round_at_random(x: Tensor, seed: Tensor, first_entry: int) -> Tensor:
    """Entries of an array to bfloat16; ``first_entry`` counts those that stand before it."""
    x = x.float().contiguous()
    index = torch.arange(x.numel(), device=x.device, dtype=torch.int32)
    index += _signed(first_entry)
    index ^= seed
    bits = mixed(index).view(x.shape)
    bits &= 0xFFFF
    bits += x.view(torch.int32)
    bits &= -0x10000
    return torch.where(x == x, bits.view(torch.float32), x).to(torch.bfloat16)


def store(target: Tensor, value: Tensor, seed: Tensor | None, first_entry: int) -> None:
    """Write ``value`` into ``target``, at random where a seed is given and it is bfloat16."""
    if seed is not None and target.dtype == torch.bfloat16:
        value = round_at_random(value, seed, first_entry)
    target.copy_(value)
