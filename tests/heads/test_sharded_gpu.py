"""ShardedClassHead on a GPU, with NCCL where torch has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import largemargin as lm
from largemargin.heads import ShardedClassHead
from largemargin.ops.sharded import sampled_classes
from largemargin.ops.shards import ClassSample

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("impl", ["dense", "chunked", "triton", "auto"])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_nccl_is_one_process(nccl: None, impl: str, rate: float) -> None:
    head = ShardedClassHead(32, 5000, similarity="cosine", sample_rate=rate)
    assert head.weight.device.type == "cuda"
    assert head.weight.device_mesh.device_type == "cuda"
    x, labels = torch.randn(64, 32, device="cuda"), torch.randint(5000, (64,), device="cuda")
    plain = head.to_head()
    marked = plain.weight.view_as(plain.weight)
    if rate < 1:
        marked.class_sample = ClassSample(rate, 0, 0)
    # Both work on cosines whatever the prototypes are given as.
    for loss in (lm.ArcFace(scale=16.0, impl=impl), lm.LMSoftmax(scale=16.0, impl=impl)):
        head.draws, head.weight.grad = 0, None
        loss(x, head, labels).backward()
        (wanted,) = torch.autograd.grad(loss(x, marked, labels), plain.weight, retain_graph=True)
        assert_close(head.weight.grad.to_local(), wanted, rtol=1e-3, atol=1e-6)
    best, want = head.predict(x, 7), plain.predict(x, 7)
    assert_close(best.classes, want.classes)
    assert_close(best.scores, want.scores)


def test_samples_are_those_of_the_cpu() -> None:
    present = torch.tensor([3, 70_000])
    on_cpu = sampled_classes(ClassSample(0.2, 1, 2), 10_000, 100_000, present)
    on_gpu = sampled_classes(ClassSample(0.2, 1, 2), 10_000, 100_000, present.cuda())
    assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=0)
