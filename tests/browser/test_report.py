"""The report in a browser: what a person sees, sorts, searches and points at."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from app.report.made import HOSTILE

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
Opened = Callable[..., Any]


@pytest.mark.parametrize("name", ["runs", "hostile", "sphere", "many"])
def test_no_complaint_and_no_request(name: str, opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports[name])
    found.draw_all()
    assert found.complaints == []
    assert found.dialogs == []
    asked = [url for url in found.requests if not url.startswith(("data:", "blob:"))]
    assert asked == [reports[name].as_uri()]


@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_every_width(
    width: int, scheme: str, opened: Opened, reports: dict[str, Path]
) -> None:
    found = opened(reports["runs"], viewport={"width": width, "height": 900}, color_scheme=scheme)
    found.draw_all()
    assert found.page.evaluate("document.documentElement.scrollWidth") == width
    paper = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(14, 17, 22)") == (scheme == "dark")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"report-{width}-{scheme}.png"
    found.page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 20_000


def test_numbers_equal_the_files(opened: Opened, reports: dict[str, Path]) -> None:
    page = opened(reports["runs"]).page
    rows = page.locator("#table-glance tbody tr")
    for at, name in enumerate(("softmax", "cosface")):
        found = json.loads((reports[name] / "evaluation.json").read_text())
        measured = json.loads((reports[name] / "geometry.json").read_text())
        cells = rows.nth(at).locator("td")
        words = f"{100 * found['clean']['accuracy']:.2f} %"
        assert cells.nth(0).inner_text().split("\n")[0].strip() == words
        assert float(cells.nth(0).get_attribute("data-value")) == found["clean"]["accuracy"]
        margin = measured["prototypes"]["class_margin"]
        assert cells.nth(3).inner_text().split("\n")[0].strip() == f"{margin:.2f}°"


def column(page: Any, at: int) -> list[str]:
    found: list[str] = page.locator(
        f"#table-classes tbody tr > :nth-child({at + 1})"
    ).all_inner_texts()
    return found


def test_sorting_by_number_and_by_text(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["runs"])
    found.unfold()
    page = found.page
    head = page.locator("#table-classes thead th").nth(5)
    head.get_by_role("button").click()
    values = [float(text) for text in column(page, 5)]
    assert values == sorted(values)
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").press("Enter")
    values = [float(text) for text in column(page, 5)]
    assert values == sorted(values, reverse=True)
    assert len(values) == 20
    page.locator("#table-classes thead th").nth(0).get_by_role("button").click()
    assert column(page, 0) == ["cosface"] * 10 + ["cross_entropy (baseline)"] * 10


def test_searching(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["runs"])
    found.unfold()
    page = found.page
    box = page.locator('input[data-searches="table-classes"]')
    box.fill("COSFACE")
    visible = page.locator("#table-classes tbody tr:visible")
    assert visible.count() == 10
    tools = page.locator(".tools").filter(has=box)
    assert tools.locator("output").inner_text() == "10 of 20 rows"
    box.fill("nothing like it")
    assert visible.count() == 0
    box.fill("")
    assert visible.count() == 20


def test_a_table_that_scrolls_says_so(opened: Opened, reports: dict[str, Path]) -> None:
    """On a phone it looked as if the columns that fit were all there are."""
    hint = "box => getComputedStyle(box, '::before').content"
    phone = opened(reports["runs"], viewport={"width": 390, "height": 844}).page
    box = phone.locator(".scroll:has(#table-glance)")
    assert "more columns" in box.evaluate(hint)
    assert "cut" in box.get_attribute("class").split()
    box.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    # (A function to wait for would be evaluated again and again, which the page's policy forbids.)
    phone.locator(".scroll:has(#table-glance):not(.cut)").wait_for()
    desk = opened(reports["runs"], viewport={"width": 1440, "height": 900}).page
    assert desk.locator(".scroll:has(#table-glance)").evaluate(hint) == "none"


def test_nothing_lies_over_a_figure_where_nothing_hovers(
    opened: Opened, reports: dict[str, Path]
) -> None:
    """There the figures' buttons would stay, over the highest curves and the first classes."""
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    for options, has_buttons in ((phone, False), ({}, True)):
        plot = opened(reports["runs"], **options).page.locator("#margins .plot").first
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()
        assert bool(plot.locator(".modebar-btn").count()) == has_buttons


def test_hard_samples_have_neighbours(opened: Opened, reports: dict[str, Path]) -> None:
    page = opened(reports["runs"]).page
    cards = page.locator("#mistakes .worst").first.locator(":scope > li")
    assert cards.count() == 4
    for card in cards.all():
        assert card.locator("ol img").count() == 4
        width = card.locator("ol img").first.evaluate("image => image.naturalWidth")
        assert width == 8  # a digit


def hover(found: Any, at: int = 0) -> None:
    box = found.page.locator("#features .plot").first
    box.scroll_into_view_if_needed()
    point = box.locator(".points path").nth(at)
    point.wait_for()
    place = point.bounding_box()
    found.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    found.page.locator("#look").wait_for(state="visible")


def test_pointing_at_a_sample_shows_it(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["runs"])
    hover(found)
    lines = found.page.locator("#look p").inner_text().splitlines()
    assert lines[0].startswith("test/")
    assert [line.split(":")[0] for line in lines[1:]] == ["label", "predicted", "logit margin"]
    assert found.page.locator("#look img").get_attribute("src").startswith("data:image/png")


def test_hostile_names_are_text_when_pointed_at(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["hostile"])
    shown = set()
    for at in range(12):
        found.page.mouse.move(1, 1)
        hover(found, 5 * at)
        shown.add(found.page.locator("#look p").inner_text())
    assert any("<" in text for text in shown)
    assert found.page.locator("#look p *").count() == 0
    assert found.page.locator('img[src="x"], svg[onload]').count() == 0
    assert found.dialogs == []
    assert found.complaints == []


def test_hostile_names_are_text_in_figures(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["hostile"])
    found.draw_all()
    heat = found.page.locator('.plot[id^="angles-"]')
    texts = heat.locator(".ytick text").all_text_contents()
    assert len(texts) == len(HOSTILE)
    assert texts[0].startswith("<img src=x")
    assert heat.locator(".ytick a, .ytick b, .ytick image").count() == 0


def test_one_choice_of_classes_for_all_figures(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["runs"])
    found.draw_all()
    page = found.page
    button = page.locator('.chooser [data-class="3"]')
    button.focus()
    button.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    for box in page.locator("#features .plot").all():
        opacity = box.evaluate("box => box.data[0].marker.opacity")
        labels = box.evaluate("box => box.data[0].meta.labels")
        assert {o for o, label in zip(opacity, labels, strict=True) if label == 3} == {1}
        assert max(o for o, label in zip(opacity, labels, strict=True) if label != 3) < 0.1
    assert page.locator(".worst li.dim").count() > 0
    page.locator(".chooser [data-all]").click()
    assert page.locator(".worst li.dim").count() == 0


def opacities(page: Any, box: str, classes: str) -> dict[int, float]:
    """Opacity of the points of each class in the first series of a figure."""
    found: list[list[float]] = page.locator(box).evaluate(
        f"box => box.data[0].meta.{classes}.map((c, at) => [c, box.data[0].marker.opacity[at]])"
    )
    return {int(label): opacity for label, opacity in found}


def test_a_class_of_the_table_is_marked_everywhere(
    opened: Opened, reports: dict[str, Path]
) -> None:
    found = opened(reports["runs"])
    found.draw_all()
    page = found.page
    picks = page.locator('#table-classes .pick[data-class="3"]')
    assert picks.count() == 2
    picks.first.focus()
    picks.first.press("Enter")
    assert picks.nth(1).get_attribute("aria-pressed") == "true"
    assert page.locator("#chosen b").inner_text() == "3"
    assert page.locator("#table-classes tr.dim").count() == 18
    scatter = opacities(page, "#features .plot >> nth=0", "labels")
    assert scatter[3] == 1
    assert max(opacity for label, opacity in scatter.items() if label != 3) < 0.1
    margins = opacities(page, "#class-margins", "classes")
    assert margins[3] == 1
    assert margins[4] < 0.2
    frames = page.locator('.plot[id^="angles-"]').first.evaluate("box => box.layout.shapes")
    assert [(each["x0"], each["y0"]) for each in frames] == [(2.5, -0.5), (-0.5, 2.5)]
    measured = json.loads((reports["cosface"] / "geometry.json").read_text())
    mark = page.locator("#margins-cosine").evaluate(
        "box => [box.data.at(-1).name, box.data.at(-1).x]"
    )
    mean = measured["margins"]["cosine"]["classes"]["mean"][3]
    assert mark == ["cosface", [pytest.approx(mean, rel=1e-4)]]
    page.keyboard.press("Escape")
    assert page.locator("#chosen").is_hidden()
    assert page.locator("#table-classes tr.dim").count() == 0
    assert page.locator('.plot[id^="angles-"]').first.evaluate("b => b.layout.shapes.length") == 0
    assert found.complaints == []


def test_a_class_of_the_matrix_and_of_the_margins_can_be_pointed_at(
    opened: Opened, reports: dict[str, Path]
) -> None:
    found = opened(reports["runs"])
    found.draw_all()
    page = found.page
    heat = page.locator('.plot[id^="angles-"]').first
    heat.scroll_into_view_if_needed()
    place = heat.locator(".nsewdrag").first.bounding_box()
    # The first row, the second column: class 0 is the row's.
    page.mouse.click(place["x"] + 0.15 * place["width"], place["y"] + 0.05 * place["height"])
    assert page.locator("#chosen b").inner_text() == "0"
    point = page.locator("#class-margins .points path").nth(5)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.locator("#chosen b").inner_text() == "0, 5"
    page.locator("#chosen button").click()
    assert page.locator("#chosen").is_hidden()


def test_a_thousand_classes_can_be_found(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["many"])
    found.unfold()
    page = found.page
    assert page.locator("#table-classes tbody tr").count() == 1000  # 500 of each model
    box = page.locator('input[data-searches="table-classes"]')
    first = page.locator("#table-classes tbody tr").first.locator(".pick").inner_text()
    box.fill(first)
    visible = page.locator("#table-classes tbody tr:visible")
    assert 0 < visible.count() < 1000
    visible.first.locator(".pick").click()
    assert page.locator("#chosen b").inner_text() == first
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    assert found.complaints == []


def test_legends_hide_curves(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["runs"])
    found.draw_all()
    figure = found.page.locator("figure").filter(has=found.page.locator("#margins-cosine"))
    figure.locator(".keys button").first.click()
    shown = found.page.locator("#margins-cosine").evaluate(
        "box => box.data.map(each => [each.name, each.visible])"
    )
    hidden = {name for name, visible in shown if visible is False}
    assert hidden == {"cross_entropy (baseline)"}
    assert sum(visible is False for _, visible in shown) == 1


def test_rules_are_reached_by_keyboard(opened: Opened, reports: dict[str, Path]) -> None:
    page = opened(reports["runs"]).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    rules = page.locator(".rules")
    assert not rules.is_visible()
    page.locator("details:has(.rules) > summary").press("Enter")
    assert rules.locator("li").count() == 5
    assert rules.is_visible()


def test_the_theme_can_be_switched(opened: Opened, reports: dict[str, Path]) -> None:
    found = opened(reports["runs"], color_scheme="light")
    found.draw_all()
    color = "box => box.data.at(-1).line.color"
    before = found.page.locator("#loss").evaluate(color)
    found.page.locator("#theme").click()
    after = found.page.locator("#loss").evaluate(color)
    assert before != after
    assert found.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_readable_without_javascript(opened: Opened, reports: dict[str, Path]) -> None:
    page = opened(reports["runs"], java_script_enabled=False).page
    assert page.locator("#table-classes tbody tr").count() == 20
    assert page.locator("#table-quantiles-cosine").is_visible()
    assert not page.locator(".plot").first.is_visible()
    assert page.locator("#table-glance .mark").first.is_visible()
    assert page.locator(".rules").is_visible()
    # Every figure but the maps of samples is there as a table.
    figures = page.locator("figure")
    tables = page.locator("figure table:visible")
    assert figures.count() - tables.count() == page.locator("#features figure").count()
    assert page.locator("#table-numbers-loss tbody tr").count() == 1


def test_prints_every_figure_in_light(
    opened: Opened, reports: dict[str, Path], tmp_path: Path
) -> None:
    found = opened(reports["runs"], color_scheme="dark")
    path = tmp_path / "report.pdf"
    found.page.pdf(path=path, format="A4", print_background=True)
    assert path.read_bytes().startswith(b"%PDF")
    drawn = found.page.locator(".plot .main-svg").count()
    assert drawn >= found.page.locator(".plot").count()
    assert found.complaints == []


def test_on_paper_small_print_is_smaller_than_what_it_is_about(
    opened: Opened, reports: dict[str, Path]
) -> None:
    page = opened(reports["runs"]).page
    page.emulate_media(media="print")

    def size(selector: str) -> float:
        found = page.locator(selector).first.evaluate("e => getComputedStyle(e).fontSize")
        return float(found.removesuffix("px"))

    assert size("td small") < size("table td")
    assert size(".alt") < size("figcaption")
    assert size("table td") >= 9
    assert size(".caption") <= 1.3 * size("table td")
    # What the colours of the samples mean, and tables that stay on the page.
    assert page.locator('.chooser [data-class="3"]').is_visible()
    page.set_viewport_size({"width": 690, "height": 1000})
    wide = page.locator("#table-glance").evaluate(
        "e => e.getBoundingClientRect().width - e.parentElement.getBoundingClientRect().width"
    )
    assert wide <= 1


def test_downloads_are_whole(opened: Opened, reports: dict[str, Path]) -> None:
    page = opened(reports["runs"]).page
    with page.expect_download() as waiting:
        page.locator('a[download="summary.json"]').click()
    found = json.loads(Path(waiting.value.path()).read_text())
    assert [model["name"] for model in found["models"]] == ["cross_entropy", "cosface"]
