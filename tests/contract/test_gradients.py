"""Gradients of every loss against finite differences, first and second order, dense and chunked."""

import sys

import numpy as np
import pytest
import torch
from oracles import centroid_family, cosine_family, input_margins, others
from oracles.numgrad import numerical_gradient
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import largemargin as lm
import largemargin.functional as LF
from contract.problems import (
    Sizes,
    arguments,
    assert_close,
    call,
    random_problem,
    value_and_gradients,
)
from contract.zoo import NAMES, OF_SAMPLES, ZOO, build, settings_of, supporting, takes
from largemargin import LargeMarginError
from largemargin.losses import LOSSES
from largemargin.ops import SIMILARITIES

SIZES = Sizes(3, 5, 2)
CHUNKED = supporting("chunked", OF_SAMPLES)
ON_LOGITS = [name for name in NAMES if LOSSES[name].takes_logits]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two classes, so that five classes take three of them."""
    monkeypatch.setattr("largemargin.ops.chunked.MIN_BLOCK", 2)
    monkeypatch.setattr("largemargin.ops.chunked.BLOCK_ELEMENTS", 1)


def differentiable(name, problem, hyper=None, labels=None, **options):
    """(function, inputs) for gradcheck: the loss of its inputs and of its own parameters.

    Evaluation mode, with history in the bank: the bank is then a constant of the function.
    """
    problem = problem.but(seen=torch.ones_like(problem.seen))
    loss = build(name, problem, hyper, **options).eval()
    problem, leaves = problem.leaves(loss)
    parameters = dict(loss.named_parameters())
    names, count = list(leaves), len(leaves)

    def function(*tensors):
        given = problem.but(**dict(zip(names, tensors[:count], strict=True)))
        held = dict(zip(parameters, tensors[count:], strict=True))
        call_options = {"bias": given.bias} if loss.uses_bias else {}
        return functional_call(loss, held, tuple(arguments(loss, given, labels)), call_options)

    inputs = (*leaves.values(), *(p.detach().clone().requires_grad_() for p in parameters.values()))
    return function, inputs


@pytest.mark.parametrize(("name", "hyper"), settings_of())
def test_gradient(name, hyper):
    assert gradcheck(*differentiable(name, random_problem(SIZES, seed=20), hyper))


@pytest.mark.parametrize(("name", "hyper"), settings_of(supporting("soft_targets", OF_SAMPLES)))
def test_gradient_with_soft_targets(name, hyper):
    problem = random_problem(SIZES, seed=21)
    assert gradcheck(*differentiable(name, problem, hyper, problem.soft))


@pytest.mark.parametrize(("name", "hyper"), settings_of(CHUNKED))
def test_gradient_of_the_chunked_form(name, hyper, small_blocks):
    problem = random_problem(SIZES, seed=22)
    assert gradcheck(*differentiable(name, problem, hyper, impl="chunked"))
    values = {
        impl: value_and_gradients(build(name, problem, hyper, impl=impl), problem)
        for impl in ("dense", "chunked")
    }
    assert_close(values["chunked"][0], values["dense"][0], 1e-12, "value")
    for key, gradient in values["dense"][1].items():
        assert_close(values["chunked"][1][key], gradient, 1e-12, key)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(
    ("name", "impl"),
    [(name, "dense") for name in ON_LOGITS]
    + [(name, "chunked") for name in ON_LOGITS if name in CHUNKED],
)
def test_gradient_by_similarity(name, impl, similarity, small_blocks):
    hyper = {"similarity": similarity, "scale": 1.5}
    problem = random_problem(SIZES, seed=23)
    assert gradcheck(*differentiable(name, problem, hyper, impl=impl))
    if impl == "dense":
        assert gradcheck(*differentiable(name, problem, hyper, problem.soft))
        assert gradgradcheck(*differentiable(name, problem, hyper))


@pytest.mark.parametrize("name", ON_LOGITS)
def test_gradient_to_logits(name):
    problem = random_problem(SIZES, seed=24)
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for targets in (problem.labels, problem.soft):
        assert gradcheck(lambda z, t=targets: build(name, problem, {})(z, t), (logits,))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for option in ("weight", "label_smoothing", "ignore_index")
        for name in supporting(option, OF_SAMPLES)
    ],
)
def test_gradient_with_options(name, option):
    problem = random_problem(SIZES, seed=25)
    value = {
        "weight": torch.linspace(0.5, 2.0, SIZES.classes).double(),
        "label_smoothing": 0.2,
        "ignore_index": int(problem.labels[0]),
    }[option]
    assert gradcheck(*differentiable(name, problem, **{option: value}))


@pytest.mark.parametrize(
    ("name", "hyper"),
    settings_of([n for n in NAMES if "logits" not in LOSSES[n].needs or n == "margin_hinge"]),
)
def test_second_derivative(name, hyper):
    assert gradgradcheck(*differentiable(name, random_problem(SIZES, seed=26), hyper))


@pytest.mark.parametrize("name", CHUNKED)
def test_second_derivative_of_the_chunked_form_explains_itself(name, small_blocks):
    problem = random_problem(SIZES, seed=27)
    function, inputs = differentiable(name, problem, impl="chunked")
    for tensor in inputs:
        (gradient,) = torch.autograd.grad(function(*inputs), tensor, create_graph=True)
        with pytest.raises(LargeMarginError, match=r'impl="chunked".*once.*impl="dense"'):
            gradient.square().sum().backward()


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *[(name, "scale") for name in ON_LOGITS],
        *[("cosface", "margin"), ("arcface", "margin"), ("focal", "alpha")],
        *[("unified_margin", "m2"), ("unified_margin", "m3")],
        *[(n, "margin") for n in ("max_hinge", "max_softplus", "dense_hinge", "biased_softmax")],
        *[("gm_softmax", key) for key in ("alpha1", "beta1", "alpha2", "beta2")],
    ],
)
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_gradient_to_hyper_parameters(name, parameter, soft):
    problem = random_problem(SIZES, seed=28)
    count = SIZES.samples if name == "gm_softmax" else SIZES.classes
    low = {"alpha1": 0.8, "scale": 1.5}.get(parameter, 0.2)
    shape = () if parameter == "scale" else (count,)
    value = low + 0.3 * torch.rand(shape, dtype=torch.float64)
    fixed = {} if name in ON_LOGITS else {"scale": 4.0}
    if name in ("logit_adjustment", "vs_loss"):
        fixed = {"class_counts": [9, 5, 3, 2, 1]}
    if name == "gm_softmax":
        fixed |= {"alpha1": 1.0, "alpha2": 0.5}
    inputs = (problem.features, problem.prototypes, problem.soft if soft else problem.labels)
    assert gradcheck(
        lambda x: getattr(LF, name)(*inputs, **(fixed | {parameter: x})), (value.requires_grad_(),)
    )


@pytest.mark.parametrize("name", supporting("soft_targets", OF_SAMPLES))
def test_gradient_to_soft_targets_and_sample_weights(name):
    problem = random_problem(SIZES, seed=29)
    loss = build(name, problem).eval()
    weights = torch.linspace(0.2, 1.0, SIZES.samples).double().requires_grad_()
    soft = problem.soft.clone().requires_grad_()
    assert gradcheck(lambda t, a: call(loss, problem, t, sample_weight=a), (soft, weights))


def oracle_gradients(problem, value, names):
    """Finite differences of ``value(arrays)`` to the named inputs, at the problem's numbers."""
    gradients = {}
    for name in names:

        def shifted(x, name=name):
            arrays = problem.arrays()
            setattr(arrays, name, x)
            return value(arrays)

        gradients[name] = numerical_gradient(shifted, problem.arrays().__dict__[name])
    return gradients


def assert_gradients(loss, problem, value):
    got_value, got = value_and_gradients(loss, problem)
    assert_close(got_value, value(problem.arrays()), 1e-10, "value")
    for name, want in oracle_gradients(problem, value, got).items():
        gradient = torch.zeros_like(torch.as_tensor(want)) if got[name] is None else got[name]
        assert_close(gradient, want, 1e-6, name)


@pytest.mark.parametrize("name", ["margin_distribution", "margin_hinge", "layer_margin"])
def test_denominators_of_linearised_margins_are_constants(name):
    """Default: only the numerator is differentiated, the gradient's norm is frozen."""
    problem = random_problem(SIZES, seed=30)
    identity, zero = np.eye(SIZES.dim), np.zeros(SIZES.dim)

    def network(a):
        return input_margins.small_network(a.features, identity, zero, a.prototypes, a.bias)

    frozen = network(problem.arrays())[1]

    def value(a):
        logits = network(a)[0]
        if name == "layer_margin":
            return input_margins.layer_margin(
                logits, a.labels, frozen, gamma=2.0, frozen_jacobians=frozen
            ).mean()
        margins, _ = input_margins.linearized_margins(
            logits, a.labels, frozen[0], frozen_jacobian=frozen[0]
        )
        if name == "margin_hinge":
            return others.margin_hinge(margins, threshold=2.0).mean()
        return others.margin_distribution(margins, r=0.9, theta=0.1).mean()

    hyper = {
        "layer_margin": {"gamma": 2.0, "eps": 1e-6},
        "margin_hinge": {"threshold": 2.0, "eps": 1e-6},
        "margin_distribution": {"r": 0.9, "theta": 0.1, "eps": 1e-6},
    }[name]
    assert_gradients(build(name, problem, hyper), problem, value)


@pytest.mark.parametrize("mode", ["hard", "easy", "none"])
def test_detached_arcface_passes_the_gradient_of_the_cosine(mode):
    problem = random_problem(SIZES, seed=31)
    start = problem.arrays()

    def value(a):
        return cosine_family.arcface(
            *(a.features, a.prototypes, a.labels),
            margin=0.4,
            scale=6.0,
            mode=mode,
            gradient="detached",
            frozen_features=start.features,
            frozen_prototypes=start.prototypes,
        ).mean()

    hyper = {"margin": 0.4, "scale": 6.0, "mode": mode, "gradient": "detached"}
    assert_gradients(build("arcface", problem, hyper), problem, value)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("first_seen", ["scaled", "full"])
@pytest.mark.parametrize("strategy", ["none", "both", "partial"])
@pytest.mark.parametrize("name", ["discriminative", "robust_discriminative"])
def test_bank_and_first_sight_carry_no_gradient(name, strategy, first_seen, training):
    problem = random_problem(Sizes(7, 4, 3), seed=32)
    problem = problem.but(labels=torch.tensor([0, 3, 3, 1, 0, 3, 1]))
    settings = {"strategy": strategy, "first_seen": first_seen, "momentum": 0.7, "margin": 2.0}
    start = problem.arrays()
    assert not start.seen[3]

    def value(a):
        inputs = (a.features, a.prototypes, a.labels)
        state = {"bank": a.bank, "seen": a.seen, "bias": a.bias, **settings}
        state["frozen_features"] = start.features
        if name == "robust_discriminative":
            return centroid_family.robust_discriminative(*inputs, noisy=a.noisy, **state)
        return centroid_family.discriminative(*inputs, **state).value

    loss = build(name, problem, settings).train(training)
    assert_gradients(loss, problem, value)
    assert not loss.bank.centroids.requires_grad


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "detach_classifier")])
def test_detached_classifier_trains_the_features_only(name):
    problem = random_problem(SIZES, seed=33)
    hyper = ZOO[name].settings[0]
    if takes(name, "softmax_weight"):
        hyper = hyper | {"softmax_weight": 0.0}  # that term trains the classifier by right
    free = value_and_gradients(build(name, problem, hyper), problem)
    held = value_and_gradients(build(name, problem, hyper | {"detach_classifier": True}), problem)
    assert_close(held[0], free[0], 0.0, "value")
    assert_close(held[1]["features"], free[1]["features"], 0.0, "features")
    assert float(free[1]["prototypes"].abs().max()) > 0
    assert held[1]["prototypes"] is None
    assert held[1]["bias"] is None


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_large_rival_search_equals_the_dense_form(aggregate, monkeypatch):
    """The blocked search behind the centroid margin finds the pair the direct one finds."""
    problem = random_problem(Sizes(9, 600, 3), seed=34)
    loss = lm.CentroidMargin(margin=3.0, aggregate=aggregate).double()
    want = value_and_gradients(loss, problem)
    module = sys.modules["largemargin.ops.boundary"]
    monkeypatch.setattr(module, "EXACT_LIMIT", 0)
    monkeypatch.setattr(module, "BLOCK", 1)
    got = value_and_gradients(loss, problem)
    assert_close(got[0], want[0], 1e-11, "value")
    for name, gradient in want[1].items():
        assert_close(got[1][name], gradient, 1e-9, name)


TRANSFORMED = [name for name in NAMES if not {"inputs", "layers"} & set(LOSSES[name].needs)]


def of_matrix(name, loss, problem):
    """The loss as a function of features, or of prototypes where it takes no others."""
    argument = "features" if "features" in loss.needs else loss.needs[0]

    def value(matrix):
        given = dict(zip(loss.needs, arguments(loss, problem), strict=True))
        return loss(*{**given, argument: matrix}.values())

    given = dict(zip(loss.needs, arguments(loss, problem), strict=True))
    return value, given[argument]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_torch_func(name):
    """Forwards over backwards, which autograd functions of our own have to allow."""
    problem = random_problem(Sizes(3, 4, 3), seed=12)
    value, matrix = of_matrix(name, build(name, problem).eval(), problem)
    leaf = matrix.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(leaf), leaf, create_graph=True)
    want = torch.zeros(*leaf.shape, *leaf.shape).to(leaf)
    if slope.requires_grad:
        rows = [torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in slope.reshape(-1)]
        want = torch.stack(rows).reshape(want.shape)
    torch.testing.assert_close(torch.func.hessian(value)(matrix), want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.jacfwd(value)(matrix), slope.detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(matrix, torch.ones_like(matrix))
        tangent = torch.autograd.forward_ad.unpack_dual(value(dual)).tangent
    torch.testing.assert_close(tangent, slope.detach().sum())


@pytest.mark.parametrize(
    "name",
    [
        *("center", "discriminative", "stable_discriminative", "robust_discriminative"),
        *("adaface", "adacos", "curricularface"),
    ],
)
def test_transforms_of_torch_func_move_no_state(name):
    problem = random_problem(Sizes(3, 4, 3), seed=12)
    loss = build(name, problem).train()
    value, matrix = of_matrix(name, loss, problem)
    before = {key: tensor.clone() for key, tensor in loss.state_dict().items()}
    with pytest.raises(LargeMarginError, match=r"Call \.eval\(\) on the loss"):
        torch.func.grad(value)(matrix)
    assert all(torch.equal(tensor, before[key]) for key, tensor in loss.state_dict().items())
