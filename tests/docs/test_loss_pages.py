"""Every loss has a page with what a reader looks for: equation, source, cost, curve."""

import inspect
import re

import pytest
import torch

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_tables
from site_pages import curves, drawing, loss_pages, navigation
from site_pages.sources import FAMILIES

import largemargin as lm
from largemargin.losses import Loss

HEADINGS = ("Definition", "Value and slope", "Source and errata", "Options", "Cost", "Measured")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes half a second a loss; the built site is checked with its drawings."""
    monkeypatch.setattr(drawing, "figure", lambda curve: "<figure></figure>")
    monkeypatch.setattr(loss_pages, "curve", lambda name: None)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_the_page_has_every_part(name: str) -> None:
    page = loss_pages.page(name)
    assert page.startswith(f"# {lm.LOSSES[name].__name__}\n")
    for heading in HEADINGS:
        assert f"\n## {heading}\n" in page
    assert "$$" in page, "no equation"
    assert not re.search(r":math:|:func:|:class:|\b(?:ZHO|KOB|NGY|NGR|BAS)-", page)
    assert re.search(r"As in:|Proposed by:|The softmax loss", page)
    common = set(inspect.signature(Loss.__init__).parameters)
    for argument, parameter in inspect.signature(lm.LOSSES[name].__init__).parameters.items():
        if argument in common or parameter.kind is parameter.VAR_KEYWORD:
            continue
        row = re.search(rf"(?m)^\| `{argument}` \| .* \| (.*) \|$", page)
        assert row, f"{argument} is not explained"
        assert row[1].strip(), f"nothing is said about {argument}"


@pytest.mark.usefixtures("undrawn")
def test_errata_are_told_where_they_matter() -> None:
    page = loss_pages.page("soft_hinge")
    assert "[D2](../errata.md#d2): The soft hinge rewards wrong answers" in page
    assert "No erratum concerns it" in loss_pages.page("focal")


@pytest.mark.usefixtures("undrawn")
def test_costs_come_from_the_results() -> None:
    assert "| 512, 20000, 128 | CosFace chunked |" in loss_pages.page("cosface")
    assert "not measured here" in loss_pages.page("normface").split("## Cost")[1]


def test_every_loss_is_in_the_navigation_once() -> None:
    text = str(navigation.navigation())
    for name in lm.LOSSES:
        assert text.count(f"'losses/{name}.md'") == 1
        assert make_tables.family(name) in FAMILIES


@pytest.mark.parametrize("name", ["cosface", "kobayashi", "margin_hinge", "compactness"])
def test_the_slope_is_that_of_the_value(name: str) -> None:
    drawn = curves.curve(name)
    for values, slopes in drawn.lines.values():
        assert torch.isfinite(values).all()
        steps = drawn.x[1:] - drawn.x[:-1]
        middle = (values[1:] - values[:-1]) / steps
        mean = (slopes[1:] + slopes[:-1]) / 2
        # Where the curve bends inside a step, the two differ by a part of the bend.
        bend = (slopes[1:] - slopes[:-1]).abs()
        assert ((middle - mean).abs() <= 0.6 * bend + 1e-6 * (1 + mean.abs())).all()


def test_the_margin_of_the_axis_is_the_sample_margin() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    values = curves.over_angle(lm.SampleMargin(reduction="none"))(x)
    torch.testing.assert_close(values, -x)


def test_a_drawing_takes_the_colours_of_the_page() -> None:
    made = drawing.figure(curves.curve("cosface"))
    assert made.count("<svg") == 2
    assert "var(--curve-first)" in made
    assert "currentColor" in made
    assert not re.search(r"#0[0-9a-f]{5}\b", made), "a colour has no name"
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", made)
    assert "NormFace, no margin" in made


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_every_curve_is_finite_and_moves(name: str) -> None:
    drawn = curves.curve(name)
    for values, slopes in drawn.lines.values():
        assert torch.isfinite(values).all()
        assert torch.isfinite(slopes).all()
        assert values.max() > values.min()
