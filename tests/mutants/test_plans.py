"""Plans of memory, number by number, for sizes that are easily counted."""

import pytest
import torch

from largemargin.errors import LargeMarginError
from largemargin.heads import memory_estimate
from largemargin.heads.memory_estimate import estimate_memory, most_classes

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
WORKSPACES = {
    # Of 6 gathered samples, 6 classes here and 7 dimensions: 6 n C + 2 C D numbers.
    ("dense", SINGLE): 4 * (6 * 36 + 2 * 42),
    ("dense", DOUBLE): 8 * (6 * 36 + 2 * 42),
    ("dense", HALF): 4 * (6 * 36 + 2 * 42) + 2 * 4 * 42,
    # In blocks of 10: 4 n B + 3 B D.
    ("chunked", SINGLE): 4 * (4 * 60 + 3 * 70),
    ("chunked", DOUBLE): 8 * (4 * 60 + 3 * 70),
    ("chunked", HALF): 4 * (4 * 60 + 3 * 70) + 2 * 4 * 42,
    # 2 C (n + D) bytes of a chunk, and C + n D numbers.
    ("triton", SINGLE): 2 * 6 * 13 + 4 * (6 + 42),
    ("triton", HALF): 2 * 6 * 13 + 4 * (6 + 42),
}


@pytest.mark.parametrize(("impl", "dtype"), WORKSPACES, ids=str)
def test_bytes_of_a_small_head(monkeypatch, impl, dtype):
    asked = []
    monkeypatch.setattr(memory_estimate, "block_size", lambda *given: asked.append(given) or 10)
    monkeypatch.setattr(memory_estimate, "chunk_bytes", lambda classes: 1000)
    how = {"world_size": 2, "optimizer": "adam", "dtype": dtype, "impl": impl}
    plan = estimate_memory(3, 11, 7, **how)
    size = 6 * 7 * dtype.itemsize
    assert (plan.local_classes, plan.impl) == (6, impl)
    assert (plan.weights, plan.gradients, plan.optimizer_state) == (size, size, 2 * size)
    assert plan.features == 4 * 6 * 7 * max(4, dtype.itemsize)
    assert plan.workspace == WORKSPACES[impl, dtype]
    assert plan.step == 3 * size
    assert plan.kept == 4 * size
    assert plan.total == 4 * size + max(plan.features + plan.workspace, 3 * size)
    assert asked == ([(6, 6, "cuda")] if impl == "chunked" else [])
    monkeypatch.setattr(memory_estimate, "chunk_bytes", lambda classes: 10 * classes)
    least = 60 + 4 * (6 + 42) if impl == "triton" else WORKSPACES[impl, dtype]
    assert estimate_memory(3, 11, 7, **how).workspace == least


def test_bytes_of_a_sample_of_the_classes():
    """A quarter of 500 and those of 4 samples: rows and gradients, and 32 bytes a class."""
    plan = estimate_memory(2, 1000, 7, world_size=2, sample_rate=0.25, impl="dense")
    whole = estimate_memory(2, 1000, 7, world_size=2, impl="dense")
    rows = 4 * (6 * 4 * 129 + 2 * 129 * 7)
    assert plan.workspace == rows + 2 * 4 * 129 * 7 + 32 * 500
    assert whole.workspace == 4 * (6 * 4 * 500 + 2 * 500 * 7)
    all_seen = estimate_memory(400, 1000, 7, world_size=2, sample_rate=0.25, impl="dense")
    assert all_seen.workspace == 4 * (6 * 800 * 500 + 2 * 500 * 7) + 2 * 4 * 500 * 7 + 32 * 500


@pytest.mark.parametrize(
    ("optimizer", "state", "step"),
    [
        ("sgd", 0, 1),
        ("sgd_momentum", 1, 1),
        ("adagrad", 1, 2),
        ("rmsprop", 1, 2),
        ("adam", 2, 3),
        ("adamw", 2, 2),
    ],
)
def test_bytes_of_optimizers(optimizer, state, step):
    plan = estimate_memory(3, 11, 7, optimizer=optimizer)
    assert (plan.optimizer_state, plan.step) == (state * 4 * 77, step * 4 * 77)
    assert estimate_memory(3, 11, 7, optimizer=optimizer, fused=True).step == 0


def test_bytes_of_optimizers_of_heads():
    rowwise, head = (
        estimate_memory(3, 11, 7, optimizer=name, world_size=2)
        for name in ("rowwise_adam", "head_sgd")
    )
    assert (rowwise.optimizer_state, rowwise.step) == (6 * (2 * 7 + 4), 0)
    assert (head.optimizer_state, head.step) == (6 * 2 * 7, 0)


def test_the_peak_is_that_of_the_step_or_of_the_loss():
    step = estimate_memory(1, 100, 1000, optimizer="adam", impl="dense")
    assert step.total == step.kept + step.step > step.kept + step.features + step.workspace
    loss = estimate_memory(100, 100, 1, optimizer="sgd", impl="dense")
    assert loss.total == loss.kept + loss.features + loss.workspace > loss.kept + loss.step
    for plan in (step, loss):
        assert plan.fits(plan.total / 2**30)
        assert not plan.fits((plan.total - 1) / 2**30)


def test_kernels_by_device_and_dtype():
    """Dense up to 2^25 logits of a GPU in bfloat16, 2^27 in float64 and 2^22 on a CPU."""
    many = {"num_samples": 2**10, "num_classes": 2**15 + 1, "dim": 4}
    assert estimate_memory(**{**many, "num_classes": 2**15}).impl == "dense"
    assert estimate_memory(**many).impl == "triton"
    assert estimate_memory(**many, dtype=HALF).impl == "triton"
    assert estimate_memory(**many, dtype=DOUBLE).impl == "dense"
    assert estimate_memory(**{**many, "num_classes": 2**17 + 1}, dtype=DOUBLE).impl == "chunked"
    assert estimate_memory(**{**many, "num_classes": 2**12}, device="cpu").impl == "dense"
    assert estimate_memory(**{**many, "num_classes": 2**12 + 1}, device="cpu").impl == "chunked"


@pytest.mark.parametrize(
    ("name", "just", "beyond"),
    [
        ("num_samples", 0, -1),
        ("num_classes", 2, 1),
        ("dim", 1, 0),
        ("world_size", 1, 0),
        ("sample_rate", 1.0, 1.01),
        ("sample_rate", 0.01, 0.0),
    ],
)
def test_limits_of_plans(name, just, beyond):
    given = {"num_samples": 3, "num_classes": 11, "dim": 7}
    assert estimate_memory(**{**given, name: just}).total > 0
    with pytest.raises(LargeMarginError, match="num_classes|at least 2" if beyond == 1 else name):
        estimate_memory(**{**given, name: beyond})
    with pytest.raises(LargeMarginError, match="floating point"):
        estimate_memory(**given, dtype=torch.int8)


OTHERS = {
    "world_size": 2,
    "optimizer": "adam",
    "fused": True,
    "dtype": HALF,
    "impl": "chunked",
    "sample_rate": 0.5,
}


@pytest.mark.parametrize("how", [{}, *({k: v} for k, v in OTHERS.items()), OTHERS], ids=str)
def test_the_most_classes_that_fit(how):
    for gib in (2**-8, 2**-6):
        most = most_classes(gib, 16, 32, **how)
        assert estimate_memory(16, most, 32, **how).fits(gib)
        # Classes are shared out evenly, so that one more on each process is one more in all.
        more = most + how.get("world_size", 1)
        assert not estimate_memory(16, more, 32, **how).fits(gib)


def test_two_classes_or_none():
    two = estimate_memory(16, 2, 32).total
    assert most_classes(two / 2**30, 16, 32) == 2
    assert most_classes((two - 1) / 2**30, 16, 32) == 0
    with pytest.raises(LargeMarginError, match="gib"):
        most_classes(0, 16, 32)
