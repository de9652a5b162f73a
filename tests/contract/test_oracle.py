"""Values of every loss against NumPy oracles in float64: settings, targets, options, states."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import LOGIT_ORACLES, ORACLES, OTHER_ORACLES, centroid_family, input_margins, options
from oracles import stats as stats_oracle

import largemargin as lm
import largemargin.functional as LF
from contract.problems import IGNORED, Sizes, arguments, assert_close, call, random_problem
from contract.zoo import (
    NAMES,
    OF_CLASSES,
    OF_SAMPLES,
    ZOO,
    build,
    for_oracle,
    oracle_of,
    settings_of,
    supporting,
)
from largemargin.losses import LOSSES
from largemargin.ops import SIMILARITIES

TOLERANCE = 1e-10
SHAPES = (Sizes(6, 4, 3), Sizes(5, 2, 3), Sizes(1, 3, 2), Sizes(4, 7, 5))
REDUCTIONS = ("mean", "sum", "none")
SMALL = Sizes(6, 4, 3)


def test_every_loss_is_in_the_zoo():
    assert set(ZOO) == set(LOSSES)


def test_every_loss_has_settings_besides_its_defaults():
    for name, entry in ZOO.items():
        assert {} in entry.settings + entry.stopped, f"{name}: defaults are not tested"


def expected_mean(name, problem, hyper):
    value = oracle_of(name, problem, hyper)(problem.labels)
    if ZOO[name].kind == "samples":
        value = value.mean()
    if ZOO[name].sample_part is not None:
        value = value + oracle_of(name, problem, hyper, "sample_part")(problem.labels).mean()
    return value


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_value(name, hyper, sizes):
    problem = random_problem(sizes)
    takes_reduction = "reduction" not in LOSSES[name].refuses
    reduction = {"reduction": "mean"} if takes_reduction else {}
    loss = build(name, problem, hyper, **reduction).eval()
    assert_close(call(loss, problem), expected_mean(name, problem, hyper), TOLERANCE, name)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "hyper"), settings_of(OF_SAMPLES, stopped=True))
def test_unreduced_values(name, hyper, sizes):
    problem = random_problem(sizes, seed=1)
    loss = build(name, problem, hyper, reduction="none").eval()
    for targets in (problem.labels, problem.soft)[: 1 + ("soft_targets" not in loss.refuses)]:
        want = oracle_of(name, problem, hyper)(targets)
        assert_close(call(loss, problem, targets), want, TOLERANCE, name)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].takes_logits])
def test_similarities_and_both_call_forms(name, similarity):
    problem = random_problem(Sizes(5, 4, 3), seed=2)
    hyper = {"similarity": similarity, "scale": 1.5}
    for targets in (problem.labels, problem.soft):
        want = oracle_of(name, problem, hyper)(targets)
        loss = build(name, problem, hyper, reduction="none")
        assert_close(call(loss, problem, targets), want, TOLERANCE, "features")
        logits = lm.functional.similarity_logits(
            problem.features, problem.prototypes, bias=problem.bias, **hyper
        )
        assert_close(
            build(name, problem, {}, reduction="none")(logits, targets), want, TOLERANCE, "logits"
        )


def option_grid(name, soft):
    """Combinations of the options the loss has, as (module options, call options, skipped)."""
    refuses = LOSSES[name].refuses
    weights = [None] if "weight" in refuses else [None, torch.tensor([0.5, 2.0, 0.0, 1.5])]
    smoothings = [0.0] if "label_smoothing" in refuses else [0.0, 0.2, 1.0]
    ignored = [None] if soft or "ignore_index" in refuses else [None, IGNORED, 2]
    sample = [None] if "sample_weight" in refuses else [None, torch.linspace(0.0, 2.0, 6)]
    yield from itertools.product(weights, smoothings, ignored, sample)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "soft"),
    [(name, False) for name in OF_SAMPLES]
    + [(name, True) for name in supporting("soft_targets", OF_SAMPLES)],
)
def test_options(name, soft, reduction):
    refuses = LOSSES[name].refuses
    problem = random_problem(SMALL, seed=3)
    hyper = ZOO[name].settings[0]
    oracle = oracle_of(name, problem, hyper)
    classes = SMALL.classes if "labels" in LOSSES[name].needs else 1
    columns = [oracle(np.full(SMALL.samples, c)) for c in range(classes)]
    for weight, smoothing, ignored, sample in option_grid(name, soft):
        targets = problem.soft if soft else problem.labels.clone()
        if ignored == IGNORED:
            targets[[0, 3]] = IGNORED
        if classes == 1:
            targets = torch.zeros_like(problem.labels)
        given = {
            "weight": None if weight is None else weight.double(),
            "label_smoothing": smoothing,
            "ignore_index": ignored if "ignore_index" not in refuses else IGNORED,
            "reduction": reduction,
        }
        sample_weight = None if sample is None else sample.double()
        want = options.apply_options(
            lambda n, c: columns[c][n],
            targets.numpy(),
            classes,
            sample_weight=sample_weight,
            **given,
        )
        loss = build(name, problem, hyper, **given).eval()
        extra = {} if sample_weight is None else {"sample_weight": sample_weight}
        got = call(loss, problem, targets, **extra)
        assert_close(got, want, TOLERANCE, f"{name}: {given}, sample_weight={sample}")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [None, IGNORED, 1])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("name", [name for name in OF_CLASSES if not ZOO[name].joint])
def test_options_of_class_wise_losses(name, weighted, ignored, reduction):
    """Terms of a class depend on its own rows alone, so the oracle is asked class by class."""
    sizes = Sizes(9, 4, 3)
    problem = random_problem(sizes, seed=4)
    labels = torch.tensor([0, 1, 1, 3, 0, 1, 3, 3, 0])
    if ignored == IGNORED:
        labels[[2, 7]] = IGNORED
    problem = problem.but(labels=labels)
    weight = torch.tensor([0.5, 2.0, 1.0, 1.5]).double()
    hyper = ZOO[name].settings[0]
    given = {"weight": weight if weighted else None, "ignore_index": ignored}
    total, mass = 0.0, 0.0
    for c in sorted({int(y) for y in labels} - {ignored}):
        rows = problem.rows(labels == c)
        share = float(weight[c]) if weighted else 1.0
        total += share * oracle_of(name, rows, hyper)(rows.labels)
        mass += share
    want = total / mass if reduction == "mean" else total
    if ZOO[name].sample_part is not None:
        part = oracle_of(name, problem, hyper, "sample_part")
        columns = [part(np.full(sizes.samples, c)) for c in range(sizes.classes)]
        want += options.apply_options(
            lambda n, c: columns[c][n], labels, sizes.classes, reduction=reduction, **given
        )
    loss = build(name, problem, hyper, reduction=reduction, **given).eval()
    assert_close(call(loss, problem), want, TOLERANCE, name)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("target", ["hard", "ignored", "soft"])
def test_cross_entropy_is_torchs(target, weighted, smoothing, reduction):
    problem = random_problem(SMALL, seed=5)
    weight = torch.tensor([0.5, 2.0, 0.3, 1.5]).double() if weighted else None
    given = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
    targets = problem.soft if target == "soft" else problem.labels.clone()
    if target == "ignored":
        targets[[1, 4]] = IGNORED
    logits = F.linear(problem.features, problem.prototypes, problem.bias).requires_grad_()
    want = F.cross_entropy(logits, targets, **given)
    got = lm.CrossEntropy(**given)(logits, targets)
    assert_close(got, want, 1e-14, "value")
    gradient, expected = (torch.autograd.grad(v.sum(), logits)[0] for v in (got, want))
    assert_close(gradient, expected, 1e-14, "gradient")
    features = call(lm.CrossEntropy(**given), problem, targets)
    assert_close(features, want, 1e-13, "from features")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", supporting("ignore_index", ["cosface", "center", "compactness"]))
def test_narrow_integer_labels(name, dtype):
    """Class 156 is not -100, and 200 classes are not -56, although bytes would have it so."""
    problem = random_problem(Sizes(3, 300, 2), seed=6)
    labels = torch.tensor([156 if dtype != torch.int8 else 100, 3, 45])
    loss = build(name, problem).eval()
    want = call(loss, problem, labels)
    assert_close(call(loss, problem, labels.to(dtype)), want, 1e-15, name)


@pytest.mark.parametrize("strategy", ["none", "both", "partial"])
@pytest.mark.parametrize("first_seen", ["scaled", "full"])
def test_bank_over_a_sequence_of_batches(strategy, first_seen):
    classes, dim = 4, 3
    hyper = {"strategy": strategy, "first_seen": first_seen, "momentum": 0.7, "margin": 1.5}
    loss = lm.Discriminative(classes, dim, **hyper).double()
    state = {"bank": np.zeros((classes, dim)), "seen": np.zeros(classes, dtype=bool)}
    for step, present in enumerate(([0, 1, 1], [1, 2, 2, 0, 1], [2], [], [0, 2, 0])):
        problem = random_problem(Sizes(len(present), classes, dim), seed=step)
        problem = problem.but(labels=torch.tensor(present, dtype=torch.long))
        a = problem.arrays()
        want = centroid_family.discriminative(
            a.features, a.prototypes, a.labels, bias=a.bias, **state, **hyper
        )
        assert_close(call(loss, problem), want.value, TOLERANCE, f"step {step}")
        state = {"bank": want.bank_after, "seen": want.seen_after}
        assert_close(loss.bank.centroids, want.bank_after, TOLERANCE, f"bank at {step}")
        assert loss.bank.seen.tolist() == want.seen_after.tolist()
    assert loss.bank.counts.tolist() == [4, 4, 4, 0]


def test_centers_over_a_sequence_of_batches():
    loss = lm.CenterLoss(3, 2, strength=0.4, rate=0.6, ignore_index=1).double()
    centers = np.zeros((3, 2))
    for step, present in enumerate(([0, 0, 1], [2], [0, 2, 2])):
        problem = random_problem(Sizes(len(present), 3, 2), seed=step)
        kept = np.array(present) != 1
        a, labels = problem.arrays(), np.array(present)[kept]
        want = centroid_family.center_loss(a.features[kept], centers, labels, weight=0.4).sum()
        assert_close(loss(problem.features, torch.tensor(present)), want, TOLERANCE)
        centers = centroid_family.center_update(a.features[kept], centers, labels, rate=0.6)
        assert_close(loss.centers, centers, TOLERANCE, f"centers at {step}")


@pytest.mark.parametrize("impl", ["dense", "chunked"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_class_stats(sizes, similarity, impl, monkeypatch):
    monkeypatch.setattr("largemargin.ops.chunked.MIN_BLOCK", 2)
    monkeypatch.setattr("largemargin.ops.chunked.BLOCK_ELEMENTS", 1)
    problem = random_problem(sizes, seed=7)
    form = {"similarity": similarity, "scale": 1.7}
    for targets in (problem.labels, problem.soft)[: 2 if impl == "dense" else 1]:
        a = problem.arrays()
        want = stats_oracle.class_stats(
            a.features, a.prototypes, targets.numpy(), bias=a.bias, **form
        )
        inputs = (problem.features, problem.prototypes, targets)
        got = LF.class_stats(*inputs, bias=problem.bias, impl=impl, **form)
        for statistic, value in got._asdict().items():
            assert_close(value, getattr(want, statistic), TOLERANCE, statistic)


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_pure_function_of_samples(name):
    problem = random_problem(SMALL, seed=8)
    form = {"bias": problem.bias} if name in LOGIT_ORACLES else {}
    for targets in (problem.labels, problem.soft)[: 1 + (name != "center_loss")]:
        inputs = (problem.features, problem.prototypes, targets)
        plain = {key: value.numpy() for key, value in form.items()}
        plain |= for_oracle(name, {}, SMALL) if name in LOSSES else {}
        want = ORACLES[name](*(x.numpy() for x in inputs), **plain)
        assert_close(getattr(LF, name)(*inputs, **form), want, TOLERANCE, name)


def other_functions(problem):
    """Arguments of the pure functions that are not of (features, prototypes, labels)."""
    q, W, b, y, m = (
        *(problem.features, problem.prototypes, problem.bias, problem.labels),
        problem.bank,
    )
    counts, margins = [100, 30, 1, 7], torch.linspace(-1.0, 4.0, 11, dtype=torch.float64)
    yield "similarity_logits", (q, W), {"bias": b, "similarity": "euclidean"}
    yield "normalize", (q,), {}
    yield "safe_norm", (q,), {}
    yield "sphereface_psi", (torch.linspace(0, 3.14, 9).double(), 3), {}
    yield "zero_centroid", (W,), {}
    yield "ldam_margins", (counts,), {"max_margin": 0.4}
    yield "balanced_weights", (counts,), {"beta": 0.99}
    yield "logit_adjusted", (q @ W.T, counts), {"tau": 1.3}
    yield "logit_adjustment", (q, W, y), {"class_counts": counts, "similarity": "cosine"}
    yield "vs_loss", (q, W, y), {"class_counts": counts, "bias": b, "tau": 0.6}
    yield "dynamic_margins", (counts,), {"power": 0.4}
    yield "adacos_scale", (7,), {}
    yield "compactness", (q, m, y), {"radius": 0.3, "power": 1}
    yield "noise_alignment", (problem.noisy, m, y), {"radius": 0.3}
    yield "centroid_margin", (m, W, torch.arange(4)), {"bias": b, "margin": 1.0}
    yield "centroid_norm", (m,), {}
    yield "signed_boundary_distance", (q, W, b), {}
    yield "stability", (q, problem.noisy), {"squared": True}
    yield "center_update", (q, m, y), {"rate": 0.3}
    yield "super_symmetry", (W,), {}
    yield "super_symmetry_penalty", (W,), {}
    yield "margin_distribution", (margins,), {"r": 1.5}
    yield "margin_hinge", (margins,), {"threshold": 0.5}


def test_other_pure_functions():
    plain = torch.Tensor.numpy
    covered = {"class_stats", "class_stats_from_logits", "implicit_bias"}
    for name, inputs, hyper in other_functions(random_problem(SMALL, seed=9)):
        converted = [plain(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        settings = {k: plain(v) if isinstance(v, torch.Tensor) else v for k, v in hyper.items()}
        if name in ("ldam_margins", "balanced_weights", "dynamic_margins"):
            hyper["dtype"] = torch.float64
        want = OTHER_ORACLES[name](*converted, **settings)
        got = getattr(LF, name)(*inputs, **hyper)
        got = torch.tensor(got, dtype=torch.float64) if isinstance(got, float) else got
        assert_close(got, want, TOLERANCE, name)
        covered.add(name)
    assert covered == set(OTHER_ORACLES)


def test_linearized_margins_and_their_rivals():
    problem = random_problem(SMALL, seed=10)
    logits, labels, inputs = arguments(lm.MarginHinge(), problem)
    a, dim = problem.arrays(), SMALL.dim
    want, rivals = input_margins.linearized_margins(
        *(logits.detach().numpy(), a.labels),
        input_margins.small_network(a.features, np.eye(dim), np.zeros(dim), a.prototypes, a.bias)[
            1
        ][0],
    )
    got = LF.linearized_margins(logits, labels, inputs)
    assert_close(got.margins, want, TOLERANCE)
    assert got.rival_index.tolist() == rivals.tolist()
