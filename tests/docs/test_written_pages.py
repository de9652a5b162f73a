"""What people wrote: snippets run, marks are explained, the figure is current."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_decisions
import make_margin_figure
import make_measured
from site_pages import choosing, citing
from site_pages.sources import PAPERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

# Pages with Python, and the test that runs it.
RUN_BY = {
    "index.md": "docs/test_written_pages.py",
    "how-to/README.md": "integrations/test_how_to.py",
    "how-to/attach.md": "dropin/test_attach_page.py",
    "how-to/calibration.md": "docs/test_guides.py",
    "how-to/coming_from.md": "dropin/test_question_pages.py",
    "how-to/command_line.md": "app/cli/test_docs.py",
    "how-to/discriminative.md": "app/training/test_stable_discriminative.py",
    "how-to/early_stopping.md": "docs/test_guides.py",
    "how-to/fine_tuning.md": "docs/test_guides.py",
    "how-to/logging.md": "docs/test_guides.py",
    "how-to/embeddings.md": "integrations/test_linear_solver.py",
    "how-to/measure.md": "measuring/test_how_to.py",
    "how-to/million_classes.md": "heads/test_million_classes_page.py",
    "how-to/ood.md": "docs/test_guides.py",
    "how-to/peft.md": "integrations/test_peft.py",
    "how-to/pieces.md": "docs/test_written_pages.py",
    "how-to/presets.md": "app/training/test_presets_page.py",
    "how-to/questions.md": "dropin/test_question_pages.py",
    "how-to/report.md": "docs/test_written_pages.py",
    "how-to/robust.md": "measuring/test_robust_page.py",
    "how-to/schedules.md": "dropin/test_schedules_in_training.py",
    "how-to/wrong_labels.md": "heads/test_sub_center_head.py",
    "how-to/tabular.md": "docs/test_guides.py",
    "how-to/texts.md": "docs/test_guides.py",
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


@pytest.mark.parametrize("page", ["index.md", "how-to/pieces.md", "how-to/report.md"])
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write where it runs
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        torch.manual_seed(0)
        names: dict[str, object] = {}
        exec(compile(block, page, "exec"), names)
        for name in {"loss", "value", "total"} & names.keys():
            assert torch.isfinite(names[name]), name  # type: ignore[arg-type]
        if "page" in names:
            assert "<html" in Path(str(names["page"])).read_text(encoding="utf-8")


def test_the_report_page_names_options_that_exist() -> None:
    from largemargin.app.cli.command import parser_of

    known = parser_of("report").format_help()
    text = (DOCS / "how-to" / "report.md").read_text()
    options = set(re.findall(r"--\w+", text))
    assert len(options) >= 3
    assert all(option in known for option in options)
    # With their values, as a reader would type them.
    for words in re.findall(r"`(--\w+ [^`]+)`", text):
        given = parser_of("report").parse_args(["runs/first", *shlex.split(words)])
        if words.startswith("--layers"):
            assert given.layers == ("layer2", "layer3")


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


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere_in_the_repository_too(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def test_the_glossary_has_every_paper() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for letters, paper in PAPERS.items():
        assert f"| {paper.tag} | {letters} | {paper.errata} | {paper.authors.split(',')[0]}" in text
        assert paper.title in text
    used = {file.name.split("-")[0].split(".")[0] for file in GOLDEN.glob("*.json")}
    assert all(letters in text for letters in used)


def test_the_citation_is_that_of_the_file() -> None:
    made = citing.bibtex()
    assert "@software{largemargin,\n  author = {{the largemargin authors}},\n" in made
    about = {"title": "T", "authors": [{"family-names": "A", "given-names": "B"}]}
    assert "  author = {A, B},\n  title = {{T}},\n}" in citing.bibtex(about)


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


@pytest.mark.parametrize("page", make_measured.PAGES)
def test_the_made_parts_of_the_page_are_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert make_measured.made(page) == text, "run python docs/make_measured.py"


def test_nothing_that_is_made_is_lost() -> None:
    parts = [name for made in make_measured.PAGES.values() for name in made]
    speed = ["curvature", "geometry", "heads", "million", "small", "training"]
    others = ["decisions", "embeddings", "figure", "papers", "recommendations"]
    assert sorted(parts) == sorted([*speed, *others])


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()
    assert len(words) <= 1500


def test_the_recommendations_say_where_nothing_was_won() -> None:
    entries = make_decisions.read_presets()
    lines = make_decisions.recommendations().splitlines()
    for name, entry in entries.items():
        (row,) = [line for line in lines if f'`lm.preset("{name}")`' in line]
        test = entry["compared"]
        assert f"{100 * test['difference']:+.2f} [" in row
        assert ("**none**" in row) == (test["verdict"] != "winner")
        for title in entry["others"]:
            assert any(title in line for line in lines)


def test_the_gain_over_a_simpler_remedy_is_the_smallest_that_was_measured() -> None:
    gain = {"difference": 0.02, "low": 0.01, "high": 0.03}
    found = {
        "chosen": "ldam",
        "baseline": "softmax",
        "reported_beside": {"ldam - label_smoothing": gain, "label_smoothing - softmax": gain},
        "asked": {},
    }
    said = make_decisions._simpler_remedy(found)
    assert said == "+2.00 [+1.00, +3.00] (label smoothing)"
    answer = {
        "method": "softmax",
        "epochs": 0.5,
        "reweight_at": None,
        "optimizer_of": None,
        "chosen_beyond": {**gain, "difference": 0.015},
    }
    said = make_decisions._simpler_remedy({**found, "asked": {"x": answer}})
    assert said == "+1.50 [+1.00, +3.00] (early stopping)"
    late = {**answer, "epochs": 1.0, "reweight_at": 0.8}
    assert "late class weights" in make_decisions._simpler_remedy({**found, "asked": {"x": late}})
    same = {**late, "optimizer_of": "ldam"}
    said = make_decisions._simpler_remedy({**found, "asked": {"x": same}})
    assert said == "+1.50 [+1.00, +3.00] (late class weights, same optimizer)"
    assert make_decisions._simpler_remedy({**found, "reported_beside": {}}) == "–"


def test_what_is_said_of_other_libraries_has_a_source() -> None:
    table = (DOCS / "other_libraries.md").read_text(encoding="utf-8")
    defined = dict(re.findall(r"(?m)^\[([a-z-]+)\]: (https://\S+)$", table))
    used = set(re.findall(r"\]\[([a-z-]+)\]", table))
    assert used == set(defined)
    assert "2.9.0" in table
    assert "1.0.30" in table
