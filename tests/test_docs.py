"""Pages made from the code are up to date, and the README's Python runs."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import largemargin as lm

ROOT = Path(__file__).parents[1]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_loss_page_is_made_from_this_code() -> None:
    tables = load(ROOT / "docs" / "make_tables.py")
    made = tables.page()
    assert made == tables.PAGE.read_text(encoding="utf-8"), "run python docs/make_tables.py"
    assert all(f"| {name} |" in made for name in lm.LOSSES)


@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
)
def test_readme_python_runs(block: str) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    for name in {"loss", "value", "total"} & names.keys():
        assert torch.isfinite(names[name]), name


def test_every_file_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in named:
        assert (ROOT / target).exists(), target
