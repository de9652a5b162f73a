"""Retrieval: do the nearest neighbours of a sample belong to its class?

Of any features (:func:`retrieval_of`), and of people across cameras by the protocol of Market-1501
and DukeMTMC (:func:`cross_camera`). :func:`head_inputs_of` takes the features of a model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_choice,
    check_count,
    check_matrix,
)
from largemargin.geometry.pairs import blocks, squared_distances, widen
from largemargin.measuring.batches import DataBatch, Source, need_labels
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, columns_of
from largemargin.measuring.records import Record
from largemargin.ops.norms import normalize

SIMILARITIES = ("cosine", "euclidean")

CELLS = 2**23
"""Queries times gallery images ranked at a time: 64 MiB a table, about six of them alive."""


@dataclass(frozen=True)
class Retrieval(Record):
    """What a search by features finds: see :func:`retrieval_of`."""

    queries: int
    """That count: those with at least one match in the gallery."""
    left_out: int
    """Queries without a match."""
    gallery: int
    similarity: str
    recall: dict[int, float]
    """Recall at k: share of queries with a match among the k nearest."""
    mean_average_precision: float


def retrieval_of(
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    similarity: str = "cosine",
    at: Sequence[int] = (1, 5, 10),
) -> Retrieval:
    r"""Recall at k and mean average precision of a nearest-neighbour search.

    .. math:: \mathrm{AP} = \frac1R\sum_{m=1}^{R}\frac{m}{r_m},

    with :math:`r_m` the rank of the m-th of R matches; mAP is its mean over queries. Samples of
    equal similarity rank in the order of the gallery; those are equal that differ by no more than
    the rounding of a similarity. Queries are ranked block by block, so that no table of all pairs
    is kept.

    Args:
        queries: (N, D) features.
        labels: (N,) classes.
        gallery: (G, D) features to search; default the other queries (leave one out).
        gallery_labels: (G,) classes.
        similarity: "cosine" or "euclidean".
        at: the k of recall at k.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.7, 0.5]])
        >>> found = retrieval_of(features, torch.tensor([0, 0, 1, 1]), at=[1])
        >>> found.recall, found.mean_average_precision
        ({1: 0.75}, 0.8333333333333334)
    """
    alone = gallery is None
    if alone != (gallery_labels is None):
        raise LargeMarginError("gallery and gallery_labels must be given together.")
    if gallery is None or gallery_labels is None:
        gallery, gallery_labels = queries, labels
    check_search(queries, labels, gallery, gallery_labels)
    if not isinstance(at, Iterable):
        raise LargeMarginError(f"at must be a list of the k of recall at k, but {at!r} was given.")
    for k in at:
        check_count("every k of recall at k", k, at_least=1)
    theirs = gallery_labels.to(queries.device)

    def matches(rows: slice) -> tuple[Tensor, Tensor | None]:
        same = labels[rows].to(queries.device)[:, None] == theirs
        if not alone:
            return same, None
        mine = torch.zeros_like(same)
        here = torch.arange(len(same), device=same.device)
        mine[here, here + rows.start] = True
        return same & ~mine, mine

    first, precision = rank_gallery(queries, gallery, similarity, matches)
    if len(first) == 0:
        raise LargeMarginError(
            "no query has a match in the gallery. Retrieval needs at least two samples of a class."
        )
    return Retrieval(
        queries=len(first),
        left_out=len(queries) - len(first),
        gallery=len(gallery),
        similarity=similarity,
        recall={int(k): float((first < k).double().mean()) for k in at},
        mean_average_precision=float(precision.mean()),
    )


def check_search(queries: Tensor, labels: Tensor, gallery: Tensor, gallery_labels: Tensor) -> None:
    given = (("queries", queries, labels), ("gallery", gallery, gallery_labels))
    for name, features, theirs in given:
        check_matrix(name, features, "(N, D)")
        if len(features) == 0:
            raise LargeMarginError(f"{name} must hold at least one row, but there is none.")
        if not isinstance(theirs, Tensor):
            raise LargeMarginError(
                f"the labels of {name} must be a tensor of integers, but {type(theirs).__name__} "
                "was given. Convert numbers with torch.as_tensor; number names first, as "
                "np.unique(names, return_inverse=True) does."
            )
        if theirs.dim() != 1 or len(theirs) != len(features) or theirs.is_floating_point():
            raise LargeMarginError(
                f"the labels of {name} must be one integer for each of its {len(features)} rows, "
                f"but their shape is {tuple(theirs.shape)} and their dtype {theirs.dtype}."
            )
    if queries.shape[1] != gallery.shape[1]:
        raise LargeMarginError(
            f"queries have {queries.shape[1]} dimensions, but the gallery has {gallery.shape[1]}."
        )
    check_all_finite(queries=queries, gallery=gallery)


def rank_gallery(
    queries: Tensor,
    gallery: Tensor,
    similarity: str,
    matches: Callable[[slice], tuple[Tensor, Tensor | None]],
    *,
    trapezoid: bool = False,
) -> tuple[Tensor, Tensor]:
    """Of the queries that have a match: the rank of the first one, from 0, and average precision.

    Args:
        matches: for some rows of the queries, (B, G) bool: which gallery images match, and which
            are left out of the ranking.
        trapezoid: see :func:`average_precision`.
    """
    check_choice("similarity", similarity, SIMILARITIES)
    gallery = gallery.to(queries.device)
    center = widen(gallery).mean(0) if similarity == "euclidean" else None
    columns = _ready(gallery, center)
    rounding = _rounding(columns)
    firsts, precisions = [], []
    for rows in blocks(len(queries), max(CELLS // len(gallery), 1)):
        mine = _ready(queries[rows], center)
        scores = mine @ columns.T if center is None else -squared_distances(mine, columns)
        wanted, left_out = matches(rows)
        if left_out is not None:
            # At the end of the ranking they change no rank that counts.
            scores.masked_fill_(left_out, -torch.inf)
        order = _order(scores, _rounding(mine)[:, None], rounding)
        hits = wanted.gather(1, order)
        hits = hits[hits.any(1)]
        firsts.append(hits.int().argmax(1).cpu())
        precisions.append(average_precision(hits, trapezoid=trapezoid).cpu())
    return torch.cat(firsts), torch.cat(precisions)


def _ready(features: Tensor, center: Tensor | None) -> Tensor:
    wide = widen(features)
    return normalize(wide) if center is None else wide - center


def _rounding(ready: Tensor) -> Tensor:
    """(N,) what each row adds to the rounding of a similarity it takes part in, at most."""
    steps = (ready.shape[1] + 8) * torch.finfo(ready.dtype).eps
    return steps * ready.square().sum(1)


def _order(scores: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """(B, G) columns by falling score, equal ones as they stand.

    A product of matrices rounds equal columns differently, by where they stand in it. So two
    neighbours in the ranking are equal that differ by no more than the rounding of one of them:
    that of its row, (B, 1), and that of its column, (G,).
    """
    falling, order = scores.sort(dim=1, descending=True, stable=True)
    steps = falling[:, :-1] - falling[:, 1:]
    del falling
    lower = steps > of_columns[order[:, 1:]].add_(of_rows)
    tied = (~lower).any(1).nonzero()[:, 0]
    if len(tied) > 0:
        place = torch.nn.functional.pad(lower[tied].cumsum(1), (1, 0))
        mixed = order[tied] + place * scores.shape[1]
        order[tied] = mixed.sort(dim=1).values % scores.shape[1]
    return order


def average_precision(hits: Tensor, *, trapezoid: bool = False) -> Tensor:
    """(B,) average precision of rankings (B, G) that say where matches stand; 0 without a match.

    Args:
        hits: (B, G) bool, best ranked first.
        trapezoid: mean of the precision at a match and that just before it, 1 before the first
            rank: what the evaluation code published with Market-1501 computes.

    Example:
        >>> average_precision(torch.tensor([[True, False, True]])).item()
        0.8333333333333333
    """
    rank = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    found = hits.cumsum(1)
    precision = found / rank.double()
    if trapezoid:
        before = torch.where(rank > 1, (found - 1).double() / (rank - 1).clamp_min(1), 1.0)
        precision = (precision + before) / 2
    return (precision * hits).sum(1) / found[:, -1].clamp_min(1)


JUNK = -1
"""Identity of boxes that show no whole person: they count neither for nor against."""

DISTRACTOR = 0
"""Identity of boxes with nobody who is searched: they count against."""

PRECISIONS = ("step", "trapezoid")


@dataclass(frozen=True)
class CrossCamera(Record):
    """What a search across cameras finds: see :func:`cross_camera`."""

    queries: int
    """That count: those whose person another camera has seen."""
    left_out: int
    """Queries without such an image."""
    gallery: int
    similarity: str
    mean_average_precision: float
    rank1: float
    rank5: float
    matching: tuple[float, ...]
    """Cumulative matching characteristic: entry k - 1 is the share of queries with a match among
    the k nearest."""


def cross_camera(
    queries: Tensor,
    identities: Tensor,
    cameras: Tensor,
    gallery: Tensor,
    gallery_identities: Tensor,
    gallery_cameras: Tensor,
    *,
    similarity: str = "cosine",
    ranks: int = 50,
    precision: str = "step",
) -> CrossCamera:
    r"""mAP, rank-1, rank-5 and CMC of re-identification (Zheng et al. 2015).

    For each query the gallery is ranked without its junk: images of the same person by the same
    camera, and boxes of identity -1. Identity 0 marks distractors, which are wrong answers for
    everyone. A match is an image of the same person by another camera. Queries without a match are
    left out, and counted.

    Args:
        queries: (N, D) features.
        identities: (N,) of the queries, positive.
        cameras: (N,).
        gallery, gallery_identities, gallery_cameras: the same of the images to search.
        similarity: "cosine" or "euclidean".
        ranks: length of the CMC curve.
        precision: "step" is :math:`\frac1R\sum_m m/r_m` as in the toolkits of today; "trapezoid"
            what the code published with Market-1501 computes.

    Example:
        >>> query, gallery = torch.eye(2)[:1], torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2]])
        >>> one = torch.tensor([1])
        >>> found = cross_camera(query, one, one, gallery, torch.tensor([1, 0, 1]),
        ...                      torch.tensor([1, 2, 2]))
        >>> found.rank1, found.rank5, found.mean_average_precision
        (0.0, 1.0, 0.5)
    """
    check_choice("precision", precision, PRECISIONS)
    check_count("ranks", ranks, at_least=1)
    check_search(queries, identities, gallery, gallery_identities)
    _check_cameras(queries, cameras, gallery, gallery_cameras)
    if bool((identities <= DISTRACTOR).any()):
        raise LargeMarginError(
            f"identities of queries must be positive, but {int(identities.min())} is among them: "
            f"{JUNK} marks junk and {DISTRACTOR} distractors of the gallery."
        )
    device = queries.device
    person, camera = identities.to(device), cameras.to(device)
    their_person, their_camera = gallery_identities.to(device), gallery_cameras.to(device)

    def matches(rows: slice) -> tuple[Tensor, Tensor | None]:
        same = person[rows, None] == their_person
        here = camera[rows, None] == their_camera
        return same & ~here, (same & here) | (their_person == JUNK)

    trapezoid = precision == "trapezoid"
    first, precisions = rank_gallery(queries, gallery, similarity, matches, trapezoid=trapezoid)
    if len(first) == 0:
        raise LargeMarginError(
            "no query has a match: no person of the queries was seen by another camera in the "
            "gallery. Are the cameras those of the file names?"
        )
    return CrossCamera(
        queries=len(first),
        left_out=len(queries) - len(first),
        gallery=len(gallery),
        similarity=similarity,
        mean_average_precision=float(precisions.mean()),
        rank1=_matching(first, 1)[-1],
        rank5=_matching(first, 5)[-1],
        matching=_matching(first, ranks),
    )


def _matching(first: Tensor, ranks: int) -> tuple[float, ...]:
    counts = torch.bincount(first.clamp_max(ranks), minlength=ranks + 1)[:ranks]
    return tuple((counts.cumsum(0).double() / len(first)).tolist())


def _check_cameras(queries: Tensor, cameras: Tensor, gallery: Tensor, theirs: Tensor) -> None:
    pairs = (("queries", queries, cameras), ("gallery", gallery, theirs))
    for name, features, given in pairs:
        if not isinstance(given, Tensor):
            raise LargeMarginError(
                f"the cameras of {name} must be a tensor, but {type(given).__name__} was given. "
                "Convert numbers with torch.as_tensor."
            )
        if given.dim() != 1 or len(given) != len(features):
            raise LargeMarginError(
                f"the cameras of {name} must be one number for each of its {len(features)} rows, "
                f"but their shape is {tuple(given.shape)}."
            )


class HeadInputs(NamedTuple):
    """On the CPU, in the order of the data set."""

    features: Tensor
    """(N, D)."""
    labels: Tensor
    """(N,)."""


def head_inputs_of(model: nn.Module, data: Source, **options: Unpack[ReadingOptions]) -> HeadInputs:
    """The features of all samples; under torch.distributed of all processes, on each.

    Args:
        model: any model :func:`largemargin.attach` can read.
        data: a split or a loader, with labels of any meaning: identities need not be classes.
        options: batch_size, device, workers, sync and progress as in :func:`accuracy_of`.

    Example:
        >>> found = head_inputs_of(nn.Linear(4, 2), [(torch.ones(3, 4), torch.arange(3))])
        >>> found.features.shape
        torch.Size([3, 4])
    """
    reader = LogitModel(model)

    def columns(batch: DataBatch) -> tuple[Tensor, Tensor, Tensor]:
        return reader.read(batch.inputs)[1], need_labels(batch.labels), batch.indices

    empty = "there is nothing to take features of: the data is empty."
    features, labels, index = columns_of(reader, data, columns, "features", empty, **options)
    order = index.argsort(stable=True)
    return HeadInputs(features[order], labels[order])
