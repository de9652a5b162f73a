"""What the head of a model sees of every sample."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError
from largemargin.evaluating.logits import LogitModel
from largemargin.evaluating.pieces import Source, count_pieces, need_labels, pieces
from largemargin.evaluating.progress import with_bar
from largemargin.measuring.ranks import together
from largemargin.ops.distributed import world_size


class Embeddings(NamedTuple):
    """On the CPU, in the order of the data set."""

    features: Tensor
    """(N, D)."""
    labels: Tensor
    """(N,)."""


def embeddings_of(
    model: nn.Module,
    data: Source,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
) -> Embeddings:
    """The features of all samples; under torch.distributed of all processes, on each.

    Args:
        model: any model :func:`largemargin.attach` can read.
        data: a split or a loader, with labels of any meaning: identities need not be classes.
        batch_size, device, workers, sync, progress: as in :func:`accuracy_of`.

    Example:
        >>> found = embeddings_of(nn.Linear(4, 2), [(torch.ones(3, 4), torch.arange(3))])
        >>> found.features.shape
        torch.Size([3, 4])
    """
    reader = LogitModel(model)
    where = reader.device if device is None else torch.device(device)
    shared = sync and world_size() > 1

    def read() -> list[tuple[Tensor, Tensor, Tensor]]:
        found = pieces(data, batch_size=batch_size, device=where, workers=workers, shared=shared)
        total = count_pieces(data, batch_size, shared=shared)
        parts = []
        with reader.evaluating():
            for piece in with_bar(found, "features", total, progress):
                _, features = reader.read(piece.inputs)
                parts.append((features.cpu(), need_labels(piece).cpu(), piece.positions))
        return parts

    every = [part for parts in together(shared, read) for part in parts]
    if not every:
        raise LargeMarginError("there is nothing to take features of: the data is empty.")
    features, labels, positions = (torch.cat(column) for column in zip(*every, strict=True))
    order = positions.argsort(stable=True)
    return Embeddings(features[order], labels[order])
