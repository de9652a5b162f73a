"""``undo`` gives the model back, with what was trained; attaching again and twice works."""

import copy
import warnings

import pytest
import torch
from dropin.nets import LABELS, C, ConvNet, D, Mlp, images, vectors
from torch import nn

import largemargin as lm
from largemargin.dropin import MarginWarning


def hooks(model: nn.Module) -> int:
    return sum(
        len(each)
        for module in model.modules()
        for each in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
        )
    )


OBJECTIVES = {
    "softmax": lm.CrossEntropy,
    "cosface": lambda: lm.CosFace(scale=8.0),
    "mixture": lambda: lm.GaussianMixture(C, D),
    "odn": lm.MarginHinge,
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_undo_restores_everything(name: str) -> None:
    model = ConvNet()
    original = copy.deepcopy(model)
    layer, weight, bias = model.fc, model.fc.weight, model.fc.bias
    criterion = lm.attach(model, OBJECTIVES[name]())
    assert hooks(model) > 0
    criterion(model(images()), LABELS)
    criterion.undo()
    assert model.fc is layer
    assert model.fc.weight is weight
    assert model.fc.bias is bias
    assert hooks(model) == 0
    assert list(model.state_dict()) == list(original.state_dict())
    assert torch.equal(model(images()), original(images()))
    with pytest.raises(lm.LargeMarginError, match="taken off"):
        criterion(model(images()), LABELS)
    criterion.undo()  # a second time changes nothing
    assert model.fc is layer


def test_undo_after_training_keeps_what_was_trained() -> None:
    model = ConvNet()
    layer, bias = model.fc, model.fc.bias.detach().clone()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion(model(images()), LABELS).backward()
    optimizer.step()
    weight = model.fc.weight.detach().clone()
    model.double().eval()
    criterion.undo()
    assert model.fc is layer
    assert not model.fc.training
    assert torch.equal(model.fc.weight, weight.double())
    assert torch.equal(model.fc.bias, bias.double())  # set aside, but converted with the model
    model(images().double())


def test_attach_after_undo_and_twice() -> None:
    model = ConvNet()
    lm.attach(model, lm.CosFace(scale=8.0)).undo()
    plain = lm.attach(model, lm.CrossEntropy())
    want = nn.functional.cross_entropy(model(images()), LABELS)
    torch.testing.assert_close(plain(model(images()), LABELS), want)
    cosine = lm.attach(model, lm.CosFace(scale=8.0))
    outputs = model(images())
    assert cosine(outputs, LABELS) > 0
    with pytest.raises(lm.LargeMarginError, match="replaced"):
        plain(outputs, LABELS)
    cosine.undo()
    torch.testing.assert_close(plain(model(images()), LABELS), want)
    again = lm.attach(model, lm.Kobayashi())
    outputs = model(images())
    assert again(outputs, LABELS) > plain(outputs, LABELS)  # two losses on one pass
    plain.undo()
    again.undo()
    assert hooks(model) == 0


def test_a_head_that_an_earlier_attach_has_shaped_is_warned_of() -> None:
    model = ConvNet()
    first = lm.attach(model, lm.CosFace(scale=8.0))
    with pytest.warns(MarginWarning, match="scale=8.*CrossEntropy trains it as it is.*undo"):
        lm.attach(model, lm.CrossEntropy()).undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.attach(model, lm.CrossEntropy(), warn=False).undo()
        lm.attach(model, lm.ArcFace(scale=8.0)).undo()  # asks for that form itself
        first.undo()
        lm.attach(model, lm.CrossEntropy()).undo()
        styled = nn.Sequential(lm.ClassHead(4, C, similarity="cosine"))  # as its owner made it
        lm.attach(styled, lm.CrossEntropy()).undo()
        lm.attach(styled, lm.CosFace(scale=8.0)).undo()
        lm.attach(styled, lm.CrossEntropy()).undo()


def test_undo_of_a_restyled_head() -> None:
    head = lm.ClassHead(D, C)
    model = nn.Sequential(nn.Linear(4, D), head)
    bias = head.bias
    before = model(vectors())
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    assert head.bias is None
    assert head.similarity == "cosine"
    criterion.undo()
    assert head.bias is bias
    assert torch.equal(model(vectors()), before)


def test_undo_leaves_a_layer_that_was_put_there_since() -> None:
    model = ConvNet()
    criterion = lm.attach(model, lm.CosFace())
    other = model.fc = nn.Linear(D, C)
    criterion.undo()
    assert model.fc is other


def test_undo_of_a_layer_in_two_places() -> None:
    model = ConvNet()
    model.alias = model.fc
    layer = model.fc
    criterion = lm.attach(model, lm.CosFace(), layer="fc")
    assert model.alias is model.fc is not layer
    criterion.undo()
    assert model.alias is model.fc is layer


def test_undo_of_a_copy_takes_its_hooks_off() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    twin, loss = copy.deepcopy((model, criterion))
    loss.undo()
    assert hooks(twin) == 0
    assert isinstance(twin.fc, nn.Linear)
    assert hooks(model) > 0
    criterion(model(vectors()), LABELS)


def test_a_state_dict_that_fits_the_plain_model_says_what_it_lacks(recwarn) -> None:
    """Where there was a bias, loading fails; without one nothing would tell."""

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))

    model = plain()
    criterion = lm.attach(model, lm.CosFace(scale=9.0))
    with pytest.warns(MarginWarning, match=r"similarity='cosine', scale=9\).*lm.export.save"):
        state = model.state_dict()
    assert str(plain().load_state_dict(state)) == "<All keys matched successfully>"
    model.state_dict()  # said once
    criterion.undo()
    model.state_dict()
    for objective, warn in ((lm.CosFace(), False), (lm.CrossEntropy(), True)):
        other = plain()
        lm.attach(other, objective, warn=warn)
        other.state_dict()
    withbias = nn.Sequential(nn.Linear(4, 3))
    lm.attach(withbias, lm.CosFace())
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        nn.Sequential(nn.Linear(4, 3)).load_state_dict(withbias.state_dict())
    assert not recwarn.list


def test_saving_with_the_form_is_silent(tmp_path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
    criterion = lm.attach(model, lm.CosFace(scale=9.0))
    lm.export.save(tmp_path / "run", model, criterion)
    again = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
    assert lm.export.load(tmp_path / "run", again).model[1].similarity == "cosine"
