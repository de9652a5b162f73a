"""What the README and the page about the command line say is what the command does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from app.cli.command import environment

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "command_line.md").read_text(encoding="utf-8")


def photos(folder: Path, per_class: int, generator: torch.Generator) -> None:
    """Small pictures of three classes that differ in colour."""
    from PIL import Image

    for channel, name in enumerate(("red", "green", "blue")):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = torch.randint(0, 120, (12, 12, 3), generator=generator, dtype=torch.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")


@pytest.mark.slow
def test_the_folder_to_report_commands_of_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    block = re.search(
        r"```bash\n(largemargin train .*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert block is not None
    lines = block[1].strip().splitlines()
    assert len(lines) == 6
    generator = torch.Generator().manual_seed(0)
    photos(tmp_path / "photos", 100, generator)
    photos(tmp_path / "new", 2, generator)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "largemargin"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m largemargin "$@"\n')
    command.chmod(0o755)
    variables = environment()
    variables["PATH"] = f"{tmp_path / 'bin'}:{variables['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", block[1]],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = (tmp_path / "answers.csv").read_text().splitlines()
    assert len(answers) == 7
    right = sum(line.split(",")[1] in line.split(",")[0] for line in answers[1:])
    assert right >= 5, answers
    assert (tmp_path / "model.onnx").stat().st_size > 1000
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the page writes where it runs
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block, "command_line.md", "exec"), names)  # one goes on from the other
    assert 0 < float(names["accuracy"]) <= 1
    assert names["fitted"].loss < names["fitted"].loss_before


def commands() -> dict[str, set[str]]:
    """Sub-commands with the options that the page gives them."""
    text = PAGE.replace("\\\n", " ")
    found: dict[str, set[str]] = {}
    for line in re.findall(r"largemargin ((?:train|compare|tune|reproduce|list)\b[^`\n]*)", text):
        words = line.split()
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        found.setdefault(words[0], set()).update(options)
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_page_names_options_that_exist(name: str) -> None:
    from largemargin.app.cli.command import parser_of

    known = parser_of(name).format_help()
    for option in commands()[name]:
        group = option.split(".")[0]
        assert option in known or option.startswith("--objective.settings."), option
        assert group in known, option
