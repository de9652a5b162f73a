"""Seeds, thread counts and skips: what every test may rely on."""

import gc
import os
import random
import shutil
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples on every run and machine; time limits belong to the whole suite, not to one
# example or its making on a shared core.
hypothesis.settings.register_profile(
    "largemargin",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("largemargin")

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
"""Asked once: without a driver torch looks for its library at every call."""


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # one worker per core: more threads would only compete


def missing_for_inductor() -> str | None:
    """What torch.compile's C++ backend lacks on this machine, or None."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return "inductor needs a C++ compiler: no g++ or clang++ on PATH"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"inductor needs Python's headers: {header} does not exist"
    if " " in tempfile.gettempdir():
        return f"inductor does not quote paths, and {tempfile.gettempdir()!r} has a space"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {
        "gpu": None if GPUS else "needs a CUDA device, and torch sees none",
        "needs_cxx": missing_for_inductor(),
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What is there before the first test is garbage now or never: not to be looked at again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed_from_name(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed each test by its own name, so that order and process do not change its numbers."""
    seed = zlib.crc32(request.node.nodeid.encode())
    with torch.random.fork_rng(devices=range(GPUS)):
        if GPUS:
            torch.manual_seed(seed)
        else:  # without remembering for each of 15,000 tests who seeded a GPU that is not there
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        yield
