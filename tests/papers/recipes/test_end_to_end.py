"""Every recipe from files in the right layout to a table, with a small network and one epoch."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from largemargin_papers.recipes import Table, read_claims, read_recipe, reproduce
from largemargin_papers.recipes.reproduce import read_cells
from papers.recipes.layouts import all_of, people, road
from papers.recipes.more_protocols import RECIPES

from largemargin.app.data import load_data

pytest.importorskip("torchvision", reason="its readers of CIFAR and SVHN are used")
pytest.importorskip("scipy", reason="SVHN is a .mat file")
pytest.importorskip("sklearn", reason="t-SNE")

PAPERS = Path(__file__).resolve().parents[3] / "papers"
SMALL = {
    "model.name": "small_cnn",
    "model.options": {"width": 4, "dim": 128},
    "model.weights": None,
    "model.dropout": None,
    "model.batch_norm": None,
    "optimizer.lr": 0.01,
    "batch_size": 16,
    "device": "cpu",
    "gradients_every": 0,
}
"""A stand-in that trains on the CPU; all other settings are the recipe's."""
FRACTIONS = {"odn/text": 0.25, "odn/table2": 0.5, "odn/table3": 0.5}
"""Training fractions, where a thousandth of a few images would be one of each class."""
QUICK = {
    "lmd/table3": ("CIFAR10, *, 20",),
    "robust/table1": ("Ours",),
    "ltlm/figure_tammes": ("optimum*", "LM-Softmax"),
    "kobayashi/table2": ("Softmax loss, -", "Super-symmetry, -"),
    "odn/table1": ("5, 1, 0, *",),
}


def run(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only: tuple[str, ...] = (),
    reading: str = "",
) -> Table:
    paths = all_of(tmp_path / "data", monkeypatch)
    on_roads = name in ("robust/table3", "robust/table4")
    paths["folder"] = str(tmp_path / "data" / ("road" if on_roads else "imagenet"))
    changes = dict(SMALL)
    if name in FRACTIONS:
        changes["data.fraction"] = FRACTIONS[name]
    if name in ("lmd/figures4and6", "robust/figures1and12and13"):  # groups of blocks
        changes |= {"model.name": "resnet18", "model.options": {"width": 8}}
    if name == "ltlm/table2":
        changes["data.imbalance_ratio"] = 4.0
    if name in ("lmd/table4", "kobayashi/table4"):
        changes["data.size"] = 32
    if on_roads:
        changes |= {"data.size": 40, "data.width": 50}
    copied = tmp_path / "papers" / Path(name).parent
    shutil.copytree(PAPERS / Path(name).parent, copied)
    return reproduce(
        copied / f"{Path(name).name}.yaml",
        epochs_fraction=0.001,
        seeds=1,
        folder=tmp_path / "runs",
        overrides=changes,
        reading=reading,
        paths=paths,
        only=only,
        progress=False,
    )


def check(table: Table, name: str, tmp_path: Path, measured: int) -> None:
    assert table.failures == {}
    found = [line for line in table.lines if line.measured.n]
    assert len(found) == measured
    text = str(table)
    assert "reported" in text
    assert "of the epochs" in table.protocol
    for line in found:
        computed = line.key.get("method", "").startswith("optimum")
        expected = "other protocol" if line.reported is not None else "nothing reported"
        assert line.verdict.split(";")[0] == ("reproduced" if computed else expected)
    written = tmp_path / "papers" / f"{Path(name).parent}" / "measured" / f"{Path(name).name}.json"
    cells = json.loads(written.read_text())["protocols"][table.protocol]
    trained = [each for cell in cells.values() for each in cell["runs"] if "run" in each]
    assert trained
    for about in trained:
        assert about["epochs"] == 1
        assert about["seconds"] > 0
        assert about["device"].startswith("cpu")
        assert about["settings"]["seed"] == about["seed"] == 0


@pytest.mark.parametrize(
    ("name", "layout", "size"),
    [("robust/table3", road, (400, 500)), ("ltlm/table3", people, (256, 128))],
)
def test_images_that_are_not_square(
    name: str, layout: Callable[[Path], None], size: tuple[int, int], tmp_path: Path
) -> None:
    layout(tmp_path)
    path = PAPERS / f"{name}.yaml"
    config = read_cells(path, read_recipe(path))[0].config.data
    data = load_data(replace(config, path=str(tmp_path)))
    assert data.size == size
    assert data.train.image(0).shape == (3, *size)


@pytest.mark.parametrize(("name", "only"), QUICK.items(), ids=QUICK)
def test_some_cells(
    name: str, only: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of ODN's other cells some need the same runs, now that dropout and batch norm are gone.
    count = {"robust/table1": 6, "odn/table1": 6}.get(name, 2)
    table = run(name, tmp_path, monkeypatch, only)
    check(table, name, tmp_path, count)


@pytest.mark.parametrize("method", ["Ours", "Training on both clean and noisy images"])
def test_another_reading_is_run_and_measured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise on crops of its own, joined or not, cut back, and the best epoch on the test images."""
    table = run("robust/table1", tmp_path, monkeypatch, (method,), "authors' code")
    assert table.protocol.startswith("authors' code, 0.001 of the epochs, ")
    check(table, "robust/table1", tmp_path, 6)
    written = tmp_path / "papers/robust/measured/table1.json"
    (made,) = json.loads(written.read_text())["protocols"][table.protocol][method]["runs"]
    assert sum(name.startswith("best_on_test") for name in made["numbers"]) == 6
    assert made["settings"]["noise"]["crop"] == "own"


def one_of_each_kind(name: str) -> tuple[str, ...]:
    """Cells that differ in more than numbers: data, network, terms, noise, modifiers."""
    path = PAPERS / f"{name}.yaml"
    kinds: dict[object, str] = {}
    for cell in read_cells(path, read_recipe(path)):
        config, data = cell.config, cell.config.data
        few = (data.fraction < 1, data.label_noise > 0, data.imbalance, data.name)
        terms = re.sub(r"[0-9.]+", "", config.objective.name)
        kind = (few, config.model.name, config.model.head, terms, config.noise.use, cell.train)
        kinds.setdefault(kind, cell.name)
    return tuple(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"ltlm/figure_free"}))
def test_every_kind_of_cell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = one_of_each_kind(name)
    table = run(name, tmp_path, monkeypatch, only)
    path = PAPERS / f"{name}.yaml"
    recipe = read_recipe(path)
    claims = read_claims(recipe, path.parent / recipe.claims, read_cells(path, recipe))
    wanted = [
        claim
        for claim in claims
        if claim.cell is not None
        and claim.cell.name in only
        and (claim.measure.against is None or claim.cell.name.replace("Xent", "ODN") in only)
    ]
    found = [line for line in table.lines if line.measured.n]
    assert {tuple(claim.key.values()) for claim in wanted} <= {
        tuple(line.key.values()) for line in found
    }
    check(table, name, tmp_path, len(found))
