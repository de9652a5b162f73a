"""What every process of the distributed tests of ``attach`` runs; ``test_distributed`` starts them.

The reference is the same model in the same process on the joined batch, without synchronisation.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from dropin.nets import LABELS, ConvNet, Mlp, vectors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import largemargin as lm

CLASSES, PART = 5, 4
"""An odd number of classes: the shards of the weight differ in size."""

Make = Callable[[bool], Any]


def cosface(sync: bool) -> Any:
    return lm.CosFace(scale=8.0, margin=0.2)


def softmax(sync: bool) -> Any:
    return lm.CrossEntropy()


def softmax_lmd(sync: bool) -> Any:
    return lambda C, D: lm.Objective(
        softmax=lm.CrossEntropy(),
        lmd=0.3 * lm.Discriminative(C, D, margin=2.0, momentum=0.5, sync=sync),
    )


def robust(sync: bool) -> Any:
    return lambda C, D: lm.RobustDiscriminative(C, D, margin=2.0, momentum=0.5, sync=sync)


OBJECTIVES: dict[str, Make] = {
    "cosface": cosface,
    "softmax": softmax,
    "softmax + lmd": softmax_lmd,
    "robust": robust,
}


def resnet() -> nn.Module:
    norm = functools.partial(nn.GroupNorm, 8)  # batch norm would mix the samples of a rank only
    return torchvision.models.resnet18(num_classes=CLASSES, norm_layer=norm)


def small() -> nn.Module:
    return ConvNet(CLASSES)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_checking(model: nn.Module) -> nn.Module:
    """This way DDP returns copies of the outputs."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def ddp_static(model: nn.Module) -> nn.Module:
    """This way DDP begins its sums, in the first step, where a gradient reaches the outputs."""
    return DistributedDataParallel(model, static_graph=True)


def fsdp(model: nn.Module, *parts: str, **how: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(model.get_submodule(part), mesh=mesh)
    return fully_shard(model, mesh=mesh, **how)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "ddp, outputs copied": ddp_checking,
    "ddp, static graph": ddp_static,
    "fsdp": fsdp,
    "fsdp, sharded after forward": functools.partial(fsdp, reshard_after_forward=True),
}


def parted(model: nn.Module) -> nn.Module:
    """The head sharded by itself, so it is sharded again when the criterion reads it."""
    return fsdp(model, "layer4" if hasattr(model, "layer4") else "body", "fc")


WRAPPERS["fsdp, head by itself"] = parted


def batch(step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    count = PART * dist.get_world_size()
    x = torch.randn(count, 3, size, size, generator=draw)
    noise = 0.3 * torch.randn(count, 3, size, size, generator=draw)
    return x, x + noise, torch.randint(0, CLASSES, (count,), generator=draw)


def loss_of(model: nn.Module, criterion: lm.Criterion, data: Any, noisy: bool) -> Tensor:
    x, other, labels = data
    outputs = model(x)
    return criterion(outputs, labels, noisy=model(other) if noisy else None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    make: Callable[[], nn.Module],
    wrap: str,
    objective: str,
    *,
    size: int,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Iterator[str]:
    """Several steps on two ranks against one process: gradients, weights, bank."""
    torch.manual_seed(0)
    single = make().to(dtype)
    shared = copy.deepcopy(single)
    criteria = [
        lm.attach(model, OBJECTIVES[objective](sync), warn=False)
        for model, sync in ((single, False), (shared, True))
    ]
    parallel = WRAPPERS[wrap](shared)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (single, shared)]
    mine = slice(dist.get_rank() * PART, (dist.get_rank() + 1) * PART)
    for step in range(steps):
        data = [each.to(dtype) if each.is_floating_point() else each for each in batch(step, size)]
        noisy = objective == "robust"
        want = loss_of(single, criteria[0], data, noisy)
        got = loss_of(parallel, criteria[1], [each[mine] for each in data], noisy)
        if got.dim() != 0:
            yield f"{wrap}, {objective}: the loss has the shape {tuple(got.shape)}"
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for (name, p), q in zip(single.named_parameters(), shared.parameters(), strict=True):
            label = f"{wrap}, {objective}, step {step}: "
            if (p.grad is None) != (q.grad is None):
                yield f"{label}gradient of {name} is missing on one side"
            elif p.grad is not None:
                yield from differ(f"{label}gradient of {name}", whole(q.grad), p.grad)
            yield from differ(f"{label}{name}", whole(q.detach()), p.detach())
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(criteria[0].banks, criteria[1].banks, strict=True):
        yield from differ(f"{wrap}, {objective}: bank", two.centroids, one.centroids)
        yield from differ(f"{wrap}, {objective}: counts", two.counts, one.counts)
    images = batch(99, size)[0].to(dtype)
    with torch.no_grad():
        yield from differ(f"{wrap}, {objective}: logits", parallel(images), single(images))


def differ(name: str, got: Tensor, want: Tensor) -> Iterator[str]:
    try:
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    except AssertionError as error:
        yield f"{name}: {error}"


def check_small() -> Iterator[str]:
    for wrap in WRAPPERS:
        for objective in ("cosface", "softmax + lmd"):
            yield from compare(small, wrap, objective, size=8, steps=2)
    for wrap in ("ddp", "fsdp, sharded after forward", "fsdp, head by itself"):
        yield from compare(small, wrap, "robust", size=8, steps=2)


def check_small_everything() -> Iterator[str]:
    for wrap in WRAPPERS:
        for objective in OBJECTIVES:
            yield from compare(small, wrap, objective, size=8, steps=5)


def check_resnet() -> Iterator[str]:
    yield from compare(resnet, "ddp", "softmax + lmd", size=32, steps=1)
    yield from compare(resnet, "fsdp, head by itself", "cosface", size=32, steps=1)


def check_resnet_everything() -> Iterator[str]:
    for wrap in WRAPPERS:
        for objective in ("cosface", "softmax", "softmax + lmd"):
            # In float32 an activation next to 0 may be on either side of it in the second step.
            yield from compare(resnet, wrap, objective, size=32, steps=2, dtype=torch.float64)


def refused(make: Callable[[], object], words: str) -> Iterator[str]:
    try:
        make()
    except lm.LargeMarginError as error:
        if words not in str(error):
            yield f"the error does not say {words!r}: {error}"
    else:
        yield f"nothing was raised, expected {words!r}"


def check_wrapped_before() -> Iterator[str]:
    """Attaching to a model that is wrapped already: what works, what says why it does not."""
    x, _, labels = batch(0, 8)
    for wrap in (ddp, fsdp, parted):
        torch.manual_seed(0)
        model = small()
        plain = copy.deepcopy(model)
        parallel = wrap(model)
        criterion = lm.attach(parallel, lm.CrossEntropy())
        loss = criterion(parallel(x), labels)
        loss.backward()
        want = nn.functional.cross_entropy(plain(x), labels)
        want.backward()
        yield from differ("attached after wrapping", loss.detach(), want.detach())
        yield from differ("its gradient", whole(model.fc.weight.grad), plain.fc.weight.grad)
    yield from refused(lambda: lm.attach(ddp(small()), lm.CosFace()), "before wrapping the model")
    yield from refused(lambda: lm.attach(fsdp(small()), lm.CosFace()), "before fully_shard")
    bare = small()
    bare.fc.register_parameter("bias", None)
    parallel = ddp(bare)
    criterion = lm.attach(parallel, lm.CosFace(scale=8.0))
    if type(bare.fc) is not lm.ClassHead:
        yield "a head without bias was not made a cosine head inside DDP"
    criterion(parallel(x), labels).backward()
    model = small()
    criterion = lm.attach(model, lm.CosFace())
    fsdp(model)
    yield from refused(criterion.undo, "unsharded model")


def check_fsdp_evaluation() -> Iterator[str]:
    torch.manual_seed(0)
    model = small()
    plain = copy.deepcopy(model)
    criteria = [lm.attach(each, softmax_lmd(False)) for each in (model, plain)]
    parallel = parted(model)
    x, _, labels = batch(0, 8)
    for mode in (torch.no_grad, torch.enable_grad):
        model.eval()
        plain.eval()
        with mode():
            got, want = criteria[0](parallel(x), labels), criteria[1](plain(x), labels)
        yield from differ("evaluation", got.detach(), want.detach())


def check_tensor_parallel() -> Iterator[str]:
    """A backbone cut over the processes is fine, a head that is says what to do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole_output = ColwiseParallel(output_layouts=Replicate())
    for head in (ColwiseParallel(), whole_output):
        model = parallelize_module(Mlp(), mesh, {"fc": head})
        yield from refused(lambda model=model: lm.attach(model, lm.CrossEntropy()), "tensor-paral")
        model = Mlp()
        criterion = lm.attach(model, lm.CrossEntropy())
        parallelize_module(model, mesh, {"fc": head})
        yield from refused(lambda model=model: model(vectors()), "ShardedClassHead")
        criterion.undo()
    for objective in ("cosface", "softmax + lmd"):
        torch.manual_seed(0)
        plain = Mlp()
        model = copy.deepcopy(plain)
        criteria = [lm.attach(each, OBJECTIVES[objective](False)) for each in (model, plain)]
        parallelize_module(model, mesh, {"body.0": whole_output})
        for criterion, each in zip(criteria, (model, plain), strict=True):
            criterion(each(vectors()), LABELS).backward()
        for name, parameter in plain.named_parameters():
            gradient = whole(model.get_parameter(name).grad)
            yield from differ(f"tensor parallel, {objective}: {name}", gradient, parameter.grad)
