"""Every number of a measurement against loops in NumPy."""

import inspect
import math

import numpy as np
import pytest
import torch
from measuring.alike import same
from oracles import measurement as oracle
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.heads.head_spec import HeadView
from largemargin.measuring import measure, measure_arrays, scores
from largemargin.measuring.calibration import auroc, calibration
from largemargin.measuring.stream import Stream

SIMILARITIES = ("dot", "cosine", "cosine_prototypes", "euclidean")


def problem(seed: int, n: int = 40, c: int = 4, d: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Features near their class vectors, so that some samples are right and some wrong."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(c, d, generator=generator)
    labels = torch.randint(c, (n,), generator=generator)
    features = weight[labels] + 1.2 * torch.randn(n, d, generator=generator)
    return features, labels, weight


def close(got: object, want: object, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(
        np.asarray(got, dtype=np.float64), np.asarray(want), rtol=rtol, atol=1e-11
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_every_number_of_every_sample(similarity: str, with_bias: bool) -> None:
    features, labels, weight = problem(1)
    bias = torch.linspace(-0.5, 0.5, 4) if with_bias else None
    stream = Stream(HeadView(weight, bias, similarity, 3.0))
    stream.add(features[:17], labels[:17])
    stream.add(features[17:], labels[17:])
    want = oracle.per_sample(
        features.numpy(), labels.numpy(), weight.numpy(), bias, similarity, 3.0
    )
    assert 0 < (want["predicted"] == labels.numpy()).sum() < len(labels)
    for name, values in want.items():
        if with_bias and similarity == "cosine" and name in ("distance", "boundary"):
            values = np.full_like(values, np.nan)  # boundaries are cones
        if with_bias and similarity == "cosine" and name == "lead_distance":
            values = np.full_like(values, np.nan)
        close(stream.column(name), values)
    assert stream.column("index").tolist() == list(range(40))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_geometry(similarity: str) -> None:
    features, labels, weight = problem(2)
    bias = None if similarity == "cosine" else torch.tensor([0.3, -0.2, 0.1, 0.0])
    q, y, W = features.numpy(), labels.numpy(), weight.numpy()
    g = measure_arrays(
        *(features, labels, weight, bias),
        similarity=similarity,
        scale=2.0,
        pairwise=True,
        radius=2.0,
    )
    want = oracle.per_sample(q, y, W, bias, similarity, 2.0)
    correct = want["predicted"] == y
    assert (g.samples, g.classes, g.dim, g.similarity, g.scale) == (40, 4, 5, similarity, 2.0)
    close(g.accuracy, correct.mean())
    close(g.loss, want["loss"].mean())
    for name in ("raw", "cosine", "distance"):
        check_distribution(g.margins[name].overall, want[name])
        by_class = g.margins[name].classes
        for c in range(4):
            own = want[name][y == c]
            assert by_class.counts[c] == len(own)
            close(by_class.minimum[c], own.min())
            close(by_class.mean[c], own.mean())
            close(by_class.std[c], own.std())
            close(by_class.ratio[c], own.mean() / own.std())
            close(by_class.median[c], np.median(own))
            close(by_class.q05[c], np.quantile(own, 0.05))
    check_distribution(g.feature_norm, want["norm"])
    check_distribution(g.softmax_bias, want["softmax_bias"])
    order = np.argsort(want["raw"], kind="stable")[:20]
    assert [each.index for each in g.worst] == order.tolist()
    for name in ("predicted", "rival", "raw", "cosine", "distance"):
        close([getattr(each, name) for each in g.worst], want[name][order])
    assert [each.label for each in g.worst] == y[order].tolist()

    variance = oracle.variance(q, y)
    close(g.variance.ratio, variance["between"] / variance["within"])
    for name, value in variance.items():
        close(getattr(g.variance, name), value)
    assert g.collapse is not None
    for name, value in oracle.collapse(q, y, W, want["predicted"]).items():
        close(getattr(g.collapse, name), value)
    compact = oracle.compactness(q, y, 4, 2.0)
    assert g.compactness is not None
    assert 0 < g.compactness.inside_radius < 1
    for name, value in compact.items():
        close(getattr(g.compactness, name), value)
    close(g.compactness.largest_dispersion, compact["dispersion"].max())
    close(g.compactness.ideal_ratio, compact["dispersion"].max() / compact["separation"])
    i, j = g.compactness.closest_samples
    assert y[i] != y[j]
    close(np.linalg.norm(q[i].astype(float) - q[j]), compact["separation"])
    for name, column in (("margin", "boundary"), ("signed_margin", "distance")):
        want_margin = [want[column][y == c].min() for c in range(4)]
        close(getattr(g.compactness, name), want_margin)
    means = oracle.class_means(q, y, 4)
    apart = [[np.linalg.norm(a - b) for b in means] for a in means]
    close(g.centers.distances, apart)
    first, second = g.centers.closest_classes
    close(g.centers.smallest_distance, apart[first][second])
    close(g.centers.smallest_distance, min(x for row in apart for x in row if x > 0))
    for name, value in oracle.prototypes(W).items():
        close(getattr(g.prototypes, name), value)
    assert g.prototypes.angles is not None
    first, second = g.prototypes.closest_classes
    close(g.prototypes.angles[first][second], g.prototypes.class_margin)
    close(g.prototypes.ceiling, math.degrees(math.acos(-1 / 3)))
    close(g.prototypes.reachable, g.prototypes.ceiling)

    error, largest = oracle.calibration_error(want["confidence"], correct)
    close(g.calibration.expected_error, error)
    close(g.calibration.largest_error, largest)
    assert (g.errors.kept, g.errors.rejected) == (correct.sum(), (~correct).sum())
    for name, value in g.errors.auroc.items():
        close(value, oracle.auroc(want[name][correct], want[name][~correct]))
    assert g.notes == ()


def check_distribution(found: object, values: np.ndarray) -> None:
    close(found.count, len(values))
    close(found.mean, values.mean())
    close(found.std, values.std())
    close(found.ratio, values.mean() / values.std())
    close(list(found.quantiles.values()), np.quantile(values, list(found.quantiles)))
    close((found.minimum, found.median, found.maximum), np.quantile(values, (0, 0.5, 1)))
    counts, edges = np.histogram(values, bins=len(found.counts))
    assert list(found.counts) == counts.tolist()
    close(found.edges, edges)


def test_ood_data() -> None:
    features, labels, weight = problem(3)
    others = torch.randn(13, 5)
    g = measure_arrays(features, labels, weight, ood=others)
    known = oracle.per_sample(features.numpy(), labels.numpy(), weight.numpy())
    strange = oracle.per_sample(others.numpy(), np.zeros(13, int), weight.numpy())
    assert g.ood is not None
    assert (g.ood.kept, g.ood.rejected) == (40, 13)
    for name, value in g.ood.auroc.items():
        close(value, oracle.auroc(known[name], strange[name]))


def test_many_classes_are_measured_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some number of classes tables are cut and boundary normals are not kept."""
    features, labels, weight = problem(4, n=50, c=9)
    bias = torch.linspace(-1, 1, 9)
    few = measure_arrays(features, labels, weight, bias, pairwise=True)
    monkeypatch.setattr(scores, "LENGTH_CLASSES", 4)
    monkeypatch.setattr(scores, "TABLE_CELLS", 27)
    assert scores.HeadScores(HeadView(weight)).rows_at_once == 16
    same(measure_arrays(features, labels, weight, bias, pairwise=True), few)


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_batches_do_not_matter(batch_size: int) -> None:
    features, labels, weight = problem(5)
    whole = measure_arrays(features, labels, weight, pairwise=True)
    same(measure_arrays(features, labels, weight, pairwise=True, batch_size=batch_size), whole)


def test_numpy_arrays_are_welcome() -> None:
    features, labels, weight = problem(6)
    want = measure_arrays(features, labels, weight, weight[:, 0])
    got = measure_arrays(
        *(each.numpy() for each in (features, labels, weight, weight[:, 0]))  # type: ignore[arg-type]
    )
    assert got == want


@pytest.mark.parametrize(
    ("confidence", "place"), [(0.2, 2), (0.2000001, 3), (1.0, 14), (1e-9, 0), (1 / 15, 0)]
)
def test_confidence_on_a_border_belongs_below(confidence: float, place: int) -> None:
    found = calibration(torch.tensor([confidence], dtype=torch.float64), torch.tensor([True]))
    assert found.counts[place] == 1
    assert found.counts == tuple(int(i == place) for i in range(15))


def test_auroc_counts_ties_half() -> None:
    scores_of = torch.tensor([0.0, 1.0, 1.0, 2.0])
    close(auroc(scores_of, torch.tensor([1.0, 0.5])), oracle.auroc([0, 1, 1, 2], [1, 0.5]))
    assert auroc(scores_of, scores_of) == 0.5
    assert math.isnan(auroc(scores_of, torch.zeros(0)))
    assert math.isnan(auroc(scores_of, torch.tensor([math.nan])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(39, dtype=torch.long)}, r"that of labels \(39,\)"),
        ({"labels": torch.full((40,), 4)}, r"lie in \[0, 4\)"),
        ({"labels": torch.rand(40)}, "must be integers"),
        ({"labels": torch.rand(40, 4)}, "soft targets"),
        ({"features": torch.randn(40, 6)}, "must have 5 columns"),
        ({"features": torch.randn(40, 5).long()}, "must be floating point"),
        ({"bias": torch.zeros(3)}, "one number per row"),
        ({"weight": torch.randn(1, 5)}, "at least 2 classes"),
        ({"weight": torch.full((4, 5), math.nan)}, "must be finite"),
        ({"similarity": "angle"}, "similarity must be one of"),
        ({"scale": 0.0}, "scale must be"),
        ({"worst": -1}, "worst must be"),
        ({"bins": 0}, "bins must be"),
        ({"radius": -1.0}, "radius must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"ood": torch.full((2, 5), math.inf)}, "given as ood"),
        ({"ood": torch.ones(2, 5).index_fill(0, torch.tensor(1), math.inf)}, "given as ood"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, object], message: str) -> None:
    features, labels, weight = problem(7)
    given = {"features": features, "labels": labels, "weight": weight} | change
    with pytest.raises(LargeMarginError, match=message):
        measure_arrays(**given)  # type: ignore[arg-type]


def test_settings_that_are_not_given() -> None:
    given = {name: each.default for name, each in inspect.signature(measure).parameters.items()}
    own = {
        name: each.default for name, each in inspect.signature(measure_arrays).parameters.items()
    }
    shared = {"pairwise": False, "sphere": False, "radius": 0.5, "worst": 20, "bins": 50}
    assert {name: given[name] for name in shared} == shared
    assert {name: own[name] for name in shared} == shared
    assert (own["similarity"], own["scale"], own["batch_size"]) == ("dot", 1.0, 8192)
    assert measure_arrays(torch.eye(2), torch.arange(2), torch.eye(2)).samples == 2
