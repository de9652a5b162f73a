"""Class statistics of sharded class vectors: local ones by any kernel, combined over processes.

Every process computes the statistics of all samples over its own classes, with whatever
implementation serves one process. Those are statistics of a set of logits, and those of a union of
sets follow from those of the sets: maxima by a maximum, masses and moments by sums. Three
reductions of a few numbers per sample go over the network, and the features; never a logit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.ops.dense import ORDER, hidden
from largemargin.ops.matmul import resolve_precision, without_autocast
from largemargin.ops.shards import (
    ClassSample,
    Joined,
    Shard,
    gather_rows,
    join_batches,
    once,
    shard_of,
    times_gradient,
)
from largemargin.ops.similarity import similarity_logits


class _Part(NamedTuple):
    """Statistics of all samples over the rivals on this process; minus infinity of no rivals."""

    rows: Tensor
    """(K, N), one row per name; ``target`` is 0 where another process holds the class."""
    names: tuple[str, ...]
    rival_index: Tensor
    """(N,) global class index."""
    rivals: Tensor
    """(N,), how many there are here."""


def sharded_stats(
    kernel: Callable[..., Any],
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    similarity: str,
    scale: float | Tensor,
    want: tuple[str, ...],
    precision: str | None,
    **how: Any,
) -> dict[str, Tensor]:
    """Statistics by name, and ``rival_index``; ``kernel`` is ``class_stats`` of one process."""
    if labels.dim() == 2:
        raise LargeMarginError(
            "soft targets are an (N, C) matrix, which sharded class vectors are there to avoid. "
            "Pass hard labels; for label smoothing use lm.LabelSmoothing, which needs no matrix."
        )
    shard = shard_of(prototypes, bias)
    precision = resolve_precision(precision, features, prototypes)
    labels = labels.long()
    joined = join_batches(features, labels, shard.group)
    if isinstance(scale, Tensor):
        scale = times_gradient(scale, shard.processes)
    form = {"similarity": similarity, "scale": scale, "precision": precision}
    part = _local(kernel, joined, shard, want, form, how)
    combined, rival_index = _Combine.apply(
        part.rows, part.rival_index, part.rivals, part.names, joined.sizes, joined.own, shard.group
    )
    outside = (labels < 0) | (labels >= shard.num_classes)
    combined = combined.masked_fill(outside, torch.nan)
    found = dict(zip(part.names, combined.unbind(), strict=True))
    kept = {name: found[name] for name in want}
    return kept | ({"rival_index": rival_index} if "rival" in want else {})


def _local(
    kernel: Callable[..., Any],
    joined: Joined,
    shard: Shard,
    want: tuple[str, ...],
    form: dict[str, Any],
    how: Any,
) -> _Part:
    # Spreads are averaged by mass, so they bring the rest along.
    wanted = {*want, "target", *(("rest",) if "spread" in want else ())}
    names = tuple(name for name in ORDER if name in wanted)
    local = joined.labels - shard.offset
    inside = (local >= 0) & (local < shard.columns.shape[0])
    columns, bias, classes = shard.columns, shard.bias, None
    if shard.sample is not None:
        classes = sampled_classes(shard.sample, shard.offset, columns.shape[0], local[inside])
        columns = columns.index_select(0, classes)
        bias = None if bias is None else bias.index_select(0, classes)
        local = torch.searchsorted(classes, local)
    num_columns = columns.shape[0]
    # A sample of another process's class leaves out one class all the same; it is put back below.
    position = local.clamp(0, max(num_columns - 1, 0))
    if num_columns < 2:
        values, index = _of_few(joined.features, columns, bias, inside, names, form)
    else:
        stats = kernel(
            joined.features,
            columns,
            position,
            bias=bias,
            want=names,
            validate=False,
            checked=True,
            **form,
            **how,
        )
        values, index = _put_back(stats, position, inside, names, num_columns)
    if classes is not None and num_columns:
        index = classes[index]
    return _Part(torch.stack(values), names, index + shard.offset, num_columns - inside.long())


def _of_few(
    features: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    inside: Tensor,
    names: tuple[str, ...],
    form: dict[str, Any],
) -> tuple[list[Tensor], Tensor]:
    """Statistics over one class or none: the class itself, or nothing."""
    if not columns.shape[0]:
        # Sums over nothing: they tie this process to the graph, and so to its communication.
        nothing = features[:, :0].sum() + columns.sum()
        if bias is not None:
            nothing = nothing + bias.sum()
        if isinstance(form["scale"], Tensor):
            nothing = nothing + form["scale"].expand(0).sum()
        one = torch.full_like(features[:, 0], -torch.inf) + nothing
    else:
        with without_autocast(features):
            one = similarity_logits(features, columns, bias=bias, **form)[:, 0]
    # A bias of minus infinity is a rival all the same, of a mass that sums with others.
    rival = one.clamp_min(hidden(one.dtype)) if columns.shape[0] else one
    found = {name: rival.masked_fill(inside, -torch.inf) for name in names if name != "target"}
    found["target"] = torch.where(inside, one, 0)
    index = torch.zeros(inside.shape, dtype=torch.long, device=inside.device)
    return [found[name] for name in names], index


def _put_back(
    stats: Any, position: Tensor, inside: Tensor, names: tuple[str, ...], num_columns: int
) -> tuple[list[Tensor], Tensor]:
    """Statistics over all columns, for samples whose own class is not among them."""
    target = stats.target
    found, index = {"target": torch.where(inside, target, 0)}, position
    if stats.rival is not None:
        index = stats.rival_index
        tied = (target == stats.rival) & (position < index)
        larger = ~inside & ((target > stats.rival) | tied)
        found["rival"] = torch.where(larger, target, stats.rival)
        index = torch.where(larger, position, index)
    if stats.rest is not None:
        whole = torch.logaddexp(stats.rest, target)
        found["rest"] = torch.where(inside, stats.rest, whole)
        if stats.spread is not None:
            share = torch.exp(target - whole)
            found["spread"] = stats.spread + torch.where(inside, 0, share * (target - stats.spread))
    if stats.mean is not None:
        found["mean"] = stats.mean + torch.where(inside, 0, (target - stats.mean) / num_columns)
    return [found[name] for name in names], index


def sampled_classes(sample: ClassSample, offset: int, count: int, present: Tensor) -> Tensor:
    """Rows to use of a shard, sorted: those present in the batch and a random part of the others.

    Whether a class is drawn depends on its global index, seed and draw alone, so the sample is the
    same however many processes there are. A shard keeps two at least, where it has two.
    """
    score = _uniform(torch.arange(offset, offset + count, device=present.device), sample)
    keep = score < sample.rate
    keep[present] = True
    if count:
        keep[score.topk(min(count, 2), largest=False).indices] = True
    return keep.nonzero().squeeze(1)


def _uniform(index: Tensor, sample: ClassSample) -> Tensor:
    """A number in [0, 1) for each index: multiply, fold and repeat, as hash functions do."""
    mask = 2**31 - 1
    mixed = (index * 2 + 1) ^ ((sample.seed * 1_000_003 + sample.draw) * 7_919 & mask)
    for factor in (1_540_483_477, 1_103_515_245, 1_664_525):
        mixed = (mixed & mask) * factor
        mixed = (mixed ^ (mixed >> 15)) & (2**61 - 1)
        mixed = (mixed ^ (mixed >> 31)) & mask
    return mixed.double() / 2**31


class _Combine(torch.autograd.Function):
    """Statistics over the union of all processes' classes, for the samples of this process."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        rival_index: Tensor,
        count: Tensor,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        own: slice,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        part = dict(zip(names, rows.unbind(), strict=True))
        highest = dict(zip(names, _reduced(rows, "MAX", group).unbind(), strict=True))
        # Relative to the largest, so that equal statistics of any size are combined exactly.
        sums = {"target": part["target"], "count": count.to(rows.dtype)}
        if "rival" in part:
            sums["nan"] = part["rival"].isnan().to(rows.dtype)
        if "rest" in part:
            mass = torch.exp(part["rest"] - highest["rest"])
            sums["mass"] = torch.where(count > 0, mass, 0)
        if "spread" in part:
            below = part["spread"] - highest["spread"]
            sums["spread"] = torch.where(count > 0, sums["mass"] * below, 0)
        if "mean" in part:
            sums["mean"] = torch.where(count > 0, (part["mean"] - highest["mean"]) * count, 0)
        added = _reduced(torch.stack(list(sums.values())), "SUM", group)
        total = dict(zip(sums, added.unbind(), strict=True))
        whole = {"target": total["target"]}
        first = rival_index
        if "rival" in part:
            whole["rival"] = highest["rival"].masked_fill(total["nan"] > 0, torch.nan)
            wins = part["rival"] == highest["rival"]
            last = torch.iinfo(torch.long).max
            first = _reduced(torch.where(wins, rival_index, last), "MIN", group)
            first = torch.where(first == last, 0, first)
        if "rest" in part:
            whole["rest"] = highest["rest"] + torch.log(total["mass"])
        if "spread" in part:
            whole["spread"] = highest["spread"] + total["spread"] / total["mass"]
        if "mean" in part:
            whole["mean"] = highest["mean"] + total["mean"] / total["count"]
        result = torch.stack([whole[name] for name in names])
        ctx.save_for_backward(rows, result, first == rival_index, count, total["count"])
        ctx.names, ctx.sizes, ctx.group = names, sizes, group
        index = first[own].clone()
        ctx.mark_non_differentiable(index)
        return result[:, own].clone(), index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
        with torch.no_grad():
            result = _backward(ctx, saved, grads[0])
        # Of the statistics too: a loss that is linear in them sends a gradient without a graph.
        return once(result, grads[0], saved[0]), None, None, None, None, None, None


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    rows, result, wins, count, total = saved
    names, processes = ctx.names, len(ctx.sizes)
    # What the other processes' losses ask of their samples, about the classes here.
    everyone = gather_rows(grad.T.contiguous(), ctx.sizes, ctx.group).T / processes
    asked = dict(zip(names, everyone.unbind(), strict=True))
    part = dict(zip(names, rows.unbind(), strict=True))
    whole = dict(zip(names, result.unbind(), strict=True))
    found = {"target": asked["target"]}
    if "rival" in part:
        found["rival"] = torch.where(wins & (count > 0), asked["rival"], 0)
    if "rest" in part:
        share = torch.where(count > 0, torch.exp(part["rest"] - whole["rest"]), 0)
        found["rest"] = asked["rest"] * share
        if "spread" in part:
            apart = torch.where(count > 0, part["spread"] - whole["spread"], 0)
            found["spread"] = asked["spread"] * share
            found["rest"] = found["rest"] + found["spread"] * apart
    if "mean" in part:
        found["mean"] = asked["mean"] * count / total
    return torch.stack([found[name] for name in names])


def _reduced(x: Tensor, how: str, group: Any) -> Tensor:
    if group is None:
        return x
    result = x.clone()
    dist.all_reduce(result, getattr(dist.ReduceOp, how), group=group)
    return result
