"""Bad input raises one type of error, which names the argument, what was given and what to do."""

import inspect
import math

import numpy as np
import pytest
import torch

import largemargin as lm
import largemargin.functional as LF
from contract.problems import Sizes, arguments, call, random_problem
from contract.zoo import LABELLED, NAMES, ZOO, build, supporting
from largemargin import LargeMarginError
from largemargin.losses import LOSSES

SIZES = Sizes(6, 4, 3)
TAKING_OPTIONS = [name for name in NAMES if ZOO[name].kind != "prototypes"]


def message_of(function, *args, **kwargs):
    with pytest.raises(LargeMarginError) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, LargeMarginError)
    return str(caught.value)


def call_with(loss, problem, **changes):
    """Call the loss with some of its arguments replaced; others go to the call's options."""
    given = dict(zip(loss.needs, arguments(loss, problem), strict=True))
    options = {"bias": problem.bias} if loss.uses_bias else {}
    options |= {key: value for key, value in changes.items() if key not in given}
    given |= {key: value for key, value in changes.items() if key in given}
    return loss(*given.values(), **options)


@pytest.mark.parametrize("value", [SIZES.classes, -1, 10**6, -101])
@pytest.mark.parametrize("name", LABELLED)
def test_label_out_of_range(name, value):
    problem = random_problem(SIZES, seed=110)
    labels = problem.labels.clone()
    labels[2] = value
    loss = build(name, problem)
    before = {key: tensor.clone() for key, tensor in loss.state_dict().items()}
    message = message_of(call, loss, problem, labels)
    for part in ("labels", "row 2", f"holds {value}", f"[0, {SIZES.classes})"):
        assert part in message
    assert f"ignore_index={value}" in message
    for key, tensor in loss.state_dict().items():
        assert torch.equal(tensor, before[key]), f"{key} was written before the check"


CORRUPTIONS = {
    "one dimension": lambda x: (x[0], str(tuple(x[0].shape))),
    "three dimensions": lambda x: (x[None], str(tuple(x[None].shape))),
    "integers": lambda x: (x.long(), "int64"),
    "array": lambda x: (x.detach().numpy(), "ndarray"),
    "list": lambda x: (x.tolist(), "list"),
}


MATRICES = [
    (name, argument)
    for name in NAMES
    for argument in ("features", "prototypes", "noisy", "logits")
    if argument in LOSSES[name].needs
]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize(("name", "argument"), MATRICES)
def test_wrong_matrix(name, argument, corruption):
    problem = random_problem(SIZES, seed=111)
    loss = build(name, problem)
    good = dict(zip(loss.needs, arguments(loss, problem), strict=True))[argument]
    bad, told = CORRUPTIONS[corruption](good)
    message = message_of(call_with, loss, problem, **{argument: bad})
    assert argument in message
    assert told in message


@pytest.mark.parametrize(
    ("name", "argument"), [c for c in MATRICES if c[0] in TAKING_OPTIONS and c[1] != "logits"]
)
def test_wrong_feature_dimension(name, argument):
    problem = random_problem(SIZES, seed=112)
    loss = build(name, problem)
    bad = getattr(problem, argument)[:, :-1]
    message = message_of(call_with, loss, problem, **{argument: bad})
    assert argument in message
    assert str(tuple(bad.shape)) in message


WRONG_LABELS = {
    "5 labels": lambda y: y[:-1],
    "torch.float64": lambda y: y.double(),
    "(6, 1)": lambda y: y[:, None],
    "()": lambda y: y[0],
    "list": lambda y: y.tolist(),
    "torch.bool": lambda y: y > 1,
    "(6, 5)": lambda y: torch.ones(6, 5).double(),
}


@pytest.mark.parametrize("told", WRONG_LABELS)
@pytest.mark.parametrize("name", LABELLED)
def test_wrong_labels(name, told):
    problem = random_problem(SIZES, seed=113)
    wrong = WRONG_LABELS[told](problem.labels)
    message = message_of(call_with, build(name, problem), problem, labels=wrong)
    assert "labels" in message or "soft" in message
    assert told in message or "soft_targets" in message


def functions_of(names):
    """Functions called with (features, prototypes, labels)."""
    law, found = ["features", "prototypes", "labels"], {n: getattr(LF, n, None) for n in names}
    return [n for n, f in found.items() if f and [*inspect.signature(f).parameters][:3] == law]


@pytest.mark.parametrize("corruption", ["one dimension", "array", "list"])
@pytest.mark.parametrize("name", functions_of(LABELLED))
def test_functions_look_at_what_they_get_first(name, corruption):
    problem, function = random_problem(SIZES, seed=114), getattr(LF, name)
    known = inspect.signature(function).parameters
    hyper = {"class_counts": [3, 1, 2, 4]} if "class_counts" in known else {}
    matrices = {"features": problem.features, "prototypes": problem.prototypes}
    calls = [matrices] + [{"logits": problem.features @ problem.prototypes.T}] * (
        known["labels"].default is None
    )
    for call_form in calls:
        for argument, good in call_form.items():
            bad, told = CORRUPTIONS[corruption](good)
            given = (*(call_form | {argument: bad}).values(), problem.labels)
            message = message_of(function, *given, **hyper)
            assert argument in message
            assert told in message


@pytest.mark.parametrize("name", ["logit_adjustment", "vs_loss"])
def test_functions_of_counts_name_what_is_wrong(name):
    function, problem = getattr(LF, name), random_problem(SIZES, seed=115)
    logits = problem.features @ problem.prototypes.T
    message = message_of(function, problem.labels, logits, class_counts=[3, 1, 2, 4])
    assert "the order is logits, labels" in message
    message = message_of(function, logits, problem.labels, class_counts=[3, 1])
    assert "class_counts must have shape (4,)" in message


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (LF.adaface, {"norm_std": -1.0}),
        (LF.adaface, {"norm_mean": "20"}),
        (LF.adaface, {"concentration": 0.0}),
        (LF.elasticface, {"std": -0.1}),
        (LF.curricularface, {"progress": 1.5}),
    ],
)
def test_functions_check_their_statistics(function, wrong):
    problem = random_problem(SIZES, seed=116)
    rows = (problem.features, problem.prototypes, problem.labels)
    assert next(iter(wrong)) in message_of(function, *rows, **wrong)


KINDS = {
    "torch.float8_e4m3fn": lambda x: x.to(torch.float8_e4m3fn),
    "torch.sparse_coo": lambda x: x.to_sparse(),
    "torch.sparse_csr": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "argument"), MATRICES)
def test_kinds_of_tensors_that_nothing_is_computed_in(name, argument, kind):
    problem = random_problem(SIZES, seed=111)
    loss = build(name, problem)
    good = dict(zip(loss.needs, arguments(loss, problem), strict=True))[argument]
    message = message_of(call_with, loss, problem, **{argument: KINDS[kind](good.detach())})
    for part in (argument, kind, "Call ."):
        assert part in message


@pytest.mark.parametrize("kind", list(KINDS)[:2])
def test_kinds_of_weights_and_targets_that_nothing_is_computed_in(kind):
    problem = random_problem(SIZES, seed=111)
    inputs = problem.features, problem.prototypes
    bad = KINDS[kind](torch.ones(SIZES.classes))
    for message in (
        message_of(lm.CrossEntropy, weight=bad),
        message_of(lm.CosFace, margin=bad),
        message_of(lm.CrossEntropy(), *inputs, KINDS[kind](problem.soft)),
        message_of(
            lm.CrossEntropy(),
            *inputs,
            problem.labels,
            sample_weight=KINDS[kind](torch.ones(SIZES.samples)),
        ),
    ):
        assert kind in message
    if "sparse" in kind:
        assert kind in message_of(lm.CosFace(), *inputs, KINDS[kind](problem.labels))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("name", LABELLED)
def test_labels_of_every_whole_dtype(name, dtype):
    problem = random_problem(SIZES, seed=111)
    value = call(build(name, problem), problem, problem.labels.to(dtype))
    assert torch.equal(value, call(build(name, problem), problem))
    bad = problem.labels.clone()
    bad[2] = 200
    assert "row 2 holds 200" in message_of(call, build(name, problem), problem, bad.to(dtype))


@pytest.mark.parametrize("argument", ["features", "prototypes", "labels"])
@pytest.mark.parametrize("name", ["cosface", "cross_entropy", "sphereface", "discriminative"])
def test_tensors_of_inference_mode_have_no_gradients(name, argument):
    problem = random_problem(SIZES, seed=111)
    loss = build(name, problem)
    with torch.inference_mode():
        made = getattr(problem, argument).clone()
        inside = call_with(loss, problem, **{argument: made})
    assert inside.isfinite()
    given = {argument: made}
    assert call_with(loss, problem, **given).isfinite()  # nothing asks for a gradient
    other = "features" if argument == "prototypes" else "prototypes"
    given[other] = getattr(problem, other).clone().requires_grad_()
    message = message_of(call_with, loss, problem, **given)
    assert argument in message
    assert "inference_mode" in message


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].takes_logits])
def test_wrong_logits(name, corruption):
    problem = random_problem(SIZES, seed=114)
    bad, told = CORRUPTIONS[corruption](problem.features @ problem.prototypes.T)
    message = message_of(build(name, problem), bad, problem.labels)
    assert "logits" in message
    assert told in message


@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].takes_logits])
def test_logits_of_one_class_or_with_a_bias(name):
    """A bias belongs to features and prototypes; beside logits it would be silently dropped."""
    problem = random_problem(SIZES, seed=114)
    logits = problem.features @ problem.prototypes.T
    loss = build(name, problem)
    assert "2 classes" in message_of(loss, logits[:, :1], torch.zeros(6).long())
    assert "bias" in message_of(loss, logits, problem.labels, bias=problem.bias)


@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].uses_bias])
def test_wrong_bias(name):
    problem = random_problem(SIZES, seed=115)
    for bad in (problem.bias[:-1], problem.bias[:1], problem.bias[None], problem.bias.sum()):
        message = message_of(call_with, build(name, problem), problem, bias=bad)
        assert "bias" in message
        assert str(tuple(bad.shape)) in message


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not LOSSES[n].uses_bias and LOSSES[n].forward is lm.Loss.forward]
)
def test_bias_of_a_loss_without_bias(name):
    problem = random_problem(SIZES, seed=116)
    message = message_of(call_with, build(name, problem), problem, bias=problem.bias)
    assert "bias" in message
    assert LOSSES[name].__name__ in message


@pytest.mark.parametrize("name", [n for n in NAMES if "prototypes" in LOSSES[n].needs])
def test_at_least_two_classes(name):
    problem = random_problem(Sizes(6, 2, 3), seed=117)
    loss = build(name, problem)
    changes = {"prototypes": problem.prototypes[:1], "labels": torch.zeros(6).long()}
    if loss.uses_bias:
        changes["bias"] = problem.bias[:1]
    changes = {key: value for key, value in changes.items() if key in (*loss.needs, "bias")}
    assert "classes" in message_of(call_with, loss, problem, **changes)
    message = message_of(call_with, loss, problem, prototypes=torch.nn.ReLU())
    assert "prototypes" in message
    assert "ReLU" in message


@pytest.mark.parametrize("name", supporting("weight", TAKING_OPTIONS))
def test_wrong_class_weights(name):
    problem = random_problem(SIZES, seed=118)
    loss = build(name, problem, weight=torch.ones(SIZES.classes + 1).double())
    message = message_of(call, loss, problem)
    for part in ("weight", "(4,)", "(5,)", "class"):
        assert part in message
    message = message_of(build, name, problem, weight=torch.ones(2, 2))
    assert "weight" in message
    assert "(2, 2)" in message


@pytest.mark.parametrize("name", supporting("sample_weight", TAKING_OPTIONS))
def test_wrong_sample_weights(name):
    problem = random_problem(SIZES, seed=119)
    for bad in (torch.ones(5).double(), torch.ones(6, 1).double()):
        message = message_of(call, build(name, problem).eval(), problem, sample_weight=bad)
        for part in ("sample_weight", "(6,)", str(tuple(bad.shape)), "sample"):
            assert part in message
    message = message_of(call, build(name, problem).eval(), problem, sample_weight=[1.0] * 6)
    for part in ("sample_weight", "(6,)", "list", "torch.as_tensor"):
        assert part in message


NO_WEIGHTS = (math.nan, math.inf, -math.inf, -1.0)


@pytest.mark.parametrize("bad", NO_WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_targets_are_finite_and_not_negative(name, bad):
    """Of classes, when the loss is made and when it is called; of samples; as soft targets."""
    problem = random_problem(SIZES, seed=119)
    entries = torch.ones(SIZES.classes).double()
    if name in supporting("weight", [name]):
        loss = build(name, problem, weight=entries)
        loss.weight[2] = entries[2] = bad
        for message in (
            message_of(call, loss, problem),
            message_of(build, name, problem, weight=entries),
        ):
            assert f"weight must hold finite numbers >= 0, but entry 2 is {bad}" in message
    if name in supporting("sample_weight", [name]):
        weights = torch.ones(SIZES.samples).double()
        weights[3] = bad
        loss = build(name, problem).eval()
        message = message_of(call, loss, problem, sample_weight=weights)
        assert f"sample_weight must hold finite numbers >= 0, but entry 3 is {bad}" in message
        loss.validate = False
        call(loss, problem, sample_weight=weights)
    if name in supporting("soft_targets", LABELLED):
        soft = problem.soft.clone()
        soft[1, 0] = bad
        message = message_of(call, build(name, problem), problem, soft)
        assert "soft targets must hold finite numbers >= 0, but entry 1 is" in message
        objective = lm.Objective(term=build(name, problem))
        if "logits" not in objective.terms["term"].needs:
            message = message_of(objective, problem.features, problem.prototypes, soft)
            assert "soft targets" in message


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_soft_targets_of_the_functions_are_finite_and_not_negative(bad):
    problem = random_problem(SIZES, seed=119)
    soft = problem.soft.clone()
    soft[1, 0] = bad
    for function in (LF.cosface, LF.cross_entropy, LF.focal, LF.kobayashi, LF.class_stats):
        message = message_of(function, problem.features, problem.prototypes, soft)
        assert "entry 1" in message
    assert "entry 0" in message_of(
        LF.focal,
        problem.features,
        problem.prototypes,
        problem.labels,
        alpha=torch.tensor([bad, 1.0, 1.0, 1.0]),
    )
    centers = torch.zeros(SIZES.classes, SIZES.dim).double()
    assert "hard" in message_of(LF.center_update, problem.features, centers, problem.soft)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name in TAKING_OPTIONS
        for argument in (
            *(need for need in LOSSES[name].needs if need not in ("inputs", "layers")),
            *["bias"] * LOSSES[name].uses_bias,
            *["sample_weight"] * ("sample_weight" not in LOSSES[name].refuses),
        )
    ],
)
def test_tensors_on_two_devices(name, argument):
    problem = random_problem(SIZES, seed=120)
    loss = build(name, problem)
    given = dict(zip(loss.needs, arguments(loss, problem), strict=True))
    given |= {"bias": problem.bias, "sample_weight": torch.ones(6).double()}
    message = message_of(call_with, loss, problem, **{argument: given[argument].to("meta")})
    for part in (argument, "device", "meta", "cpu", ".to("):
        assert part in message


@pytest.mark.parametrize("name", [n for n in NAMES if "logits" in LOSSES[n].needs])
def test_inputs_outside_the_graph(name):
    """The usual mistakes: no gradients asked for, none recorded, another forward pass."""
    problem = random_problem(SIZES, seed=121)
    loss = build(name, problem)
    argument = loss.needs[-1]
    other = problem.features.clone().requires_grad_()
    for unrelated in (problem.features, other):
        unrelated = [unrelated] if argument == "layers" else unrelated
        message = message_of(call_with, loss, problem, **{argument: unrelated})
        assert argument.rstrip("s") in message
    logits = arguments(loss, problem)[0].detach()
    assert "gradients" in message_of(call_with, loss, problem, logits=logits)


@pytest.mark.parametrize("name", supporting("weight", TAKING_OPTIONS))
def test_loss_left_on_another_device(name):
    problem = random_problem(SIZES, seed=121)
    loss = build(name, problem, weight=torch.ones(SIZES.classes).double()).to("meta")
    message = message_of(call, loss, problem)
    for part in ("device", "meta", "cpu", ".to("):
        assert part in message


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "argument"), [c for c in MATRICES if c[0] in TAKING_OPTIONS])
def test_check_finite(name, argument, poison):
    problem = random_problem(SIZES, seed=122)
    loss = build(name, problem, check_finite=True)
    assert bool(torch.isfinite(call(loss, problem)))
    before = {key: tensor.clone() for key, tensor in loss.state_dict().items()}
    if argument == "logits":
        row = torch.zeros(SIZES.samples, 1, dtype=torch.float64)
        row[1] = poison
        bad = problem.but(bias=problem.bias + row)
        message = message_of(call, loss, bad)
    else:
        bad = getattr(problem, argument).clone()
        bad[1, 0] = poison
        message = message_of(call_with, loss, problem, **{argument: bad})
    for part in (argument, "finite", "row 1"):
        assert part in message
    for key, tensor in loss.state_dict().items():
        assert torch.equal(tensor, before[key]), f"{key} was written before the check"


@pytest.mark.parametrize("name", supporting("ignore_index", LABELLED))
def test_check_finite_lets_ignored_rows_pass(name):
    """An ignored row is dropped before anything else, its values are nobody's business."""
    problem = random_problem(SIZES, seed=123)
    labels = problem.labels.clone()
    labels[1] = -100
    poison = torch.zeros(6, 1).double()
    poison[1] = math.nan
    if "logits" in LOSSES[name].needs:
        poisoned = problem.but(bias=problem.bias + poison)
    else:
        poisoned = problem.but(features=problem.features + poison, noisy=problem.noisy + poison)
    value = call(build(name, problem, check_finite=True), poisoned, labels)
    assert bool(torch.isfinite(value))


def test_the_message_says_how_to_get_the_right_shape():
    problem = random_problem(SIZES, seed=110)
    x, w, y = problem.features, problem.prototypes, problem.labels
    one_hot = torch.nn.functional.one_hot(y, SIZES.classes)
    cases = [
        ((x[..., None, None], w, y), ".flatten(1)"),
        ((x[0], w, y), "x[None]"),
        ((x, y, w), "The order is features, prototypes, labels."),
        ((x, w, one_hot), "labels.argmax(1)"),
        ((x, w, y[:, None]), "labels.squeeze(1).long()"),
        ((x, w, y[:, None].float()), "labels.squeeze(1).long()"),
        ((x, w, y[0]), "labels[None]"),
        ((x, w, y * 0 + SIZES.classes), "Classes count from 0."),
    ]
    for given, told in cases:
        assert told in message_of(lm.CosFace(margin=0.1), *given)


def test_numpy_labels_and_scalars_are_told_apart():
    problem = random_problem(SIZES, seed=124)
    message = message_of(
        LF.cross_entropy, problem.features, problem.prototypes, problem.labels.numpy()
    )
    assert "labels" in message
    assert "ndarray" in message
    margin = np.float64(0.3)
    value = LF.cosface(problem.features, problem.prototypes, problem.labels, margin=margin)
    assert bool(torch.isfinite(value).all())


@pytest.mark.parametrize("function", [LF.signed_boundary_distance, LF.similarity_logits])
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"dim": 5}, ("share their second dimension D", "(6, 3)", "(4, 5)")),
        ({"offsets": 5}, ("bias must have shape (C,) = (4,)", "(5,)")),
        ({"offsets": 1}, ("bias must have shape (C,) = (4,)", "(1,)")),
    ],
)
def test_functions_of_a_classifier_alone(function, sizes, parts):
    """A single offset would be broadcast to all classes, without a word."""
    prototypes = torch.rand(4, sizes.get("dim", 3))
    bias = torch.rand(sizes.get("offsets", 4))
    message = message_of(function, torch.rand(6, 3), prototypes, bias=bias)
    for part in parts:
        assert part in message


def test_a_boundary_needs_two_classes():
    message = message_of(LF.signed_boundary_distance, torch.rand(6, 3), torch.rand(1, 3))
    assert "at least 2 classes are needed, but 1 was given" in message
