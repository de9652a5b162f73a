"""Collapsed classes, classes without samples, single samples, zeros, ties, wrong loaders."""

import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.heads.head_spec import HeadView
from largemargin.measuring import (
    Geometry,
    accuracy_of,
    measure,
    measure_arrays,
    measure_input_margins,
)
from largemargin.measuring.batches import _length
from largemargin.measuring.feature_geometry import _with_room
from largemargin.measuring.layers import LayerFacts, LayerStream
from largemargin.measuring.stream import PER_SAMPLE, ClassSums, Stream


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_collapsed_classes_are_exactly_so(offset: float, batch_size: int) -> None:
    """The simplex with its own rows as features: every measure of collapse is at its limit."""
    simplex = lm.simplex(4, 5, dtype=torch.float64)
    labels = torch.arange(21) % 4
    features = (simplex * 0.3 + offset)[labels]
    g = measure_arrays(features, labels, simplex, pairwise=True, batch_size=batch_size)
    assert g.variance.within == 0
    assert g.variance.ratio == math.inf
    assert g.collapse is not None
    assert g.collapse.variability == 0
    tolerance = 1e-14 * max(offset, 1)
    for name in ("norm_spread", "angle_spread", "simplex_gap", "duality"):
        assert getattr(g.collapse, name) == pytest.approx(0, abs=10 * tolerance)
    assert g.compactness is not None
    assert g.compactness.dispersion == (0.0,) * 4
    assert g.compactness.ideal_ratio == 0
    assert g.compactness.inside_radius == 1
    if offset == 0:
        assert g.accuracy == 1
        assert g.collapse.nearest_center == 0
        spread = g.margins["raw"].overall
        assert spread.std == pytest.approx(0, abs=1e-15)
        assert spread.mean == pytest.approx(0.4)
        assert g.prototypes.symmetry == pytest.approx(0, abs=1e-14)
        assert g.prototypes.class_margin == pytest.approx(g.prototypes.ceiling)


def test_a_class_without_samples() -> None:
    features, labels = torch.randn(20, 3), torch.arange(20) % 2 * 3  # classes 0 and 3 of 5
    g = measure_arrays(features, labels, torch.randn(5, 3), pairwise=True)
    assert g.notes == ("no samples of class 1, 2, 4: numbers by class are NaN there",)
    assert g.compactness is not None
    assert g.centers.distances is not None
    for by_class in (
        g.margins["raw"].classes.mean,
        g.margins["distance"].classes.q05,
        g.compactness.dispersion,
        g.compactness.margin,
        g.compactness.signed_margin,
        g.centers.distances[0],
    ):
        assert [math.isnan(each) for each in by_class] == [False, True, True, False, True]
    assert g.collapse is not None
    assert math.isfinite(g.collapse.variability)
    assert g.centers.closest_classes == (0, 3)


def test_one_class_has_samples() -> None:
    g = measure_arrays(torch.randn(6, 3), torch.full((6,), 1), torch.randn(3, 3), pairwise=True)
    assert g.collapse is None
    assert g.compactness is not None
    assert g.compactness.separation == math.inf
    assert g.compactness.closest_samples == ()
    assert math.isnan(g.centers.smallest_distance)
    assert g.variance.between == 0
    assert any("two classes" in note for note in g.notes)
    assert any("one class only" in note for note in g.notes)
    str(g)


def test_one_sample() -> None:
    g = measure_arrays(torch.ones(1, 3), torch.tensor([1]), torch.eye(3) * 2, pairwise=True)
    assert g.samples == 1
    raw = g.margins["raw"].overall
    assert (raw.mean, raw.std, raw.minimum, raw.maximum) == (0.0, 0.0, 0.0, 0.0)
    assert g.compactness is not None
    assert g.compactness.dispersion[1] == 0
    assert math.isnan(g.variance.ratio)
    assert "all features are equal: the ratio of variances is NaN" in g.notes
    assert Geometry.from_json(g.to_json()) == g
    str(g)


def test_means_that_coincide_are_found_at_any_place() -> None:
    for classes, feature in itertools.product((2, 3, 7), (0.1, 1 / 3, 1e6 + 0.1)):
        features = torch.full((4 * classes, 3), feature, dtype=torch.float64)
        g = measure_arrays(features, torch.arange(4 * classes) % classes, torch.ones(classes, 3))
        assert any(note.startswith("class means coincide: ") for note in g.notes)
        assert g.collapse is not None
        assert math.isnan(g.collapse.norm_spread)


def test_zero_features_and_zero_class_vectors() -> None:
    weight = torch.eye(3)
    weight[2] = 0
    g = measure_arrays(torch.zeros(9, 3), torch.arange(9) % 3, weight, pairwise=True)
    assert g.margins["cosine"].overall.maximum == g.margins["cosine"].overall.minimum == 0
    assert g.margins["distance"].overall.mean == 0
    assert g.loss == pytest.approx(math.log(3))
    assert g.calibration.expected_error == pytest.approx(0)
    assert g.collapse is not None
    assert math.isnan(g.collapse.variability)
    assert g.collapse.nearest_center == 0  # both take the first class
    assert any("class means coincide" in note for note in g.notes)
    assert any("class vector is zero" in note for note in g.notes)
    assert g.prototypes.magnitude_ratio == math.inf
    assert g.compactness is not None
    assert g.compactness.separation == 0
    assert g.compactness.ideal_ratio == math.inf
    str(g)


def test_equal_class_vectors_have_no_boundary() -> None:
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    g = measure_arrays(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 2]), weight)
    assert g.margins["distance"].classes.minimum[0] == 0
    assert g.margins["distance"].classes.minimum[2] == pytest.approx(math.sqrt(2))
    assert g.prototypes.class_margin == 0
    assert g.prototypes.riesz_energy == math.inf
    assert Geometry.from_json(g.to_json()) == g


def test_two_classes() -> None:
    features, labels = torch.randn(30, 4), torch.arange(30) % 2
    g = measure_arrays(features, labels, torch.randn(2, 4))
    assert g.softmax_bias.maximum == 0  # one rival: nothing is asked for beyond it
    assert g.prototypes.ceiling == 180
    assert g.collapse is not None
    for name in ("norm_spread", "angle_spread", "simplex_gap"):
        assert getattr(g.collapse, name) == pytest.approx(0, abs=1e-12)


def test_ties_go_to_the_lower_class() -> None:
    weight = torch.eye(3)
    features = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    g = measure_arrays(features, torch.tensor([1, 1, 2]), weight, worst=3)
    assert [each.predicted for each in g.worst] == [0, 1, 0]
    assert [each.rival for each in g.worst] == [0, 2, 0]
    assert [each.index for each in g.worst] == [0, 1, 2]  # equal margins in the order of samples


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_of_any_precision(dtype: torch.dtype) -> None:
    features, labels, weight = torch.randn(20, 4).to(dtype), torch.arange(20) % 3, torch.randn(3, 4)
    exact = measure_arrays(features.double(), labels, weight, pairwise=True)
    assert measure_arrays(features, labels, weight, pairwise=True) == exact


def test_features_far_from_the_origin_keep_their_digits() -> None:
    features = 1e7 + torch.randn(200, 4, dtype=torch.float64)
    labels = torch.arange(200) % 3
    near = measure_arrays(features - 1e7, labels, torch.randn(3, 4).double(), pairwise=True)
    far = measure_arrays(features, labels, torch.randn(3, 4).double(), pairwise=True)
    assert far.variance.within == pytest.approx(near.variance.within, rel=1e-12)
    assert far.variance.between == pytest.approx(near.variance.between, rel=1e-6)
    assert near.collapse is not None
    assert far.collapse is not None
    assert far.collapse.variability == pytest.approx(near.collapse.variability, rel=1e-6)
    assert near.compactness is not None
    assert far.compactness is not None
    assert far.compactness.dispersion == pytest.approx(near.compactness.dispersion, rel=1e-12)
    assert far.compactness.separation == pytest.approx(near.compactness.separation, rel=1e-12)


def test_wide_features_go_without_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["largemargin.measuring.stream"], "COVARIANCE_DIM", 3)
    g = measure_arrays(torch.randn(9, 4), torch.arange(9) % 3, torch.randn(3, 4))
    assert g.collapse is not None
    assert math.isnan(g.collapse.variability)
    assert math.isfinite(g.collapse.simplex_gap)
    assert any("NC1 needs a D x D covariance" in note for note in g.notes)
    g = measure_arrays(torch.randn(9, 3), torch.arange(9) % 3, torch.randn(3, 3))
    assert g.collapse is not None
    assert math.isfinite(g.collapse.variability)


def test_a_cosine_head_with_a_bias_has_no_flat_boundaries() -> None:
    g = measure_arrays(
        *(torch.randn(9, 4), torch.arange(9) % 3, torch.randn(3, 4), torch.randn(3)),
        similarity="cosine",
        pairwise=True,
    )
    assert math.isnan(g.margins["distance"].overall.mean)
    assert math.isfinite(g.margins["raw"].overall.mean)
    assert any("cosine head with a bias" in note for note in g.notes)
    assert math.isnan(g.errors.auroc["lead_distance"])
    assert g.compactness is not None
    assert all(math.isnan(each) for each in g.compactness.signed_margin)
    str(g)


def test_more_classes_than_matrices_are_kept_for() -> None:
    weight = torch.randn(600, 4)
    labels = torch.arange(1200) % 600
    g = measure_arrays(weight[labels] + 0.01 * torch.randn(1200, 4), labels, weight)
    assert g.prototypes.angles is None
    assert g.centers.distances is None
    assert len(g.prototypes.closest_classes) == 2
    assert math.isnan(g.prototypes.reachable)
    assert math.isfinite(g.margins["distance"].overall.mean)
    assert any("best packing" in note for note in g.notes)
    assert any("angle matrix" in note for note in g.notes)
    assert len(str(g).splitlines()) < 40


@pytest.mark.parametrize("classes", [4, 5])
def test_matrices_are_kept_for_so_many_classes(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["largemargin.measuring.feature_geometry"]
    monkeypatch.setattr(module, "MATRIX_CLASSES", 4)
    g = measure_arrays(torch.randn(9, 3), torch.arange(9) % classes, torch.randn(classes, 3))
    assert (g.prototypes.angles is not None) == (classes == 4)
    assert (g.centers.distances is not None) == (classes == 4)
    assert any("angle matrix" in note for note in g.notes) == (classes == 5)


@pytest.mark.parametrize("classes", [4, pytest.param(600, marks=pytest.mark.slow)])
def test_zero_class_vectors_are_at_right_angles(classes: int) -> None:
    weight = torch.eye(classes)
    weight[2:4] = 0
    nothing = torch.zeros(1, classes), torch.tensor([0])
    g = measure_arrays(*nothing, weight).prototypes
    assert g.class_margin == 90
    assert g.smallest_distance == pytest.approx(math.sqrt(2))
    weight[1, 0] = math.sqrt(1 / 8)  # 70.5 degrees from the first, farther than a zero is
    g = measure_arrays(*nothing, weight).prototypes
    assert g.closest_classes == (0, 1)
    assert g.class_margin == pytest.approx(math.degrees(math.acos(1 / 3)))
    assert g.smallest_distance == pytest.approx(math.sqrt(4 / 3))


@pytest.mark.parametrize("gap", [-50.0, -20.5, 0.0, 20.5, 50.0])
def test_the_loss_has_the_digits_of_float64(gap: float) -> None:
    """torch's softplus is the identity from 20 on, which is off by 2e-9."""
    features = torch.tensor([[gap, 0.0]], dtype=torch.float64)
    g = measure_arrays(features, torch.tensor([1]), torch.eye(2, dtype=torch.float64))
    exact = max(gap, 0) + math.log1p(math.exp(-abs(gap)))
    assert g.loss == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_few_dimensions(dim: int) -> None:
    g = measure_arrays(torch.randn(20, dim), torch.arange(20) % 5, torch.randn(5, dim))
    assert g.prototypes.class_margin <= g.prototypes.reachable + 1e-4
    assert g.prototypes.reachable <= g.prototypes.ceiling + 1e-9


@pytest.mark.parametrize("covariance", [False, True])
def test_sums_of_parts_are_sums_of_the_whole(covariance: bool) -> None:
    features = 5 + torch.randn(40, 3, dtype=torch.float64)
    labels = torch.randint(4, (40,))
    labels[:20].clamp_(max=2)

    def sums(part: slice) -> ClassSums:
        made = ClassSums.empty(5, 3, covariance=covariance, like=features)
        made.add(features[part], labels[part])
        return made

    whole, joined = sums(slice(0, 40)), sums(slice(0, 20))
    for part in (slice(20, 20), slice(20, 33), slice(33, 40)):
        joined.merge(sums(part))
    for name in ("counts", "means", "scatter", *(["within"] if covariance else [])):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name), equal_nan=True)


def test_a_stream_without_samples_has_columns_of_their_kinds() -> None:
    """As a process has that got none; the columns are joined with those of the others."""
    stream = Stream(HeadView(torch.eye(3), None, "dot", 1.0))
    for name in PER_SAMPLE:
        column = stream.column(name)
        whole = name in ("label", "index", "predicted", "rival")
        assert (column.shape, column.dtype) == ((0,), torch.long if whole else torch.float64)
    layer = LayerStream("body", LayerFacts("Linear", (3,), "none", 3), stream.sums, None)
    assert (layer.norm.shape, layer.norm.dtype) == ((0,), torch.float64)


class Ragged(nn.Module):
    """Calls its head as often as it is told to."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.fc, self.times = nn.Linear(3, 2), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.fc(x)[:, :1].expand(-1, 3)
        return x


X, Y = torch.randn(6, 3), torch.arange(6) % 2


@pytest.mark.parametrize(
    ("model", "loader", "message"),
    [
        (nn.Conv2d(3, 2, 1), [(X, Y)], "no linear layer"),
        (Ragged(0), [(X, Y)], "never calls its layer 'fc'"),
        (Ragged(2), [(X, Y)], "calls 2 times its layer 'fc'"),
        (nn.Linear(3, 1), [(X, Y)], "at least 2 classes"),
        (nn.LazyLinear(2), [(X, Y)], "lazy"),
        (lambda x: x, [(X, Y)], "must be an nn.Module"),
        (nn.Linear(3, 2), [X], "without labels"),
        (nn.Linear(3, 2), [(X,)], "without labels"),
        (nn.Linear(3, 2), [{"input": X}], "without labels"),
        (nn.Linear(3, 2), [(X, ["cat"] * 6)], "class indices, but the loader yields list of str"),
        (nn.Linear(3, 2), TensorDataset(X, Y), "yields single samples"),
        (nn.Linear(3, 2), [], "the data is empty"),
        (nn.Linear(3, 2), [(X[:0], Y[:0])], "the data is empty"),
        (nn.Linear(3, 2), [(X, torch.full((6,), -100))], "all of it is labelled -100"),
        (nn.Linear(3, 2), [(X, Y + 1)], r"lie in \[0, 2\) but row 1 holds 2"),
        (nn.Linear(3, 2), [(X, Y - 1)], r"lie in \[0, 2\) but row 0 holds -1"),
        (nn.Linear(3, 2), [(X, Y[:4])], "6 rows and 4 labels"),
        (nn.Linear(3, 2), [(X, Y.float())], "must be integers"),
        (nn.Linear(3, 2), [(X, torch.rand(6, 2))], "soft targets"),
        (nn.Linear(3, 2), [(X, Y), (X / 0, Y)], "sample 6 has NaN or infinite"),
        (nn.Linear(3, 2), [(X * math.nan, Y)], "sample 0 has NaN or infinite"),
    ],
)
def test_what_cannot_be_measured_is_refused(model: Any, loader: Any, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        measure(model, loader)


def test_class_156_of_bytes_is_none_to_skip() -> None:
    """In uint8, torch takes -100 for 156."""
    labels = torch.arange(200)
    x, model = torch.randn(200, 3), nn.Linear(3, 200)
    bytes_ = labels.to(torch.uint8)
    assert measure(model, [(x, bytes_)]) == measure(model, [(x, labels)])
    assert measure_arrays(x, bytes_, model.weight).samples == 200
    margins = measure_input_margins(model, [(x, bytes_)]).input
    assert margins is not None
    assert margins.samples == 200
    assert accuracy_of(model, [(x, bytes_)]).samples == 200


class Numbered:
    """A loader of samples that have positions, with a batch that nothing is left of."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.sampler = DistributedSampler(TensorDataset(x, y), 1, 0)  # an order of its own

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = list(self.sampler)
        for part in (order[:4], [], order[4:]):
            yield self.sampler.dataset[part]


@pytest.mark.parametrize("shape", [(6,), (6, 5)], ids=["samples", "sequences"])
def test_numbered_samples_keep_their_places(shape: tuple[int, ...]) -> None:
    model, x, y = nn.Linear(3, 2), torch.randn(*shape, 3), torch.randint(2, shape)
    found, wanted = measure(model, Numbered(x, y)), measure(model, [(x, y)])
    assert [each.index for each in found.worst] == [each.index for each in wanted.worst]
    assert (found.samples, found.loss) == (y.numel(), pytest.approx(wanted.loss))


def test_arrays_skip_the_labels_a_loader_skips() -> None:
    labels = Y.clone()
    labels[[0, 3]] = -100
    model = nn.Linear(3, 2)
    found = measure_arrays(X, labels, model.weight, model.bias, batch_size=2, pairwise=True)
    assert found == measure(model, [(X, labels)], pairwise=True)
    assert found.samples == 4
    assert {each.index for each in found.worst} == {1, 2, 4, 5}
    assert "2 samples labelled -100 were skipped" in found.notes
    with pytest.raises(LargeMarginError, match="all of it is labelled -100"):
        measure_arrays(X, torch.full((6,), -100), model.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ood": torch.randn(4, 2)}, "given as ood must have 3 columns"),
        ({"ood": torch.randn(3)}, "ood must have shape"),
        ({"labels": torch.tensor(1)}, "one entry per row of features"),
        ({"labels": Y[:4]}, "one entry per row of features"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        measure_arrays(**{"features": X, "labels": Y, "weight": torch.eye(3)[:2]} | change)


@pytest.mark.parametrize("change", [{"bins": 0}, {"worst": -1}, {"radius": -0.1}])
def test_settings_are_refused_before_a_sample_is_read(change: dict[str, Any]) -> None:
    def never() -> Iterator[tuple[Tensor, Tensor]]:
        yield pytest.fail("a sample was read")

    (name,) = change
    with pytest.raises(LargeMarginError, match=f"{name} must be"):
        measure(nn.Linear(3, 2), never(), **change)


def test_a_diverged_head_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.weight.data[1, 0] = math.nan
    with pytest.raises(LargeMarginError, match="weight must be finite"):
        measure(model, [(X, Y)])


def test_an_arrangement_wider_than_the_search_finds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 classes on the vertices of a 24-cell are 60 degrees apart, a short search ends below."""
    rows = [(i, j, a, b) for i in range(4) for j in range(i) for a in (-1, 1) for b in (-1, 1)]
    cell = torch.zeros(24, 4)
    for row, (i, j, a, b) in zip(cell, rows, strict=True):
        row[i], row[j] = a, b
    place = sys.modules["largemargin.measuring.feature_geometry"]
    monkeypatch.setattr(place, "widest_known", lambda classes, dim: math.radians(58.9))
    g = measure_arrays(cell, torch.arange(24), cell)
    assert g.prototypes.class_margin == pytest.approx(60)
    assert g.prototypes.reachable == pytest.approx(60)
    assert g.prototypes.reachable < g.prototypes.ceiling


def test_directions_of_rounding_are_none_of_collapse() -> None:
    """Behind a bottleneck, class means span two dimensions and rounding spans the others."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1000) % 10
    low = torch.randn(10, 2, generator=generator)[labels]
    low = low + 0.05 * torch.randn(1000, 2, generator=generator)
    rows = torch.linalg.qr(torch.randn(64, 2, generator=generator)).Q
    head = torch.randn(10, 64, generator=generator)
    want = measure_arrays(low, labels, head[:, :2]).collapse.variability
    for offset in (0.0, 100.0):
        found = measure_arrays(low @ rows.T + offset, labels, head).collapse
        assert found.variability == pytest.approx(want, rel=1e-3)
    same = torch.full((4, 3), 1e6)
    same[2:] += 0.0625  # the smallest difference there is
    g = measure_arrays(same, torch.tensor([0, 0, 1, 1]), torch.eye(2, 3))
    assert math.isnan(g.collapse.variability)
    assert any("but for rounding" in note for note in g.notes)


def test_a_batch_in_place_of_a_loader() -> None:
    with pytest.raises(lm.LargeMarginError, match=r"a single batch is \[\(inputs, labels\)\]"):
        lm.measure(nn.Linear(3, 2), (X, torch.zeros(len(X), dtype=torch.long)))


def test_a_batch_is_as_long_as_its_first_input() -> None:
    """A further input may hold one thing for all samples."""
    several = torch.zeros(3, 2), torch.zeros(5)
    assert _length(several) == 3
    assert _length(dict(zip("ab", several, strict=True))) == 3
    assert _length((several, several[1])) == 3
    assert _length(torch.zeros(())) == 1


def test_columns_of_a_pass_without_a_sample_are_empty() -> None:
    """As on a process that a few batches do not reach."""
    stream = Stream(HeadView(torch.eye(3), None, "dot", 1.0))
    assert all(stream.column(name).shape == (0,) for name in PER_SAMPLE)


def test_features_are_compared_where_there_is_room_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three times their size, of half of what is free."""
    rows, cpu, cuda = torch.zeros(100, 8), torch.device("cpu"), torch.device("cuda")
    for free, device in ((6.5 * rows.nbytes, cuda), (5.5 * rows.nbytes, cpu)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (int(free), 1 << 40))
        assert _with_room(rows, cuda) == device
        assert _with_room(rows, cpu) == cpu
