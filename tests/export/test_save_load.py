"""Folders of safetensors and JSON: what comes back, what is refused, and what is never run."""

import copy
import json
import os
import pickle

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.export import load, read_config, save

pytest.importorskip("safetensors", reason="needs safetensors: pip install 'largemargin[export]'")

CLASSES, DIM = 5, 8


class Net(nn.Module):
    def __init__(self, head=None, width=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.neck = nn.Linear(12, DIM)
        self.fc = nn.Linear(DIM, CLASSES) if head is None else head

    def forward(self, x):
        return self.fc(self.neck(self.body(x)).relu())


def batches(count, samples=20):
    draw = torch.Generator().manual_seed(7)
    labels = torch.arange(samples) % CLASSES
    return [(torch.randn(samples, 6, generator=draw), labels) for _ in range(count)]


def train(model, criterion, optimizer, steps):
    for inputs, labels in steps:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()


def sgd(model, criterion):
    return torch.optim.SGD(criterion.param_groups(model), lr=0.05, momentum=0.9)


def combined(num_classes, dim):
    return lm.Objective(
        softmax=lm.CrossEntropy(weight=torch.linspace(0.5, 1.5, num_classes)),
        lmd=0.3 * lm.Discriminative(num_classes, dim, margin=2.0),
        runner_up=0.1 * lm.Kobayashi(strength=0.5),
    )


def cosine(num_classes, dim):
    margins = torch.linspace(0.1, 0.4, num_classes)
    return lm.Objective(
        face=lm.CosFace(margin=margins, scale=8.0), center=lm.CenterLoss(num_classes, dim)
    )


ATTACHED = {
    "combined": {"objective": combined, "similarity": "dot", "accumulate": 2},
    "cosine": {
        "objective": cosine,
        "schedule": [
            lm.schedules.Ramp("face.margin", 0.0, steps=6),
            lm.schedules.Ramp("face.scale", 4.0, 8.0, steps=8),
            lm.schedules.Ramp("center.weight", 0.0, 1.0, steps=9),
        ],
    },
    "reweighted": {
        "objective": lm.LDAM([50, 40, 30, 20, 10], scale=8.0),
        "schedule": lm.schedules.DeferredReweighting(7),
    },
    "manual": {
        "objective": lm.SphereFace(),
        "schedule": lm.schedules.Annealing(rate=1.0),
        "gradient_norms": True,
    },
}


def attached(name, model):
    given = copy.deepcopy(ATTACHED[name])
    return lm.attach(model, given.pop("objective"), **given)


@pytest.mark.parametrize("name", ATTACHED)
def test_resumed_training_equals_uninterrupted(name, tmp_path):
    """Saved in the middle of ramps, before the re-weighting, between two micro-batches."""
    steps = batches(10)
    model = Net()
    whole = copy.deepcopy(model)
    criterion = attached(name, whole)
    train(whole, criterion, sgd(whole, criterion), steps)

    criterion = attached(name, model)
    optimizer = sgd(model, criterion)
    train(model, criterion, optimizer, steps[:5])
    save(tmp_path / "run", model, criterion)
    stored = copy.deepcopy(optimizer.state_dict())

    again = Net()
    loaded = load(tmp_path / "run", again)
    optimizer = sgd(again, loaded.criterion)
    optimizer.load_state_dict(stored)
    train(again, loaded.criterion, optimizer, steps[5:])
    for key, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert again.fc.extra_repr() == whole.fc.extra_repr()


@pytest.mark.parametrize("name", ATTACHED)
def test_everything_comes_back(name, tmp_path):
    model = Net()
    criterion = attached(name, model)
    train(model, criterion, sgd(model, criterion), batches(8))
    config = {"width": 6, "nested": [1, 2.5, None, {"é": True}]}
    path = save(tmp_path / "run", model, criterion, config=config, class_names=list("abcde"))
    again = Net()
    weight = again.fc.weight
    loaded = load(path, again)
    assert loaded.model is again
    assert again.fc.weight is weight  # the same parameter: an optimizer made before trains it
    assert (loaded.config, loaded.class_names) == (config, list("abcde"))
    assert repr(loaded.criterion.objective) == repr(criterion.objective)
    assert loaded.criterion.schedules == criterion.schedules
    assert loaded.criterion.steps == criterion.steps
    for key in ("accumulate", "automatic", "measures_gradients"):
        assert getattr(loaded.criterion, key) == getattr(criterion, key)
    inputs, labels = batches(9)[-1]
    for mode in (True, False):
        assert torch.equal(again.train(mode)(inputs), model.train(mode)(inputs))
        value = criterion(model(inputs), labels)
        assert torch.equal(loaded.criterion(again(inputs), labels), value)
    mine, other = criterion.state_dict(), loaded.criterion.state_dict()
    assert list(mine) == list(other)
    for key, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("name", ATTACHED)
def test_saved_before_the_first_step(name, tmp_path):
    """Ramps stand at their start then, where a margin is 0: they still know where they go."""
    model = Net()
    criterion = attached(name, model)
    save(tmp_path / "run", model, criterion)
    loaded = load(tmp_path / "run", Net())
    for _ in range(12):
        criterion.step()
        loaded.criterion.step()
    assert repr(loaded.criterion.objective) == repr(criterion.objective)
    assert repr(loaded.criterion.layer) == repr(criterion.layer)


def test_a_scale_set_by_hand_stays(tmp_path):
    model, inputs = Net(), torch.randn(4, 6)
    criterion = lm.attach(model, lm.NormFace(scale=8.0))
    model.fc.scale = 13.0
    save(tmp_path / "run", model, criterion)
    again = Net()
    load(tmp_path / "run", again)
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))


def test_undo_restores_the_bias_that_was_set_aside(tmp_path):
    model = Net()
    bias = model.fc.bias.detach().clone()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    save(tmp_path / "run", model, criterion)
    again = Net()
    loaded = load(tmp_path / "run", again)
    assert again.fc.bias is None
    loaded.criterion.undo()
    assert type(again.fc) is nn.Linear
    assert torch.equal(again.fc.bias, bias)
    assert torch.equal(again.fc.weight, model.fc.weight)


def test_names_given_to_attach_come_back(tmp_path):
    model = Net()
    objective = lm.Objective(softmax=lm.CrossEntropy(), center=lm.CenterLoss(CLASSES, 12))
    objective.terms["layers"] = lm.LayerMargin()
    objective.weights["layers"] = 0.1
    criterion = lm.attach(
        model, objective, features={"center": "body"}, layers=["body.0", "neck"], warn=False
    )
    save(tmp_path / "run", model, criterion)
    again = Net()
    loaded = load(tmp_path / "run", again)
    inputs, labels = batches(1)[0]
    value = criterion(model(inputs), labels)
    assert torch.equal(loaded.criterion(again(inputs), labels), value)


@pytest.mark.parametrize(
    "head",
    [
        lm.ClassHead(DIM, CLASSES),
        lm.ClassHead(DIM, CLASSES, similarity="cosine", scale=11.0),
        lm.ClassHead(DIM, CLASSES, similarity="cosine", bias=True),
        lm.ClassHead(DIM, CLASSES, similarity="euclidean", scale=0.5),
        lm.ClassHead(DIM, CLASSES, similarity="cosine_prototypes", bias=False),
        lm.SimplexHead(DIM, CLASSES),
        nn.Linear(DIM, CLASSES),
    ],
    ids=repr,
)
def test_a_model_alone_takes_the_saved_head(head, tmp_path):
    model, inputs = Net(copy.deepcopy(head)).eval(), torch.randn(4, 6)
    save(tmp_path / "run", model)
    for fresh in (Net(), Net(copy.deepcopy(head))):
        loaded = load(tmp_path / "run", fresh.eval())
        assert loaded.criterion is None
        assert type(fresh.fc) is type(head)
        assert torch.equal(fresh(inputs), model(inputs))


def test_prediction_needs_no_criterion(tmp_path):
    model, inputs = Net(), torch.randn(4, 6)
    save(tmp_path / "run", model, lm.attach(model, lm.ArcFace(scale=9.0)))
    again = Net()
    loaded = load(tmp_path / "run", again, criterion="none")
    assert loaded.criterion is None
    assert not again.fc._forward_hooks
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))


class Mine(lm.CosFace):
    """A loss that is not in LOSSES, with a parameter of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.factor = nn.Parameter(torch.ones(()))

    def per_sample(self, *inputs):
        return self.factor * super().per_sample(*inputs)


def test_losses_of_your_own_are_attached_by_you(tmp_path):
    model = Net()
    criterion = lm.attach(model, Mine(margin=torch.full((CLASSES,), 0.2)))
    factor = criterion.objective.terms["loss"].factor
    train(model, criterion, sgd(model, criterion), batches(2))
    save(tmp_path / "run", model, criterion)
    with pytest.raises(LargeMarginError, match=r"Mine, which is not a loss of this library"):
        load(tmp_path / "run", Net())
    again = Net()
    own = lm.attach(again, Mine(margin=torch.zeros(CLASSES)))
    loaded = load(tmp_path / "run", again, criterion=own)
    assert loaded.criterion is own
    assert own.steps == 2
    loss = own.objective.terms["loss"]
    assert torch.equal(loss.margin, torch.full((CLASSES,), 0.2))
    assert torch.equal(loss.factor, factor)
    assert float(factor.detach()) != 1.0


def test_tied_and_overlapping_tensors(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Embedding(70, 40), nn.Linear(40, 70, bias=False)
            self.fc.weight = self.embed.weight
            both = torch.arange(6.0)
            self.register_buffer("first", both[:4])
            self.register_buffer("last", both[2:])
            self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("also", torch.zeros(0, 3))
            self.register_buffer("count", torch.tensor(3))

    model, again = Tied(), Tied()
    path = save(tmp_path / "run", model)
    for buffer in again.buffers():
        buffer.zero_()
    load(path, again)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.fc.weight is again.embed.weight
    size = os.path.getsize(path / "model.safetensors")
    assert size < 1.5 * 70 * 40 * 4  # the matrix once, and the header


def test_wrappers_are_taken_off(tmp_path):
    model = Net()
    criterion = lm.attach(model, lm.CosFace())
    save(tmp_path / "run", torch.compile(model, backend="eager"), criterion)
    assert all("_orig_mod" not in name for name in model.state_dict())
    load(tmp_path / "run", torch.compile(Net(), backend="eager"))


@pytest.mark.parametrize("whole", [True, False], ids=["model", "objective"])
def test_float64_loses_no_digit(whole, tmp_path):
    dtype = torch.float64 if whole else torch.float32
    model = Net().to(dtype)
    criterion = lm.attach(model, combined)
    criterion.objective.double()
    for bank in criterion.banks:
        bank.centroids.normal_()
    save(tmp_path / "run", model, criterion)
    loaded = load(tmp_path / "run", Net().to(dtype))
    for name, value in criterion.state_dict().items():
        if isinstance(value, torch.Tensor):
            again = loaded.criterion.state_dict()[name]
            assert again.dtype == value.dtype
            assert torch.equal(again, value), name


def test_nothing_is_pickled(tmp_path, monkeypatch):
    model = Net()
    criterion = lm.attach(model, combined)

    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    save(tmp_path / "run", model, criterion)
    load(tmp_path / "run", Net())
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == [
        "config.json",
        "criterion.safetensors",
        "model.safetensors",
    ]


def test_read_config_says_how_to_build_the_model(tmp_path):
    save(
        tmp_path / "run", Net(width=6), config={"width": 6}, class_names=["ß", "木", "x", "y", "z"]
    )
    told = read_config(tmp_path / "run")
    assert told["head"]["num_classes"] == CLASSES
    assert told["largemargin"] == lm.__version__
    load(tmp_path / "run", Net(**told["config"]))
    text = (tmp_path / "run" / "config.json").read_text(encoding="utf-8")
    assert json.loads(text) == told
    assert '"ß"' in text
    assert '"木"' in text
