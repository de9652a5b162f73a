"""Compiled losses are the eager ones: values, gradients, state, over many steps, without retracing.

``aot_eager`` traces forward and backward whole (``fullgraph=True``) but runs torch's own kernels,
so it agrees to the last bits, of float64 here: the eager losses have backward passes of their own,
and what these round in float32 differs between CPUs. ``inductor`` also generates code and needs a
C++ compiler.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from matrix.loss_calls import (
    CLASSES,
    DIM,
    Trainer,
    arguments,
    build,
    problem,
    value_and_gradients,
)
from torch import Tensor, nn

from largemargin import LOSSES, Loss
from largemargin.ops import chunked

# inductor's lowering of torch.diagonal uses a function that torch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*_prims_common.check:FutureWarning")

AOT = "aot_eager"
COMPILABLE = [name for name in LOSSES if "compile" not in LOSSES[name].refuses]
SIX = ("arcface", "cosface", "cross_entropy", "discriminative", "kobayashi", "lm_softmax")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def graphs() -> int:
    """How many graphs were traced since the test began: recompilations show up here."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same_steps(name: str, backend: str, dtype: torch.dtype, *, tolerance: float) -> None:
    """Two steps of a loss, its state changing in between, eager and compiled."""
    eager, traced = build(name).to(dtype), build(name).to(dtype)
    function = compiled(traced, backend)
    close = {"rtol": tolerance, "atol": tolerance}
    for seed in range(2):
        given = problem(seed, dtype=dtype)
        want = value_and_gradients(eager, given)
        got = value_and_gradients(traced, given, function)
        torch.testing.assert_close(got[0], want[0], **close)
        for leaf, gradient in want[1].items():
            torch.testing.assert_close(
                got[1][leaf], gradient, **close, msg=lambda m, n=leaf: f"gradient of {n}: {m}"
            )
        for key, value in eager.state_dict().items():
            torch.testing.assert_close(traced.state_dict()[key], value, **close)
    assert graphs() == 1


@pytest.mark.parametrize("name", COMPILABLE)
def test_every_loss_traces_whole(name: str) -> None:
    assert_same_steps(name, AOT, torch.float64, tolerance=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("adaface", "magface") else pytest.param(name, marks=pytest.mark.slow)
        for name in COMPILABLE
    ],
)
def test_every_loss_traces_whole_in_float32(name: str) -> None:
    """Norms, which these two go by, are others there."""
    assert_same_steps(name, AOT, torch.float32, tolerance=1e-5)


@pytest.mark.needs_cxx
@pytest.mark.parametrize(
    "name",
    # A C++ compiler takes ten seconds for each: two that differ most, and the others at length.
    [
        name
        if name in ("arcface", "discriminative")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in SIX
    ],
)
def test_six_losses_with_generated_code(name: str) -> None:
    assert_same_steps(name, "inductor", torch.float32, tolerance=1e-5)


@pytest.mark.needs_cxx
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPILABLE if name not in SIX])
def test_the_other_losses_with_generated_code(name: str) -> None:
    assert_same_steps(name, "inductor", torch.float32, tolerance=1e-5)


def test_the_losses_that_refuse_differentiate_inside_their_forward() -> None:
    refusing = {name for name, loss in LOSSES.items() if "compile" in loss.refuses}
    assert refusing == {"layer_margin", "margin_distribution", "margin_hinge"}
    for name in refusing:
        assert "compile the model" in LOSSES[name].refuses["compile"]


# dynamo looks at the gradient of an intermediate tensor where it resumes after the break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_without_fullgraph_they_break_the_graph_and_stay_right() -> None:
    loss, given = build("margin_hinge"), problem()
    want = value_and_gradients(loss, given)
    got = value_and_gradients(loss, given, torch.compile(loss, backend=AOT))
    torch.testing.assert_close(got[0], want[0])
    for leaf, gradient in want[1].items():
        torch.testing.assert_close(got[1][leaf], gradient)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("margin_hinge", AOT),
        ("layer_margin", AOT),
        pytest.param("layer_margin", "inductor", marks=pytest.mark.needs_cxx),
        pytest.param("margin_hinge", "inductor", marks=[pytest.mark.needs_cxx, pytest.mark.slow]),
    ],
)
def test_input_margins_of_a_compiled_model(name: str, backend: str) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(DIM, 6), nn.Linear(6, CLASSES)

    def model(inputs: Tensor) -> Tensor:
        return second(torch.tanh(first(inputs)))

    parameters = [*first.parameters(), *second.parameters()]
    loss, results = build(name), []
    for function in (model, compiled(model, backend)):
        inputs, labels = problem()["features"], problem()["labels"]
        logits = function(inputs)
        value = loss(logits, labels, [inputs] if name == "layer_margin" else inputs)
        results.append([value.detach(), *torch.autograd.grad(value, parameters)])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "targets": {"weight": [1.0, 2.0, 0.5, 1.0, 3.0], "label_smoothing": 0.1},
    "unreduced": {"weight": [1.0, 2.0, 0.5, 1.0, 3.0], "reduction": "none", "validate": True},
    "chunked": {"impl": "chunked", "precision": "bf16"},
    "precision": {"precision": "highest"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_compile(option: str) -> None:
    eager, traced = (build("cosface", **OPTIONS[option]) for _ in range(2))
    function = compiled(traced, AOT)
    given = problem()
    given["labels"][3] = -100
    results = []
    for call in (eager, function):
        value = call(given["features"], given["prototypes"], given["labels"])
        leaves = (given["features"], given["prototypes"])
        results.append([value.detach(), *torch.autograd.grad(value.sum(), leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        # Eager code has a backward pass of its own: equal up to the rounding of large entries.
        atol = 4e-6 * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=1e-6, atol=atol)


NUMBERS = {
    "arcface": "margin",
    "cosface": "margin",
    "discriminative": "margin",
    "kobayashi": "strength",
    "lm_softmax": "scale",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("cosface", "discriminative") else pytest.mark.slow)
        for name in NUMBERS
    ],
)
def test_losses_with_other_numbers_compile_in_the_same_process(name: str) -> None:
    """From the second value on the compiler takes a number for a variable, in checks too."""
    given, key = problem(), NUMBERS[name]
    for number in (0.5, 0.4, 0.3, 0.2):
        eager, traced = (build(name, **{key: number}) for _ in range(2))
        want = value_and_gradients(eager, given)
        got = value_and_gradients(traced, given, compiled(traced, AOT))
        torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
        for leaf, gradient in want[1].items():
            torch.testing.assert_close(got[1][leaf], gradient, rtol=1e-5, atol=1e-5)
    assert graphs() == 2


@pytest.mark.parametrize("name", ["cosface", pytest.param("kobayashi", marks=pytest.mark.slow)])
def test_compiled_blocks_of_logits_are_not_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler sees forward and backward pass at once, and the same products in both."""
    monkeypatch.setattr(chunked, "block_size", lambda *_: 32)
    generator = torch.Generator().manual_seed(0)
    features, prototypes = (torch.randn(n, 4, generator=generator) for n in (64, 200))
    leaves = features.requires_grad_(), prototypes.requires_grad_()
    loss, labels = build(name, impl="chunked"), torch.arange(64)
    kept: dict[int, int] = {}

    def count(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // 4
        return saved

    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        value = compiled(loss, AOT)(*leaves, labels)
    assert sum(kept.values()) < 64 * 200 / 4
    for got, want in zip(
        torch.autograd.grad(value, leaves),
        torch.autograd.grad(loss(*leaves, labels), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_soft_targets_and_sample_weights_compile() -> None:
    loss, given = build("cosface"), problem()
    soft = torch.softmax(torch.randn(len(given["labels"]), CLASSES), 1)
    rows = torch.rand(len(soft))
    inputs = (given["features"], given["prototypes"], soft)
    got = compiled(loss, AOT)(*inputs, sample_weight=rows)
    torch.testing.assert_close(got, loss(*inputs, sample_weight=rows))


@pytest.mark.parametrize("name", [n for n in COMPILABLE if "labels" in LOSSES[n].needs])
def test_a_label_out_of_range_is_nan_where_values_are_not_checked(name: str) -> None:
    # Eager with validate=False takes the way compiled code takes, without compiling 26 losses.
    for bad in (-1, CLASSES, 10**6):
        loss, given = build(name, validate=False), problem()
        given["labels"][2] = bad
        positional, options = arguments(loss, given)
        value = loss(*positional, **options)
        assert torch.isnan(value), f"{name} of label {bad} is {value.item()}"


@pytest.mark.parametrize("name", ["cosface", "discriminative"])
def test_a_label_out_of_range_is_nan_in_compiled_code(name: str) -> None:
    loss, given = build(name), problem()
    function = compiled(loss, AOT)
    given["labels"][2] = CLASSES
    positional, options = arguments(loss, given)
    assert torch.isnan(function(*positional, **options))
    for key, value in loss.state_dict().items():
        assert torch.isfinite(value.double()).all(), key


@pytest.mark.parametrize(
    "name", ["cosface", pytest.param("discriminative", marks=pytest.mark.slow)]
)
def test_batches_of_any_size(name: str) -> None:
    eager, traced = build(name).double(), build(name).double()
    function = compiled(traced, AOT)
    for seed, samples in enumerate([12, 9, 30, 17, 9, 12, 23]):
        given = problem(seed, samples=samples, dtype=torch.float64)
        want, got = value_and_gradients(eager, given), value_and_gradients(traced, given, function)
        torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
        for leaf, gradient in want[1].items():
            torch.testing.assert_close(got[1][leaf], gradient, rtol=1e-12, atol=1e-12)
    assert graphs() <= 2  # one for the first size, one for all sizes
    for samples in (3, 4, 2, 3):  # fewer samples than classes: other rows, one more graph
        given = problem(0, samples=samples, dtype=torch.float64)
        want, got = value_and_gradients(eager, given), value_and_gradients(traced, given, function)
        torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    assert graphs() <= 4
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(traced.state_dict()[key], value, rtol=1e-12, atol=1e-12)


def train(model: Trainer, loss: Callable[..., Tensor], samples: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    means = torch.randn(10, 6, generator=generator)
    for step in range(steps):
        labels = torch.randint(10, (samples,), generator=generator)
        x = means[labels] + 0.3 * torch.randn(samples, 6, generator=generator)
        optimizer.zero_grad()
        value = loss(x, labels)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(value), f"loss at step {step}"
        assert torch.isfinite(norm), f"gradient at step {step}"
        optimizer.step()


@pytest.mark.parametrize(
    ("backend", "samples"),
    [
        pytest.param(AOT, 32, marks=pytest.mark.slow),
        # fewer samples than classes: the centroids' rows are samples then
        pytest.param(AOT, 6, marks=pytest.mark.slow),
        pytest.param("inductor", 32, marks=[pytest.mark.needs_cxx, pytest.mark.slow]),
        pytest.param("inductor", 6, marks=[pytest.mark.needs_cxx, pytest.mark.slow]),
    ],
)
def test_two_hundred_steps_end_where_eager_ends(backend: str, samples: int) -> None:
    eager, traced = Trainer(), Trainer()
    function = compiled(traced, backend)
    start = {name: value.clone() for name, value in eager.state_dict().items()}
    equal = {**start, "head.weight": start["head.weight"][:1].expand(10, -1).clone()}
    for state in (start, equal):  # identical prototypes have no boundary between them
        eager.load_state_dict(state)
        traced.load_state_dict(state)
        train(eager, eager, samples, 200)
        train(traced, function, samples, 200)
        assert torch.isfinite(eager.head.weight).all()
        assert (eager.head.weight - state["head.weight"]).norm() > 0.5  # it went somewhere
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(
                traced.state_dict()[name], value, rtol=1e-3, atol=1e-3, msg=f"{backend}: {name}"
            )
    assert graphs() == 1


def test_evaluation_of_a_compiled_loss_writes_nothing() -> None:
    loss = build("discriminative")
    function: Loss = compiled(loss, AOT)  # type: ignore[assignment]
    given = problem()
    positional, options = arguments(loss, given)
    function(*positional, **options)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    loss.eval()
    function(*positional, **options)
    for name, value in loss.state_dict().items():
        assert torch.equal(value, before[name])
    assert graphs() == 2
