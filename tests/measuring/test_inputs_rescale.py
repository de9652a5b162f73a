"""T_alpha on models (NGY-P4.4): what scales, what stays, which layer is found, Corollary 4.1."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import largemargin as lm
from largemargin import geometry as g
from largemargin.errors import LargeMarginError
from largemargin.measuring.rescale_model import rescale_model


class ConvNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x)))
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(h, 1), 1))


def mlp():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


MODELS = {
    "mlp": (mlp, (4,), "2"),
    "linear features": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), (4,), "0"),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)
        ),
        (2, 6, 6),
        "0",
    ),
    "batch norm": (ConvNet, (2, 5, 5), "norm"),
}


def features_of(model, x):
    seen = []
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    handle = head.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    logits = model.eval()(x).detach()
    handle.remove()
    return seen[0].detach(), logits, head


@pytest.mark.parametrize("alpha", [0.3, 4.0])
@pytest.mark.parametrize("name", MODELS)
def test_what_scales_and_what_stays(name, alpha):
    make, shape, _ = MODELS[name]
    model = make().double()
    x = torch.randn(30, *shape).double()
    if isinstance(model, ConvNet):
        model.train()(x + 1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    changed = rescale_model(model, alpha, inputs=x)
    assert all(bool((before[key] == value).all()) for key, value in model.state_dict().items())
    q, logits, head = features_of(model, x)
    new_q, new_logits, new_head = features_of(changed, x)
    torch.testing.assert_close(new_q, alpha * q)
    torch.testing.assert_close(new_logits, alpha * logits)
    assert torch.equal(head.weight, new_head.weight)
    y = torch.arange(30) % 3
    old = g.boundary_margins(q, head.weight.detach(), y, bias=head.bias.detach())
    new = g.boundary_margins(new_q, head.weight.detach(), y, bias=new_head.bias.detach())
    torch.testing.assert_close(new.signed, alpha * old.signed)
    torch.testing.assert_close(g.class_dispersion(new_q, y, 3), alpha * g.class_dispersion(q, y, 3))
    assert torch.equal(logits.argmax(1), new_logits.argmax(1))
    assert not torch.allclose(logits.softmax(1), new_logits.softmax(1))


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_is_found(name):
    make, _, layer = MODELS[name]
    model = make()
    changed = rescale_model(model, 2.0)
    head = [key for key in model.state_dict() if key.endswith("bias")][-1]
    expected = {f"{layer}.weight", f"{layer}.bias", head}
    differing = {
        key
        for key, value in changed.state_dict().items()
        if not torch.equal(value, model.state_dict()[key])
    }
    assert differing == {key for key in expected if bool(model.state_dict()[key].any())}
    assert rescale_model(model, 2.0, features_layer=layer) is not model


def test_corollary_four_one():
    """T_a1 and T_1/a2 move the parameters in opposite directions; ratios never change."""
    model = mlp().double()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    moves = {
        alpha: nn.utils.parameters_to_vector(rescale_model(model, alpha).parameters()).detach()
        - theta
        for alpha in (1.5, 7.0, 1 / 1.2, 1 / 30)
    }
    u = moves[1.5] / 0.5
    for alpha, move in moves.items():
        torch.testing.assert_close(move, (alpha - 1) * u, rtol=1e-12, atol=1e-14)
    for up in (1.5, 7.0):
        for down in (1 / 1.2, 1 / 30):
            cosine = nn.functional.cosine_similarity(moves[up], moves[down], dim=0)
            assert float(cosine) == pytest.approx(-1, abs=1e-12)
    x, y = torch.randn(40, 4).double(), torch.arange(40) % 3

    def ratios(each):
        q, _, head = features_of(each, x)
        margins = g.boundary_margins(q, head.weight.detach(), y, bias=head.bias.detach())
        return margins.unsigned[:, None] / g.class_dispersion(q, y, 3)

    for alpha in moves:
        torch.testing.assert_close(ratios(rescale_model(model, alpha)), ratios(model))


def test_cosine_heads_keep_even_their_probabilities():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), lm.ClassHead(5, 3, similarity="cosine"))
    x = torch.randn(8, 4)
    torch.testing.assert_close(rescale_model(model, 3.0, inputs=x)(x), model(x))


class Named(nn.Module):
    """Calls its head by keyword."""

    def __init__(self):
        super().__init__()
        self.hidden, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(input=torch.relu(self.hidden(x)))


def test_a_head_may_be_called_by_keyword():
    model, x = Named(), torch.randn(8, 4)
    torch.testing.assert_close(rescale_model(model, 3.0)(x), 3 * model(x))


def test_models_that_have_no_such_layer():
    with pytest.raises(LargeMarginError, match="sum of several layers"):
        rescale_model(resnet18(num_classes=4), 2.0)
    with pytest.raises(LargeMarginError, match="Tanh"):
        rescale_model(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 2.0)
    with pytest.raises(LargeMarginError, match="no layer comes before"):
        rescale_model(nn.Linear(4, 3), 2.0)
    with pytest.raises(LargeMarginError, match="comes after it"):
        rescale_model(ConvNet(), 2.0, features_layer="conv")
    with pytest.raises(LargeMarginError, match="alpha"):
        rescale_model(mlp(), -1.0)
    euclidean = nn.Sequential(nn.Linear(4, 5), lm.ClassHead(5, 3, similarity="euclidean"))
    with pytest.raises(LargeMarginError, match="Euclidean"):
        rescale_model(euclidean, 2.0)
    normed = mlp()
    nn.utils.parametrizations.weight_norm(normed[2])
    with pytest.raises(LargeMarginError, match="parametrized"):
        rescale_model(normed, 2.0)


class Twisted(nn.Module):
    """Control flow on values: torch.fx cannot trace it."""

    def __init__(self, squash):
        super().__init__()
        self.hidden, self.fc, self.squash = nn.Linear(4, 5), nn.Linear(5, 3), squash

    def forward(self, x):
        q = torch.relu(self.hidden(x))
        if self.squash and float(q.detach().sum()) != -1:
            q = torch.tanh(q)
        return self.fc(q if float(q.detach().sum()) >= 0 else -q)


def test_models_that_cannot_be_traced_are_checked_on_a_batch():
    x = torch.randn(6, 4)
    with pytest.raises(LargeMarginError, match=r"features_layer=\.\.\., inputs"):
        rescale_model(Twisted(False), 2.0)
    with pytest.raises(LargeMarginError, match="Pass a batch"):
        rescale_model(Twisted(False), 2.0, features_layer="hidden")
    model = Twisted(False)
    changed = rescale_model(model, 2.0, features_layer="hidden", inputs=x)
    torch.testing.assert_close(changed(x), 2 * model(x))
    with pytest.raises(LargeMarginError, match="do not scale"):
        rescale_model(Twisted(True), 2.0, features_layer="hidden", inputs=x)


def test_shared_weights_are_refused():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[0].weight = model[2].weight
    with pytest.raises(LargeMarginError, match="shares"):
        rescale_model(model, 2.0)
