"""The page on many classes: its Python runs in one process and in two, its tables are current."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from two_ranks import NEEDS_GLOO

import largemargin as lm
from largemargin.prototypes import estimate_memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "million_classes.md"


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(found) == 4
    return found


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in blocks():  # one after the other, as a reader would
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["main"](classes=500, steps=40) > 0.9
    value = names["value"]
    assert isinstance(value, torch.Tensor)
    assert torch.isfinite(value)
    assert "5,000,000 classes each" in capsys.readouterr().out


@NEEDS_GLOO
@pytest.mark.slow
def test_the_script_runs_on_two_processes(tmp_path: Path) -> None:
    (script,) = [block for block in blocks() if block.startswith("# train.py")]
    (tmp_path / "train.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(lm.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "classes 0 to 1499 here" in done.stdout
    assert "classes 1500 to 2999 here" in done.stdout


def test_the_table_of_a_hundred_million_classes() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [16, 64, 256]
    for processes, classes, sizes in rows:
        plan = estimate_memory(
            256, 10**8, 512, world_size=int(processes), dtype=torch.bfloat16, optimizer="sgd"
        )
        assert f"{plan.local_classes:,}" == classes
        parts = (plan.weights + plan.gradients, plan.workspace, plan.features, plan.total)
        shown = [float(cell.removesuffix(" GiB")) for cell in sizes.split(" | ")]
        assert shown == pytest.approx([part / 2**30 for part in parts], abs=0.06)
