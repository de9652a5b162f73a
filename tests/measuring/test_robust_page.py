"""The page on corrupted inputs: its Python runs, and trains what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "robust.md"


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a file
    names: dict[str, Any] = {}
    state = torch.random.get_rng_state()
    try:
        text = PAGE.read_text(encoding="utf-8")
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
        # What the sentences between the blocks say.
        x, y = next(iter(names["test"]))
        names["criterion"](names["model"](torch.cat([x, x])), y, noisy="second half")
        from largemargin.measuring import accuracy_of
        from largemargin.measuring.robust import pgd

        assert pgd(names["model"], x, y, epsilon=8 / 255).shape == x.shape
        bad = accuracy_of(names["model"], ((1 - a, b) for a, b in names["test"]))
    finally:
        torch.random.set_rng_state(state)
    assert names["found"].clean.accuracy > 0.9 > bad.accuracy
    assert (tmp_path / "evaluation.json").is_file()
    printed = capsys.readouterr().out
    for part in ("accuracy under attacks", "gaussian 8/255", "input curvature"):
        assert part in printed
