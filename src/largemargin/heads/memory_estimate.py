"""How much memory a head takes while it is trained, before anything is allocated."""

import textwrap
from dataclasses import asdict, dataclass

import torch

from largemargin.errors import LargeMarginError, check_choice, check_num_classes, check_number
from largemargin.ops.chunked import block_size
from largemargin.ops.dense import dense_limit
from largemargin.ops.shards import class_range
from largemargin.ops.triton.chunks import chunk_bytes

OPTIMIZERS: dict[str, tuple[int, int]] = {
    "sgd": (0, 1),
    "sgd_momentum": (1, 1),
    "adagrad": (1, 2),
    "rmsprop": (1, 2),
    "adam": (2, 3),
    "adamw": (2, 2),
}
"""Arrays of the parameters' size that torch's optimizers keep, and make for a step (unfused, with
weight decay)."""

HEAD_OPTIMIZERS: dict[str, tuple[int, int]] = {"rowwise_adam": (2, 4), "head_sgd": (2, 0)}
"""Bytes that ``largemargin.heads.optim`` keeps for each number, in bfloat16, and for each row."""

PLANNED_IMPLS = ("auto", "dense", "chunked", "triton")
DEVICES = ("cuda", "cpu")
WIDE = 4
"""Bytes of a float32 number, in which statistics and their factors are held."""

LEFT_OUT = (
    "the backbone, its activations, gradients and optimizer state",
    "the CUDA context and libraries (about 0.5 GiB), and what the allocator cannot reuse",
    "buffers of NCCL, and of DistributedDataParallel for the backbone",
    "losses beyond one: terms of an Objective keep their statistics side by side",
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the process that holds the most classes; see :func:`estimate_memory`."""

    num_samples: int
    num_classes: int
    dim: int
    world_size: int
    optimizer: str
    dtype: str
    impl: str
    """As given, or what "auto" means for these sizes."""
    sample_rate: float
    local_classes: int
    """Classes on this process."""
    weights: int
    gradients: int
    optimizer_state: int
    features: int
    """The batch of all processes: gathered, normalised, scaled, and its gradient."""
    workspace: int
    """What the statistics need beside that, forward and backward."""
    step: int
    """What the optimizer needs while it steps, when features and workspace are gone."""

    @property
    def kept(self) -> int:
        """Bytes held between steps: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """Bytes at the peak of a training step."""
        return self.kept + max(self.features + self.workspace, self.step)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is not counted."""
        return LEFT_OUT

    def fits(self, gib: float) -> bool:
        """Whether the peak stays within so many GiB; leave room for what is left out."""
        return self.total <= gib * 2**30

    def as_dict(self) -> dict[str, object]:
        """Every number by its name, for JSON."""
        return {**asdict(self), "total": self.total, "left_out": list(self.left_out)}

    def __str__(self) -> str:
        rows = {
            "weights": self.weights,
            "gradients": self.gradients,
            f"optimizer state ({self.optimizer})": self.optimizer_state,
            "features of all processes": self.features,
            f"workspace ({self.impl})": self.workspace,
            "optimizer step": self.step,
            "peak": self.total,
        }
        sampled = "" if self.sample_rate == 1 else f", {self.sample_rate:g} of them sampled"
        head = (
            f"{self.num_classes:,} classes{sampled}, {self.dim} dimensions, {self.dtype}, "
            f"{self.num_samples:,} samples a process, {self.world_size:,} "
            f"{'process' if self.world_size == 1 else 'processes'}: "
            f"{self.local_classes:,} classes each"
        )
        lines = [f"  {name:<34}{value / 2**30:>10.3f} GiB" for name, value in rows.items()]
        missing = "Not counted: " + "; ".join(self.left_out) + "."
        return "\n".join([head, *lines, textwrap.fill(missing, 100)])


def estimate_memory(
    num_samples: int,
    num_classes: int,
    dim: int,
    *,
    world_size: int = 1,
    optimizer: str = "sgd_momentum",
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
    sample_rate: float = 1.0,
    device: str = "cuda",
) -> MemoryEstimate:
    r"""Memory of a :class:`ShardedClassHead` (one process: of any head) in a training step.

    With n = N R gathered samples and :math:`C_R = \lceil C/R\rceil` classes a process, in numbers:

    ==================  =========================================================================
    weights, gradients  :math:`C_R D` each, in ``dtype``
    optimizer state     a multiple of it: 0 ("sgd"), 1 ("sgd_momentum"), 2 ("adamw"), ...; 2 bytes
                        a number for "rowwise_adam" and "head_sgd"
    features            4 n D float32
    workspace           "triton": 96 MiB, 192 from half a million classes on, or what fewer need;
                        "chunked", blocks of B classes: 4 n B + 3 B D; "dense":
                        :math:`6\,n\,C_R + 2\,C_R D`; for these two and half precision prototypes
                        :math:`2\,C_R D` more, their float32 copy and its gradient; a class sample:
                        its rows twice
    step                temporaries of an unfused optimizer, 1 to 3 times :math:`C_R D`; with
                        ``fused=True`` 0
    ==================  =========================================================================

    The peak is weights + gradients + state + max(features + workspace, step). The factors are
    upper bounds measured on this library's losses (Kobayashi's needs the most); ``left_out`` says
    what is not counted.

    Args:
        num_samples: N, the batch of one process.
        num_classes: C.
        dim: D.
        world_size: R, processes that share the classes, one GPU each.
        optimizer: "sgd", "sgd_momentum", "adagrad", "rmsprop", "adam" or "adamw" of torch;
            "rowwise_adam" or "head_sgd" of ``largemargin.heads.optim`` with its moment in bfloat16.
        fused: whether the optimizer is made with ``fused=True``.
        dtype: of the class vectors.
        impl: of the statistics; "auto" decides as ``class_stats`` does, on a GPU with bfloat16
            products (autocast).
        sample_rate: of the classes, as in :class:`ShardedClassHead`.
        device: "cuda" or "cpu", which takes smaller blocks.

    Example:
        >>> plan = estimate_memory(1024, 1_000_000, 512, world_size=8, optimizer="adamw")
        >>> plan.local_classes, round(plan.total / 2**30, 2), plan.fits(80)
        (125000, 1.43, True)
    """
    check_number("num_samples", num_samples, at_least=0, hint="N is the batch of one process.")
    check_num_classes(num_classes)
    check_number("dim", dim, at_least=1)
    check_number("world_size", world_size, at_least=1)
    check_choice("optimizer", optimizer, (*OPTIMIZERS, *HEAD_OPTIMIZERS))
    check_choice("impl", impl, PLANNED_IMPLS)
    check_number("sample_rate", sample_rate, above=0, at_most=1)
    check_choice("device", device, DEVICES)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise LargeMarginError(
            f"dtype must be a floating point torch.dtype, as torch.bfloat16, but {dtype!r} was "
            "given."
        )
    local, _ = class_range(num_classes, world_size, 0)
    gathered = num_samples * world_size
    seen = min(local, int(sample_rate * local) + gathered) if sample_rate < 1 else local
    if impl == "auto":
        many = "triton" if device == "cuda" and dtype != torch.float64 else "chunked"
        limit = dense_limit(device, None if dtype == torch.float64 else "bf16")
        impl = "dense" if gathered * seen <= limit else many
    size = local * dim * dtype.itemsize
    kept, temporary = OPTIMIZERS.get(optimizer, (0, 0))
    a_number, a_row = HEAD_OPTIMIZERS.get(optimizer, (0, 0))
    return MemoryEstimate(
        num_samples=num_samples,
        num_classes=num_classes,
        dim=dim,
        world_size=world_size,
        optimizer=optimizer,
        dtype=str(dtype).removeprefix("torch."),
        impl=impl,
        sample_rate=sample_rate,
        local_classes=local,
        weights=size,
        gradients=size,
        optimizer_state=kept * size + local * (a_number * dim + a_row),
        features=4 * gathered * dim * max(WIDE, dtype.itemsize),
        workspace=_workspace(gathered, seen, local, dim, dtype, impl, sample_rate < 1, device),
        step=0 if fused else temporary * size,
    )


def _workspace(
    samples: int,
    seen: int,
    local: int,
    dim: int,
    dtype: torch.dtype,
    impl: str,
    sampled: bool,
    device: str,
) -> int:
    number = max(WIDE, dtype.itemsize)
    if impl == "dense":
        needed = number * (6 * samples * seen + 2 * seen * dim)
    elif impl == "triton":
        # A chunk's gradients and copy, norms, and the features in bfloat16 as they are and turned.
        needed = min(chunk_bytes(seen), 2 * seen * (samples + dim)) + WIDE * (seen + samples * dim)
    else:
        block = block_size(samples, seen, device)
        needed = number * (4 * samples * block + 3 * block * dim)
    if dtype.itemsize < WIDE and impl != "triton":
        needed += 2 * number * seen * dim
    if sampled:
        # Rows and their gradient, and a random number, an index and two marks for every class.
        needed += 2 * dtype.itemsize * seen * dim + 32 * local
    return needed


def most_classes(
    gib: float,
    num_samples: int,
    dim: int,
    *,
    world_size: int = 1,
    optimizer: str = "sgd_momentum",
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
    sample_rate: float = 1.0,
) -> int:
    """The most classes whose head stays within ``gib`` GiB a process; 0 if not even two do.

    Example:
        >>> f"{most_classes(60, 1024, 512, optimizer='sgd'):.1e}"
        '1.0e+07'
    """
    check_number("gib", gib, above=0)

    def fits(classes: int) -> bool:
        estimate = estimate_memory(
            num_samples,
            classes,
            dim,
            world_size=world_size,
            optimizer=optimizer,
            fused=fused,
            dtype=dtype,
            impl=impl,
            sample_rate=sample_rate,
        )
        return estimate.fits(gib)

    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    # "auto" changes from dense to the others, so small heads are not monotone; large ones are.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low >= 2 else 0
