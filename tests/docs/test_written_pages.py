"""What people wrote: snippets run, marks are explained, the figure is current."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_margin_figure
from site_pages import choosing

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

# Pages with Python, and the test that runs it.
RUN_BY = {
    "index.md": "docs/test_written_pages.py",
    "how-to/README.md": "integrations/test_how_to.py",
    "how-to/attach.md": "dropin/test_attach_page.py",
    "how-to/command_line.md": "cli/test_docs.py",
    "how-to/discriminative.md": "training/test_stable_discriminative.py",
    "how-to/measure.md": "measuring/test_how_to.py",
    "how-to/million_classes.md": "prototypes/test_million_classes_page.py",
    "how-to/report.md": "docs/test_written_pages.py",
    "how-to/schedules.md": "dropin/test_schedules_in_training.py",
}


def test_all_python_of_the_pages_is_run_by_some_test() -> None:
    pages = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if BLOCK.search(path.read_text(encoding="utf-8"))
    }
    assert pages <= set(RUN_BY), "say in RUN_BY which test runs the page"
    for page, test in RUN_BY.items():
        text = (ROOT / "tests" / test).read_text(encoding="utf-8")
        named = "make_how_to" if page == "how-to/README.md" else Path(page).name
        assert named in text, f"{test} does not speak of {page}"


@pytest.mark.parametrize("page", ["index.md", "how-to/report.md"])
def test_the_page_runs(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        torch.manual_seed(0)
        names: dict[str, object] = {"folder": tmp_path}
        exec(compile(block, page, "exec"), names)
        if "loss" in names:
            assert torch.isfinite(names["loss"])  # type: ignore[arg-type]
        if "page" in names:
            assert "<html" in Path(str(names["page"])).read_text(encoding="utf-8")


def test_the_report_page_names_options_that_exist() -> None:
    from largemargin.cli.command import parser_of

    known = parser_of("report").format_help()
    options = set(re.findall(r"--\w+", (DOCS / "how-to" / "report.md").read_text()))
    assert len(options) >= 3
    assert all(option in known for option in options)


def test_every_mark_in_the_code_and_the_recipes_is_explained() -> None:
    page = (DOCS / "errata.md").read_text(encoding="utf-8")
    anchors = re.findall(r"\{ #([a-z0-9]+) \}|id=\"(o\d+)\"", page)
    explained = {first or second for first, second in anchors}
    assert len(explained) == len(anchors), "an anchor is there twice"
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "papers").rglob("*.md")]
    files += (ROOT / "papers").rglob("*.yaml")
    named = re.compile(
        r"[Ee]rrat(?:um|a) ((?:[NRZKD]\d+(?:, | and )?)+)|\(((?:[KRZ]|O)\d{1,2})[):]"
    )
    for file in files:
        for marks in named.findall(file.read_text(encoding="utf-8")):
            for mark in re.findall(r"[A-Z]\d+", "".join(marks)):
                assert mark.lower() in explained, f"{file.name} names {mark}"


def test_the_caption_has_the_numbers_of_the_figure() -> None:
    numbers = json.loads(choosing.NUMBERS.read_text(encoding="utf-8"))
    told = choosing.caption()
    for each in numbers.values():
        assert all(str(value) in told for value in (each["class_margin"], each["accuracy"]))


@pytest.mark.parametrize("name", ["margin-light.svg", "margin-dark.svg"])
def test_the_figure_stands_alone(name: str) -> None:
    text = (DOCS / "figures" / name).read_text(encoding="utf-8")
    outside = re.sub(
        r'xmlns(:\w+)?="[^"]*"|<metadata>.*?</metadata>|<!DOCTYPE[^>]*>', "", text, flags=re.S
    )
    assert "http" not in outside
    assert "<text" not in outside, "letters must be drawn: an image has no fonts of the page"


@pytest.mark.slow
def test_the_figure_shows_what_training_gives() -> None:
    """Again from the start; other processors round otherwise, so near is enough."""
    agreed = json.loads(choosing.NUMBERS.read_text(encoding="utf-8"))
    trained = {
        name: make_margin_figure.train(loss()) for name, loss in make_margin_figure.LOSSES.items()
    }
    found = make_margin_figure.numbers(trained)
    for name, each in agreed.items():
        assert found[name]["class_margin"] == pytest.approx(each["class_margin"], abs=6)
        assert found[name]["median"] == pytest.approx(each["median"], abs=0.1)
        assert found[name]["accuracy"] == pytest.approx(each["accuracy"], abs=2)
    assert found["CosFace"]["lowest_tenth"] > found["Cross entropy"]["lowest_tenth"] + 0.2


def test_the_made_parts_of_the_readme_are_current() -> None:
    import make_readme

    text = make_readme.README.read_text(encoding="utf-8")
    assert make_readme.made(text) == text, "run python docs/make_readme.py"


def test_what_the_readme_says_of_other_libraries_has_a_source() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Beside other libraries") : text.index("## The pieces")]
    defined = dict(re.findall(r"(?m)^\[([a-z-]+)\]: (https://\S+)$", table))
    used = set(re.findall(r"\]\[([a-z-]+)\]", table))
    assert used == set(defined)
    assert "2.9.0" in table
    assert "1.0.30" in table
