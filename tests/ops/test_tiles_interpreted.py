"""The Triton kernels by Triton's interpreter, on a CPU: tests that another pytest runs."""

from pathlib import Path

import pytest
import torch
from interpreted import NEEDS_TRITON, run_interpreted

from largemargin import CosFace, class_stats
from largemargin.errors import LargeMarginError
from largemargin.ops.triton import op

HERE = Path(__file__).resolve().parent
INPUTS = (torch.ones(2, 3), torch.eye(4, 3), torch.tensor([0, 1]))
CHECKS = (
    "tile_checks.py",
    "tile_edge_checks.py",
    "tile_kept_checks.py",
    "tile_operator_checks.py",
    "rival_checks.py",
    "rows_checks.py",
    "centroid_checks.py",
)

pytestmark = NEEDS_TRITON


def run_checks(marked: str) -> str:
    # NumPy, which the interpreter is made of, warns about entries that masks hide.
    options = ("-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marked)
    return run_interpreted("-m", "pytest", *options, *(str(HERE / name) for name in CHECKS))


def test_interpreted_kernels() -> None:
    out = run_checks("not slow")
    assert " skipped" not in out, out


@pytest.mark.slow
def test_interpreted_kernels_at_length() -> None:
    run_checks("slow")


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
    monkeypatch.setattr(op, "HAS_TRITON", False)
    with pytest.raises(LargeMarginError, match="Triton is not installed"):
        class_stats(*INPUTS, impl="triton")


def test_double_precision_is_refused() -> None:
    features, prototypes, labels = INPUTS
    with pytest.raises(LargeMarginError, match="float64"):
        class_stats(features.double(), prototypes, labels, impl="triton")
