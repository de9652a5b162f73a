"""The linear head that ``LargeMarginClassifier`` searches for: convergence, choice, uses."""

import math
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression

import largemargin as lm
from largemargin.integrations import linear_solver
from largemargin.integrations.linear_solver import Search, assign_folds, calibrated
from largemargin.integrations.scikit_learn import (
    LargeMarginClassifier,
    SparseRows,
    TensorSamples,
    preparations,
    rate_factors,
)

linear = partial(LargeMarginClassifier, hidden_sizes=(), random_state=0)


def embeddings(
    classes: int = 4, each: int = 8, width: int = 20, spread: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    y = np.arange(classes * each) % classes
    return centres[y] + spread * rng.normal(size=(len(y), width)), y


@pytest.mark.parametrize(("each", "width"), [(15, 8), (4, 40)], ids=["tall", "wide"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_the_head_is_that_of_logistic_regression(each: int, width: int, sparse: bool) -> None:
    X, y = embeddings(each=each, width=width, spread=2.0)
    X = X - X.mean(0)
    weights = np.linspace(1, 3, len(y))
    features: Any = scipy.sparse.csr_matrix(X) if sparse else torch.from_numpy(X)
    labels = torch.from_numpy(y)
    fold = assign_folds(torch.arange(len(y)).double(), labels, 4, 0)
    found = Search(features, labels, torch.from_numpy(weights), fold, 4)
    found.chosen.size = 0.0  # without the temperature
    weight, bias = found.finish()
    assert found.trained == pytest.approx(3 / 4)  # of folds, whose C the last head keeps
    assert found.length == pytest.approx(np.average((X**2).sum(1), weights=weights))
    c = 1 / (found.chosen.share * found.length * found.trained * weights.sum())
    theirs = LogisticRegression(C=c, tol=1e-10, max_iter=10_000).fit(X, y, weights)
    np.testing.assert_allclose(weight, theirs.coef_, atol=1e-5 * np.abs(theirs.coef_).max())
    np.testing.assert_allclose(bias - bias.mean(), theirs.intercept_, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_head_finds_the_rows_that_its_preparation_makes(sparse: bool) -> None:
    X, y = embeddings(each=5, width=6)
    rows = SparseRows(scipy.sparse.csr_matrix(X)) if sparse else torch.from_numpy(X)
    cpu = torch.device("cpu")
    samples = TensorSamples(rows, torch.from_numpy(y), None, cpu, torch.float64)
    given = torch.from_numpy(X)
    found = {name: (module(given), rows) for name, module, rows in preparations(samples, True)}
    assert list(found) == ["raw", "standard", "unit"] if not sparse else ["raw", "unit"]
    for prepared, rows in found.values():
        made = torch.from_numpy(rows.toarray()) if sparse else rows
        torch.testing.assert_close(prepared.double(), made.double())


@pytest.mark.parametrize(("decay", "first", "last"), [("cosine", 1, 0), ("constant", 1, 1)])
def test_the_rate_falls_by_half_a_cosine_or_not_at_all(decay: str, first: int, last: int) -> None:
    factors = list(rate_factors(decay, 100))
    assert factors[0] == first
    assert factors[50] == pytest.approx((first + last) / 2)
    assert factors[99] == pytest.approx(last, abs=3e-4)
    assert factors == sorted(factors, reverse=True)


def test_tolerance_is_relative_to_the_loss() -> None:
    """Where classes lie far apart the loss is small, and so is what may be left of it."""
    X, y = embeddings(classes=3, each=20, width=10, spread=0.3)
    rows, labels = torch.from_numpy(X), torch.from_numpy(y)
    weights = torch.full((len(y), 1), 1 / len(y), dtype=torch.float64)
    axes = linear_solver.centred(rows, weights[:, 0], lambda head: head)
    problems = linear_solver.Problems(axes, labels, weights)
    start = torch.zeros(1, 3, 11, dtype=torch.float64)
    best, _ = linear_solver.minimise(problems, start, 1e-4, 1e-9, 10_000)
    least = problems.evaluate(best, 1e-4)[0]
    assert least < 0.01
    for tolerance in (0.01, 0.003):
        rough, _ = linear_solver.minimise(problems, start, 1e-4, tolerance, 10_000)
        assert least <= problems.evaluate(rough, 1e-4)[0] <= 1.02 * least


def test_a_solution_is_the_first_step_within_the_tolerance() -> None:
    """The Newton decrement against the square root of the loss; of 0.001 where it is smaller."""
    for spread, penalty, tolerance in ((2.0, 1e-2, 0.1), (0.05, 1e-7, 0.01)):
        X, y = embeddings(classes=3, each=20, width=10, spread=spread)
        labels = torch.from_numpy(y)
        weights = torch.full((len(y), 1), 1 / len(y), dtype=torch.float64)
        axes = linear_solver.centred(torch.from_numpy(X), weights[:, 0], lambda head: head)
        problems = linear_solver.Problems(axes, labels, weights)
        start = torch.zeros(1, 3, 11, dtype=torch.float64)
        # All classes are as likely at the start: p (1 - p) is 2/9.
        inverse = torch.cat([axes.curvature * 2 / 9 + penalty, torch.tensor([2 / 9])])

        def far(steps: int) -> float:
            """By how much the squared decrement is above what is allowed."""
            heads, _ = linear_solver.minimise(problems, start, penalty, tolerance, steps)  # noqa: B023
            value, gradient = problems.evaluate(heads, penalty)  # noqa: B023
            decrement = float((gradient.square() / inverse).sum())  # noqa: B023
            return decrement - tolerance**2 * max(float(value), 1e-3)  # noqa: B023

        _, steps = linear_solver.minimise(problems, start, penalty, tolerance, 1000)
        assert far(steps) <= 0 < far(steps - 1)


def test_small_losses_fall_as_far_in_single_precision() -> None:
    """What rounding hides is a part of the loss: a hundred-thousandth is progress, of 0.0002."""
    X, y = embeddings(classes=40, each=20, width=20)
    found = []
    for dtype in (torch.float32, torch.float64):
        weights = torch.full((len(y), 1), 1 / len(y), dtype=dtype)
        axes = linear_solver.centred(torch.tensor(X, dtype=dtype), weights[:, 0], lambda head: head)
        problems = linear_solver.Problems(axes, torch.from_numpy(y), weights)
        start = torch.zeros(1, 40, 21, dtype=dtype)
        heads, _ = linear_solver.minimise(problems, start, 1e-7, 3e-4, 1000)
        found.append(float(problems.evaluate(heads, 1e-7)[0]))
    assert found[0] == pytest.approx(found[1], rel=0.003)


def test_the_axes_are_those_of_the_smaller_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of features with each other or of samples with each other; a sparse matrix stays sparse."""
    sizes = []
    principal = linear_solver.principal
    monkeypatch.setattr(
        linear_solver, "principal", lambda each: sizes.append(tuple(each.shape)) or principal(each)
    )
    monkeypatch.setattr(linear_solver, "DENSE", 5)
    for count, width in ((9, 4), (4, 9)):
        X = np.random.default_rng(0).normal(size=(count, width))
        weights = torch.ones(count).double()
        dense = linear_solver.axes(torch.from_numpy(X), weights)
        sparse = linear_solver.axes(scipy.sparse.csr_matrix(X), weights)
        torch.testing.assert_close(sparse.rows @ sparse.rows.T, dense.rows @ dense.rows.T)
    assert sizes == [(4, 4), (9, 9), (4, 4), (4, 4)]
    sizes.clear()
    for rotated in (4, 3):  # too many are not rotated
        monkeypatch.setattr(linear_solver, "ROTATED", rotated)
        for count, width in ((9, 4), (4, 9)):
            linear_solver.axes(torch.randn(count, width).double(), torch.ones(count).double())
    assert sizes == [(4, 4), (4, 4)]


def test_many_sparse_rows_are_solved_without_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = embeddings(each=10, width=12)
    X[np.abs(X) < 0.5] = 0
    rows = scipy.sparse.csr_matrix(X)
    monkeypatch.setattr(linear_solver, "SEARCHING", 1e-6)
    model = linear(standardize=False).fit(rows, y)
    monkeypatch.setattr(linear_solver, "ROTATED", 5)
    monkeypatch.setattr(linear_solver, "DENSE", 5)
    monkeypatch.setattr(linear_solver, "PARAMETERS", 1)
    other = linear(standardize=False).fit(rows, y)
    np.testing.assert_allclose(other.predict_proba(rows), model.predict_proba(X), atol=1e-3)


def test_rows_in_parts_are_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = embeddings()
    whole = linear().fit(X, y).predict_proba(X)
    monkeypatch.setattr(linear_solver, "ENTRIES", 100)
    axes = linear_solver.centred(torch.from_numpy(X), torch.ones(32).double() / 32, lambda x: x)
    problems = linear_solver.Problems(axes, torch.from_numpy(y), torch.ones(32, 5).double() / 32)
    parts = problems.parts(torch.zeros(5, 4, 21))  # of 100 logits: 5 rows of 5 problems, 4 classes
    assert [part.indices(32)[:2] for part in parts] == [
        (i, min(i + 5, 32)) for i in range(0, 32, 5)
    ]
    np.testing.assert_allclose(linear().fit(X, y).predict_proba(X), whole, rtol=1e-6)


def test_folds_spread_classes_and_keep_equal_samples_together() -> None:
    labels = torch.tensor([0] * 10 + [1] * 3 + [2])
    marks = torch.arange(14).double()
    marks[1] = marks[0]
    fold = assign_folds(marks, labels, 5, 0)
    assert fold[0] == fold[1]
    assert fold[13] == -1
    assert torch.bincount(fold[1:10], minlength=5).tolist() != [9, 0, 0, 0, 0]
    assert torch.bincount(fold[1:10], minlength=5).amax() <= 2
    assert len(set(fold[10:13].tolist())) == 3
    order = torch.randperm(14)
    assert torch.equal(assign_folds(marks[order], labels[order], 5, 0), fold[order])
    assert not torch.equal(assign_folds(marks, labels, 5, 1), fold)


@pytest.mark.parametrize("factor", [0.4, 0.9, 7.0, 40.0])
def test_the_temperature_is_the_best(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((factor * logits).softmax(1), 1, generator=generator)[:, 0]
    found, losses = calibrated(logits, labels, torch.ones(4000))
    assert found == pytest.approx(factor, rel=0.2)
    for other in (found / 1.03, found * 1.03):
        worse = torch.nn.functional.cross_entropy(logits * other, labels)
        assert float(worse) > float(losses.mean())


def test_few_right_samples_do_not_make_sure() -> None:
    """As Platt's targets: of n held-out samples that are all right, one in n + 2 may be wrong."""
    logits = torch.tensor([[3.0, -3.0], [-3.0, 3.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    factor, _ = calibrated(logits, labels, torch.ones(2))
    assert float((factor * logits).softmax(1)[0, 0]) == pytest.approx(3 / 4, abs=0.01)
    factor, _ = calibrated(logits, labels, torch.full((2,), 49.0))
    assert float((factor * logits).softmax(1)[0, 0]) == pytest.approx(99 / 100, abs=0.001)


def test_wrong_samples_tell_more_than_a_doubt() -> None:
    """One of 10 is wrong: the doubt of half a sample in 12 counts half."""
    logits = torch.tensor([[3.0, -3.0]], dtype=torch.float64).expand(10, 2)
    labels = torch.tensor([0] * 9 + [1])
    factor, _ = calibrated(logits, labels, torch.ones(10))
    doubt = 1 / 12 / 2
    expected = (9 * (1 - doubt) + doubt) / 10
    found = float((factor * logits).softmax(1)[0, 0])
    assert found == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_head_that_rounding_holds_up_is_finished(dtype: Any) -> None:
    """Separable classes and a weak penalty: losses cannot fall further, gradients are noise."""
    X, y = embeddings(classes=6, each=10, width=120, spread=0.1)
    rows = torch.from_numpy(X.astype(dtype))
    labels = torch.from_numpy(y)
    fold = assign_folds(torch.arange(len(y)).double(), labels, 5, 0)
    found = Search(rows - rows.mean(0), labels, torch.ones(len(y)).double(), fold, 6)
    found.chosen.share = 1e-7
    before = found.iterations
    found.finish()
    assert found.iterations - before < 300


def test_units_of_single_features_do_not_matter() -> None:
    """One large feature must not hide the others, also where no sample can be held out."""
    units = 10 ** np.random.default_rng(3).uniform(-3, 3, size=30)
    for each in (1, 6):
        X, y = embeddings(classes=10, each=each, width=30, spread=0.5)
        test, truth = embeddings(classes=10, each=20, width=30, spread=0.5, seed=1)
        score = linear().fit(X * units, y).score(test * units, truth)
        assert score > linear().fit(X, y).score(test, truth) - 0.05


def test_features_that_are_all_equal_say_nothing() -> None:
    y = np.array(["a"] * 6 + ["b"] * 3)
    model = linear().fit(np.full((9, 3), 0.7), y)
    np.testing.assert_allclose(model.predict_proba(np.zeros((1, 3))), [[2 / 3, 1 / 3]], atol=0.02)
    assert model.predict(np.ones((1, 3))) == ["a"]


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_a_search_begins_where_the_penalty_is_that_of_the_curvature(unit: float) -> None:
    """46 % of the squared length lie in one direction; the mean of p (1 - p) is 3/16: 0.086."""
    parts = torch.tensor([0.46, 0.27, 0.27]).double()
    rows = (3 * parts).sqrt().diag().repeat(4, 1)
    features = unit * torch.cat([rows, -rows])
    labels = torch.arange(24) % 4
    fold = assign_folds(torch.arange(24).double(), labels, 3, 0)
    found = Search(features, labels, torch.ones(24).double(), fold, 4)
    assert found.path[0]["penalty"] == pytest.approx(0.1)  # the next is 0.03


@pytest.mark.parametrize("begun", [0, 5])
def test_a_search_walks_to_the_best_penalty_from_both_sides(
    begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = embeddings(each=12, width=60, spread=2.5)
    features = torch.from_numpy(X - X.mean(0))
    labels = torch.from_numpy(y)
    fold = assign_folds(torch.arange(len(y)).double(), labels, 4, 0)
    ones = torch.ones(len(y)).double()
    free = Search(features, labels, ones, fold, 4)
    monkeypatch.setattr(Search, "_start", lambda self: begun)
    found = Search(features, labels, ones, fold, 4)
    assert found.best.loss < 1.05 * free.best.loss


def test_heads_of_folds_are_those_of_logistic_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weakest penalty and more features than samples, also on a second preparation."""
    X, y = embeddings(classes=2, each=10, width=30, spread=3.0)
    X = X - X.mean(0)
    labels, ones = torch.from_numpy(y), torch.ones(len(y)).double()
    fold = assign_folds(torch.arange(len(y)).double(), labels, 5, 0)
    monkeypatch.setattr(linear_solver, "PATIENCE", 20)
    monkeypatch.setattr(Search, "_weaker", lambda self, point: True)
    first = Search(torch.from_numpy(X), labels, ones, fold, 2)
    first.best.share, first.best.losses = 1e-7, first.best.losses + 9
    found = Search(torch.from_numpy(X), labels, ones, fold, 2, first)
    assert found.chosen.share == pytest.approx(1e-7)
    ours, theirs = found.chosen.held_out.diff(dim=1)[:, 0].numpy(), np.zeros(len(y))
    for part in (fold == each for each in range(5)):
        c = 1 / (1e-7 * found.length * int((~part).sum()))
        theirs[part] = (
            LogisticRegression(C=c, max_iter=10_000, tol=1e-8)
            .fit(X[~part], y[~part])
            .decision_function(X[part])
        )
    assert np.corrcoef(ours, theirs)[0, 1] > 0.97


def test_a_search_that_is_far_behind_ends_early() -> None:
    X, y = embeddings(each=12, width=30, spread=0.5)
    units = torch.from_numpy(10 ** np.random.default_rng(3).uniform(-3, 3, size=30))
    features = torch.from_numpy(X - X.mean(0))
    labels, ones = torch.from_numpy(y), torch.ones(len(y)).double()
    fold = assign_folds(torch.arange(len(y)).double(), labels, 4, 0)
    best = Search(features, labels, ones, fold, 4)
    alone = Search(features * units, labels, ones, fold, 4)
    behind = Search(features * units, labels, ones, fold, 4, best)
    assert best.best.loss < alone.best.loss
    assert len(behind.path) < len(alone.path)


def test_far_ahead_is_two_standard_errors_and_four_steps() -> None:
    """k of n losses that are higher by the same have a gap of the root of k standard errors."""
    X, y = embeddings(each=8)
    fold = assign_folds(torch.arange(len(y)).double(), torch.from_numpy(y), 4, 0)
    found = Search(
        torch.from_numpy(X - X.mean(0)), torch.from_numpy(y), torch.ones(len(y)).double(), fold, 4
    )
    for higher in (0.01, 100.0):
        for count, ahead in ((3, False), (5, True)):
            extra = higher * (torch.arange(len(y)) < count)
            point = replace(found.best, losses=found.best.losses + extra)
            gap = higher * count / len(y)
            assert found.ahead(point, gap / 4.01) == ahead
            assert not found.ahead(point, gap / 3.99)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_few_labels(each: int) -> None:
    X, y = embeddings(each=each, spread=0.3)
    model = linear().fit(X, y)
    assert model.score(*embeddings(seed=1)) > 0.9
    assert np.isnan(model.held_out_margins_).all() == (each == 1)
    assert np.isfinite(model.score_samples(X)).all()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_scores_are_in_standard_deviations_of_what_was_held_out(sparse: bool) -> None:
    """Their sum, where there are two: the largest logit, and the cosine with a class mean."""
    X, y = embeddings(each=40)
    model = linear(standardize=False).fit(scipy.sparse.csr_matrix(X) if sparse else X, y)
    Z, _ = embeddings(each=40, seed=1)
    found = model.score_samples(scipy.sparse.csr_matrix(Z) if sparse else Z)
    logits = model.decision_function(Z).max(1)
    rest = found - logits / model._spreads[0]
    if sparse:
        np.testing.assert_allclose(rest, 0, atol=1e-9)
        return
    features = torch.from_numpy(model.transform(X))
    sums = torch.zeros(4, features.shape[1], dtype=features.dtype)
    sums.index_add_(0, torch.from_numpy(y), features)
    own = torch.cosine_similarity(sums[torch.from_numpy(y)] - features, features)
    assert float(own.std()) == pytest.approx(model._spreads[1], rel=1e-5)
    assert np.std(logits) == pytest.approx(model._spreads[0], rel=0.3)
    assert np.std(rest) == pytest.approx(1, rel=0.3)


def test_a_long_tail() -> None:
    X, y = embeddings(classes=5, each=40, spread=1.5)
    kept = np.concatenate([np.flatnonzero(y == c)[:n] for c, n in enumerate((40, 15, 6, 2, 1))])
    test, truth = embeddings(classes=5, each=40, spread=1.5, seed=1)
    plain = linear().fit(X[kept], y[kept])
    even = linear(class_weight="balanced").fit(X[kept], y[kept])
    rare = truth >= 3
    assert even.score(test[rare], truth[rare]) > plain.score(test[rare], truth[rare])
    assert np.isnan(plain.held_out_margins_).sum() == 1


def test_the_search_finds_signal_and_noise() -> None:
    """Weak penalties where classes are far apart, strong ones where labels are noise."""
    rng = np.random.default_rng(0)
    X, y = embeddings(each=30)
    clear = linear().fit(X, y)
    noise = linear().fit(X, rng.permutation(y))
    assert min(noise.history_["valid_loss"]) > math.log(4) - 0.05
    assert noise.predict_proba(X).max(1).mean() < 0.5 < clear.predict_proba(X).max(1).mean()
    assert clear.history_.keys() == {"preparation", "penalty", "valid_loss", "valid_accuracy"}
    assert set(clear.history_["preparation"]) == {"raw", "standard", "unit"}
    assert set(linear(standardize=False).fit(X, y).history_["preparation"]) == {"raw"}


def test_units_and_scales_of_the_inputs_do_not_matter() -> None:
    X, y = embeddings(spread=1.5)
    found = linear().fit(X, y).predict_proba(X)
    np.testing.assert_allclose(linear().fit(1000 * X, y).predict_proba(1000 * X), found, rtol=1e-4)


def test_wrong_labels_have_negative_margins() -> None:
    X, y = embeddings(each=25)
    wrong = np.arange(0, 100, 11)
    given = y.copy()
    given[wrong] = (y[wrong] + 1) % 4
    margins = linear().fit(X, given).held_out_margins_
    assert set(np.argsort(margins)[: len(wrong)]) == set(wrong)
    assert (margins[wrong] < 0).all()


@pytest.mark.parametrize("classes", [2, 4])
def test_gaps_are_margins_of_the_likeliest_class(classes: int) -> None:
    X, y = embeddings(classes=classes, each=12, spread=4.0)
    model = linear().fit(X, y)
    margins, gaps = model.held_out_margins_, model.held_out_gaps_
    right = margins > 0
    assert 0 < right.sum() < len(y)
    assert (gaps >= 0).all()
    np.testing.assert_allclose(gaps[right], margins[right], rtol=1e-6)
    if classes == 2:
        np.testing.assert_allclose(gaps, np.abs(margins), rtol=1e-6)


def test_inputs_of_no_class_score_low() -> None:
    X, y = embeddings(each=20)
    model = linear().fit(X, y)
    other = np.random.default_rng(5).normal(size=(60, 20)) * 1.2
    assert np.median(model.score_samples(other)) < np.quantile(model.score_samples(X), 0.05)
    assert not hasattr(
        LargeMarginClassifier(hidden_sizes=(4,), epochs=1).fit(X, y), "score_samples"
    )


def test_a_held_out_part_replaces_the_folds() -> None:
    X, y = embeddings(each=20)
    model = linear(early_stopping=True, validation_fraction=0.25).fit(X, y)
    assert np.isfinite(model.held_out_margins_).sum() == 20
    assert model.score(X, y) > 0.9


def test_embeddings_get_a_linear_head_and_tables_a_network() -> None:
    X, y = embeddings(width=130)
    model = LargeMarginClassifier(epochs=1, random_state=0)
    assert model.fit(X, y).transform(X).shape == X.shape
    assert hasattr(model, "held_out_margins_")
    assert model.fit(scipy.sparse.csr_matrix(X), y).transform(X[:3]).shape == (3, 130)
    for other in (X[:, :20], np.round(X)):
        fitted = clone(model).fit(other, y)
        assert fitted.transform(other).shape == (len(y), 64)
        assert fitted.criterion_.objective.terms.keys() == {"cosface"}
    with pytest.raises(lm.LargeMarginError, match="hidden_sizes must be"):
        LargeMarginClassifier(hidden_sizes="deep").fit(X, y)
    with pytest.raises(lm.LargeMarginError, match="folds must be"):
        linear(folds=1).fit(X, y)


def test_training_goes_on_from_the_head() -> None:
    X, y = embeddings(spread=2.0)
    model = linear(lr=1e-4).fit(X, y)
    before = model.predict_proba(X)
    model.partial_fit(X, y)
    after = model.predict_proba(X)
    assert 0 < np.abs(after - before).max() < 0.1
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.score_samples(X), model.score_samples(X))


def test_a_named_loss_converges_by_lbfgs() -> None:
    X, y = embeddings(each=20, spread=2.0)
    settings: dict[str, Any] = {"optimizer": "lbfgs", "epochs": 10, "weight_decay": 0.01}
    model = linear("cross_entropy", **settings).fit(X, y)
    Z = (X - X.mean(0)) / X.std(0)
    theirs = LogisticRegression(C=1 / (0.01 * len(y)), tol=1e-9, max_iter=1000).fit(Z, y)
    np.testing.assert_allclose(model.predict_proba(X), theirs.predict_proba(Z), atol=1e-3)
    face = linear("cosface", objective_params={"scale": 16.0, "margin": 0.1}, **settings)
    losses = face.fit(X, y).history_["loss"]
    assert losses[-1] < losses[0]
    assert face.criterion_.head.similarity == "cosine"


def test_the_page_on_embeddings_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "embeddings.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert names["accuracy"] > 0.9
    assert names["found"] >= 0.7
    assert names["auroc"] > 0.8
