"""estimate_memory: its arithmetic, and that it bounds what a training step allocates."""

import pytest
import torch
from held_bytes import held_by_tensors

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.heads import ShardedClassHead, estimate_memory, most_classes
from largemargin.heads.memory_estimate import HEAD_OPTIMIZERS, OPTIMIZERS
from largemargin.heads.optim import HeadSGD, RowwiseAdam

STEP = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p),
}


def test_weights_are_shared_out() -> None:
    one = estimate_memory(64, 1_000_000, 512, optimizer="adamw")
    assert one.weights == one.gradients == 1_000_000 * 512 * 4
    assert one.optimizer_state == 2 * one.weights
    assert one.local_classes == 1_000_000
    four = estimate_memory(64, 1_000_001, 512, world_size=4, optimizer="adamw")
    assert four.local_classes == 250_001
    assert four.features == 4 * one.features
    assert four.kept < one.kept / 3.9
    assert one.total == one.kept + one.step
    assert estimate_memory(64, 1_000_000, 512, optimizer="adamw", fused=True).step == 0


def test_auto_decides_as_class_stats_does() -> None:
    most = 2**25 // 64
    assert estimate_memory(64, most, 8).impl == "dense"
    assert estimate_memory(64, most + 1, 8).impl == "triton"
    assert estimate_memory(64, most + 1, 8, world_size=2).impl == "triton"
    assert estimate_memory(64, 65_536, 8, device="cpu").impl == "dense"
    assert estimate_memory(64, 65_537, 8, device="cpu").impl == "chunked"
    assert estimate_memory(64, 4 * most, 8, dtype=torch.float64).impl == "dense"
    assert estimate_memory(64, 4 * most + 1, 8, dtype=torch.float64).impl == "chunked"
    assert estimate_memory(64, 650_000, 8, sample_rate=0.05).impl == "dense"


def test_workspace_does_not_grow_with_classes() -> None:
    plans = [estimate_memory(256, c, 64, impl="chunked") for c in (10**6, 10**7)]
    assert len({plan.workspace for plan in plans}) == 1
    # Of the kernels: the inverse norms do, 4 bytes a class.
    plans = [estimate_memory(256, c, 64, impl="triton") for c in (10**6, 10**7)]
    assert plans[1].workspace - plans[0].workspace == 4 * 9 * 10**6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("sizes", [(256, 20_000, 64), (32, 20_000, 128)], ids=str)
def test_it_bounds_what_a_loss_allocates(sizes, impl, dtype) -> None:
    """Never below the measured peak, for the hungriest loss not far above it."""
    num_samples, num_classes, dim = sizes
    plan = estimate_memory(*sizes, impl=impl, dtype=dtype, device="cpu")
    room = plan.gradients + plan.features + plan.workspace
    peaks = {}
    for loss in (lm.ArcFace(impl=impl), lm.Kobayashi(impl=impl)):
        head = lm.ClassHead(dim, num_classes, bias=False, dtype=dtype)
        x = torch.randn(num_samples, dim, requires_grad=True)
        labels = torch.randint(num_classes, (num_samples,))
        peaks[type(loss).__name__] = held_by_tensors(lambda: loss(x, head, labels).backward())  # noqa: B023
    assert max(peaks.values()) <= room, peaks
    assert room <= 2.5 * max(peaks.values()), peaks


def test_it_bounds_what_a_sampled_loss_allocates() -> None:
    head = ShardedClassHead(64, 40_000, bias=False, sample_rate=0.1)
    x, labels = torch.randn(128, 64, requires_grad=True), torch.randint(40_000, (128,))
    peak = held_by_tensors(lambda: lm.Kobayashi()(x, head, labels).backward())
    plan = estimate_memory(128, 40_000, 64, sample_rate=0.1, device="cpu")
    room = plan.gradients + plan.features + plan.workspace
    assert peak <= room <= 2.5 * peak


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_knows_what_optimizers_keep(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(500, 400))
    weight.grad = torch.randn(500, 400)
    optimizer = STEP[name]([weight])
    optimizer.step()
    plan = estimate_memory(1, 500, 400, optimizer=name)
    kept = [state for state in optimizer.state[weight].values() if isinstance(state, torch.Tensor)]
    held = sum(state.nbytes for state in kept if state.shape == weight.shape)
    assert plan.optimizer_state == held
    assert 0.99 * plan.step <= held_by_tensors(optimizer.step) <= 1.01 * plan.step


@pytest.mark.parametrize("name", HEAD_OPTIMIZERS)
def test_it_knows_what_head_optimizers_keep(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(500, 400))
    weight.grad = torch.randn(500, 400)
    optimizer = {"rowwise_adam": RowwiseAdam, "head_sgd": HeadSGD}[name]([weight])
    optimizer.step()
    plan = estimate_memory(1, 500, 400, optimizer=name)
    held = sum(state.nbytes for key, state in optimizer.state[weight].items() if key != "step")
    assert plan.optimizer_state == held
    assert plan.step == 0


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["dense", "chunked", "triton"])
def test_it_bounds_a_training_step_on_a_gpu(impl: str) -> None:
    before = torch.cuda.memory_allocated()  # what other tests left
    head = ShardedClassHead(256, 100_000, similarity="cosine", device="cuda")
    optimizer = torch.optim.SGD(head.param_groups(lr=0.1), momentum=0.9)
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    labels = torch.randint(100_000, (512,), device="cuda")
    for step in range(2):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        precision = "bf16" if impl == "triton" else None
        lm.Kobayashi(impl=impl, precision=precision)(x, head, labels).backward()
        optimizer.step()
    plan = estimate_memory(512, 100_000, 256, impl=impl)
    assert torch.cuda.max_memory_allocated() - before <= plan.total + 64 * 2**20


def test_the_most_classes_that_fit() -> None:
    for options in ({}, {"world_size": 8}, {"dtype": torch.bfloat16, "optimizer": "adamw"}):
        most = most_classes(20, 256, 512, **options)
        assert estimate_memory(256, most, 512, **options).fits(20)
        assert not estimate_memory(256, most + options.get("world_size", 1), 512, **options).fits(
            20
        )
    assert most_classes(1e-6, 256, 512) == 0


def test_it_prints_what_it_counts_and_what_not() -> None:
    plan = estimate_memory(256, 10**6, 512, world_size=8, optimizer="adamw", sample_rate=0.1)
    text = str(plan)
    for part in ("125,000 classes each", "optimizer state (adamw)", "0.1 of them", "Not counted"):
        assert part in text
    assert "the backbone" in " ".join(plan.left_out)
    assert plan.as_dict()["total"] == plan.total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sdg"}, "optimizer must be one of 'sgd', 'sgd_momentum'"),
        ({"impl": "fast"}, "impl must be one of"),
        ({"world_size": 0}, "world_size must be"),
        ({"dtype": "float32"}, "dtype must be a floating point torch.dtype"),
        ({"dtype": torch.int8}, "dtype must be"),
        ({"sample_rate": 0}, "sample_rate must be"),
        ({"num_samples": -1}, "num_samples must be"),
        ({"num_classes": 1}, "at least 2 classes"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    sizes = {"num_samples": 4, "num_classes": 10, "dim": 3}
    with pytest.raises(LargeMarginError, match=message):
        estimate_memory(**{**sizes, **options})
