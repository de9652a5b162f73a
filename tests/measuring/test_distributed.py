"""Two processes with a part of the data each find what one finds in all of it."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring.rank_checks import run_rank

CHECKS = [
    "padded_sampler",
    "uneven_parts",
    "repeated_samples",
    "files",
    "failure_of_one_rank",
    "one_rank_alone",
    "skipped_labels",
]


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
def test_two_ranks_are_one(tmp_path: Path) -> None:
    # One start for all checks: importing torch twice is most of what a check costs.
    mp.spawn(run_rank, args=(2, str(tmp_path), CHECKS), nprocs=2, join=True)
    failures = []
    for name in CHECKS:
        for rank in range(2):
            report = tmp_path / f"{name}.{rank}"
            text = report.read_text() if report.exists() else "did not run: a check before it broke"
            if text:
                failures.append(f"== {name}, rank {rank}\n{text}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
