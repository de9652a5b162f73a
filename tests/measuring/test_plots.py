"""Plots: what is drawn is what was measured, on whose axes, and that it can be read."""

import itertools
import math
from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from torch import Tensor, nn

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.measuring import Embeddings, Geometry, LossSurface, embed_arrays, measure_arrays
from largemargin.measuring.plots import COLORS, MARKERS

mpl.use("Agg")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Figures are closed here, also those of other tests; settings of matplotlib stay."""
    plt.close("all")
    before = dict(mpl.rcParams)
    yield
    plt.close("all")
    assert dict(mpl.rcParams) == before


def problem(classes: int = 4, count: int = 400, spread: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    centers = torch.randn(classes, 16, generator=generator)
    labels = torch.arange(count) % classes
    return centers[labels] + spread * torch.randn(count, 16, generator=generator), labels, centers


def measured(classes: int = 4, count: int = 400, **options: object) -> Geometry:
    return measure_arrays(*problem(classes, count), **options)  # type: ignore[arg-type]


def cosine_margins(features: Tensor, labels: Tensor, weight: Tensor) -> np.ndarray:
    cosines = nn.functional.normalize(features) @ nn.functional.normalize(weight).T
    rivals = cosines.scatter(1, labels[:, None], -math.inf).amax(1)
    return (cosines.gather(1, labels[:, None])[:, 0] - rivals).double().numpy()


def legend(ax: Axes) -> list[str]:
    shown = ax.get_legend()
    return [] if shown is None else [text.get_text() for text in shown.get_texts()]


def surface() -> LossSurface:
    """Loss grows to the right; class 2 is predicted from 0.5 on."""
    along, across = (-1.0, -0.5, 0.0, 0.5, 1.0), (-1.0, -0.5, 0.0, 0.5, 1.0)
    losses = tuple(tuple(2 + a + 0.1 * b for b in across) for a in along)
    predicted = tuple(tuple(2 if a >= 0.5 else 0 for _ in across) for a in along)
    return LossSurface(3, 0, "as the loader gives them", 2.0, 1.0, along, across, losses,
                       predicted, 0)  # fmt: skip


def embedded(classes: int = 4, count: int = 400) -> Embeddings:
    features, labels, centers = problem(classes, count, spread=2.0)
    return embed_arrays(features, labels, logits=features @ centers.T, method="pca")


PLOTS = {
    "margins": lambda ax=None: measured().plot(ax),
    "classes": lambda ax=None: measured().plot(ax, by="class"),
    "samples": lambda ax=None: embedded().plot(ax),
    "surface": lambda ax=None: surface().plot(ax),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_makes_one_figure_or_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("a plot shows nothing"))
    made = PLOTS[name]()
    assert isinstance(made, Axes)
    assert plt.get_fignums() == [made.figure.number]
    own = Figure().add_subplot()
    assert PLOTS[name](own) is own
    assert len(plt.get_fignums()) == 1
    assert made.get_title() == own.get_title() != ""
    assert made.get_xlabel()
    assert made.get_ylabel()
    with pytest.raises(LargeMarginError, match="Axes, but ndarray was given"):
        PLOTS[name](np.array([own]))


def test_the_histogram_is_that_of_the_margins() -> None:
    values = cosine_margins(*problem())
    ax = measured().plot()
    whole, wrong, outline = ax.patches
    heights, edges, _ = outline.get_data()
    want, _ = np.histogram(values, edges, density=True)
    np.testing.assert_allclose(heights, want, atol=1e-3 * want.max())
    np.testing.assert_array_equal(whole.get_data().edges, edges)
    below = wrong.get_data()
    assert max(below.edges) == 0
    area = float((below.values * np.diff(below.edges)).sum())
    share = float((values < 0).mean())
    assert 0 < share < 0.5
    assert area == pytest.approx(share, abs=0.03)
    shown = [f"{100 * share:.3g} % of 400 below 0", f"minimum {values.min():.3g}",
             f"median {np.median(values):.3g}"]  # fmt: skip
    assert [text.replace("−", "-") for text in legend(ax)] == shown
    marks = sorted(line.get_xdata()[0] for line in ax.lines)
    assert marks == pytest.approx(sorted([values.min(), np.median(values), 0]))
    (least,) = (line for line in ax.lines if line.get_label().startswith("minimum"))
    assert not least.get_clip_on()  # it lies on the edge of the picture


@pytest.mark.parametrize("kind", ["raw", "cosine", "distance"])
def test_every_kind_of_margin_says_its_share_below_0(kind: str) -> None:
    found = measured(similarity="cosine", scale=8.0)
    ax = found.plot(margin=kind)
    # A head on cosines predicts wrong exactly where a margin is negative, of whatever kind.
    assert legend(ax)[0].startswith(f"{100 * (1 - found.accuracy):.3g} % ")
    assert {"raw": "logit", "cosine": "cosine", "distance": "distance"}[kind] in ax.get_xlabel()


def test_two_models_share_axes() -> None:
    one, other = measured(), measured(count=40)
    ax = other.plot(one.plot(label="before"), label="after $5")
    assert [text.split(":")[0] for text in legend(ax)[::3]] == ["before", r"after \$5"]
    first, second = ax.patches[2], ax.patches[5]
    assert first.get_edgecolor() == to_rgba(COLORS[0])
    assert second.get_edgecolor() == to_rgba(COLORS[1])
    highest = max(max(each.get_data().values) for each in (first, second))
    low, high = ax.get_ylim()
    assert low == 0
    assert high > highest


def test_classes_are_rows_the_hardest_on_top() -> None:
    features, labels, weight = problem()
    values = cosine_margins(features, labels, weight)
    names = ["a", "b", "c", "d"]
    ax = measure_arrays(features, labels, weight, class_names=names).plot(by="class", label="x")
    classes = sorted(range(4), key=lambda c: np.quantile(values[labels == c], 0.05))
    assert [text.get_text() for text in ax.get_yticklabels()] == [names[c] for c in classes]
    drawn = {line.get_label(): line for line in ax.lines}
    for said, pick in {
        "median": np.median, "minimum": np.min, "5 % quantile": lambda v: np.quantile(v, 0.05),
    }.items():  # fmt: skip
        want = [pick(values[labels == c]) for c in classes]
        np.testing.assert_allclose(drawn[said].get_xdata(), want, atol=1e-6)
        assert list(drawn[said].get_ydata()) == [0, 1, 2, 3]
    colours = [drawn["median"].get_color(), *(bars.get_color()[0] for bars in ax.collections)]
    assert {to_rgb(each) for each in colours} == {to_rgb(COLORS[0])}
    bottom, top = ax.get_ylim()
    assert bottom > top
    assert ax.get_title() == "Sample margins of the 4 classes: x"


def test_of_many_classes_the_hardest_are_drawn_and_absent_ones_are_not() -> None:
    features, labels, weight = problem(1000, 3000)
    kept = labels != 3
    found = measure_arrays(features[kept], labels[kept], weight)
    ax = found.plot(by="class")
    drawn = [int(text.get_text()) for text in ax.get_yticklabels()]
    fifths = found.margins["cosine"].classes.q05
    assert len(drawn) == 40
    assert 3 not in drawn
    rest = [fifths[c] for c in range(1000) if c != 3 and c not in drawn]
    assert max(fifths[c] for c in drawn) <= min(rest)
    assert "40 hardest of 999 classes" in ax.get_title()


def test_samples_have_the_colour_of_their_class_and_wrong_ones_a_ring() -> None:
    made = embedded()
    ax = made.plot(class_names=["a", "b", "c$", "d" * 30])
    *clouds, rings = ax.collections
    points = np.array(made.layers[0].points["clean"])
    labels = np.array(made.labels)
    for c, cloud in enumerate(clouds):
        np.testing.assert_array_equal(cloud.get_offsets(), points[labels == c])
        np.testing.assert_array_equal(cloud.get_facecolor()[0], to_rgba(COLORS[c]))
    wrong = labels != np.array(made.predictions["clean"])
    assert 0 < wrong.sum() < len(labels)
    np.testing.assert_array_equal(rings.get_offsets(), points[wrong])
    names = ["a", "b", r"c\$", "d" * 17 + "…"]
    assert legend(ax) == [*names, f"{wrong.sum()} predicted wrong"]
    share = made.layers[0].explained[0]
    assert f"{100 * share:.3g} % of the variance" in ax.get_xlabel()


@pytest.mark.parametrize(("classes", "named"), [(2, 2), (20, 20), (21, 0), (1000, 0)])
def test_a_legend_has_classes_as_long_as_they_are_few(classes: int, named: int) -> None:
    ax = embedded(classes, 2 * classes).plot()
    assert len([text for text in legend(ax) if text.isdigit()]) == named
    assert f"{classes:,} classes" in ax.get_title()


def test_symbols_tell_classes_of_one_colour_apart() -> None:
    clouds = embedded(20, 40).plot().collections
    for c in range(20):
        symbol = MarkerStyle(MARKERS[c // 8])
        path = symbol.get_path().transformed(symbol.get_transform())
        np.testing.assert_allclose(clouds[c].get_paths()[0].vertices, path.vertices)


def test_layer_and_condition_are_chosen() -> None:
    features, labels, _ = problem()
    layers = {"first": features[:, :3], "second": features}
    noisy = {name: each + 1 for name, each in layers.items()}
    logits = torch.eye(4)[labels]
    mistaken = {"logits": logits, "noisy_logits": logits.flip(1)}
    made = embed_arrays(layers, labels, noisy=noisy, **mistaken, method="pca")
    for layer, condition in itertools.product(("first", "second"), ("clean", "noisy")):
        ax = made.plot(layer=layer, condition=condition)
        place = ["first", "second"].index(layer)
        want = np.array(made.layers[place].points[condition])[np.array(made.labels) == 1]
        np.testing.assert_array_equal(ax.collections[1].get_offsets(), want)
        assert layer in ax.get_title()
        assert ("noise" in ax.get_title()) == (condition == "noisy")
        assert ("400 predicted wrong" in legend(ax)) == (condition == "noisy")
    assert "second" in made.plot().get_title()
    with pytest.raises(LargeMarginError, match="'first', 'second'"):
        made.plot(layer="third")
    with pytest.raises(LargeMarginError, match="condition"):
        made.plot(condition="loud")


def test_the_surface_has_the_gradient_to_the_right() -> None:
    ax = surface().plot(class_names=["cat", "dog", "owl"])
    mesh, *borders = ax.collections
    assert len(borders) == 2  # around each of the two classes
    want = [[2 + a + 0.1 * b for a in (-1, -0.5, 0, 0.5, 1)] for b in (-1, -0.5, 0, 0.5, 1)]
    np.testing.assert_allclose(np.reshape(mesh.get_array(), (5, 5)), want)
    for lines in borders:
        (path,) = (path.vertices for path in lines.get_paths())
        np.testing.assert_allclose(path[:, 0], 0.25)
    at = {text.get_text(): text.xy[0] for text in ax.texts}
    assert at.keys() == {"cat", "owl"}
    assert at["cat"] < 0.25 < at["owl"]
    assert "class cat" in ax.get_title()


def test_surfaces_are_drawn_side_by_side_or_on_axes_of_their_own() -> None:
    model, x, y = nn.Linear(2, 3), torch.rand(2, 2), torch.tensor([0, 2])
    surfaces = lm.measuring.measure_surface(model, x, y, points=3)
    assert isinstance(surfaces, tuple)
    made = surfaces.plot(class_names=["cat", "dog", "owl"])
    assert [("cat" in ax.get_title(), "owl" in ax.get_title()) for ax in made] == [
        (True, False),
        (False, True),
    ]
    assert made[0].figure is made[1].figure
    given = Figure().subplots(1, 2)
    assert surfaces.plot(given) == tuple(given)
    assert len(plt.get_fignums()) == 1
    (alone,) = lm.measuring.measure_surface(model, x[:1], y[:1], points=3).plot()
    assert alone.figure is not made[0].figure
    assert lm.measuring.measure_surface(model, x[:1], y[:1], points=3).plot(given[1]) == (given[1],)
    assert lm.measuring.measure_surface(model, x[:0], y[:0], points=3).plot() == ()
    for wrong, told in ((given[0], "each of 2, but 1"), (given[:1], "each of 2, but 1")):
        with pytest.raises(LargeMarginError, match=told):
            surfaces.plot(wrong)
    with pytest.raises(LargeMarginError, match="Axes, but int was given"):
        surfaces.plot([1, 2])


def test_a_class_with_a_small_region_alone_has_no_name() -> None:
    places = tuple(range(-5, 6))
    predicted = [[2 if a >= 0 else 0 for _ in places] for a in places]
    predicted[0][0:2], predicted[3][3:6] = [1] * 2, [3] * 3  # 1.7 and 2.5 % of 121 places
    zeros = tuple((0.0,) * 11 for _ in places)
    many = LossSurface(3, 0, "as the loader gives them", 2.0, 1.0, places, places, zeros,
                       tuple(map(tuple, predicted)), 0)  # fmt: skip
    ax = many.plot(class_names=["cat", "dog", "owl", "eel"])
    assert {text.get_text() for text in ax.texts} == {"cat", "owl", "eel"}


def test_what_is_not_there_is_said() -> None:
    features, labels, weight = problem()
    curved = measure_arrays(features, labels, weight, torch.ones(4), similarity="cosine")
    for by in (None, "class"):
        with pytest.raises(LargeMarginError, match="no finite signed distance"):
            curved.plot(margin="distance", by=by)
    with pytest.raises(LargeMarginError, match="'raw', 'cosine', 'distance'"):
        curved.plot(margin="angle")
    with pytest.raises(LargeMarginError, match="by must be one of None, 'class'"):
        curved.plot(by="sample")
    with pytest.raises(LargeMarginError, match="class 2 has no name"):
        embedded().plot(class_names=["a", "b"])


def test_a_file_that_does_not_know_the_share_below_0_is_drawn_without() -> None:
    found = measured().to_dict()
    del found["margins"]["cosine"]["overall"]["negative"]
    assert legend(Geometry.from_dict(found).plot())[0] == "400 samples"


def test_equal_margins_can_be_drawn() -> None:
    ax = measure_arrays(torch.eye(3), torch.arange(3), torch.eye(3)).plot()
    assert legend(ax) == ["0 % of 3 below 0", "minimum 1", "median 1"]
    ax.figure.canvas.draw()


@pytest.mark.parametrize("classes", [2, 10, 40])
def test_words_do_not_stand_on_each_other(classes: int) -> None:
    """Names beside the rows are apart, and the legend is neither on the axes nor cut off."""
    names = [f"a rather long name {c}" for c in range(classes)]
    for ax in (
        measured(classes, 10 * classes, class_names=names).plot(by="class"),
        embedded(classes, 10 * classes).plot(class_names=names),
    ):
        figure = ax.figure
        figure.canvas.draw()
        boxes = [text.get_window_extent() for text in ax.get_yticklabels()]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
        if (shown := ax.get_legend()) is not None:
            box = shown.get_window_extent()
            beside = ax.get_window_extent()
            assert box.x0 >= beside.x1
            assert box.y1 > (beside.y0 + beside.y1) / 2  # from the top on
            assert box.x1 <= figure.bbox.x1
            assert box.y0 >= 0
        assert ax.title.get_window_extent().x0 >= 0


def test_a_head_on_cosines_is_drawn_at_length_1() -> None:
    features, labels, _ = problem()
    for similarity, unit in (("cosine", True), ("dot", False)):
        net = nn.Sequential(nn.Identity(), lm.ClassHead(16, 4, similarity=similarity))
        made = lm.embed(net, [(features, labels)], method="pca")
        want = lm.embed(net, [(features, labels)], method="pca", unit=unit)
        assert made == want
        assert ("features of length 1" in made.assumed) == unit


# Machado, Oliveira and Fernandes (2009): what is seen with no cones of one kind, in linear RGB.
SEEN = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def oklab(color: str, seen: object) -> np.ndarray:
    """Where a colour lies in a space in which distances are as large as they look (Ottosson)."""
    given = np.array(to_rgba(color)[:3])
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122214708, 0.5363325363, 0.0514459929],
                      [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
    turned = np.array([[0.2104542553, 0.7936177850, -0.0040720468],
                       [1.9779984951, -2.4285922050, 0.4505937099],
                       [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip
    return turned @ np.cbrt(cones @ np.clip(np.array(seen) @ linear, 0, 1))


@pytest.mark.parametrize("seen", SEEN)
def test_colours_stay_apart_to_every_eye(seen: str) -> None:
    places = [oklab(color, SEEN[seen]) for color in COLORS]
    closest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2))
    assert closest > 0.09
    assert len(set(MARKERS)) == len(COLORS) == 8
