"""On a GPU the numbers are those of the CPU."""

from typing import Any

import pytest
import torch
from measuring.alike import compare_parts, same
from torch import nn

import largemargin as lm
from largemargin.geometry import pairs
from largemargin.measuring import embed, measure, measure_arrays

pytestmark = pytest.mark.gpu

N, C, D = 3000, 7, 16


def network(similarity: str = "dot") -> nn.Sequential:
    head = lm.ClassHead(D, C, similarity=similarity)
    return nn.Sequential(nn.Linear(5, D), nn.Tanh(), head).double()


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (N,), generator=generator)
    return list(zip(x.split(700), y.split(700), strict=True))


@pytest.mark.parametrize("similarity", ["dot", "cosine", "euclidean"])
def test_a_model_on_the_gpu(similarity: str) -> None:
    net = network(similarity)
    others = [torch.randn(50, 5).double()]
    want = measure(net, loader(), pairwise=True, ood=others)
    got = measure(net.cuda(), loader(), pairwise=True, ood=others)
    same(got, want, rtol=1e-7)
    on_device = [(x.cuda(), y.cuda()) for x, y in loader()]
    same(measure(net, on_device, pairwise=True, ood=others), want, rtol=1e-7)


def test_layers_on_the_gpu() -> None:
    net = nn.Sequential(nn.Linear(5, D), nn.Tanh(), nn.Linear(D, 3), nn.Linear(3, C)).double()
    options: dict[str, Any] = {"layers": ["1", "2"], "pairwise": True, "sphere": True}
    want = measure(net, loader(), **options)
    same(measure(net.cuda(), loader(), **options), want, rtol=1e-7)
    blocks = measure(net, loader(), layers="blocks")
    assert blocks.layers is not None
    assert [each.name for each in blocks.layers] == ["1", "2"]
    broken = loader()
    broken[1][0][4, 0] = float("nan")
    with pytest.raises(lm.LargeMarginError, match="sample 704 has NaN"):
        measure(net, broken, layers=["1"])


def test_embeddings_on_the_gpu() -> None:
    net = network()
    options: dict[str, Any] = {"layers": ["0"], "method": "pca", "noise": 0.1, "max_samples": 70}
    want = embed(net, loader(), **options)
    got = embed(net.cuda(), loader(), **options)
    compare_parts(got.to_dict(), want.to_dict(), 1e-6)


def test_arrays_on_the_gpu() -> None:
    features, labels = torch.randn(N, D), torch.arange(N) % C
    weight, bias = torch.randn(C, D), torch.randn(C)
    want = measure_arrays(features, labels, weight, bias, pairwise=True)
    moved = (each.cuda() for each in (features, labels, weight, bias))
    same(measure_arrays(*moved, pairwise=True), want, rtol=1e-7)
    mixed = measure_arrays(features, labels, weight.cuda(), bias.cuda(), pairwise=True)
    same(mixed, want, rtol=1e-7)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_pairs_are_exact_whatever_products_are(precision: str) -> None:
    points = torch.randn(5000, 32, device="cuda")
    points[7] = points[4000] + 1e-4
    groups = torch.arange(5000, device="cuda") % 3
    usual = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert pairs.closest_pair(points) == (7, 4000)
        near, far = pairs.closest_pair(points, groups), pairs.farthest_pair(points)
    finally:
        torch.set_float32_matmul_precision(usual)
    assert near == pairs.closest_pair(points.cpu(), groups.cpu())
    assert far == pairs.farthest_pair(points.cpu())


def test_autocast_and_half_precision() -> None:
    net = network().float().cuda()
    data = [(x.float(), y) for x, y in loader()]
    exact = measure(net, data)
    with torch.autocast("cuda", torch.bfloat16):
        rough = measure(net, data)
    assert rough.loss == pytest.approx(exact.loss, rel=0.02)
    half = measure(net.half(), [(x.half(), y) for x, y in data], pairwise=True)
    assert half.loss == pytest.approx(exact.loss, rel=0.02)
    assert half.notes == ()


def test_nan_features_are_refused() -> None:
    data = loader()
    data[2][0][5, 0] = float("nan")
    with pytest.raises(lm.LargeMarginError, match="sample 1405 has NaN"):
        measure(network().cuda(), data)


def test_memory_does_not_grow_with_the_data() -> None:
    """200,000 samples of 512 numbers are 400 MB; what is kept of each is 15 numbers."""
    net = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    x, y = torch.randn(2000, 4), torch.arange(2000) % 10
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = measure(net, [(x, y)] * 100)
    assert found.samples == 200_000
    assert torch.cuda.max_memory_allocated() - before < 150e6
