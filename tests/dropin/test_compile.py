"""Compiled model, compiled step, both: the eager numbers, one graph, no compilation per step."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dropin.nets import LABELS, C, ConvNet, D, Mlp, images, vectors
from torch import Tensor, nn
from torch._dynamo.utils import counters

import largemargin as lm

# dynamo looks at .grad of every tensor that enters compiled code; torch warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def both(C: int, D: int) -> lm.Objective:
    return lm.Objective(softmax=lm.CrossEntropy(), lmd=0.5 * lm.Discriminative(C, D, margin=2.0))


def robust(C: int, D: int) -> lm.Loss:
    return lm.RobustDiscriminative(C, D, margin=2.0, radius=0.1)


OBJECTIVES: dict[str, Any] = {"cosface": lm.CosFace(scale=8.0), "both": both}


def losses(
    objective: Any, what: str, backend: str, steps: int = 5, noisy: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with model, step, both or nothing compiled; the losses and the weights after."""
    torch.manual_seed(0)
    model = ConvNet()
    criterion = lm.attach(model, copy.deepcopy(objective))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def compiled(each: Any) -> Any:
        return torch.compile(each, backend=backend, fullgraph=True)

    runs = compiled(model) if what in ("model", "both") else model

    def step(x: Tensor, labels: Tensor) -> Tensor:
        extra = {"noisy": runs(x + 0.1)} if noisy else {}
        return criterion(runs(x), labels, **extra)

    run = compiled(step) if what in ("step", "both") else step
    found = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = run(images(seed), LABELS)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        assert all(not term.requires_grad for term in criterion.terms.values())
        torch.testing.assert_close(
            sum(w * criterion.terms[n] for n, w in criterion.objective.term_weights.items()),
            loss.detach(),
        )
    return found, {**model.state_dict(), **dict(criterion.objective.named_buffers())}


def compare(objective: Any, what: str, backend: str, **how: Any) -> None:
    want, state = losses(objective, "nothing", backend, **how)
    counters.clear()
    got, compiled = losses(objective, what, backend, **how)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1, counters["recompiles"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("model", "both"),
        ("step", "cosface"),
        pytest.param("both", "cosface", marks=SLOW),
        pytest.param("model", "cosface", marks=SLOW),
        pytest.param("step", "both", marks=SLOW),
        pytest.param("both", "both", marks=SLOW),
    ],
)
def test_compiled_is_eager(what: str, name: str) -> None:
    compare(OBJECTIVES[name], what, "aot_eager")


@pytest.mark.parametrize("what", ["model", pytest.param("step", marks=SLOW)])
def test_two_passes_per_step(what: str) -> None:
    compare(robust, what, "aot_eager", noisy=True)


@pytest.mark.slow
@pytest.mark.needs_cxx
@pytest.mark.parametrize("what", ["model", "step"])
def test_inductor(what: str) -> None:
    compare(both, what, "inductor")


@pytest.mark.needs_cxx
def test_inductor_once() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    runs = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(
        criterion(runs(vectors()), LABELS), criterion(model(vectors()), LABELS)
    )


@pytest.mark.needs_cxx
@pytest.mark.parametrize(
    "loss", [lm.CrossEntropy(), pytest.param(lm.CosFace(scale=8.0), marks=pytest.mark.slow)]
)
def test_a_single_term_keeps_its_gradient(loss: lm.Loss) -> None:
    """Total and term are one number: inductor returns one tensor for both, the detached one."""
    model = Mlp()
    criterion = lm.attach(model, copy.deepcopy(loss), stepping="manual")

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return criterion(model(x), labels), dict(criterion.terms)

    found = []
    for run in (step, torch.compile(step, fullgraph=True)):
        total, terms = run(vectors(), LABELS)
        gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        assert not any(term.requires_grad for term in terms.values())
        found.append((total.detach(), terms, [each for each in gradients if each is not None]))
    assert len(found[0][2]) > 2
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.needs_cxx
@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_a_weighted_term_and_two_terms(weight: float) -> None:
    objective = lm.Objective(softmax=weight * lm.CrossEntropy(), margin=0.5 * lm.SampleMargin())
    compare(objective, "step", "inductor")
    compare(lm.Objective(softmax=weight * lm.CrossEntropy()), "step", "inductor")


POST: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda z: z.to(torch.bfloat16),
    "log_softmax": lambda z: z.log_softmax(1),
}


@pytest.mark.parametrize("post", POST)
def test_outputs_of_compiled_code_that_were_changed_outside(post: str) -> None:
    """Compiled code is one node of the graph; two passes still are not confused."""
    model = Mlp()
    criterion = lm.attach(model, robust)
    runs = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        clean, noisy = POST[post](runs(vectors(seed))), POST[post](runs(vectors(seed + 9)))
        loss = criterion(clean, LABELS, noisy=noisy)
        features = model.body(vectors(seed)), model.body(vectors(seed + 9))
        if seed == 0:
            reference = robust(C, D)
        torch.testing.assert_close(loss, reference(features[0], model.fc, LABELS, features[1]))
    assert counters["stats"]["unique_graphs"] == 1


def test_outputs_that_were_changed_inside_compiled_code() -> None:
    """They carry no mark: the last pass whose logits have their shape is taken."""
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return criterion(model(x).log_softmax(1), LABELS)

    got = step(vectors())
    torch.testing.assert_close(got, criterion(model(vectors()), LABELS))


@pytest.mark.filterwarnings("ignore:what is passed as outputs are probabilities")
def test_compiled_in_place_and_without_gradients() -> None:
    model = Mlp(lambda z, f: {"logits": z.softmax(-1)})
    criterion = lm.attach(model, both)
    model.compile(backend="aot_eager", fullgraph=True)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = criterion(model(vectors()), LABELS)
        want = both(C, D).eval()(model.body(vectors()), model.fc, LABELS).total
        torch.testing.assert_close(got, want.detach())


def test_attached_to_a_compiled_model() -> None:
    """Also when it has run before: its code is made again, with the hooks."""
    for objective in (lm.CrossEntropy(), lm.CosFace(scale=8.0)):
        for given in ("compiled", "bare"):
            torch.manual_seed(0)
            model = Mlp()
            runs = torch.compile(model, backend="aot_eager", fullgraph=True)
            runs(vectors())
            criterion = lm.attach(runs if given == "compiled" else model, objective)
            got = criterion(runs(vectors()), LABELS)
            torch.testing.assert_close(got, criterion(model(vectors()), LABELS))
            criterion.undo()
            assert torch.equal(runs(vectors()), model(vectors()))


@pytest.mark.slow
def test_the_mode_switch_is_followed() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.Compactness(radius=0.1, bank=lm.CentroidBank(C, D)))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return criterion(model(x), LABELS)

    step(vectors())
    bank = criterion.banks[0].centroids.clone()
    assert bank.abs().sum() > 0
    model.eval()
    step(vectors(1))
    assert torch.equal(criterion.banks[0].centroids, bank)
    model.train()
    step(vectors(1))
    assert not torch.equal(criterion.banks[0].centroids, bank)


def test_part_of_the_model_compiled() -> None:
    model = ConvNet()
    want = nn.functional.cross_entropy(model(images()), LABELS)
    model.stem = torch.compile(model.stem, backend="aot_eager")
    model.fc = torch.compile(model.fc, backend="aot_eager")
    with pytest.raises(lm.LargeMarginError, match=r"compiled by itself.*before torch\.compile"):
        lm.attach(model, lm.CosFace(scale=8.0))
    got = lm.attach(model, lm.CrossEntropy())(model(images()), LABELS)
    torch.testing.assert_close(got, want)


def test_input_gradients_of_a_compiled_model() -> None:
    model = ConvNet()
    criterion = lm.attach(model, lm.MarginHinge(threshold=3.0))
    want = criterion(model(images()), LABELS)
    want.backward()
    slope = model.stem[0].weight.grad.clone()
    model.zero_grad()
    got = criterion(torch.compile(model, backend="aot_eager")(images()), LABELS)
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(model.stem[0].weight.grad, slope)


def test_batches_of_other_sizes_compile_twice_at_most() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    runs = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n in (6, 5, 4, 3, 6, 2):
        x, labels = vectors(0)[:n], LABELS[:n]
        torch.testing.assert_close(
            criterion(runs(x), labels), criterion(model(x), labels), rtol=1e-5, atol=1e-6
        )
    assert counters["stats"]["unique_graphs"] <= 2


def test_export_ignores_the_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, D), nn.Tanh(), nn.Linear(D, C)).eval()
    lm.attach(model, lm.CosFace(scale=8.0))
    program = torch.export.export(model, (vectors(),))
    torch.testing.assert_close(program.module()(vectors()), model(vectors()))
