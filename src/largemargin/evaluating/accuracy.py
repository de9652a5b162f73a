"""``accuracy_of``: how often a model is right, in one pass that does not wait for the device."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from largemargin.evaluating.correct import Rights, Seen
from largemargin.evaluating.counting import Accuracy, Counts
from largemargin.evaluating.logits import LogitModel
from largemargin.evaluating.pieces import Source, count_pieces, need_labels, pieces
from largemargin.evaluating.progress import with_bar
from largemargin.measuring.ranks import together
from largemargin.ops.distributed import world_size


def accuracy_of(
    model: nn.Module,
    data: Source,
    *,
    num_classes: int | None = None,
    device: torch.device | str | None = None,
    sync: bool = True,
    bins: int = 15,
    layer: str | None = None,
    batch_size: int = 256,
    workers: int = 0,
    progress: bool = False,
) -> Accuracy:
    """Accuracy by class, confusion, cross entropy and calibration of a classifier.

    One pass in evaluation mode; modes are restored. Sums are kept on the model's device and read
    once, at the end. Call it under ``torch.autocast`` to evaluate in half precision: sums are
    float64 in any case.

    Under torch.distributed every process evaluates its part and all return the result of the
    whole; samples a ``DistributedSampler`` repeats to fill up count once. Where one process fails
    all raise.

    Args:
        model: any model :func:`largemargin.attach` can read, attached or not, wrapped or not.
        data: a split, or a loader of (inputs, labels) or whatever else :func:`largemargin.measure`
            takes. Labels are class indices; those that are -100 are skipped.
        num_classes: C; default the width of the model's head.
        device: where to send batches; default that of the model.
        sync: False evaluates this process alone, for calls on one process of several.
        bins: of the calibration.
        layer: name of the head; default found by what the model returns.
        batch_size: of a split; a loader has its own.
        workers: processes that read the image files of a split.
        progress: show a progress bar (needs tqdm).

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> data = [(torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 1, 1]))]
        >>> found = accuracy_of(model, data)
        >>> found.per_class, found.balanced, found.confusion
        ((1.0, 0.5), 0.75, ((1, 0), (1, 1)))
    """
    shared = sync and world_size() > 1
    made: list[Counts] = []
    rights = Rights(data)

    def count() -> tuple[dict[str, Tensor], Seen]:
        reader = LogitModel(model, num_classes=num_classes, layer=layer)
        where = reader.device if device is None else torch.device(device)
        made.append(Counts(reader.num_classes, bins=bins, device=where))
        read = pieces(data, batch_size=batch_size, device=where, workers=workers, shared=shared)
        total = count_pieces(data, batch_size, shared=shared)
        with reader.evaluating():
            for piece in with_bar(read, "accuracy", total, progress):
                logits = reader(piece.inputs)
                made[0].add(logits, need_labels(piece))
                rights.add(piece, logits)
        return made[0].sums(), rights.found()

    parts = together(shared, count)
    found = made[0].result([sums for sums, _ in parts])
    return replace(found, correct=rights.result([seen for _, seen in parts]))
