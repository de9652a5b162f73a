"""Two processes that share a head step it as one does."""

from pathlib import Path

import pytest
from two_ranks import NEEDS_GLOO, run_checks


@NEEDS_GLOO
@pytest.mark.slow
def test_two_ranks_step_as_one(tmp_path: Path) -> None:
    run_checks("heads.optim.rank_checks", ["same_steps", "columns_are_refused"], tmp_path)
