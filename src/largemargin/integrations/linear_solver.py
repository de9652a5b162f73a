r"""Multinomial logistic heads on a fixed matrix, trained to convergence on a path of penalties.

A head minimises :math:`\sum_i w_i\,\mathrm{CE}(W x_i + b, y_i) / \sum_i w_i + \tfrac\lambda2
\lVert W\rVert^2`, which is scikit-learn's LogisticRegression with :math:`C = 1/(\lambda\sum w_i)`.
All folds of a cross-validation, and the whole set, are one batch of problems on the same matrix
that differ in the weights of samples. Coordinates are rotated to the principal axes of the features
and scaled to nearly equal curvature; there L-BFGS takes few iterations.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

PENALTIES = tuple(10 ** (-step / 2) for step in range(15))
"""From strong to weak, as parts of the features' mean squared length: 1 to 1e-7."""

USUAL = 1e-4
"""The penalty where no sample can be held out."""

PATIENCE = 2
"""Penalties without improvement after which none further on is tried."""

HOPE = 4
"""Steps as large as the last that may be missing to the best of another preparation."""

NOTICED = 0.005
"""The part of the log-loss that is an improvement."""

ROTATED = 4096
"""The largest number of samples or features whose principal axes are computed."""

DENSE = 1 << 25
"""Entries of a sparse matrix of fewer features than samples that is made dense."""

ENTRIES = 1 << 21
"""Logits computed at a time."""

PARAMETERS = 1 << 24
"""Parameters of problems solved side by side; more are solved in turn."""

MEMORY = 8
"""Steps that L-BFGS remembers."""

SEARCHING = 3e-2
"""Newton decrement, relative to the square root of the loss, that is enough to choose a penalty."""


@dataclass
class Axes:
    """Features in coordinates whose curvatures are known, and the way back.

    ``rows`` (N, r) are the coordinates less their ``centre``, ``curvature`` (r,) their mean
    squares; ``back`` turns a head in these coordinates (C, r) into one on the features (C, D).
    """

    rows: Any
    transposed: Any
    curvature: Tensor
    back: Callable[[Tensor], Tensor]
    centre: Tensor | float = 0.0


def axes(features: Any, weights: Tensor) -> Axes:
    """Principal axes of weighted centred features (N, D), or of a sparse matrix as it is."""
    count, width = features.shape
    sparse = not isinstance(features, Tensor)
    if sparse and width <= count and count * width <= DENSE:
        features, sparse = torch.from_numpy(features.toarray()).to(weights.device), False
    shares: Tensor = weights / weights.sum()
    if (count if sparse else min(count, width)) > ROTATED:
        return axes_as_they_are(features, shares, sparse=sparse)
    roots = shares.sqrt()[:, None]
    if not sparse and width <= count:
        weighted = features * roots.to(features)
        vectors = principal(weighted.T @ weighted)[1].to(features)
        return centred(features @ vectors, shares, lambda head: head @ vectors.T)
    gram = features @ features.T
    gram = torch.from_numpy(gram.toarray()).to(weights.device) if sparse else gram
    values, vectors = principal(gram * (roots * roots.T).to(gram))
    rows = (vectors * values.sqrt() / roots).to(gram.dtype)
    duals = (vectors / values.sqrt() * roots).to(gram.dtype)

    def back(head: Tensor) -> Tensor:
        lifted = duals @ head.T
        if sparse:
            dense = torch.from_numpy(features.T @ lifted.cpu().numpy())
            return dense.to(weights.device).T
        return lifted.T.matmul(features)

    return centred(rows, shares, back)


def axes_as_they_are(features: Any, shares: Tensor, *, sparse: bool) -> Axes:
    """Those of features of which too many are given to rotate."""
    if not sparse:
        curvature = features.square().T @ shares.to(features)
        return Axes(features, features.T, curvature.to(features.dtype), lambda head: head)
    rows, transposed, squares = (
        torch_sparse(each, shares.device)
        for each in (features, features.T, features.multiply(features).T)
    )
    return Axes(rows, transposed, (squares @ shares).to(rows.dtype), lambda head: head)


def centred(rows: Tensor, shares: Tensor, back: Callable[[Tensor], Tensor]) -> Axes:
    """Far from the origin, bias and weights would hold each other up."""
    shares = shares.to(rows)
    centre = shares @ rows
    rows = rows - centre
    return Axes(rows, rows.T, shares @ rows.square(), back, centre)


def squared_lengths(features: Any) -> Tensor:
    """Of rows (N, D), dense or sparse."""
    if isinstance(features, Tensor):
        return features.square().sum(1)
    return torch.from_numpy(features.multiply(features).sum(axis=1)).reshape(-1)


def principal(products: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors (as columns) of a matrix of products, without its null space."""
    roots, vectors = torch.linalg.eigh(products.double())
    kept = roots > roots[-1].clamp_min(1e-300) * torch.finfo(products.dtype).eps ** 0.8
    return roots[kept], vectors[:, kept]


def torch_sparse(matrix: Any, device: torch.device) -> Tensor:
    matrix = matrix.tocsr()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support", UserWarning)
        made: Tensor = torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr),
            torch.from_numpy(matrix.indices),
            torch.from_numpy(matrix.data),
            size=matrix.shape,
            device=device,
            check_invariants=False,
        )
        return made


@dataclass
class Problems:
    """K softmax regressions on the same rows, each with weights (N,) of its own that sum to 1.

    Parameters are (K, C, r + 1): in each problem a row per class, the bias last.
    """

    axes: Axes
    labels: Tensor
    weights: Tensor

    def logits(self, heads: Tensor, part: slice) -> Tensor:
        """(n, K, C) of some rows."""
        problems, classes, width = heads.shape
        flat = heads[..., :-1].reshape(problems * classes, width - 1).T
        found = self.axes.rows[part] @ flat if self._dense else self.axes.rows @ flat
        logits: Tensor = found + heads[..., -1].reshape(-1)
        return logits.view(-1, problems, classes)

    @property
    def _dense(self) -> bool:
        return bool(self.axes.rows.layout == torch.strided)

    def parts(self, heads: Tensor) -> list[slice]:
        count = len(self.labels)
        size = max(ENTRIES // (heads.shape[0] * heads.shape[1]), 1) if self._dense else count
        return [slice(start, start + size) for start in range(0, count, size)]

    def evaluate(self, heads: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
        """Values (K,) and gradients of the penalised losses."""
        values = 0.5 * penalty * heads[..., :-1].square().sum((1, 2))
        gradient = penalty * heads
        gradient[..., -1] = 0
        for part in self.parts(heads):
            residuals = self.logits(heads, part)
            weights = self.weights[part]
            index = self.labels[part, None, None].expand(-1, len(heads), 1)
            own, largest = residuals.gather(2, index), residuals.amax(2, keepdim=True)
            total = residuals.sub_(largest).exp_().sum(2, keepdim=True)
            values += ((total.log() + largest - own)[..., 0] * weights).sum(0)
            residuals.mul_(weights[..., None] / total)
            residuals.scatter_add_(2, index, -weights[..., None])
            gradient[..., -1] += residuals.sum(0)
            flat = residuals.flatten(1)
            pulled = self.axes.transposed[:, part] if self._dense else self.axes.transposed
            gradient[..., :-1] += (pulled @ flat).T.view_as(gradient[..., :-1])
        return values, gradient

    def steepness(self, heads: Tensor) -> float:
        """Mean of p (1 - p) under the last problem, which scales the curvature of the loss."""
        total, last = 0.0, heads[-1:]
        for part in self.parts(last):
            shares = self.logits(last, part)[:, 0].softmax(1)
            total += float(self.weights[part, -1] @ (shares * (1 - shares)).mean(1))
        return max(total, 1e-6)

    def held_out(self, heads: Tensor, fold: Tensor) -> Tensor:
        """Logits (N, C) of each row by the problem ``fold`` (N,) that was trained without it."""
        found = []
        for part in self.parts(heads):
            every = self.logits(heads, part)
            index = fold[part, None, None].expand(-1, 1, every.shape[2])
            found.append(every.gather(1, index)[:, 0])
        return torch.cat(found)

    def of(self, index: slice) -> "Problems":
        return Problems(self.axes, self.labels, self.weights[:, index])


def minimise(
    problems: Problems, heads: Tensor, penalty: float, tolerance: float, iterations: int
) -> tuple[Tensor, int]:
    """Heads that solve the problems by L-BFGS from ``heads``, and its iterations."""
    steepness = problems.steepness(heads)
    curvature = torch.cat([problems.axes.curvature, problems.axes.curvature.new_ones(1)])
    unpenalised = torch.full_like(curvature, penalty)
    unpenalised[-1] = 0
    units = (curvature * steepness + unpenalised).rsqrt()

    def evaluate(scaled: Tensor) -> tuple[Tensor, Tensor]:
        values, gradient = problems.evaluate(scaled * units, penalty)
        return values, gradient * units

    rounding = 10 * torch.finfo(heads.dtype).eps
    point = heads / units
    values, gradient = evaluate(point)
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    steps, stalled = 0, torch.zeros_like(values)
    while steps < iterations:
        floor = values.abs().clamp_min(1e-3)
        active = (inner(gradient, gradient) > tolerance**2 * floor) & (stalled < MEMORY)
        if not active.any():
            break
        steps += 1
        direction = -quasi_newton(gradient, history)
        slope = inner(direction, gradient)
        uphill = slope >= 0
        direction[uphill], slope = (
            -gradient[uphill],
            torch.where(uphill, -inner(gradient, gradient), slope),
        )
        length = active.to(values)
        for _ in range(30):
            moved = point + length[:, None, None] * direction
            new_values, new_gradient = evaluate(moved)
            allowed = values + 1e-4 * length * slope + rounding * floor
            fine = (new_values <= allowed) | ~active
            if fine.all():
                break
            length = torch.where(fine, length, 0.35 * length)
        change, bend = moved - point, new_gradient - gradient
        history = [*history[1 - MEMORY :], (change, bend, inner(change, bend))]
        stalled = torch.where(values - new_values > rounding * floor, 0, stalled + 1)
        point, values, gradient = moved, new_values, new_gradient
    return point * units, steps


def inner(first: Tensor, second: Tensor) -> Tensor:
    """Inner products (K,) of parameters (K, C, r)."""
    return (first * second).sum((1, 2))


def quasi_newton(gradient: Tensor, history: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The two-loop recursion of L-BFGS; steps without positive curvature are left out."""
    found, used = gradient.clone(), []
    for change, bend, product in reversed(history):
        weight = torch.where(product > 0, 1 / product, 0)
        part = weight * inner(change, found)
        used.append((part, weight))
        found -= part[:, None, None] * bend
    if history:
        _, bend, product = history[-1]
        ratio = product / inner(bend, bend)
        found *= torch.where(ratio > 0, ratio, 1)[:, None, None]
    for (change, bend, _), (part, weight) in zip(history, reversed(used), strict=True):
        found += (part - weight * inner(bend, found))[:, None, None] * change
    return found


def assign_folds(fingerprint: Tensor, labels: Tensor, folds: int, seed: int) -> Tensor:
    """The fold (N,) that holds each sample out, -1 for none.

    Every class is spread over the folds. Equal samples share a fold, and which one does not depend
    on the order of samples. A class with one sample keeps it.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.full_like(labels, -1)
    places = torch.randperm(folds, generator=generator)
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero()[:, 0]
        values, which = torch.unique(fingerprint[members], return_inverse=True)
        if len(values) > 1:
            order = torch.randperm(len(values), generator=generator)
            found[members] = places[order % folds][which]
            places = places.roll(-len(values) % folds)
    return found


def calibrated(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """The factor of logits, on a grid of 2 %, with the least mean log-loss, and losses (N,).

    Where none of n samples is wrong, one in n + 2 counts as if it were, as in Platt's scaling: that
    none of a few is does not show that none will be. Where some are, these tell more.
    """
    classes = logits.shape[1]
    wrong = float((weights * (logits.argmax(1) != labels)).sum())
    doubt = classes / (classes - 1) / (float(weights.sum()) + 2) / (1 + wrong)

    def losses(step: int, smoothing: float = doubt) -> Tensor:
        scaled = logits * 1.02**step
        return cross_entropy(scaled, labels, reduction="none", label_smoothing=min(smoothing, 1.0))

    low, high = -150, 250  # the loss is convex in the factor: the grid is searched by thirds
    while high > low:
        left, right = low + (high - low) // 3, high - (high - low + 1) // 3
        if mean(losses(left), weights) <= mean(losses(right), weights):
            high = right - 1 if right > left else left
        else:
            low = left + 1
    return 1.02**low, losses(low, 0.0)


def mean(values: Tensor, weights: Tensor) -> float:
    return float((values * weights).sum() / weights.sum())


@dataclass
class Point:
    """A penalty on the path of a :class:`Search`.

    ``losses`` are those of samples held out, ``held_out`` their logits (N, C), both calibrated; a
    ``head`` (1, C, r + 1) of ``size`` would be so.
    """

    share: float
    loss: float
    losses: Tensor
    head: Tensor
    size: float
    held_out: Tensor


class Search:
    """The path of one preparation of the features, and its best point.

    Args:
        features: (N, D), centred, or a sparse matrix.
        weights: (N,) of samples.
        fold: (N,) from :func:`assign_folds`.
        rival: the search on another preparation; this one ends early where it is behind.

    Attributes:
        path: of each penalty its share of the features' mean squared length, and the log-loss and
            accuracy on samples held out.
        best: the penalty with the least log-loss.
        trained: the part of the weights that a fold is trained on.
        chosen: the weakest penalty whose log-loss is within a standard error of the least: heads
            trained on a part of the samples need stronger ones than the last head.
    """

    def __init__(
        self,
        features: Any,
        labels: Tensor,
        weights: Tensor,
        fold: Tensor,
        classes: int,
        rival: "Search | None" = None,
    ) -> None:
        self.axes = axes(features, weights)
        self.labels, self.weights, self.fold = labels, weights, fold
        lengths = squared_lengths(features).to(weights)
        self.length = float((lengths * weights).sum() / weights.sum())
        self.path: list[dict[str, float]] = []
        self.iterations = 0
        self.known = fold >= 0
        held = float(weights[self.known].sum() / weights.sum()) / max(int(fold.max()) + 1, 1)
        self.trained = 1 - held
        width = len(self.axes.curvature) + 1
        like: dict[str, Any] = {"dtype": self.axes.curvature.dtype, "device": labels.device}
        self.head = torch.zeros(1, classes, width, **like)
        nothing = torch.full((len(labels), classes), math.nan, **like)
        self.best = self.chosen = Point(USUAL, math.inf, nothing[:, 0], self.head, 0.0, nothing)
        if self.known.any():
            self._follow(rival)

    def _follow(self, rival: "Search | None") -> None:
        """Solve the folds for weaker penalties, then for stronger ones, while these improve.

        Each solution is the start of the next. From 0, a weak penalty would not be felt before the
        samples are separated, and heads would depend on the coordinates, which know the held-out.
        """
        folds = int(self.fold.max()) + 1
        trained = torch.arange(folds, device=self.fold.device) != self.fold[:, None]
        problems = Problems(self.axes, self.labels, self._shares(trained).to(self.head.dtype))
        start = self._start()
        begun = heads = self.head.repeat(folds, 1, 1)
        last = math.inf
        close: list[Point] = []
        for tried in (PENALTIES[start:], PENALTIES[:start][::-1]):
            waited = 0
            for share in tried:
                heads = self._solve(problems, heads, share)
                begun = begun if self.path else heads
                point = self._judge(problems, heads, share)
                waited += 1
                if point.loss < (1 - NOTICED) * self.best.loss:
                    self.best, waited = point, 0
                close = [each for each in [*close, point] if self._weaker(each)]
                if waited == PATIENCE or (rival and rival.ahead(point, last - point.loss)):
                    break
                last = point.loss
            losses = [each["valid_loss"] for each in self.path]
            if losses[1:] and losses[1] < losses[0]:
                break
            heads, last = begun, losses[0]
        self.chosen = min(close, key=lambda each: each.share)

    def _start(self) -> int:
        """Where heads begin to differ from class means, as far as the largest curvature tells."""
        classes = self.head.shape[1]
        steepness = (classes - 1) / classes**2
        largest = max(self.axes.curvature.tolist(), default=0.0)
        share = largest * steepness / max(self.length, 1e-300)
        weaker = [place for place, each in enumerate(PENALTIES) if each < share]
        return max(weaker[0] - 1 if weaker else len(PENALTIES) - 1, 0)

    def _solve(self, problems: "Problems", heads: Tensor, share: float) -> Tensor:
        group = max(PARAMETERS // heads[0].numel(), 1)
        found = []
        for start in range(0, len(heads), group):
            some = slice(start, start + group)
            part, steps = minimise(
                problems.of(some), heads[some], share * self.length, SEARCHING, 100
            )
            found.append(part)
            self.iterations += steps
        return torch.cat(found)

    def _judge(self, problems: "Problems", heads: Tensor, share: float) -> Point:
        """What heads of the folds, (K, C, r + 1), are worth on the samples held out.

        They get the same length: of one that separates its samples it says only how well it does.
        """
        lengths = heads[..., :-1].square().sum((1, 2)).sqrt().clamp_min(1e-30)
        typical = lengths.log().mean().exp()
        even = heads * (typical / lengths)[:, None, None]
        logits = problems.held_out(even, self.fold.clamp_min(0))
        weights = self.weights[self.known].to(logits)
        factor, losses = calibrated(logits[self.known], self.labels[self.known], weights)
        loss = mean(losses, weights)
        right = (logits.argmax(1) == self.labels)[self.known].to(logits)
        accuracy = mean(right, weights)
        self.path.append({"penalty": share, "valid_loss": loss, "valid_accuracy": accuracy})
        size = factor * float(typical)
        held_out = torch.where(self.known[:, None], factor * logits, math.nan)
        return Point(share, loss, losses, heads.mean(0, keepdim=True), size, held_out)

    def _behind(self, point: Point) -> tuple[float, float]:
        """By how much a point's log-loss is above the best, and the standard error of that."""
        extra, weights = point.losses - self.best.losses, self.weights[self.known].to(point.losses)
        error = (mean(extra.square(), weights) / float(weights.sum())) ** 0.5
        return mean(extra, weights), error

    def _weaker(self, point: Point) -> bool:
        """Whether a point has the weakest penalty so far that is as good as the best."""
        gap, error = self._behind(point)
        return point.share <= self.best.share and gap <= error

    def ahead(self, point: Point, gained: float) -> bool:
        """Whether this search is far ahead of a point that has ``gained`` by the last step."""
        gap, error = self._behind(point)
        return point.share <= self.best.share and gap > 2 * error and HOPE * gained < gap

    def _shares(self, trained: Tensor) -> Tensor:
        """Weights (N, K) of the samples trained on, with the classes' shares of the whole set.

        Without that, a class would be rarer wherever one of its samples is held out.
        """
        weights = self.weights[:, None] * trained
        totals = weights.new_zeros(self.head.shape[1], weights.shape[1])
        kept = totals.index_add(0, self.labels, weights)[self.labels]
        whole = totals[:, :1].index_add(0, self.labels, self.weights[:, None])[self.labels]
        return torch.where(trained, weights * whole / kept, 0) / self.weights.sum()

    def finish(self) -> tuple[Tensor, Tensor]:
        """Weight (C, D) and bias (C,) for the penalty chosen, converged and calibrated.

        Of the penalty, the part that the folds trained on: it stands against a sum over samples.
        """
        start = self.chosen.head
        penalty = self.chosen.share * self.length * self.trained
        every = torch.ones_like(self.labels[:, None], dtype=torch.bool)
        problems = Problems(self.axes, self.labels, self._shares(every).to(start.dtype))
        tolerance = max(torch.finfo(start.dtype).eps ** 0.5, 1e-6)
        found, steps = minimise(problems, start, penalty, tolerance, 1000)
        self.iterations += steps
        length = float(found[..., :-1].norm())
        size = self.chosen.size
        head = found[0] * (size / length if size and length else 1.0)
        weight = head[:, :-1]
        return self.axes.back(weight), head[:, -1] - (weight * self.axes.centre).sum(1)

    def margins(self) -> Tensor:
        """(N,): the label's logit less its largest rival's, of samples held out."""
        index = self.labels[:, None]
        rivals = self.chosen.held_out.scatter(1, index, -math.inf).amax(1)
        return self.chosen.held_out.gather(1, index)[:, 0] - rivals

    def gaps(self) -> Tensor:
        """(N,): the largest logit less the second, of samples held out."""
        first, second = self.chosen.held_out.topk(2, dim=1).values.unbind(1)
        return first - second

    def typical(self, features: Any) -> tuple[tuple[float, float], Tensor | None]:
        """Spreads of the largest logit and of cosines with class means, and the means' directions.

        Both without the sample itself; on the CPU. Sparse features have no means.
        """
        logits = self.chosen.held_out.amax(1).cpu()
        logit_spread = spread(logits[~logits.isnan()])
        if not isinstance(features, Tensor):
            return (logit_spread, 1.0), None
        weighted = features * self.weights.to(features)[:, None]
        sums = features.new_zeros(self.head.shape[1], features.shape[1])
        sums.index_add_(0, self.labels, weighted)
        own = cosine_similarity(sums[self.labels] - weighted, features).cpu()
        return (logit_spread, spread(own[self.fold.cpu() >= 0])), normalize(sums).cpu()


def spread(values: Tensor) -> float:
    """The standard deviation, or 1 where there is none."""
    found = float(values.std()) if len(values) > 1 else 0.0
    return found if found > 0 else 1.0
