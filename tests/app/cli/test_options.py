"""Settings from the command line and from YAML: every field, both ways, with good messages."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

from largemargin.app.cli import command as cli
from largemargin.app.cli.parser import CommandParser, expand
from largemargin.app.cli.run_options import add_run_options, run_config
from largemargin.app.config import ObjectiveConfig, OptimizerConfig, RunConfig
from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.training.config_file import read_config, write_config


def options_of(*words: str) -> Any:
    parser = CommandParser(prog="largemargin train")
    add_run_options(parser)
    return parser.instantiate(parser.parse_args(list(words)))


def config_of(*words: str) -> RunConfig:
    return run_config(options_of(*words))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["train", *words, "--print_config"]) == 0
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert "Traceback" not in written.err
    return written.err


def test_a_name_without_its_group_is_enough_where_one_setting_has_it() -> None:
    words = ("--lr", "0.1", "--head_lr=0.5", "--mixup", "0.2", "--label_smoothing", "0.1")
    given = config_of(*words, "--freeze", "backbone", "--epochs", "2", "--seed", "3")
    assert given == RunConfig(
        epochs=2,
        seed=3,  # not data.seed: the whole name of another setting
        data=DataConfig(mixup=0.2),
        model=ModelConfig(freeze=("backbone",)),
        objective=ObjectiveConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(lr=0.1, head_lr=0.5),
    )


def test_several_words_are_a_list() -> None:
    words = ("--trackers", "wandb", "tensorboard", "mlflow", "--milestones", "3", "5", "--lr", "1")
    given = config_of(*words)
    assert given.trackers == ("wandb", "tensorboard", "mlflow")
    assert given.optimizer == OptimizerConfig(lr=1.0, milestones=(3, 5))


def test_without_options_everything_has_its_default() -> None:
    assert config_of() == RunConfig()


def test_options_reach_every_part() -> None:
    given = config_of(
        *("--epochs", "3", "--data.classes", "[a,b]", "--optimizer.lr", "1e-3"),
        *("--optimizer.clip_norm", "null", "--optimizer.milestones", "[3,4]"),
        *("--objective.settings.margin", "0.2", "--objective.settings.scale", "auto"),
        *("--compile", "true", "--trackers", "[tensorboard]"),
    )
    assert given == RunConfig(
        epochs=3,
        data=DataConfig(classes=("a", "b")),
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=None, milestones=(3, 4)),
        objective=ObjectiveConfig(settings={"margin": 0.2, "scale": "auto"}),
        compile=True,
        trackers=("tensorboard",),
    )


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for field in fields(RunConfig):
        value = getattr(RunConfig(), field.name)
        inner = fields(value) if hasattr(value, "__dataclass_fields__") else ()
        for name in [f"{field.name}.{each.name}" for each in inner] or [field.name]:
            assert f"--{name} " in text, name
    assert "Examples:\n  largemargin train --data photos/" in text
    assert "``" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_printed_settings_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--objective", "cosface", "--objective.settings.margin", "0.2", "--epochs", "3")
    text = printed(capsys, *words)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert read_config(path) == config_of(*words) == config_of("--config", str(path))
    assert printed(capsys, "--config", str(path)) == text
    # Options after the file override it.
    assert config_of("--config", str(path), "--epochs", "9").epochs == 9


def test_lists_may_be_typed_plainly() -> None:
    words = ("--trackers", "tensorboard", "--data.classes=cat,dog", "--optimizer.milestones", "3,5")
    given = config_of(*words, "--objective.layers", "a.0")
    assert given.trackers == ("tensorboard",)
    assert given.data.classes == ("cat", "dog")
    assert given.optimizer.milestones == (3, 5)
    assert given.objective.layers == ("a.0",)
    assert config_of("--data.classes", "null", "--trackers", "[]") == RunConfig()
    assert config_of("--optimizer.milestones", "[3,5]").optimizer.milestones == (3, 5)


def test_the_file_of_a_run_is_a_config(tmp_path: Path) -> None:
    config = replace(RunConfig(), batch_size=7, data=DataConfig("mnist", path="here"))
    write_config(config, tmp_path / "config.yaml")
    assert config_of("--config", str(tmp_path / "config.yaml")) == config


def test_a_file_may_leave_things_out(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("optimizer: {lr: 1e-2}\nobjective: {name: kobayashi}\n")
    given = config_of("--config", str(tmp_path / "some.yaml"))
    assert given == replace(
        RunConfig(), optimizer=OptimizerConfig(lr=0.01), objective=ObjectiveConfig("kobayashi")
    )


def test_names_without_dot_name(tmp_path: Path) -> None:
    groups = ("data", "model", "objective", "optimizer")
    photos, table = tmp_path / "photos", tmp_path / "table.csv"
    photos.mkdir()
    assert expand(["--data", str(photos)], groups) == [
        "--data.name=folder",
        f"--data.path={photos}",
    ]
    assert expand(["--data", "nowhere/photos"], groups)[0] == "--data.name=folder"  # misspelt
    assert expand(["--data", str(table)], groups)[0] == "--data.name=csv"
    assert expand(["--data=images.npz"], groups)[0] == "--data.name=arrays"
    assert expand(["--data", "labels.CSV"], groups)[0] == "--data.name=csv"
    assert expand(["--data", "images.NPZ"], groups)[0] == "--data.name=arrays"
    assert expand(["--data", "data.YAML"], groups) == ["--data=data.YAML"]
    assert expand(["--model", "torchvision/resnet18"], groups) == [
        "--model.name=torchvision/resnet18"
    ]
    assert expand(["--objective", "a + 0.5*b"], groups) == ["--objective.name=a + 0.5*b"]
    assert expand(["--data", "data.yaml"], groups) == ["--data=data.yaml"]
    assert expand(["--data"], groups) == ["--data"]
    assert expand(["--data.name", "x", "--epochs", "3"], groups) == [
        *("--data.name", "x", "--epochs", "3"),
    ]
    given = config_of("--data", "mnist", "--model=mnist_cnn", "--optimizer", "adamw")
    assert (given.data.name, given.model.name, given.optimizer.name) == (
        *("mnist", "mnist_cnn", "adamw"),
    )


def test_a_name_of_a_data_set_that_is_a_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist" / "raw").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    assert expand(["--data", "mnist"], ["data"]) == ["--data.name=mnist"]
    assert "the data set is taken, not the folder mnist here" in capsys.readouterr().err
    for written in ("./mnist", "mnist/", "folder"):  # the last is no data set
        found = ["--data.name=folder", f"--data.path={written}"]
        assert expand(["--data", written], ["data"]) == found
    assert capsys.readouterr().err == ""
    (tmp_path / "mnist" / "raw" / "x.PNG").write_bytes(b"")
    assert expand(["--data", "mnist"], ["data"]) == ["--data.name=folder", "--data.path=mnist"]
    assert "write --data.name mnist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epocs", "3"], "Did you mean --epochs?"),
        (["--batchsize", "3"], "Did you mean --batch_size or"),
        (["--learning-rate", "3"], "Did you mean --optimizer.lr?"),
        (["--dataset", "photos"], "Did you mean --data?"),
        (["--loss=cosface"], "Did you mean --objective?"),
        (["--freeze_backbone"], "Did you mean --model.freeze?"),
        (["--mixup-alpha", "0.2"], "Did you mean --data.mixup?"),
        (["--lr_find"], "Did you mean --lr_range_test?"),
        (["--wandb"], "Did you mean --trackers?"),
        (["--objective.margin", "0.2"], "Did you mean --objective.settings.margin?"),
        (["photos/", "--epochs", "3"], "Did you mean --data photos/?"),
        (["--learn", "0.1", "--lrs", "0.1"], "unrecognized"),
        (["--schedule", "none"], "Did you mean --objective.schedule or --optimizer.schedule?"),
        (["--data.nmae", "x"], "--data.name"),
        (["--epochs", "many"], "epochs: a whole number is expected, not many."),
        (["--epochs", "2.5"], "epochs: a whole number is expected, not 2.5."),
        (["--optimizer.lr", "fast"], "optimizer.lr: a number is expected, not fast."),
        (["--optimizer.clip_norm", "x"], "optimizer.clip_norm: a number or null is expected"),
        (["--optimizer", "sgdd"], "sgdd was given, but one of 'sgd', 'adamw', 'adam'"),
        (["--optimizer.milestones", "{3: 4}"], "a list is expected, as [1,2], not {3: 4}."),
        (["--data.classes", "{a: b}"], "classes: a list, as [a,b], or null is expected, not {"),
        (["--trackers", "{csv: x}"], "trackers: a list is expected, as [a,b], not {'csv': 'x'}."),
        (["--model.options", "x"], "model.options: settings are expected, as {a: 1}, not x."),
        (["--compile", "perhaps"], "true or false is expected"),
        (["--epochs"], "expected one argument"),
        (["photos"], "unrecognized arguments: photos"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = complaint(capsys, "train", *words)
    assert message in err
    assert err.startswith("usage: largemargin train [options]")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epocs: 3", "Did you mean epochs?"),
        ("optimizer: {lrr: 3}", "Did you mean optimizer.lr"),
        ("optimizer: {name: x}", "one of 'sgd', 'adamw', 'adam' is expected"),
        ("epochs: many", "epochs: a whole number is expected"),
        ("epochs: [3", "line 1"),
        ("- epochs", "must hold settings (name: value), but holds ['epochs']"),
    ],
)
def test_wrong_files(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert message in complaint(capsys, "train", "--config", str(path))


def test_unknown_names_in_a_file_name_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("epocs: 3")
    assert str(path) in complaint(capsys, "train", "--config", str(path))
    path.write_text("epochs: [3")
    assert str(path) in complaint(capsys, "train", f"--config={path}")
