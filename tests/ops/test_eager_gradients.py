"""Backward passes by hand are those of the dense definition, wherever the vectors lie."""

import sys

import pytest
import torch

import largemargin.functional as LF
from largemargin import CosFace, attach, class_stats
from largemargin.losses.base import terms
from largemargin.ops import eager_gradients
from largemargin.ops import norms as rows

# The package exports a function of the module's name.
OPERATOR = sys.modules["largemargin.ops.class_stats"]
SHAPE = (6, 5, 4)


def vectors(dtype):
    generator = torch.Generator().manual_seed(3)
    samples, classes, dim = SHAPE
    features = torch.randn(samples, dim, dtype=dtype, generator=generator)
    prototypes = torch.randn(classes, dim, dtype=dtype, generator=generator)
    return features, prototypes, torch.randint(classes, (samples,), generator=generator)


def look_at_values(monkeypatch, looks):
    """As on a CPU, as there with many class vectors, or as on a GPU."""
    if looks == "many":
        monkeypatch.setattr(eager_gradients, "NORMALIZED", 0)
    else:
        monkeypatch.setattr(eager_gradients, "may_look", lambda _: looks)


SITUATIONS = {
    "ordinary": lambda x, w: None,
    "zero feature": lambda x, w: x[0].zero_(),
    "zero prototype": lambda x, w: w[1].zero_(),
    "short rows": lambda x, w: (x[0].mul_(1e-20), w[1].mul_(1e-20)),
    "tiny rows": lambda x, w: (x[0].mul_(1e-10), w[1].mul_(1e-10)),
    "huge rows": lambda x, w: (x[0].mul_(1e30), w[1].mul_(1e30)),
    "all prototypes huge": lambda x, w: w.mul_(1e30),
    "largest of all": lambda x, w: w[1].fill_(1e38),
    "on a prototype": lambda x, w: x[0].copy_(w[1]),
    "prototypes coincide": lambda x, w: w[1].copy_(w[0]),
}


def computed(features, prototypes, labels, **graph):
    features, prototypes = features.clone().requires_grad_(), prototypes.clone().requires_grad_()
    stats = class_stats(
        features,
        prototypes,
        labels,
        similarity="cosine",
        scale=8.0,
        want=("target", "rest"),
        validate=False,
    )
    weights = torch.linspace(0.5, 1.5, features.shape[0], dtype=features.dtype)
    values = torch.nan_to_num(stats.rest) - torch.nan_to_num(stats.target).square()
    gradients = torch.autograd.grad((weights * values).sum(), (features, prototypes), **graph)
    return (stats.target.detach(), stats.rest.detach(), *(g.detach() for g in gradients))


def assert_rows_close(found, expected, tolerance):
    """Row by row, because the gradients of huge and tiny rows lie 40 orders of magnitude apart."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        one, other = one.nan_to_num().double(), other.nan_to_num().double()
        size = other.abs().reshape(other.shape[0], -1).amax(1)
        error = (one - other).abs().reshape(other.shape[0], -1).amax(1)
        assert bool((error <= tolerance * size + 1e-44).all()), (one, other)


@pytest.mark.parametrize("looks", [True, "many", False], ids=["CPU", "many", "GPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_is_the_dense_definition(situation, dtype, looks, monkeypatch):
    look_at_values(monkeypatch, looks)
    features, prototypes, labels = vectors(dtype)
    SITUATIONS[situation](features, prototypes)
    labels[2] = SHAPE[1]  # out of range: NaN without gradient
    found = computed(features, prototypes, labels)
    again = computed(features, prototypes, labels, create_graph=True)
    monkeypatch.setattr(OPERATOR, "_by_hand", lambda *_, **__: False)
    expected = computed(features, prototypes, labels)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    # A feature on its prototype has gradient 0 up to rounding, so it is compared with the others.
    if situation == "on a prototype":
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=10 * tolerance, equal_nan=True)
    else:
        assert_rows_close(found, expected, tolerance)
        assert_rows_close(again, expected, tolerance)


def test_it_is_what_runs(monkeypatch):
    calls = []
    original = eager_gradients.cosine_logits
    for place in (OPERATOR, terms):
        monkeypatch.setattr(
            place,
            "cosine_logits",
            lambda *args, **options: calls.append(1) or original(*args, **options),
        )
    features, prototypes, labels = vectors(torch.float32)
    LF.cosface(features, prototypes, labels)
    LF.arcface(features, prototypes, labels)
    LF.normface(features, prototypes, labels)
    assert len(calls) == 3


@pytest.mark.parametrize("looks", [True, "many", False], ids=["CPU", "many", "GPU"])
def test_labels_that_were_checked_need_no_guard(looks, monkeypatch):
    look_at_values(monkeypatch, looks)
    features, prototypes, labels = vectors(torch.float64)
    found = {}
    for validate in (True, False):
        x, w = features.clone().requires_grad_(), prototypes.clone().requires_grad_()
        values = LF.cosface(x, w, labels, validate=validate)
        found[validate] = values, *torch.autograd.grad(values.square().sum(), (x, w))
    for one, other in zip(found[True], found[False], strict=True):
        assert torch.equal(one, other)


def test_many_gradients_at_once():
    features, prototypes, labels = vectors(torch.float64)
    features.requires_grad_()
    values = LF.cosface(features, prototypes, labels)
    directions = torch.eye(SHAPE[0], dtype=torch.float64)
    (found,) = torch.autograd.grad(
        values, features, directions, is_grads_batched=True, retain_graph=True
    )
    for direction, one in zip(directions, found, strict=True):
        (expected,) = torch.autograd.grad(values, features, direction, retain_graph=True)
        torch.testing.assert_close(one, expected)


def test_a_device_whose_values_are_not_read():
    features, prototypes, labels = (x.to("meta") for x in vectors(torch.float32))
    features.requires_grad_()
    LF.cosface(features, prototypes, labels).sum().backward()
    assert features.grad.shape == features.shape


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "bf16"])
def test_on_a_gpu(precision):
    found = {}
    for device in ("cpu", "cuda"):
        x, w, labels = (each.to(device) for each in vectors(torch.float32))
        x.requires_grad_()
        w.requires_grad_()
        values = LF.cosface(x, w, labels, margin=0.2, scale=8.0, precision=precision)
        gradients = torch.autograd.grad(values.sum(), (x, w))
        found[device] = [each.detach().cpu() for each in (values, *gradients)]
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if precision == "highest" else {"rtol": 0.05, "atol": 0.05}
    )
    for one, other in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_backward_twice_over_one_graph():
    features, prototypes, labels = vectors(torch.float32)
    features.requires_grad_()
    value = LF.cosface(features, prototypes, labels).sum()
    first, second = (torch.autograd.grad(value, features, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_backward_inside_autocast_multiplies_in_float32():
    features, prototypes, labels = vectors(torch.float32)
    features.requires_grad_()
    value = LF.cosface(features, prototypes, labels).sum()
    (expected,) = torch.autograd.grad(value, features, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(value, features)
    assert torch.equal(found, expected)


def test_norms_of_all_sizes():
    sizes = torch.tensor([0.0, 1e-38, 1e-20, 1e-15, 1e-3, 1.0, 1e15, 1e19, 1e30, 1e38])
    x = sizes[:, None] * torch.tensor([0.6, 0.0, 0.8])
    expected = torch.linalg.vector_norm(x.double(), dim=1).float()
    torch.testing.assert_close(rows.safe_norm(x), expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(rows.safe_norm(x[None], keepdim=True)[0, :, 0], expected)
    bad = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [3.0, 4.0]])
    norms = rows.safe_norm(bad)
    assert norms[0].isnan()
    assert norms[1:].tolist() == [torch.inf, 5.0]


def test_norms_under_vmap():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert torch.func.vmap(rows.safe_norm)(x).tolist() == [5.0, 0.0]
    units = torch.func.vmap(rows.normalize)(x)
    torch.testing.assert_close(units, rows.normalize(x))


@pytest.mark.parametrize("scale", [16, 16.0, "auto"])
def test_the_logits_of_the_head_are_not_made_again(scale, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5))
    criterion = attach(model, CosFace(margin=0.2, scale=scale))
    features, _, labels = vectors(torch.float32)
    outputs = model(features)
    want = CosFace(margin=0.2, scale=scale)(model[0](features), model[1].weight, labels)
    for place in (OPERATOR, terms):
        monkeypatch.setattr(place, "cosine_logits", None)
    torch.testing.assert_close(criterion(outputs, labels), want)
