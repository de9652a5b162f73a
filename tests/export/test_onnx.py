"""ONNX files: equal to torch in onnxruntime, any batch size, complete or not there at all."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.export import to_onnx

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'largemargin[export]'")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'largemargin[export]'")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="needs onnxruntime: pip install 'largemargin[export]'"
)


def small_cnn(head=None):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 16),
        nn.ReLU(),
        nn.Linear(16, 10) if head is None else head,
    )


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})[0]


def assert_same(got, want):
    """To 1e-5 of the largest logit: that is below the spacing of float32 for a scale of 64."""
    want = want.detach()
    assert got.shape == tuple(want.shape)
    size = max(1.0, float(want.abs().max()))
    assert float((torch.as_tensor(got) - want).abs().max()) <= 1e-5 * size


def element_types(path):
    graph = onnx.load(path).graph
    every = [*graph.input, *graph.output, *graph.value_info]
    types = {value.type.tensor_type.elem_type for value in every}
    return types | {each.data_type for each in graph.initializer}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One file for several tests: exporting takes seconds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_cnn()
        lm.attach(model, lm.ArcFace(scale=30.0))
        model(torch.randn(16, 3, 16, 16))
        path = tmp_path_factory.mktemp("onnx") / "model.onnx"
        names = [f"class {index} é" for index in range(10)]
        returned = to_onnx(
            model,
            torch.randn(1, 3, 16, 16),
            path,
            class_names=names,
            metadata={"dataset": "none"},
        )
    assert returned == path
    return model, path, names


def test_onnxruntime_equals_torch_at_any_batch_size(exported):
    model, path, _ = exported
    assert model.training
    model.eval()
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 16, 16)
        assert_same(run(path, input=images), model(images))
    zeros = torch.zeros(2, 3, 16, 16)
    assert_same(run(path, input=zeros), model(zeros))
    model.train()


def test_the_file_says_what_it_is(exported):
    _, path, names = exported
    file = onnx.load(path)
    onnx.checker.check_model(file)
    told = {entry.key: entry.value for entry in file.metadata_props}
    assert json.loads(told["largemargin.class_names"]) == names
    assert told["largemargin.version"] == lm.__version__
    assert told["largemargin.outputs"] == "logits"
    assert told["dataset"] == "none"
    head = json.loads(told["largemargin.head"])
    assert head["similarity"] == "cosine"
    assert (head["scale"], head["num_classes"], head["in_features"]) == (30.0, 10, 16)
    shapes = [
        [each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim]
        for value in (*file.graph.input, *file.graph.output)
    ]
    assert shapes == [["batch", 3, 16, 16], ["batch", 10]]
    assert [value.name for value in file.graph.output] == ["logits"]


def test_only_standard_operators_in_float32(exported):
    _, path, _ = exported
    file = onnx.load(path)
    assert {node.domain for node in file.graph.node} == {""}
    assert [each.domain for each in file.opset_import] == [""]
    assert onnx.TensorProto.DOUBLE not in element_types(path)
    assert onnx.TensorProto.FLOAT in element_types(path)
    assert list(path.parent.iterdir()) == [path]  # nothing left beside it


def test_onnxruntime_needs_neither_torch_nor_us(exported):
    _, path, _ = exported
    script = f"""
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession({str(path)!r}, providers=["CPUExecutionProvider"])
print(session.run(None, {{"input": numpy.zeros((2, 3, 16, 16), "float32")}})[0].shape)
assert not {{"torch", "largemargin"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(2, 10)"


def test_a_file_that_is_not_equal_is_not_written(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x + torch.rand_like(x))

    with pytest.raises(LargeMarginError, match=r"the ONNX file differs from the model by \d"):
        to_onnx(Noisy(), torch.randn(2, 4), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked_before_work_begins(tmp_path):
    model, example, path = nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "model.onnx"
    with pytest.raises(LargeMarginError, match="2 names"):
        to_onnx(model, example, path, class_names=["a", "b"])
    with pytest.raises(LargeMarginError, match="list of str"):
        to_onnx(model, example, path, class_names="abc")
    with pytest.raises(LargeMarginError, match="text to text"):
        to_onnx(model, example, path, metadata={"epochs": 3})
    with pytest.raises(LargeMarginError, match="taken"):
        to_onnx(model, example, path, metadata={"largemargin.head": "mine"})
    with pytest.raises(LargeMarginError, match="no folder"):
        to_onnx(model, example, tmp_path / "nowhere" / "model.onnx")
    path.write_text("mine")
    with pytest.raises(LargeMarginError, match="overwrite=True"):
        to_onnx(model, example, path)
    assert path.read_text() == "mine"


def test_missing_packages_are_named(tmp_path, monkeypatch):
    from largemargin.export import onnx_file

    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"onnx\. Install it: pip install 'large"):
        to_onnx(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "model.onnx")


@pytest.mark.slow
def test_without_onnxruntime_there_is_a_warning(tmp_path, monkeypatch):
    from largemargin.export import onnx_file

    found = onnx_file.find_spec
    monkeypatch.setattr(
        onnx_file, "find_spec", lambda name: None if name == "onnxruntime" else found(name)
    )
    with pytest.warns(UserWarning, match="was not compared"):
        to_onnx(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_onnx(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "again.onnx", verify=False)


@pytest.mark.slow
def test_half_precision(tmp_path):
    model, images = small_cnn(lm.ClassHead(16, 10, similarity="cosine")), torch.randn(3, 3, 16, 16)
    exact = model.eval()(images).detach()
    path = to_onnx(model.half(), images[:2].half(), tmp_path / "half.onnx")
    got = torch.as_tensor(run(path, input=images.half()))
    assert got.dtype == torch.float32
    assert torch.allclose(got, exact, atol=1e-2)
    with pytest.raises(LargeMarginError, match=r"export model\.float\(\)"):
        to_onnx(model.bfloat16(), images.bfloat16(), tmp_path / "bfloat16.onnx")
    to_onnx(model, images.bfloat16(), tmp_path / "bfloat16.onnx", verify=False)
    assert {each.name for each in tmp_path.iterdir()} == {"half.onnx", "bfloat16.onnx"}


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["dot", "cosine", "cosine_prototypes", "euclidean"])
def test_every_head(similarity, tmp_path):
    head = lm.ClassHead(16, 10, similarity=similarity, scale=9.0, bias=True)
    model = small_cnn(head).eval()
    path = to_onnx(model, torch.randn(2, 3, 16, 16), tmp_path / "model.onnx")
    images = torch.randn(3, 3, 16, 16)
    assert_same(run(path, input=images), model(images))
    assert onnx.TensorProto.DOUBLE not in element_types(path)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["probabilities", "features"])
def test_simplex_head_and_other_outputs(outputs, tmp_path):
    model = small_cnn(lm.SimplexHead(16, 10)).eval()
    path = tmp_path / "model.onnx"
    to_onnx(model, torch.randn(2, 3, 16, 16), path, outputs=outputs, opset=21)
    images = torch.randn(3, 3, 16, 16)
    features = model[:-1](images)
    want = features if outputs == "features" else model[-1](features).softmax(-1)
    assert_same(run(path, input=images), want)
    assert [each.version for each in onnx.load(path).opset_import] == [21]


@pytest.mark.slow
def test_torchvision_resnet18(tmp_path):
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision")
    model = torchvision.models.resnet18(num_classes=10)
    lm.attach(model, lm.CosFace(scale=64.0))
    model(torch.randn(4, 3, 64, 64))
    path = to_onnx(model, torch.randn(2, 3, 64, 64), tmp_path / "model.onnx")
    model.eval()
    images = torch.randn(3, 3, 64, 64)
    assert_same(run(path, x=images), model(images))


@pytest.mark.slow
def test_hugging_face_vit(tmp_path):
    """A model that takes keywords and returns a ModelOutput."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=6,
    )
    model = transformers.ViTForImageClassification(config)
    lm.attach(model, lm.LMSoftmax(scale=20.0))
    example = {"pixel_values": torch.randn(2, 3, 32, 32)}
    path = to_onnx(model, example, tmp_path / "model.onnx")
    model.eval()
    images = torch.randn(5, 3, 32, 32)
    assert_same(run(path, pixel_values=images), model(pixel_values=images).logits)


@pytest.mark.slow
def test_torchvision_vit(tmp_path):
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision")
    model = torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=6,
    )
    lm.attach(model, lm.GaussianMixture(6, 32))
    path = to_onnx(model, torch.randn(2, 3, 32, 32), tmp_path / "model.onnx")
    model.eval()
    images = torch.randn(3, 3, 32, 32)
    assert_same(run(path, x=images), model(images))
