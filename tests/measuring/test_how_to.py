"""The page on measuring: its Python runs, and says what is printed."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "measure.md"


def test_the_page_runs(capsys) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    state = torch.random.get_rng_state()
    try:
        for block in blocks:  # one after the other, as a reader would
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        torch.random.set_rng_state(state)
    printed = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"```text\n(.*?)\n\.\.\.\n```", text, flags=re.DOTALL)
    assert printed[0] == shown.splitlines()[0]
    labels = [line[:33] for line in shown.splitlines()]
    assert [line[:33] for line in printed[: len(labels)]] == labels
