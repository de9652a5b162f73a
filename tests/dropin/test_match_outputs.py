"""Outputs that are not what the head gave: found again, warned of, or refused; never ignored."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropin.nets import LABELS, C, D, Mlp, N, images, vectors
from torch import Tensor, nn

import largemargin as lm
from largemargin.dropin import MarginWarning, match_outputs
from largemargin.dropin.match_outputs import chosen_rows, same

ORDER = torch.tensor([3, 0, 5, 1, 4, 2])


def cosface() -> lm.Loss:
    return lm.CosFace(margin=0.2, scale=8.0)


def by_outputs(outputs: Tensor, labels: Tensor) -> Tensor:
    """CosFace from the outputs themselves, which are scaled cosines."""
    return F.cross_entropy(outputs - 8.0 * 0.2 * F.one_hot(labels, C), labels)


class Sorted(Mlp):
    """Sorts, runs and sorts back, as models on packed sequences do."""

    def forward(self, x: Tensor) -> Any:
        order = x[:, 0].argsort()
        return super().forward(x[order])[order.argsort()]


@pytest.mark.parametrize("graph", [True, False], ids=["gradients", "no_grad"])
def test_rows_in_another_order_are_found_again(graph: bool) -> None:
    with torch.set_grad_enabled(graph):
        model = Sorted()
        criterion = lm.attach(model, cosface())
        for seed in (0, 1):
            outputs = model(vectors(seed))
            torch.testing.assert_close(criterion(outputs, LABELS), by_outputs(outputs, LABELS))
        model = Mlp()
        criterion = lm.attach(model, cosface())
        outputs = model(vectors())
        for rows in (ORDER, ORDER[:4], ORDER[:1]):
            got = criterion(outputs[rows].clone(), LABELS[rows])
            torch.testing.assert_close(got, by_outputs(outputs[rows], LABELS[rows]))


def test_rows_in_another_order_have_their_gradients() -> None:
    model = Sorted()
    plain, x = copy.deepcopy(model), vectors()
    criterion = lm.attach(model, lm.CrossEntropy())
    criterion(model(x), LABELS).backward()
    F.cross_entropy(plain(x), LABELS).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("graph", [True, False], ids=["gradients", "no_grad"])
def test_a_position_of_every_sequence(graph: bool) -> None:
    """Decoders classify every token and return one of them; a mean over them is no row."""
    model = Mlp(lambda z, f: z[torch.arange(3), torch.tensor([3, 0, 2])])
    criterion = lm.attach(model, cosface())
    with torch.set_grad_enabled(graph):
        outputs = model(vectors(0, 3, 4, 4))
        got = criterion(outputs, LABELS[:3])
    torch.testing.assert_close(got, by_outputs(outputs, LABELS[:3]))
    mean = Mlp(lambda z, f: z.mean(1))
    criterion = lm.attach(mean, cosface())
    with pytest.raises(lm.LargeMarginError, match="pool the features before the head"):
        criterion(mean(vectors(0, 3, 4, 4)), LABELS[:3])


def test_decoders_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0
    )
    model = transformers.GPT2ForSequenceClassification(config).eval()
    tokens = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    labels = torch.tensor([2, 0])
    want = F.cross_entropy(model(tokens).logits, labels)
    criterion = lm.attach(model, lm.CrossEntropy())
    torch.testing.assert_close(criterion(model(tokens), labels), want)
    got = torch.autograd.grad(criterion(model(tokens), labels), model.score.weight)
    torch.testing.assert_close(
        got, torch.autograd.grad(F.cross_entropy(model(tokens).logits, labels), model.score.weight)
    )


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "prior": lambda z: z + torch.arange(C),
    "masked classes": lambda z: z.masked_fill(torch.arange(C) > 2, -1e4),
    "average with another head": lambda z: (z + z.flip(1)) / 2,
    "average of two rows": lambda z: (z + z.roll(1, 0)) / 2,
}


@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "outside"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_outputs_are_refused(change: str, inside: bool) -> None:
    model = Mlp(lambda z, f: CHANGES[change](z)) if inside else Mlp()
    criterion = lm.attach(model, cosface())
    outputs = model(vectors()) if inside else CHANGES[change](model(vectors()))
    with pytest.raises(lm.LargeMarginError, match="not what the head gave"):
        criterion(outputs, LABELS)


@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "outside"])
def test_a_softmax_after_the_head_is_said_once(inside: bool) -> None:
    """It trains as without, but its outputs are no logits, which a temperature is said of, too."""
    model = Mlp(lambda z, f: z.softmax(1)) if inside else Mlp()
    criterion = lm.attach(model, cosface())
    outputs = model(vectors()) if inside else model(vectors()).softmax(1)
    with pytest.warns(MarginWarning, match="are probabilities: a softmax comes after the head"):
        loss = criterion(outputs, LABELS)
    again = model(vectors()) if inside else model(vectors()).softmax(1)
    assert criterion(again, LABELS) == loss
    criterion = lm.attach(Mlp(), cosface())
    criterion(criterion.model(vectors()).bfloat16().float(), LABELS)
    criterion(criterion.model(vectors()).log_softmax(1), LABELS)


def test_every_row_counts_for_itself() -> None:
    """A large row hides no exchange of small ones, and a coarse cast is none."""
    logits = torch.tensor([[900.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert match_outputs.same(logits.bfloat16(), logits)
    assert match_outputs.same(logits.log_softmax(1), logits)
    assert match_outputs.same(logits.softmax(1), logits)
    assert not match_outputs.same(logits[[0, 2, 1]], logits)
    far = 1000 + torch.tensor([[0.1, 0.0], [0.0, 0.1]])
    assert match_outputs.same(far.bfloat16(), far)
    assert not match_outputs.same(far.flip(0), far)


def test_outputs_changed_in_place_are_refused() -> None:
    model = Mlp()
    criterion = lm.attach(model, cosface())
    outputs = model(vectors())
    outputs.mul_(3)
    with pytest.raises(lm.LargeMarginError, match="changed in place"):
        criterion(outputs, LABELS)
    match_outputs.check_unchanged(outputs, outputs._version, "outputs")
    match_outputs.check_unchanged(outputs, None, "outputs")


def test_a_temperature_is_warned_of_once() -> None:
    model = Mlp()
    criterion = lm.attach(model, cosface())
    want = criterion(model(vectors()), LABELS)
    with pytest.warns(MarginWarning, match="scaled or bent"):
        torch.testing.assert_close(criterion(model(vectors()) / 3, LABELS), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(model(vectors()) / 3, LABELS)


def test_the_output_of_another_head_is_refused() -> None:
    """Two outputs of one shape, as networks with an auxiliary head return."""

    class Two(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Sequential(nn.Flatten(), nn.Linear(4, C))
            self._modules.move_to_end("fc") if hasattr(self._modules, "move_to_end") else None

        def forward(self, x: Tensor) -> Any:
            features = self.body(x)
            return self.fc(features), self.aux(x)

    model = Two()
    criterion = lm.attach(model, lm.CrossEntropy(), layer="fc")
    main, other = model(vectors())
    want = F.cross_entropy(main, LABELS)
    torch.testing.assert_close(criterion(main, LABELS), want)
    torch.testing.assert_close(criterion((other, main), LABELS), want)
    with pytest.raises(lm.LargeMarginError, match="not what the head gave"):
        criterion(other, LABELS)


class Projected(nn.Module):
    """A classifier and, registered after it, a projector."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, D)
        self.fc = nn.Linear(D, C)
        self.project = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, 32))
        self.last = last

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        found = self.fc(features), self.project(features)
        return found[::-1] if self.last else found


def test_a_layer_whose_output_comes_first_may_be_the_head() -> None:
    model = Projected()
    criterion = lm.attach(model, cosface())
    with pytest.raises(lm.LargeMarginError, match=r"layer='fc' or layer='project\.2'"):
        criterion(model(vectors()), LABELS)
    criterion.undo()
    criterion = lm.attach(model, cosface(), layer="fc")
    criterion(model(vectors()), LABELS).backward()
    assert model.fc.weight.grad is not None
    embedding = Mlp(lambda z, f: (f, z))
    embedding.body = nn.Linear(4, D)  # features that are a linear layer's output are no rival
    lm.attach(embedding, cosface())(embedding(vectors()), LABELS).backward()


class Adapted(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.up @ self.down, self.bias)


class Unit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x), F.normalize(self.weight))


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def test_layers_that_are_more_than_weight_and_bias() -> None:
    for kind, words in ((Adapted, "down, up"), (Unit, "lm.ClassHead")):
        for loss in (lm.CrossEntropy(), cosface()):
            model = nn.Sequential(nn.Linear(4, D), nn.Tanh(), kind(D, C)).train()
            with pytest.raises(lm.LargeMarginError, match=words):
                lm.attach(model, loss)
            assert type(model[2]) is kind
            assert model[2].training
    model = nn.Sequential(nn.Linear(4, D), nn.Tanh(), Casting(D, C))
    want = F.cross_entropy(model(vectors()), LABELS)
    criterion = lm.attach(model, lm.CrossEntropy())
    torch.testing.assert_close(criterion(model(vectors()), LABELS), want)
    assert (criterion.head.similarity, criterion.head.scale) == ("dot", 1.0)


def penalised() -> lm.Objective:
    return lm.CrossEntropy() + 0.5 * lm.ZeroCentroid()


@pytest.mark.parametrize("loss", [cosface, lm.CrossEntropy, lm.Kobayashi, penalised])
def test_weights_of_functional_call_are_the_ones_that_train(loss: Callable[[], lm.Loss]) -> None:
    model = Mlp()
    criterion = lm.attach(model, loss())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(1.5).add_(0.1)
    put = {name: each.detach().clone().requires_grad_() for name, each in other.named_parameters()}
    got = criterion(torch.func.functional_call(model, put, (vectors(),)), LABELS)
    got.backward()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    want = criterion(model(vectors()), LABELS)
    torch.testing.assert_close(got, want)
    want.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(put[name].grad, each.grad)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("cast", [False, True])
def test_one_parameter_of_functional_call_is_enough(name: str, cast: bool) -> None:
    model = Mlp(lambda logits, features: logits.double() if cast else logits)
    criterion = lm.attach(model, lm.Kobayashi())
    own = getattr(model.fc, name)
    other = (own + own.flip(0)).detach().requires_grad_()
    got = criterion(torch.func.functional_call(model, {f"fc.{name}": other}, (vectors(),)), LABELS)
    got.backward()
    with torch.no_grad():
        own.copy_(other)
    torch.testing.assert_close(got, criterion(model(vectors()), LABELS))
    assert other.grad is not None


def test_hooks_of_the_layer_go_on() -> None:
    model = Mlp()
    seen: list[tuple[int, ...]] = []
    model.fc.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    handle = model.fc.register_forward_hook(lambda m, a, out: seen.append(tuple(out.shape)))
    criterion = lm.attach(model, cosface())
    assert type(model.fc) is lm.ClassHead
    assert float(criterion.read(model(vectors())).features.detach().abs().sum()) == 0
    assert seen == [(N, C)]
    handle.remove()
    model(vectors())
    assert len(seen) == 1
    criterion.undo()
    assert len(model.fc._forward_hooks) == 0
    assert len(model.fc._forward_pre_hooks) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"schedule": "preset"}, {"schedule": lm.schedules.Ramp("nothing", 0.0, steps=3)}],
    ids=["no total_steps", "no such number"],
)
def test_what_is_refused_leaves_the_model_as_it_was(wrong: dict[str, Any]) -> None:
    model = Mlp()
    before = model.fc
    with pytest.raises(lm.LargeMarginError):
        lm.attach(model, cosface(), **wrong)
    assert model.fc is before
    assert before.bias is not None
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


def test_a_criterion_inside_its_model_is_no_second_owner() -> None:
    class Learned(lm.CrossEntropy):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Mlp()
            self.criterion = lm.attach(self.net, Learned())

    module = Module()
    groups = module.criterion.param_groups(module)
    torch.optim.SGD(groups, lr=0.1)  # which refuses a parameter that is there twice
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


def test_gradients_of_single_samples() -> None:
    """torch.func cannot branch on values of labels."""
    features, head = vectors(0, N, D), torch.randn(C, D)
    loss = lm.CrossEntropy()

    def one(x: Tensor, label: Tensor) -> Tensor:
        return loss(x[None], head, label[None])

    got = torch.func.vmap(torch.func.grad(one))(features, LABELS)
    features.requires_grad_()
    (want,) = torch.autograd.grad(loss(features, head, LABELS), features)
    torch.testing.assert_close(got, want * N)


def test_outputs_on_an_accelerator_are_looked_at_now_and_then() -> None:
    look = match_outputs.Agreement()
    elsewhere = torch.empty(2, 3, device="meta")
    looked = [look._looks(elsewhere) for _ in range(300)]
    assert sum(looked[: match_outputs.FIRST]) == match_outputs.FIRST
    assert sum(looked) == match_outputs.FIRST + 300 // match_outputs.EVERY
    look.selects = True
    assert look._looks(elsewhere)


def test_networks_whose_head_is_zero_pass() -> None:
    """Some begin with a head of zeros, whose logits are all the same."""
    from dropin.nets import ConvNet

    model = ConvNet()
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    criterion = lm.attach(model, lm.CrossEntropy())
    got = criterion(model(images()).double(), LABELS)
    assert float(got.detach()) == pytest.approx(math.log(C))


def test_a_position_is_chosen_by_its_whole_row() -> None:
    logits = torch.randn(2, 3, 4)
    logits[0, 2, 0] = logits[0, 0, 0]  # one number alone is as in the row that was chosen
    found = chosen_rows(logits[:, 0], logits)
    assert found is not None
    assert found.tolist() == [0, 3]
    logits[1, 0] = logits[0, 1]  # what another sequence gave there is not of this one
    found = chosen_rows(logits[:, 0], logits)
    assert found is not None
    assert found.tolist() == [0, 3]


def test_rows_are_looked_for_among_so_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows are compared with 6 of 5 numbers each."""
    logits = torch.randn(6, 5)
    for most, found in ((120, True), (119, False)):
        monkeypatch.setattr(match_outputs, "LARGEST", most)
        assert (chosen_rows(logits[:4], logits) is not None) == found


def test_diverged_outputs_are_those_of_diverged_logits() -> None:
    logits = torch.tensor([[math.inf, 1.0], [0.0, 1.0]])
    assert same(2 * logits, logits)
    assert not same(torch.zeros(2, 2), logits)


def test_probabilities_may_be_zero() -> None:
    logits = torch.tensor([[200.0, 0.0], [0.0, 300.0]])
    assert (logits.softmax(1) == 0).any()
    with pytest.warns(MarginWarning, match="are probabilities"):
        assert match_outputs.Agreement().rows_of(logits.softmax(1), logits, "outputs") is None


@pytest.mark.parametrize(("error", "taken"), [(0.03, True), (0.07, False)])
def test_probabilities_are_those_of_the_head_to_a_few_percent(error: float, taken: bool) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, -1.0, 0.5]])
    given = logits.softmax(1)
    given[0, 2] *= 1 + error
    assert same(given, logits) == taken


def test_a_loss_in_place_of_the_model_is_told_the_order() -> None:
    for model in (lm.CosFace(), 0.5 * lm.CosFace(), lm.Objective(a=lm.CosFace())):
        with pytest.raises(lm.LargeMarginError, match=r"The order is attach\(model, objective\)"):
            lm.attach(model, Mlp())  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "taken"), [(0.12, True), (0.25, False)])
def test_far_from_zero_a_cast_may_change_more(error: float, taken: bool) -> None:
    logits = 1e4 + torch.tensor([[0.0, 0.1, 0.05]])
    given = logits + torch.tensor([[error, 0.0, 0.0]])
    assert same(given, logits) == taken
