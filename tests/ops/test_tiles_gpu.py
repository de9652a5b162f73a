"""The compiled kernels on a GPU: exact at full size, without waiting, in graphs, within memory."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ops.tile_problems import STATISTICS, check_budget, made, outcome
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from waiting import no_synchronisation

from largemargin import ArcFace, Kobayashi, class_stats
from largemargin.errors import LargeMarginError
from largemargin.heads.topk import top_classes
from largemargin.ops import SIMILARITIES

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.gpu
CUDA = "cuda"
N, D, MANY, MILLION = 1000, 512, 100_003, 1_000_000
TWO = ("target", "rest")

# The package exports a function of the module's name.
OPERATOR = sys.modules["largemargin.ops.class_stats"]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def stepping(loss: nn.Module, *given: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Value and gradients of (features, prototypes, labels), again and again."""
    leaves = [tensor.requires_grad_() for tensor in given[:2]]

    def step() -> tuple[Tensor, ...]:
        value = loss(*leaves, given[2])
        return (value.detach(), *torch.autograd.grad(value, leaves))

    return step


def assert_equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def test_budget_at_a_hundred_thousand_classes() -> None:
    problem = made(N, MANY, D, scale=64.0, bias=False, device=CUDA)
    check_budget(problem, TWO, "bf16", similarity="cosine")


def test_budget_of_all_statistics_with_biases() -> None:
    check_budget(made(N, 20_011, D, scale=4.0, device=CUDA), precision="bf16", similarity="dot")


def test_budget_at_a_million_classes() -> None:
    problem = made(N, MILLION, D, scale=64.0, bias=False, device=CUDA)
    check_budget(problem, TWO, "bf16", similarity="cosine", plain="chunked")


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("precision", ["bf16", "tf32", "highest"])
def test_budget_of_every_similarity(similarity: str, precision: str) -> None:
    check_budget(made(130, 2053, 72, device=CUDA), precision=precision, similarity=similarity)


@pytest.mark.parametrize(
    ("shape", "precision"),
    [((1, 2, 1), "bf16"), ((257, 1000, 1), "bf16"), ((1, 129, 24), "highest")],
    ids=str,
)
def test_budget_at_and_off_the_tiles(shape: tuple[int, int, int], precision: str) -> None:
    check_budget(made(*shape, device=CUDA), precision=precision, similarity="cosine")


@pytest.mark.parametrize("sign", [1, -1], ids=["aligned", "opposite"])
def test_features_on_and_opposite_their_prototypes(sign: int) -> None:
    problem = made(N, 5000, D, scale=64.0, bias=False, device=CUDA)
    problem.features.copy_(sign * problem.prototypes[problem.labels])
    check_budget(problem, TWO, "bf16", similarity="cosine")


def test_large_logits() -> None:
    problem = made(N, 5000, D, bias=False, device=CUDA)
    problem.features.mul_(100)
    problem.prototypes.mul_(100)
    got = check_budget(problem, precision="bf16", similarity="dot")
    assert got["rest"].max() > 1e4


@pytest.mark.parametrize("features", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prototypes", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(features: torch.dtype, prototypes: torch.dtype) -> None:
    problem = made(300, 3001, 128, bias=False, device=CUDA)
    problem = problem.to(features=features, prototypes=prototypes)
    check_budget(problem, TWO, "bf16", similarity="cosine")


def test_labels_out_of_range_ties_and_nan() -> None:
    features, weight = torch.ones(4, 64, device=CUDA), torch.zeros(5000, 64, device=CUDA)
    weight[[700, 3000, 4999]] = 1.0
    features[3, 5] = torch.nan
    labels = torch.tensor([0, 700, 5000, 0], device=CUDA)
    stats = class_stats(features, weight, labels, impl="triton", precision="bf16", validate=False)
    torch.cuda.synchronize()
    assert stats.rival_index[:2].tolist() == [700, 3000]
    assert bool(((stats.rival_index >= 0) & (stats.rival_index < 5000)).all())
    for name in STATISTICS:
        assert getattr(stats, name).isnan().tolist() == [False, False, True, True], name


def test_unaligned_and_strided_inputs() -> None:
    problem = made(64, 1000, 64, bias=False, device=CUDA)
    for precision in ("bf16", "highest"):
        how: dict[str, Any] = {"impl": "triton", "precision": precision, "scale": 1.0}
        wanted = outcome(problem, needs=("features", "prototypes"), **how)
        for place in ("features", "prototypes"):
            given = problem.leaves() | {"labels": problem.labels, "bias": None}
            flat = torch.cat([given[place].new_zeros(1), given[place].flatten()])
            wide = torch.cat([given[place], given[place]], 1)[:, :64]
            for other in (flat[1:].view_as(given[place]), wide, given[place].T.contiguous().T):
                changed = type(problem)(**given | {place: other})
                found = outcome(changed, needs=("features", "prototypes"), **how)
                for name, value in wanted.items():
                    assert torch.equal(found[name], value), f"{precision} {place} {name}"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", [ArcFace, Kobayashi])
def test_no_waiting_and_the_same_numbers_again(kind: Any) -> None:
    problem = made(N, MANY, D, device=CUDA)
    loss = kind(impl="triton", precision="bf16").to(CUDA)
    step = stepping(loss, problem.features, problem.prototypes, problem.labels)
    first = step()  # compiles and loads, which may wait
    with no_synchronisation():
        again = step()
    assert_equal(first, again)


@pytest.mark.parametrize("kind", [ArcFace, Kobayashi])
def test_a_cuda_graph_is_the_eager_step(kind: Any) -> None:
    problems = [made(N, 20_000, D, seed=seed, device=CUDA) for seed in range(3)]
    static = problems[0]
    loss = kind(impl="triton", precision="bf16").to(CUDA)
    step = stepping(loss, static.features, static.prototypes, static.labels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for problem in problems[1:]:
        with torch.no_grad():
            static.features.copy_(problem.features)
            static.prototypes.copy_(problem.prototypes)
            static.labels.copy_(problem.labels)
        graph.replay()
        value, grad_features, grad_weight = step()
        assert_equal((captured[0], captured[2]), (value, grad_weight))
        assert_close(captured[1], grad_features, rtol=1e-5, atol=1e-7)  # a product of cuBLAS


@pytest.mark.needs_cxx
@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_without_a_break(autocast: bool) -> None:
    torch._dynamo.reset()
    loss = ArcFace(scale=16.0, impl="triton")
    traced = torch.compile(loss, fullgraph=True)
    for samples in (256, 300):
        found = []
        for function in (loss, traced):
            problem = made(samples, 5000, 64, device=CUDA)
            leaves = problem.features.requires_grad_(), problem.prototypes.requires_grad_()
            with torch.autocast(CUDA, torch.bfloat16, enabled=autocast):
                value = function(*leaves, problem.labels)
            found.append((value.detach(), *torch.autograd.grad(value, leaves)))
        assert_close(found[1], found[0], rtol=1e-2 if autocast else 1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_the_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("tile_stats", "chunked_stats"):
        original = getattr(OPERATOR, name)
        monkeypatch.setattr(
            OPERATOR, name, lambda *args, f=original, n=name: taken.append(n) or f(*args)
        )
    body, problem = nn.Linear(64, 64, device=CUDA), made(128, 40_000, 64, device=CUDA)
    weight, loss = problem.prototypes.requires_grad_(), ArcFace(scale=16.0)
    with torch.autocast(CUDA, dtype):
        features = body(problem.features)
        assert features.dtype == dtype
        got = loss(features, weight, problem.labels)
    assert taken == ["tile_stats"]
    want = loss(features.float(), weight, problem.labels)
    assert taken == ["tile_stats", "chunked_stats"]
    assert_close(got, want, rtol=1e-2, atol=1e-2)
    scaler = torch.amp.GradScaler(CUDA, init_scale=2.0**12, enabled=dtype == torch.float16)
    scaled = torch.autograd.grad(scaler.scale(got), (weight, *body.parameters()), retain_graph=True)
    plain = torch.autograd.grad(want, (weight, *body.parameters()))
    for one, other in zip(scaled, plain, strict=True):
        factor = scaler.get_scale() if scaler.is_enabled() else 1.0
        error = (one.float() / factor - other).norm() / other.norm()
        assert error < 3e-2


def test_checkpointing_around_backbone_and_loss() -> None:
    body, problem = nn.Linear(64, 64, device=CUDA), made(128, 5000, 64, device=CUDA)
    weight, loss = problem.prototypes.requires_grad_(), ArcFace(impl="triton", precision="bf16")

    def whole(x: Tensor) -> Tensor:
        value: Tensor = loss(body(x), weight, problem.labels)
        return value

    found = []
    for value in (
        whole(problem.features),
        loss(checkpoint(body, problem.features, use_reentrant=False), weight, problem.labels),
        checkpoint(whole, problem.features, use_reentrant=False),
    ):
        found.append((value.detach(), *torch.autograd.grad(value, (weight, *body.parameters()))))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("kind", [ArcFace, Kobayashi])
def test_memory_at_a_million_classes(kind: Any) -> None:
    """Beyond the gradients, at most 256 MiB for the 4 GB of logits, however many statistics."""
    problem = made(1024, MILLION, D, device=CUDA)
    loss = kind(impl="triton", precision="bf16").to(CUDA)
    step = stepping(loss, problem.features, problem.prototypes, problem.labels)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    gradients = sum(tensor.nbytes for tensor in result)
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra < 256 * 2**20, f"{extra / 2**20:.0f} MiB"


def test_more_numbers_than_an_int32_counts() -> None:
    """5,000,000 x 512 prototypes: the last rows lie beyond 2**31 elements."""
    many = 5_000_000
    generator = torch.Generator(CUDA).manual_seed(0)
    weight = torch.randn(many, D, generator=generator, device=CUDA, dtype=torch.bfloat16)
    features = torch.randn(64, D, generator=generator, device=CUDA)
    labels = torch.arange(many - 64, many, device=CUDA)
    labels[::2] = torch.arange(32, device=CUDA)
    weight[many - 100] = features[0].bfloat16()  # the rival of the first sample
    weight[labels[1]] = features[1].bfloat16()
    leaves = features.requires_grad_(), weight.requires_grad_()
    stats = class_stats(
        *leaves, labels, similarity="cosine", scale=16.0, impl="triton", precision="bf16"
    )
    assert stats.rival_index[0].item() == many - 100
    assert_close(stats.target[1].item(), 16.0, rtol=2e-2, atol=0)
    value = (stats.rest - stats.target).sum()
    grad_features, grad_weight = torch.autograd.grad(value, leaves)
    few = torch.cat([labels, labels.new_tensor([many - 100, many // 2, many - 1000])]).unique()
    picked = weight.detach()[few].double().requires_grad_()
    exact = features.detach().double().requires_grad_()
    logits = 16 * nn.functional.normalize(exact) @ nn.functional.normalize(picked).T
    own = few[None, :] == labels[:, None]
    assert_close(stats.target.double(), logits[own].detach(), rtol=1e-2, atol=5e-2)
    # Of these classes alone, with the sum over all others as a constant.
    shares = torch.where(own, -1.0, torch.exp(logits - stats.rest.detach()[:, None].double()))
    (wanted,) = torch.autograd.grad(logits, picked, shares.detach())
    error = (grad_weight[few].double() - wanted).norm() / wanted.norm()
    assert error < 1e-2
    assert bool(grad_features.isfinite().all())


def test_best_classes_at_a_million() -> None:
    problem = made(256, MILLION, 64, bias=False, device=CUDA)
    problem.prototypes[problem.labels] = 3 * problem.features
    how: dict[str, Any] = {"similarity": "cosine", "scale": 16.0}
    got = top_classes(problem.features, problem.prototypes, k=10, precision="bf16", **how)
    given = problem.features.double(), problem.prototypes.double()
    want = top_classes(*given, k=10, chunk_size=2**16, **how)
    same = got.classes == want.classes
    assert bool((got.classes[:, 0] == want.classes[:, 0]).all())
    assert same.float().mean() > 0.99
    assert_close(got.scores[same].double(), want.scores[same], rtol=1e-5, atol=5e-5)
    one = top_classes(problem.features, problem.prototypes, precision="bf16", **how)
    assert torch.equal(one.classes, want.classes[:, :1])


def test_second_derivatives_and_refusals() -> None:
    problem = made(16, 40, 8, device=CUDA)
    found = []
    for impl in ("triton", "dense"):
        features = problem.features.clone().requires_grad_()
        value = ArcFace(scale=4.0, impl=impl)(features, problem.prototypes, problem.labels)
        if impl == "triton":
            with pytest.warns(UserWarning, match="second derivative"):
                (first,) = torch.autograd.grad(value, features, create_graph=True)
        else:
            (first,) = torch.autograd.grad(value, features, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), features)[0])
    assert_close(*found, rtol=1e-3, atol=1e-6)
    given = problem.features.double(), problem.prototypes.double(), problem.labels
    with pytest.raises(LargeMarginError, match="float64"):
        class_stats(*given, impl="triton")
    assert class_stats(*given).rest is not None
