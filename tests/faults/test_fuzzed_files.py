"""Thousands of damaged files: each is read or refused by us, in bounded time and memory.

Nothing outside the folder of a case is written, and no program is started. What a case did is a
function of its name, so that ``survives(KINDS[kind], folder, "kind 17")`` does it again.
"""

import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from app.data.pictures import class_folders
from faults.counting import Faults
from faults.small_runs import digits, trained

pytest.importorskip("resource", reason="alarms and limits are those of Unix")

from faults.fuzzing import MOST_MEMORY, Case, damaged, edited, memory, survives, watched

import largemargin as lm
from largemargin.app.cli import main
from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.report.page import report
from largemargin.app.training import ObjectiveConfig, Run, RunConfig, read_config, train
from largemargin.app.training.checkpoints import Checkpoints
from largemargin.app.training.config_file import write_config
from largemargin.app.training.engine import check_config
from largemargin.app.training.files import checksum
from largemargin.errors import LargeMarginError
from largemargin.measuring import EvaluationConfig, evaluate

Read = Callable[[], object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all the files that one can have."""
    folder = tmp_path_factory.mktemp("run") / "run"
    model = ModelConfig("mlp", options={"hidden": (16,)})
    done = trained(folder, model=model, epochs=2, measure=True, geometry_samples=20)
    test = digits().test
    assert test is not None
    small = EvaluationConfig(
        perturbations="none", gaussian=(0.1,), draws=1, attacks=("fgsm",), attack_samples=10
    )
    evaluate(done.model(), test.subset(range(60)), config=small).save(folder / "evaluation.json")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), ("a", "b"), 4, height=8, width=8)


def spoil(path: Path, chance: random.Random) -> None:
    change = edited if path.suffix == ".json" and chance.random() < 0.6 else damaged
    path.write_bytes(change(path.read_bytes(), chance))


def settings(folder: Path, chance: random.Random) -> Path:
    objective = ObjectiveConfig("cosface + 0.5*center", {"cosface": {"margin": 0.2}})
    model = ModelConfig("mlp", options={"hidden": [4, 4]})
    config = RunConfig(objective=objective, model=model, trackers=("tensorboard",))
    write_config(config, folder / "run.yaml")
    spoil(folder / "run.yaml", chance)
    return folder / "run.yaml"


def a_config(folder: Path, chance: random.Random) -> Read:
    path = settings(folder, chance)
    return lambda: check_config(read_config(path))


def a_command(folder: Path, chance: random.Random) -> Read:
    """The command parses settings by a library, which has ways of its own."""
    words = ["train", "--config", str(settings(folder, chance)), "--print_config"]

    def read() -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            status = main(words)
        if status:
            assert status == 2
            raise LargeMarginError(said.getvalue())

    return read


def a_run(original: Path, folder: Path, chance: random.Random) -> Read:
    copied = Path(shutil.copytree(original, folder / "run"))
    names = ("config.yaml", "data.json", "metrics.jsonl", "result.json", "geometry.json")
    name = chance.choice(names)
    spoil(copied / name, chance)

    def read() -> None:
        run = Run.open(copied)
        _ = run.config, run.result, run.failure, run.metrics(), run.facts, run.classes
        run.geometry()
        if name != "config.yaml":  # which may ask for a network of any size
            run.model(chance.choice(("best", "last")))

    return read


def a_checkpoint(original: Path, folder: Path, chance: random.Random) -> Read:
    """Damaged, or edited by somebody who writes the checksums as well; then the run goes on."""
    copied = Path(shutil.copytree(original, folder / "run"))
    (copied / "result.json").unlink()
    place = copied / "checkpoints"
    files = sorted(path for path in place.rglob("*") if path.is_file())
    path = chance.choice([*files, copied / "metrics.jsonl", copied / "data.json"])
    spoil(path, chance)
    if chance.random() < 0.7:
        rewrite_checksums(place, path)
    config = Run(original).config
    return lambda: train(config, folder=copied, resume=True, data=digits(), progress=False)


def rewrite_checksums(place: Path, changed: Path) -> None:
    for state in place.glob("*/state.json"):
        name = (
            changed.relative_to(state.parent).as_posix() if state.parent in changed.parents else ""
        )
        try:
            read = json.loads(state.read_bytes())
            if name in read["files"]:
                read["files"][name] = checksum(changed)
                state.write_text(json.dumps(read))
            pointer = place / ("best.json" if state.parent.name.startswith("best") else "last.json")
            known = json.loads(pointer.read_bytes())
            pointer.write_text(json.dumps({**known, "state": checksum(state)}))
        except (ValueError, LookupError, TypeError, RecursionError):
            return


def a_report(original: Path, folder: Path, chance: random.Random) -> Read:
    copied = Path(shutil.copytree(original, folder / "run"))
    names = ("geometry.json", "evaluation.json", "result.json", "data.json", "environment.json")
    spoil(copied / chance.choice((*names, "metrics.jsonl", "config.yaml")), chance)
    source = copied / "geometry.json" if chance.random() < 0.1 else copied
    return lambda: report(source, folder / "report.html", features="none")


def a_csv(images: Path, folder: Path, chance: random.Random) -> Read:
    shutil.copytree(images, folder / "images")
    rows = [f"images/{name}/00{i}.png,{name},train" for name in "ab" for i in range(4)]
    (folder / "list.csv").write_text("\n".join(["image,label,split", *rows, ""]))
    spoil(folder / "list.csv", chance)
    config = DataConfig("csv", str(folder / "list.csv"), size=8, validation=0)
    return lambda: load_data(config)


def an_npz(folder: Path, chance: random.Random) -> Read:
    """Either its bytes are damaged, or the arrays are of a strange kind."""
    drawn = np.random.default_rng(chance.randrange(2**32))
    kinds = ("u1", "i8", "f4", "f2", "f8", "c8", "?", "U3", "M8[s]", "S2", "u8")
    images = drawn.integers(0, 2, (12, 4, 4)).astype(chance.choice((*kinds, "u1", "u1", "u1")))
    labels = (np.arange(12) % 3).astype(chance.choice((*kinds, "i8", "i8", "i8")))
    shapes = ((12, 4, 4), (12, 4, 4, 1), (12, 16), (0, 4, 4), (6, 8, 4), (192,), (12, 1, 4, 4))
    arrays = {"images": images.reshape(-1)[: 12 * 16], "labels": labels}
    shape = chance.choice((*shapes, (12, 4, 4), (12, 4, 4)))
    arrays["images"] = np.resize(arrays["images"], shape)
    if chance.random() < 0.2:
        arrays["classes"] = np.array(chance.choice((["a", "b", "c"], ["a"], "x", [1, 2, 3])))
    content = io.BytesIO()
    (np.savez_compressed if chance.random() < 0.5 else np.savez)(content, **arrays)
    raw = content.getvalue()
    (folder / "a.npz").write_bytes(damaged(raw, chance) if chance.random() < 0.7 else raw)
    return lambda: load_data(DataConfig("arrays", str(folder / "a.npz"), validation=0.25))


def fresh() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def exported(folder: Path) -> Path:
    """A trained model with a bank, a schedule and a history."""
    model = fresh()
    objective = lm.CosFace(scale=8.0, margin=0.2) + 0.1 * lm.Discriminative(3, 6)
    ramp = lm.schedules.Ramp("cosface.margin", 0.1, steps=4)
    criterion = lm.attach(model, objective, schedule=ramp)
    for _ in range(2):
        criterion(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
    names = ("a", "b", "c")
    return lm.export.save(folder, model, criterion, config={"width": 6}, class_names=names)


def an_export(original: Path, folder: Path, chance: random.Random) -> Read:
    """Loaded into a model that must be as it was where the folder is refused."""
    copied = Path(shutil.copytree(original, folder / "saved"))
    spoil(chance.choice(sorted(path for path in copied.iterdir() if path.is_file())), chance)
    model = fresh()
    kinds = [*map(type, model)]
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def read() -> None:
        try:
            lm.export.load(copied, model, criterion=chance.choice(("saved", "none")))
        except LargeMarginError:
            after = model.state_dict()
            assert [*map(type, model)] == kinds
            assert after.keys() == before.keys()
            assert all(torch.equal(value, before[name]) for name, value in after.items())
            assert not any(module._forward_hooks for module in model.modules())
            raise

    return read


# A further kind of file is a further line here.
KINDS = ("config", "command", "run", "checkpoint", "report", "csv", "npz", "export")
FEW = dict(zip(KINDS, (60, 10, 50, 40, 20, 40, 30, 50), strict=True))
MANY = dict(zip(KINDS, (2200, 300, 1800, 1200, 700, 1500, 1300, 1000), strict=True))
PARTS = 4
"""Into which the many are divided, so that processes can share them."""


def case_of(kind: str, run: Path, photos: Path, saved: Path) -> Case:
    cases: dict[str, Case] = {
        "config": a_config,
        "command": a_command,
        "run": lambda folder, chance: a_run(run, folder, chance),
        "checkpoint": lambda folder, chance: a_checkpoint(run, folder, chance),
        "report": lambda folder, chance: a_report(run, folder, chance),
        "csv": lambda folder, chance: a_csv(photos, folder, chance),
        "npz": an_npz,
        "export": lambda folder, chance: an_export(saved, folder, chance),
    }
    return cases[kind]


def attempt(kind: str, numbers: range, run: Path, photos: Path, folder: Path) -> Counter[str]:
    saved = folder / "saved"
    if kind == "export":
        exported(saved)
    case, ended = case_of(kind, run, photos, saved), Counter[str]()
    survives(case, folder / "first", f"{kind} first")  # imports, and what is loaded once
    before = memory()
    for number in numbers:
        ended[survives(case, folder / str(number), f"{kind} {number}")] += 1
        shutil.rmtree(folder / str(number))
    assert memory() - before < MOST_MEMORY
    return ended


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(
    tmp_path: Path, run: Path, photos: Path, faults: Faults, kind: str
) -> None:
    ended = attempt(kind, range(FEW[kind]), run, photos, tmp_path)
    faults.attempt(f"a damaged file: {kind}", ended.total())
    assert ended["refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_damaged_files_are_read_or_refused(
    tmp_path: Path, run: Path, photos: Path, faults: Faults, kind: str, part: int
) -> None:
    numbers = range(FEW[kind] + part, FEW[kind] + MANY[kind], PARTS)
    ended = attempt(kind, numbers, run, photos, tmp_path)
    faults.attempt(f"a damaged file: {kind}", ended.total())
    assert ended["read"] > 0


def test_the_originals_are_read(tmp_path: Path, run: Path, photos: Path) -> None:
    """What is damaged is sound before: otherwise refusing it would show nothing."""
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    assert Checkpoints(copied).find("last") is not None
    assert report(copied, tmp_path / "report.html", features="none").is_file()
    (copied / "result.json").unlink()
    assert train(Run(run).config, folder=copied, resume=True, data=digits(), progress=False)


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with watched(tmp_path / "in") as outside:
        (tmp_path / "in" / "a").write_text("x")
        (tmp_path / "in" / "a").unlink()
        assert not outside
        (tmp_path / "b").write_text("x")
        (tmp_path / "b").rename(tmp_path / "c")
        (tmp_path / "c").unlink()
    assert len(outside) >= 3
