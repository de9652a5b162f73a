"""A loss changes nothing but its own bank or centers, and does not care about order or names."""

import copy
import random

import numpy as np
import pytest
import torch

from contract.problems import Sizes, assert_close, call, random_problem, value_and_gradients
from contract.zoo import LABELLED, NAMES, ZOO, build, implementations, settings_of, supporting
from largemargin.losses import LOSSES

SIZES = Sizes(7, 5, 3)
STATE = {"centroids", "seen", "counts", "centers", "pending_sums", "pending_counts"}
RUNNING = {"values"}
STATE |= {"pending_steps", *RUNNING}


def tensors_of(loss):
    return {**dict(loss.named_buffers()), **dict(loss.named_parameters())}


def global_state():
    """Everything a library could change behind its user's back."""
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    precisions = [
        backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)
    ]
    return {
        "torch generator": torch.random.get_rng_state().tolist(),
        "python generator": python,
        "numpy generator": numpy,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul precision": (torch.get_float32_matmul_precision(), precisions),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("precision", [None, "highest", "tf32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_changes(name, precision):
    problem = random_problem(SIZES, dtype=torch.float32, seed=60)
    options = {} if ZOO[name].kind == "prototypes" else {"precision": precision}
    for impl in ["auto"] if "chunked" in LOSSES[name].refuses else ["auto", "chunked"]:
        if impl != "auto":
            options["impl"] = impl
        loss = build(name, problem, dtype=torch.float32, **options)
        given, leaves = problem.leaves(loss)
        tensors = {**vars(given), **tensors_of(loss)}
        before = {key: (t.clone(), t._version, t.dtype) for key, t in tensors.items()}
        flags, world = (loss.training, loss.reduction), global_state()
        call(loss, given).backward()
        assert global_state() == world
        assert (loss.training, loss.reduction) == flags
        for key, (value, version, dtype) in before.items():
            if key.rpartition(".")[2] in STATE:
                continue
            tensor = tensors[key]
            assert torch.equal(tensor, value), key
            assert (tensor._version, tensor.dtype) == (version, dtype), key
        assert all(leaf.grad is None or leaf.grad.dtype == leaf.dtype for leaf in leaves.values())


@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_evaluation_writes_no_state(name, hyper):
    problem = random_problem(SIZES, seed=61)
    loss = build(name, problem, hyper).eval()
    before = {key: (t.clone(), t._version) for key, t in tensors_of(loss).items()}
    value_and_gradients(loss, problem)
    with torch.no_grad():
        if "logits" not in loss.needs:
            call(loss, problem)
    assert tensors_of(loss).keys() == before.keys()
    for key, tensor in tensors_of(loss).items():
        assert torch.equal(tensor, before[key][0]), key
        assert tensor._version == before[key][1], key


@pytest.mark.parametrize(("name", "hyper"), settings_of())
def test_training_writes_the_state_of_present_classes_only(name, hyper):
    problem = random_problem(SIZES, seed=62)
    problem = problem.but(labels=torch.tensor([0, 2, 2, 0, 4, 4, 2]))
    loss = build(name, problem, hyper)
    before = {key: t.clone() for key, t in tensors_of(loss).items()}
    call(loss, problem)
    changed = False
    for key, tensor in tensors_of(loss).items():
        if key.rpartition(".")[2] not in STATE:
            assert torch.equal(tensor, before[key]), key
        elif key.rpartition(".")[2] in RUNNING:
            changed |= not torch.equal(tensor, before[key])
        elif tensor.dim():
            assert torch.equal(tensor[[1, 3]], before[key][[1, 3]]), f"absent classes of {key}"
            changed |= not torch.equal(tensor, before[key])
    assert changed == any(key.rpartition(".")[2] in STATE for key in before)


def rearranged(loss, size, order):
    """A copy whose vectors and matrices with ``size`` rows have them in another order."""
    loss = copy.deepcopy(loss)
    with torch.no_grad():
        for tensor in tensors_of(loss).values():
            if tensor.dim() and len(tensor) == size:
                tensor.copy_(tensor[order].clone())
    return loss


def assert_same(first, second, tolerance, what):
    assert_close(first[0], second[0], tolerance, what)
    for key, gradient in first[1].items():
        if gradient is not None:
            assert_close(gradient, second[1][key], tolerance, f"{what}: gradient of {key}")


def state_of(loss):
    return {k: t for k, t in tensors_of(loss).items() if k.rpartition(".")[2] in STATE}


@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_order_of_the_batch_does_not_matter(name, hyper):
    problem = random_problem(SIZES, seed=63)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    loss = build(name, problem, hyper)
    loss.train(not loss.draws)  # a draw belongs to a place in the batch
    other = rearranged(loss, SIZES.samples, order)
    value, gradients = value_and_gradients(loss, problem)
    gradients |= {k: gradients[k][order] for k in ("features", "noisy") if k in gradients}
    shuffled = value_and_gradients(other, problem.rows(order))
    assert_same((value, gradients), shuffled, 1e-12, name)
    for key, tensor in state_of(loss).items():
        assert_close(tensor, state_of(other)[key], 1e-12, key)


@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_names_of_the_classes_do_not_matter(name, hyper):
    """Class k is renamed to the place of k in ``order``, with all that belongs to it."""
    problem = random_problem(SIZES, seed=64)
    weight = torch.linspace(0.3, 2.0, SIZES.classes, dtype=torch.float64)
    weighted = "weight" not in LOSSES[name].refuses
    loss = build(name, problem, hyper, **({"weight": weight} if weighted else {}))
    order = torch.tensor([2, 4, 0, 3, 1])
    other = rearranged(loss, SIZES.classes, order)
    rows = {key: getattr(problem, key)[order] for key in ("prototypes", "bias")}
    renamed = problem.but(labels=order.argsort()[problem.labels], soft=problem.soft[:, order])
    renamed = renamed.but(**rows)
    soft = "soft_targets" not in LOSSES[name].refuses
    for targets in ("labels", "soft")[: 1 + soft]:
        value, gradients = value_and_gradients(loss, problem, getattr(problem, targets))
        gradients |= {
            key: gradients[key][order]
            for key in rows
            if key in gradients and gradients[key] is not None
        }
        again = value_and_gradients(other, renamed, getattr(renamed, targets))
        assert_same((value, gradients), again, 1e-11, f"{name} with {targets}")
    for key, tensor in state_of(loss).items():
        by_class = tensor.dim() and key.rpartition(".")[2] not in RUNNING
        moved = tensor[order] if by_class else tensor
        assert_close(moved, state_of(other)[key], 1e-12, key)


@pytest.mark.parametrize("name", supporting("ignore_index", LABELLED))
def test_ignored_rows_equal_dropped_rows(name):
    """With the class itself as the ignored index, not only with the usual -100."""
    problem = random_problem(SIZES, seed=65)
    problem = problem.but(labels=torch.tensor([1, 0, 3, 3, 1, 2, 0]))
    loss, other = build(name, problem, ignore_index=3), build(name, problem)
    for each in (loss, other):
        each.train(not each.draws)
    kept = problem.labels != 3
    value, gradients = value_and_gradients(loss, problem)
    for key in ("features", "noisy"):
        if key in gradients:
            assert not gradients[key][~kept].any()
            gradients[key] = gradients[key][kept]
    assert_same((value, gradients), value_and_gradients(other, problem.rows(kept)), 1e-12, name)
    for key, tensor in state_of(loss).items():
        assert_close(tensor, state_of(other)[key], 1e-12, key)


@pytest.mark.parametrize("name", supporting("sample_weight"))
def test_sample_weights_of_zero_and_one_drop_rows(name):
    problem = random_problem(SIZES, seed=66)
    kept = torch.tensor([True, True, False, True, False, True, True])
    loss = build(name, problem).eval()
    value, gradients = value_and_gradients(loss, problem, sample_weight=kept.double())
    for key in ("features", "noisy"):
        if key in gradients:
            assert not gradients[key][~kept].any()
            gradients[key] = gradients[key][kept]
    assert_same((value, gradients), value_and_gradients(loss, problem.rows(kept)), 1e-12, name)


@pytest.mark.parametrize("name", [n for n in NAMES if "prototypes" in LOSSES[n].needs])
def test_a_linear_layer_serves_as_prototypes(name):
    """Its bias is used by the losses that have one, and by no other."""
    problem = random_problem(SIZES, seed=67)
    layer = torch.nn.Linear(SIZES.dim, SIZES.classes).double()
    with torch.no_grad():
        layer.weight.copy_(problem.prototypes)
        layer.bias.copy_(problem.bias)
    loss = build(name, problem).eval()
    want = call(loss, problem)
    options = {"bias": None} if loss.uses_bias else {}
    assert_close(call(loss, problem.but(prototypes=layer), **options), want, 1e-12, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_meta_device_finds_shapes_alone(name):
    """As for planning memory before there is any: a loss of no number, and gradients of shapes."""
    problem = random_problem(SIZES, dtype=torch.float32, seed=33)
    away = problem.but(**{key: value.to("meta") for key, value in vars(problem).items()})
    for impl in implementations(name):
        options = {} if impl == "auto" else {"impl": impl}
        loss = build(name, problem, {}, dtype=torch.float32, **options).to("meta")
        given, leaves = away.leaves(loss)
        for precise in (True, False):
            with torch.autocast("cpu", enabled=not precise):
                value = call(loss, given)
            assert (value.device.type, value.shape, value.dtype) == ("meta", (), torch.float32)
            found = torch.autograd.grad(value, leaves.values(), allow_unused=True)
            for leaf, gradient in zip(leaves.values(), found, strict=True):
                assert gradient is None or gradient.shape == leaf.shape
