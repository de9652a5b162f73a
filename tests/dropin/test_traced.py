"""Attached models through torch.fx, torch.jit.trace and torch.export: as they predict."""

import copy
import io
from typing import Any

import pytest
import torch
from dropin.nets import LABELS, ConvNet, D, Mlp, images, vectors
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

import largemargin as lm
from largemargin.errors import LargeMarginError

OBJECTIVES: dict[str, Any] = {
    "linear head": lambda C, D: lm.CrossEntropy(),
    "cosine head": lambda C, D: lm.CosFace(scale=8.0, margin=0.2),
    "euclidean head": lambda C, D: lm.GaussianMixture(C, D),
    "inputs": lambda C, D: lm.MarginDistribution(),
}
jit_warns = pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning"
)


def by_fx(model: nn.Module, x: Tensor) -> Any:
    return torch.fx.symbolic_trace(model)


def by_jit(model: nn.Module, x: Tensor) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), file)
    file.seek(0)
    return torch.jit.load(file)


def by_export(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


@jit_warns
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside another"])
@pytest.mark.parametrize("trace", [by_fx, by_jit, by_export])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_traced_model_predicts_as_the_model(name: str, trace: Any, inside: bool) -> None:
    model = Mlp()
    criterion = lm.attach(model, OBJECTIVES[name])
    outer = nn.Sequential(nn.Identity(), model) if inside else model
    before = criterion(outer(vectors()), LABELS).detach()
    traced = trace(outer.eval(), vectors())
    other = vectors(5) if trace is by_export else vectors(5, 3, 4)
    torch.testing.assert_close(traced(other), model(other))
    model.train()
    torch.testing.assert_close(criterion(outer(vectors()), LABELS).detach(), before)


@jit_warns
@pytest.mark.parametrize("trace", [by_fx, by_jit])
@pytest.mark.parametrize(
    "head",
    [
        lambda: lm.SimplexHead(D, 5),
        lambda: lm.ClassHead(D, 5, similarity="cosine_prototypes", scale=3.0, bias=True),
    ],
)
def test_heads_by_themselves(head: Any, trace: Any) -> None:
    model = nn.Sequential(nn.Linear(4, D), head())
    traced = trace(model, vectors())
    other = vectors(5, 3, 4)
    torch.testing.assert_close(traced(other), model(other))


def test_a_zero_vector_in_a_traced_cosine_head() -> None:
    head = torch.fx.symbolic_trace(nn.Sequential(lm.ClassHead(4, 3, similarity="cosine")))
    assert torch.equal(head(torch.zeros(2, 4)), torch.zeros(2, 3))


def test_features_by_torchvision() -> None:
    model = ConvNet().eval()
    lm.attach(model, lm.CosFace(scale=8.0, margin=0.2))
    found = create_feature_extractor(model, ["body", "fc"])(images())
    torch.testing.assert_close(found["fc"], model(images()))


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("made", [lm.CosFace, lm.CrossEntropy, lambda: lm.ClassHead(4, 3)])
def test_scripting_says_what_to_do_instead(made: Any) -> None:
    module = made()
    name = type(module).__name__
    for outer in (module, nn.Sequential(module)):
        with pytest.raises(LargeMarginError, match=f"cannot compile {name}.*to_exported_program"):
            torch.jit.script(outer)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_scripting_an_attached_model_says_so() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    with pytest.raises(LargeMarginError, match="cannot compile Criterion"):
        torch.jit.script(criterion)
    with pytest.raises(LargeMarginError, match="cannot compile Objective"):
        torch.jit.script(criterion.objective)
    with pytest.raises(AttributeError, match=r"a model with an attached loss.*criterion\.undo"):
        torch.jit.script(model)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="dynamo does not say that it exports")
def test_strict_export_of_a_model_whose_loss_is_on_input_gradients() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.MarginDistribution())
    before = criterion(model(vectors()), LABELS).detach()
    program = torch.export.export(model, (vectors(),), strict=True).module()
    torch.testing.assert_close(program(vectors(5)), model(vectors(5)))
    torch.testing.assert_close(criterion(model(vectors()), LABELS).detach(), before)


@pytest.mark.parametrize("build", [lm.MarginDistribution, lm.MarginHinge, lm.LayerMargin])
def test_exporting_a_loss_on_gradients_says_what_to_do_instead(build: Any) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = Mlp(), build()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            given = [x] if build is lm.LayerMargin else x
            value: Tensor = self.loss(self.model(x), labels, given)
            return value

    x = vectors().requires_grad_()
    assert Step()(x, LABELS).isfinite()
    with pytest.raises(LargeMarginError, match=r"cannot be exported.*Export the model"):
        torch.export.export(Step(), (x, LABELS), strict=False)


@jit_warns
@pytest.mark.parametrize("by", [torch.jit.script, lambda body: by_jit(body, vectors())])
def test_a_backbone_of_torchscript_below_a_plain_head(by: Any) -> None:
    torch.manual_seed(0)
    x = vectors()
    body, head = nn.Sequential(nn.Linear(x.shape[1], 8), nn.Tanh()), nn.Linear(8, 3)
    labels, slopes = torch.arange(len(x)) % 3, []
    for each in (body, by(body)):
        model = nn.Sequential(each, copy.deepcopy(head))
        criterion = lm.attach(model, lm.CosFace(scale=4.0))
        parameter = next(model.parameters())
        slopes.append(torch.autograd.grad(criterion(model(x), labels), parameter)[0])
    torch.testing.assert_close(*slopes)
    with pytest.raises(LargeMarginError, match="has no linear layer"):
        lm.measure(by(body), [(x, labels)])


def test_complex_weights_have_no_margin() -> None:
    model = nn.Sequential(nn.Linear(6, 3, dtype=torch.complex64))
    with pytest.raises(LargeMarginError, match=r"layer '0' is torch\.complex64"):
        lm.attach(model, lm.CosFace())
