"""What every process of a test of ShardedClassHead runs; ``test_sharded`` starts them.

Each check yields what differs as text instead of raising, so that the ranks stay in step. The
reference is the same loss on the joined batch and all class vectors, in the same process.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from two_ranks import meeting_folder

import largemargin as lm
from largemargin.heads.head_spec import HeadView
from largemargin.heads.optim import HeadSGD, RowwiseAdam
from largemargin.heads.sharded_class_head import ShardedClassHead
from largemargin.heads.topk import top_classes
from largemargin.ops import SIMILARITIES, class_stats
from largemargin.ops.class_stats import STATISTICS
from largemargin.ops.shards import ClassSample, class_range

D = 4
COUNTS = (3, 5, 9, 14)
"""With 4 ranks: shards of 1, 1, 1, 0; of 2, 2, 1, 0; of 3, 3, 3, 0; and of 4, 4, 4, 2 classes."""
LOSSES: dict[str, Callable[..., lm.Loss]] = {
    "adacos": lambda **options: lm.AdaCos(9, **options),
    "adaface": lambda **options: lm.AdaFace(norm_mean=2.0, norm_std=0.5, rate=0.2, **options),
    "arcface": lm.ArcFace,
    "biased_softmax": lm.BiasedSoftmax,
    "cosface": lm.CosFace,
    "cross_entropy": lm.CrossEntropy,
    "elasticface": lambda **options: lm.ElasticFace(std=0.0, **options),
    "focal": lm.Focal,
    "generalized_cross_entropy": lm.GeneralizedCrossEntropy,
    "gm_softmax": lm.GMSoftmax,
    "kobayashi": lm.Kobayashi,
    "label_smoothing": lm.LabelSmoothing,
    "lm_softmax": lm.LMSoftmax,
    "magface": lambda **options: lm.MagFace(min_norm=1.0, max_norm=4.0, **options),
    "max_hinge": lm.MaxHinge,
    "max_softplus": lm.MaxSoftplus,
    "normface": lm.NormFace,
    "rival_divergence": lm.RivalDivergence,
    "sample_margin": lm.SampleMargin,
    "sphereface": lm.SphereFace,
    "symmetric_cross_entropy": lm.SymmetricCrossEntropy,
    "unified_margin": lm.UnifiedMargin,
    "chunked": lambda **options: lm.Kobayashi(impl="chunked", **options),
    "dense": lambda **options: lm.CosFace(impl="dense", **options),
}


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def differs(name: str, got: Any, want: Any, tolerance: float = 1e-10) -> Iterator[str]:
    try:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        yield f"{name}: {error}"


def sizes(step: int = 0) -> list[int]:
    """Ragged batches; one rank has none."""
    ragged = [3, 0, 5, 2][: dist.get_world_size()]
    return ragged[step % len(ragged) :] + ragged[: step % len(ragged)]


def mine(x: Tensor, step: int = 0) -> Tensor:
    return x.split(sizes(step))[dist.get_rank()].detach().clone()


def make(weight: Tensor, bias: Tensor | None = None, **options: Any) -> ShardedClassHead:
    """A head with these class vectors, of which each rank keeps its own."""
    head = ShardedClassHead(
        weight.shape[1], len(weight), bias=bias is not None, dtype=weight.dtype, **options
    )
    head.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return head


def local(head: ShardedClassHead, whole: Tensor) -> Tensor:
    return whole[head.local_classes.start : head.local_classes.stop]


def compare(name: str, loss: lm.Loss, num_classes: int, **form: Any) -> Iterator[str]:
    """Value and gradients of a loss: shards of classes and batch against all in one."""
    bias, classes = form.pop("bias", None), torch.tensor(form.pop("labels", range(num_classes)))
    weight, features = normal(1, num_classes, D), normal(3, sum(sizes()), D)
    labels = classes[-1 - torch.arange(len(features)) % len(classes)]
    labels[1] = -100
    head = make(weight, bias, **form)
    part, alone = mine(features).requires_grad_(), copy.deepcopy(loss)
    value = loss(part, head, mine(labels))
    value.backward()
    leaves = [features.requires_grad_(), weight.requires_grad_()]
    leaves += [] if bias is None else [bias.requires_grad_()]
    single = HeadView(weight, bias, head.similarity, head.scale)
    alone.sync = False
    want = alone(features, single, labels)
    wanted = torch.autograd.grad(want, leaves)
    if not all(bool(x.isfinite().all()) for x in (want, *wanted)):
        yield f"{name}: not finite in one process"
    yield from differs(f"{name}: value", value, want)
    # Features are no parameters: what DDP would divide by is divided by here.
    scaled = part.grad / dist.get_world_size()
    yield from differs(f"{name}: features", scaled, mine(wanted[0]))
    yield from differs(f"{name}: weight", head.weight.grad.to_local(), local(head, wanted[1]))
    if bias is not None:
        yield from differs(f"{name}: bias", head.bias.grad.to_local(), local(head, wanted[2]))


def check_losses() -> Iterator[str]:
    for num_classes in COUNTS:
        for name, build in LOSSES.items():
            yield from compare(f"{name}, C={num_classes}", build(sync=True), num_classes)
        counts = torch.arange(1, num_classes + 1)
        adjusted = lm.LogitAdjustment(counts, tau=1.5, sync=True).double()
        bias = normal(2, num_classes)
        yield from compare(f"adjusted, C={num_classes}", adjusted, num_classes, bias=bias)
        beside_margin = lm.ArcFace(margin=0.3, scale=8.0, prior=counts, sync=True).double()
        yield from compare(f"prior, C={num_classes}", beside_margin, num_classes)


def check_zero_centroid() -> Iterator[str]:
    """Beside a margin with a prior; it is the same number for every process."""
    for num_classes in COUNTS:
        weight, features = normal(1, num_classes, D), normal(3, sum(sizes()), D)
        labels, counts = torch.arange(len(features)) % num_classes, torch.arange(num_classes) + 1
        for normalize in (True, False):
            name = f"zero centroid, C={num_classes}, normalize={normalize}"
            margin = lm.CosFace(margin=0.2, scale=8.0, prior=counts, sync=True).double()
            loss = margin + 0.7 * lm.ZeroCentroid(strength=3.0, normalize=normalize)
            head, whole = make(weight), weight.clone().requires_grad_()
            value = loss(mine(features), head, mine(labels))
            value.backward()
            margin.sync = False
            want = loss(features, whole, labels)
            want.backward()
            yield from differs(name, value.terms["zero_centroid"], want.terms["zero_centroid"])
            yield from differs(f"{name}: sum", value.total, want.total)
            yield from differs(name, head.weight.grad.to_local(), local(head, whole.grad))


def check_similarities() -> Iterator[str]:
    for similarity in SIMILARITIES:
        for bias in (None, normal(2, 9)):
            form = {"similarity": similarity, "scale": 3.0, "bias": bias}
            yield from compare(f"{similarity} {bias}", lm.Kobayashi(sync=True), 9, **form)
    weight = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    yield from compare("weighted", lm.CosFace(weight=weight, sync=True), 9)


def check_statistics() -> Iterator[str]:
    """Equal class vectors in several shards, a label that is none, statistics one by one."""
    weight = normal(4, 14, D)
    weight[[1, 7, 13]] = weight[5].clone()
    weight[8:11] = weight[2].clone()
    labels = torch.tensor([5, 1, 0, 99, 13, 2, 9, 7, -5, 3])[: sum(sizes())]
    features = normal(5, len(labels), D)
    features[: len(labels) // 2] = weight[5] * 2
    second, _ = class_range(14, dist.get_world_size(), 0)
    weight[[second, second + 1]] = 9 * features[2]  # two best in one shard, the first one wins
    head = make(weight)
    for want in (("rival",), ("rest",), ("spread", "mean"), ("mean",), STATISTICS):
        options: Any = {"want": want, "validate": False, "scale": 2.0}
        found = class_stats(mine(features), head.weight, mine(labels), **options)
        expected = class_stats(features, weight, labels, **options)
        real = (labels >= 0) & (labels < 14)  # others have no rival to name
        for name, one, whole in zip(lm.ClassStats._fields, found, expected, strict=True):
            if (one is None) != (whole is None):
                yield f"{want}: {name} is {one}, but {whole} was expected"
            elif whole is not None:
                kept = whole if whole.is_floating_point() else whole.where(real, 0)
                mask = torch.ones_like(mine(real)) if one.is_floating_point() else mine(real)
                yield from differs(f"{want}: {name}", one.where(mask, 0), mine(kept))


def check_one_class_in_a_shard() -> Iterator[str]:
    """The largest logit is the sample's own, and the only one of its process."""
    weight = torch.eye(3, D, dtype=torch.float64)
    labels = torch.arange(2, 2 + sum(sizes())) % 3
    found = class_stats(mine(2 * weight[labels]), make(weight).weight, mine(labels))
    expected = class_stats(2 * weight[labels], weight, labels)
    for name, one, whole in zip(lm.ClassStats._fields, found, expected, strict=True):
        yield from differs(name, one, mine(whole))


def check_equal_logits() -> Iterator[str]:
    """Kobayashi's term is exactly 0 where all logits are equal, however large (float32)."""
    head = make(torch.full((9, D), 1e3).float())
    value = lm.RivalDivergence(reduction="sum", sync=True)(
        torch.ones(2, D), head, torch.tensor([1, 8])
    )
    yield from differs("equal logits", value, torch.zeros(()), 0)


def check_scale() -> Iterator[str]:
    """A learned scale is a parameter of every process: DDP averages its gradient."""
    weight, features = normal(6, 9, D), normal(7, sum(sizes()), D)
    labels = torch.arange(len(features)) % 9
    head, scale = make(weight), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    stats = class_stats(mine(features), head.weight, mine(labels), scale=scale)
    parts = [x for x in stats if x is not None and x.is_floating_point()]
    total = torch.stack(parts).sum() * dist.get_world_size()
    (gradient,) = torch.autograd.grad(total, scale)
    dist.all_reduce(gradient)
    whole = class_stats(features, weight, labels, scale=scale)
    parts = [x for x in whole if x is not None and x.is_floating_point()]
    (want,) = torch.autograd.grad(torch.stack(parts).sum(), scale)
    yield from differs("scale", gradient / dist.get_world_size(), want)


def check_no_gradient_for_features() -> Iterator[str]:
    """A rank without samples has features without gradient; or nobody's features have one."""
    weight, features = normal(8, 9, D), normal(9, sum(sizes()), D)
    labels = torch.arange(len(features)) % 9
    whole = weight.clone().requires_grad_()
    want = lm.CosFace()(features, whole, labels)
    want.backward()
    for frozen in (False, True):
        head, part = make(weight), mine(features)
        part.requires_grad_(not frozen and len(part) > 0)
        lm.CosFace(sync=True)(part, head, mine(labels)).backward()
        yield from differs("weight", head.weight.grad.to_local(), local(head, whole.grad))
    with torch.no_grad():
        value = lm.CosFace(sync=True)(mine(features), head, mine(labels))
    yield from differs("without a graph", value, want)


def check_equal_batches() -> Iterator[str]:
    """Without sync, DDP's average over processes is the mean over the joined batch."""
    weight, features = normal(8, 9, D).requires_grad_(), normal(9, 2 * dist.get_world_size(), D)
    labels, own = torch.arange(len(features)) % 9, slice(2 * dist.get_rank(), None)
    head = make(weight.detach())
    value = lm.CosFace()(features[own][:2], head, labels[own][:2])
    value.backward()
    dist.all_reduce(value.detach_())
    want = lm.CosFace()(features, weight, labels)
    want.backward()
    yield from differs("value", value / dist.get_world_size(), want.detach())
    yield from differs("weight", head.weight.grad.to_local(), local(head, weight.grad))


def check_half() -> Iterator[str]:
    weight, features = normal(10, 9, D).bfloat16(), normal(11, sum(sizes()), D).bfloat16()
    labels = torch.arange(len(features)) % 9
    head, part = make(weight), mine(features).requires_grad_()
    value = lm.CosFace(sync=True, scale=8.0)(part, head, mine(labels))
    value.backward()
    want = lm.CosFace(scale=8.0)(features.requires_grad_(), weight, labels)
    (gradient,) = torch.autograd.grad(want, features)
    yield from differs("bfloat16", value, want, 1e-5)
    yield from differs("gradient", part.grad / dist.get_world_size(), mine(gradient), 1e-2)
    yield from differs("float32", head.predict(part.detach()).scores.dtype == torch.float32, True)


def check_prediction() -> Iterator[str]:
    for num_classes in COUNTS:
        weight = normal(12, num_classes, D).round()  # many equal scores
        features = normal(13, sum(sizes()), D).round()
        for similarity in ("dot", "euclidean"):
            head = make(weight, similarity=similarity)
            for k in range(1, num_classes + 1):
                want = top_classes(features, weight, similarity=similarity, k=k)
                got = head.predict(mine(features), k)
                label = f"C={num_classes}, {similarity}, k={k}"
                yield from differs(f"{label}: scores", got.scores, mine(want.scores))
                yield from differs(f"{label}: classes", got.classes, mine(want.classes))
        got = head.predict(mine(features.float()), num_classes)  # beside a float64 head
        yield from differs(f"{label}: other features", got.scores, mine(want.scores))
    shape = head.predict(torch.ones(2, 3, D, dtype=torch.float64), 2).classes.shape
    yield from differs("shape", tuple(shape), (2, 3, 2))
    whole = features.clone().requires_grad_()
    yield from differs("logits", head(whole), head.to_head()(whole))


def check_sampling() -> Iterator[str]:
    """The sample does not depend on how many processes there are."""
    weight, features = normal(14, 64, D), normal(15, sum(sizes()), D)
    labels = torch.arange(len(features)) * 7 % 64
    head, loss = make(weight, sample_rate=0.5, seed=3), lm.Kobayashi(sync=True, scale=4.0)
    values = []
    for step in range(3):
        head.weight.grad = None
        value = loss(mine(features, step), head, mine(labels, step))
        value.backward()
        whole = weight.clone().requires_grad_()
        marked = whole.view_as(whole)
        marked.class_sample = ClassSample(0.5, 3, step)
        want = lm.Kobayashi(scale=4.0)(features, marked, labels)
        want.backward()
        yield from differs(f"step {step}", value, want)
        got = head.weight.grad.to_local()
        yield from differs(f"step {step}, gradient", got, local(head, whole.grad))
        values.append(round(float(value.detach()), 6))
    if len(set(values)) < 3:
        yield f"the same sample again and again: {values}"
    exact = lm.Kobayashi(scale=4.0)(features, weight, labels)
    yield from differs("evaluation", loss(mine(features), head.eval(), mine(labels)), exact)


class Model(nn.Module):
    """A backbone, replicated, and a head, sharded."""

    def __init__(self, num_classes: int = 9) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, D, dtype=torch.float64)
        self.head = ShardedClassHead(D, num_classes, similarity="cosine", dtype=torch.float64)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05),
    "rowwise_adam": lambda groups: RowwiseAdam(groups, lr=0.05, weight_decay=0.01),
    "head_sgd": lambda groups: HeadSGD(groups, lr=0.1, moment_dtype=None),
}
MOMENTS = {
    "sgd": "momentum_buffer",
    "adamw": "exp_avg",
    "rowwise_adam": "first",
    "head_sgd": "momentum",
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model.backbone.parameters())}, *model.head.param_groups()]


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, *, whole: bool) -> None:
    """The same steps, on pieces of the batches in turn or on the whole of them."""
    loss = lm.ArcFace(scale=8.0, sync=not whole)
    backbone = model.backbone if whole else DistributedDataParallel(model.backbone)
    for step in steps:
        x, labels = normal(20 + step, 10, 3), torch.arange(10) * (step + 1) % 9
        if not whole:
            pieces = [10 - 2 * (dist.get_world_size() - 1), *[2] * (dist.get_world_size() - 1)]
            x, labels = (each.split(pieces)[dist.get_rank()] for each in (x, labels))
        optimizer.zero_grad()
        loss(backbone(x), model.head, labels).backward()
        optimizer.step()


def start() -> tuple[Tensor, Tensor, Tensor]:
    """The parameters that every model of these checks starts from."""
    return normal(16, 9, D), normal(17, D, 3), normal(18, D)


def reference(kind: str, steps: int) -> Any:
    """One process, plain parameters."""
    model = nn.Module()
    model.backbone = nn.Linear(3, D, dtype=torch.float64)
    model.head = lm.ClassHead(D, 9, similarity="cosine", dtype=torch.float64)
    _begin(model)
    train(model, OPTIMIZERS[kind](groups_of(model)), range(steps), whole=True)
    return model


def _begin(model: Any) -> None:
    weight, inner, bias = start()
    model.head.load_state_dict({"weight": weight})
    model.backbone.load_state_dict({"weight": inner, "bias": bias})


def differences_of(model: Any, want: Any, kind: str) -> Iterator[str]:
    got = model.head.weight
    whole = got.full_tensor() if hasattr(got, "full_tensor") else got
    yield from differs(f"{kind}: head", whole.detach(), want.head.weight.detach())
    inner, wanted = model.backbone.weight, want.backbone.weight
    yield from differs(f"{kind}: backbone", inner.detach(), wanted.detach())


def check_optimizer() -> Iterator[str]:
    for kind, build in OPTIMIZERS.items():
        model = Model()
        _begin(model)
        optimizer = build(groups_of(model))
        train(model, optimizer, range(4), whole=False)
        yield from differences_of(model, reference(kind, 4), kind)
        state = optimizer.state[model.head.weight]
        held = tuple(state[MOMENTS[kind]].to_local().shape)
        yield from differs("state held", held, (len(model.head.local_classes), D))


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path, **how: Any) -> None:
    states, optimizer_states = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=folder, **how)


def load(model: Any, optimizer: torch.optim.Optimizer, folder: Path, **how: Any) -> None:
    states, optimizer_states = get_state_dict(model, optimizer)
    given = {"model": states, "optimizer": optimizer_states}
    dcp.load(given, checkpoint_id=folder, **how)
    set_state_dict(
        model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"]
    )


def check_save() -> Iterator[str]:
    """Two steps, saved; the folder's parent is where the next number of ranks looks."""
    for kind, build in OPTIMIZERS.items():
        model = Model()
        _begin(model)
        optimizer = build(groups_of(model))
        train(model, optimizer, range(2), whole=False)
        save(model, optimizer, meeting_folder().parent / f"{kind}-2")
        yield from differences_of(model, reference(kind, 2), kind)
    torch.manual_seed(dist.get_rank())
    head = ShardedClassHead(2, 2 * 4096 + 5, similarity="euclidean")
    if dist.get_rank() == 0:
        torch.save(head.weight.full_tensor().detach(), meeting_folder().parent / "drawn.pt")
    else:
        head.weight.full_tensor()


def check_load_and_save() -> Iterator[str]:
    for kind, build in OPTIMIZERS.items():
        model = Model()
        optimizer = build(groups_of(model))
        load(model, optimizer, meeting_folder().parent / f"{kind}-2")
        yield from differences_of(model, reference(kind, 2), kind)
        train(model, optimizer, range(2, 4), whole=False)
        save(model, optimizer, meeting_folder().parent / f"{kind}-4")
        yield from differences_of(model, reference(kind, 4), kind)
