"""Whose features belong to which outputs, whatever the model returns and however often it runs."""

import gc
import io
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropin.nets import LABELS, C, D, Mlp, N, by_hand, same, through_attach, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import largemargin as lm
from largemargin.dropin import feature_hooks

pytestmark = pytest.mark.filterwarnings("ignore:what is passed as .* are probabilities")

Named = namedtuple("Named", ["hidden", "logits"])


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


OUTPUTS = {
    "tensor": lambda z, f: z,
    "tuple": lambda z, f: (f, z),
    "list": lambda z, f: [z, f],
    "named tuple": lambda z, f: Named(f, z),
    "dict": lambda z, f: {"hidden": f, "out": {"logits": z, "loss": None}},
    "dataclass": lambda z, f: Output(z, f),
    "cast": lambda z, f: z.to(torch.bfloat16),
    "probabilities": lambda z, f: {"p": z.softmax(-1)},
    "shifted": lambda z, f: (z + 1,),
}


def both(C: int, D: int) -> lm.Objective:
    return lm.Objective(softmax=lm.CrossEntropy(), lmd=0.5 * lm.Discriminative(C, D, margin=2.0))


def robust(C: int, D: int) -> lm.Loss:
    return lm.RobustDiscriminative(C, D, margin=2.0, radius=0.1)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_whatever_the_model_returns(kind: str) -> None:
    model = Mlp(OUTPUTS[kind])
    for objective in (lm.CosFace(scale=8.0), both(C, D)):
        got = through_attach(model, objective, vectors(), LABELS)
        same(got, by_hand(model, objective, vectors(), LABELS, "fc"))
        assert got.value.dim() == 0


def test_a_label_without_a_batch_is_refused() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace(scale=8.0), layer="fc")
    with pytest.raises(lm.LargeMarginError, match="labels"):
        criterion(model(vectors()), torch.tensor(1))


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind: str, mode: Any) -> None:
    model = Mlp(OUTPUTS[kind])
    criterion = lm.attach(model, robust(C, D))
    want = criterion(model(vectors(0)), LABELS, noisy=model(vectors(1)))
    criterion.undo()
    criterion = lm.attach(model, robust(C, D))
    with mode():
        got = criterion(model(vectors(0)), LABELS, noisy=model(vectors(1)))
    assert not got.requires_grad
    torch.testing.assert_close(got, want.detach())


def test_sequences() -> None:
    model, labels = Mlp(), torch.arange(12).reshape(3, 4) % C
    x = vectors(0, 3, 4, 4)
    for objective in (lm.CosFace(scale=8.0), both(C, D)):
        same(
            through_attach(model, objective, x, labels), by_hand(model, objective, x, labels, "fc")
        )
    criterion = lm.attach(model, lm.CrossEntropy())
    weight = torch.rand(3, 4)
    got = criterion(model(x), labels, sample_weight=weight)
    each = F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(got, (each * weight.flatten()).sum() / weight.sum())
    soft = torch.rand(3, 4, C).softmax(-1)
    want = F.cross_entropy(model(x).flatten(0, 1), soft.flatten(0, 1))
    torch.testing.assert_close(criterion(model(x), soft), want)


def test_terms_and_their_gradient_norms() -> None:
    model = Mlp()
    objective = lm.Objective(softmax=lm.CrossEntropy(), rob=0.5 * robust(C, D))
    criterion = lm.attach(model, objective, gradient_norms=True)
    clean, noisy = model(vectors(0)), model(vectors(1))
    loss = criterion(clean, LABELS, noisy=noisy)
    assert all(not term.requires_grad for term in criterion.terms.values())
    parts = {"compact", "margin", "reg", "softmax", "noisy"}
    assert set(criterion.terms) == {"softmax"} | {f"rob.{part}" for part in parts}
    weights = objective.term_weights
    total = sum(weights[name] * term for name, term in criterion.terms.items())
    torch.testing.assert_close(loss.detach(), total)
    loss.backward()


WEIGHTS = {
    "compact": "alpha",
    "margin": "beta",
    "reg": "gamma_reg",
    "softmax": "softmax_weight",
    "noisy": "noise_weight",
}


@pytest.mark.parametrize("part", WEIGHTS)
def test_gradient_norms_are_those_of_autograd(part: str) -> None:
    """With every other weight at zero, the gradient of the loss is that of the one term."""
    model, x = Mlp(), vectors(0)
    settings = {name: 0.0 for name in WEIGHTS.values() if name != "softmax_weight"}
    settings |= {"softmax_weight": 1e-30, WEIGHTS[part]: 0.7}  # at 0 the term is left out
    loss = lm.RobustDiscriminative(C, D, radius=0.01, margin=2.0, first_seen="full", **settings)
    criterion = lm.attach(model, lm.Objective(rob=0.5 * loss), gradient_norms=True)
    outputs = model(x)
    value = criterion(outputs, LABELS, noisy=model(vectors(1)))
    features = criterion.read(outputs).features
    (gradient,) = torch.autograd.grad(value, features)
    torch.testing.assert_close(criterion.gradient_norms[f"rob.{part}"], gradient.norm())
    assert gradient.norm() > 0
    for name, norm in criterion.gradient_norms.items():
        assert norm < 1e-20 or name == f"rob.{part}"


def test_gradient_norms_without_gradients_are_zero() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy(), gradient_norms=True)
    with torch.no_grad():
        criterion(model(vectors()), LABELS)
    assert criterion.gradient_norms["cross_entropy"] == 0


def hand_robust(model: Mlp, x: Tensor, noisy: Tensor) -> Tensor:
    loss = robust(C, D)
    return loss(model.body(x), model.fc, LABELS, model.body(noisy))


POST = {
    "as it is": lambda z: z,
    "cast": lambda z: z.double(),
    "log_softmax": lambda z: z.log_softmax(1),
    "twice": lambda z: {"p": z.softmax(1).half().float()},
}


@pytest.mark.parametrize("post", POST)
def test_several_passes_per_step(post: str) -> None:
    """Clean, then an attack that runs the model many times, then noisy."""
    model, change = Mlp(), POST[post]
    criterion = lm.attach(model, robust(C, D))
    x = vectors(0)
    clean = change(model(x))
    attacked = x.clone()
    for _ in range(4):
        attacked.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(attacked), LABELS), attacked)
        attacked = (attacked + 0.1 * slope.sign()).detach()
    loss = criterion(clean, LABELS, noisy=change(model(attacked)))
    torch.testing.assert_close(loss, hand_robust(model, x, attacked))
    loss.backward()
    assert model.body[0].weight.grad.abs().sum() > 0


def test_noisy_second_half() -> None:
    model = Mlp()
    criterion = lm.attach(model, robust(C, D))
    x, noisy = vectors(0), vectors(1)
    loss = criterion(model(torch.cat([x, noisy])), LABELS, noisy="second half")
    torch.testing.assert_close(loss, hand_robust(model, x, noisy))
    with pytest.raises(lm.LargeMarginError, match="even number"):
        criterion(model(x[:3]), LABELS[:1], noisy="second half")
    with pytest.raises(lm.LargeMarginError, match="'first half' was given"):
        criterion(model(x), LABELS[:3], noisy="first half")
    with pytest.raises(lm.LargeMarginError, match="of the first half, 3, but 6 were given"):
        criterion(model(x), LABELS, noisy="second half")


def test_noisy_second_half_beside_a_loss_on_logits() -> None:
    """Its logits are those of the first half, too."""
    model = Mlp()
    criterion = lm.attach(model, lm.Objective(softmax=lm.CrossEntropy(), b=lm.Stability()))
    x, noisy = vectors(0), vectors(1)
    loss = criterion(model(torch.cat([x, noisy])), LABELS, noisy="second half")
    clean, other = model.body(x), model.body(noisy)
    want = F.cross_entropy(model.fc(clean), LABELS) + lm.Stability()(clean, other)
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("pass_first", [False, True])
def test_a_head_that_was_replaced_by_hand_is_missed(pass_first: bool) -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    if pass_first:
        criterion(model(vectors()), LABELS)
    model.fc = nn.Linear(D, C)
    with pytest.raises(lm.LargeMarginError, match=r"no longer in the model.* Call attach again"):
        criterion(model(vectors(1)), LABELS)


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
def test_no_graph_outlives_what_the_caller_holds(again: bool) -> None:
    model = Mlp()
    criterion = lm.attach(model, both(C, D))
    gone: list[weakref.ref[Any]] = []

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        token = Output(out[:0].detach())  # lives as long as the node of the graph
        out.grad_fn.metadata["token"] = token
        gone.append(weakref.ref(token))

    model.body[0].register_forward_hook(watch)
    gc.disable()
    try:
        for seed in range(3):
            x = vectors(seed)
            outputs = checkpoint(model, x, use_reentrant=False) if again else model(x)
            loss = criterion(outputs.log_softmax(1), LABELS)
            assert gone[-1]() is not None
            loss.backward()
            del loss, outputs
            left = [each for each in gone if each() is not None]
            assert not left, "reference cycles would wait for the garbage collector"
    finally:
        gc.enable()


def test_nothing_grows_over_many_steps() -> None:
    model = Mlp()
    criterion = lm.attach(model, robust(C, D))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(seed: int) -> None:
        optimizer.zero_grad()
        criterion(model(vectors(seed)), LABELS, noisy=model(vectors(seed + 1))).backward()
        optimizer.step()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    for seed in range(10):  # the bank remembers its last few reads
        step(seed)
    before = tensors()
    for seed in range(30):
        step(seed)
    assert tensors() <= before


def test_collected_logits_do_not_keep_features() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    seen: list[weakref.ref[Tensor]] = []
    model.body.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    with torch.no_grad():
        collected = [model(vectors(seed)) for seed in range(6)]
        assert sum(each() is not None for each in seen) <= 2
        with pytest.raises(lm.LargeMarginError, match="right after"):
            criterion(collected[0], LABELS)
        criterion(collected[-1], LABELS)


def test_collected_outputs_made_of_logits_do_not_keep_features() -> None:
    model = Mlp(lambda z, f: z.double())
    criterion = lm.attach(model, lm.CrossEntropy())
    seen: list[weakref.ref[Tensor]] = []
    model.body.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    with torch.no_grad():
        collected = [model(vectors(seed)) for seed in range(6)]
        assert sum(each() is not None for each in seen) <= 2
        criterion(collected[-1], LABELS)


def test_whether_another_layer_may_be_the_head_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph of every later step is walked no more."""
    asked = []
    original = feature_hooks.returned_before
    monkeypatch.setattr(
        feature_hooks, "returned_before", lambda *args: asked.append(1) or original(*args)
    )
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    for seed in range(3):
        criterion(model(vectors(seed)), LABELS)
    assert len(asked) == 1


def test_outputs_of_ordinary_training_take_the_short_way() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    for bias in (model.fc.bias, None):
        model.fc.bias = bias
        record = criterion._hooks.usual_record(model(vectors()))
        assert record is not None
        assert record.head == (model.fc.weight, bias)
    assert criterion._hooks.usual_record(model(vectors(0, 2, 3, 4))) is None
    assert criterion._hooks.usual_record(model(vectors()) + 1) is None
    outputs = model(vectors())
    outputs.mul_(2)
    assert criterion._hooks.usual_record(outputs) is None


@pytest.mark.parametrize("training", [True, False])
def test_a_criterion_has_the_mode_of_its_model(training: bool) -> None:
    """Also where another criterion has put the objective they share into that mode."""
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    criterion.train(not training)
    criterion.objective.train(training)
    model.train(training)
    criterion(model(vectors()), LABELS, sample_weight=torch.ones(N))
    assert criterion.training == criterion.objective.training == training
    assert criterion.steps == int(training)


def test_saved_outputs_are_plain_tensors() -> None:
    model = Mlp()
    lm.attach(model, lm.CrossEntropy())
    file = io.BytesIO()
    with torch.no_grad():
        logits = model(vectors())
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), logits)


class Both(nn.Module):
    """Runs its head twice."""

    def __init__(self, mix: bool) -> None:
        super().__init__()
        self.fc, self.mix = nn.Linear(4, C), mix

    def forward(self, x: Tensor) -> Any:
        one, two = self.fc(x), self.fc(-x)
        return (one + two) / 2 if self.mix else (one, two)


def test_a_head_that_runs_twice_in_a_pass() -> None:
    mixed = Both(mix=True)
    criterion = lm.attach(mixed, lm.CrossEntropy())
    with pytest.raises(lm.LargeMarginError, match="several times"):
        criterion(mixed(vectors()), LABELS)
    pair = Both(mix=False)
    criterion = lm.attach(pair, lm.CrossEntropy())
    one, two = pair(vectors())
    with pytest.raises(lm.LargeMarginError, match="2 runs of the head"):
        criterion((one, two), LABELS)
    torch.testing.assert_close(criterion(two, LABELS), F.cross_entropy(two, LABELS))


@pytest.mark.parametrize("around", ["body", "everything"])
def test_activation_checkpointing(around: str) -> None:
    class Checkpointed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if around == "everything":
                return checkpoint(super().forward, x, use_reentrant=False)
            return self.fc(checkpoint(self.body, x, use_reentrant=False))

    plain, saving = Mlp(), Checkpointed()
    saving.load_state_dict(plain.state_dict())
    for objective in (lm.CosFace(scale=8.0), both(C, D), lm.CrossEntropy()):
        same(
            through_attach(saving, objective, vectors(), LABELS),
            by_hand(plain, objective, vectors(), LABELS, "fc"),
        )
    criterion = lm.attach(saving, both(C, D))
    outside = checkpoint(saving, vectors(), use_reentrant=False)
    criterion(outside, LABELS).backward()
    assert criterion.banks[0].counts.sum() == N


def test_a_recomputation_is_no_new_pass() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    with torch.no_grad():
        before = model(vectors(1))
    with set_checkpoint_early_stop(False):  # as deep as it goes: through the head again
        criterion(checkpoint(model, vectors(), use_reentrant=False), LABELS).backward()
    torch.testing.assert_close(criterion(before, LABELS), F.cross_entropy(before, LABELS))


def test_reentrant_checkpointing_is_refused() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace())
    x = vectors().requires_grad_()
    with pytest.raises(lm.LargeMarginError, match="use_reentrant=False"):
        criterion(checkpoint(model, x, use_reentrant=True), LABELS)


def test_a_frozen_backbone_is_fine() -> None:
    model = Mlp()
    model.body.requires_grad_(False)
    same(
        through_attach(model, lm.CosFace(scale=8.0), vectors(), LABELS),
        by_hand(model, lm.CosFace(scale=8.0), vectors(), LABELS, "fc"),
    )
