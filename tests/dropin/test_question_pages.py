"""The Python of questions.md and coming_from.md runs, and what they name exists."""

import re
from pathlib import Path

import pytest
import torch

import largemargin as lm
from largemargin.losses.base.constructor_arguments import CALLED, ELSEWHERE

FOLDER = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = ("questions.md", "coming_from.md")


@pytest.mark.parametrize("page", PAGES)
def test_its_python_runs(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, page, "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"\blm\.([A-Za-z_.]+)", text)):
        found: object = lm
        for part in name.strip(".").split("."):
            found = getattr(found, part)


def test_the_table_has_the_words_that_errors_answer() -> None:
    text = (FOLDER / "coming_from.md").read_text(encoding="utf-8")
    known = {word for words in CALLED.values() for word in words} | set(ELSEWHERE)
    table = text[text.index("## Arguments") : text.index("## Trainers")]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(\w+)(?:=True)?`", row)}
    assert named - known <= {"miner", "indices_tuple", "W"}
