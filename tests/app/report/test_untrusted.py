"""Names of classes, files, models and settings are text, whatever they look like."""

import base64
import csv
import io
from pathlib import Path

import pytest
from app.report.made import HOSTILE
from app.report.reading import Page

from largemargin.app.report.page import slug
from largemargin.app.report.plotly_charts import said
from largemargin.measuring.predictions import as_csv


@pytest.fixture(scope="module")
def page(hostile_page: Path) -> Page:
    return Page(hostile_page)


def test_no_element_comes_from_a_name(page: Page) -> None:
    allowed = {"script": 3, "style": 2, "iframe": 0, "svg": 0, "object": 0, "b": None, "img": None}
    for tag, count in allowed.items():
        if count is not None:
            assert len(page.named(tag)) == count, tag
    assert all(
        a.get("src", "data:image/png").startswith("data:image/png") for a in page.named("img")
    )


def test_no_attribute_runs_anything(page: Page) -> None:
    names = {name for _, attributes in page.elements for name in attributes}
    assert {name for name in names if name.startswith("on")} == set()


def test_names_are_there_as_text(page: Page) -> None:
    cells = {row[1] for row in page.tables["table-classes"][1:]}
    assert cells == {" ".join(name.split()) for name in HOSTILE}
    assert "<script>alert(9)</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "49" not in cells


def test_the_data_of_the_figures_is_one_script(page: Page) -> None:
    names = next(iter(page.payload["classes"].values()))
    assert names == list(HOSTILE)
    start = page.source.index('id="payload">')
    data = page.source[start : page.source.index("</script>", start)]
    assert "<img" not in data
    assert "<script" not in data


def test_figures_hold_no_tags(page: Page) -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for each in value.values() for text in texts(each)]
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    templates = {"<extra>", "</extra>"}
    for text in texts(page.payload["charts"]):
        for template in templates:
            text = text.replace(template, "")
        assert "<" not in text, text


def test_nothing_is_fetched(page: Page) -> None:
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name, "")
            assert value.startswith(("data:", "#")) or not value, (tag, name, value)
    policy = next(a["content"] for a in page.named("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]


def test_plotly_is_there_once(page: Page) -> None:
    assert page.source.count("plotly.js v") == 1


def test_a_spreadsheet_finds_no_formula(page: Page) -> None:
    links = {a["download"]: a["href"] for a in page.named("a") if "download" in a}
    text = base64.b64decode(links["classes.csv"].partition(",")[2]).decode()
    rows = list(csv.reader(io.StringIO(text)))
    assert {row[1] for row in rows[1:]} >= {'\'=HYPERLINK("x")'}
    assert not any(cell.startswith(("=", "@")) for row in rows for cell in row)


def test_csv_keeps_numbers() -> None:
    assert as_csv(("a", "b"), [(-0.5, "-x"), (None, "y")]) == "a,b\n-0.5,'-x\n,y\n"


@pytest.mark.parametrize("name", HOSTILE)
def test_plotly_is_given_text(name: str) -> None:
    shown = said(name)
    assert "<" not in shown
    assert "\n" not in shown


def test_long_names_are_cut() -> None:
    assert said("a" * 100) == "a" * 39 + "…"


def test_ids_differ_and_are_plain() -> None:
    ids = {slug(name) for name in ("a b", "a-b", "A b", "é", "<x>", "a-b-")}
    assert len(ids) == 6
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for each in ids)
