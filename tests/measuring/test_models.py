"""Any model and any loader: what enters the head is measured, and nothing is left behind."""

import gc
import weakref
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from measuring.alike import same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.heads.head_spec import HeadView
from largemargin.measuring import Geometry, measure, measure_arrays
from largemargin.measuring.probe import differs

C, D, N = 4, 6, 30


class Net(nn.Module):
    """Dropout and batch statistics show whether the mode is right."""

    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Dropout(0.5))
        self.fc = nn.Linear(D, C) if head is None else head
        self.double()  # so that batches of any size give the same features

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.body(x))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 5).double(), torch.arange(N) % C


def expected(net: Net, x: Tensor, y: Tensor, **options: Any) -> Geometry:
    net.eval()
    with torch.no_grad():
        features = net.body(x)
    net.train()
    head = net.fc
    similarity, scale = getattr(head, "similarity", "dot"), float(getattr(head, "scale", 1.0))
    return measure_arrays(
        features, y, head.weight, head.bias, similarity=similarity, scale=scale, **options
    )


def batches(x: Tensor, y: Tensor, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize(
    "head",
    [
        None,
        lm.ClassHead(D, C, similarity="cosine", scale=8.0),
        lm.ClassHead(D, C, similarity="euclidean"),
        lm.SimplexHead(D, C),
        nn.Linear(D, C, bias=False),
    ],
    ids=["linear", "cosine", "euclidean", "simplex", "no bias"],
)
def test_heads(head: nn.Module | None, data: tuple[Tensor, Tensor]) -> None:
    net = Net(head)
    same(measure(net, batches(*data), pairwise=True), expected(net, *data, pairwise=True))


def test_the_model_is_as_before(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    net.body[1].eval()
    modes = [module.training for module in net.modules()]
    state = {name: each.clone() for name, each in net.state_dict().items()}
    measure(net, batches(*data))
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(state[name], each) for name, each in net.state_dict().items())
    assert hooks(net) == 0
    assert torch.is_grad_enabled()


def hooks(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def test_the_model_is_as_before_after_an_error(data: tuple[Tensor, Tensor]) -> None:
    net = Net()

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield data
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        measure(net, broken(), features="body")
    assert all(module.training for module in net.modules())
    assert hooks(net) == 0


def test_features_are_dropped(data: tuple[Tensor, Tensor]) -> None:
    net, alive = Net(), []
    net.fc.register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0])))

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches(*data):
            gc.collect()
            assert sum(each() is not None for each in alive) <= 1  # the last batch
            yield batch

    measure(net, watched())
    assert len(alive) == 5


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Rows(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return N

    def __init__(self, x: Tensor, y: Tensor, name: str) -> None:
        self.x, self.y, self.name = x, y, name

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], self.name: int(self.y[index])}


def test_loaders(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    x, y = data
    want = expected(net, x, y)
    dataset = TensorDataset(x, y)
    loaders: dict[str, Any] = {
        "tuples": batches(x, y),
        "lists": [list(batch) for batch in batches(x, y)],
        "named tuples": [Pair(*batch) for batch in batches(x, y)],
        "dicts": [{"x": a, "labels": b} for a, b in batches(x, y)],
        "mappings": [UserDict({"x": a, "labels": b}) for a, b in batches(x, y)],
        "DataLoader": DataLoader(dataset, batch_size=8),
        "labels as numbers": DataLoader(Rows(x, y, "label"), batch_size=8),
        "targets": DataLoader(Rows(x, y, "target"), batch_size=8),
        "labels as lists": [(a, b.tolist()) for a, b in batches(x, y)],
        "labels in a column": [(a, b[:, None]) for a, b in batches(x, y)],
        "int32 labels": [(a, b.int()) for a, b in batches(x, y)],
        "generator": (batch for batch in batches(x, y)),
        "an empty batch": [*batches(x, y), (x[:0], y[:0])],
    }
    for name, loader in loaders.items():
        print(name)
        same(measure(net, loader), want)


def test_a_loader_that_fills_one_buffer_again(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    x, y = data
    inputs, labels = torch.empty(10, 5).double(), torch.empty(10).long()

    def refilled() -> Iterator[tuple[Tensor, Tensor]]:
        for a, b in batches(x, y, 10):
            inputs.copy_(a)
            labels.copy_(b)
            yield inputs, labels

    same(measure(net, refilled(), pairwise=True), expected(net, x, y, pairwise=True))


def test_a_shuffling_loader_is_noted(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    found = measure(net, DataLoader(TensorDataset(*data), batch_size=8, shuffle=True))
    assert any("indices count them as they came" in note for note in found.notes)
    assert found.accuracy == expected(net, *data).accuracy


class Two(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return {"probabilities": self.net(torch.cat([a, b], 1)).softmax(1).max(1)}


def test_several_inputs_and_no_logits_among_outputs(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    x, y = data
    want, two = expected(net, x, y), Two(net)
    flat = [(a[:, :2], a[:, 2:], b) for a, b in batches(x, y)]
    nested = [[[a[:, :2], a[:, 2:]], b] for a, b in batches(x, y)]
    named = [({"a": a[:, :2], "b": a[:, 2:]}, b) for a, b in batches(x, y)]
    for loader in (flat, nested, named):
        same(measure(two, loader), want)


def test_attached_models(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    x, y = data
    criterion = lm.attach(net, lm.CosFace(scale=8.0))
    outputs = net(x)
    found = measure(net, batches(x, y))
    assert (found.similarity, found.scale) == ("cosine", 8.0)
    same(found, expected(net, x, y))
    # Outputs made before are still the criterion's.
    criterion(outputs, y).backward()
    assert net.body[0].weight.grad is not None
    before = hooks(net)
    measure(net, batches(x, y))
    assert hooks(net) == before


def test_another_head_and_other_features(data: tuple[Tensor, Tensor]) -> None:
    x, y = data

    class Heads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Linear(D, 9).double()

        def forward(self, x: Tensor) -> Any:
            features = self.body(x)
            return self.fc(features), self.aside(features)

    net = Heads()
    with pytest.raises(LargeMarginError, match="several layers"):
        measure(net, batches(x, y))
    same(measure(net, batches(x, y), layer="fc"), expected(net, x, y))
    other = measure(net, batches(x, y), layer="fc", features="body.0")
    with torch.no_grad():
        want = measure_arrays(net.body[0](x), y, net.fc.weight, net.fc.bias)
    assert other.margins["raw"].overall.mean == pytest.approx(want.margins["raw"].overall.mean)
    assert any("features are those of 'body.0'" in note for note in other.notes)
    assert not any("makes other logits" in note for note in other.notes)
    with pytest.raises(LargeMarginError, match="has no layer 'bod'"):
        measure(net, batches(x, y), layer="fc", features="bod")


class Tokens(nn.Module):
    """A head on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.fc = nn.Linear(D, C)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Any:
        return self.fc(self.embedding(input_ids))


def test_a_head_on_sequences() -> None:
    net = Tokens()
    ids, labels = torch.randint(11, (6, 5)), torch.randint(C, (6, 5))
    labels[1, 3] = labels[4, 0] = -100
    loader = [
        {"input_ids": a, "mask": None, "labels": b}
        for a, b in zip(ids.split(4), labels.split(4), strict=True)
    ]
    found = measure(net, loader, worst=30)
    keep = labels.flatten() != -100
    with torch.no_grad():
        features = net.embedding(ids).flatten(0, 1)[keep]
    want = measure_arrays(features, labels.flatten()[keep], net.fc.weight, net.fc.bias)
    assert found.loss == pytest.approx(want.loss)
    assert found.samples == 28
    assert found.notes == ("2 samples labelled -100 were skipped",)
    assert {8, 20}.isdisjoint(each.index for each in found.worst)
    assert {each.index for each in found.worst} == set(range(30)) - {8, 20}


@pytest.mark.slow  # importing transformers
def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=3,
    )
    net = transformers.BertForSequenceClassification(config)
    ids, labels = torch.randint(30, (9, 7)), torch.arange(9) % 3
    mask = torch.ones_like(ids)
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})
    found = measure(net, [batch], layer="classifier")
    net.eval()
    with torch.no_grad():
        logits = net(ids, mask).logits
        assert found.loss == pytest.approx(
            float(nn.functional.cross_entropy(logits, labels)), rel=1e-5
        )
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert found.notes == ()


def test_autocast_and_half_precision(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    with torch.autocast("cpu", torch.bfloat16):
        single = [(x.float(), y) for x, y in batches(*data)]
        found = measure(net.float(), single, pairwise=True)
    exact = expected(net.double(), *data)
    assert found.loss == pytest.approx(exact.loss, rel=0.02)
    assert found.compactness is not None
    half = Net().bfloat16()
    found = measure(half, [(x.bfloat16(), y) for x, y in batches(*data)], pairwise=True)
    assert found.samples == N
    assert found.notes == ()


@pytest.mark.slow  # importing the compiler
@pytest.mark.parametrize("part", ["model", "submodule", "in place"])
def test_compiled_models(part: str, data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    want = expected(net, *data)
    compiled: nn.Module = net
    if part == "model":
        compiled = torch.compile(net, backend="eager")
    elif part == "submodule":
        net.body = torch.compile(net.body, backend="eager")
    else:
        net.compile(backend="eager")
    net.eval()
    compiled(data[0])  # compiled before the hooks came
    net.train()
    same(measure(compiled, batches(*data)), want)
    torch.compiler.reset()


def test_a_head_that_does_something_else_is_noted(data: tuple[Tensor, Tensor]) -> None:
    class Normed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 8 * nn.functional.linear(
                nn.functional.normalize(x), nn.functional.normalize(self.weight)
            )

    found = measure(Net(Normed(D, C)), batches(*data))
    assert any("makes other logits than its weight" in note for note in found.notes)


def test_ood_data(data: tuple[Tensor, Tensor]) -> None:
    net = Net()
    x, y = data
    others = 3 * torch.randn(20, 5).double()
    want = expected(net, x, y, ood=net.eval().body(others).detach())
    net.train()
    for ood in ([others], others.split(6), DataLoader(TensorDataset(others), batch_size=6)):
        assert measure(net, batches(x, y), ood=ood).ood == want.ood
    labelled = [(others, torch.zeros(20).long())]
    assert measure(net, batches(x, y), ood=labelled).ood == want.ood
    empty = measure(net, batches(x, y), ood=[])
    assert empty.ood is not None
    assert empty.ood.rejected == 0
    assert any("ood is empty" in note for note in empty.notes)


def test_a_progress_bar(data: tuple[Tensor, Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    measure(Net(), batches(*data), progress=True)
    assert "measuring" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 0.01), (torch.bfloat16, 0.05)])
def test_logits_are_the_heads_to_rounding(dtype: torch.dtype, rounding: float) -> None:
    """Of the largest; what a half precision layer rounds is no other head."""
    view = HeadView(torch.randn(3, 4), None, "dot", 1.0)
    features = torch.randn(9, 4)
    logits = view(features)
    for error, other in ((0.5 * rounding, False), (1.6 * rounding, True)):
        given = logits.clone()
        given[0, logits[0].abs().argmin()] += error * logits.abs().max()
        assert differs(view, features, given.to(dtype)) == other
