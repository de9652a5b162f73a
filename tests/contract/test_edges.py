"""Degenerate, extreme and half precision inputs: finite values and gradients, exact zeros."""

import pytest
import torch

from contract.problems import (
    IGNORED,
    Sizes,
    assert_close,
    assert_finite,
    call,
    random_problem,
    restore,
    targets_of,
    value_and_gradients,
)
from contract.situations import SAME, WITHOUT_ORACLE, zero_features, zero_prototypes
from contract.zoo import (
    LABELLED,
    NAMES,
    OF_SAMPLES,
    ZOO,
    build,
    implementations,
    oracle_of,
    supporting,
    takes,
)
from largemargin.dropin import MarginWarning
from largemargin.heads.head_spec import HeadView
from largemargin.losses import LOSSES

# That is said of a loss once, and looked at here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*prototypes are zero")

SIZES = Sizes(6, 4, 3)
OF_BATCHES = [name for name in NAMES if ZOO[name].kind != "prototypes"]
SCALE_FREE = [name for name in NAMES if ZOO[name].scale_free]


SHAPES = (Sizes(1, 4, 3), Sizes(6, 2, 3), Sizes(6, 4, 1), Sizes(2, 9, 3), Sizes(1, 2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("situation", SAME + WITHOUT_ORACLE, ids=lambda s: s.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_finite(name, situation, dtype):
    problem = situation(random_problem(SIZES, dtype=dtype, seed=40))
    for hyper in (ZOO[name].settings[0], {}):
        for impl in implementations(name):
            options = {} if impl == "auto" else {"impl": impl}
            loss = build(name, problem, hyper, dtype=dtype, **options)
            for targets in targets_of(loss, problem):
                if impl == "chunked" and targets.dim() == 2:
                    continue
                value, gradients = value_and_gradients(restore(loss, problem), problem, targets)
                assert value.dtype == dtype
                assert_finite(value, gradients, f"{name} {hyper} {impl} {targets.dim()}-d targets")


@pytest.mark.parametrize("situation", SAME, ids=lambda s: s.__name__)
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_values_at_degenerate_points(name, situation):
    """Rule N5: up to 1e-6 of movement is allowed where a cosine is 1 or -1."""
    problem = situation(random_problem(SIZES, seed=41))
    hyper = ZOO[name].settings[0]
    loss = build(name, problem, hyper, reduction="none").eval()
    for targets in targets_of(loss, problem):
        want = oracle_of(name, problem, hyper)(targets)
        assert_close(call(loss, problem, targets), want, 1e-6, name)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name in NAMES
        for form in ("hard", "one-hot", "chunked")
        if LOSSES[name].takes_logits and form not in LOSSES[name].refuses
    ],
)
def test_tied_logits_of_any_size_in_single_precision(name, form, size):
    """At 1e8 a log-sum-exp rounds to the largest logit; no posterior may be 1 or NaN for it."""
    rows = torch.tensor([[1.0, 1.0, -1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.5, -1.0, 1.0]])
    labels = torch.tensor([0, 1, 2, 1])
    results = []
    for dtype in (torch.float32, torch.float64):
        logits = (size * rows).to(dtype).requires_grad_()
        targets = torch.nn.functional.one_hot(labels, 3).to(dtype) if form == "one-hot" else labels
        inputs = (logits, targets)
        if form == "chunked":
            inputs = (logits, torch.eye(3, dtype=dtype), targets)
        own = ZOO[name].arguments(Sizes(4, 3, 3))
        loss = LOSSES[name](*own, reduction="none", impl="chunked" if form == "chunked" else "auto")
        value = loss(*inputs)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        results.append((value, gradient))
    (value, gradient), (want, slope) = results
    assert_close(value, want, 2e-3 + 1e-6 * size, "value")
    assert_finite(value, {"logits": gradient})
    if size <= 1e4:
        assert_close(gradient, slope, 5e-3, "gradient")


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_small_shapes(name, sizes):
    for dtype in (torch.float32, torch.float64):
        problem = random_problem(sizes, dtype=dtype, seed=42)
        for hyper in ({}, ZOO[name].settings[0]):
            loss = build(name, problem, hyper, dtype=dtype)
            for targets in targets_of(loss, problem):
                assert_finite(*value_and_gradients(loss, problem, targets), name)


@pytest.mark.parametrize("name", SCALE_FREE)
def test_zero_feature_gets_no_gradient(name):
    """Rule N4: a row shorter than 1e-12 is a constant, not a source of 1e12-sized gradients."""
    problem = zero_features(random_problem(SIZES, seed=43))
    _, gradients = value_and_gradients(build(name, problem), problem)
    assert not gradients["features"].any()
    problem = zero_prototypes(random_problem(SIZES, seed=43))
    _, gradients = value_and_gradients(build(name, problem), problem)
    assert not gradients["prototypes"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("name", "hyper"),
    [(name, {"scale": 64.0} if takes(name, "scale") else {}) for name in SCALE_FREE]
    + [(n, {"similarity": "cosine", "scale": 64.0}) for n in NAMES if LOSSES[n].takes_logits],
)
def test_length_of_features_does_not_matter(name, hyper, dtype):
    problem = random_problem(SIZES, dtype=dtype, seed=44)
    for impl in implementations(name):
        options = {} if impl == "auto" else {"impl": impl}
        loss = build(name, problem, hyper, dtype=dtype, **options).eval()
        want, slopes = value_and_gradients(loss, problem)
        for exponent in (-20, -10, -5, 5, 10, 20):
            factor = 10.0**exponent
            scaled = problem.but(features=problem.features * factor)
            value, gradients = value_and_gradients(loss, scaled)
            assert_finite(value, gradients, f"features times {factor}")
            if exponent > -12:
                tolerance = 1e-9 if dtype == torch.float64 else 2e-4
                assert_close(value, want, tolerance, f"{factor}")
                got = gradients["features"].double() * factor
                assert_close(got, slopes["features"], 100 * tolerance, f"gradient at {factor}")


def assert_zero_and_connected(loss, problem, targets, state):
    leaves_problem, leaves = problem.leaves(loss)
    value = call(loss, leaves_problem, targets)
    assert value.requires_grad
    assert value.tolist() == (0.0 if loss.reduction != "none" else [0.0] * len(problem.features))
    value.sum().backward()
    assert leaves["features"].grad is not None
    for name, leaf in leaves.items():
        assert leaf.grad is None or not leaf.grad.any(), name
    for name, buffer in loss.state_dict().items():
        assert torch.equal(buffer, state[name]), name


def reductions(names):
    """(name, reduction); sums of per-sample and per-class terms have no unreduced form."""
    return [
        (name, reduction)
        for name in names
        for reduction in ("mean", "sum", "none")
        if reduction != "none" or ZOO[name].kind == "samples"
    ]


@pytest.mark.parametrize(("name", "reduction"), reductions(OF_BATCHES))
def test_empty_batch(name, reduction):
    problem = random_problem(Sizes(0, 4, 3), seed=45)
    for impl in implementations(name):
        options = {} if impl == "auto" else {"impl": impl}
        loss = build(name, problem, reduction=reduction, **options)
        state = {key: value.clone() for key, value in loss.state_dict().items()}
        assert_zero_and_connected(loss, problem, problem.labels, state)
        if "soft_targets" not in loss.refuses and impl != "chunked":
            assert_zero_and_connected(loss, problem, problem.soft, state)


@pytest.mark.parametrize(("name", "reduction"), reductions(supporting("ignore_index", LABELLED)))
def test_all_rows_ignored(name, reduction):
    problem = random_problem(SIZES, seed=46)
    labels = torch.full_like(problem.labels, IGNORED)
    loss = build(name, problem, reduction=reduction)
    state = {key: value.clone() for key, value in loss.state_dict().items()}
    assert_zero_and_connected(loss, problem, labels, state)


@pytest.mark.parametrize("name", supporting("sample_weight", OF_SAMPLES))
def test_sample_weights_of_zero(name):
    problem = random_problem(SIZES, seed=47)
    loss = build(name, problem, reduction="mean").eval()
    weights = torch.zeros(SIZES.samples, dtype=torch.float64)
    value, gradients = value_and_gradients(loss, problem, sample_weight=weights)
    assert float(value) == 0.0
    assert not any(g.any() for g in gradients.values() if g is not None)


@pytest.mark.parametrize("name", supporting("label_smoothing", supporting("weight", OF_SAMPLES)))
def test_class_weights_of_zero_with_label_smoothing(name):
    """Those of the labels sum to 0, those of the smoothed targets do not."""
    problem = random_problem(SIZES, seed=47)
    weights = torch.ones(SIZES.classes, dtype=torch.float64)
    weights[0] = 0.0
    loss = build(name, problem, label_smoothing=0.1, weight=weights).eval()
    value, gradients = value_and_gradients(loss, problem, torch.zeros_like(problem.labels))
    assert float(value) == 0.0
    assert not any(g.any() for g in gradients.values() if g is not None)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", supporting("ignore_index", LABELLED))
def test_ignored_row_may_hold_anything(name, poison):
    """Value, gradients and state are those of the batch without the row."""
    problem = random_problem(SIZES, seed=48)
    kept = torch.tensor([True, False, True, True, False, True])
    poisoned = problem.but(
        features=torch.where(kept[:, None], problem.features, poison),
        noisy=torch.where(kept[:, None], problem.noisy, poison),
        labels=torch.where(kept, problem.labels, IGNORED),
    )
    if "logits" in LOSSES[name].needs:
        # Poison in the inputs would reach the network's own gradients; the loss sees the logits.
        bias = torch.where(kept[:, None], problem.bias, poison)
        poisoned = problem.but(labels=poisoned.labels, bias=bias)
    loss, clean = build(name, problem), build(name, problem)
    for each in (loss, clean):
        each.train(not each.draws)  # a draw belongs to a place in the batch
    value, gradients = value_and_gradients(loss, poisoned)
    want, expected = value_and_gradients(clean, problem.rows(kept))
    assert_close(value, want, 1e-12, "value")
    for key, gradient in gradients.items():
        if gradient is not None and len(gradient) == len(kept):
            assert not gradient[~kept].any(), f"gradient of an ignored row of {key}"
            gradient = gradient[kept].sum(0) if key == "bias" else gradient[kept]
        if gradient is not None:
            assert_close(gradient, expected[key], 1e-12, key)
    for key, buffer in loss.state_dict().items():
        assert_close(buffer, clean.state_dict()[key], 1e-12, key)


@pytest.mark.parametrize("name", OF_BATCHES)
def test_ragged_batches(name):
    """The last batch of an epoch is shorter: nothing remembers the size of the one before."""
    problem = random_problem(Sizes(13, 4, 3), seed=49)
    loss = build(name, problem, reduction="sum")
    loss.train(not (loss.draws or loss.counts_rows))  # which goes by what batches came before
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(13).split([5, 3, 0, 1, 4]):
        part = restore(loss, problem) if ZOO[name].kind == "samples" else loss
        value, gradients = value_and_gradients(part, problem.rows(rows))
        assert_finite(value, gradients, f"{len(rows)} rows")
        total += value
    if ZOO[name].kind == "samples":
        assert_close(total, call(restore(loss, problem), problem), 1e-12, "sum of the parts")


@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("name", ["biased_softmax", "cross_entropy", "focal", "max_softplus"])
def test_all_rivals_of_bias_minus_infinity(name, impl):
    """There is nothing to lose against; and no NaN of an ignored row, which stands for class 0."""
    features, prototypes = torch.randn(3, 4, requires_grad=True), torch.eye(5, 4)
    leaves = [features, prototypes.requires_grad_()]
    bias = torch.full((5,), -torch.inf).index_fill(0, torch.tensor([2]), 1.0)
    loss = LOSSES[name](impl=impl, reduction="sum")
    value = loss(features, HeadView(prototypes, bias, "dot", 1.0), torch.tensor([2, 2, IGNORED]))
    assert value.item() == 0
    for gradient in torch.autograd.grad(value, leaves):
        assert not gradient.any()


COSINES = ["cosface", "arcface", "normface", "lm_softmax", "sphereface", "sample_margin", "ldam"]


@pytest.mark.parametrize("name", COSINES)
def test_prototypes_that_are_zero_are_said_once(name):
    """They have no angle, so they get no gradient and would never move."""
    problem = random_problem(SIZES, seed=57)
    prototypes = problem.prototypes.clone()
    prototypes[1:3] = 0
    prototypes.requires_grad_()
    loss = build(name, problem)
    with pytest.warns(MarginWarning, match="2 of the 4 prototypes are zero"):
        loss(problem.features, prototypes, problem.labels)
    loss(problem.features, prototypes, problem.labels)
    build(name, problem)(problem.features, prototypes.detach(), problem.labels)
    build(name, problem)(problem.features, problem.prototypes.requires_grad_(), problem.labels)


def test_sub_centers_that_are_zero_are_said():
    problem = random_problem(SIZES, seed=57)
    centers = problem.prototypes[:, None].repeat(1, 2, 1)
    centers[:2, 1] = 0
    with pytest.warns(MarginWarning, match="2 of the 8 prototypes are zero"):
        LOSSES["cosface"]()(problem.features, centers.requires_grad_(), problem.labels)


@pytest.mark.parametrize("name", ["cross_entropy", "gaussian_mixture", "max_hinge"])
def test_prototypes_that_are_zero_train_without_angles(name):
    problem = random_problem(SIZES, seed=57)
    prototypes = torch.zeros_like(problem.prototypes).requires_grad_()
    build(name, problem)(problem.features, prototypes, problem.labels).backward()
    assert prototypes.grad.any()
