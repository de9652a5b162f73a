"""Class vectors that several processes hold together: a DTensor cut along the class dimension.

Gradients follow the convention of data parallel training. A process's loss is an average over its
own samples, and the loss of the run is the average over the processes. So the gradient of a shard
is the mean over the processes of what their samples ask for (nobody averages it afterwards), while
the gradient of a process's features is left whole: DDP averages what the backbone makes of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.ops.norms import promote


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. (By what it can do: importing the class takes seconds.)"""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """The rows of a DTensor on this process; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def is_shared(prototypes: object) -> bool:
    """Whether statistics are made of parts: of several processes, or of a sample of the classes."""
    return hasattr(prototypes, "full_tensor") or hasattr(prototypes, "class_sample")


def refuse_sharded(tensor: object, name: str, reason: str) -> None:
    """Explain that a computation needs all class vectors in one place."""
    if is_shared(tensor):
        raise LargeMarginError(
            f"{name} cannot be computed on sharded or sampled class vectors: {reason} "
            "Losses on class statistics can (CosFace, ArcFace, LM-Softmax, Kobayashi, "
            "cross entropy, ...); for others keep all class vectors on every process, as in "
            "ClassHead."
        )


class ClassSample(NamedTuple):
    """A random part of the classes: which is a function of these three numbers and the class."""

    rate: float
    """Probability of each class that no sample of the batch has."""
    seed: int
    draw: int
    """How many samples were taken before."""


class Shard(NamedTuple):
    """The class vectors of this process, and who holds the others."""

    columns: Tensor
    """(C_r, D), with gradient."""
    bias: Tensor | None
    offset: int
    """Class of the first row."""
    num_classes: int
    """C, of all processes."""
    group: Any
    """Process group, None for one process without a group."""
    sample: ClassSample | None

    @property
    def processes(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def shard_of(prototypes: Tensor, bias: Tensor | None) -> Shard:
    """The part of a DTensor, or of a plain tensor that is all there is, on this process."""
    sample = getattr(prototypes, "class_sample", None)
    if not is_sharded(prototypes):
        return Shard(prototypes, bias, 0, prototypes.shape[0], None, sample)
    weight: Any = prototypes
    mesh, num_classes = weight.device_mesh, weight.shape[0]
    by_class = len(weight.placements) == 1 and weight.placements[0].is_shard(dim=0)
    if not by_class:
        raise LargeMarginError(
            "sharded prototypes must be cut along the classes, over one mesh dimension: a DTensor "
            f"with placements [Shard(0)], but theirs are {list(weight.placements)}. Pass "
            'mesh["name"] of a larger mesh.'
        )
    if bias is not None and not is_sharded(bias):
        raise LargeMarginError(
            "bias must be sharded like the prototypes, but a plain tensor was given. "
            "ShardedClassHead(..., bias=True) makes one."
        )
    _, offset = class_range(num_classes, mesh.size(), mesh.get_local_rank())
    own_bias = None if bias is None else bias.to_local()  # type: ignore[attr-defined]
    return Shard(weight.to_local(), own_bias, offset, num_classes, mesh.get_group(), sample)


def sum_of_shards(own: Tensor, shard: Shard) -> Tensor:
    """The sum over processes of what each made of its shard, to which the gradient stays."""
    if shard.group is None:
        return own
    total = own.detach().clone()
    dist.all_reduce(total, group=shard.group)
    return total + (own - own.detach())


def class_range(num_classes: int, processes: int, rank: int) -> tuple[int, int]:
    """Number and first of a process's classes, as DTensor cuts: ceil(C / R) each, the rest last."""
    each = -(-num_classes // processes)
    first = min(rank * each, num_classes)
    return min(each, num_classes - first), first


def cut_like(prototypes: Any, values: Tensor) -> Tensor:
    """One number per class that every process knows, cut as the class vectors are."""
    if not is_sharded(prototypes):
        return values
    from torch.distributed.tensor import DTensor

    mesh = prototypes.device_mesh
    count, first = class_range(len(values), mesh.size(), mesh.get_local_rank())
    return DTensor.from_local(
        values[first : first + count],
        mesh,
        prototypes.placements,
        run_check=False,
        shape=values.shape,
        stride=values.stride(),
    )


class Joined(NamedTuple):
    """The batches of all processes, in the order of their ranks."""

    features: Tensor
    labels: Tensor
    sizes: tuple[int, ...]
    start: int
    """Where the rows of this process begin."""
    group: Any

    @property
    def own(self) -> slice:
        return slice(self.start, self.start + self.sizes[_rank(self.group)])


def join_batches(features: Tensor, labels: Tensor, group: Any) -> Joined:
    """Gather features, with gradient, and labels of all processes; any number of rows each."""
    if group is None:
        return Joined(promote(features), labels, (features.shape[0],), 0, None)
    differentiable = features.requires_grad and torch.is_grad_enabled()
    mine = torch.tensor([features.shape[0], differentiable], device=features.device)
    everyone = mine.new_empty(2 * dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    counts = everyone.view(-1, 2).tolist()
    sizes = tuple(count for count, _ in counts)
    start = sum(sizes[: _rank(group)])
    if torch.is_grad_enabled() and any(wanted for _, wanted in counts) and not differentiable:
        # The others will wait for this process in the backward pass: an empty batch, say.
        features = features.detach().requires_grad_()
    rows: Tensor = _JoinRows.apply(features, sizes, group)
    return Joined(rows, gather_rows(labels, sizes, group), sizes, start, group)


def gather_rows(rows: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """Rows of all processes below each other, outside autograd; ``sizes`` says how many each."""
    if group is None:
        return rows
    longest = max(sizes)
    padded = _padded(rows, longest)
    gathered = rows.new_empty(len(sizes) * longest, *rows.shape[1:])
    if longest:
        dist.all_gather_into_tensor(gathered, padded.contiguous(), group=group)
    if min(sizes) == longest:
        return gathered
    starts = range(0, len(sizes) * longest, longest)
    pairs = zip(starts, sizes, strict=True)
    return torch.cat([gathered[start : start + size] for start, size in pairs])


def _padded(rows: Tensor, length: int) -> Tensor:
    if rows.shape[0] == length:
        return rows
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


class _JoinRows(torch.autograd.Function):
    """Gathered in the dtype they come in, handed on in float32 at least: so is their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], group: Any) -> Tensor:
        ctx.sizes, ctx.group, ctx.dtype = sizes, group, rows.dtype
        return promote(gather_rows(rows.contiguous(), sizes, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), sizes, longest = grads, ctx.sizes, max(ctx.sizes)
        with torch.no_grad():
            mine = grad.new_zeros(longest, grad.shape[1])
            if longest:
                parts = [_padded(part, longest) for part in torch.split(grad, sizes)]
                dist.reduce_scatter_tensor(mine, torch.cat(parts), group=ctx.group)
            # Statistics hand down the mean over processes, which is for the shards: see above.
            own = mine[: sizes[_rank(ctx.group)]].mul_(len(sizes)).to(ctx.dtype)
        return once(own, grad), None, None


SHARED_ONCE = (
    "statistics of sharded or sampled class vectors can be differentiated once only. Keep all "
    "class vectors in one process, as in ClassHead, for second derivatives."
)


class _Once(torch.autograd.Function):
    """Passes a gradient on and explains itself when somebody differentiates it again."""

    @staticmethod
    def forward(ctx: Any, message: str, result: Tensor, *anchors: Tensor) -> Tensor:
        ctx.message = message
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise LargeMarginError(ctx.message)


def once(result: Tensor, *sources: Tensor, message: str = SHARED_ONCE) -> Tensor:
    """What a backward pass made of ``sources``, outside autograd; a second one says so."""
    if not (torch.is_grad_enabled() and any(source.requires_grad for source in sources)):
        return result
    marked: Tensor = _Once.apply(message, result, *sources)
    return marked


class _Times(torch.autograd.Function):
    """The same value with a multiple of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def times_gradient(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by a number on its way down."""
    if factor == 1:
        return x
    same: Tensor = _Times.apply(x, factor)
    return same


class _Whole(torch.autograd.Function):
    """The whole weight on every process; its gradient is averaged, as FSDP averages, and cut."""

    @staticmethod
    def forward(ctx: Any, sharded: Any) -> Tensor:
        ctx.mesh, ctx.placements = sharded.device_mesh, sharded.placements
        whole: Tensor = sharded.full_tensor()
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        mine = grads[0] / ctx.mesh.size()
        partial = DTensor.from_local(mine, ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(placements=ctx.placements)


def gathered(weight: Tensor) -> Tensor:
    """The weight itself, or all of it where this process holds a shard only."""
    if not hasattr(weight, "full_tensor"):
        return weight
    whole: Tensor = _Whole.apply(weight)
    return whole
