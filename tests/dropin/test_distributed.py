"""``attach`` under DDP and FSDP2: two ranks are one process on the joined batch."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from dropin.ranks import run_rank

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


def run(checks: list[str], folder: Path) -> None:
    mp.spawn(run_rank, args=(2, str(folder), checks), nprocs=2, join=True)
    failures = []
    for name in checks:
        for rank in range(2):
            report = folder / f"{name}.{rank}"
            text = report.read_text() if report.exists() else "did not run: a check before it broke"
            if text:
                failures.append(f"== {name}, rank {rank}\n{text}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def test_two_ranks_are_one(tmp_path: Path) -> None:
    # One start of two processes: importing torch twice is most of what a check costs.
    run(["small", "resnet", "wrapped_before", "fsdp_evaluation"], tmp_path)


@pytest.mark.slow
def test_every_wrapper_with_every_objective(tmp_path: Path) -> None:
    run(["small_everything", "resnet_everything"], tmp_path)
