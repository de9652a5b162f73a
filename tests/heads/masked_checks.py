"""Sharded classes of bias minus infinity; ``test_sharded_ranks`` starts the processes."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from heads.sharded_checks import D, compare, differs, make, mine, normal, sizes
from torch import Tensor

import largemargin as lm
from largemargin.heads.topk import top_classes
from largemargin.ops.shards import class_range

COUNTS = (3, 9)
"""With 2 ranks: shards of 2 and 1, and of 5 and 4 classes."""
LOSSES = {
    "cross_entropy": lm.CrossEntropy,
    "focal": lm.Focal,
    "max_hinge": lm.MaxHinge,
}


def masked(num_classes: int) -> Iterator[tuple[list[int], Tensor]]:
    """The first process's classes, those of all others, or all but one; and biases that say so."""
    first, _ = class_range(num_classes, dist.get_world_size(), 0)
    for hidden in ([*range(first)], [*range(first, num_classes)], [*range(1, num_classes)]):
        bias = normal(2, num_classes)
        bias[hidden] = -torch.inf
        yield hidden, bias


def check_losses() -> Iterator[str]:
    """Values and gradients are finite, and those of one process."""
    for num_classes in COUNTS:
        for hidden, bias in masked(num_classes):
            labels = sorted({*range(num_classes)} - {*hidden})
            for (name, build), impl in product(LOSSES.items(), ("dense", "chunked")):
                loss: Any = build(sync=True, impl=impl)  # type: ignore[arg-type]
                what = f"{name}, {impl}, C={num_classes}, without {hidden}"
                yield from compare(what, loss, num_classes, bias=bias, labels=labels)


def check_prediction() -> Iterator[str]:
    """They come last, each of them once."""
    features = normal(3, sum(sizes()), D)
    for num_classes in COUNTS:
        weight = normal(1, num_classes, D)
        for hidden, bias in masked(num_classes):
            want = top_classes(features, weight, bias=bias, k=num_classes)
            got = make(weight, bias).predict(mine(features), num_classes)
            yield from differs(f"classes, without {hidden}", got.classes, mine(want.classes))
            yield from differs(f"scores, without {hidden}", got.scores, mine(want.scores))
