"""Half precision inputs and autocast: float32 results near the float32 ones, state kept."""

import pytest
import torch

import largemargin as lm
from contract.problems import (
    Sizes,
    assert_close,
    assert_finite,
    call,
    random_problem,
    targets_of,
    value_and_gradients,
)
from contract.situations import huge_logits, on_prototype, zero_features
from contract.zoo import NAMES, ZOO, build, resolve
from largemargin import class_stats
from largemargin.losses import LOSSES
from largemargin.ops.similarity import common_origin

SIZES = Sizes(6, 4, 3)
HALVES = [torch.float16, torch.bfloat16]
SHIFTABLE = [
    name for name in NAMES if getattr(LOSSES[name], "takes_logits", False) and name != "soft_hinge"
]
"""Losses of logits that a number added to all of them does not change."""


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_inputs(name, half):
    problem = random_problem(SIZES, seed=50).to(half)
    for hyper in (ZOO[name].settings[0], {}):
        loss = build(name, problem, hyper, dtype=torch.float32).eval()
        for targets in targets_of(loss, problem):
            value, gradients = value_and_gradients(loss, problem, targets)
            wide = problem.to(torch.float32)
            exact, slopes = value_and_gradients(
                loss, wide, targets.to(wide.soft.dtype) if targets.dim() == 2 else targets
            )
            assert value.dtype == torch.float32
            assert_close(value, exact, 1e-2, f"{name} {hyper}")
            assert_finite(value, gradients, f"{name} {hyper}")
            for key, gradient in gradients.items():
                if gradient is None:
                    continue
                assert gradient.dtype == half
                error = (gradient.float() - slopes[key]).norm()
                assert error <= 0.1 * slopes[key].norm() + 1e-3, f"{name} {hyper}: {key}"


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("situation", [huge_logits, on_prototype, zero_features])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_at_the_edges(name, situation, half):
    problem = situation(random_problem(SIZES, seed=51)).to(half)
    loss = build(name, problem, {}, dtype=torch.float32).eval()
    for targets in targets_of(loss, problem):
        value, gradients = value_and_gradients(loss, problem, targets)
        assert value.dtype == torch.float32
        assert_finite(value, gradients, f"{targets.dim()}-d targets")


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast(name, half):
    """Only products of features and prototypes may be rounded; without them nothing is."""
    problem = random_problem(SIZES, dtype=torch.float32, seed=52)
    entry = ZOO[name]
    products = entry.kind == "samples" and {"prototypes", "logits"} & set(LOSSES[name].needs)
    tolerance = 1e-2 if products or entry.sample_part is not None else 1e-6
    for hyper in (ZOO[name].settings[0], {}):
        loss = build(name, problem, hyper, dtype=torch.float32).eval()
        before = {key: tensor.dtype for key, tensor in loss.state_dict().items()}
        for targets in targets_of(loss, problem):
            want = call(loss, problem, targets)
            given, leaves = problem.leaves(loss)
            with torch.autocast("cpu", half):
                value = call(loss, given, targets)
            assert value.dtype == torch.float32
            assert_close(value, want, tolerance, f"{name} {hyper}")
            gradients = dict(
                zip(
                    leaves,
                    torch.autograd.grad(value, leaves.values(), allow_unused=True),
                    strict=True,
                )
            )
            assert_finite(value, gradients, f"{name} {hyper}")
            assert all(g.dtype == torch.float32 for g in gradients.values() if g is not None)
        assert {key: tensor.dtype for key, tensor in loss.state_dict().items()} == before


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_state_stays_single_precision_in_a_half_precision_model(name, half):
    """Rule N1: bank and centers are running means, which half precision would freeze."""
    problem = random_problem(SIZES, seed=53).to(half)
    state = {"centroids", "centers"}
    for hyper in ZOO[name].settings:
        loss = LOSSES[name](*ZOO[name].arguments(SIZES), **resolve(hyper, SIZES)).to(half)
        call(loss, problem.but(labels=problem.labels))
        for key, buffer in loss.named_buffers():
            if key.rpartition(".")[2] in state:
                assert buffer.dtype == torch.float32, key


@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("precision", ["highest", "bf16"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_pass_inside_autocast_keeps_its_precision(impl, precision, create_graph):
    """The engine runs in the caller's thread: autocast would round the gradients, and in blocks
    the statistics no longer fit their dtype."""
    problem = random_problem(Sizes(6, 50, 16), dtype=torch.float32, seed=54)
    leaves = [problem.features.requires_grad_(), problem.prototypes.requires_grad_()]
    found = []
    for inside in (False, True):
        stats = class_stats(*leaves, problem.labels, impl=impl, precision=precision)
        value = (stats.rest + 0.5 * stats.spread - stats.target).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(value, leaves, create_graph=create_graph))
    for outer, inner in zip(*found, strict=True):
        assert inner.dtype == torch.float32
        assert torch.equal(inner, outer)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", SHIFTABLE)
def test_a_common_shift_of_given_logits_costs_no_digits(name, soft):
    """As in torch's cross entropy: the shifted logits are rounded, what is made of them is not."""
    torch.manual_seed(53)
    given = 3 * torch.randn(64, 10) + 1e4
    targets = torch.randn(64, 10).softmax(1) if soft else torch.arange(64) % 10
    near, far = given.clone().requires_grad_(), given.double().requires_grad_()
    own = ZOO[name].arguments(Sizes(*near.shape, 1))
    value = LOSSES[name](*own, reduction="none")(near, targets)
    want = LOSSES[name](*own, reduction="none")(far, targets.double() if soft else targets)
    torch.testing.assert_close(value, want.float(), rtol=1e-6, atol=4e-6)
    (got,), (slope,) = (
        torch.autograd.grad(values.sum(), leaf) for values, leaf in ((value, near), (want, far))
    )
    torch.testing.assert_close(got, slope.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("away", [-30.0, 1000.0])
def test_distances_far_from_the_origin_keep_their_digits(away, precision, impl):
    """Those of class vectors moved by a number, which is exact here, are what they were."""
    torch.manual_seed(54)
    near = (64 * torch.randn(9, 8)).round() / 64
    features = (64 * (near[torch.arange(20) % 9] + torch.randn(20, 8))).round() / 64
    found = []
    for shift in (0.0, away):
        leaves = [(each + shift).requires_grad_() for each in (features, near)]
        how = {"similarity": "euclidean", "scale": 2.0, "impl": impl, "precision": precision}
        stats = class_stats(*leaves, torch.arange(20) % 9, **how)
        rest, target = stats.rest, stats.target
        found.append([rest, target, *torch.autograd.grad((rest - target).sum(), leaves)])
    for moved, want in zip(found[1], found[0], strict=True):
        scale = want.abs().max().item()
        tolerance = scale * (2e-6 if precision is None else 2e-2)
        torch.testing.assert_close(moved, want, rtol=0, atol=tolerance)


FAR = {
    "gaussian_mixture": lambda: lm.GaussianMixture(12, 16),
    "variances": lambda: lm.GaussianMixture(12, 16, learn_variances=True),
    "likelihood": lambda: lm.GaussianMixture(12, 16, alpha=0.0, likelihood_weight=0.0),
    "cross_entropy": lambda: lm.CrossEntropy(similarity="euclidean"),
    "kobayashi": lambda: lm.Kobayashi(similarity="euclidean"),
    "max_hinge": lambda: lm.MaxHinge(similarity="euclidean"),
    "dense_hinge": lambda: lm.DenseHinge(similarity="euclidean"),
}


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("size", [3e7, 1e12])
@pytest.mark.parametrize("name", FAR)
def test_features_far_from_all_class_vectors_keep_what_tells_classes_apart(name, size, soft):
    """What all distances of a sample have in common must not round away their differences."""
    torch.manual_seed(55)
    given = size * torch.randn(8, 16), torch.randn(12, 16)
    targets = torch.randn(8, 12).softmax(1) if soft else torch.arange(8)
    refused = {"chunked"} if soft or name == "dense_hinge" else set()

    def found(dtype, impl):
        loss = FAR[name]().to(dtype)
        loss.impl = impl
        leaves = [each.to(dtype).requires_grad_() for each in given]
        value = loss(*leaves, targets.to(dtype) if soft else targets)
        return [value, *torch.autograd.grad(value, [*leaves, *loss.parameters()])]

    want = found(torch.float64, "dense")
    for impl in {"auto", "dense", "chunked"} - refused:
        for got, exact in zip(found(torch.float32, impl), want, strict=True):
            assert (got.double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("size", [1e-9, 1e-13, 1e-20])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", ["lsoftmax", "sphereface"])
def test_angles_of_tiny_features_are_angles(name, soft, size):
    """The gradient of a short feature depends on its direction alone."""
    torch.manual_seed(56)
    direction, prototypes = torch.randn(6, 5), torch.randn(4, 5)
    targets = torch.randn(6, 4).softmax(1) if soft else torch.arange(6) % 4

    def gradient(length):
        features = (length * direction).requires_grad_()
        return torch.autograd.grad(LOSSES[name]()(features, prototypes, targets), features)[0]

    torch.testing.assert_close(gradient(size), gradient(1e-6), rtol=1e-4, atol=1e-6)


def test_the_origin_of_distances_stays_where_it_is_unless_class_vectors_are_far_from_it():
    near = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, 0.25]])
    assert not common_origin(near).any()
    assert common_origin(near + 100).tolist() == [100.0, 100.0]
    assert common_origin(torch.full((3, 2), 0.1)).tolist() == pytest.approx([0.1, 0.1])
    assert not common_origin(torch.zeros(3, 2)).any()
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not common_origin(torch.tensor([[100.0, bad], [101.0, 1.0]])).any()
    far = torch.tensor([[2e38, 3e38], [-2e38, 3e38]])
    assert common_origin(far).isfinite().all()


@pytest.mark.parametrize(
    ("low", "high", "middle"),
    [
        (6.0, 8.0, 7.0),  # half as wide as they are apart: in steps of 1
        (6.5, 8.5, 8.0),  # which 7.5 is not
        (5.9, 8.1, 8.0),  # in steps of 2
        (1 + 2**-20, 1 + 2**-20, 1.0),  # equal ones: in steps of 2^-19 of their size
    ],
)
def test_the_point_distances_are_taken_from_is_a_round_number(low, high, middle):
    columns = torch.tensor([[low, 0.0], [high, 0.0]], dtype=torch.float64)
    assert common_origin(columns).tolist() == [middle, 0.0]
