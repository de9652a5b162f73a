"""The best classes of each sample by tiles: the k best lie in the k tiles of largest maximum."""

import torch
from torch import Tensor

from largemargin.ops.similarity import AffineForm
from largemargin.ops.triton.chunks import Chunks, describe, programs

SPARE = 1
"""Tiles looked at beyond k, since bfloat16 may put the k-th best behind the next."""
GROUP = 64
"""Tiles whose maxima are compared first."""


def tile_top(form: AffineForm, k: int, precision: str = "bf16") -> tuple[Tensor, Tensor]:
    """Scores (N, k), best first, and their classes; the lower class first among equals, if these
    lie in no more than k + 1 tiles.

    A first pass finds the largest logit of every tile at ``precision``; the k + 1 best tiles are
    computed again in float32. Without the (N, C) matrix, but with C / 128 maxima a sample.
    """
    rows, columns, normalize = form.rows, form.columns, form.normalize_columns
    num_samples, num_classes = rows.shape[0], columns.shape[0]
    if not num_samples:
        return rows.new_empty(0, k), rows.new_empty(0, k, dtype=torch.long)
    chunks = Chunks(rows, columns, normalize, precision)
    tile = chunks.tiles.forward
    count = -(-num_classes // tile.classes)
    best = rows.new_empty(count, num_samples)
    inverse = rows.new_empty(num_classes if normalize else 0)
    size = chunks.size(gradients=False)
    size = -(-size // tile.classes) * tile.classes
    blocks = -(-num_samples // tile.samples)
    groups = max(1, programs(rows.device, tile) // blocks)
    bias = None if form.column_bias is None else form.column_bias.float().contiguous()
    for start, stop, low in chunks.pieces(size, inverse if normalize else None, normalize):
        chunks.kernels.maxima[(blocks, min(groups, -(-(stop - start) // tile.classes)))](
            describe(chunks.rows, (tile.samples, tile.depth)),
            describe(low, (tile.classes, tile.depth)),
            inverse[start:stop] if normalize else best,
            best if bias is None else bias[start:stop],
            best,
            num_samples,
            stop - start,
            start,
            chunks.width,
            num_samples,
            MASKED=(stop - start) % tile.classes != 0,
            HAS_BIAS=bias is not None,
            **chunks.how(tile),
            DEPTH=tile.depth,
        )
    return _of_best(form, bias, best, inverse, min(k + SPARE, count), k, tile.classes, chunks)


def _largest(best: Tensor, slots: int) -> Tensor:
    """Which tiles have the largest maxima, (N, slots): they lie in as many groups of tiles."""
    count, num_samples = best.shape
    groups = count // GROUP
    if groups <= slots:
        return best.T.contiguous().topk(slots, 1).indices
    whole = best[: groups * GROUP].view(groups, GROUP, num_samples)
    chosen = whole.amax(1).T.contiguous().topk(slots, 1).indices
    inside = torch.arange(GROUP, device=best.device)
    tiles = (chosen[:, :, None] * GROUP + inside).flatten(1)
    # What does not fill a group is looked at anyway.
    rest = torch.arange(groups * GROUP, count, device=best.device).expand(num_samples, -1)
    tiles = torch.cat((tiles, rest), 1)
    values = best.T.gather(1, tiles)
    return tiles.gather(1, values.topk(slots, 1).indices)


def _of_best(
    form: AffineForm,
    bias: Tensor | None,
    best: Tensor,
    inverse: Tensor,
    slots: int,
    k: int,
    width: int,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    rows, columns = form.rows.contiguous(), form.columns
    num_samples = rows.shape[0]
    # In the order of the classes, so that the first of equal scores is the first class.
    chosen = _largest(best, slots).sort(1).values
    scores = rows.new_empty(num_samples, slots, width)
    dims = min(512, max(16, 1 << (columns.shape[1] - 1).bit_length()))
    columns = columns if columns.stride(1) == 1 else columns.contiguous()
    chunks.kernels.rescore[(num_samples, slots)](
        rows,
        columns,
        inverse if form.normalize_columns else scores,
        scores if bias is None else bias,
        chosen,
        scores,
        columns.shape[0],
        columns.shape[1],
        rows.stride(0),
        columns.stride(0),
        NORMALIZE=form.normalize_columns,
        HAS_BIAS=bias is not None,
        CLASSES=width,
        PART=min(16, width),
        DIMS=dims,
        num_warps=4 if rows.is_cuda else 1,
    )
    found, order = scores.view(num_samples, -1).sort(dim=1, descending=True, stable=True)
    found, order = found[:, :k], order[:, :k]
    classes = chosen.gather(1, order // width) * width + order % width
    if form.row_bias is not None:
        found = found + form.row_bias[:, None]
    return found.contiguous(), classes
