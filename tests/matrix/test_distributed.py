"""Two processes with a piece of the batch each are one process with the whole batch (O10)."""

from pathlib import Path

import pytest
from two_ranks import NEEDS_GLOO, run_checks

GROUPS = {
    "centroids": ["classwise", "many_classes", "as_many_rows_as_classes", "local_centroids"],
    "training": [
        "per_sample",
        "evaluation_by_one_rank",
        "ddp",
        "ddp_with_accumulation",
        "ddp_with_checkpointing",
        "measured_band",
    ],
}


@NEEDS_GLOO
@pytest.mark.parametrize("group", GROUPS)
def test_two_ranks_are_one(group: str, tmp_path: Path) -> None:
    run_checks("matrix.rank_checks", GROUPS[group], tmp_path)
