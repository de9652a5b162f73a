"""Configurations are values: nothing in them is imported, built or run, unless the user says so."""

from pathlib import Path
from typing import Any

import pytest
from faults.counting import Faults

from largemargin.app.cli import main
from largemargin.app.models import ModelConfig, build_model, trust
from largemargin.app.training import RunConfig, from_dict, read_config, train
from largemargin.app.training.comparison import read_methods
from largemargin.app.training.runs import Run
from largemargin.errors import LargeMarginError

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

RUN = "{{class_path: os.system, init_args: {{command: 'touch {mark}'}}}}"
IMPORT = "{{class_path: planted_module.Thing}}"
TAG = "!!python/object/apply:os.system ['touch {mark}']"
PLACES = {
    "an option of the model": "model: {{name: mlp, options: {{hidden: {run}}}}}",
    "deep in an option": "model: {{name: mlp, options: {{hidden: {{a: [1, {run}]}}}}}}",
    "a setting of the loss": "objective: {{name: cosface, settings: {{margin: {run}}}}}",
    "a group": "data: {run}",
    "a number": "epochs: {run}",
    "a text": "name: {run}",
    "a list": "trackers: [{run}]",
    "everything": "{run}",
    "a tag of YAML": "name: {tag}",
    "a tag in an option": "model: {{options: {{hidden: {tag}}}}}",
    "a module": "model: {{name: mlp, options: {{hidden: {imported}}}}}",
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file that would be made; modules of this folder can be imported."""
    path = tmp_path / "ran"
    (tmp_path / "planted_module.py").write_text(
        f"import torch\nopen({str(path)!r}, 'w')\nclass Thing(torch.nn.Flatten): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield path
    trust(False)
    assert not path.exists()


def text_of(place: str, mark: Path) -> str:
    run, imported, tag = (each.format(mark=mark) for each in (RUN, IMPORT, TAG))
    return PLACES[place].format(run=run, imported=imported, tag=tag)


@pytest.mark.parametrize("place", PLACES)
def test_settings_that_name_a_class_are_refused(
    tmp_path: Path, mark: Path, faults: Faults, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(text_of(place, mark))
    faults.attempt("a configuration that would run code", 2)
    words = ["train", "--config", str(path), "--epochs", "1", "--device", "cpu"]
    for more in ([], ["--trust_config"]):
        assert main([*words, *more]) == 2
        said = capsys.readouterr().err
        assert "error: " in said
        assert "Traceback" not in said
    with pytest.raises(LargeMarginError):
        read_config(path)


def test_the_refusal_says_why(
    tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(text_of("an option of the model", mark))
    main(["train", "--config", str(path)])
    said = capsys.readouterr().err
    assert "class_path os.system is refused: settings are values" in said
    with pytest.raises(LargeMarginError, match=r"model\.options\.hidden holds class_path"):
        read_config(path)
    words = "--model.options.hidden.class_path=os.system --model.options.hidden.init_args.command=x"
    assert main(["train", *words.split()]) == 2


def test_other_commands_refuse_them_too(
    tmp_path: Path, mark: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(text_of("an option of the model", mark))
    for words in (["compare", "--methods", "cosface"], ["tune", "--trials", "1"]):
        faults.attempt("a configuration that would run code")
        assert main([*words, "--config", str(path)]) == 2
        assert "class_path os.system is refused" in capsys.readouterr().err
    with pytest.raises((LargeMarginError, TypeError)):
        read_methods(f"[{{objective: {text_of('a tag of YAML', mark)}}}]")


def test_a_run_of_a_stranger_runs_nothing(tmp_path: Path, mark: Path, faults: Faults) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for place in PLACES:
        (folder / "config.yaml").write_text(text_of(place, mark))
        faults.attempt("a run whose configuration would run code")
        with pytest.raises(LargeMarginError):
            _ = Run.open(folder).config


def test_a_network_by_its_path_needs_trust(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "own_network.py").write_text(
        "import torch\n\n\ndef flat(channels):\n    assert channels == 1\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5))\n"
        "\n\ndef text():\n    return 'a text'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["train", "--model", "own_network.flat", "--epochs", "1", "--batch_size", "512"]
    words += ["--out", str(tmp_path / "runs"), "--device", "cpu", "--measure", "false"]
    faults.attempt("a network by its Python path", 2)
    assert main(words) == 2
    assert "importing it runs its code. Pass --trust_config" in capsys.readouterr().err
    assert main([*words, "--trust_config"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    trust(False)
    with pytest.raises(LargeMarginError, match="--trust_config"):
        Run.open(run).model()
    trust()
    try:
        assert Run.open(run).model().head.in_features == 5
        with pytest.raises(LargeMarginError, match="cannot be built: No module named 'nowhere'"):
            build_model(ModelConfig("nowhere.net"), 3)
        with pytest.raises(LargeMarginError, match=r"gives a str, not an nn\.Module"):
            build_model(ModelConfig("own_network.text"), 3)
    finally:
        trust(False)


@pytest.mark.parametrize("name", ["../../out", "a/b", "..", "", "a\0b", "/tmp/x", "a\\b"])
def test_names_of_runs_are_no_paths(tmp_path: Path, faults: Faults, name: str) -> None:
    faults.attempt("a name of a run that is a path")
    with pytest.raises(LargeMarginError, match="name must be a name, not a path"):
        train(from_dict({"name": name, "out": str(tmp_path / "runs")}), progress=False)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("cosface", "config must be a RunConfig, but 'cosface' was given"),
        (
            RunConfig(objective="cosface"),  # type: ignore[arg-type]
            r"Pass objective=ObjectiveConfig\('cosface'\), of largemargin\.app\.config\.",
        ),
        (
            RunConfig(data="photos/"),  # type: ignore[arg-type]
            r"Pass data=DataConfig\(\.\.\.\), of largemargin\.app\.config\.",
        ),
        (
            RunConfig(optimizer=None),  # type: ignore[arg-type]
            r"Pass optimizer=OptimizerConfig\(\.\.\.\), of largemargin\.app\.config\.",
        ),
    ],
)
def test_a_name_is_no_group_of_settings(faults: Faults, config: Any, told: str) -> None:
    faults.attempt("a name in place of settings")
    with pytest.raises(LargeMarginError, match=told):
        train(config, progress=False)
