"""What is kept of runs for figures, on its way from the model to the picture."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from largemargin_papers.recipes import figure_data, read_recipe, reproduce
from largemargin_papers.recipes.figure_data import (
    SKETCHES,
    box_of,
    packed,
    settled,
    settled_run,
    unpacked,
)
from largemargin_papers.recipes.figure_panels import densities
from largemargin_papers.recipes.figure_store import label_of, read_sketches
from largemargin_papers.recipes.figures import CAPTIONS, pictures_of, write_figures
from largemargin_papers.recipes.measured import now
from largemargin_papers.recipes.pages import take_records, write_pages
from largemargin_papers.recipes.queue import (
    left_of,
    measured_already,
    measuring_seconds_of,
    tasks_of,
)
from largemargin_papers.recipes.records import append_record
from largemargin_papers.recipes.stages import Stages, stages_of

from largemargin import LargeMarginError
from largemargin.app.data import Samples
from largemargin.app.models import ModelConfig, build_model

pytest.importorskip("sklearn", reason="t-SNE and digits are scikit-learn's")
pytest.importorskip("matplotlib", reason="figures are drawn by it")

PAPERS = Path(__file__).resolve().parents[3] / "papers"
RECIPE = """
title: A figure
claims: figure.csv
data_needed: digits are bundled
base:
  {{epochs: 1, data.name: digits, data.fraction: 0.3, measure: false, geometry_samples: {every}}}
grid:
  - column: method
    values:
      softmax: {{objective.name: cross_entropy}}
      ours: {{objective: {{name: cosface, settings: {{margin: 0.2}}}}}}
measures:
  accuracy: {{metric: accuracy, tolerance: 50}}
  ratio: {{metric: plane_variance, unit: "", options: {{part: test, of: ratio}}}}
record:
  - {{metric: stage_variance, unit: "", options: {{stage: features, samples: 40}}}}
sketches:
{sketches}
"""


def recipe_in(folder: Path, sketches: str, every: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "figure.csv").write_text("method,accuracy,ratio\nsoftmax,50,1\nours,60,2\n")
    path = folder / "figure.yaml"
    path.write_text(RECIPE.format(sketches=sketches, every=every))
    return path


def test_stages_end_where_the_width_changes() -> None:
    config = ModelConfig(name="resnet18", feature_dim=7, options={"width": 2})
    model = build_model(config, 3).eval()
    pixels = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8)
    samples = Samples(
        pixels=pixels, labels=torch.arange(24) % 3, ids=[str(number) for number in range(24)]
    )
    found = stages_of(model, samples, count=12)
    assert {name: rows.shape[1] for name, rows in found.rows.items()} == {
        **{f"block {number}": 2**number for number in (1, 2, 3, 4)},
        "features": 7,
    }
    assert found.labels.bincount().tolist() == [4, 4, 4]
    with torch.no_grad():
        whole = model.backbone[:5](model.normalize(pixels.float() / 255)).mean((2, 3))
    for row in found.rows["block 1"]:  # after the second block: the first of this width goes on
        assert float((whole - row).abs().amax(1).min()) < 1e-5
    noisy, again = (stages_of(model, samples, count=12, noise=0.2) for _ in range(2))
    assert torch.equal(noisy.labels, found.labels)
    for name, rows in found.rows.items():
        assert not torch.allclose(noisy.rows[name], rows, atol=1e-4)
        assert torch.equal(noisy.rows[name], again.rows[name])


def test_noisy_images_have_panels_beside_the_clean_ones() -> None:
    given: list[float] = []

    def found(count: int, noise: float) -> Stages:
        given.append(noise)
        return Stages({"features": torch.randn(count, 3) + noise}, torch.arange(count) % 2)

    subject: Any = SimpleNamespace(stages=found, split="test")
    assert [*figure_data.stages(subject, samples=6)["panels"]] == ["features"]
    made = figure_data.stages(subject, samples=6, noise=0.1)["panels"]
    assert [*made] == ["features", "features, noisy"]
    assert made["features"]["rows"] != made["features, noisy"]["rows"]
    assert given == [0.0, 0.0, 0.1]


def test_features_travel_as_their_principal_components() -> None:
    torch.manual_seed(0)
    labels = torch.arange(60) % 2
    rows = 1e6 * (torch.randn(60, 80) + 9 * labels[:, None])
    panel = {"labels": labels.tolist(), **packed(rows)}
    back = unpacked(panel)
    assert back.shape == (60, 50)
    # Distances are what t-SNE is made of; 50 of 60 components keep nearly all of them.
    before, after = torch.pdist(rows.double()), torch.pdist(back)
    assert float(torch.corrcoef(torch.stack([before, after]))[0, 1]) > 0.99
    made = settled({"kind": "stages", "panels": {"features": panel}})
    plane = made["panels"]["features"]
    assert plane.keys() == {"labels", "x", "y", "within", "between", "ratio"}
    assert plane["ratio"] > 1
    assert settled(made) == made
    run = {"numbers": {"accuracy": [1.0, None]}, "sketches": {"x": made | {"kind": "planes"}}}
    assert settled_run(run)["numbers"] == {
        "accuracy": [1.0, None],
        **{
            f"plane_variance of={of} part=features": [plane[of], None]
            for of in ("within", "between", "ratio")
        },
    }
    with pytest.raises(LargeMarginError, match="must be finite to be drawn"):
        packed(torch.full((3, 2), float("nan")))


def test_whiskers_end_at_values() -> None:
    assert box_of(torch.tensor([0.0, 10.0, 11.0, 12.0, 13.0, 14.0, 40.0])) == {
        "med": 12.0,
        "q1": 10.5,
        "q3": 13.5,
        "whislo": 10.0,
        "whishi": 14.0,
    }


def made_up(kind: str) -> dict[str, Any]:
    """A sketch as a run gives it."""
    labels = [number % 2 for number in range(12)]
    panel = {"labels": labels, "x": labels, "y": labels, "ratio": None}
    variances = {"within": 2.0, "between": 3.0, "ratio": 1.5}
    noise = {
        "amount": 0.06,
        "shares": [0.5, 1.0],
        "accuracy": [90.0, None],
        "group_curvature": [3.0, None, 1.0],
        "group_size": [2, 0, 4],
        "correlation": -1.0,
    }
    box = box_of(torch.arange(1.0, 9.0))
    return {
        "stages": {"split": "test", "panels": {"block 1": panel, "features": panel}},
        "planes": {"panels": {"test": {**panel, **variances}}},
        "margin_density": {
            "split": "test",
            "at": [0.0, 1.0, 2.0],
            "density": [0.1, 0.7, 0.1],
            "ratio": 2.0,
        },
        "curvature": {"samples": 12, "share": 0.9, "box": box, "noise": {"gaussian": noise}},
    }[kind] | {"kind": kind}


def every_kind(parts: str) -> str:
    kinds = [f"  - {{kind: {kind}}}" for kind in SKETCHES if kind != "planes"]
    return "\n".join(
        [*kinds, f"  - {{kind: planes, options: {{parts: {parts}}}, every_seed: true}}"]
    )


def test_records_become_figures(tmp_path: Path) -> None:
    path = recipe_in(tmp_path / "paper", every_kind("[test]"))
    queue = tmp_path / "queue.yaml"
    queue.write_text("entries:\n  - {recipe: paper/figure.yaml, seeds: [3, 4]}\n")
    tasks = tasks_of(queue)
    # Of the first seed alone, but for those that numbers follow from.
    assert [len(task.sketches) for task in tasks] == [4, 1, 4, 1]
    assert measuring_seconds_of(tasks[0]) > measuring_seconds_of(tasks[1]) + 9
    out = tmp_path / "out.jsonl"
    for task in tasks:
        record: dict[str, Any] = {
            "run": task.name,
            "status": "finished",
            "seed": task.config.seed,
            "numbers": {name: [1.5, None] for name in now(task.wanted)},
            "places": [vars(place) for place in task.places],
            "curves": {"of": "train", "samples": 9, "softmax_bias": [2.0, None, 1.0]},
        }
        if task.sketches:
            record["sketches"] = {name: made_up(kind) for name, (kind, _) in task.sketches.items()}
            record["sketches"]["sketch of another table"] = {"kind": "curvature"}
        if "sketch curvature" in task.sketches and "ours" in task.places[0].cell:
            record["sketches"]["sketch curvature"] = {"kind": "curvature", "failed": "not finite"}
        append_record(out, record)
    take_records(out, tmp_path)
    (page,) = write_pages(tmp_path)
    text = page.read_text()
    drawn = {picture.kind: picture.path for picture in pictures_of(path)}
    assert drawn.keys() == CAPTIONS.keys()
    cells = {picture.kind: [*picture.cells] for picture in pictures_of(path)}
    assert (cells["stages"], cells["curvature"]) == (["softmax", "ours"], ["softmax"])
    for kind, file in drawn.items():
        assert f"]({file.name})" in text
        assert CAPTIONS[kind] in text
        assert file.read_text().lstrip().startswith("<?xml")
    assert "| softmax | stage_variance samples=40 stage=features | 1.50 ± 0.00 | 2 |" in text
    assert "| softmax | ratio | 1.00 | 1.50 ± 0.00 | +0.50 | 2 | reproduced |" in text
    assert len(read_sketches(path)) == 10
    stored = json.loads((page.parent / "figure.json").read_text())["protocols"]["as printed"]
    assert stored["ours"]["runs"][0]["sketches"] == sorted(
        label_of(each) for each in read_recipe(path).sketches
    )
    known = measured_already(tmp_path, tasks)
    assert left_of(tasks, known) == []
    known[tasks[2].name].remove("sketch curvature")
    assert left_of(tasks, known) == [tasks[2]]
    before = {file: file.read_text() for file in page.parent.glob("*.json*")}
    take_records(out, tmp_path)
    assert {file: file.read_text() for file in page.parent.glob("*.json*")} == before


def test_rows_that_share_runs_share_a_panel() -> None:
    from matplotlib.figure import Figure

    one = made_up("margin_density")
    other = one | {"ratio": 3.0}
    figure = Figure()
    cells = {"accuracy, a": one, "accuracy, b": other, "ratio, a": one, "ratio, b": other}
    densities(figure, cells | {"gain, a": other, "gain, b": one})
    assert [axes.get_title() for axes in figure.axes] == ["accuracy", "gain"]


@pytest.mark.slow
def test_a_reproduced_table_keeps_its_sketches(tmp_path: Path) -> None:
    path = recipe_in(tmp_path, every_kind("[train, test]"), every=20)
    options: dict[str, Any] = {"folder": tmp_path / "runs", "overrides": {"device": "cpu"}}
    reproduce(path, progress=False, **options)
    found = read_sketches(path)
    assert len(found) == 8
    panels = next(each["sketch"]["panels"] for each in found if "stages" in each["label"])
    assert list(panels)[-1] == "features"
    assert all(len(panel["x"]) == len(panel["labels"]) for panel in panels.values())
    assert {picture.kind for picture in pictures_of(path)} == CAPTIONS.keys()
    assert len(write_figures(path)) == 5
    before = (tmp_path / "measured" / "figure.json").read_text()
    shutil.rmtree(tmp_path / "runs")
    reproduce(path, progress=False, **options)
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "measured" / "figure.json").read_text() == before


def test_unknown_sketches_are_refused(tmp_path: Path) -> None:
    path = recipe_in(tmp_path, "  - {kind: plans}")
    with pytest.raises(LargeMarginError, match=r"no sketch 'plans'. There are stages, planes"):
        reproduce(path, folder=tmp_path / "runs", train_missing=False)


def test_the_papers_figures_are_drawn() -> None:
    """Sketches that were measured have a picture beside them."""
    for path in sorted(PAPERS.glob("*/*.yaml")):
        if (path.parent / "claims").is_dir():
            for picture in pictures_of(path):
                assert picture.path.is_file(), "run papers/measure.py tables"
