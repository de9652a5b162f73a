"""Two processes with a part of the data each find what one finds in all of it."""

from pathlib import Path

from two_ranks import NEEDS_GLOO, run_checks

CHECKS = [
    "accuracy",
    "failure_of_one_rank",
    "one_rank_alone",
    "evaluation",
    "fewer_samples_than_ranks",
    "batches_of_the_engine",
]


@NEEDS_GLOO
def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_checks("measuring.evaluation_rank_checks", CHECKS, tmp_path)
