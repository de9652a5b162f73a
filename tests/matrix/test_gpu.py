"""On a CUDA device: the numbers of the CPU, no waiting for the device, no device-side asserts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix.loss_calls import (
    CLASSES,
    Trainer,
    arguments,
    build,
    problem,
    value_and_gradients,
)
from torch import Tensor, nn
from waiting import no_synchronisation

from largemargin import (
    LOSSES,
    ArcFace,
    CentroidBank,
    CosFace,
    CrossEntropy,
    Discriminative,
    Kobayashi,
    LMSoftmax,
    class_stats,
)
from largemargin.ops import SIMILARITIES

pytestmark = pytest.mark.gpu
CUDA = "cuda"

# Of float32, of TF32's 10-bit and of bfloat16's 7-bit products, relative to the largest entry.
BUDGETS = {None: 2e-5, "highest": 2e-5, "tf32": 4e-3, "bf16": 3e-2}
STATISTICS = ("target", "rival", "rest", "spread", "mean")
N, C, D = 4100, 600, 64  # three blocks of classes for the chunked implementation


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(CUDA, dtype)


def labels(seed: int, num: int, classes: int) -> Tensor:
    return torch.randint(classes, (num,), generator=torch.Generator().manual_seed(seed)).to(CUDA)


def assert_near(got: Tensor, want: Tensor, budget: float, name: str) -> None:
    error = (got.detach().double().cpu() - want.detach()).abs().max()
    limit = budget * want.detach().abs().max().clamp_min(1e-3)
    assert error <= limit, f"{name}: off by {error:.3g}, allowed {limit:.3g}"


def stats_and_gradients(
    features: Tensor, weight: Tensor, bias: Tensor, y: Tensor, exact: bool, **options: Any
) -> dict[str, Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (features, weight, bias)]
    stats = class_stats(leaves[0], leaves[1], y, bias=leaves[2], scale=2.0, **options)
    values = {name: getattr(stats, name) for name in STATISTICS}
    factors = torch.linspace(-1, 1, len(y), dtype=torch.float64).to(y.device)
    # Rounded logits may choose another rival, whose gradient is another one altogether.
    used = [name for name in STATISTICS if exact or name != "rival"]
    total = sum((k + 1) * (values[name] * factors).sum() for k, name in enumerate(used))
    gradients = torch.autograd.grad(total, leaves)
    return values | dict(zip(("d features", "d weight", "d bias"), gradients, strict=True))


@pytest.mark.parametrize("precision", BUDGETS)
@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_class_stats_agree_with_the_cpu(similarity: str, impl: str, precision: Any) -> None:
    features, weight = normal(0, N, D) * D**-0.25, normal(1, C, D) * D**-0.25
    bias, y = 0.1 * normal(2, C), labels(3, N, C)
    exact = precision in (None, "highest")
    how = {"similarity": similarity, "impl": impl}
    before = torch.backends.cuda.matmul.fp32_precision
    got = stats_and_gradients(features, weight, bias, y, exact, precision=precision, **how)
    assert torch.backends.cuda.matmul.fp32_precision == before
    reference = [tensor.double().cpu() for tensor in (features, weight, bias)]
    want = stats_and_gradients(*reference, y.cpu(), exact, **how)
    for name in want:
        assert got[name].dtype == torch.float32
        assert_near(got[name], want[name], BUDGETS[precision], name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", ["dense", "chunked"])
def test_class_stats_of_other_dtypes(impl: str, dtype: torch.dtype) -> None:
    features = normal(0, 300, D, dtype=dtype) * D**-0.25
    weight, y = normal(1, C, D, dtype=dtype) * D**-0.25, labels(3, 300, C)
    got = class_stats(features, weight, y, impl=impl)
    want = class_stats(features.double().cpu(), weight.double().cpu(), y.cpu())
    wanted_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for name in STATISTICS:
        assert getattr(got, name).dtype == wanted_dtype
        budget = 1e-12 if dtype == torch.float64 else 1e-4
        assert_near(getattr(got, name), getattr(want, name), budget, name)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_agrees_with_the_cpu(name: str) -> None:
    here, there = build(name), build(name).to(CUDA)
    for seed in range(2):
        want = value_and_gradients(here, problem(seed))
        got = value_and_gradients(there, problem(seed, device=CUDA))
        torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-4, atol=1e-5)
        for leaf, gradient in want[1].items():
            torch.testing.assert_close(got[1][leaf].cpu(), gradient, rtol=1e-4, atol=1e-5)
        for key, value in here.state_dict().items():
            torch.testing.assert_close(there.state_dict()[key].cpu(), value, rtol=1e-5, atol=1e-6)


FIVE: dict[str, Callable[[], nn.Module]] = {
    "CosFace": lambda: CosFace(scale=8.0),
    "CosFace chunked": lambda: CosFace(scale=8.0, impl="chunked"),
    "CosFace triton": lambda: CosFace(scale=8.0, impl="triton"),
    "CosFace per class": lambda: CosFace(margin=torch.full((64,), 0.2), weight=torch.ones(64)),
    "CosFace tf32": lambda: CosFace(precision="tf32"),
    "ArcFace": lambda: ArcFace(scale=8.0),
    "LMSoftmax": lambda: LMSoftmax(scale=8.0),
    "Kobayashi": lambda: Kobayashi(),
    "CrossEntropy": lambda: CrossEntropy(label_smoothing=0.1),
    "Discriminative": lambda: Discriminative(64, 16),
    "Discriminative both": lambda: Discriminative(64, 16, strategy="both", first_seen="full"),
    "Discriminative accumulate": lambda: Discriminative(64, 16, accumulate=2),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("num", [128, 24], ids=["N>C", "N<C"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FIVE)
def test_no_forward_or_backward_waits_for_the_device(name: str, autocast: bool, num: int) -> None:
    loss = FIVE[name]().to(CUDA)
    weight, y = normal(1, 64, 16).requires_grad_(), labels(2, num, 64)
    y[3] = -100
    features = normal(0, num, 16).requires_grad_()
    for attempt in range(2):
        # The first run loads kernels and makes cuBLAS handles, which may wait.
        with torch.autocast(CUDA, torch.bfloat16, enabled=autocast):
            if attempt == 0:
                loss(features, weight, y).backward()
                continue
            with no_synchronisation():
                value = loss(features, weight, y)
    with no_synchronisation():
        value.backward()
    assert torch.isfinite(value)


@pytest.mark.parametrize("impl", ["auto", "chunked"])
@pytest.mark.parametrize("name", [name for name in LOSSES if "labels" in LOSSES[name].needs])
def test_a_label_out_of_range_is_nan_and_no_device_assert(name: str, impl: str) -> None:
    if impl == "chunked" and ("chunked" in LOSSES[name].refuses or "logits" in LOSSES[name].needs):
        pytest.skip(f"{name} has no chunked form")
    found = {}
    for bad in (-1, CLASSES, 10**6):
        loss, given = build(name, impl=impl).to(CUDA), problem(device=CUDA)
        given["labels"][2] = bad
        positional, options = arguments(loss, given)
        value = loss(*positional, **options)
        value.backward()
        torch.cuda.synchronize()
        found[bad] = value.item()
        for key, state in loss.state_dict().items():
            assert torch.isfinite(state.double()).all(), key
    assert all(value != value for value in found.values()), f"{name}: {found}"


def test_validate_raises_on_the_device_when_asked() -> None:
    y = torch.tensor([0, 7], device=CUDA)
    with pytest.raises(ValueError, match=r"labels must lie in"):
        CosFace(validate=True)(normal(0, 2, 4), normal(1, 5, 4), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [8.0, 64.0])
@pytest.mark.parametrize("kind", [CosFace, ArcFace, LMSoftmax, Kobayashi, Discriminative])
def test_autocast_is_close_to_float32(kind: Any, scale: float, dtype: torch.dtype) -> None:
    make = {
        Kobayashi: lambda: Kobayashi(similarity="cosine", scale=scale),
        Discriminative: lambda: Discriminative(64, 16),
    }.get(kind, lambda: kind(scale=scale))
    loss, exact = make().to(CUDA), make().to(CUDA)
    body = nn.Linear(32, 16, device=CUDA)
    weight, y, x = normal(1, 64, 16).requires_grad_(), labels(2, 128, 64), normal(0, 128, 32)
    with torch.autocast(CUDA, dtype):
        features = body(x)
        assert features.dtype == dtype
        got = loss(features, weight, y)
    want = exact(features.float(), weight, y)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    scaler = torch.amp.GradScaler(CUDA, init_scale=128.0, enabled=dtype == torch.float16)
    scaler.scale(got).backward()
    for parameter in (weight, *body.parameters()):
        assert torch.isfinite(parameter.grad).all()
    for buffer in loss.buffers():
        assert buffer.dtype not in (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FIVE)
def test_an_empty_batch_is_zero(name: str, autocast: bool) -> None:
    loss = FIVE[name]().to(CUDA)
    features, weight = normal(0, 0, 16).requires_grad_(), normal(1, 64, 16).requires_grad_()
    with torch.autocast(CUDA, torch.bfloat16, enabled=autocast):
        value = loss(features, weight, labels(2, 0, 64))
    value.backward()
    assert value.item() == 0
    assert (weight.grad == 0).all()


def test_chunked_keeps_no_logits_and_many_classes_need_no_square() -> None:
    many, rows = 1_000_000, 512
    weight = normal(1, many, 16).requires_grad_()
    features, y = normal(0, rows, 16).requires_grad_(), labels(2, rows, many)
    for loss in (CosFace(impl="chunked"), Discriminative(many, 16)):
        loss.to(CUDA)
        loss(features, weight, y).backward()
        weight.grad = features.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        loss(features, weight, y).backward()
        used = torch.cuda.max_memory_allocated() - start
        logits = rows * many * 4
        assert used < 0.3 * logits, f"{type(loss).__name__}: {used / logits:.2f} of the logits"
        weight.grad = features.grad = None


def test_a_bank_moves_with_its_model() -> None:
    bank = CentroidBank(5, 4, accumulate=2)
    bank(torch.randn(3, 4), torch.tensor([0, 1, 1]))
    bank.to(CUDA).half()
    assert {b.device.type for b in bank.buffers()} == {CUDA}
    assert bank.centroids.dtype == bank.pending_sums.dtype == torch.float32
    bank(torch.randn(3, 4, device=CUDA), torch.tensor([0, 1, 1], device=CUDA))
    assert bank.counts.tolist() == [2, 4, 0, 0, 0]


@pytest.mark.parametrize("num", [32, 6], ids=["N>C", "N<C"])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.needs_cxx)]
)
def test_twenty_compiled_steps_end_where_eager_ends(backend: str, num: int) -> None:
    if backend == "inductor":
        pytest.importorskip("triton", reason="inductor needs triton on a CUDA device")
    torch._dynamo.reset()
    eager, traced = Trainer().to(CUDA), Trainer().to(CUDA)
    with torch.no_grad():
        eager.head.weight.copy_(eager.head.weight[:1].expand(10, -1).clone())
    traced.load_state_dict(eager.state_dict())
    function = torch.compile(traced, backend=backend, fullgraph=True)
    for model, loss in ((eager, eager), (traced, function)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(20):
            optimizer.zero_grad()
            loss(normal(step, num, 6), labels(100 + step, num, 10)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.isfinite(norm), f"gradient at step {step}"
            optimizer.step()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(traced.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)
    torch._dynamo.reset()
