"""Kernels on a CPU: Triton's interpreter, in another process.

Whether Triton interprets or compiles is settled when it is first imported, and in the process of
the tests that may have happened already.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_interpreted(*words: str) -> str:
    """What ``python *words`` prints; it can import tests, and must not fail."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    variables |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, *words], env=variables, cwd=TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
