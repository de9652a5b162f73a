"""A scheduled number changes at every step; what torch.compile made of the step stays."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import largemargin as lm
from largemargin.losses.base.schedules import Annealing, Ramp, Schedule

Make = Callable[[int, int], lm.Loss | lm.Objective]
CASES: dict[str, tuple[Make, list[Schedule]]] = {
    "margin": (lambda c, d: lm.CosFace(scale=8.0), [Ramp("margin", 0.0, steps=6)]),
    "scale": (lambda c, d: lm.NormFace(scale=9.0), [Ramp("scale", 1.0, steps=6)]),
    "annealing": (lambda c, d: lm.SphereFace(scale=8.0), [Annealing(rate=9.0)]),
    "alpha": (lambda c, d: lm.GaussianMixture(c, d), [Ramp("alpha", 0.1, steps=6)]),
    "delta_d": (
        lambda c, d: lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(c, d)),
        [Ramp("lmd.margin", 0.0, steps=6), Ramp("lmd.weight", 0.1, steps=6)],
    ),
}
MORE: dict[str, tuple[Make, list[Schedule]]] = {
    "angle": (lambda c, d: lm.ArcFace(scale=8.0), [Ramp("margin", 0.0, steps=6)]),
    "automatic scale": (lambda c, d: lm.CosFace(scale="auto"), [Ramp("margin", 0.0, steps=6)]),
    "scale of logits": (
        lambda c, d: lm.CrossEntropy(similarity="cosine", scale=9.0),
        [Ramp("scale", 1.0, steps=6)],
    ),
    "L-Softmax": (lambda c, d: lm.LSoftmax(), [Annealing(rate=9.0)]),
    "unified": (
        lambda c, d: lm.UnifiedMargin(m1=1.3, m2=0.2, m3=0.1, scale=8.0),
        [Ramp(name, 1.0 if name == "m1" else 0.0, steps=6) for name in ("m1", "m2", "m3")],
    ),
    "counts": (
        lambda c, d: lm.CosFace(scale=8.0, class_counts=[9, 7, 5, 3, 1]),
        [Ramp("margin", 0.0, steps=6)],
    ),
    "per class": (
        lambda c, d: lm.ArcFace(scale=8.0, margin=torch.linspace(0.1, 0.4, 5)),
        [Ramp("margin", 0.0, steps=6)],
    ),
    "large C": (
        lambda c, d: lm.CosFace(scale=8.0, impl="chunked"),
        [Ramp("margin", 0.0, steps=6), Ramp("scale", 1.0, steps=6)],
    ),
    "stable delta_d": (
        lambda c, d: lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.StableDiscriminative(c, d)),
        [Ramp("lmd.margin", 0.0, steps=6)],
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def two_runs(
    case: tuple[Make, list[Schedule]], stepping: str, similarity: str | None = None
) -> list[tuple[nn.Module, lm.Criterion, torch.optim.Optimizer]]:
    first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    runs = []
    for model in (first, copy.deepcopy(first)):
        make, given = case
        criterion = lm.attach(
            model,
            make,
            schedule=copy.deepcopy(given),
            stepping=stepping,
            similarity=similarity,
            warn=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        runs.append((model, criterion, optimizer))
    return runs


def compare(case: tuple[Make, list[Schedule]], what: str, *, similarity: str | None = None) -> None:
    """The compiled run follows the eager one, and each function was compiled once."""
    (model, criterion, optimizer), (plain, eager, other) = two_runs(case, "manual", similarity)
    if what == "step":
        step = torch.compile(lambda x, y: criterion(model(x), y), backend="aot_eager")
    else:
        compiled_model = torch.compile(model, backend="aot_eager")
        compiled_criterion = torch.compile(criterion, backend="aot_eager")

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return compiled_criterion(compiled_model(x), y)

    for _ in range(8):
        inputs, labels = torch.randn(10, 6), torch.randint(5, (10,))
        pairs = (
            (step(inputs, labels), optimizer, criterion),
            (eager(plain(inputs), labels), other, eager),
        )
        torch.testing.assert_close(pairs[0][0], pairs[1][0], rtol=1e-4, atol=1e-5)
        for value, updates, each in pairs:
            updates.zero_grad()
            value.backward()
            updates.step()
            each.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == (1 if what == "step" else 2)


def everything(num_classes: int, dim: int) -> lm.Objective:
    return lm.Objective(
        face=lm.CosFace(scale=8.0),
        sphere=lm.SphereFace(),
        mixture=0.1 * lm.GaussianMixture(num_classes, dim),
        lmd=lm.Discriminative(num_classes, dim),
    )


def test_a_compiled_step_is_compiled_once() -> None:
    ramps = [
        Ramp("face.margin", 0.0, steps=6),
        Ramp("face.scale", 1.0, steps=6),
        Annealing(rate=9.0),
        Ramp("mixture.alpha", 0.1, steps=6),
        Ramp("lmd.margin", 0.0, steps=6),
        Ramp("lmd.weight", 0.0, steps=6),
    ]
    compare((everything, ramps), "step", similarity="cosine")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | MORE)
def test_compiled_steps_are_compiled_once(name: str) -> None:
    compare((CASES | MORE)[name], "step")


@pytest.mark.slow
# torch 2.11's compiler asks features for their .grad, and torch warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", CASES | MORE)
def test_compiled_model_and_criterion_are_compiled_once(name: str) -> None:
    compare((CASES | MORE)[name], "model and criterion")


def test_a_compiled_model_with_an_eager_criterion_that_steps_by_itself() -> None:
    """The head's scale is set between the model's forward and backward pass."""
    (model, criterion, optimizer), (plain, eager, other) = two_runs(CASES["scale"], "automatic")
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(8):
        inputs, labels = torch.randn(10, 6), torch.randint(5, (10,))
        logits, expected = compiled(inputs), plain(inputs)
        torch.testing.assert_close(logits, expected)
        for value, updates in (
            (criterion(logits, labels) + logits.square().mean(), optimizer),
            (eager(expected, labels) + expected.square().mean(), other),
        ):
            updates.zero_grad()
            value.backward()
            updates.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert model[2].scale == 9.0


def test_numbers_set_after_the_schedules_are_read_again() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    loss = lm.CosFace(scale=8.0, margin=0.3)
    ramps = [Ramp("margin", 0.0, steps=6), Ramp("scale", 1.0, steps=6)]
    lm.attach(model, loss, schedule=ramps, warn=False)
    loss.margin, loss.scale = 0.2, 8.0
    criterion = lm.attach(model, loss, warn=False)
    inputs, labels = torch.randn(10, 6), torch.randint(5, (10,))
    step = torch.compile(lambda x, y: (criterion(model(x), y), model(x)), backend="aot_eager")
    expected = lm.CosFace(scale=8.0, margin=0.2)(model[0](inputs), model[1].weight, labels)
    value, logits = step(inputs, labels)
    torch.testing.assert_close(value, expected)
    assert model[1].scale == 8.0
    torch.testing.assert_close(logits, model(inputs))
