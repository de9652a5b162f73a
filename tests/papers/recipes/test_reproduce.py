"""``reproduce`` with a made-up paper and a trainer that does not train."""

import json
from pathlib import Path

import pytest
from largemargin_papers.recipes import read_recipe, reproduce
from largemargin_papers.recipes.cells import cells_of, chosen_of
from largemargin_papers.recipes.images import Images

from largemargin import LargeMarginError
from largemargin.app.data import Data
from largemargin.app.training import Interrupted, Run, RunConfig, write_config
from largemargin.app.training.files import write_json

RECIPE = """
title: A table
claims: claims.csv
data_needed: digits are bundled
runs: 2
base: {epochs: 10, data.name: digits, device: cpu, measure: false}
grid:
  - column: method
    values:
      softmax: {objective.name: cross_entropy}
      ours: {objective: {name: cosface, settings: {margin: 0.2}}}
  - column: size
    values:
      1: {batch_size: 16}
      2: {batch_size: 32}
measures:
  error: {metric: error, better: lower, tolerance: 0.5}
baseline: {method: softmax}
left_out:
  - {row: {method: theirs}, reason: no code}
"""
CLAIMS = """method,size,error,std
softmax,1,10.0,0.1
softmax,2,12.0,0.1
ours,1,8.0,0.1
ours,2,11.0,0.1
theirs,1,9.0,0.1
"""
ERRORS = {("cross_entropy", 16): 10.2, ("cross_entropy", 32): 15.0}
ERRORS |= {("cosface", 16): 8.1, ("cosface", 32): 16.0}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "claims.csv").write_text(CLAIMS)
    path = tmp_path / "table1.yaml"
    path.write_text(RECIPE)
    return path


class Trainer:
    """Writes results that depend on loss, batch size and seed."""

    def __init__(self) -> None:
        self.trained: list[tuple[str, int, int]] = []
        self.epochs: set[int] = set()

    def __call__(self, config: RunConfig, folder: Path, data: Data, progress: bool) -> Run:
        name = config.objective.name
        self.trained.append((name, config.batch_size, config.seed))
        self.epochs.add(config.epochs)
        error = ERRORS[name, config.batch_size] + 0.01 * (-1) ** config.seed
        folder.mkdir(parents=True)
        write_config(config, folder / "config.yaml")
        write_json(folder / "environment.json", {"device": "paper", "commit": "abc", "torch": "2"})
        scores = {"test": {"accuracy": 1 - error / 100}, "seconds": 1.5, "epochs": config.epochs}
        write_json(folder / "result.json", scores)
        return Run(folder)


def by_key(table: object) -> dict[tuple[str, str], object]:
    return {(line.key["method"], line.key["size"]): line for line in table.lines}


def test_every_line_has_its_verdict(recipe: Path, tmp_path: Path) -> None:
    trainer = Trainer()
    table = reproduce(recipe, folder=tmp_path / "runs", trainer=trainer, progress=False)
    lines = by_key(table)
    assert {key: line.verdict for key, line in lines.items()} == {
        ("softmax", "1"): "reproduced",
        ("softmax", "2"): "worse than reported",
        ("ours", "1"): "reproduced; direction holds",
        ("ours", "2"): "worse than reported; direction does not hold",
        ("theirs", "1"): "left out: no code",
    }
    ours = lines["ours", "1"]
    assert ours.measured.n == 2
    assert ours.measured.mean == pytest.approx(8.1)
    assert ours.measured.std == pytest.approx(0.01 * 2**0.5)
    assert (ours.reported, ours.reported_std) == (8.0, 0.1)
    text = str(table)
    assert "Protocol: as printed." in text
    row = next(line for line in text.splitlines() if line.startswith("ours, 1"))
    assert row.endswith(" reproduced; direction holds")
    assert "8.00 ± 0.10 %" in row
    assert "8.10 ± 0.01 %" in row
    assert row.index("8.00") < row.index("8.10")


def test_runs_are_made_once_and_numbers_are_kept(recipe: Path, tmp_path: Path) -> None:
    trainer = Trainer()
    only = ["ours, 1"]
    reproduce(recipe, folder=tmp_path / "runs", trainer=trainer, only=only, progress=False)
    assert trainer.trained == [("cosface", 16, 0), ("cosface", 16, 1)]
    reproduce(recipe, folder=tmp_path / "runs", trainer=trainer, seeds=3, progress=False)
    assert sorted(trainer.trained) == sorted(
        (name, size, seed) for name, size in ERRORS for seed in range(3)
    )
    again = Trainer()
    table = reproduce(recipe, folder=tmp_path / "runs", trainer=again, seeds=3, progress=False)
    assert again.trained == []
    assert by_key(table)["ours", "1"].measured.n == 3
    kept = json.loads((tmp_path / "measured" / "table1.json").read_text())
    cell = kept["protocols"]["as printed"]["ours, 1"]
    assert [each["seed"] for each in cell["runs"]] == [0, 1, 2]
    errors = [each["numbers"]["error"][0] for each in cell["runs"]]
    assert errors == pytest.approx([8.11, 8.09, 8.11])
    assert cell["reported"] == {"error": 8.0}
    about = cell["runs"][0]
    assert (about["device"], about["commit"], about["seconds"]) == ("paper", "abc", 1.5)
    assert about["settings"]["objective"]["settings"] == {"margin": 0.2}


def test_what_was_measured_needs_no_runs(recipe: Path, tmp_path: Path) -> None:
    """Numbers beside the recipe are enough for its table, and are not made again."""
    only = {"only": ["method=ours,size=1"], "progress": False}
    reproduce(recipe, folder=tmp_path / "runs", trainer=Trainer(), seeds=[4, 2], **only)
    table = reproduce(recipe, folder=tmp_path / "new", train_missing=False, progress=False)
    assert by_key(table)["ours", "1"].measured.values == pytest.approx((8.11, 8.11))
    again = Trainer()
    reproduce(recipe, folder=tmp_path / "new", trainer=again, seeds=[2, 3], **only)
    assert again.trained == [("cosface", 16, 3)]
    kept = json.loads((tmp_path / "measured" / "table1.json").read_text())
    runs = kept["protocols"]["as printed"]["ours, 1"]["runs"]
    assert [each["seed"] for each in runs] == [2, 3, 4]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["size=1"], ["softmax, 1", "ours, 1"]),
        (["method=o*, size=2"], ["ours, 2"]),
        (["softmax, *"], ["softmax, 1", "softmax, 2"]),
        (["size=1,method=ours", "softmax, 2"], ["softmax, 2", "ours, 1"]),
    ],
)
def test_cells_are_chosen_by_column_or_name(
    recipe: Path, only: list[str], names: list[str]
) -> None:
    cells = cells_of(read_recipe(recipe))
    assert [each.name for each in chosen_of(cells, only)] == names


def test_the_precision_is_named_but_no_departure(recipe: Path, tmp_path: Path) -> None:
    table = reproduce(
        recipe,
        folder=tmp_path / "runs",
        trainer=Trainer(),
        overrides={"precision": "bf16"},
        progress=False,
    )
    assert table.protocol == "as printed, precision bf16"
    assert by_key(table)["ours", "1"].verdict == "reproduced; direction holds"


def test_a_shorter_run_is_never_called_reproduced(recipe: Path, tmp_path: Path) -> None:
    trainer = Trainer()
    table = reproduce(
        recipe, folder=tmp_path / "runs", trainer=trainer, epochs_fraction=0.3, progress=False
    )
    assert trainer.epochs == {3}
    assert table.protocol == "0.3 of the epochs"
    assert by_key(table)["ours", "1"].verdict == "other protocol; direction holds"
    reproduce(recipe, folder=tmp_path / "runs", trainer=Trainer(), progress=False)
    kept = json.loads((tmp_path / "measured" / "table1.json").read_text())["protocols"]
    assert kept.keys() == {"0.3 of the epochs", "as printed"}


def test_other_settings_are_another_protocol_but_places_are_not(
    recipe: Path, tmp_path: Path
) -> None:
    def protocol(**changes: object) -> str:
        options = {name.replace("__", "."): value for name, value in changes.items()}
        return reproduce(
            recipe,
            folder=tmp_path / "runs",
            trainer=Trainer(),
            overrides=options,
            train_missing=False,
            progress=False,
        ).protocol

    assert protocol(optimizer__lr=0.3) == "optimizer.lr 0.3"
    assert protocol(device="cpu", data__workers=2) == "as printed"


def test_without_runs_nothing_is_measured(recipe: Path, tmp_path: Path) -> None:
    table = reproduce(recipe, folder=tmp_path / "runs", train_missing=False, progress=False)
    assert {line.verdict for line in table.lines} == {"not measured", "left out: no code"}
    assert not (tmp_path / "measured").exists()


def test_a_run_that_fails_is_said_and_the_others_go_on(recipe: Path, tmp_path: Path) -> None:
    trainer = Trainer()

    def breaks(config: RunConfig, folder: Path, data: Data, progress: bool) -> Run:
        if config.objective.name == "cosface" and config.batch_size == 16:
            raise LargeMarginError("the loss was not finite")
        return trainer(config, folder, data, progress)

    table = reproduce(recipe, folder=tmp_path / "runs", trainer=breaks, progress=False)
    lines = by_key(table)
    assert lines["ours", "1"].verdict == "failed: seed 0: the loss was not finite"
    assert lines["softmax", "1"].verdict == "reproduced"
    assert list(table.failures) == ["ours, 1"]
    assert "failed: seed 0" in str(table)


def test_an_interruption_ends_the_command(recipe: Path, tmp_path: Path) -> None:
    def stops(*arguments: object) -> Run:
        raise Interrupted("asked to stop")

    with pytest.raises(Interrupted):
        reproduce(recipe, folder=tmp_path / "runs", trainer=stops, progress=False)


@pytest.mark.slow
def test_an_interrupted_run_is_continued(recipe: Path, tmp_path: Path) -> None:
    """With the real engine: a run stopped after an epoch ends as if it had not been."""
    from largemargin.app.training import train

    class Stop(Exception):
        pass

    def stops_once(config: RunConfig, folder: Path, data: Data, progress: bool) -> Run:
        def stop(row: dict) -> None:
            raise Stop

        return train(config, folder=folder, data=data, progress=False, on_epoch=stop)

    options = {"only": ["ours, 2"], "seeds": 1, "epochs_fraction": 0.2, "progress": False}
    with pytest.raises(Stop):
        reproduce(recipe, folder=tmp_path / "runs", trainer=stops_once, **options)
    table = reproduce(recipe, folder=tmp_path / "runs", **options)
    whole = reproduce(recipe, folder=tmp_path / "others", **options)
    values = [by_key(each)["ours", "2"].measured.values for each in (table, whole)]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("baseline: {method: softmax}", "baseline: {method: nothing}", "not in the grid"),
        ("metric: error", "metrik: error", "metrik is no setting"),
        ("title: A table", "titel: A table", "titel is no setting. Closest: title"),
        ("column: size", "column: sizes", "does not speak of"),
        ("batch_size: 16", "batch_sizes: 16", "batch_sizes is no setting"),
        (
            "{row: {method: theirs}, reason: no code}",
            "{row: {method: x}, reason: y}",
            "exactly one",
        ),
        ("      2: {batch_size: 32}", "", "exactly one cell"),
        ("claims: claims.csv", "claims: claim.csv", "cannot read the claims"),
    ],
)
def test_a_recipe_that_is_wrong_is_refused(
    recipe: Path, before: str, after: str, message: str
) -> None:
    text = recipe.read_text()
    assert before in text
    recipe.write_text(text.replace(before, after))
    with pytest.raises(LargeMarginError, match=message):
        reproduce(recipe, folder=recipe.parent / "runs", trainer=Trainer(), progress=False)


def test_bad_arguments_are_refused(recipe: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"epochs_fraction": 0.0}, "epochs_fraction"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": [-1]}, "every seed"),
        ({"only": ["nothing"]}, "matches nothing. Columns: method, size. Cells: softmax, 1;"),
        ({"overrides": {"epoch": 3}}, "epoch is no setting"),
    ):
        with pytest.raises(LargeMarginError, match=message):
            reproduce(recipe, folder=tmp_path / "runs", progress=False, **options)
    with pytest.raises(LargeMarginError, match="cannot read"):
        reproduce(tmp_path / "missing.yaml")
    (tmp_path / "protocol.yaml").write_text("epochs: 3\n")
    with pytest.raises(LargeMarginError, match="is no recipe"):
        read_recipe(tmp_path / "protocol.yaml")


def test_missing_data_names_what_the_table_needs(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("data.name: digits", "data.name: mnist"))
    with pytest.raises(LargeMarginError, match=r"(?s)not whole.*This table needs: digits are bun"):
        reproduce(recipe, paths={"mnist": str(tmp_path)}, folder=tmp_path / "runs", progress=False)


def test_a_file_of_arrays_stands_for_a_data_set(tmp_path: Path) -> None:
    """CIFAR-100 from a .npz file is normalised and augmented as CIFAR-100 is."""
    import numpy as np

    from largemargin.app.config import DataConfig
    from largemargin.app.data.sources.standard_datasets import KNOWN

    labels = np.arange(400) % 100
    pixels = np.random.default_rng(0).integers(0, 256, (400, 32, 32, 3), dtype=np.uint8)
    path = tmp_path / "cifar100.npz"
    arrays = {"train_images": pixels, "train_labels": labels}
    np.savez(path, **arrays, test_images=pixels[:100] ^ 1, test_labels=labels[:100])
    images = Images({"cifar100": str(path)})
    config = DataConfig(name="cifar100", validation=0.0)
    data = images.data(config)
    assert (len(data.classes), len(data.train), len(data.test or ())) == (100, 400, 100)
    assert (data.name, (data.mean, data.std)) == ("cifar100", KNOWN["cifar100"].statistics)
    placed = images.placed(RunConfig(data=config)).data
    assert (placed.name, placed.augment) == ("arrays", "crop_flip")
