"""Runs whose folder was edited, damaged or mixed with another are not continued in silence."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app.data.pictures import class_folders, picture
from faults.counting import Faults
from faults.planted import forged
from faults.small_runs import digits, trained

from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import ObjectiveConfig, Run, RunConfig, train
from largemargin.app.training.checkpoints import Checkpoints
from largemargin.errors import LargeMarginError


def unfinished(folder: Path) -> Run:
    """As if it had been killed just before its result was written."""
    (folder / "result.json").unlink()
    return Run(folder)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs, of which the second is not the best."""
    folder = tmp_path_factory.mktemp("run") / "run"
    trained(folder, epochs=3)
    return unfinished(folder).folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Run:
    return Run(shutil.copytree(original, tmp_path / "run"))


def last(run: Run) -> Path:
    (found,) = run.folder.glob("checkpoints/epoch-*")
    return found


def resumed(run: Run) -> Run:
    return train(run.config, folder=run.folder, resume=True, data=digits(), progress=False)


def files_of(folder: Path) -> dict[str, bytes]:
    """What lies below a folder, but for the lock and what was set aside."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


EDITS: dict[str, dict[str, Any]] = {
    "an earlier epoch": {"epoch": 1},
    "a negative epoch": {"epoch": -3},
    "an epoch that is text": {"epoch": "3"},
    "an epoch that is true": {"epoch": True},
    "no epoch": {"epoch": None},
    "negative patience": {"waited": -1},
    "steps that are a list": {"steps": []},
    "negative steps": {"steps": -1},
    "time that is text": {"seconds": "long"},
    "a best that is a number": {"best": 3},
    "a best without its score": {"best": {"epoch": 1}},
    "a best with text": {"best": {"score": "high", "epoch": 1}},
    "a best that lies elsewhere": {"best_checkpoint": "../../good"},
    "a best by its whole path": {"best_checkpoint": "/tmp/good"},
    "a best that is no best": {"best_checkpoint": "epoch-0003"},
    "a best that is not there": {"best_checkpoint": "best-0999"},
    "a best that is a number of one": {"best_checkpoint": 7},
    "a pause that is text": {"paused": "yes"},
    "a pause without sums": {"paused": {"steps": 3}},
    "a scaler that is text": {"scaler": "x"},
    "no files": {"files": {}},
    "files that are a list": {"files": ["rest.safetensors"]},
    "a file outside": {"files": {"../../../result.json": "0"}},
    "a file by its whole path": {"files": {"/etc/passwd": "0"}},
    "an entry that means nothing": {"surprise": 1},
    "the mark of another run": {"run": "0" * 64},
}


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("forger", [False, True], ids=["edited", "with its checksum"])
def test_an_edited_state_is_refused_before_anything_changes(
    run: Run, faults: Faults, kind: str, forger: bool
) -> None:
    good = run.folder.parent / "good"
    shutil.copytree(last(run), good)
    pointer = run.folder / "checkpoints" / "last.json"
    written = pointer.read_text()
    forged(last(run), **EDITS[kind])
    if not forger:
        pointer.write_text(written)
    (run.folder / "evaluation.json").write_text("{}")
    before = files_of(run.folder.parent)
    faults.attempt("an edited state of a checkpoint")
    with pytest.raises(LargeMarginError, match=r"checkpoint|cannot read") as error:
        resumed(run)
    if not forger:
        assert "state.json is not what was written" in str(error.value)
    assert files_of(run.folder.parent) == before


def test_a_state_of_an_older_release_has_no_checksum(run: Run, faults: Faults) -> None:
    for pointer in run.folder.glob("checkpoints/*.json"):
        read = json.loads(pointer.read_text())
        assert len(read.pop("state")) == 64
        pointer.write_text(json.dumps(read))
    assert Checkpoints(run.folder).find("last") == last(run)
    assert resumed(run).finished
    faults.attempt("a run of an older version")


@pytest.mark.parametrize("bit", [0, 3, 6])
def test_every_flipped_bit_of_a_state_is_found(run: Run, faults: Faults, bit: int) -> None:
    path = last(run) / "state.json"
    written = path.read_bytes()
    for place in range(0, len(written), 29):
        path.write_bytes(
            written[:place] + bytes([written[place] ^ 1 << bit]) + written[place + 1 :]
        )
        faults.attempt("a flipped bit in the state of a checkpoint")
        with pytest.raises(LargeMarginError):
            Checkpoints(run.folder).find("last")
    path.write_bytes(written)
    assert Checkpoints(run.folder).find("last") is not None


def test_a_best_checkpoint_is_checked_before_the_others_go(run: Run, faults: Faults) -> None:
    (best,) = run.folder.glob("checkpoints/best-*")
    state = json.loads((best / "state.json").read_text())
    (best / "state.json").write_text(json.dumps({**state, "best": None}))
    older = run.folder / "checkpoints" / "epoch-0001"
    older.mkdir()
    (older / "state.json").write_text("it would be deleted")
    before = files_of(run.folder)
    faults.attempt("an edited state of a checkpoint")
    with pytest.raises(LargeMarginError, match=r"best-000. is damaged: state\.json is not"):
        resumed(run)
    assert files_of(run.folder) == before


def test_a_damaged_sum_of_the_best_checkpoint_does_not_end_a_resumed_run(
    run: Run, faults: Faults
) -> None:
    """The last checkpoint says which is the best one, and has its sum, too."""
    pointer = run.folder / "checkpoints" / "best.json"
    whole = pointer.read_text()
    pointer.write_text(whole.replace(json.loads(whole)["state"], "0" * 64))
    faults.attempt("a damaged pointer to a checkpoint")
    assert resumed(run).finished
    assert pointer.read_text() == whole


@pytest.mark.parametrize(
    "change",
    [{"size": [0, 8]}, {"size": [8]}, {"channels": 0, "mean": [], "std": []}, {"classes": []}],
    ids=str,
)
def test_data_without_pixels_or_classes_are_none(
    run: Run, faults: Faults, change: dict[str, Any]
) -> None:
    path = run.folder / "data.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    faults.attempt("edited facts about the data of a run")
    with pytest.raises(LargeMarginError, match=r"data\.json is damaged: its sizes, counts or"):
        _ = run.facts


def test_a_lost_pointer_does_not_begin_the_run_again(run: Run, faults: Faults) -> None:
    (run.folder / "checkpoints" / "last.json").unlink()
    before = files_of(run.folder)
    faults.attempt("a lost pointer to a checkpoint")
    with pytest.raises(LargeMarginError, match=r"there is best\.json, but no last\.json"):
        resumed(run)
    assert files_of(run.folder) == before


def test_rows_after_a_damaged_one_are_not_dropped(run: Run, faults: Faults) -> None:
    path = run.folder / "metrics.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    before = first + '{"kind": "epoch", "step": "many"}\n' + "".join(others)
    path.write_text(before)
    faults.attempt("a damaged row of metrics")
    with pytest.raises(LargeMarginError, match=r"metrics\.jsonl is damaged: line 2 is no row"):
        resumed(run)
    assert path.read_text() == before


OTHERS = (
    *("epoch-0002-my-backup", "best-of-all", "epoch-1", "epochs-0001", "step-00000007.old"),
    *(".draft-of-a-letter", "my-epoch-0001"),
)


def test_only_own_folders_are_deleted(run: Run, faults: Faults) -> None:
    folder = run.folder / "checkpoints"
    for name in OTHERS:
        (folder / name).mkdir()
        (folder / name / "mine.txt").write_text("keep")
        (run.folder / f".draft-{name}").write_text("keep")
    for name in ("epoch-0001", "step-00000007", ".draft-0123abcd-epoch-0009"):
        (folder / name).mkdir()
        (folder / name / "old.txt").write_text("of a run that was killed")
    faults.attempt("a folder of somebody else among the checkpoints", len(OTHERS))
    resumed(run)
    left = {path.name for path in folder.iterdir() if path.is_dir()}
    assert {name for name in left if (folder / name / "mine.txt").is_file()} == set(OTHERS)
    assert len(left - set(OTHERS)) == 2
    assert all((run.folder / f".draft-{name}").is_file() for name in OTHERS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 1}, "seed is 1 there and 0 here"),
        ({"objective": ObjectiveConfig("discriminative + zero_centroid")}, "objective.name is"),
        ({"data": DataConfig(fraction=0.25)}, "fraction is 0.25 there"),
    ],
    ids=["seed", "loss", "data"],
)
def test_checkpoints_of_another_run_are_refused(
    run: Run, tmp_path: Path, faults: Faults, changes: dict[str, Any], told: str
) -> None:
    other = trained(tmp_path / "other", epochs=3, **changes).folder
    shutil.rmtree(run.folder / "checkpoints")
    shutil.copytree(other / "checkpoints", run.folder / "checkpoints")
    before = files_of(run.folder)
    faults.attempt("the checkpoints of another run")
    with pytest.raises(LargeMarginError, match="is that of another run") as error:
        resumed(run)
    assert told in str(error.value)
    assert files_of(run.folder) == before
    for which in ("last", "best"):
        with pytest.raises(LargeMarginError, match="is that of another run"):
            run.model(which)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"objective": ObjectiveConfig("arcface")}, "here"),
        ({"data": DataConfig(test=0.1)}, "data.test is None there and 0.1 here"),
    ],
    ids=["seed", "loss", "a later setting"],
)
def test_a_run_is_not_resumed_with_other_settings_than_its_own(
    run: Run, faults: Faults, changes: dict[str, Any], told: str
) -> None:
    before = files_of(run.folder)
    faults.attempt("other settings than those of the run")
    with pytest.raises(LargeMarginError, match="is a run of other settings") as error:
        train(replace(run.config, **changes), folder=run.folder, resume=True, data=digits())
    assert told in str(error.value)
    assert files_of(run.folder) == before
    elsewhere = replace(run.config, name="moved", device="cpu", out="elsewhere")
    assert train(elsewhere, folder=run.folder, resume=True, data=digits(), progress=False).finished


def test_settings_of_a_run_may_be_edited_to_go_on(run: Run) -> None:
    """Such as a lower learning rate after one that was too high: it stays the same run."""
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.05", "lr: 0.01"))
    assert run.config.optimizer.lr == 0.01
    assert resumed(run).finished


def test_averages_that_were_not_kept_are_missed(tmp_path: Path, faults: Faults) -> None:
    trained(tmp_path / "run", epochs=1, ema=None)
    run = unfinished(tmp_path / "run")
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("ema: null", "ema: 0.9"))
    before = files_of(run.folder)
    faults.attempt("a run whose settings no longer fit its checkpoint")
    with pytest.raises(LargeMarginError, match="holds no averaged weights"):
        resumed(run)
    assert files_of(run.folder) == before


def photos(root: Path) -> Path:
    return class_folders(root, ("cat", "dog"), 20, height=8, width=8)


def arrays(path: Path, seed: int = 0) -> Path:
    drawn = np.random.default_rng(seed).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.savez(path, images=drawn, labels=np.arange(40) % 2)
    return path


def begun(folder: Path, data: DataConfig) -> Run:
    small = {"model": ModelConfig("mlp", options={"hidden": (4,)}), "measure": False}
    config = RunConfig(data=data, epochs=1, batch_size=8, device="cpu", **small)
    train(config, folder=folder, progress=False)
    return unfinished(folder)


def repainted(root: Path) -> None:
    for number in (3, 9):
        picture(root / "cat" / f"{number:03d}.png", 5000 + number, 8, 8)


def swapped(root: Path) -> None:
    (root / "cat").rename(root / "old")
    (root / "dog").rename(root / "cat")
    (root / "old").rename(root / "dog")


@pytest.mark.parametrize("change", [repainted, swapped])
@pytest.mark.parametrize("resident", ["yes", "no"])
def test_images_changed_in_place_are_refused(
    tmp_path: Path, faults: Faults, change: Any, resident: Any
) -> None:
    root = photos(tmp_path / "photos")
    run = begun(tmp_path / "run", DataConfig("folder", str(root), size=8, resident=resident))
    assert run.data() is not None
    change(root)
    before = files_of(run.folder)
    faults.attempt("images that were changed in place")
    for attempt in (run.data, lambda: train(run.config, folder=run.folder, resume=True)):
        with pytest.raises(LargeMarginError, match="train has images of the same names with other"):
            attempt()
    assert files_of(run.folder) == before


def test_arrays_changed_in_place_are_refused(tmp_path: Path, faults: Faults) -> None:
    path = arrays(tmp_path / "a.npz")
    run = begun(tmp_path / "run", DataConfig("arrays", str(path)))
    arrays(path, seed=1)
    faults.attempt("images that were changed in place")
    with pytest.raises(LargeMarginError, match="train has images of the same names with other"):
        run.data()


def test_copied_images_are_the_same(tmp_path: Path) -> None:
    """Neither their place, nor their times, nor where they are kept is part of the digest."""
    root = photos(tmp_path / "photos")
    moved = Path(shutil.copytree(root, tmp_path / "moved"))
    found = {
        load_data(DataConfig("folder", str(place), size=8, resident=resident)).record["contents"][
            "train"
        ]
        for place in (root, moved)
        for resident in ("yes", "no")
    }
    assert len(found) == 1


def test_of_very_large_data_lengths_and_a_part_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from largemargin.app.data import load

    root = photos(tmp_path / "photos")
    samples = load_data(DataConfig("folder", str(root), size=8, validation=0, resident="no")).train
    whole = load.contents_of(samples)
    monkeypatch.setattr(load, "IN_MEMORY", 100)
    monkeypatch.setattr(load, "MOST_FILES", 4)
    part = load.contents_of(samples)
    assert part != whole
    written = (root / "dog" / "000.png").read_bytes()
    (root / "dog" / "000.png").write_bytes(written[:-1] + b"x")  # the twentieth: one of four
    assert load.contents_of(samples) != part
    (root / "dog" / "000.png").write_bytes(written)
    assert load.contents_of(samples) == part
    path = root / "dog" / "001.png"
    path.write_bytes(path.read_bytes() + b"x")  # not one of them, but longer than it was
    assert load.contents_of(samples) != part
    whole = load.contents_of(samples)
    monkeypatch.setattr(load, "MOST_COMPARED", 39)
    few = load.contents_of(samples)
    assert few != whole
    path.write_bytes(path.read_bytes() + b"x")
    assert load.contents_of(samples) == few
    monkeypatch.setattr(load, "MOST_COMPARED", 40)
    assert load.contents_of(samples) not in (whole, few)
