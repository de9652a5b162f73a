"""The stable discriminative loss: its three gradients, its invariance, its bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import stable_centroids
from oracles.numgrad import numerical_gradient

import largemargin as lm
from contract.problems import Sizes, assert_close, call, random_problem, value_and_gradients
from contract.zoo import build
from largemargin.losses.discriminative import feature_scale, linear_tail

GRADIENTS = ("bounded", "exact", "detached")
SIZES = Sizes(7, 4, 3)
OPEN = {"margin": 0.9, "radius": 0.1, "tail": 0.4, "momentum": 0.7, "detach_classifier": False}


def times(problem, factor):
    """The map T_alpha of LMD Prop. 4.4: features and bias times a factor."""
    return problem.but(features=factor * problem.features, bias=factor * problem.bias)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("first_seen", ["scaled", "full"])
@pytest.mark.parametrize("strategy", ["none", "both", "partial"])
@pytest.mark.parametrize(("size", "head"), [(0.3, 1.0), (2.0, 1.0), (2.0, 0.1)])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_are_the_documented_ones(gradient, size, head, strategy, first_seen, training):
    """Finite differences of the oracle, with what carries no gradient held fixed."""
    problem = times(random_problem(SIZES, seed=110), size)
    problem = problem.but(
        labels=torch.tensor([0, 3, 3, 1, 0, 3, 1]), prototypes=head * problem.prototypes
    )
    assert (float(feature_scale(problem.features)) < 1) == (size < 1)
    hyper = OPEN | {"strategy": strategy, "first_seen": first_seen, "gradient": gradient}
    start = problem.arrays()
    oracle = {k: v for k, v in hyper.items() if k != "detach_classifier"}

    def value(**changed):
        given = {name: getattr(start, name) for name in ("features", "prototypes", "bias")}
        given |= changed
        return stable_centroids.stable_discriminative(
            *(given["features"], given["prototypes"], start.labels),
            bank=start.bank,
            seen=start.seen,
            bias=given["bias"],
            frozen_features=start.features,
            frozen_bias=start.bias,
            **oracle,
        )[0]

    loss = build("stable_discriminative", problem, hyper).train(training)
    _, gradients = value_and_gradients(loss, problem)
    for name, gradient_found in gradients.items():
        want = numerical_gradient(lambda x, n=name: value(**{n: x}), getattr(start, name))
        assert_close(gradient_found, want, 1e-6, name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [None, -100, 1])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_options(weighted, ignored, reduction):
    """The scale is that of the rows that count."""
    labels = torch.tensor([0, 1, 1, 3, 0, 1, 3, 3, 0])
    if ignored == -100:
        labels[[2, 7]] = ignored
    problem = random_problem(Sizes(9, 4, 3), seed=116).but(labels=labels)
    weight = torch.tensor([0.5, 2.0, 1.0, 1.5]).double() if weighted else None
    options = {"weight": weight, "ignore_index": ignored, "reduction": reduction}
    loss = build("stable_discriminative", problem, OPEN, **options)
    hyper = {key: value for key, value in OPEN.items() if key != "detach_classifier"}
    a = problem.arrays()
    state = {"bank": a.bank, "seen": a.seen, "bias": a.bias}
    want, bank = stable_centroids.stable_discriminative(
        *(a.features, a.prototypes, a.labels), **state, **hyper, **options
    )
    assert_close(call(loss, problem), want, 1e-10, "value")
    assert_close(loss.bank.centroids, bank, 1e-10, "bank")


@pytest.mark.parametrize("gradient", GRADIENTS)
@settings(max_examples=25)
@given(exponent=st.floats(-6, 6), seed=st.integers(0, 99))
def test_features_and_bias_times_a_factor_cost_the_same(gradient, exponent, seed):
    """Value, every term and the bank, over two steps whose features differ in scale."""
    factor = 10.0**exponent
    first, second = (random_problem(SIZES, seed=seed + offset) for offset in (0, 100))
    plain, scaled = (
        build("stable_discriminative", first, OPEN | {"gradient": gradient}) for _ in range(2)
    )
    for here, there in ((first, first), (second, times(second, factor))):
        inputs = [(p.features, p.prototypes, p.labels) for p in (here, there)]
        want = plain.named_terms(*inputs[0], bias=here.bias)
        got = scaled.named_terms(*inputs[1], bias=there.bias)
        assert sorted(got.terms) == ["compact", "margin"]
        for name in got.terms:
            assert_close(got.terms[name], want.terms[name], 1e-9, name)
    assert_close(scaled.bank.centroids, plain.bank.centroids, 1e-9, "bank")


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e3, 1e6])
def test_the_gradient_on_features_is_bounded_at_every_scale(scale):
    """As at scale 1 for smaller features, over the scale for larger ones; exact: always over it."""
    problem = random_problem(SIZES, seed=111)
    problem = times(problem, 1 / float(feature_scale(problem.features)))
    for gradient, factor in (("bounded", max(1.0, scale)), ("exact", scale)):
        found = []
        for p in (problem, times(problem, scale)):
            loss = build("stable_discriminative", problem, OPEN | {"gradient": gradient})
            found.append(value_and_gradients(loss, p)[1])
        for name in ("features", "bias"):
            size = found[0][name].norm()
            assert_close(factor * found[1][name] / size, found[0][name] / size, 1e-8, name)
        assert_close(found[1]["prototypes"], found[0]["prototypes"], 1e-8, "prototypes")


@pytest.mark.parametrize("seed", range(5))
def test_no_gradient_along_the_scale_of_the_features(seed):
    """A constant scale does pull along it: that is how features run away."""
    problem = random_problem(Sizes(20, 5, 4), seed=seed)
    along = {}
    for gradient in GRADIENTS:
        loss = build("stable_discriminative", problem, OPEN | {"gradient": gradient})
        _, found = value_and_gradients(loss, problem)
        size = float(problem.features.norm() * found["features"].norm())
        along[gradient] = float((problem.features * found["features"]).sum()) / size
        if gradient == "exact":
            along[gradient] += float((problem.bias * found["bias"]).sum()) / size
    assert abs(along["bounded"]) < 1e-12
    assert abs(along["exact"]) < 1e-12
    assert abs(along["detached"]) > 1e-3


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_gradient_per_sample_is_bounded_for_outliers_too(size):
    """n_c |C_B| |grad| <= alpha (2 tail) + beta, and the pull of the common scale."""
    torch.manual_seed(0)
    features = torch.randn(60, 8, dtype=torch.float64)
    features[0] *= 1e4
    labels = torch.arange(60) % 3
    loss = lm.StableDiscriminative(3, 8, strategy="none", tail=0.5).double()
    features = (size * features).requires_grad_()
    loss(features, torch.randn(3, 8, dtype=torch.float64), labels).backward()
    share = 20 * 3 * features.grad.norm(dim=1)
    assert float(share[1:].max()) <= 2 * (2 * 0.5) + 1 + 1e-9
    assert float(share[0]) > 0


def test_a_head_near_zero_sends_as_little_as_the_softmax_loss_does():
    """A head that starts at zero has boundaries of no meaning: their pull grows with it."""
    problem = random_problem(SIZES, seed=117)
    found = []
    for size in (1e-3, 1e-2):
        small = problem.but(prototypes=size * problem.prototypes, bias=0 * problem.bias)
        loss = build("stable_discriminative", small, {"alpha": 0.0})
        found.append(value_and_gradients(loss, small)[1]["features"])
    assert_close(10 * found[0], found[1], 1e-9, "features")
    assert 0 < float(found[1].norm()) < 0.1


def test_gradient_on_the_classifier_only_on_request():
    problem = random_problem(SIZES, seed=112)
    _, held = value_and_gradients(build("stable_discriminative", problem, {}), problem)
    assert held["prototypes"] is None
    assert held["bias"] is None
    _, free = value_and_gradients(
        build("stable_discriminative", problem, {"detach_classifier": False}), problem
    )
    assert float(free["prototypes"].abs().max()) > 0
    assert float(free["bias"].abs().max()) > 0


def test_equals_the_printed_form_in_its_units():
    """With the printed radius and margin over sigma and no tail: the same terms over sigma."""
    problem = random_problem(Sizes(12, 4, 3), seed=113)
    sigma = float(feature_scale(problem.features))
    stable = lm.StableDiscriminative(
        4, 3, radius=0.5 / sigma, margin=6 / sigma, tail=math.inf, strategy="none"
    ).double()
    printed = lm.Discriminative(4, 3, strategy="none").double()
    inputs = (problem.features, problem.prototypes, problem.labels)
    got = stable.named_terms(*inputs, bias=problem.bias).terms
    want = printed.named_terms(*inputs, bias=problem.bias).terms
    assert_close(sigma**2 * got["compact"], want["compact"], 1e-12, "compact")
    assert_close(sigma * got["margin"], want["margin"], 1e-12, "margin")


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_ceiling_is_reached_by_the_simplex_and_by_nothing_wider(classes):
    corners = lm.simplex(classes, classes, dtype=torch.float64)
    labels = torch.arange(classes).repeat(3)
    loss = lm.StableDiscriminative(classes, classes).double().eval()
    for share, met in ((0.999, True), (1.001, False)):
        loss.margin = share * loss.ceiling
        value = loss.named_terms(7 * corners[labels], corners, labels)
        assert (float(value.terms["margin"]) == 0) == met


@pytest.mark.parametrize("tail", [0.5, 2.0, math.inf])
def test_the_tail_is_the_tangent_of_the_square(tail):
    hinge = torch.tensor([0.0, 0.3, 0.5, 1.0, 3.0, 1e3], dtype=torch.float64, requires_grad=True)
    value = linear_tail(hinge, tail)
    (slope,) = torch.autograd.grad(value.sum(), hinge)
    want = [stable_centroids.tailed_square(float(h), tail) for h in hinge.detach()]
    assert_close(value, want, 1e-12, "value")
    assert_close(slope, (2 * hinge.detach()).clamp_max(2 * tail), 1e-12, "slope")


def test_an_outlier_of_any_size_stays_finite_in_single_precision():
    problem = random_problem(SIZES, dtype=torch.float32, seed=114)
    for size in (1e-30, 1e-13, 1e18, 1e30):
        scaled = problem.but(features=size * problem.features)
        loss = build("stable_discriminative", scaled, {}, dtype=torch.float32)
        value, gradients = value_and_gradients(loss, scaled)
        assert bool(torch.isfinite(value))
        assert bool(torch.isfinite(gradients["features"]).all())
        assert bool(torch.isfinite(loss.bank.centroids).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    problem = random_problem(Sizes(40, 4, 3), seed=115)
    rounded = problem.to(dtype)
    want = call(build("stable_discriminative", problem, OPEN), rounded.to(torch.float64))
    loss = build("stable_discriminative", problem, OPEN, dtype=torch.float32)
    got = call(loss, rounded)
    assert got.dtype == torch.float32
    assert_close(got, want, 1e-4, "value")
    # 300 * 300 is beyond float16: squares must not be taken in it.
    large = rounded.but(features=(300 * problem.features / 5).to(dtype))
    assert bool(torch.isfinite(call(loss, large)))


def test_settings_are_checked():
    for wrong in ({"tail": 0.0}, {"tail": "0.5"}, {"gradient": "bound"}, {"radius": -1.0}):
        with pytest.raises(lm.LargeMarginError, match=next(iter(wrong))):
            lm.StableDiscriminative(3, 2, **wrong)
