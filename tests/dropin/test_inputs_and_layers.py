"""Losses on input gradients, hidden layers and features of other modules, through ``attach``."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropin.nets import LABELS, C, ConvNet, D, Mlp, gradients, images, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import largemargin as lm

ODN = {
    "distribution": lambda: lm.MarginDistribution(),
    "distribution, exact": lambda: lm.MarginDistribution(differentiable_norm=True),
    "hinge": lambda: lm.MarginHinge(threshold=3.0),
}


def compare(got: nn.Module, value: Tensor, want: nn.Module, wanted: Tensor) -> None:
    torch.testing.assert_close(value, wanted)
    value.backward()
    wanted.backward()
    expected = gradients(want)
    assert expected
    for name, gradient in gradients(got).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("name", ODN)
def test_input_gradients(name: str) -> None:
    model = ConvNet()
    hand = copy.deepcopy(model)
    criterion = lm.attach(model, ODN[name]())
    x = images()
    value = criterion(model(x), LABELS)
    assert not x.requires_grad  # the caller's tensor is left alone
    assert x.grad is None
    inputs = images().requires_grad_()
    compare(model, value, hand, ODN[name]()(hand(inputs), LABELS, inputs))


@pytest.mark.parametrize("given", ["keyword", "second", "requires grad", "log_softmax"])
def test_inputs_however_they_are_passed(given: str) -> None:
    class Masked(ConvNet):
        def forward(self, mask: Any = None, x: Any = None) -> Tensor:
            return super().forward(x)

    model = Masked()
    hand = copy.deepcopy(model)
    criterion = lm.attach(model, lm.MarginHinge(threshold=3.0))
    x = images()
    if given == "keyword":
        value = criterion(model(x=x), LABELS)
    elif given == "second":
        value = criterion(model(torch.ones(3, dtype=torch.bool), x), LABELS)
    elif given == "requires grad":
        value = criterion(model(None, x.requires_grad_()), LABELS)
    else:
        value = criterion(model(None, x).log_softmax(1), LABELS)  # logits are made again
    inputs = images().requires_grad_()
    compare(model, value, hand, lm.MarginHinge(threshold=3.0)(hand(None, inputs), LABELS, inputs))


def test_inputs_beside_another_term_and_checkpointing() -> None:
    model = ConvNet()
    hand = copy.deepcopy(model)
    terms = lm.Objective(softmax=lm.CrossEntropy(), odn=0.1 * lm.MarginHinge(threshold=3.0))
    criterion = lm.attach(model, terms)
    outputs = checkpoint(model, images(), use_reentrant=False)
    inputs = images().requires_grad_()
    logits = hand(inputs)
    want = lm.CrossEntropy()(logits, LABELS) + 0.1 * lm.MarginHinge(threshold=3.0)(
        logits, LABELS, inputs
    )
    compare(model, criterion(outputs, LABELS), hand, want)


def test_input_losses_that_cannot_work() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, C))
    criterion = lm.attach(model, lm.MarginHinge())
    with pytest.raises(lm.LargeMarginError, match=r"floating point input.*layers="):
        criterion(model(torch.zeros(6, 3).long()), LABELS)
    model = ConvNet()
    criterion = lm.attach(model, lm.Objective(a=lm.MarginHinge(), b=lm.Stability()))
    with pytest.raises(lm.LargeMarginError, match="second half"):
        criterion(model(images()), LABELS[:3], noisy="second half")
    criterion.undo()
    hidden = lm.Objective(a=lm.LayerMargin(), b=lm.Stability())
    criterion = lm.attach(model, hidden, layers=["stem"])
    with pytest.raises(lm.LargeMarginError, match="second half"):
        criterion(model(images()), LABELS[:3], noisy="second half")
    criterion.undo()
    criterion = lm.attach(model, lm.MarginHinge())
    with torch.no_grad(), pytest.raises(lm.LargeMarginError, match=r"torch\.no_grad"):
        criterion(model(images()), LABELS)


@pytest.mark.parametrize("layers", [["stem"], ["stem", "body.0"]])
def test_hidden_layers(layers: list[str]) -> None:
    model = ConvNet()
    hand = copy.deepcopy(model)
    criterion = lm.attach(model, lm.LayerMargin(gamma=2.0), layers=layers)
    value = criterion(model(images()), LABELS)
    held: list[Tensor] = []
    for name in layers:
        hand.get_submodule(name).register_forward_hook(lambda m, a, out: held.append(out))
    logits = hand(images())
    compare(model, value, hand, lm.LayerMargin(gamma=2.0)(logits, LABELS, held))


def test_one_hidden_layer_needs_no_list() -> None:
    model = ConvNet()
    values = []
    for layers in ("stem", ["stem"]):
        criterion = lm.attach(model, lm.LayerMargin(gamma=2.0), layers=layers)
        values.append(criterion(model(images()), LABELS))
        criterion.undo()
    torch.testing.assert_close(*values)
    with pytest.raises(lm.LargeMarginError, match=r"has no layer 'stam'\. Closest: 'stem'"):
        lm.attach(model, lm.LayerMargin(), layers="stam")


def test_hidden_layers_have_to_be_named_and_run() -> None:
    with pytest.raises(lm.LargeMarginError, match="'layer_margin' works on hidden layers"):
        lm.attach(ConvNet(), lm.LayerMargin())
    model = ConvNet()
    model.aside = nn.Conv2d(3, 3, 1)
    criterion = lm.attach(model, lm.LayerMargin(), layers=["aside"])
    with pytest.raises(lm.LargeMarginError, match="did not run before the head"):
        criterion(model(images()), LABELS)


def center(dim: int) -> lm.CenterLoss:
    return lm.CenterLoss(C, dim, strength=0.5)


def test_a_term_on_features_of_another_module() -> None:
    """Cross entropy at the head, center loss on a hidden map, flattened."""
    model = ConvNet()
    hand = copy.deepcopy(model)
    terms = lm.Objective(softmax=lm.CrossEntropy(), center=0.2 * center(6 * 64))
    criterion = lm.attach(model, terms, features={"center": "stem"}, gradient_norms=True)
    for seed in range(2):
        model.zero_grad()
        hand.zero_grad()
        outputs = model(images(seed))
        value = criterion(outputs, LABELS)
        hidden = hand.stem(images(seed))
        logits = hand.fc(hand.pool(hand.body(hidden)).flatten(1))
        if seed == 0:
            reference = center(6 * 64)
        want = lm.CrossEntropy()(logits, LABELS) + 0.2 * reference(hidden.flatten(1), LABELS)
        own = criterion.read(outputs).own["center"]
        slope = torch.autograd.grad(
            0.2 * 0.25 * (own.flatten(1) - reference.centers[LABELS] * 0).square().sum(), own
        )[0]
        if seed == 0:  # centers start at 0, so the gradient is known
            torch.testing.assert_close(criterion.gradient_norms["center"], slope.norm())
        compare(model, value, hand, want)
    torch.testing.assert_close(criterion.objective.terms["center"].centers, reference.centers)


def test_a_term_on_its_own_features_does_not_read_the_logits_of_others() -> None:
    model = Mlp()
    terms = lm.Objective(
        face=lm.CosFace(margin=0.2, scale=8.0), low=lm.CosFace(margin=0.1, scale=8.0)
    )
    criterion = lm.attach(model, terms, features={"low": "body.0"})
    criterion(model(vectors()), LABELS)
    head = model.fc.weight
    for name, layer, margin in (("face", model.body, 0.2), ("low", model.body[0], 0.1)):
        cosines = F.normalize(layer(vectors())) @ F.normalize(head).T
        expected = F.cross_entropy(8 * (cosines - margin * F.one_hot(LABELS, C)), LABELS)
        torch.testing.assert_close(criterion.terms[name], expected.detach())


def test_all_terms_on_features_before_dropout() -> None:
    class Dropped(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.drop(self.body(x)))

    model = Dropped()
    criterion = lm.attach(model, lm.Discriminative(C, D), features="body")
    got = criterion(model(vectors()), LABELS)
    want = lm.Discriminative(C, D)(model.body(vectors()), model.fc, LABELS)
    torch.testing.assert_close(got, want)


def test_features_of_sequences_before_dropout() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.drop, self.fc = nn.Embedding(7, D), nn.Dropout(0.5), nn.Linear(D, C)

        def forward(self, words: Tensor) -> Tensor:
            return self.fc(self.drop(self.body(words)))

    model, words = Words(), torch.arange(12).view(3, 4) % 7
    labels = torch.arange(12).view(3, 4) % C
    criterion = lm.attach(model, lm.Discriminative(C, D), features="body")
    got = criterion(model(words), labels)
    rows = model.body(words).flatten(0, 1)
    torch.testing.assert_close(got, lm.Discriminative(C, D)(rows, model.fc, labels.flatten()))


def test_noisy_features_of_another_module() -> None:
    model = ConvNet()
    criterion = lm.attach(model, lm.Objective(stay=lm.Stability()), features={"stay": "body"})
    got = criterion(model(images(0)), LABELS, noisy=model(images(1)))
    clean, noisy = (model.body(model.stem(images(seed))).flatten(1) for seed in (0, 1))
    torch.testing.assert_close(got, lm.Stability()(clean, noisy))
    both = criterion(model(torch.cat([images(0), images(1)])), LABELS, noisy="second half")
    torch.testing.assert_close(both, got)


def test_named_features_that_do_not_fit() -> None:
    with pytest.raises(lm.LargeMarginError, match="term 'centre', but the objective's terms are"):
        lm.attach(ConvNet(), lm.CrossEntropy(), features={"centre": "body"})
    model = ConvNet()
    criterion = lm.attach(model, lm.CrossEntropy(), features="stem")
    with pytest.raises(lm.LargeMarginError, match="features="):
        criterion(model(images()), LABELS)
