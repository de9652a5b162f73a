"""Exported programs: plain operators, equal to the model, and no largemargin to run them."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.dropin.feature_hooks import NO_PASS
from largemargin.export import to_exported_program
from largemargin.export.program import check_equal

SIMILARITIES = ("dot", "cosine", "cosine_prototypes", "euclidean")
# The whole library is out of reach, as on a machine that never had it.
BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "largemargin":
            raise ImportError("largemargin is not installed here")

sys.meta_path.insert(0, Block())
sys.modules.pop("largemargin", None)
"""


class Backbone(nn.Module):
    """A small CNN whose head is given."""

    def __init__(self, head):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = head

    def forward(self, images):
        return self.head(self.body(images))


class Talkative(nn.Module):
    """Takes keywords, returns a dict whose logits went through a softmax."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, pixels, gain=None):
        hidden = self.body(pixels) if gain is None else gain * self.body(pixels)
        return {"hidden": (hidden,), "probabilities": self.fc(hidden).softmax(-1)}


def with_head(similarity, bias=False, scale=12.0):
    model = Backbone(lm.ClassHead(24, 5, similarity=similarity, scale=scale, bias=bias))
    model(torch.randn(8, 1, 8, 8))  # batch norm has seen something
    return model


def images(count=3):
    return torch.randn(count, 1, 8, 8)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def dtypes(program):
    values = [node.meta.get("val") for node in program.graph.nodes]
    return {each.dtype for each in values if isinstance(each, torch.Tensor)}


def eager(model, inputs):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(inputs)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_heads_export_to_plain_operators(similarity, strict):
    model = with_head(similarity, bias=True)
    program = to_exported_program(model, images(), strict=strict)
    for count in (1, 7):
        inputs = images(count)
        want = eager(model, inputs)
        got = program.module()(inputs)
        assert (got - want).abs().max() <= 1e-6 * want.abs().max().clamp_min(1)
    assert all(name.startswith("aten.") for name in operators(program)), operators(program)
    assert torch.float64 not in dtypes(program)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_plain_heads_equal_ours_everywhere(similarity, bias):
    """Also for zero rows and rows whose squares leave the range of float32."""
    from largemargin.export.plain_model import plain_head

    head = lm.ClassHead(6, 4, similarity=similarity, scale=7.0, bias=bias)
    with torch.no_grad():
        head.weight[1] = 0
        if bias:
            head.bias.normal_()
    rows = torch.randn(2, 5, 6)
    rows[0, 0] = 0
    if similarity == "cosine":
        rows[0, 1] *= 1e30
        rows[0, 2] *= 1e-25
    with torch.no_grad():
        want, got = head(rows), plain_head(head)(rows)
    assert bool(torch.isfinite(got).all())
    assert torch.allclose(got, want, rtol=2e-6, atol=2e-6)


def test_simplex_head_and_bare_heads():
    model = Backbone(lm.SimplexHead(24, 5))
    with torch.no_grad():
        model.head.log_scale.fill_(0.7)
    inputs = images()
    program = to_exported_program(model, inputs)
    assert torch.allclose(program.module()(inputs), eager(model, inputs), atol=1e-6)
    head, features = lm.ClassHead(6, 4, similarity="cosine"), torch.randn(5, 6)
    program = to_exported_program(head, features[:2])
    assert torch.allclose(program.module()(features), head(features), atol=1e-6)


@pytest.mark.parametrize(
    "objective",
    [
        lm.CrossEntropy(),
        lm.CosFace(scale=12.0),
        lm.GaussianMixture(5, 24),
        lm.SphereFace(),
        0.5 * lm.MarginHinge(),
    ],
    ids=lambda each: type(getattr(each, "loss", each)).__name__,
)
def test_attached_models_export_and_stay_attached(objective):
    model = Backbone(nn.Linear(24, 5))
    criterion = lm.attach(model, copy.deepcopy(objective))
    before, head = copy.deepcopy(model.state_dict()), model.head
    program = to_exported_program(model, images(2))
    inputs = images(4)
    assert torch.allclose(program.module()(inputs), eager(model, inputs), atol=1e-5)
    assert model.training
    assert model.head is head
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    criterion(model(inputs), torch.tensor([0, 1, 2, 3])).backward()
    assert head.weight.grad is not None


def test_only_our_own_hooks_are_left_out():
    from largemargin.export.plain_model import evaluation_copy

    model, seen = Backbone(nn.Linear(24, 5)), []
    lm.attach(model, lm.CosFace())
    model.body.register_forward_hook(lambda module, args, output: seen.append(1) or 2 * output)
    copied = evaluation_copy(model)
    assert not copied.head._forward_hooks
    assert not copied._forward_hooks
    assert not copied._forward_pre_hooks
    assert model.head._forward_hooks
    inputs = images(2)
    assert torch.equal(copied(inputs), eager(model, inputs))
    assert len(seen) == 2


# Dynamo, which strict mode traces with, sees the hooks of attach remember the pass.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_torch_export_of_an_attached_model_works_directly(strict):
    model = Backbone(nn.Linear(24, 5))
    criterion = lm.attach(model, lm.CosFace(scale=12.0))
    model.eval()
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (images(4),), dynamic_shapes=shapes, strict=strict)
    assert not any("largemargin" in name for name in operators(program))
    assert criterion._hooks.last is NO_PASS  # none of tensors that hold nothing
    inputs = images(2)
    assert torch.allclose(program.module()(inputs), model(inputs), atol=1e-5)


def test_programs_run_without_the_library(tmp_path):
    """In a fresh process that cannot import largemargin: both forms of export."""
    model = Backbone(nn.Linear(24, 5))
    lm.attach(model, lm.ArcFace(scale=12.0))
    model.eval()
    inputs = images(4)
    torch.export.save(to_exported_program(model, inputs), tmp_path / "ours.pt2")
    direct = torch.export.export(model, (inputs,))
    torch.export.save(direct, tmp_path / "direct.pt2")
    torch.save({"inputs": inputs, "outputs": eager(model, inputs)}, tmp_path / "data.pt")
    script = f"""
import torch
{BLOCKED}
try:
    import largemargin
except ImportError:
    pass
else:
    raise SystemExit("the import was not blocked")
data = torch.load({str(tmp_path / "data.pt")!r})
for name in ("ours", "direct"):
    got = torch.export.load({str(tmp_path)!r} + "/" + name + ".pt2").module()(data["inputs"])
    assert (got - data["outputs"]).abs().max() < 1e-5, name
print("ran")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ran"]


@pytest.mark.parametrize("outputs", ["logits", "probabilities", "features"])
def test_outputs_of_a_model_that_returns_a_dict(outputs):
    model, inputs = Talkative(), {"pixels": torch.randn(3, 6), "gain": torch.rand(3, 1)}
    lm.attach(model, lm.CosFace(scale=9.0))
    program = to_exported_program(model, inputs, outputs=outputs)
    assert "aten.softmax.int" in operators(program) or outputs != "probabilities"
    pixels, gain = torch.randn(4, 6), torch.rand(4, 1)
    features = gain * model.body(pixels)
    want = {
        "features": features,
        "logits": model.fc(features),
        "probabilities": model.fc(features).softmax(-1),
    }
    assert torch.allclose(program.module()(pixels, gain), want[outputs], atol=1e-5)
    if outputs == "features":
        assert operators(program) == {"aten.linear.default", "aten.mul.Tensor"}  # no head in it


def test_the_attached_head_is_exported_where_several_are_likely():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.old, self.new = nn.Linear(6, 3), nn.Linear(6, 4)

        def forward(self, x):
            return self.old(x), self.new(x)

    model, inputs = Two(), torch.randn(3, 6)
    with pytest.raises(LargeMarginError, match="several layers"):
        to_exported_program(model, inputs)
    assert to_exported_program(model, inputs, layer="new").module()(inputs).shape == (3, 4)
    lm.attach(model, lm.CosFace(), layer="old")
    assert to_exported_program(model, inputs).module()(inputs).shape == (3, 3)


def test_a_fixed_batch_size_is_possible():
    model, inputs = with_head("cosine"), images(3)
    program = to_exported_program(model, inputs, dynamic_batch=False)
    assert program.module()(inputs).shape == (3, 5)
    with pytest.raises(AssertionError):
        program.module()(images(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_other_precisions(similarity, dtype):
    """Half precision heads compute in float32, as ours do."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), lm.ClassHead(8, 5, similarity=similarity))
    inputs = torch.randn(4, 6)
    exact = model(inputs).detach()
    model.to(dtype)
    got = to_exported_program(model, inputs[:2].to(dtype)).module()(inputs.to(dtype))
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-5}[dtype]
    assert torch.allclose(got.float(), exact, atol=tolerance * float(exact.abs().max().clamp(1)))


def test_zero_features_give_finite_probabilities():
    model = with_head("cosine")
    nn.init.zeros_(model.body[1].weight)
    nn.init.zeros_(model.body[1].bias)
    got = to_exported_program(model, images(), outputs="probabilities").module()(images(2))
    assert torch.allclose(got, torch.full((2, 5), 0.2))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x + torch.randn_like(x))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) + self.fc(-x)


class Branches(Noisy):
    def forward(self, x):
        return self.fc(x if x.sum() > 0 else -x)


class Fixed(Noisy):
    def forward(self, x):
        return self.fc(x.reshape(3, 6))


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (nn.Conv2d(1, 2, 3), torch.randn(2, 1, 8, 8), "no linear layer"),
        (nn.Linear(6, 3), [], "tensor, a tuple of tensors or a dict"),
        (nn.Linear(6, 3), (torch.randn(2, 6), 3), r"tuple of \['Tensor', 'int'\]"),
        (nn.Linear(6, 3), torch.randn(0, 6), "at least one sample"),
        (nn.Linear(6, 3, device="meta"), torch.randn(2, 6), "meta device"),
        (Noisy(), torch.randn(2, 6), "differs from the model by"),
        (Twice(), torch.randn(2, 6), "ran 2 times"),
        (Branches(), torch.randn(2, 6), "branches on values"),
        (Fixed(), torch.randn(3, 6), "dynamic_batch=False"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_what_cannot_be_exported_says_why(model, example, message):
    with pytest.raises(LargeMarginError, match=message):
        to_exported_program(model, example)


def test_wrong_words_and_tolerances():
    with pytest.raises(LargeMarginError, match="outputs"):
        to_exported_program(nn.Linear(6, 3), torch.randn(2, 6), outputs="scores")
    program = to_exported_program(Noisy(), torch.randn(2, 6), verify=False)
    assert program.module()(torch.randn(4, 6)).shape == (4, 3)
    to_exported_program(Noisy(), torch.randn(2, 6), tolerance=100.0)
    logits = torch.tensor([[0.0, 4.0]])
    check_equal("it", logits, logits, nn.Linear(1, 2), 0.0)
    check_equal("it", logits + 1.0, logits, nn.Linear(1, 2), 0.25)
    with pytest.raises(LargeMarginError, match="it differs from the model by 2"):
        check_equal("it", logits + 1.0, logits, nn.Linear(1, 2), 0.24)


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_a_model_with_a_temperature(outputs):
    """Its division comes after the head, and is part of what it predicts."""
    inner = with_head("cosine")
    model = lm.measuring.TemperatureScaled(inner, 4.0).eval()
    images = torch.randn(3, 1, 8, 8)
    got = to_exported_program(model, images, outputs=outputs).module()(images)
    want = model(images) if outputs == "logits" else model(images).softmax(1)
    torch.testing.assert_close(got, want.detach())
    if outputs == "probabilities":
        program = to_exported_program(model, images, outputs=outputs, temperature=0.5)
        want = (inner.eval()(images) / 2).softmax(1).detach()
        torch.testing.assert_close(program.module()(images), want)
