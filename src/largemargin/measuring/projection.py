"""Two dimensions of many: principal components and t-SNE, by scikit-learn."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, MissingPackage

METHODS = ("tsne", "pca")

FIRST_PCA = 50
"""Wider features go to t-SNE as this many principal components, as van der Maaten has it (30) and
scikit-learn advises (50)."""

FEWEST = 4
"""Points that t-SNE needs: perplexity 1 counts three times as many neighbours."""


@dataclass(frozen=True)
class Projection:
    """(N, 2) points and how they were made."""

    points: Tensor
    explained: tuple[float, ...] = ()
    """Share of the variance of each principal component."""
    perplexity: float | None = None
    components: int | None = None
    """Principal components t-SNE was given instead of all dimensions."""
    notes: tuple[str, ...] = ()


def project(rows: Tensor, *, method: str, seed: int, perplexity: float) -> Projection:
    """Points of (N, D) rows in the plane; equal rows, method and seed give equal points."""
    if len(rows) < 2:
        raise LargeMarginError(f"a plane needs 2 samples at least, but {len(rows)} was given.")
    rows = rows.double()
    if bool((rows == rows[0]).all()):
        return Projection(torch.zeros(len(rows), 2).double(), notes=("all features are equal",))
    if rows.shape[1] == 1:  # a line in the plane
        rows = torch.cat([rows, torch.zeros_like(rows)], 1)
    if method == "pca":
        points, explained = principal(rows, 2)
        return Projection(points, explained)
    return _tsne(rows, seed, perplexity)


def principal(rows: Tensor, count: int) -> tuple[Tensor, tuple[float, ...]]:
    """Scores of the first principal components, and their shares of the variance.

    The sign of a component is free; here the score farthest from 0 is positive, whatever way the
    features are turned.
    """
    made = _sklearn("decomposition").PCA(n_components=count, svd_solver="full")
    scores = torch.as_tensor(made.fit_transform(rows.numpy()))
    farthest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    shares = tuple(float(each) for each in made.explained_variance_ratio_)
    return scores * torch.where(farthest < 0, -1.0, 1.0), shares


def _tsne(rows: Tensor, seed: int, perplexity: float) -> Projection:
    count, dim = rows.shape
    if count < FEWEST:
        raise LargeMarginError(
            f"t-SNE needs {FEWEST} points at least, but {count} were given. Use method='pca'."
        )
    notes = []
    most = (count - 1) / 3
    if perplexity > most:
        notes.append(f"perplexity {perplexity:g} is too large for {count} points: {most:g} instead")
        perplexity = most
    components = min(FIRST_PCA, count) if dim > FIRST_PCA else None
    if components is not None:
        rows, _ = principal(rows, components)
    maker = _sklearn("manifold").TSNE(
        n_components=2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed
    )
    # Sums of several threads differ from run to run, and t-SNE makes much of small differences.
    limits = import_module("threadpoolctl").threadpool_limits  # scikit-learn depends on it
    with limits(1, user_api="openmp"):
        # float32 also takes off the last digits, in which one product differs from the next.
        points = maker.fit_transform(rows.float().numpy())
    return Projection(
        torch.as_tensor(points).double(), (), float(perplexity), components, tuple(notes)
    )


def _sklearn(name: str) -> Any:
    try:
        from sklearn import decomposition, manifold
    except ImportError:
        raise MissingPackage(
            "embeddings need scikit-learn. Install it: pip install 'largemargin[sklearn]'."
        ) from None
    return {"decomposition": decomposition, "manifold": manifold}[name]
