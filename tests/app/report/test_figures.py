"""Figures: curves that are right, pictures without a browser."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from app.report.made import HOSTILE, geometry
from matplotlib.figure import Figure

from largemargin.app.report.charts import (
    DARK,
    SYMBOLS,
    Chart,
    ClassMarks,
    Heat,
    Points,
    Series,
)
from largemargin.app.report.matplotlib_charts import draw, write_pictures
from largemargin.app.report.page import report
from largemargin.app.report.plotly_charts import figure, said
from largemargin.app.report.report_models import ReportModel
from largemargin.app.report.sections.margins import cumulative, target_curve
from largemargin.app.training import ObjectiveConfig, RunConfig
from largemargin.measuring.plots import COLORS, MARKERS


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("palette", "paper"), [(COLORS, "#ffffff"), (DARK, "#171b21")], ids=["light", "dark"]
)
def test_colours_can_be_seen_on_their_paper(palette: tuple[str, ...], paper: str) -> None:
    for color in palette:
        high, low = sorted((luminance(color), luminance(paper)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, color


def test_every_class_has_one_look() -> None:
    assert len(COLORS) == len(DARK) == len(SYMBOLS) == len(MARKERS) == 8
    looks = {(c % 8, c // 8 % 8) for c in range(64)}
    assert len(looks) == 64


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("cosface", {"margin": 0.2}, lambda t: math.cos(t) - 0.2),
        ("arcface", {"margin": 0.3}, lambda t: math.cos(t + 0.3)),
        ("normface", {}, math.cos),
        ("lsoftmax", {"margin": 1}, math.cos),
        ("unified_margin", {"m1": 1.2, "m3": 0.1}, lambda t: math.cos(1.2 * t) - 0.1),
        ("ldam", {}, lambda t: math.cos(t) - 0.5),
    ],
)
def test_target_curves_are_the_formulas(name: str, settings: dict, expected) -> None:  # type: ignore[no-untyped-def,type-arg]
    config = RunConfig(objective=ObjectiveConfig(name, settings))
    found = target_curve(config, (40, 5, 20), points=46)
    assert found is not None
    assert found.about == ("rarest class" if name == "ldam" else "")
    for degrees, value in zip(found.degrees, found.psi, strict=True):
        if degrees <= 120:
            assert value == pytest.approx(expected(math.radians(degrees)), abs=1e-6)


def test_losses_without_a_target_curve_have_none() -> None:
    assert target_curve(RunConfig()) is None
    assert target_curve(RunConfig(objective=ObjectiveConfig("lm_softmax"))) is None
    # Its margins depend on the sizes of the classes, which are not known here.
    assert target_curve(RunConfig(objective=ObjectiveConfig("ldam"))) is None


def test_cumulative_curves_rise_from_nothing_to_all() -> None:
    found = geometry().margins["cosine"].overall
    curve = cumulative(found, ReportModel("model", None, ()), unit=2.0)
    assert (curve.y[0], curve.y[-1]) == (0, 1)
    assert list(curve.y) == sorted(curve.y)  # type: ignore[type-var]
    assert (curve.x[0], curve.x[-1]) == pytest.approx((found.minimum / 2, found.maximum / 2))


def test_numbers_that_are_none_are_gaps() -> None:
    chart = Chart("k", "t", (Series("s", [1, 2, 3], [1.0, math.nan, math.inf]),))
    assert figure(chart)["data"][0]["y"] == [1.0, None, None]


def test_a_name_is_no_template() -> None:
    chart = Chart("k", "t", (Series("%{x}", [1], [1.0]),))
    template = figure(chart)["data"][0]["hovertemplate"]
    assert template.count("%{") == 2


def test_error_bars_are_distances() -> None:
    series = Series("s", [0, 1], [0.5, None], low=[0.4, None], high=[0.7, None])
    errors = figure(Chart("k", "t", (series,)))["data"][0]["error_y"]
    assert errors["array"] == [pytest.approx(0.2), None]
    assert errors["arrayminus"] == [pytest.approx(0.1), None]


def test_a_logarithmic_axis_names_few_powers() -> None:
    wide = Chart("k", "t", (Series("s", [1, 2], [1e-12, 1e5]),), log_y=True)
    assert figure(wide)["layout"]["yaxis"]["dtick"] == 3


@pytest.mark.parametrize("values", [[0.19, 3.7], [2.0, 900.0], [1e-5, 1.1e-4]])
def test_a_narrow_logarithmic_axis_has_marks_inside(values: list[float]) -> None:
    """With powers of ten alone, losses between 0.19 and 3.7 had one number on their axis."""
    axis = figure(Chart("k", "t", (Series("s", [1, 2], values),), log_y=True))["layout"]["yaxis"]
    assert axis["type"] == "log"
    inside = [mark for mark in axis["tickvals"] if values[0] <= mark <= values[1]]
    assert len(inside) >= 3
    assert [float(text) for text in axis["ticktext"]] == pytest.approx(axis["tickvals"])


def test_numbers_of_one_size_need_no_logarithms() -> None:
    """Between 120 and 700 there is no power of ten but one, between 200 and 700 none."""
    chart = Chart("k", "t", (Series("s", [1, 2], [200.0, 700.0]),), log_y=True)
    assert "type" not in figure(chart)["layout"]["yaxis"]


def test_one_number_has_an_axis_of_its_own_size() -> None:
    """Of one epoch: no accuracy of 150 % or below 0, no half epochs."""
    right = figure(Chart("k", "t", (Series("s", [1], [1.0]),), x="epoch", percent_y=True))
    low, high = right["layout"]["yaxis"]["range"]
    assert 0.9 < low < 1 < high < 1.01
    assert right["layout"]["xaxis"] | {"title": {}} == {
        "title": {},
        "dtick": 1,
        "range": [0.5, 1.5],
    }
    low, high = figure(Chart("k", "t", (Series("s", [1, 2], [0, 0]),), percent_y=True))["layout"][
        "yaxis"
    ]["range"]
    assert -0.01 < low < 0 < high < 0.1
    rate = figure(Chart("k", "t", (Series("s", [1], [0.05]),)))["layout"]["yaxis"]["range"]
    assert rate == pytest.approx([0.045, 0.055])


def test_names_beside_a_small_matrix_do_not_stand_on_each_other() -> None:
    names = tuple(f"class {at}" for at in range(64))
    chart = Chart("k", "t", heat=Heat(((1.0,) * 64,) * 64, names))
    assert len(figure(chart)["layout"]["xaxis"]["ticktext"]) <= 16
    assert len(figure(chart)["layout"]["yaxis"]["ticktext"]) <= 16


def test_long_names_lean_so_that_the_last_is_seen() -> None:
    names = tuple(f"perturbation number {at}" for at in range(12))
    bars = Chart("k", "t", (Series("s", range(12), [1.0] * 12, form="bars"),), names=names)
    assert figure(bars)["layout"]["xaxis"]["tickangle"] < 0
    few = Chart("k", "t", (Series("s", range(3), [1.0] * 3, form="bars"),), names=("a", "b", "c"))
    assert "tickangle" not in figure(few)["layout"]["xaxis"]


def test_figures_say_which_classes_they_show() -> None:
    chart = Chart(
        "k",
        "t",
        (Series("s", [0, 1], [1, 2], form="points", texts=HOSTILE[:2], classes=(4, 7)),),
        marks=(ClassMarks(HOSTILE[0], None, (0.5, math.nan)),),
    )
    made = figure(chart)
    assert made["data"][0]["meta"] == {"classes": [4, 7]}
    assert made["data"][0]["mode"] == "markers"
    assert made["marks"] == [{"name": said(HOSTILE[0]), "color": "neutral", "x": [0.5, None]}]
    heat = Chart(
        *("k", "t"), heat=Heat(((None, 2), (0, None)), ("a", "b"), classes=(3, 9), counts=True)
    )
    (trace,) = figure(heat)["data"]
    assert trace["meta"] == {"framed": [3, 9]}
    assert trace["text"] == [["", "2"], ["", ""]]


def test_names_of_classes_stand_in_their_map() -> None:
    names = Series("classes", [0.5], [1.5], form="points", texts=(HOSTILE[0],))
    (trace,) = figure(Chart("k", "t", (names,), equal=True))["data"]
    assert (trace["mode"], trace["text"]) == ("text", [said(HOSTILE[0])])


CHARTS = (
    Chart(
        "lines", HOSTILE[8], (Series("a$b", [1, 2], [1.0, None], low=[0.5, None], high=[2, None]),)
    ),
    Chart("bars", "bars", (Series("a", [0, 1], [1.0, 2.0], form="bars"),), names=HOSTILE[:2]),
    Chart(
        "classes",
        "c",
        (
            Series(
                *("a", [0, 1], [1, 2]), form="points", low=(0, 1), high=(1, 2), texts=HOSTILE[:2]
            ),
        ),
        names=HOSTILE[:2],
    ),
    Chart("heat", "h", heat=Heat(((None, 1.0), (1.0, None)), HOSTILE[:2])),
    Chart("counts", "h", heat=Heat(((None, 1), (0, None)), HOSTILE[:2], counts=True)),
    Chart(
        "samples",
        "s",
        (
            Series("a", [0, 1], [1, 0], form="points", points=Points((0, 1), (0, 9))),
            Series("classes", [0.5], [0.5], form="points", texts=HOSTILE[:1]),
        ),
        equal=True,
    ),
    Chart(
        "solid",
        "s",
        (Series("a", [0], [1], [0], form="points", texts=(HOSTILE[0],)),),
        solid=True,
    ),
)


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.key)
def test_every_kind_of_figure_is_drawn_and_is_data(chart: Chart, tmp_path: Path) -> None:
    (path,) = write_pictures([chart], tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.name == f"{chart.key}.png"
    assert figure(chart)["data"]


def drawn(chart: Chart) -> Figure:
    picture = Figure(figsize=(6, 4), layout="constrained")
    draw(chart, picture)
    return picture


def test_a_picture_of_one_epoch_shows_it() -> None:
    """A line through one point has no length: it needs a mark."""
    (axes,) = drawn(Chart("k", "t", (Series("s", [1], [0.5]),), x="epoch", percent_y=True)).axes
    (line,) = axes.lines
    assert line.get_marker() == "o"
    assert axes.get_ylim() == pytest.approx((0.45, 0.55))
    (axes,) = drawn(Chart("k", "t", (Series("s", [1, 2, 3], [3, 2, 1]),), x="epoch")).axes
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_a_picture_of_samples_names_its_classes() -> None:
    points = Points((0, 1, 2), (0, 1, 1), classes=("cat $", "dog"))
    series = Series("s", [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], form="points", points=points)
    picture = drawn(Chart("k", "t", (series,), equal=True))
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [r"cat \$", "dog"]
    many = replace(points, classes=tuple(map(str, range(100))))
    assert not drawn(Chart("k", "t", (replace(series, points=many),), equal=True)).legends


def test_names_in_pictures_do_not_stand_on_each_other() -> None:
    def turned(count: int) -> float:
        names = tuple(str(100 + at) for at in range(count))
        chart = Chart("k", "t", (Series("s", range(count), [1.0] * count),), names=names)
        (axes,) = drawn(chart).axes
        return float(axes.get_xticklabels()[0].get_rotation())

    assert turned(10) == 0
    assert turned(40) == 60


def test_a_logarithmic_picture_has_numbers() -> None:
    (axes,) = drawn(Chart("k", "t", (Series("s", [1, 2], [0.84, 9.7]),), log_y=True)).axes
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "2", "5", "10"]


def test_png_writes_every_figure_of_the_page(tmp_path: Path) -> None:
    report(geometry(0, 3), tmp_path / "report.html", png=tmp_path / "figures")
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"margins-cosine", "angles-model", "sphere-model"} <= names
