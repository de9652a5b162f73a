"""Person re-identification across cameras: the protocol of Market-1501 and DukeMTMC."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_count
from largemargin.evaluating.retrieval import check_search, ranked
from largemargin.measuring.records import Record

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

    parts = list(ranked(queries, gallery, similarity, matches, trapezoid=precision != "step"))
    matched, first, precisions = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    found = matched > 0
    count = int(found.sum())
    if count == 0:
        raise LargeMarginError(
            "no query has a match: no person of the queries was seen by another camera in the "
            "gallery. Are the cameras those of the file names?"
        )
    curve = _matching(first[found], ranks)
    return CrossCamera(
        queries=count,
        left_out=len(found) - count,
        gallery=len(gallery),
        similarity=similarity,
        mean_average_precision=float(precisions[found].mean()),
        rank1=_matching(first[found], 1)[-1],
        rank5=_matching(first[found], 5)[-1],
        matching=curve,
    )


def _matching(first: Tensor, ranks: int) -> tuple[float, ...]:
    counts = torch.bincount(first.clamp_max(ranks), minlength=ranks + 1)[:ranks]
    return tuple((counts.cumsum(0).double() / len(first)).tolist())


def _check_cameras(
    queries: Tensor, cameras: Tensor, gallery: Tensor, gallery_cameras: Tensor
) -> None:
    pairs: Sequence[tuple[str, Tensor, Tensor]] = (
        ("queries", queries, cameras),
        ("gallery", gallery, gallery_cameras),
    )
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
