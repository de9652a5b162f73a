"""The Triton kernels by Triton's interpreter, on a CPU.

The checks are tests themselves, run by another pytest: whether Triton interprets or compiles is
settled when it is first imported, and in this process that may have happened already.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from largemargin import CosFace, class_stats
from largemargin.errors import LargeMarginError
from largemargin.ops import _tile_ops

HERE = Path(__file__).resolve().parent
INPUTS = (torch.ones(2, 3), torch.eye(4, 3), torch.tensor([0, 1]))
CHECKS = (
    "tile_checks.py",
    "tile_edge_checks.py",
    "tile_kept_checks.py",
    "tile_operator_checks.py",
    "rival_checks.py",
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_checks(marked: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # NumPy, which the interpreter is made of, warns about entries that masks hide.
    quiet = "ignore::RuntimeWarning"
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", quiet),
            *("-m", marked, *(str(HERE / name) for name in CHECKS)),
        ],
        env={
            **environment,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )


def test_interpreted_kernels() -> None:
    done = run_checks("not slow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout, done.stdout


@pytest.mark.slow
def test_interpreted_kernels_at_length() -> None:
    done = run_checks("slow")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_gpu_the_message_names_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    expected = (
        r"""impl="triton" was asked for, but .*'cpu', not on a GPU.*impl="auto".*"chunked"."""
    )
    with pytest.raises(LargeMarginError, match=expected):
        class_stats(*INPUTS, impl="triton")
    with pytest.raises(LargeMarginError, match=expected):
        CosFace(impl="triton")(*INPUTS)


def test_without_triton_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tile_ops, "HAS_TRITON", False)
    with pytest.raises(LargeMarginError, match="Triton is not installed"):
        class_stats(*INPUTS, impl="triton")


def test_double_precision_is_refused() -> None:
    features, prototypes, labels = INPUTS
    with pytest.raises(LargeMarginError, match="float64"):
        class_stats(features.double(), prototypes, labels, impl="triton")
