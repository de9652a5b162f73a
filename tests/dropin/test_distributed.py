"""``attach`` under DDP and FSDP2: two ranks are one process on the joined batch."""

from pathlib import Path

import pytest
from two_ranks import NEEDS_GLOO, run_checks

pytestmark = NEEDS_GLOO


def test_two_ranks_are_one(tmp_path: Path) -> None:
    names = ["small", "resnet", "wrapped_before", "fsdp_evaluation", "tensor_parallel"]
    run_checks("dropin.ranks", names, tmp_path)


@pytest.mark.slow
def test_every_wrapper_with_every_objective(tmp_path: Path) -> None:
    run_checks("dropin.ranks", ["small_everything", "resnet_everything"], tmp_path)
