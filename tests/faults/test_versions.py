"""Files carry the version of their format: older ones are read, newer ones say what to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults.counting import Faults
from faults.small_runs import trained

from largemargin import export
from largemargin.app.cli import main
from largemargin.app.training import Run, from_dict, read_config, train
from largemargin.app.training.checkpoints import Checkpoints
from largemargin.app.training.comparison import Comparison
from largemargin.errors import LargeMarginError
from largemargin.measuring import Evaluation, Geometry, Threshold

OLDER = Path(__file__).parent / "older"
NEWER = "newer version"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("run") / "run", epochs=1, measure=True)


@pytest.fixture
def run(original: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(original.folder, tmp_path / "run"))


def changed(path: Path, **changes: Any) -> None:
    """A JSON file with other entries."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_file_of_a_run_carries_a_version(run: Run) -> None:
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["format_version"] == 1
    states = list(run.folder.glob("checkpoints/*/state.json"))
    assert len(states) == 2
    for path in (*states, run.folder / "result.json", run.folder / "data.json"):
        assert json.loads(path.read_text())["format_version"] == 1, path
    for path in run.folder.glob("checkpoints/*/model/config.json"):
        assert json.loads(path.read_text())["format_version"] == 1
    assert json.loads((run.folder / "geometry.json").read_text())["format"] == 1
    for kind in (Geometry, Evaluation, Threshold, Comparison):
        assert kind.format >= 1


def test_newer_files_say_that_they_are_newer(run: Run, faults: Faults) -> None:
    (state,) = run.folder.glob("checkpoints/epoch-*/state.json")
    changed(state, format_version=2, largemargin="9.9")
    with pytest.raises(LargeMarginError, match=r"newer version of largemargin \(9\.9\).*Upgrade"):
        Checkpoints(run.folder).find("last")
    changed(run.folder / "result.json", format_version=2)
    with pytest.raises(LargeMarginError, match=rf"/run/result\.json .*{NEWER}"):
        _ = run.result
    changed(run.folder / "data.json", format_version=2)
    with pytest.raises(LargeMarginError, match=NEWER):
        _ = run.facts
    changed(run.folder / "geometry.json", format=99)
    with pytest.raises(LargeMarginError, match=NEWER):
        run.geometry()
    faults.attempt("a file of a newer version", 4)


@pytest.mark.parametrize(
    "changes", [{"validation": {"loss": 1.0}}, {"test": {"accuracy": "high"}}, {"failure": 3}]
)
def test_a_damaged_result_is_named(run: Run, faults: Faults, changes: dict[str, Any]) -> None:
    changed(run.folder / "result.json", **changes)
    faults.attempt("a damaged result of a run")
    with pytest.raises(LargeMarginError, match=r"/run/result\.json is damaged"):
        _ = run.result


def test_a_newer_model_says_so(run: Run, faults: Faults) -> None:
    (config,) = run.folder.glob("checkpoints/epoch-*/model/config.json")
    changed(config, format_version=2, largemargin="9.9")
    faults.attempt("a file of a newer version")
    with pytest.raises(LargeMarginError, match=r"written by largemargin 9\.9.*Upgrade"):
        export.read_config(config.parent)


def test_a_newer_configuration_says_so_before_it_names_settings(
    run: Run, tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.folder / "config.yaml"
    values = {**yaml.safe_load(path.read_text()), "format_version": 2, "new_setting": 1}
    path.write_text(yaml.safe_dump(values))
    faults.attempt("a file of a newer version", 3)
    for read in (lambda: run.config, lambda: read_config(path)):
        with pytest.raises(LargeMarginError, match=NEWER):
            read()
    assert main(["train", "--config", str(path)]) == 2
    assert NEWER in capsys.readouterr().err


@pytest.mark.parametrize("version", [-1, "1", None, 1.5, True, [1]])
def test_versions_that_are_none(version: Any, faults: Faults) -> None:
    faults.attempt("a version that is no number")
    with pytest.raises(LargeMarginError, match="is damaged: its format_version"):
        from_dict({"format_version": version})


def test_configurations_of_a_run_go_back_into_the_command(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--config", str(run.folder / "config.yaml"), "--print_config"]
    assert main(words) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert from_dict(printed) == run.config


def test_a_run_of_the_first_format_is_continued(tmp_path: Path, faults: Faults) -> None:
    """It was written before files had versions, and stopped after two of three epochs."""
    folder = shutil.copytree(OLDER / "run-format-0", tmp_path / "run")
    old = Run.open(folder)
    assert old.model("best") is not None
    before = old.metrics("epoch")
    resumed = train(old.config, folder=folder, resume=True, progress=False)
    faults.attempt("a run of an older version")
    assert resumed.metrics("epoch")[:2] == before
    assert resumed.result["epochs"] == 3
    # What it came to when it was not interrupted.
    assert resumed.result["test"]["loss"] == pytest.approx(2.285150505116232, rel=1e-3)
    assert json.loads((folder / "checkpoints/epoch-0003/state.json").read_text())["format_version"]


def test_damaged_pointers(run: Run, faults: Faults) -> None:
    pointer = run.folder / "checkpoints" / "last.json"
    for content in ("{}", "[]", '{"checkpoint": "../../x"}', '{"checkpoint": 3}', "", "{"):
        pointer.write_text(content)
        faults.attempt("a damaged pointer to a checkpoint")
        with pytest.raises(LargeMarginError, match="damaged"):
            Checkpoints(run.folder).find("last")
    pointer.write_text('{"checkpoint": "epoch-9999"}')
    with pytest.raises(LargeMarginError, match="No such file"):
        Checkpoints(run.folder).find("last")
