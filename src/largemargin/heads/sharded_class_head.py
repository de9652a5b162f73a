"""``ShardedClassHead``: class vectors that several processes hold together."""

import math
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_count, check_number
from largemargin.heads.centroid_bank import recomputing
from largemargin.heads.class_head import ClassHead
from largemargin.heads.topk import TopClasses, best_of, flat_features, top_classes
from largemargin.ops.distributed import world_size
from largemargin.ops.shards import (
    ClassSample,
    class_range,
    gather_rows,
    gathered,
    is_sharded,
    join_batches,
    local_part,
    shard_of,
)
from largemargin.ops.similarity import similarity_logits
from largemargin.shapes import Logits

DeviceMesh: TypeAlias = Any
"""``torch.distributed.device_mesh.DeviceMesh``, whose import takes seconds."""

BLOCK = 4096
"""Classes that are initialised from one seed."""


class ShardedClassHead(ClassHead):
    r"""A :class:`ClassHead` whose classes are spread over the processes of a device mesh.

    Each of R processes holds ceil(C/R) rows of ``weight`` (and ``bias``), a ``DTensor`` with
    placement ``Shard(0)``; gradients and optimizer state are cut the same way. Give it to a loss
    where prototypes stand, on every process, with that process's own batch:

        head = ShardedClassHead(512, 1_000_000, similarity="cosine")
        loss = lm.CosFace(sync=True)
        loss(backbone(x), head, labels).backward()

    Features are gathered, each process computes the class statistics of all samples over its own
    classes, and those are combined: values and gradients equal those of one process with all
    classes, to rounding. Wrap the backbone in DistributedDataParallel, the head in nothing. As with
    DDP the gradients are those of the average over processes of their losses; that is the mean over
    the joined batch when batches are equal, or with ``sync=True``.

    Every call is a joint one: all processes of the mesh have to call the loss, ``backward``,
    ``predict`` and ``forward`` in the same order, with any number of samples each, also none.
    Without a process group it is an ordinary head with ordinary parameters.

    Losses that are functions of the class statistics take it (CosFace, ArcFace, LM-Softmax,
    NormFace, GM-Softmax, Kobayashi, cross entropy, focal, the largest-rival hinges, ...), with hard
    labels. Others say why they cannot.

    **Sampling.** With ``sample_rate`` r < 1, in training mode, a loss sees the classes of the joint
    batch and each other class with probability r (as PartialFC, An et al. 2022), drawn anew for
    every loss value. Time and memory of the statistics shrink by r; gradients are dense, and 0 for
    classes that were not drawn (momentum and decay still move those, unless the optimizer of
    :mod:`largemargin.heads.optim` is ``lazy``). The loss is then another one: ``rest`` misses the
    mass of what was not drawn, so with many rivals of similar logits it is too small by about
    log(1/r), as if the margin were smaller by log(1/r)/s; ``rival`` is at most the true one; only
    ``mean`` is unbiased but for the classes of the batch, which are always in. The sample depends
    on ``seed``, on how many were drawn before (``draws``) and on the class, not on the number of
    processes.

    **Checkpoints.** ``torch.distributed.checkpoint`` saves the state as one (C, D) tensor, which
    any number of processes can load. ``load_state_dict`` also takes the state of a ``ClassHead``.

    Args:
        in_features: D.
        num_classes: C, at least 2; need not be a multiple of R.
        mesh: a 1-D ``DeviceMesh``, or one dimension of a larger one, ``mesh["classes"]``. Default:
            all processes, or none where there is no process group.
        similarity, scale, bias, dtype: as in :class:`ClassHead`.
        sample_rate: r in (0, 1], default 1: all classes.
        seed: of the samples; the same on all processes.
        device: default that of the mesh. On ``"meta"`` nothing is made until
            ``head.to_empty(device=...)``; then call ``reset_parameters()`` or load a state.

    Example:
        >>> head = ShardedClassHead(8, 5, similarity="cosine")
        >>> loss = CosFace(scale=8.0)(torch.randn(3, 8), head, torch.tensor([0, 4, 2]))
        >>> head.predict(torch.randn(3, 8), k=2).classes.shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        mesh: DeviceMesh | None = None,
        similarity: str = "dot",
        scale: float = 1.0,
        bias: bool | None = None,
        sample_rate: float = 1.0,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            num_classes,
            similarity=similarity,
            scale=scale,
            bias=bias,
            device="meta",
            dtype=dtype,
        )
        check_number("sample_rate", sample_rate, above=0, at_most=1, hint="1 takes all classes.")
        check_count("seed", seed, at_least=0)
        self.sample_rate = float(sample_rate)
        self.seed = seed
        self.draws = 0
        """Class samples drawn so far; set it to go on with the same samples after a restart."""
        mesh = _mesh(mesh, device)
        if device is None and mesh is not None:
            deferred = torch.get_default_device().type == "meta"  # inside torch.device("meta")
            device = "meta" if deferred else _device_of(mesh)
        self.weight = _empty_shard(self.weight, mesh, device)
        if self.bias is not None:
            self.bias = _empty_shard(self.bias, mesh, device)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        similarity: str = "dot",
        scale: float = 1.0,
        bias: bool | None = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> Self:
        """A head with copies of the rows of ``linear``, which every process has to hold whole."""
        source = ClassHead.from_linear(linear, similarity=similarity, scale=scale, bias=bias)
        head = cls(
            linear.in_features,
            linear.out_features,
            mesh=mesh,
            similarity=similarity,
            scale=scale,
            bias=source.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            **options,
        )
        head.load_state_dict(source.state_dict())
        return head.train(linear.training)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh the classes are spread over; None for one process without a group."""
        return getattr(self.weight, "device_mesh", None)

    @property
    def local_classes(self) -> range:
        """The classes this process holds."""
        mesh = self.mesh
        if mesh is None:
            return range(self.num_classes)
        count, first = class_range(self.num_classes, mesh.size(), mesh.get_local_rank())
        return range(first, first + count)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as :class:`ClassHead` does, the same whatever the number of processes.

        The numbers follow from the first process's random state: blocks of 4096 classes are drawn
        from a seed each, and a process draws those that overlap its own.
        """
        if self.weight.is_meta:
            return
        weight = local_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias)
        seed, bound, mine = self._joint_seed(), 1 / math.sqrt(self.in_features), self.local_classes
        for first in range(mine.start - mine.start % BLOCK, mine.stop, BLOCK):
            draw = torch.Generator(weight.device).manual_seed(seed + first)
            rows = weight.new_empty(BLOCK, self.in_features)
            offsets = weight.new_zeros(BLOCK)
            if self.similarity == "dot":
                rows.uniform_(-bound, bound, generator=draw)
                offsets.uniform_(-bound, bound, generator=draw)
            else:
                rows.normal_(std=bound, generator=draw)
            start, stop = max(first, mine.start), min(first + BLOCK, mine.stop)
            here = slice(start - mine.start, stop - mine.start)
            weight[here] = rows[start - first : stop - first]
            if bias is not None:
                bias[here] = offsets[start - first : stop - first]

    def _joint_seed(self) -> int:
        """A number from the random state of the mesh's first process."""
        seed = torch.randint(2**40, ())
        if self.mesh is not None:
            seed = seed.to(self.weight.device)
            dist.broadcast(seed, group=self.mesh.get_group(), group_src=0)
        return int(seed)

    def draw_weight(self) -> Tensor:
        """What a loss computes with: ``weight``, in training mode with a new sample of classes."""
        if self.sample_rate == 1 or not self.training:
            return self.weight
        if recomputing():
            raise LargeMarginError(
                "activation checkpointing computes this loss a second time, and the head would "
                "draw other classes for it. Checkpoint the backbone only, or pass sample_rate=1."
            )
        view = self.weight.view_as(self.weight)
        view.class_sample = ClassSample(self.sample_rate, self.seed, self.draws)  # type: ignore[attr-defined]
        self.draws += 1
        return view

    def forward(self, features: Tensor) -> Logits:
        return self.logits(features)

    def logits(self, features: Tensor) -> Logits:
        """All logits (..., C), with the class vectors gathered on every process: for small C."""
        logits = similarity_logits(
            flat_features(features, self.in_features),
            gathered(self.weight),
            bias=None if self.bias is None else gathered(self.bias),
            similarity=self.similarity,
            scale=self.scale,
        )
        return logits.reshape(*features.shape[:-1], self.num_classes)

    @torch.no_grad()
    def predict(
        self,
        features: Tensor,
        k: int = 1,
        *,
        chunk_size: int | None = None,
        precision: str | None = None,
    ) -> TopClasses:
        """The k best classes of this process's samples and their logits, best first.

        Each process ranks its own classes for all samples, and the best of the best are taken:
        R k candidates per sample are exchanged. Equal logits are ordered by class index.
        """
        check_count(
            "k", k, at_least=1, at_most=self.num_classes, hint="It counts classes to return."
        )
        flat = flat_features(features, self.in_features)
        shard = shard_of(self.weight, self.bias)
        nobody = torch.zeros(flat.shape[0], dtype=torch.long, device=flat.device)
        joined = join_batches(flat, nobody, shard.group)
        # The type of all scores, float32 at least, which a process without classes has to know too.
        # Places for no class come after classes of bias minus infinity.
        dtype = torch.promote_types(joined.features.dtype, shard.columns.dtype)
        found = joined.features.new_full((len(joined.labels), k), -torch.inf, dtype=dtype)
        classes = torch.zeros_like(found, dtype=torch.long)
        if shard.columns.shape[0]:
            here = min(k, shard.columns.shape[0])
            best = top_classes(
                joined.features,
                shard.columns,
                bias=shard.bias,
                similarity=self.similarity,
                scale=self.scale,
                k=here,
                chunk_size=chunk_size,
                precision=precision,
            )
            found[:, :here] = best.scores.clamp_min(torch.finfo(dtype).min)
            classes[:, :here] = best.classes + shard.offset
        found, classes = self._own_candidates(found, joined), self._own_candidates(classes, joined)
        # Lower classes stand to the left, and ties go to the left.
        scores, order = best_of(found, k)
        scores = scores.masked_fill(scores == torch.finfo(scores.dtype).min, -torch.inf)
        parts = scores, classes.gather(1, order)
        return TopClasses(*(part.reshape(*features.shape[:-1], k) for part in parts))

    def _own_candidates(self, found: Tensor, joined: Any) -> Tensor:
        """(n, R k) candidates of all processes for the samples of this one."""
        everyone = gather_rows(found, [found.shape[0]] * len(joined.sizes), joined.group)
        parts = everyone.reshape(len(joined.sizes), *found.shape)[:, joined.own]
        return parts.transpose(0, 1).flatten(1)

    @torch.no_grad()
    def to_head(self) -> ClassHead:
        """A plain :class:`ClassHead` with all classes, on every process: for export, small C."""
        head = ClassHead(
            self.in_features,
            self.num_classes,
            similarity=self.similarity,
            scale=self.scale,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        head.weight.copy_(gathered(self.weight))
        if self.bias is not None and head.bias is not None:
            head.bias.copy_(gathered(self.bias))
        return head.train(self.training)

    def to_linear(self) -> nn.Linear:
        """:meth:`ClassHead.to_linear` of :meth:`to_head`."""
        return self.to_head().to_linear()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, meta: Any, *rest: Any) -> None:
        kept = meta.get("assign_to_params_buffers", False)
        for name in ("weight", "bias"):
            value, own = state_dict.get(prefix + name), getattr(self, name)
            fits = value is not None and own is not None and value.shape == own.shape
            if fits and is_sharded(own) and not is_sharded(value):
                mine = value[self.local_classes.start : self.local_classes.stop]
                # Kept as it is, a part would keep the rows of all processes in memory.
                mine = mine.clone() if kept else mine
                state_dict[prefix + name] = _sharded(mine, own.shape, own.device_mesh)
        super()._load_from_state_dict(state_dict, prefix, meta, *rest)

    def extra_repr(self) -> str:
        mesh, mine = self.mesh, self.local_classes
        where = "" if mesh is None else f", classes {mine.start} to {mine.stop - 1} here"
        sampled = "" if self.sample_rate == 1 else f", sample_rate={self.sample_rate}"
        return super().extra_repr() + sampled + where


def _mesh(mesh: DeviceMesh | None, device: torch.device | str | None) -> DeviceMesh | None:
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        from torch.distributed.device_mesh import init_device_mesh

        on_cuda = "nccl" in str(dist.get_backend()) and torch.cuda.is_available()
        kind = "cuda" if on_cuda else "cpu"
        if device is not None and torch.device(device).type != "meta":
            kind = torch.device(device).type
        return init_device_mesh(kind, (world_size(),))
    if not hasattr(mesh, "get_local_rank"):
        raise LargeMarginError(
            f"mesh must be a torch.distributed DeviceMesh, but {type(mesh).__name__} was given. "
            'Make one with init_device_mesh("cuda", (world_size,)), or leave it out.'
        )
    if mesh.ndim != 1:
        raise LargeMarginError(
            f"mesh must have one dimension, that of the classes, but it has {mesh.ndim}. Pass one "
            'of them: mesh["classes"].'
        )
    return mesh


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _empty_shard(
    like: Tensor, mesh: DeviceMesh | None, device: torch.device | str | None
) -> nn.Parameter:
    """This process's rows of a parameter of the size of ``like``, not yet written to."""
    count = like.shape[0]
    if mesh is not None:
        count, _ = class_range(count, mesh.size(), mesh.get_local_rank())
    rows = torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=device)
    return nn.Parameter(rows if mesh is None else _sharded(rows, like.shape, mesh))


def _sharded(rows: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    stride = (1,) if len(shape) == 1 else (shape[1], 1)
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
