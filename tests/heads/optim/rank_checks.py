"""What both processes of ``test_ranks`` run: heads cut between rows, stepped where they are."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import largemargin as lm
from largemargin.heads import ShardedClassHead
from largemargin.heads.optim import HeadSGD, RowwiseAdam, apply_in_backward

CLASSES, DIM = 7, 5


def start() -> Tensor:
    return torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))


def train(head: Any, optimizer: Any, *, inside: bool, whole: bool) -> None:
    """Three steps on four samples, or on this process's half of them."""
    handle = apply_in_backward(optimizer) if inside else None
    loss = lm.ArcFace(scale=8.0, sync=not whole)
    for step in range(3):
        generator = torch.Generator().manual_seed(1 + step)
        x = torch.randn(4, DIM, generator=generator)
        labels = torch.randint(CLASSES, (4,), generator=generator)
        if not whole:
            x, labels = x.chunk(2)[dist.get_rank()], labels.chunk(2)[dist.get_rank()]
        loss(x, head, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()


def check_same_steps() -> Iterator[str]:
    """Rounding at random too: it depends on the entry, not on the process that holds it."""
    builds = {
        "adam": lambda p: RowwiseAdam(p, lr=0.1),
        "sgd": lambda p: HeadSGD(p, lr=0.1, weight_decay=0.1),
    }
    for name, build in builds.items():
        for inside in (False, True):
            sharded = ShardedClassHead(DIM, CLASSES, similarity="cosine")
            plain = lm.ClassHead(DIM, CLASSES, similarity="cosine")
            for head in (sharded, plain):
                head.load_state_dict({"weight": start()})
            optimizers = [build(head.parameters()) for head in (sharded, plain)]
            train(sharded, optimizers[0], inside=inside, whole=False)
            train(plain, optimizers[1], inside=False, whole=True)
            if inside and sharded.weight.grad is not None:
                yield f"{name}: the gradient was kept"
            far = (sharded.weight.full_tensor() - plain.weight).abs().max().item()
            if far > 1e-5:
                yield f"{name}, inside={inside}: weights differ by {far}"
            key = "first" if name == "adam" else "momentum"
            moment = optimizers[0].state[sharded.weight][key].full_tensor()
            wanted = optimizers[1].state[plain.weight][key]
            unlike = (moment != wanted).float().mean().item()
            if unlike > 0.1:  # sums in another order may fall on another side
                yield f"{name}: {unlike:.0%} of the moments are rounded in another way"


def check_columns_are_refused() -> Iterator[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.nn.Parameter(distribute_tensor(start(), mesh, [Shard(1)]))
    weight.grad = torch.zeros_like(weight)
    try:
        RowwiseAdam([weight]).step()
    except lm.LargeMarginError as error:
        if "cut between its rows" not in str(error):
            yield str(error)
    else:
        yield "a parameter cut between columns was stepped"
