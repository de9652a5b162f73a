"""Out-of-distribution detection: do scores of the predicted class tell other data apart?"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_number
from largemargin.measuring.batches import Source, count_pieces, pieces
from largemargin.measuring.calibration import auroc
from largemargin.measuring.confidence import SCORES, Scorer
from largemargin.measuring.probe import LogitModel
from largemargin.measuring.progress_bar import with_bar
from largemargin.measuring.ranks import fail_together
from largemargin.measuring.records import Record
from largemargin.ops.distributed import world_size


@dataclass(frozen=True)
class OODScores(Record):
    """How well scores tell known data from other data: see :func:`detect_ood`."""

    known: int
    strangers: int
    auroc: dict[str, float]
    """Probability that a known sample scores above a stranger, ties counting half."""
    fpr95: dict[str, float]
    """Share of strangers taken for known where 95 % of the known samples are kept."""
    margin: str
    """What "margin" is: distance to the boundary, or cosine for cosine heads."""


def false_positive_rate(known: Tensor, strangers: Tensor, *, keep: float = 0.95) -> float:
    """Share of strangers that score at least as high as the threshold that keeps ``keep``.

    The threshold is the largest at which at least that share of the known samples is kept, a
    sample being kept when its score is not below it.

    Example:
        >>> known, strangers = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([0.0, 2.0])
        >>> false_positive_rate(known, strangers, keep=0.75)
        0.5
    """
    check_number("keep", keep, above=0, at_most=1)
    known, strangers = known.double().cpu(), strangers.double().cpu()
    if len(known) == 0 or len(strangers) == 0:
        return math.nan
    if bool(known.isnan().any()) or bool(strangers.isnan().any()):
        return math.nan
    return float((strangers >= keeping(known, keep)).double().mean())


def keeping(scores: Tensor, keep: float) -> float:
    """The largest threshold that at least the share ``keep`` of the scores is not below."""
    # A share such as 0.95 of 20 is 19.000000000000004 in floating point.
    count = max(math.ceil(keep * len(scores) - 1e-9), 1)
    return float(scores.sort(descending=True).values[count - 1])


def compare_scores(
    known: dict[str, Tensor], strangers: dict[str, Tensor], margin: str
) -> OODScores:
    """AUROC and false positive rate of every score."""
    return OODScores(
        len(known["margin"]),
        len(strangers["margin"]),
        {name: auroc(known[name], strangers[name]) for name in SCORES},
        {name: false_positive_rate(known[name], strangers[name]) for name in SCORES},
        margin,
    )


def scores_of(
    reader: LogitModel,
    data: Source,
    *,
    batch_size: int,
    device: torch.device,
    workers: int = 0,
    shared: bool = True,
    progress: bool = False,
    what: str = "scores",
) -> dict[str, Tensor]:
    """Every score of every sample of this process's part, (N,) float64 on the CPU."""
    scorer = Scorer(reader)
    read = pieces(data, batch_size=batch_size, device=device, workers=workers, shared=shared)
    total = count_pieces(data, batch_size, shared=shared)
    found: dict[str, list[Tensor]] = {name: [torch.zeros(0).double()] for name in SCORES}
    with reader.evaluating():
        for piece in with_bar(read, what, total, progress):
            scored = scorer(piece.inputs)
            for name in SCORES:
                found[name].append(getattr(scored, name).double().cpu())
    return {name: torch.cat(each) for name, each in found.items()}


def detect_ood(
    model: nn.Module,
    data: Source,
    ood: Source,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
) -> OODScores:
    """How well a model tells known data from other data, by five scores of its predictions.

    ``margin``, ``logit_margin``, ``probability`` (Hendrycks and Gimpel 2017), ``max_logit``
    (Hendrycks et al. 2022) and ``energy`` (Liu et al. 2020), the larger the more known.

    Args:
        model: any model :func:`largemargin.attach` can read.
        data: of the classes it was trained on; labels are not used.
        ood: other data: a split, or a loader of inputs or (inputs, labels).
        batch_size, device, workers, sync, progress: as in :func:`accuracy_of`.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> known, strange = [torch.tensor([[3.0, 0.0], [0.0, 2.0]])], [torch.tensor([[1.0, 1.0]])]
        >>> detect_ood(model, known, strange).auroc["margin"]
        1.0
    """
    reader = LogitModel(model)
    where = reader.device if device is None else torch.device(device)
    shared = sync and world_size() > 1

    def read(source: Source, what: str) -> dict[str, Tensor]:
        parts = fail_together(
            shared,
            lambda: scores_of(
                reader,
                source,
                batch_size=batch_size,
                device=where,
                workers=workers,
                shared=shared,
                progress=progress,
                what=what,
            ),
        )
        joined = {name: torch.cat([each[name] for each in parts]) for name in SCORES}
        if len(joined["margin"]) == 0:
            raise LargeMarginError(f"the data given as {what} is empty.")
        return joined

    return compare_scores(read(data, "data"), read(ood, "ood"), Scorer(reader).margin)
