"""Losses as modules: repr, pickle, copies, state_dict, reductions and options they refuse."""

import copy
import inspect
import pickle

import pytest
import torch

import largemargin as lm
from contract.problems import Sizes, assert_close, call, random_problem
from contract.zoo import NAMES, OF_CLASSES, OF_SAMPLES, ZOO, build, resolve, settings_of, supporting
from largemargin import LargeMarginError
from largemargin.losses import LOSSES

SIZES = Sizes(7, 5, 3)
OPTIONS = {
    "weight": torch.linspace(0.5, 1.5, SIZES.classes).double(),
    "prior": torch.linspace(1, 9, SIZES.classes).double(),
    "ignore_index": None,
    "label_smoothing": 0.25,
    "reduction": "sum",
    "impl": "dense",
    "precision": "highest",
    "validate": True,
    "check_finite": True,
}
KEYS = {
    *("weight", "prior", "sample_weight", "ignore_index", "soft_targets", "label_smoothing"),
    *("class_margin", "reduction", "chunked", "compile"),
}


def rebuilt(loss):
    names = {"torch": torch, **{name: getattr(lm, name) for name in lm.__all__}}
    names |= {kind.__name__: kind for kind in LOSSES.values()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return eval(repr(loss), names)
    finally:
        torch.set_default_dtype(before)


def assert_equal_modules(first, second, problem):
    """Same arguments, same state, same value before and after a training step."""
    assert type(first) is type(second)
    names = [*inspect.signature(type(first).__init__).parameters, *OPTIONS, "sync"]
    for name in names:
        if name in ("self", "options", "bank") or not hasattr(first, name):
            continue
        mine, other = getattr(first, name), getattr(second, name)
        same = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
        assert same, f"{name} is {other!r} after rebuilding, it was {mine!r}"
    for _ in range(2):
        value, again = call(first, problem), call(second, problem)
        assert torch.equal(value, again)
    state = second.state_dict()
    assert list(first.state_dict()) == list(state)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, state[key]), key


@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_repr_rebuilds(name, hyper):
    problem = random_problem(SIZES, seed=70)
    loss = build(name, problem, hyper)
    again = rebuilt(loss)
    assert repr(again) == repr(loss)
    again.load_state_dict(loss.state_dict())
    assert_equal_modules(loss, again, problem)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (name, option, value)
        for option, value in [*OPTIONS.items(), ("reduction", "mean"), ("sync", 1), ("sync", 0)]
        for name in supporting(option)
        if ZOO[name].kind != "prototypes"
    ],
    ids=lambda value: "tensor" if isinstance(value, torch.Tensor) else str(value),
)
def test_repr_rebuilds_with_options(name, option, value):
    problem = random_problem(SIZES, seed=71)
    loss = build(name, problem, **{option: bool(value) if option == "sync" else value})
    again = rebuilt(loss)
    again.load_state_dict(loss.state_dict())
    assert_equal_modules(loss, again, problem)


@pytest.mark.parametrize(("name", "hyper"), settings_of(stopped=True))
def test_pickle_copy_and_state_dict(name, hyper):
    problem, later = random_problem(SIZES, seed=72), random_problem(SIZES, seed=73)
    options = {} if "weight" in LOSSES[name].refuses else {"weight": OPTIONS["weight"]}
    loss = build(name, problem, hyper, **options)
    for _ in range(2):  # a whole optimisation step where two batches make one
        call(loss, problem)
    fresh = build(name, later, hyper, **options)
    fresh.load_state_dict(copy.deepcopy(loss.state_dict()))
    for again in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), fresh):
        assert repr(again) == repr(loss)
        assert_equal_modules(copy.deepcopy(loss), again, later)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_no_setting(dtype):
    """A criterion inside a module that is cast to half precision, as Lightning's bf16-true does."""
    weight, margin = torch.tensor([0.1, 0.3, 0.7]), torch.tensor([0.123, 0.2, 0.3])
    loss = lm.CosFace(margin=margin, weight=weight).to(dtype)
    assert torch.equal(loss.weight, weight)
    assert torch.equal(loss.margin, margin)
    center = lm.CenterLoss(3, 4)
    center.centers.fill_(0.1)
    assert torch.equal(center.to(dtype).centers, torch.full((3, 4), 0.1))
    counted = lm.LDAM([5, 70, 900])
    before = counted.margins.clone()
    assert torch.equal(counted.to(dtype).margins, before)
    assert counted.double().margins.dtype == torch.float64
    assert loss.double().weight.dtype == torch.float64


def test_bank_and_centers_are_saved():
    problem = random_problem(SIZES, seed=74)
    expected = {
        "discriminative": {"bank.centroids", "bank.seen", "bank.counts"},
        "robust_discriminative": {"bank.centroids", "bank.seen", "bank.counts"},
        "stable_discriminative": {"bank.centroids", "bank.seen", "bank.counts"},
        "center": {"centers"},
        "gaussian_mixture": set(),
        "ldam": {"class_margins"},
    }
    for name, keys in expected.items():
        assert set(build(name, problem).state_dict()) == keys, name


def test_deferred_reweighting_survives_a_checkpoint():
    problem = random_problem(SIZES, seed=75)
    loss = build("ldam", problem)
    before, plain = copy.deepcopy(loss.state_dict()), call(loss, problem)
    loss.reweight()
    after, weighted = copy.deepcopy(loss.state_dict()), call(loss, problem)
    assert not torch.equal(plain, weighted)
    want = lm.functional.balanced_weights(loss.class_counts, dtype=torch.float64)
    assert_close(loss.weight, want, 1e-12, "weights")
    for state, value in ((before, plain), (after, weighted)):
        for start in (build("ldam", problem), loss):
            start.load_state_dict(state)
            assert torch.equal(call(start, problem), value)
    assert torch.equal(call(rebuilt(loss), problem), weighted)
    nested = lm.Objective(tail=build("ldam", problem))
    nested.load_state_dict(lm.Objective(tail=loss).state_dict())
    assert torch.equal(nested(problem.features, problem.prototypes, problem.labels).total, weighted)
    loss.reweight(on=False)
    assert torch.equal(call(loss, problem), plain)


@pytest.mark.parametrize(
    ("name", "weighted"),
    [(name, False) for name in OF_SAMPLES]
    + [(name, True) for name in supporting("weight", OF_SAMPLES)],
)
def test_reductions_agree(name, weighted):
    problem = random_problem(SIZES, seed=76)
    weight = {"weight": OPTIONS["weight"]} if weighted else {}
    values = {
        kind: call(build(name, problem, reduction=kind, **weight).eval(), problem)
        for kind in ("none", "sum", "mean")
    }
    assert values["none"].shape == (SIZES.samples,)
    assert_close(values["none"].sum(), values["sum"], 1e-12, "sum")
    mass = OPTIONS["weight"][problem.labels].sum() if weighted else SIZES.samples
    assert_close(values["sum"] / mass, values["mean"], 1e-12, "mean")


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("sizes", [SIZES, Sizes(2, 5, 3)], ids=["few classes", "many classes"])
@pytest.mark.parametrize("name", ["centroid_margin", "centroid_norm"])
def test_unreduced_terms_are_per_class(name, sizes, weighted):
    """(C,) whatever the batch holds: 0 for absent classes, and they sum to the sum."""
    problem = random_problem(sizes, seed=77)
    problem = problem.but(labels=problem.labels.clamp(max=3))
    weight = {"weight": OPTIONS["weight"]} if weighted else {}
    terms = call(build(name, problem, reduction="none", **weight), problem)
    assert terms.shape == (sizes.classes,)
    absent = torch.ones(sizes.classes, dtype=torch.bool).index_fill(0, problem.labels, False)
    assert not terms[absent].any()
    assert_close(
        terms.sum(), call(build(name, problem, reduction="sum", **weight), problem), 1e-12, "sum"
    )


def test_unreduced_compactness_is_per_sample():
    problem = random_problem(SIZES, seed=78)
    terms = call(build("compactness", problem, reduction="none"), problem)
    assert terms.shape == (SIZES.samples,)
    means = torch.stack([terms[problem.labels == c].mean() for c in problem.labels.unique()])
    assert_close(call(build("compactness", problem), problem), means.mean(), 1e-12, "mean")


@pytest.mark.parametrize(
    "name", ["discriminative", "robust_discriminative", "stable_discriminative"]
)
def test_sums_of_terms_have_no_unreduced_form(name):
    with pytest.raises(LargeMarginError, match=r"reduction.*mean.*sum"):
        build(name, random_problem(SIZES), reduction="none")


def margin_of(name):
    """The constructor's margin that may differ between classes, if there is one."""
    parameters = inspect.signature(LOSSES[name].__init__).parameters
    return next((key for key in ("margin", "m3") if key in parameters), None)


def use(name, option):
    """Ask a loss for an option, in its constructor or in its call."""
    problem = random_problem(SIZES, seed=79)
    asked = {
        "weight": {"weight": OPTIONS["weight"]},
        "prior": {"prior": OPTIONS["prior"]},
        "label_smoothing": {"label_smoothing": 0.1},
        "ignore_index": {"ignore_index": 1},
        "reduction": {"reduction": "sum"},
        "chunked": {"impl": "chunked"},
    }
    if option == "class_margin" and margin_of(name) is not None:
        margins = torch.linspace(0.1, 0.4, SIZES.classes).double()
        hyper = ZOO[name].settings[0] | {margin_of(name): margins}
        return call(build(name, problem, hyper), problem)
    loss = build(name, problem, **asked.get(option, {}))
    if option == "sample_weight":
        return call(loss, problem, sample_weight=torch.ones(SIZES.samples).double())
    if option == "soft_targets":
        return call(loss, problem, problem.soft)
    return call(loss, problem)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name in NAMES
        for option in LOSSES[name].refuses
        if option not in ("compile", "class_margin")
        and not (option == "soft_targets" and "labels" not in LOSSES[name].needs)
    ],
)
def test_refused_option_is_named_with_its_reason(name, option):
    reason = LOSSES[name].refuses[option]
    with pytest.raises(LargeMarginError) as caught:
        use(name, option)
    message = str(caught.value).replace("soft targets", "soft_targets").lower()
    assert option in message
    assert reason.split(".")[0].lower() in message


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_there_or_refused_with_a_reason(name):
    refuses = LOSSES[name].refuses
    assert set(refuses) <= KEYS
    assert all(len(reason) > 10 and reason.endswith(".") for reason in refuses.values())
    for option in KEYS - set(refuses) - {"compile"}:
        value = use(name, option)
        assert bool(torch.isfinite(value).all()), option


@pytest.mark.parametrize(
    "name", [n for n in NAMES if "class_margin" in LOSSES[n].refuses and margin_of(n)]
)
def test_refused_class_margins_raise(name):
    with pytest.raises(LargeMarginError, match="margin"):
        use(name, "class_margin")


def test_per_class_margins_from_class_counts():
    problem = random_problem(SIZES, seed=80)
    counts = [100, 50, 20, 4, 1]
    margins = lm.functional.ldam_margins(counts, max_margin=0.4, dtype=torch.float64)
    for name in ("cosface", "arcface"):
        hyper = ZOO[name].settings[0]
        counted = build(name, problem, hyper | {"margin": 0.4, "class_counts": counts})
        given = build(name, problem, hyper | {"margin": margins})
        assert_close(call(counted, problem), call(given, problem), 1e-12, name)


@pytest.mark.parametrize("name", [n for n in supporting("class_margin") if margin_of(n)])
def test_class_margins_move_and_are_saved(name):
    """A tensor hyper-parameter is a buffer: .to(), state_dict and pickle take it along."""
    key = margin_of(name)
    loss = LOSSES[name](**{key: torch.tensor([0.1, 0.2])})
    assert key in loss.state_dict()
    assert getattr(loss.double(), key).dtype == torch.float64


def test_class_wise_losses_default_to_synchronised_centroids():
    for name in [*OF_CLASSES, "center"]:
        sizes = SIZES
        loss = LOSSES[name](*ZOO[name].arguments(sizes), **resolve(ZOO[name].settings[0], sizes))
        assert loss.sync
