"""Bad settings: misspelt choices, infeasible margins; and labels nobody was allowed to check."""

import inspect
import math
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
from oracles import LOGIT_ORACLES

import largemargin as lm
import largemargin.functional as LF
from contract.problems import Sizes, assert_close, call, random_problem
from contract.zoo import (
    LABELLED,
    NAMES,
    OF_SAMPLES,
    ZOO,
    build,
    implementations,
    resolve,
    supporting,
    takes,
)
from largemargin import LargeMarginError
from largemargin.losses import LOSSES

SIZES = Sizes(6, 4, 3)
PROBLEM = random_problem(SIZES, seed=130)
INPUTS = (PROBLEM.features, PROBLEM.prototypes, PROBLEM.labels)
LOGITS = (PROBLEM.features @ PROBLEM.prototypes.T, PROBLEM.labels)


def message_of(function, *args, **kwargs):
    with pytest.raises(LargeMarginError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


CHOICES = [
    ("strategy", "partail", "partial", lambda v: lm.Discriminative(4, 3, strategy=v)),
    ("first_seen", "fill", "full", lambda v: lm.Discriminative(4, 3, first_seen=v)),
    ("aggregate", "maximum", "max", lambda v: lm.Discriminative(4, 3, aggregate=v)),
    ("compact_power", 3, "2", lambda v: lm.Discriminative(4, 3, compact_power=v)),
    ("margin_power", 0, "1", lambda v: lm.Discriminative(4, 3, margin_power=v)),
    ("strategy", "all", "both", lambda v: lm.CentroidBank(4, 3, strategy=v)),
    ("power", 1.5, "2", lambda v: lm.Compactness(power=v)),
    ("power", 3, "1", lambda v: lm.CentroidMargin(power=v)),
    ("aggregate", "sum", "mean", lambda v: lm.CentroidMargin(aggregate=v)),
    ("aggregate", "mean", "sum", lambda v: lm.LayerMargin(aggregate=v)),
    ("p", 3, "inf", lambda v: lm.LayerMargin(p=v)),
    ("mode", "medium", "hard", lambda v: lm.ArcFace(mode=v)),
    ("mode", "medium", "easy", lambda v: LF.arcface(*INPUTS, mode=v)),
    ("gradient", "detach", "detached", lambda v: lm.ArcFace(gradient=v)),
    ("gradient", "detach", "exact", lambda v: LF.arcface(*INPUTS, gradient=v)),
    ("kind", "symmetrical", "symmetric", lambda v: lm.RivalDivergence(kind=v)),
    ("kind", "kl", "rivals_to_uniform", lambda v: LF.rival_divergence(*INPUTS, kind=v)),
    ("want", "best", "rival", lambda v: lm.class_stats(*INPUTS, want=(v,))),
    ("want", "best", "rest", lambda v: lm.class_stats_from_logits(*LOGITS, want=(v,))),
    ("similarity", "cos", "cosine", lambda v: lm.class_stats(*INPUTS, similarity=v)),
    ("impl", "fast", "chunked", lambda v: lm.class_stats(*INPUTS, impl=v)),
    ("precision", "high", "highest", lambda v: lm.class_stats(*INPUTS, precision=v)),
    ("similarity", "cos", "dot", lambda v: LF.similarity_logits(*INPUTS[:2], similarity=v)),
    ("precision", "fp8", "bf16", lambda v: LF.similarity_logits(*INPUTS[:2], precision=v)),
]
OPTION_CHOICES = {
    "reduction": ("avg", "mean"),
    "impl": ("chunky", "chunked"),
    "precision": ("bf32", "bf16"),
}


@pytest.mark.parametrize(("argument", "value", "allowed", "make"), CHOICES)
def test_misspelt_choice(argument, value, allowed, make):
    message = message_of(make, value)
    assert argument in message
    assert repr(value) in message
    assert allowed in message


@pytest.mark.parametrize("option", OPTION_CHOICES)
@pytest.mark.parametrize("name", [n for n in NAMES if ZOO[n].kind != "prototypes"])
def test_misspelt_option_of_every_loss(name, option):
    value, allowed = OPTION_CHOICES[option]
    message = message_of(build, name, PROBLEM, **{option: value})
    for part in (option, repr(value), repr(allowed)):
        assert part in message


@pytest.mark.parametrize("form", [INPUTS, LOGITS], ids=["features", "logits"])
@pytest.mark.parametrize("option", ["similarity", "impl", "precision"])
@pytest.mark.parametrize("name", sorted(LOGIT_ORACLES))
def test_misspelt_option_of_every_function_of_logits(name, option, form):
    """Given logits, the option is not needed; misspelt it is an error all the same."""
    message = message_of(getattr(LF, name), *form, **{option: "oops"})
    assert option in message
    assert "'oops'" in message


NUMBERS = [
    ("margin", 4 / 3, "4 classes", lambda v: LF.cosface(*INPUTS, margin=v)),
    ("margin", 2.0, "1.33", lambda v: call(lm.CosFace(margin=v), PROBLEM)),
    ("margin", -0.1, ">= 0", lambda v: LF.cosface(*INPUTS, margin=v)),
    (
        "margin",
        1.5,
        "4 classes",
        lambda v: LF.cosface(*INPUTS, margin=torch.tensor([0.1, v, 0, 0])),
    ),
    ("margin", 28.6, "radians", lambda v: LF.arcface(*INPUTS, margin=v)),
    ("margin", 28.6, "math.radians", lambda v: call(lm.ArcFace(margin=v), PROBLEM)),
    ("margin", 28.6, "radians", lambda v: LF.arcface(*INPUTS, margin=torch.full((4,), v))),
    ("margin", math.nan, "finite", lambda v: LF.arcface(*INPUTS, margin=v)),
    ("margin", 1.5, "4 classes", lambda v: call(lm.LDAM([3, 2, 1, 1], max_margin=v), PROBLEM)),
    ("m1", 0.0, "> 0", lambda v: lm.UnifiedMargin(m1=v)),
    ("m1", -0.5, "> 0", lambda v: LF.unified_margin(*INPUTS, m1=v)),
    ("m2", -0.5, ">= 0", lambda v: LF.unified_margin(*INPUTS, m2=v)),
    ("m3", -0.5, ">= 0", lambda v: LF.unified_margin(*INPUTS, m3=v)),
    ("margin", 2.5, "unified_margin", lambda v: lm.SphereFace(margin=v)),
    ("margin", 2.5, "UnifiedMargin", lambda v: lm.LSoftmax(margin=v)),
    ("margin", 0, "unified_margin", lambda v: LF.sphereface(*INPUTS, margin=v)),
    ("margin", math.nan, "integer", lambda v: LF.lsoftmax(*INPUTS, margin=v)),
    ("margin", math.inf, "integer", lambda v: LF.sphereface_psi(torch.ones(1), margin=v)),
    ("annealing", -1.0, ">= 0", lambda v: LF.sphereface(*INPUTS, annealing=v)),
    ("alpha1", 0.4, "check=False", lambda v: lm.GMSoftmax(alpha1=v, alpha2=v)),
    ("alpha2", 1.4, "check=False", lambda v: LF.gm_softmax(*INPUTS, alpha2=v)),
    ("momentum", 1.5, "<= 1", lambda v: lm.Discriminative(4, 3, momentum=v)),
    ("radius", -1.0, ">= 0", lambda v: lm.Compactness(radius=v)),
    ("margin", -1.0, ">= 0", lambda v: lm.CentroidMargin(margin=v)),
    ("accumulate", 0, ">= 1", lambda v: lm.CentroidBank(4, 3, accumulate=v)),
    ("alpha", -1.0, ">= 0", lambda v: lm.Discriminative(4, 3, alpha=v)),
    ("noise_weight", -1.0, ">= 0", lambda v: lm.RobustDiscriminative(4, 3, noise_weight=v)),
    ("r", 0.5, "> 0.7", lambda v: lm.MarginDistribution(r=v)),
    ("theta", -0.1, ">= 0", lambda v: lm.MarginDistribution(theta=v)),
    ("mu", 0.0, "> 0", lambda v: lm.MarginDistribution(mu=v)),
    ("smoothing", 1.1, "<= 1", lambda v: lm.LabelSmoothing(smoothing=v)),
    ("label_smoothing", -0.1, ">= 0", lambda v: lm.CrossEntropy(label_smoothing=v)),
    ("gamma", -1.0, ">= 0", lambda v: lm.Focal(gamma=v)),
    ("strength", -1.0, ">= 0", lambda v: lm.Kobayashi(strength=v)),
    ("strength", -1.0, ">= 0", lambda v: lm.ZeroCentroid(strength=v)),
    ("rate", 1.5, "<= 1", lambda v: lm.CenterLoss(4, 3, rate=v)),
    ("class_counts", 0, "positive", lambda v: lm.LDAM([5, v, 3])),
    ("beta", 1.0, "< 1", lambda v: lm.LDAM([5, 4], beta=v)),
    ("alpha", -0.5, ">= 0", lambda v: lm.GaussianMixture(4, 3, alpha=v)),
]


@pytest.mark.parametrize(("argument", "value", "told", "make"), NUMBERS)
def test_number_out_of_range(argument, value, told, make):
    message = message_of(make, value)
    assert argument in message
    assert told in message
    assert f"{value:.4g}".rstrip("0").rstrip(".") in message or repr(value) in message


def numbers_and_switches(name):
    for each in inspect.signature(LOSSES[name].__init__).parameters.values():
        if isinstance(each.default, bool):
            yield from ((each.name, wrong, "True or False") for wrong in (1e308, "yes"))
            yield each.name, torch.ones(3), "True or False"
        elif isinstance(each.default, float) and each.name not in LOSSES[name].fixed:
            yield from ((each.name, size, each.name) for size in (1e308, -1e200))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_have_a_size_that_can_be_computed_with(name):
    """Every number and every switch of every loss: none ends in torch's own error or in NaN."""
    given = list(numbers_and_switches(name))
    if takes(name, "scale"):
        given += [("scale", 1e-300, "scale"), ("scale", 1e300, "scale")]
    for bad in (math.nan, math.inf) if name in OF_SAMPLES else ():
        per_class = torch.tensor([bad, 0.1, 0.1, 0.1, 0.1, 0.1]).double()
        of = SIZES.samples if name == "gm_softmax" else SIZES.classes
        settings = [each for each in ("margin", "m2", "m3", "alpha", "alpha1") if takes(name, each)]
        given += [(each, per_class[:of], each) for each in settings]
    for setting, value, told in given:

        def made(setting=setting, value=value):
            call(build(name, PROBLEM, {setting: value}), PROBLEM)

        assert told in message_of(made)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_near_zero_are_refused_or_give_a_value_and_text_is_none(name):
    for each in inspect.signature(LOSSES[name].__init__).parameters.values():
        if isinstance(each.default, bool) or not isinstance(each.default, float):
            continue

        def made(value, setting=each.name):
            return call(build(name, PROBLEM, {setting: value}), PROBLEM)

        assert each.name in message_of(made, "wide")
        with suppress(LargeMarginError):
            assert torch.isfinite(made(1e-300))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", [n for n in OF_SAMPLES if takes(n, "scale")])
def test_scale_must_be_positive(name, scale):
    message = message_of(lambda: call(build(name, PROBLEM, {"scale": scale}), PROBLEM))
    for part in ("scale", repr(scale), "> 0"):
        assert part in message


@pytest.mark.parametrize(
    "make",
    [
        lm.LDAM,
        lambda counts: lm.CosFace(class_counts=counts),
        lambda counts: lm.preset("long_tail", class_counts=counts),
    ],
    ids=["LDAM", "CosFace", "preset"],
)
def test_counts_of_classes_have_an_order(make):
    # A Counter is read as its keys: labels from 1 on would pass for counts.
    with pytest.raises(LargeMarginError, match="in the order of the labels, but Counter was given"):
        make(Counter([1, 1, 1, 2, 3]))
    with pytest.raises(LargeMarginError, match="prior must be one number per class"):
        lm.CosFace(prior={0: 3, 1: 2})


@pytest.mark.parametrize("kind", [lm.LogitAdjustment, lm.VSLoss, lm.LDAM])
def test_counts_that_a_loss_is_made_of_are_needed_and_named(kind):
    with pytest.raises(LargeMarginError, match=r"class_counts must be numbers.*None was given"):
        kind(None)
    if kind is not lm.LDAM:
        with pytest.raises(LargeMarginError, match=r"class_counts must have shape \(3,\)"):
            kind([5, 2])(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize("given", ["balanced", [3, None], ["3", "1"], [3, [1]]], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: lm.CosFace(weight=v), "weight"),
        (lambda v: lm.CosFace(prior=v), "prior"),
        (lambda v: lm.CosFace(class_counts=v), "class_counts"),
        (lm.LogitAdjustment, "class_counts"),
        (lm.VSLoss, "class_counts"),
        (LF.balanced_weights, "class_counts"),
        (LF.dynamic_margins, "class_counts"),
        (lambda v: LF.logit_adjusted(torch.zeros(1, 2), v), "class_counts"),
    ],
)
def test_what_each_class_has_is_numbers(make, name, given):
    with pytest.raises(LargeMarginError) as told:
        make(given)
    assert f"{name} must be numbers, one per class, but {given!r} was given. " in str(told.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lm.CosFace(scale=np.int64(8)),
        lambda: lm.CosFace(margin=np.float32(0.2)),
        lambda: lm.Discriminative(np.int64(3), 4),
    ],
)
def test_numbers_of_numpy_are_told_how_to_become_pythons(make):
    with pytest.raises(LargeMarginError, match=r"of Python: \.item\(\)"):
        make()


def test_settings_of_losses_that_measure_are_numbers():
    for make, told in (
        (lambda: lm.MarginDistribution(r="auto", theta="wide"), "theta must be a finite number"),
        (lambda: lm.AdaCos(10.5), "num_classes must be a whole number, but 10.5"),
        (lambda: LF.adacos_scale("ten"), "num_classes must be a whole number, but 'ten'"),
    ):
        assert told in message_of(make)


def test_shapes_of_tensor_settings():
    short = torch.tensor([0.1, 0.2])
    for make in (
        lambda: LF.cosface(*INPUTS, margin=short),
        lambda: LF.arcface(*INPUTS, margin=short),
        lambda: LF.unified_margin(*INPUTS, m2=short),
        lambda: LF.focal(*INPUTS, alpha=short),
        lambda: LF.gm_softmax(*INPUTS, beta1=short),
        lambda: LF.gaussian_mixture(*INPUTS, log_variances=torch.zeros(2, 3).double()),
        lambda: LF.gaussian_mixture(*INPUTS, log_variances=torch.zeros(4).double()),
    ):
        assert "(2,)" in (message := message_of(make)) or "log_variances" in message


@pytest.mark.parametrize("bad", [SIZES.classes, -1, 10**6])
@pytest.mark.parametrize("name", LABELLED)
def test_unchecked_label_out_of_range_gives_nan(name, bad):
    """Where values may not be read (``validate=False``, accelerators) a wrong label shows."""
    labels = PROBLEM.labels.clone()
    labels[2] = bad
    kept = torch.arange(SIZES.samples) != 2
    for hyper in ZOO[name].settings + ZOO[name].stopped:
        if isinstance(resolve(hyper, SIZES).get("alpha1"), torch.Tensor):
            continue  # one number per sample: the batch without the row has other numbers
        for impl in implementations(name):
            options = {"validate": False} | ({} if impl == "auto" else {"impl": impl})
            loss = build(name, PROBLEM, hyper, **options)
            value = call(loss, PROBLEM, labels)
            assert bool(value.isnan()), f"{hyper} {impl}: {value}"
            clean = build(name, PROBLEM, hyper)
            call(clean, PROBLEM.rows(kept))
            for key, tensor in clean.state_dict().items():
                assert_close(loss.state_dict()[key].double(), tensor.double(), 1e-12, key)


@pytest.mark.parametrize("name", [name for name in OF_SAMPLES if name in LABELLED])
def test_unchecked_label_out_of_range_gives_nan_in_its_row_alone(name):
    labels = PROBLEM.labels.clone()
    labels[[0, 4]] = torch.tensor([SIZES.classes, -7])
    bad = torch.tensor([True, False, False, False, True, False])
    options = {"validate": False, "reduction": "none"}
    want = call(build(name, PROBLEM, **options).eval(), PROBLEM)
    value = call(build(name, PROBLEM, **options).eval(), PROBLEM, labels)
    assert value.isnan().tolist() == bad.tolist()
    assert_close(value[~bad], want[~bad], 1e-12, name)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for option in ("label_smoothing", "weight")
        for name in supporting(option, LABELLED)
    ],
)
def test_unchecked_label_out_of_range_gives_nan_with_options(name, option):
    labels = PROBLEM.labels.clone()
    labels[2] = SIZES.classes
    value = 0.1 if option == "label_smoothing" else torch.ones(SIZES.classes).double()
    loss = build(name, PROBLEM, validate=False, **{option: value})
    assert bool(call(loss, PROBLEM, labels).isnan())


@pytest.mark.parametrize(
    "function",
    [
        lambda y: LF.compactness(PROBLEM.features, PROBLEM.bank, y, validate=False),
        lambda y: LF.noise_alignment(PROBLEM.noisy, PROBLEM.bank, y, validate=False),
        lambda y: LF.center_loss(PROBLEM.features, PROBLEM.bank, y, validate=False),
        lambda y: LF.centroid_margin(PROBLEM.features, PROBLEM.prototypes, y, validate=False),
        lambda y: LF.centroid_margin(
            PROBLEM.features, PROBLEM.prototypes, y, aggregate="mean", validate=False
        ),
    ],
)
def test_unchecked_label_out_of_range_gives_nan_in_pure_functions(function):
    labels = PROBLEM.labels.clone()
    labels[[1, 3]] = torch.tensor([SIZES.classes, -1])
    assert function(labels).isnan().tolist() == [False, True, False, True, False, False]


def test_validation_can_be_forced_and_switched_off():
    labels = torch.tensor([0, 1, 9, 2, 3, 0])
    inputs = (PROBLEM.features, PROBLEM.prototypes, labels)
    assert "row 2" in message_of(lm.CrossEntropy(), *inputs)
    assert "row 2" in message_of(lm.CrossEntropy(validate=True), *inputs)
    assert bool(lm.CrossEntropy(validate=False)(*inputs).isnan())


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("margin", [], lambda v: lm.CosFace(margin=v)),
        ("margin", [], lambda v: lm.ElasticFace(margin=v)),
        ("margin", 10**400, lambda v: lm.CosFace(margin=v)(*INPUTS)),
        ("scale", torch.ones(2, 2), lambda v: lm.CosFace(scale=v)(*INPUTS)),
        ("scale", torch.ones(2, 2), lambda v: lm.LDAM([3, 4, 5, 6], scale=v)(*INPUTS)),
        ("scale", "x", lambda v: lm.CrossEntropy(scale=v)(*INPUTS)),
        ("scale", [1.0], lambda v: lm.Kobayashi(scale=v)(*INPUTS)),
        ("strength", torch.ones(2, 2), lambda v: lm.MagFace(strength=v)(*INPUTS)),
        ("alpha", {}, lambda v: lm.Focal(alpha=v)),
        ("alpha", 10**400, lambda v: lm.Focal(alpha=v)),
        ("ignore_index", 10**400, lambda v: lm.Compactness(ignore_index=v)(*INPUTS)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_settings_that_are_no_numbers_are_errors_of_ours(name, value, made):
    assert message_of(made, value).startswith(f"{name} must be ")
