"""The page on many classes: its Python runs in one process and in two, its tables are current."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from two_ranks import NEEDS_GLOO

import largemargin as lm
from largemargin.heads import estimate_memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "million_classes.md"


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(found) == 5
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
    text = PAGE.read_text().split("## 10^8 classes")[1].split("### What a step takes")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (.*) \|$", text, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [16, 64, 256]
    for processes, classes, sizes in rows:
        plan = estimate_memory(
            *(256, 10**8, 512),
            world_size=int(processes),
            dtype=torch.bfloat16,
            optimizer="rowwise_adam",
        )
        assert f"{plan.local_classes:,}" == classes
        assert plan.impl == "triton", "the rate below is that of the kernels"
        parts = (plan.weights + plan.gradients, plan.optimizer_state, plan.workspace)
        parts += (plan.features, plan.total)
        shown = [float(cell.removesuffix(" GiB")) for cell in sizes.split(" | ")]
        assert shown == pytest.approx([part / 2**30 for part in parts], abs=0.06)


def projection() -> ModuleType:
    path = PAGE.parents[1] / "make_projection.py"
    spec = importlib.util.spec_from_file_location("make_projection", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HEADS = [
    {"provider": "triton", "loss": "ArcFace", "C": 10**6, "N": 1024, "D": 512, "ms": 8.0},
    {"provider": "triton", "loss": "ArcFace", "C": 10**6, "N": 1024, "D": 512, "ms": 9.0},
    {"provider": "triton", "loss": "ArcFace", "C": 10**5, "N": 1024, "D": 512, "ms": 1.0},
    {"provider": "triton", "loss": "LMSoftmax", "C": 10**7, "N": 1024, "D": 512, "ms": 1.0},
    {"provider": "chunked", "loss": "ArcFace", "C": 10**7, "N": 1024, "D": 512, "ms": 1.0},
]
HEADS = [{"prototypes": "torch.bfloat16", **row} for row in HEADS]
HEADS.append({**HEADS[0], "prototypes": "torch.float32", "C": 10**7, "ms": 1.0})
STEPS = [
    {"provider": "RowwiseAdam, bfloat16 weights", "C": 10**6, "D": 512, "median_ms": 2.0},
    {"provider": "RowwiseAdam", "C": 10**6, "D": 512, "median_ms": 1.0},
    {"provider": "torch SGD", "C": 10**6, "D": 512, "median_ms": 1.0},
]


def test_the_projection_is_arithmetic_on_measured_rates() -> None:
    made = projection()
    rates = made.rates(HEADS, STEPS)  # rows with float32 class vectors do not count
    assert rates.pair_seconds == pytest.approx(8e-3 / (1024 * 10**6))
    few, many = made.project(rates, 16), made.project(rates, 64)
    # 256 samples against 10^8 classes are 25 times 1024 against a million.
    assert few.statistics == pytest.approx(25 * 8e-3)
    assert many.statistics == pytest.approx(few.statistics)
    assert many.optimizer == pytest.approx(few.optimizer / 4)
    assert few.optimizer == pytest.approx(6.25 * 2e-3)
    sent = 256 * 63 * (512 * 6 + 2 * 4 * 7)
    assert many.network == pytest.approx(sent / 50e9 + 6 * 50e-6)
    assert many.step == pytest.approx(many.statistics + many.optimizer + many.network)
    assert "| 64 | 1,562,500 |" in made.table(rates)
    for gpus in made.GPUS:  # the peak of both tables is that of one set-up
        assert made.project(rates, gpus).memory == made.planned(gpus).total


def test_the_projection_says_what_was_not_measured() -> None:
    made = projection()
    assert "Not measured yet" in made.table(made.rates([], []))
    assert "not measured" in made.table(made.rates(HEADS, []))


def test_tables_of_measured_rows() -> None:
    made = projection()
    step = {"device": "a GPU", "moved_gib": 7.6, "gib_per_s": 3800.0, "state_mib": 977.0}
    step |= {"temporary_mib": 0.1, "ratio": 0.6, "provider": "HeadSGD", "C": 10**6, "D": 512}
    assert "| HeadSGD | 2.00 ms | 7.6 GiB |" in made.optimizer_table([step | {"median_ms": 2.0}])
    run = {"phase": "final", "provider": "ours", "lr": 0.001, "margin": 0.2, "epochs": 3}
    rows = [run | {"recall_at_1": found} for found in (0.9, 0.91, 0.92)]
    rows.append(rows[0] | {"phase": "tuning", "recall_at_1": 0.1})
    assert "| ours | 91.00 +- 1.00 % | 90.00, 91.00, 92.00 |" in made.omniglot_table(rows)
    assert "Not measured yet" in made.omniglot_table([]) + made.optimizer_table([])


def test_the_tables_of_the_page_are_current() -> None:
    made = projection()
    assert made.page() == PAGE.read_text(encoding="utf-8"), "run python docs/make_projection.py"
