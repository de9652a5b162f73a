"""The command itself: overview, exit codes, errors without tracebacks, Ctrl-C."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

from app.cli.command import environment

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.app.cli import command as cli


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A sub-command ``list`` that does what a test tells it to."""
    made = SimpleNamespace(HELP="test", arguments=lambda parser: None, run=lambda options: 0)
    load = cli.importlib.import_module
    monkeypatch.setattr(
        cli.importlib,
        "import_module",
        lambda name, *rest: made if name.startswith("largemargin.app.cli") else load(name, *rest),
    )
    monkeypatch.delenv("LARGEMARGIN_TRACEBACK", raising=False)
    return made


def raising(error: BaseException) -> Any:
    def run(options: Any) -> int:
        raise error

    return run


def test_help_names_every_command_and_imports_none(tmp_path: Path) -> None:
    program = (
        "import sys; from largemargin.app.cli import main; status = main(['--help']); "
        "print([name for name in sys.modules if name.startswith('largemargin.app.cli.')"
        " or name.startswith(('jsonargparse', 'optuna', 'accelerate'))], file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "['largemargin.app.cli.command']"
    assert done.stdout.startswith("usage: largemargin COMMAND")
    for name in cli.COMMANDS:
        assert f"\n  {name}" in done.stdout
    assert "largemargin demo" in done.stdout
    assert list(tmp_path.iterdir()) == []


LIGHT = {
    "advise",
    "train",
    "compare",
    "tune",
    "demo",
    "list",
    "report",
    "plan",
    "predict",
    "export",
}
"""The others describe settings of rooms that need torch: evaluate and measure."""


def test_version_and_help_do_not_wait_for_torch(tmp_path: Path) -> None:
    """Which takes seconds to import."""
    asked = [["--version"], ["--help"], ["nothing"], *([name, "--help"] for name in sorted(LIGHT))]
    program = (
        "import sys; from largemargin.app.cli import main\n"
        f"for words in {asked}:\n"
        "    main(words)\n"
        "    assert 'torch' not in sys.modules, words"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"largemargin {lm.__version__}\n" in done.stdout
    for name in LIGHT:
        assert f"usage: largemargin {name}" in done.stdout
    assert set(cli.COMMANDS) > LIGHT


def test_every_command_says_what_it_does() -> None:
    for name, module in cli.commands().items():
        assert 10 < len(cli.help_line(module)) < 90, name


def test_reproduce_is_there_with_the_package_of_the_papers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("largemargin_papers", reason="a package of its own, in papers/")
    assert cli.main(["--help"]) == 0
    assert "\n  reproduce  run a paper's table again" in capsys.readouterr().out
    table = Path(__file__).resolve().parents[3] / "papers" / "lmd" / "table3.yaml"
    assert cli.main(["reproduce", str(table), "--list"]) == 0
    assert " cells, " in capsys.readouterr().out


def test_without_that_package_reproduce_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: ())
    assert cli.main(["--help"]) == 0
    assert "reproduce" not in capsys.readouterr().out
    for words in (["reproduce", "papers/lmd/table3.yaml"], ["help", "reproduce"]):
        assert cli.main(words) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: reproduce is a command of the package largemargin-papers")
        assert "pip install ./papers" in told


def test_another_package_adds_a_command_but_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    added = [SimpleNamespace(name=name, module="theirs") for name in ("list", "more")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: added)
    assert list(cli.commands()) == [*cli.COMMANDS, "more"]
    assert cli.commands()["list"] == "largemargin.app.cli.list"


def test_no_command_is_an_error_with_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"largemargin {lm.__version__}\n"


def test_help_of_a_command_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--help"]) == 0  # once more in this process: `list` is a module now
    one = capsys.readouterr().out
    assert cli.main(["help", "list"]) == 0
    assert capsys.readouterr().out == one


def test_a_misspelt_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err
    assert cli.main(["xyz"]) == 2
    assert "They are list, demo" in capsys.readouterr().err


def test_the_status_of_a_command_is_the_exit_code(command: SimpleNamespace) -> None:
    command.run = lambda options: 1
    assert cli.main(["list"]) == 1


def test_wrong_input_is_a_message(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raising(LargeMarginError("margin must be smaller."))
    assert cli.main(["list"]) == 2
    assert capsys.readouterr().err == "error: margin must be smaller.\n"


def test_the_traceback_is_there_when_asked_for(
    command: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.run = raising(LargeMarginError("margin must be smaller."))
    with pytest.raises(LargeMarginError, match="smaller"):
        cli.main(["list", "--traceback"])
    monkeypatch.setenv("LARGEMARGIN_TRACEBACK", "1")
    with pytest.raises(LargeMarginError, match="smaller"):
        cli.main(["list"])


def test_a_defect_keeps_its_traceback(command: SimpleNamespace) -> None:
    command.run = raising(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["list"])


def test_interrupts_say_how_to_go_on(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raising(KeyboardInterrupt("largemargin compare --resume runs/x"))
    assert cli.main(["list"]) == 130
    assert "Continue where it stopped: largemargin compare --resume runs/x" in (
        capsys.readouterr().err
    )
    command.run = raising(KeyboardInterrupt())
    assert cli.main(["list"]) == 130
    assert "Continue" not in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "largemargin.app.cli.parser", raising=False)
    assert cli.main(["list"]) == 2
    assert "pip install 'largemargin[train]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise on Windows")
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "largemargin", "list", "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_packages_of_an_extra_are_asked_for_in_a_line(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from largemargin.export import onnx_file, tensor_files

    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    command.run = lambda options: tensor_files.require_safetensors()
    assert cli.main(["list"]) == 2
    told = "error: Saving and loading needs safetensors. Install it: pip install"
    assert capsys.readouterr().err.startswith(told)
    command.run = lambda options: onnx_file.to_onnx(None, None, "model.onnx")
    assert cli.main(["list"]) == 2
    assert capsys.readouterr().err.startswith("error: Writing ONNX needs onnx. Install it: pip")


def test_a_broken_import_of_somebody_keeps_its_traceback(command: SimpleNamespace) -> None:
    command.run = raising(ImportError("cannot import name 'x'", name="theirs"))
    with pytest.raises(ImportError, match="cannot import name"):
        cli.main(["list"])
