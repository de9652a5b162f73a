"""Two processes with a piece of the batch each are one process with the whole batch (O10)."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from matrix.rank_checks import run_rank

# One start of two processes per group: importing torch twice is most of what a check costs.
GROUPS = {
    "centroids": ["classwise", "many_classes", "as_many_rows_as_classes", "local_centroids"],
    "training": [
        "per_sample",
        "evaluation_by_one_rank",
        "ddp",
        "ddp_with_accumulation",
        "ddp_with_checkpointing",
    ],
}


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
@pytest.mark.parametrize("group", GROUPS)
def test_two_ranks_are_one(group: str, tmp_path: Path) -> None:
    checks = GROUPS[group]
    mp.spawn(run_rank, args=(2, str(tmp_path), checks), nprocs=2, join=True)
    failures = []
    for name in checks:
        for rank in range(2):
            report = tmp_path / f"{name}.{rank}"
            text = report.read_text() if report.exists() else "did not run: a check before it broke"
            if text:
                failures.append(f"== {name}, rank {rank}\n{text}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
