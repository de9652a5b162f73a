"""The notebooks: their code runs, and what is stored in them is the output of that code."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import execute
import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from site_pages import notebooks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = [path.stem for path in notebooks.FILES.values()]
LARGEST = 400 * 1024
mpl.use("Agg")

CLAIMS = {
    "margins_in_five_minutes": (
        "after.variance.ratio > before.variance.ratio",
        "after.margins['cosine'].overall.median > before.margins['cosine'].overall.median",
        "after.margins['cosine'].overall.minimum < before.margins['cosine'].overall.minimum",
        "after.prototypes.class_margin > before.prototypes.class_margin",
        "lm.embed(cosface, test, method='pca').assumed[-1] == 'features of length 1'",
    ),
    "fine_tune_with_few_labels": (
        "statistics.mean(scores['linear probe']) > statistics.mean(scores['from scratch']) + 0.02",
        "2 * statistics.mean(scores['linear probe']) > "
        "statistics.mean(scores['from scratch']) + statistics.mean(scores['fine-tuned'])",
        "not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))",
        "all(torch.equal(a.running_mean, b.running_mean) for a, b in "
        "zip(model.backbone, pretrained.backbone) if isinstance(a, nn.BatchNorm2d))",
    ),
    "look_at_a_trained_model": (
        "sum(each.raw < 0 for each in geometry.worst) == len(geometry.worst)",
        "geometry.errors.auroc['lead_raw'] > 0.9",
        "found.chosen in found.auroc and found.auroc[found.chosen] > 0.8",
        "fitted.ece < fitted.ece_before",
        "lm.measuring.accuracy_of(calibrated, test).accuracy == geometry.accuracy",
    ),
}
"""What the text of a notebook says of its results."""


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def code_cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in stored(name)["cells"] if cell["cell_type"] == "code"]


def pictures(cell: dict[str, Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


@pytest.mark.parametrize("name", NAMES)
def test_the_code_runs_and_bears_out_the_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cell by cell, with warnings as errors; each prints and draws where outputs are stored."""
    monkeypatch.chdir(tmp_path)
    plt.close("all")  # of other tests
    names: dict[str, Any] = {}
    for number, cell in enumerate(code_cells(name)):
        said = io.StringIO()
        with redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        for figure in map(plt.figure, plt.get_fignums()):
            figure.canvas.draw()
        assert len(plt.get_fignums()) == pictures(cell), f"cell {number}"
        plt.close("all")
        printed = [each for each in cell["outputs"] if each["output_type"] == "stream"]
        assert bool(said.getvalue()) == bool(printed), f"cell {number}"
    for claim in CLAIMS[name]:
        assert eval(claim, names), claim
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_of_this_code_and_clean(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < LARGEST
    made, cells = stored(name), code_cells(name)
    assert made["metadata"]["executed"] == execute.code_digest(made["cells"]), "run make notebooks"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds == {"stream", "display_data"}, "an error, or a value that no one printed"
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert sum(map(pictures, cells)) >= 1
    without_pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    assert re.findall(MACHINE, without_pictures) == []


MACHINE = r"(?i)[^\s\"']*(?:/home/|/root/|/users/|/tmp/|/usr/|[a-z]:\\\\|0x[0-9a-f]{6}|warning).*"


@pytest.mark.parametrize(
    "text", ["/home/me/x.py", "File /usr/lib", r"C:\\x", "at 0x7f00aa12", "UserWarning: no"]
)
def test_paths_and_warnings_would_be_found(text: str) -> None:
    assert re.findall(MACHINE, text) != []


@pytest.mark.parametrize("name", NAMES)
def test_the_text_quotes_no_results_and_links_to_what_is_there(name: str) -> None:
    text = "\n".join(
        "".join(cell["source"]) for cell in stored(name)["cells"] if cell["cell_type"] == "markdown"
    )
    assert re.findall(r"\d\.\d{2,}|\d ?%|[−-]0\.\d", text) == []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        assert (FOLDER / target).exists(), target
    assert f"]({name}.ipynb)" not in text


def test_pages_have_the_code_the_outputs_and_the_figures() -> None:
    pages, figures = notebooks.pages(), notebooks.figures()
    assert next(iter(pages)) == "notebooks/margins_in_five_minutes.md"
    for page, name in zip(pages, NAMES, strict=True):
        for cell in code_cells(name):
            assert "```python\n" + "".join(cell["source"]) + "\n```" in pages[page]
            for output in cell["outputs"]:
                assert "".join(output.get("text", "")).rstrip() in pages[page]
        shown = re.findall(r"\]\(([\w-]+\.png)\)", pages[page])
        assert len(shown) == sum(map(pictures, code_cells(name)))
        assert all(figures[f"notebooks/{each}"].startswith(b"\x89PNG") for each in shown)
