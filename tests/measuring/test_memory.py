"""Many classes: what a measurement needs beside the data, as a fresh process sees it."""

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

CLASSES, SAMPLES, DIM = 20_000, 1500, 16


def largest_mib() -> float:
    """Largest size of this process so far."""
    status = Path("/proc/self/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def growth() -> float:
    from largemargin.measuring import measure_arrays

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CLASSES, DIM, generator=generator)
    labels = torch.arange(SAMPLES) % CLASSES
    features = weight[labels] + torch.randn(SAMPLES, DIM, generator=generator)
    few = torch.arange(8) % 2
    measure_arrays(features[:8], few, weight[:2], pairwise=True)  # what the first call imports
    before = largest_mib()
    measure_arrays(features, labels, weight, pairwise=True, batch_size=256)
    return largest_mib() - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tables_of_many_classes_stay_small() -> None:
    """A table of all samples and classes would be 230 MiB, and several are needed."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(growth) < 400
