"""Every loss of the library, with every setting of the contract suite, there and back as data."""

import copy
import json

import pytest
import torch
from contract.problems import Sizes, call, random_problem
from contract.zoo import NAMES, ZOO, build, resolve, settings_of, supporting
from torch import nn

import largemargin as lm
from largemargin.export import load, save
from largemargin.export.saved_model import build_objective, describe_objective
from largemargin.export.tensor_files import read_tensors, write_tensors
from largemargin.losses import LOSSES

pytest.importorskip("safetensors", reason="needs safetensors: pip install 'largemargin[export]'")

SIZES = Sizes(14, 4, 6)
OPTIONS = {
    "weight": torch.linspace(0.5, 1.5, SIZES.classes).double(),
    "ignore_index": None,
    "label_smoothing": 0.25,
    "reduction": "sum",
    "impl": "dense",
    "precision": "highest",
    "validate": True,
    "check_finite": True,
    "sync": True,
}


def returned(loss, folder):
    """The loss built again from files: arguments from JSON and tensors, then its state."""
    tensors = {}
    text = json.dumps(describe_objective(lm.Objective(it=0.25 * loss), tensors), allow_nan=False)
    write_tensors(folder / "t.safetensors", tensors)
    objective = build_objective(json.loads(text), read_tensors(folder / "t.safetensors"))
    assert objective.weights == {"it": 0.25}
    again = objective.terms["it"].double()
    again.load_state_dict(loss.state_dict())
    return again


@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_settings(name, hyper, tmp_path):
    problem = random_problem(SIZES, seed=5)
    loss = build(name, problem, hyper)
    again = returned(loss, tmp_path)
    assert type(again) is type(loss)
    assert repr(again) == repr(loss)
    assert again.state_dict().keys() == loss.state_dict().keys()
    for _ in range(2):
        assert torch.equal(call(again, problem), call(loss, problem))


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, tmp_path):
    problem = random_problem(SIZES, seed=6)
    for name in supporting(option):
        if ZOO[name].kind != "prototypes":
            loss = build(name, problem, **{option: OPTIONS[option]})
            again = returned(loss, tmp_path)
            assert repr(again) == repr(loss)
            assert torch.equal(call(again, problem), call(loss, problem)), name


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, SIZES.dim), nn.Linear(6, 4))


def attached(name, model):
    entry = ZOO[name]
    made = LOSSES[name](*entry.arguments(SIZES), **resolve(entry.settings[0], SIZES))
    terms = {"first": 0.5 * made}
    if {"features", "logits"}.isdisjoint(made.needs):  # a penalty on prototypes alone
        terms["softmax"] = lm.CrossEntropy()
    layers = ["0", "2"] if "layers" in made.needs else []
    return lm.attach(model, lm.Objective(**terms), layers=layers, warn=False)


def step(model, criterion, inputs, labels):
    noisy = {}
    if any("noisy" in loss.needs for loss in criterion.objective.terms.values()):
        noisy["noisy"] = model(inputs + 0.1)
    torch.manual_seed(0)  # for margins that are drawn
    value = criterion(model(inputs), labels, **noisy)
    model.zero_grad()
    value.backward()
    with torch.no_grad():
        for parameter in (*model.parameters(), *criterion.parameters()):
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    return value.detach()


@pytest.mark.parametrize("name", NAMES)
def test_attached_in_a_folder(name, tmp_path):
    """Trained a little, saved, loaded: the same predictions, losses and next steps, bit by bit."""
    labels = torch.arange(SIZES.samples) % SIZES.classes
    inputs = torch.randn(SIZES.samples, 5)
    model = net()
    criterion = attached(name, model)
    step(model, criterion, inputs, labels)
    save(tmp_path / "run", model, criterion)
    again = net()
    loaded = load(tmp_path / "run", again)
    assert torch.equal(again(inputs), model(inputs))
    for _ in range(2):
        want = step(model, criterion, inputs, labels)
        assert torch.equal(step(again, loaded.criterion, inputs, labels), want)
    state = loaded.criterion.state_dict()
    for key, value in copy.copy(criterion.state_dict()).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value), key
