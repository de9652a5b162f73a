"""The page about presets: its Python runs, and what it says of the long tail is so."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import largemargin as lm
from largemargin.training.files import read_json
from largemargin.training.presets import FILE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "presets.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    assert torch.isfinite(names["loss"])
    assert "source      papers/benchmark/" in capsys.readouterr().out
    # The class weights of the end, which nothing but the schedule sets.
    assert names["chosen"].scheduled
    weights = [term.weight for term in names["criterion"].objective.terms.values()]
    assert any(each is not None and len(each.unique()) == 3 for each in weights)
    alone = lm.attach(torch.nn.Sequential(torch.nn.Linear(16, 3)), names["chosen"], schedule=())
    assert all(term.weight is None for term in alone.objective.terms.values())


def test_the_page_names_what_there_is() -> None:
    from largemargin.cli.command import parser_of

    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in read_json(FILE))
    known = parser_of("train").format_help()
    assert all(option in known for option in re.findall(r"--\w+", text))
