"""One pass over validation data, for numbers that are calibrated on it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.evaluating.logits import LogitModel
from largemargin.evaluating.pieces import Source, count_pieces, known_rows, need_labels, pieces
from largemargin.evaluating.progress import with_bar
from largemargin.measuring.batches import IGNORED
from largemargin.measuring.ranks import together
from largemargin.ops.distributed import world_size


def columns_of(
    reader: LogitModel,
    validation: Source,
    read: Callable[[Any, Tensor], tuple[Tensor, ...]],
    *,
    what: str,
    batch_size: int,
    device: torch.device | str | None,
    workers: int,
    sync: bool,
    progress: bool,
) -> tuple[Tensor, ...]:
    """What ``read(inputs, labels)`` gives for all samples, on the CPU, of all processes.

    Args:
        reader: the model, put in evaluation mode for the pass.
        validation: labelled data; rows whose label is -100 are dropped.
        read: columns of a batch, one row per sample.
        what: is calibrated, for the progress bar and the message where there is no data.
        batch_size, device, workers, sync, progress: as in :func:`accuracy_of`.
    """
    where = reader.device if device is None else torch.device(device)
    shared = sync and world_size() > 1

    def rows() -> list[tuple[Tensor, ...]]:
        found = pieces(
            validation, batch_size=batch_size, device=where, workers=workers, shared=shared
        )
        total = count_pieces(validation, batch_size, shared=shared)
        parts = []
        with reader.evaluating():
            for piece in with_bar(found, what, total, progress):
                labels = need_labels(piece)
                known = known_rows(labels, reader.num_classes)
                columns = read(piece.inputs, labels)
                parts.append(tuple(column[known].cpu() for column in columns))
        return parts

    every = [part for parts in together(shared, rows) for part in parts]
    columns = tuple(torch.cat(column) for column in zip(*every, strict=True))
    if not columns or len(columns[0]) == 0:
        raise LargeMarginError(
            f"a {what} is calibrated on validation data, but it is empty, or all of it is labelled "
            f"{IGNORED}."
        )
    return columns
