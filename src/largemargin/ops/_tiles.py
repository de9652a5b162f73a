"""Class statistics by Triton kernels: tiles of logits that live on the chip only.

Forward, for each chunk of classes: inverse norms and a bfloat16 copy of the chunk (none where the
prototypes are bfloat16 already), then one pass over its tiles with running statistics. Backward:
the tiles again, their gradients in a (chunk, N) buffer, and two products with it. Nothing of size
(N, C) or, beyond the gradient itself, (C, D) is ever held. No atomics: results do not depend on
the order in which the multiprocessors finish.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from largemargin.ops.product import multiply

CHUNK_BYTES = 100 * 2**20
"""Of a chunk's gradients and its copy of the prototypes."""
MANY = 500_000
"""From so many classes on chunks are twice as large: a CPU must keep up with the launches."""
COPY_BYTES = 100 * 2**20
"""Of a chunk's copy in the forward pass, which has no gradients."""
MASS, RIVAL, MOMENT, TOTAL = 1, 2, 4, 8


def chunk_bytes(num_classes: int) -> int:
    return CHUNK_BYTES * (2 if num_classes >= MANY else 1)


class Tile(NamedTuple):
    """Shape of a kernel's tiles, and how it is compiled."""

    samples: int
    classes: int
    depth: int
    """Along the dimension that is summed over (or, for the gradient of the columns, D itself)."""
    warps: int
    stages: int
    flatten: bool = False
    programs: int = 1
    """Resident on a multiprocessor."""


class Tiles(NamedTuple):
    forward: Tile
    gradient: Tile
    columns: Tile


HOPPER = Tiles(
    forward=Tile(128, 128, 64, 4, 3, flatten=True, programs=2),
    gradient=Tile(128, 128, 64, 4, 3, programs=2),
    columns=Tile(64, 128, 128, 4, 3, programs=2),
)
GENERIC = Tiles(
    forward=Tile(64, 128, 32, 4, 3),
    gradient=Tile(64, 128, 32, 4, 3),
    columns=Tile(32, 64, 128, 4, 3),
)
INTERPRETED = Tiles(Tile(16, 32, 16, 1, 1), Tile(16, 32, 16, 1, 1), Tile(16, 16, 32, 1, 1))


def choose_tiles(device: torch.device, low: torch.dtype) -> Tiles:
    if device.type != "cuda":
        return INTERPRETED
    # Data center GPUs from Hopper on; others have less shared memory.
    large = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return HOPPER if large and low == torch.bfloat16 else GENERIC


PREPARE = Tile(0, 0, 0, 8, 1, programs=32)
PREPARED_BYTES = 2**14
"""What a program of the preparation holds at a time."""


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(device: torch.device, tile: Tile) -> int:
    if device.type != "cuda":
        return 3
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _processors(index) * tile.programs


class _Product(NamedTuple):
    """In what the products of a call are computed."""

    low: torch.dtype
    input: str
    precise: bool


def product(precision: str, device: torch.device) -> _Product:
    if precision == "bf16":
        # Triton's interpreter has no bfloat16 products: there the rounded numbers are float32.
        return _Product(torch.bfloat16 if device.type == "cuda" else torch.float32, "ieee", False)
    return _Product(torch.float32, "tf32" if precision == "tf32" else "ieee", True)


def _padded(dim: int, dtype: torch.dtype) -> int:
    """Row length whose rows begin at multiples of 16 bytes, as the copy engine wants them."""
    step = 16 // dtype.itemsize
    return -(-dim // step) * step


def _rounded_rows(rows: Tensor, product: _Product, precision: str) -> Tensor:
    low = rows.to(torch.bfloat16).to(product.low) if precision == "bf16" else rows
    extra = _padded(rows.shape[1], product.low) - rows.shape[1]
    low = torch.nn.functional.pad(low, (0, extra)) if extra else low.contiguous()
    return low if low.data_ptr() % 16 == 0 else low.clone()


def describe(x: Tensor, block: tuple[int, int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


class Chunks:
    """The classes of a call in pieces, each with its copy of the prototypes and its norms."""

    def __init__(
        self, rows: Tensor, columns: Tensor, normalize: bool, precision: str, tiles: Tiles
    ) -> None:
        from largemargin.ops import _tile_gradients, _tile_kernels

        self.kernels, self.gradients, self.tiles = _tile_kernels, _tile_gradients, tiles
        self.columns, self.normalize = columns, normalize
        self.product = product(precision, columns.device)
        self.rows = _rounded_rows(rows, self.product, precision)
        self.width = self.rows.shape[1]
        self.rounded = precision == "bf16" and self.product.low != torch.bfloat16
        self.copy = (
            self.rounded
            or columns.dtype != self.product.low
            or columns.shape[1] != self.width
            or columns.stride() != (self.width, 1)
            or columns.data_ptr() % 16 != 0
        )
        self.buffer: Tensor | None = None

    def size(self, gradients: bool) -> int:
        """Classes of a chunk: a multiple of what all programs take in one round, if that fits."""
        item = self.product.low.itemsize
        row = item * ((self.rows.shape[0] if gradients else 0) + self.width * self.copy)
        whole = self.columns.shape[0]
        if not row:
            return whole
        budget = chunk_bytes(whole) if gradients else COPY_BYTES
        size = max(1024, budget // row)
        step = self._round(self.tiles.gradient if gradients else self.tiles.forward)
        size = size // step * step if size >= step else size // 1024 * 1024
        return size if size < whole else _padded(whole, self.product.low)

    def _round(self, tile: Tile) -> int:
        blocks = -(-self.rows.shape[0] // tile.samples)
        groups = max(1, programs(self.rows.device, tile) // blocks)
        return tile.classes * groups

    def how(self, tile: Tile) -> dict[str, Any]:
        """What every kernel over tiles is compiled with."""
        return {
            "FACTOR": self.normalize and not self.copy,
            "INPUT": self.product.input,
            "SAMPLES": tile.samples,
            "CLASSES": tile.classes,
            "FLATTEN": tile.flatten,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def pieces(
        self, size: int, inverse: Tensor | None, norms: bool
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Chunk by chunk its bounds and class vectors in the dtype of the product.

        The inverse norms are written first where ``norms`` says so.
        """
        for start in range(0, self.columns.shape[0], size):
            stop = min(start + size, self.columns.shape[0])
            yield start, stop, self._prepare(start, stop, inverse, norms)

    def _prepare(self, start: int, stop: int, inverse: Tensor | None, norms: bool) -> Tensor:
        columns, count = self.columns[start:stop], stop - start
        if not self.copy and not norms:
            return columns
        if self.copy and self.buffer is None:
            self.buffer = self.rows.new_empty(count, self.width)
        low = columns if self.buffer is None else self.buffer[:count]
        dims = min(1024, max(16, 1 << (self.width - 1).bit_length()))
        rows = max(1, PREPARED_BYTES // (dims * columns.element_size()))
        if columns.stride(1) != 1:
            columns = columns.contiguous()
        self.kernels.prepare[(min(-(-count // rows), programs(columns.device, PREPARE)),)](
            columns,
            low,
            low if inverse is None else inverse[start:stop],
            count,
            columns.shape[1],
            self.width,
            columns.stride(0),
            COPY=self.copy,
            NORMS=norms,
            SCALE=self.normalize,
            ROWS=rows,
            DIMS=dims,
            num_warps=PREPARE.warps if columns.is_cuda else 1,
        )
        if self.rounded:
            low.copy_(low.to(torch.bfloat16))
        return low


def run_forward(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    normalize: bool,
    precision: str,
    want: int,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (8, N) as ``combine`` orders them, rival classes (N,), inverse norms (C,)."""
    num_samples, num_classes = rows.shape[0], columns.shape[0]
    found = torch.empty(8, num_samples, dtype=torch.float32, device=rows.device)
    chosen = torch.empty(num_samples, dtype=torch.long, device=rows.device)
    inverse = rows.new_empty(num_classes if normalize else 0)
    if not num_samples:
        return found, chosen, inverse.fill_(1)
    tiles = tiles or choose_tiles(rows.device, product(precision, rows.device).low)
    chunks, tile = Chunks(rows, columns, normalize, precision, tiles), tiles.forward
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
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, columns and bias; ``needs`` has bit 1, 2 and 4 for each, else empty."""
    num_samples, num_classes = rows.shape[0], columns.shape[0]
    needs_rows, needs_columns, needs_bias = bool(needs & 1), bool(needs & 2), bool(needs & 4)
    grad_rows = rows.new_zeros(rows.shape) if needs_rows else rows.new_empty(0)
    grad_columns = (
        torch.empty(columns.shape, dtype=columns.dtype, device=columns.device)
        if needs_columns
        else columns.new_empty(0)
    )
    grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else rows.new_empty(0)
    if not num_samples:
        return grad_rows, grad_columns.zero_(), grad_bias
    tiles = tiles or choose_tiles(rows.device, product(precision, rows.device).low)
    chunks = Chunks(rows, columns, normalize, precision, tiles)
    tile, last = tiles.gradient, tiles.columns
    size = chunks.size(gradients=True)
    blocks = -(-num_samples // tile.samples)
    asked = _asked(found, grads, num_classes, want)
    low_type = chunks.product.low
    buffer = rows.new_empty(size, _padded(num_samples, low_type), dtype=low_type)
    turned = buffer.new_zeros(chunks.width, buffer.shape[1])[:, :num_samples]
    turned.copy_(chunks.rows.T)
    along = rows.new_empty(2, blocks, -(-size // tile.classes) * tile.classes)
    described = describe(chunks.rows, (tile.samples, tile.depth))
    described_turned = describe(turned, (last.depth, last.samples))
    for start, stop, low in chunks.pieces(size, inverse if normalize else None, False):
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
        if needs_rows:
            _add_product(grad_rows, gradients.T, low[:, : columns.shape[1]], precision)
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
        if bias is not None and needs_bias:
            sums = along.view(-1)[blocks * width : 2 * blocks * width].view(blocks, width)
            grad_bias[start:stop] = sums[:, :count].sum(0)
    return grad_rows, grad_columns, grad_bias
