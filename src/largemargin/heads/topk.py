"""The best classes of each sample, without a matrix of all scores."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_count, check_matrix
from largemargin.ops.dense import DENSE_LIMIT
from largemargin.ops.matmul import resolve_precision
from largemargin.ops.norms import inverse_norms, promote
from largemargin.ops.shards import is_shared
from largemargin.ops.similarity import affine_form, similarity_logits
from largemargin.ops.triton.op import missing
from largemargin.ops.triton.tile_topk import tile_top
from largemargin.shapes import Features, Prototypes

CHUNK_ELEMENTS = 2**24
"""Scores held at a time by a prediction that is not told its chunk size: 64 MiB in float32."""


class TopClasses(NamedTuple):
    """The best classes of each sample, best first."""

    scores: Tensor
    """(..., k) logits."""
    classes: Tensor
    """(..., k) int64 class indices."""


def flat_features(features: Tensor, in_features: int) -> Features:
    """Features of shape (..., D) as the (N, D) matrix the operators take."""
    if not isinstance(features, Tensor):
        raise LargeMarginError(
            f"features must be a tensor of shape (..., {in_features}), but "
            f"{type(features).__name__} was given. Convert arrays with torch.as_tensor."
        )
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise LargeMarginError(
            f"features must have shape (..., D) with D = in_features = {in_features}, but their "
            f"shape is {tuple(features.shape)}. Pass the output of the layer before the head, or "
            "build the head with the width of that output."
        )
    if features.dim() != 2:
        features = features.unsqueeze(0) if features.dim() == 1 else features.flatten(0, -2)
    if not features.is_floating_point():
        check_matrix("features", features, "(N, D)")  # which says so
    return features


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, ties in favour of the lower column."""
    if k == 1:
        values, columns = scores.max(dim=1, keepdim=True)  # documented to return the first one
        return values, columns
    values, columns = scores.topk(k, dim=1)
    last = values[:, -1:]
    if bool(((scores == last).sum(1) > (values == last).sum(1)).any()):
        # topk returned some of the entries that tie for the last place; a stable sort, ten times
        # slower, tells which come first.
        values, columns = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :k], columns[:, :k]
    columns = columns.sort(dim=1).values
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


@torch.no_grad()
def top_classes(
    features: Features,
    prototypes: Prototypes,
    *,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    k: int = 1,
    chunk_size: int | None = None,
    precision: str | None = None,
) -> TopClasses:
    """The k classes of largest logit for each sample, without an (N, C) buffer and without graph.

    Classes are scored ``chunk_size`` at a time and merged into a running best. Equal scores are
    ordered by class index, whatever the chunk size; note that chunks of different width may round
    a matrix product differently, so scores agree across chunk sizes to rounding.

    On a GPU and for many classes fused kernels look for the best in bfloat16 and score the
    candidates again in float32, where the products are bfloat16 anyway (autocast, or class vectors
    of that dtype) or ``precision="bf16"`` asks for it. Among classes whose scores are closer than
    bfloat16 can tell, about 0.4 % of |q||W|, the k-th best may then be taken for the next one, and
    equal scores are in the order of their classes only if few of them are (a feature of zeros has
    the same score for all).

    Args:
        features: (N, D).
        prototypes: (C, D).
        bias, similarity, scale: as in :func:`largemargin.ops.similarity_logits`.
        k: classes per sample, 1 to C.
        chunk_size: classes scored at a time; by default as many as keep N times it below 2**24.
            A number also rules out the fused kernels.
        precision: of the first pass: "bf16", or None for that of the inputs.

    Example:
        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> top_classes(torch.tensor([[3.0, 4.0]]), W, k=2, chunk_size=1)
        TopClasses(scores=tensor([[4., 3.]]), classes=tensor([[1, 0]]))
    """
    num_samples, num_classes = features.shape[0], prototypes.shape[0]
    check_count(
        "k", k, at_least=1, at_most=num_classes, hint=f"There are {num_classes} classes to rank."
    )
    form: Any = {"bias": bias, "similarity": similarity, "scale": scale}
    if chunk_size is None and _by_tiles(features, prototypes, precision):
        return _top_by_tiles(features, prototypes, k, **form)
    if chunk_size is None:
        chunk_size = max(CHUNK_ELEMENTS // max(num_samples, 1), 256)
    check_count("chunk_size", chunk_size, at_least=1, hint="It counts classes.")
    best: tuple[Tensor, Tensor] | None = None
    for start in range(0, num_classes, chunk_size):
        chunk = slice(start, start + chunk_size)
        form["bias"] = None if bias is None else bias[chunk]
        logits = similarity_logits(features, prototypes[chunk], precision=precision, **form)
        scores, classes = best_of(logits, min(k, logits.shape[1]))
        classes = classes + start
        if best is not None:
            # The running best holds lower class indices and stands to the left, so ties keep it.
            scores, classes = torch.cat((best[0], scores), 1), torch.cat((best[1], classes), 1)
            scores, order = best_of(scores, min(k, scores.shape[1]))
            classes = classes.gather(1, order)
        best = scores, classes
    assert best is not None
    return TopClasses(*best)


def _top_by_tiles(
    features: Tensor,
    prototypes: Tensor,
    k: int,
    bias: Tensor | None,
    similarity: str,
    scale: float | Tensor,
) -> TopClasses:
    with torch.autocast("cuda", enabled=False):
        if similarity != "cosine" or bias is not None:
            form: Any = {"bias": bias, "similarity": similarity, "scale": scale}
            tiles = affine_form(features, prototypes, precision="bf16", keep_columns=True, **form)
            return TopClasses(*tile_top(tiles, k))
        # The length of a feature changes no order: it is divided out of the k scores.
        form = {"bias": None, "similarity": "cosine_prototypes", "scale": 1.0}
        tiles = affine_form(features, prototypes, precision="bf16", keep_columns=True, **form)
        scores, classes = tile_top(tiles, k)
        return TopClasses(scores * (scale * inverse_norms(promote(features))), classes)


def _by_tiles(features: Tensor, prototypes: Tensor, precision: str | None) -> bool:
    many = features.shape[0] * prototypes.shape[0] > DENSE_LIMIT
    if not many or not features.is_cuda or is_shared(prototypes):
        return False
    low = resolve_precision(precision, features, prototypes) == "bf16"
    return low and missing(features, prototypes) is None
