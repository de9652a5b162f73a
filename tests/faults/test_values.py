"""Settings from YAML, JSON and the command line: what is no sensible value is refused by us."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from faults.counting import Faults

from largemargin.app.cli import main
from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import (
    NoiseConfig,
    ObjectiveConfig,
    RunConfig,
    config_file,
    read_config,
    train,
)
from largemargin.app.training.comparison import read_methods
from largemargin.app.training.config_file import MOST_BYTES, load_yaml, read_yaml
from largemargin.app.training.engine import check_config
from largemargin.app.training.files import read_json, write_json
from largemargin.errors import LargeMarginError

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

NINES = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}' if before else 'x'] * 9)}]"
    for before, name in zip(["", *"abcdefg"], "abcdefgh", strict=True)
)
"""A few hundred bytes that stand for 43 million values."""
LONG = "1" * 5000
HUGE: dict[str, str] = {
    "aliases in aliases": NINES,
    "aliases in a setting": "model: {options: {hidden: &a [*a]}}",
    "an alias for itself": "&a {data: *a}",
    "a chain of aliases": "\n".join(
        f"k{i}: &k{i} [{f'*k{i - 1}' if i else 'x'}]" for i in range(200)
    ),
    "brackets": "data: " + "[" * 200_000,
    "closed brackets": "data: " + "[" * 5000 + "]" * 5000,
    "braces": "{a: " * 5000,
    "dashes": "- " * 5000 + "a",
    "a long number": f"seed: {LONG}",
    "a long hexadecimal number": f"seed: 0x{'f' * 5000}",
    "a long number in a setting": f"objective: {{name: cosface, settings: {{margin: {LONG}}}}}",
    "a number that is none": "epochs: !!int x",
    "a truth that is none": "measure: !!bool x",
    "a fraction that is none": "optimizer: {lr: !!float x}",
    "a tag of a set": "data: !!set {a, b}",
    "a tag of bytes": "name: !!binary aGk=",
    "a tag of pairs": "data: !!omap [a: 1]",
    "a date by its tag": "name: !!timestamp 2024-01-01",
    "a tag of Python": "name: !!python/tuple [1]",
    "a key that is a list": "? [a]\n: b",
    "a setting given twice": "epochs: 1\nbatch_size: 8\nepochs: 2",
    "a setting in a group given twice": "data: {name: mnist, size: 8, name: digits}",
    "settings by number": "objective: {name: cosface, settings: {1: 2}}",
    "options by number": "model: {name: mlp, options: {1: 2}}",
    "a null byte": 'data: {name: folder, path: "a\\0b"}',
    "half a character": 'data: {name: folder, path: "a\\ud800b"}',
    "a name of half a character": 'name: "a\\ud800b"',
    "a name in lines": 'name: "a\\nb"',
    "a number beyond 64 bits": "seed: 9223372036854775808",
    "a list as a choice": "precision: [fp32]",
}


def files(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "strange.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("kind", HUGE)
def test_values_that_have_no_end_or_no_sense(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = files(tmp_path, HUGE[kind])
    out = str(tmp_path / "runs")
    faults.attempt("a configuration that is no sensible value", 3)
    with pytest.raises(LargeMarginError) as error:
        train(read_config(path), progress=False)
    assert len(str(error.value)) < 2000
    for words in ([f"--config={path}"], [f"--config={path}", "--print_config"]):
        if "--print_config" in words and "half" in kind + HUGE[kind] + "line":
            continue
        assert main(["train", *words, "--out", out, "--device", "cpu"]) in (0, 2)
        said = capsys.readouterr()
        assert len(said.err) < 6000
        assert "Traceback" not in said.err
    assert not Path(out).exists() or not list(Path(out).iterdir())


@pytest.mark.parametrize("group", ["data", "model", "objective", "optimizer"])
@pytest.mark.parametrize("kind", ["aliases in aliases", "brackets", "a long number"])
def test_groups_from_files_of_their_own(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str], group: str, kind: str
) -> None:
    path = files(tmp_path, HUGE[kind].removeprefix("data: "))
    outer = tmp_path / "outer.yaml"
    outer.write_text(f"{group}: {path}\n")
    faults.attempt("a configuration that is no sensible value", 2)
    for words in ([f"--{group}={path}"], [f"--config={outer}"]):
        assert main(["train", *words, "--out", str(tmp_path / "runs")]) == 2
        assert len(capsys.readouterr().err) < 6000


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", LONG],
        ["--optimizer.lr", "1" * 500],
        ["--epochs", "!!int x"],
        ["--objective.settings.margin", LONG],
        ["--model.options.hidden", "[" * 1000],
        ["--name", "a\udcffb"],
        ["--data", "\ud800"],
        ["--data", "a\0b"],
        ["--config", "a\0b"],
        ["--data.classes", "[&a [*a]]"],
    ],
    ids=lambda words: words[0],
)
def test_words_of_a_command_line(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    faults.attempt("a word that is no sensible value")
    assert main(["train", *words, "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert len(said) < 6000


@pytest.mark.parametrize(
    "content", [b"name: \xff\xfe", b"\xff\xfen\0a\0", b"\x80\x04cos\nsystem\n"]
)
def test_settings_that_are_no_text(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = files(tmp_path, content)
    faults.attempt("a configuration that is no text", 2)
    with pytest.raises(LargeMarginError, match="is not text in UTF-8"):
        read_config(path)
    assert main(["train", "--config", str(path)]) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err
    assert main(["train", "--data", str(path)]) == 2


def test_files_too_large_for_settings(tmp_path: Path, faults: Faults) -> None:
    path = files(tmp_path, b"#" * MOST_BYTES)
    assert read_config(path) == RunConfig()
    path.write_bytes(b"#" * (MOST_BYTES + 1))
    faults.attempt("a configuration that is no sensible value")
    with pytest.raises(LargeMarginError, match=r"is larger than 1,048,576 bytes"):
        read_config(path)


def test_only_so_many_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list counts as one beside those in it, and again wherever an alias stands for it."""
    monkeypatch.setattr(config_file, "MOST_VALUES", 7)
    assert load_yaml("[&a [1, 2], *a]") == [[1, 2], [1, 2]]
    monkeypatch.setattr(config_file, "MOST_VALUES", 6)
    with pytest.raises(yaml.MarkedYAMLError, match="too many values"):
        load_yaml("[&a [1, 2], *a]")


def test_sensible_yaml_is_read() -> None:
    assert load_yaml("name: 2024-01-01")["name"] == "2024-01-01"
    assert load_yaml("a: &x [1, 2]\nb: *x\nc: {<<: {d: 1}}") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": 1},
    }
    deep: Any = load_yaml("[" * 50 + "]" * 50)
    for _ in range(49):
        (deep,) = deep
    assert deep == []
    many = load_yaml(f"[{'x,' * 99_000}]")
    assert len(many) == 99_000
    assert load_yaml("12345678901234567890") == 12345678901234567890


def test_numbers_have_a_length() -> None:
    assert load_yaml(f"seed: {'1' * 20}")["seed"] == int("1" * 20)
    for digits in ("1" * 21, f"0x{'f' * 19}"):
        with pytest.raises(yaml.YAMLError, match=r"a number of 21 digits; quote it"):
            load_yaml(f"name: {digits}")
    assert load_yaml(f"name: '{LONG}'")["name"] == LONG


def test_methods_are_bounded_too(faults: Faults) -> None:
    for text in (f"[{{name: {LONG}}}]", "[&a [*a]]", "[" * 3000):
        faults.attempt("a configuration that is no sensible value")
        with pytest.raises(LargeMarginError):
            read_methods(text)


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"a": {LONG}}}', '{"a": -' + "9" * 21 + "}"])
def test_json_is_bounded_too(tmp_path: Path, faults: Faults, text: str) -> None:
    path = tmp_path / "strange.json"
    path.write_text(text)
    faults.attempt("a JSON file that is no sensible value")
    with pytest.raises(LargeMarginError, match="is damaged"):
        read_json(path)


def test_names_that_are_no_text_are_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"class \udcff": "\ud800"})
    assert read_json(path) == {"class \udcff": "\ud800"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_is_no_text(tmp_path: Path, capsys: Any) -> None:
    from app.data.pictures import class_folders

    root = class_folders(tmp_path / "photos", ("cat", "dog\udcff"), 6, height=8, width=8)
    small = ["--model", "mlp", "--epochs", "1", "--batch_size", "4", "--measure", "false"]
    words = ["--data", str(root), *small, "--device", "cpu", "--out", str(tmp_path / "runs")]
    assert main(["train", *words]) == 0  # of a class it is shown with a mark
    root.rename(tmp_path / "photos\udcff")
    words[1] = str(tmp_path / "photos\udcff")
    assert main(["train", *words]) == 2
    assert "data.path must be text" in capsys.readouterr().err


def test_classes_whose_names_are_no_text(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "a.npz"
    names = np.array(["a", "b\ud800"])
    images = np.arange(128, dtype=np.uint8).reshape(8, 4, 4)
    np.savez(path, images=images, labels=np.arange(8) % 2, classes=names)
    faults.attempt("a name that is no text")
    with pytest.raises(LargeMarginError, match="the name of a class must be text"):
        load_data(DataConfig("arrays", str(path)))


NUMBERS = {
    "patience": (-1, 0),
    "epochs": (0, -1),
    "batch_size": (1, 0),
    "checkpoint_every": (0,),
    "ema": (-0.1, 1.0, 1e308),
    "timeout": (0.0, -1.0, float("inf")),
    "gradients_every": (-1,),
    "geometry_samples": (-1,),
    "max_bad_steps": (-1,),
    "seed": (2**63, -(2**63)),
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in NUMBERS.items() for v in vs])
def test_numbers_of_a_run_outside_their_range(
    tmp_path: Path, faults: Faults, name: str, value: Any
) -> None:
    settings: dict[str, Any] = {"epochs": 1, "device": "cpu", "out": str(tmp_path), name: value}
    faults.attempt("a number outside its range")
    with pytest.raises(LargeMarginError, match=name):
        train(RunConfig(**settings), progress=False)
    assert not list(tmp_path.iterdir())


def test_the_smallest_numbers_of_a_run_are_allowed() -> None:
    least = {"patience": 1, "epochs": 1, "batch_size": 2, "checkpoint_every": 1, "timeout": 1e-3}
    none = {"gradients_every": 0, "geometry_samples": 0, "max_bad_steps": 0}
    check_config(RunConfig(ema=0.0, noise=NoiseConfig(level=0.0), **least, **none))
    check_config(RunConfig(noise=NoiseConfig(level=1.0)))


@pytest.mark.parametrize(
    "changes",
    [
        {"data": DataConfig(path="a\0b", name="folder")},
        {"out": "a\0b"},
        {"model": ModelConfig("mlp", options={"hidden": [2**70]})},
        {"model": ModelConfig("mlp", feature_dim=10**15)},
        {"data": DataConfig(size=10**9), "model": ModelConfig("mlp")},
        {"device": "mps"},
        {"device": "meta"},
        {"objective": ObjectiveConfig("cosface", {"margin": 2**70})},
        {"objective": ObjectiveConfig("cosface", {"margin": None})},
        {"objective": ObjectiveConfig("cosface", {"scale": 1e-300})},
        {"objective": ObjectiveConfig("cosface", {"sync": "maybe"})},
        {"objective": ObjectiveConfig("cosface", {1: 2})},  # type: ignore[dict-item]
    ],
)
def test_values_of_a_run_that_nothing_can_hold(
    tmp_path: Path, faults: Faults, changes: dict[str, Any]
) -> None:
    faults.attempt("a configuration that is no sensible value")
    with pytest.raises(LargeMarginError):
        train(RunConfig(**{"out": str(tmp_path), **changes}), progress=False)


def test_aliases_that_nest_deeper_than_text_may_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 60))]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(LargeMarginError, match="aliases"):
        read_yaml(path)
    path.write_text("\n".join(lines[:20]))
    assert read_yaml(path)["a1"] == [[1]]
