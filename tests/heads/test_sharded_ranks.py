"""Any number of processes with a piece of the classes and of the batch each are one process."""

from pathlib import Path

import pytest
import torch
from heads.sharded_checks import (
    OPTIMIZERS,
    Model,
    differences_of,
    groups_of,
    load,
    reference,
    train,
)
from two_ranks import NEEDS_GLOO, run_checks

from largemargin.heads.sharded_class_head import ShardedClassHead

CHECKS = [
    "losses",
    "zero_centroid",
    "similarities",
    "statistics",
    "one_class_in_a_shard",
    "equal_logits",
    "scale",
    "no_gradient_for_features",
    "equal_batches",
    "half",
    "prediction",
    "sampling",
    "optimizer",
]


@NEEDS_GLOO
def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_checks("heads.sharded_checks", CHECKS, tmp_path)


@NEEDS_GLOO
@pytest.mark.slow
def test_classes_of_bias_minus_infinity(tmp_path: Path) -> None:
    run_checks("heads.masked_checks", ["losses", "prediction"], tmp_path)


@NEEDS_GLOO
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_four_ranks_then_three_then_one(tmp_path: Path) -> None:
    """The same on four and three ranks, and a checkpoint that goes from one to the next."""
    for ranks, checks in ((4, ["save"]), (3, ["load_and_save"])):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run_checks("heads.sharded_checks", [*CHECKS, *checks], folder, ranks=ranks)
    for kind, build in OPTIMIZERS.items():
        model = Model()
        assert not hasattr(model.head.weight, "full_tensor")
        optimizer = build(groups_of(model))
        load(model, optimizer, tmp_path / f"{kind}-4", no_dist=True)
        assert list(differences_of(model, reference(kind, 4), kind)) == []
        train(model, optimizer, range(4, 6), whole=True)
        assert list(differences_of(model, reference(kind, 6), kind)) == []
    torch.manual_seed(0)
    alone = ShardedClassHead(2, 2 * 4096 + 5, similarity="euclidean")
    drawn = torch.load(tmp_path / "drawn.pt")
    torch.testing.assert_close(alone.weight.detach(), drawn, rtol=0, atol=0)
    assert drawn.std() == pytest.approx(2**-0.5, rel=0.05)
