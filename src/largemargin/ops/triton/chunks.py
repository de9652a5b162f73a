"""The classes of a call in chunks: shapes of tiles, copies of class vectors and their place."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 100 * 2**20
"""Of a chunk's gradients and its copy of the prototypes."""
MANY = 500_000
"""From so many classes on chunks are twice as large: a CPU must keep up with the launches."""
COPY_BYTES = 100 * 2**20
"""Of a chunk's copy in the forward pass, which has no gradients."""


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


class _DotKind(NamedTuple):
    """In what the products of a call are computed."""

    low: torch.dtype
    input: str
    precise: bool


def product(precision: str, device: torch.device) -> _DotKind:
    if precision == "bf16":
        # Triton's interpreter has no bfloat16 products: there the rounded numbers are float32.
        return _DotKind(torch.bfloat16 if device.type == "cuda" else torch.float32, "ieee", False)
    return _DotKind(torch.float32, "tf32" if precision == "tf32" else "ieee", True)


def padded(dim: int, dtype: torch.dtype) -> int:
    """Row length whose rows begin at multiples of 16 bytes, as the copy engine wants them."""
    step = 16 // dtype.itemsize
    return -(-dim // step) * step


def _rounded_rows(rows: Tensor, product: _DotKind, precision: str) -> Tensor:
    low = rows.to(torch.bfloat16).to(product.low) if precision == "bf16" else rows
    extra = padded(rows.shape[1], product.low) - rows.shape[1]
    low = torch.nn.functional.pad(low, (0, extra)) if extra else low.contiguous()
    return low if low.data_ptr() % 16 == 0 else low.clone()


def leaves_room(columns: Tensor, precision: str) -> bool:
    """Whether an array for the gradients of the columns has room for their copies, see ``copies``:
    these take half of it, and lie there as the copy engine wants them."""
    return precision == "bf16" and columns.dtype == torch.float32 and columns.shape[1] % 8 == 0


def copies(gradients: Tensor) -> Tensor:
    """The second half of the bytes of (C, D) float32 gradients, as C rows of bfloat16.

    There the copies of the forward pass wait for the backward pass. Gradients, written from the
    first class on, reach the copy of a class when those of all classes before it, and of as many
    after it, are written: see ``Chunks.kept_pieces``.
    """
    return gradients.view(torch.bfloat16).view(-1)[gradients.numel() :].view(gradients.shape)


def describe(x: Tensor, block: tuple[int, int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


class Chunks:
    """The classes of a call in pieces, each with its copy of the prototypes and its norms."""

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        normalize: bool,
        precision: str,
        kept: Tensor | None = None,
    ) -> None:
        from largemargin.ops.triton import backward, forward

        self.kernels, self.gradients = forward, backward
        self.columns, self.normalize = columns, normalize
        self.product = product(precision, columns.device)
        self.tiles = choose_tiles(columns.device, self.product.low)
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
        self.kept = None if kept is None else copies(kept)

    def size(self, gradients: bool) -> int:
        """Classes of a chunk: a multiple of what all programs take in one round, if that fits."""
        item = self.product.low.itemsize
        row = item * ((self.rows.shape[0] if gradients else 0) + self.width * self.copy)
        whole = self.columns.shape[0]
        if not row or (self.kept is not None and not gradients):
            return whole
        budget = chunk_bytes(whole) if gradients else COPY_BYTES
        size = max(1024, budget // row)
        tile = self.tiles.gradient if gradients else self.tiles.forward
        blocks = -(-self.rows.shape[0] // tile.samples)
        step = tile.classes * max(1, programs(self.rows.device, tile) // blocks)
        size = size // step * step if size >= step else size // 1024 * 1024
        return size if size < whole else padded(whole, self.product.low)

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

    def kept_pieces(self, size: int) -> Iterator[tuple[int, int, Tensor]]:
        """Like ``pieces``, with the copies that the forward pass has made.

        Gradients of the classes before ``stop`` stand where copies of those before 2 stop - C
        stood. Only at the end are these copies of the same chunk: they are moved out of the way.
        """
        assert self.kept is not None
        whole = self.columns.shape[0]
        for start in range(0, whole, size):
            stop = min(start + size, whole)
            low = self.kept[start:stop]
            if 2 * stop - whole > start or low.dtype != self.product.low:
                low = self._own(stop - start).copy_(low)
            yield start, stop, low

    def _own(self, count: int) -> Tensor:
        if self.buffer is None:
            self.buffer = self.rows.new_empty(count, self.width)
        return self.buffer[:count]

    def _prepare(self, start: int, stop: int, inverse: Tensor | None, norms: bool) -> Tensor:
        columns, count = self.columns[start:stop], stop - start
        if not self.copy and not norms:
            return columns
        kept = None if self.kept is None else self.kept[start:stop]
        if kept is not None and kept.dtype == self.product.low:
            low = kept
        else:
            low = self._own(count) if self.copy else columns
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
        if kept is not None and kept is not low:
            kept.copy_(low)
        return low
