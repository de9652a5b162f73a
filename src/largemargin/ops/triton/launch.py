"""Class statistics by Triton kernels: tiles of logits that live on the chip only.

Forward, for each chunk of classes: inverse norms and a bfloat16 copy of the chunk (none where the
prototypes are bfloat16 already), then one pass over its tiles with running statistics. Backward:
the tiles again, their gradients in a (chunk, N) buffer, and two products with it. Nothing of size
(N, C) or, beyond the gradient itself, (C, D) is ever held. No atomics: results do not depend on
the order in which the multiprocessors finish.
"""

import torch
from torch import Tensor

from largemargin.ops.matmul import multiply
from largemargin.ops.triton.chunks import Chunks, describe, padded, programs

MASS, RIVAL, MOMENT, TOTAL = 1, 2, 4, 8


def run_forward(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalize: bool,
    precision: str,
    want: int,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (8, N) as ``combine`` orders them, rival classes (N,), inverse norms (C,).

    ``kept`` is the array that the backward pass will fill with the gradients of the columns: until
    then it holds their copies.
    """
    num_samples, num_classes = rows.shape[0], columns.shape[0]
    found = torch.empty(8, num_samples, dtype=torch.float32, device=rows.device)
    chosen = torch.empty(num_samples, dtype=torch.long, device=rows.device)
    inverse = rows.new_empty(num_classes if normalize else 0)
    if not num_samples:
        return found, chosen, inverse.fill_(1)
    chunks = Chunks(rows, columns, normalize, precision, kept)
    tile = chunks.tiles.forward
    size = chunks.size(gradients=False)
    blocks = -(-num_samples // tile.samples)
    groups = max(1, programs(rows.device, tile) // blocks)
    groups = min(groups, -(-size // tile.classes))
    state = torch.empty(6, groups, num_samples, dtype=torch.float32, device=rows.device)
    described = describe(chunks.rows, (tile.samples, tile.depth))
    for start, stop, low in chunks.pieces(size, inverse if normalize else None, normalize):
        chunks.kernels.forward[(blocks, groups)](
            described,
            describe(low, (tile.classes, tile.depth)),
            inverse[start:stop] if normalize else state,
            state if bias is None else bias[start:stop],
            labels,
            state,
            num_samples,
            stop - start,
            start,
            int(start > 0),
            chunks.width,
            MASKED=(stop - start) % tile.classes != 0,
            HAS_BIAS=bias is not None,
            MASS=bool(want & (MASS | RIVAL | MOMENT)),
            PRECISE=chunks.product.precise,
            **_wanted(want),
            **chunks.how(tile),
            DEPTH=tile.depth,
        )
    chunks.kernels.combine[(-(-num_samples // 32),)](
        state,
        labels,
        state if bias is None else bias.sum(dtype=torch.float32),
        found,
        chosen,
        num_samples,
        num_classes,
        groups,
        HAS_BIAS=bias is not None,
        PRECISE=chunks.product.precise,
        SAMPLES=32,
        num_warps=1,
    )
    return found, chosen, inverse


def _wanted(want: int) -> dict[str, bool]:
    bits = {"RIVAL": RIVAL, "MOMENT": MOMENT, "TOTAL": TOTAL}
    return {name: bool(want & bit) for name, bit in bits.items()}


def _add_product(total: Tensor, a: Tensor, b: Tensor, precision: str) -> None:
    if a.is_cuda and precision == "bf16":
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += multiply(a, b, precision)


def _asked(found: Tensor, grads: Tensor, num_classes: int, want: int) -> Tensor:
    """What the gradient kernel reads of each sample, (6, N): see there."""
    largest, mass, moment = found[5:]
    target, rival, rest, spread, mean = grads
    share, slope = rest / mass, torch.zeros_like(mass)
    if want & MOMENT:
        slope = spread / mass
        share = share + slope * (1 - moment)
    return torch.stack([largest, share, slope, mean / (num_classes - 1), target, rival])


def run_backward(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    found: Tensor,
    chosen: Tensor,
    inverse: Tensor,
    grads: Tensor,
    normalize: bool,
    precision: str,
    want: int,
    needs: int,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, columns and bias; ``needs`` has bit 1, 2 and 4 for each, else empty.

    ``kept``, if given, is as the forward pass left it; it becomes the gradient of the columns.
    """
    num_samples, num_classes = rows.shape[0], columns.shape[0]
    needs_rows, needs_columns, needs_bias = bool(needs & 1), bool(needs & 2), bool(needs & 4)
    grad_rows = rows.new_zeros(rows.shape) if needs_rows else rows.new_empty(0)
    grad_columns = columns.new_empty(0) if kept is None else kept
    if kept is None and needs_columns:
        grad_columns = torch.empty(columns.shape, dtype=columns.dtype, device=columns.device)
    grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else rows.new_empty(0)
    if not num_samples:
        return grad_rows, grad_columns.zero_(), grad_bias
    chunks = Chunks(rows, columns, normalize, precision, kept)
    tile, last = chunks.tiles.gradient, chunks.tiles.columns
    size = chunks.size(gradients=True)
    blocks = -(-num_samples // tile.samples)
    asked = _asked(found, grads, num_classes, want)
    low_type = chunks.product.low
    buffer = rows.new_empty(size, padded(num_samples, low_type), dtype=low_type)
    turned = buffer.new_zeros(chunks.width, buffer.shape[1])[:, :num_samples]
    turned.copy_(chunks.rows.T)
    along = rows.new_empty(2, blocks, -(-size // tile.classes) * tile.classes)
    described = describe(chunks.rows, (tile.samples, tile.depth))
    described_turned = describe(turned, (last.depth, last.samples))
    pieces = (
        chunks.pieces(size, inverse if normalize else None, False)
        if kept is None
        else chunks.kept_pieces(size)
    )
    for start, stop, low in pieces:
        count = stop - start
        width = -(-count // tile.classes) * tile.classes
        gradients = buffer[:count, :num_samples]
        groups = min(max(1, programs(rows.device, tile) // blocks), width // tile.classes)
        chunks.gradients.gradient[(blocks, groups)](
            described,
            describe(low, (tile.classes, tile.depth)),
            gradients,
            inverse[start:stop] if normalize else asked,
            asked if bias is None else bias[start:stop],
            labels,
            chosen,
            asked,
            along,
            num_samples,
            count,
            start,
            chunks.width,
            gradients.stride(0),
            NORMALIZE=normalize,
            HAS_BIAS=bias is not None,
            MASS=bool(want & (MASS | MOMENT)),
            PRECISE=chunks.product.precise,
            **_wanted(want),
            **chunks.how(tile),
            DEPTH=tile.depth,
        )
        if needs_columns:
            parts = -(-columns.shape[1] // last.depth) * -(-count // last.classes)
            chunks.gradients.column_gradient[(min(programs(rows.device, last), parts),)](
                describe(gradients, (last.classes, last.samples)),
                described_turned,
                low,
                inverse[start:stop] if normalize else asked,
                along,
                grad_columns[start:stop],
                num_samples,
                count,
                width,
                blocks,
                columns.shape[1],
                low.stride(0),
                NORMALIZE=normalize,
                **chunks.how(last),
                DIMS=last.depth,
                BLOCKS=1 << (blocks - 1).bit_length(),
            )
        if needs_rows:
            _add_product(grad_rows, gradients.T, low[:, : columns.shape[1]], precision)
        if bias is not None and needs_bias:
            sums = along.view(-1)[blocks * width : 2 * blocks * width].view(blocks, width)
            grad_bias[start:stop] = sums[:, :count].sum(0)
    return grad_rows, grad_columns, grad_bias
