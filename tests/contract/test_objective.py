"""``weight * loss`` and ``Objective``: sums of named terms."""

import pytest
import torch

import largemargin as lm
from contract.problems import Sizes, arguments, assert_close, call, random_problem, restore
from contract.zoo import NAMES, build, supporting
from largemargin import LargeMarginError
from largemargin.losses import LOSSES

SIZES = Sizes(7, 5, 3)


def inputs_of(problem):
    """Everything an objective may be asked for, from one small network."""
    logits, _, layers = arguments(lm.LayerMargin(), problem)
    return {
        "bias": problem.bias,
        "noisy": problem.noisy,
        "logits": logits,
        "inputs": layers[0],
        "layers": layers,
    }


def evaluate(objective, problem, **options):
    given = inputs_of(problem) | options
    return objective(given["inputs"], problem.prototypes, problem.labels, **given)


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_can_be_a_term(name):
    problem = random_problem(SIZES, seed=90)
    loss = build(name, problem).eval()
    want = call(loss, problem)
    value = evaluate(lm.Objective(first=0.7 * loss, second=loss), problem)
    assert isinstance(value, lm.LossValue)
    assert_close(value.total, 1.7 * want, 1e-12, "total")
    if loss.named_terms is not None:
        parts = [key.split(".")[0] for key in value.terms]
        assert set(parts) == {"first", "second"}
        assert parts.count("first") == parts.count("second") > 1
    else:
        observed = [f".{each}" for each in getattr(loss, "observed", ())]
        shown = [key for key in value.terms if not key.endswith(tuple(observed))]
        assert shown == ["first", "second"]
        assert_close(value.terms["first"], want, 1e-12, "a term is reported without its weight")


def test_parts_of_composite_terms():
    problem = random_problem(SIZES, seed=91)
    loss = build("robust_discriminative", problem).eval()
    value = evaluate(lm.Objective(rob=0.5 * loss), problem)
    parts = {"softmax": 1.0, "compact": 1.0, "margin": 1.0, "reg": 0.3, "noisy": 0.5}
    assert set(value.terms) == {f"rob.{part}" for part in parts}
    total = sum(weight * value.terms[f"rob.{part}"] for part, weight in parts.items())
    assert_close(value.total, 0.5 * total, 1e-12, "total")
    softmax = call(lm.CrossEntropy(), problem)
    assert_close(value.terms["rob.softmax"], softmax, 1e-12, "softmax")


def test_gradient_is_the_weighted_sum():
    problem = random_problem(SIZES, seed=92)
    losses = {"a": lm.CrossEntropy(), "b": lm.LMSoftmax(scale=5.0), "c": lm.ZeroCentroid()}
    objective = lm.Objective(a=losses["a"], b=losses["b"] * 0.3, c=2 * losses["c"])
    prototypes = problem.prototypes.clone().requires_grad_()
    given = problem.but(prototypes=prototypes)
    total = sum(w * call(losses[k], given) for k, w in (("a", 1.0), ("b", 0.3), ("c", 2.0)))
    (want,) = torch.autograd.grad(total, prototypes)
    value = objective(problem.features, prototypes, problem.labels, bias=problem.bias)
    (got,) = torch.autograd.grad(value.total, prototypes)
    assert_close(got, want, 1e-12, "gradient")


def test_weighted_loss_needs_a_number():
    for weight in (float("nan"), float("inf")):
        with pytest.raises(LargeMarginError, match=rf"weight.*{weight}"):
            weight * lm.CrossEntropy()
    with pytest.raises((LargeMarginError, TypeError)):
        "much" * lm.CrossEntropy()


def test_repr_rebuilds():
    problem = random_problem(SIZES, seed=93)
    objective = lm.Objective(
        softmax=lm.CrossEntropy(label_smoothing=0.1),
        lmd=0.25 * lm.Discriminative(5, 3, strategy="both"),
        flat=2 * lm.Kobayashi(strength=0.7),
    ).double()
    again = eval(repr(objective), {name: getattr(lm, name) for name in lm.__all__}).double()
    assert repr(again) == repr(objective)
    for _ in range(2):
        first, second = (evaluate(each, problem).total for each in (objective, again))
        assert torch.equal(first, second)
    weighted = 0.5 * lm.CrossEntropy()
    assert repr(eval(repr(weighted), vars(lm))) == repr(weighted)


def test_a_weighted_loss_can_be_called():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    loss = lm.CrossEntropy()
    weighted = (0.5 * loss)(logits, labels, sample_weight=torch.arange(4.0))
    assert torch.equal(weighted, 0.5 * loss(logits, labels, sample_weight=torch.arange(4.0)))


def test_state_dict_round_trip():
    problem, later = random_problem(SIZES, seed=94), random_problem(SIZES, seed=95)

    def make():
        return lm.Objective(
            lmd=lm.Discriminative(5, 3, momentum=0.5),
            center=lm.CenterLoss(5, 3, strength=1.0),
            mix=lm.GaussianMixture(5, 3, learn_variances=True),
            tail=0.5 * lm.LDAM([5, 4, 3, 2, 1]),
        ).double()

    objective, fresh = make(), make()
    restore(objective, problem)
    evaluate(objective, problem)
    assert [name for name, _ in objective.named_parameters()] == ["terms.mix.log_variances"]
    fresh.load_state_dict(objective.state_dict())
    assert torch.equal(evaluate(fresh, later).total, evaluate(objective, later).total)


@pytest.mark.parametrize("name", supporting("sample_weight"))
def test_sample_weights_reach_every_term_that_has_them(name):
    problem = random_problem(SIZES, seed=96)
    weights = torch.linspace(0.0, 2.0, SIZES.samples).double()
    loss = build(name, problem).eval()
    want = call(loss, problem, sample_weight=weights)
    value = evaluate(lm.Objective(term=loss), problem, sample_weight=weights)
    assert_close(value.total, want, 1e-12, name)


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if "sample_weight" in LOSSES[n].refuses and "labels" in LOSSES[n].needs],
)
def test_sample_weights_are_refused_by_the_term_that_cannot_use_them(name):
    problem = random_problem(SIZES, seed=97)
    objective = lm.Objective(softmax=lm.CrossEntropy(), term=build(name, problem))
    with pytest.raises(LargeMarginError, match=rf"{LOSSES[name].__name__}.*sample_weight"):
        evaluate(objective, problem, sample_weight=torch.ones(SIZES.samples).double())


def test_prototype_penalties_do_not_mind_sample_weights():
    problem = random_problem(SIZES, seed=98)
    objective = lm.Objective(softmax=lm.CrossEntropy(), centred=lm.ZeroCentroid())
    weights = torch.linspace(0.0, 2.0, SIZES.samples).double()
    value = evaluate(objective, problem, sample_weight=weights)
    assert_close(value.terms["centred"], call(lm.ZeroCentroid(), problem), 0.0, "penalty")
    want = call(lm.CrossEntropy(), problem, sample_weight=weights)
    assert_close(value.terms["softmax"], want, 1e-12, "softmax")


@pytest.mark.parametrize(
    ("name", "missing"),
    [(n, key) for n in NAMES for key in LOSSES[n].needs if key in ("noisy", "inputs", "layers")],
)
def test_missing_input_is_named(name, missing):
    problem = random_problem(SIZES, seed=99)
    objective = lm.Objective(special=build(name, problem))
    expected = rf"'special' \({LOSSES[name].__name__}\).*{missing}.*{missing}="
    given = inputs_of(problem) | {missing: None}
    with pytest.raises(LargeMarginError, match=expected):
        objective(problem.features, problem.prototypes, problem.labels, **given)


def test_logits_are_made_from_features_when_not_given():
    problem = random_problem(SIZES, seed=100)
    inputs = problem.features.clone().requires_grad_()
    value = lm.Objective(hinge=lm.MarginHinge())(
        inputs, problem.prototypes, problem.labels, bias=problem.bias, inputs=inputs
    )
    logits = inputs @ problem.prototypes.T + problem.bias
    assert_close(value.total, lm.MarginHinge()(logits, problem.labels, inputs), 1e-12, "linear")


def test_unreduced_terms_are_refused():
    with pytest.raises(LargeMarginError, match=r"'softmax'.*reduction=\"none\".*mean"):
        lm.Objective(softmax=lm.CrossEntropy(reduction="none"))
    with pytest.raises(LargeMarginError, match=r"'softmax'.*reduction=\"none\""):
        lm.Objective(softmax=2.0 * lm.CrossEntropy(reduction="none"))


def test_terms_must_be_losses():
    with pytest.raises(LargeMarginError, match=r"'softmax'.*CrossEntropyLoss"):
        lm.Objective(softmax=torch.nn.CrossEntropyLoss())
    with pytest.raises(LargeMarginError, match="at least one term"):
        lm.Objective()


def test_bias_goes_to_the_terms_that_have_one():
    problem = random_problem(SIZES, seed=101)
    objective = lm.Objective(softmax=lm.CrossEntropy(), cosine=lm.CosFace(scale=6.0))
    value = objective(problem.features, problem.prototypes, problem.labels, bias=problem.bias)
    assert_close(value.terms["softmax"], call(lm.CrossEntropy(), problem), 0.0, "softmax")
    assert_close(value.terms["cosine"], call(lm.CosFace(scale=6.0), problem), 0.0, "cosine")


def test_losses_add_up():
    problem = random_problem(SIZES, seed=102)
    objective = lm.CrossEntropy() + 0.5 * lm.SampleMargin() + lm.ZeroCentroid()
    assert objective.weights == {"softmax": 1.0, "sample_margin": 0.5, "zero_centroid": 1.0}
    same = lm.Objective(
        softmax=lm.CrossEntropy(), sample_margin=0.5 * lm.SampleMargin(), zero=lm.ZeroCentroid()
    )
    given = problem.features, problem.prototypes, problem.labels
    assert_close(objective(*given).total, same(*given).total, 0.0, "sum")
    both = 2.0 * lm.CosFace() + objective  # the weights stay
    assert both.weights == {"cosface": 2.0} | objective.weights
    assert sum([lm.CosFace(), lm.SampleMargin()]).terms.keys() == {"cosface", "sample_margin"}


def test_a_sum_is_worth_what_its_terms_are():
    problem = random_problem(SIZES, seed=103)
    given = problem.features, problem.prototypes, problem.labels
    smooth, margin, cosine = lm.LabelSmoothing(), lm.SampleMargin(), lm.CosFace(scale=6.0)
    value = (3.0 * smooth + 0.5 * margin + cosine)(*given).total
    wanted = 3.0 * smooth(*given) + 0.5 * margin(*given) + cosine(*given)
    assert_close(value, wanted, 1e-12, "value")


def test_a_factor_before_a_sum_and_before_a_weighted_loss():
    problem = random_problem(SIZES, seed=104)
    given = problem.features, problem.prototypes, problem.labels
    total = lm.Objective(first=lm.CosFace(scale=6.0), second=0.5 * lm.SampleMargin())
    for scaled in (3 * total, total * 3):
        assert scaled.weights == {"first": 3.0, "second": 1.5}
        assert scaled.terms["first"] is total.terms["first"]
        assert_close(scaled(*given).total, 3 * total(*given).total, 1e-12, "value")
    assert total.weights == {"first": 1.0, "second": 0.5}  # it stays as it was
    twice = 4.0 * (0.5 * lm.CosFace(scale=6.0))
    assert twice.weight == 2.0
    assert_close(twice(*given), 2 * lm.CosFace(scale=6.0)(*given), 1e-12, "weighted")
    for wrong in (total, 0.5 * lm.CosFace()):
        for factor in ("2", float("nan"), True):
            with pytest.raises(LargeMarginError, match="the weight of"):
                factor * wrong


def test_a_class_of_ones_own_is_called_as_it_is_written():
    class MyOwnLoss(lm.CrossEntropy):
        pass

    assert list((MyOwnLoss() + lm.CrossEntropy()).terms) == ["my_own_loss", "softmax"]


def test_sums_that_cannot_be():
    with pytest.raises(LargeMarginError, match=r"two terms .*'cosface'.*Objective\(first="):
        lm.CosFace() + 0.5 * lm.CosFace()
    for other in (1.0, torch.nn.CrossEntropyLoss()):
        with pytest.raises(TypeError, match="unsupported operand"):
            lm.CosFace() + other
        with pytest.raises(TypeError, match="unsupported operand"):
            other + lm.CosFace()
