"""Many classes: what a measurement needs beside the data."""

import pytest
import torch
from held_bytes import held

from largemargin.measuring import measure_arrays

CLASSES, SAMPLES, DIM = 20_000, 1500, 16


@pytest.mark.slow
def test_tables_of_many_classes_stay_small() -> None:
    """Less than one table of all samples and classes in double precision; several are needed."""
    weight = torch.randn(CLASSES, DIM)
    labels = torch.arange(SAMPLES) % CLASSES
    features = weight[labels] + torch.randn(SAMPLES, DIM)
    most = held(lambda: measure_arrays(features, labels, weight, pairwise=True, batch_size=256))
    assert most < CLASSES * SAMPLES * 8, f"{most / 2**20:.0f} MiB"
