"""The Python of docs/how-to/attach.md runs, from top to bottom, and its messages are real."""

import re
from pathlib import Path

import pytest
import torch

import largemargin as lm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "attach.md"


def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 7
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert loss.dim() == 0
    assert torch.isfinite(loss)
    printed = capsys.readouterr().out
    assert "similarity='cosine', scale=4.8" in printed
    assert "lmd.compact" in printed
    assert isinstance(names["model"].fc, torch.nn.Linear)  # type: ignore[attr-defined]


def test_the_messages_it_explains_exist() -> None:
    """Every row of the table quotes words that the code says."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    folders = [Path(lm.__file__).parent / name for name in ("dropin", "heads")]
    source = " ".join(p.read_text() for folder in folders for p in folder.glob("*.py"))
    said = re.sub(r'"\s*f?"', "", re.sub(r"\s+", " ", source))
    for row in rows:
        words = re.split(r"\bN\b|\bM\b|\bC\b|num_classes=|\.\.\.", row)
        for part in (each.strip() for each in words):
            assert part in said, f"{row!r}: nothing says {part!r}"
