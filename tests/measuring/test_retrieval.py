"""Retrieval and re-identification against brute force written from their definitions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.measuring import retrieval
from largemargin.measuring.retrieval import (
    CrossCamera,
    Retrieval,
    average_precision,
    cross_camera,
    retrieval_of,
)

Arrays = tuple[np.ndarray[Any, Any], ...]


def drawn(n: int, classes: int, seed: int, dim: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, classes + 1, (n,), generator=generator)
    centers = torch.randn(classes + 1, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return centers[labels] + 1.5 * noise, labels


def similarities(a: Tensor, b: Tensor, kind: str) -> np.ndarray[Any, Any]:
    x, y = a.numpy(), b.numpy()
    if kind == "cosine":
        return (x / np.linalg.norm(x, axis=1)[:, None]) @ (y / np.linalg.norm(y, axis=1)[:, None]).T
    return -np.linalg.norm(x[:, None] - y[None], axis=-1)


@pytest.mark.parametrize("kind", ["cosine", "euclidean"])
@pytest.mark.parametrize("cells", [1, 200, 10**9])
def test_leave_one_out(kind: str, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "CELLS", cells)
    features, labels = drawn(70, 12, seed=0)
    labels[0] = 99  # the only one of its class
    table = similarities(features, features, kind)
    hits: dict[int, list[bool]] = {1: [], 3: [], 10: []}
    precisions = []
    for i in range(len(labels)):
        others = np.arange(len(labels)) != i
        same, scores = (labels == labels[i]).numpy()[others], table[i, others]
        if not same.any():
            continue
        best = np.argsort(-scores)
        for k, found in hits.items():
            found.append(bool(same[best[:k]].any()))
        precisions.append(average_precision_score(same, scores))
    got = retrieval_of(features, labels, similarity=kind, at=[1, 3, 10])
    alone = sum(int((labels == each).sum() == 1) for each in labels)
    assert (got.queries, got.left_out, got.gallery) == (70 - alone, alone, 70)
    assert got.recall == pytest.approx({k: np.mean(each) for k, each in hits.items()})
    assert got.mean_average_precision == pytest.approx(np.mean(precisions), abs=1e-12)
    assert Retrieval.from_json(got.to_json()) == got


@pytest.mark.parametrize("dim", [1, 64, 130])
def test_equal_features_rank_in_the_order_of_the_gallery(dim: int) -> None:
    """Wherever they stand in the product of matrices, which rounds them differently."""
    generator = torch.Generator().manual_seed(dim)
    features = torch.randn(1, dim, generator=generator).expand(150, dim).contiguous()
    features = features * (1 + torch.arange(150)[:, None] % 7)  # cosines do not see lengths
    labels = torch.arange(150) // 15
    found = retrieval_of(features, labels, at=[1, 10])
    assert found.recall == {1: 0.1, 10: 0.1}  # the first class is found first by everyone
    expected = np.mean(
        [np.mean([(m + 1) / (15 * c + m + 1) for m in range(14)]) for c in range(10)]
    )
    assert found.mean_average_precision == pytest.approx(expected)


@pytest.mark.parametrize("cells", [1, 10**9])
def test_equal_distances_rank_in_the_order_of_the_gallery(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other points too, here of a grid, whose center is none of them."""
    monkeypatch.setattr(retrieval, "CELLS", cells)
    generator = torch.Generator().manual_seed(0)
    features = torch.randint(-1, 2, (150, 8), generator=generator)
    labels = torch.randint(0, 2, (150,), generator=generator)
    found = retrieval_of(features.float(), labels, similarity="euclidean", at=[1])
    first, precisions = [], []
    for own in range(150):
        apart = (features - features[own]).square().sum(1).numpy()
        order = [each for each in np.argsort(apart, kind="stable") if each != own]
        hits = (labels[order] == labels[own]).numpy()
        first.append(hits[0])
        ranks = 1 + np.flatnonzero(hits)
        precisions.append(np.mean(np.arange(1, len(ranks) + 1) / ranks))
    assert found.recall[1] == pytest.approx(np.mean(first))
    assert found.mean_average_precision == pytest.approx(np.mean(precisions))


def test_a_gallery_of_its_own() -> None:
    queries, labels = drawn(20, 5, seed=1)
    gallery, theirs = drawn(60, 5, seed=1)
    table = similarities(queries, gallery, "cosine")
    wanted = [
        average_precision_score((theirs == label).numpy(), row)
        for label, row in zip(labels, table, strict=True)
    ]
    got = retrieval_of(queries, labels, gallery, theirs)
    assert got.mean_average_precision == pytest.approx(np.mean(wanted), abs=1e-12)
    # A query is left out of its own search, but not where the gallery is given.
    assert retrieval_of(queries, labels, queries, labels).recall[1] == 1


def test_far_from_the_origin_distances_keep_their_digits() -> None:
    features, labels = drawn(50, 5, seed=2)
    near, far = (
        retrieval_of(x, labels, similarity="euclidean") for x in (features, features + 1e7)
    )
    assert far.recall == near.recall


def by_the_protocol(
    query: Arrays, gallery: Arrays, kind: str, trapezoid: bool
) -> tuple[float, np.ndarray[Any, Any], int]:
    """Market-1501 as its authors describe it: one query at a time, one gallery image at a time."""
    features, people, cameras = query
    them, their_people, their_cameras = gallery
    precisions, firsts = [], []
    for feature, person, camera in zip(features, people, cameras, strict=True):
        if kind == "cosine":
            scores = them @ feature / np.linalg.norm(them, axis=1) / np.linalg.norm(feature)
        else:
            scores = -np.linalg.norm(them - feature, axis=1)
        good = {
            j for j in range(len(them)) if their_people[j] == person and their_cameras[j] != camera
        }
        junk = {
            j
            for j in range(len(them))
            if their_people[j] == -1 or (their_people[j] == person and their_cameras[j] == camera)
        }
        if not good:
            continue
        old_recall, old_precision, precision_sum, seen, position = 0.0, 1.0, 0.0, 0, 0
        for j in np.argsort(-scores):
            if j in junk:
                continue
            if j in good:
                seen += 1
                if seen == 1:
                    firsts.append(position)
            recall, precision = seen / len(good), seen / (position + 1)
            height = (old_precision + precision) / 2 if trapezoid else precision
            precision_sum += (recall - old_recall) * height
            old_recall, old_precision = recall, precision
            position += 1
        precisions.append(precision_sum)
    curve = np.array([np.mean(np.array(firsts) <= k) for k in range(10)])
    return float(np.mean(precisions)), curve, len(precisions)


@pytest.mark.parametrize("kind", ["cosine", "euclidean"])
@pytest.mark.parametrize("precision", ["step", "trapezoid"])
@pytest.mark.parametrize("cells", [1, 10**9])
def test_cross_camera(
    kind: str, precision: str, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "CELLS", cells)
    queries, people = drawn(25, 8, seed=3)
    gallery, their_people = drawn(90, 8, seed=3)
    generator = torch.Generator().manual_seed(4)
    cameras, their_cameras = (torch.randint(1, 4, (n,), generator=generator) for n in (25, 90))
    their_people[torch.randperm(90, generator=generator)[:25]] = 0
    their_people[torch.randperm(90, generator=generator)[:20]] = -1
    people[3] = 77  # nobody else has seen this one
    got = cross_camera(
        queries,
        people,
        cameras,
        gallery,
        their_people,
        their_cameras,
        similarity=kind,
        precision=precision,
        ranks=10,
    )
    mean, curve, count = by_the_protocol(
        (queries.numpy(), people.numpy(), cameras.numpy()),
        (gallery.numpy(), their_people.numpy(), their_cameras.numpy()),
        kind,
        precision == "trapezoid",
    )
    assert (got.queries, got.left_out) == (count, 25 - count)
    assert got.left_out > 0
    assert got.mean_average_precision == pytest.approx(mean, abs=1e-12)
    assert got.matching == pytest.approx(curve)
    assert (got.rank1, got.rank5) == pytest.approx((curve[0], curve[4]))
    assert CrossCamera.from_json(got.to_json()) == got


def one_query(identities: list[int], cameras: list[int]) -> CrossCamera:
    """Person 1 by camera 1, searched among images that stand ever farther away."""
    gallery = torch.tensor([[math.cos(x), math.sin(x)] for x in range(len(identities))])
    one = torch.tensor([1])
    people, places = torch.tensor(identities), torch.tensor(cameras)
    return cross_camera(torch.tensor([[1.0, 0.0]]), one, one, gallery, people, places)


def test_junk_and_distractors() -> None:
    """The same camera and boxes of -1 do not count; distractors of 0 do."""
    assert one_query([1, -1, 1], [1, 2, 2]).rank1 == 1
    assert one_query([1, -1, 1], [1, 2, 2]).mean_average_precision == 1
    assert one_query([0, 1, 2], [2, 2, 2]).rank1 == 0
    assert one_query([0, 1, 2], [2, 2, 2]).mean_average_precision == 0.5
    # Five junk images before the match leave it at rank 1; five distractors at rank 6.
    assert one_query([1, 1, -1, 1], [1, 1, 3, 2]).rank5 == 1
    assert one_query([0, 0, 0, 1], [2, 2, 2, 2]).matching[:4] == (0, 0, 0, 1)


def test_average_precision_by_hand() -> None:
    hits = torch.tensor([[True, False, True], [False, False, True], [False, False, False]])
    assert average_precision(hits).tolist() == pytest.approx([(1 + 2 / 3) / 2, 1 / 3, 0])
    areas = [(1 + (1 / 2 + 2 / 3) / 2) / 2, (0 + 1 / 3) / 2, 0]
    assert average_precision(hits, trapezoid=True).tolist() == pytest.approx(areas)


def test_bad_retrieval() -> None:
    x, y = drawn(6, 2, seed=5)
    wrong: list[tuple[str, Any]] = [
        ("no query has a match", lambda: retrieval_of(x, torch.arange(6))),
        ("given together", lambda: retrieval_of(x, y, x)),
        ("similarity must be one of", lambda: retrieval_of(x, y, similarity="dot")),
        ("6 dimensions, but the gallery has 5", lambda: retrieval_of(x, y, x[:, :5], y)),
        ("must be one integer for each of its 6 rows", lambda: retrieval_of(x, y[:5])),
        ("at least one row", lambda: retrieval_of(x[:0], y[:0])),
        ("queries must be finite", lambda: retrieval_of(x * math.nan, y)),
        ("every k of recall", lambda: retrieval_of(x, y, at=[0])),
        ("every k of recall at k must be a whole", lambda: retrieval_of(x, y, at=[1.5])),  # type: ignore[list-item]
        ("list of the k of recall at k, but 1 was", lambda: retrieval_of(x, y, at=1)),  # type: ignore[arg-type]
        ("must be a tensor of integers, but list", lambda: retrieval_of(x, ["a"] * 6)),  # type: ignore[arg-type]
        ("identities of queries must be positive", lambda: cross_camera(x, y * 0, y, x, y, y)),
        ("seen by another camera", lambda: cross_camera(x, y, y, x, y, y)),
        ("cameras of gallery must be one number", lambda: cross_camera(x, y, y, x, y, y[:2])),
        ("cameras of queries must be a tensor, but list", lambda: cross_camera(x, y, [1], x, y, y)),  # type: ignore[arg-type]
        ("precision must be one of", lambda: cross_camera(x, y, y, x, y, y, precision="area")),
    ]
    for message, call in wrong:
        with pytest.raises(LargeMarginError, match=message):
            call()


def test_matching_is_told_for_fifty_ranks() -> None:
    one, gallery = torch.ones(1).long(), torch.eye(2)
    found = cross_camera(gallery[:1], one, one, gallery, torch.tensor([1, 2]), one.repeat(2) + 1)
    assert found.matching == (1.0,) * 50
