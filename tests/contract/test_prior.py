"""The prior of every loss on logits: against adjusted logits, and against repeated classes."""

import inspect

import numpy as np
import pytest
import torch
from oracles import softmax_family
from torch import nn

import largemargin as lm
import largemargin.functional as LF
from contract.problems import Sizes, assert_close, call, random_problem
from contract.zoo import NAMES, ZOO, build, implementations, supporting
from largemargin import LargeMarginError
from largemargin.losses import LOSSES

SIZES = Sizes(6, 4, 3)
COUNTS = [1, 40, 3, 7]
# LogitNorm adds it after the division by the length: a test of its own, below.
ON_LOGITS = [n for n in supporting("prior") if LOSSES[n].takes_logits and n != "logit_norm"]
# A class that is there n times is a rival of n times the mass: log n on its logit. Losses that
# look at the largest rival, or at each, see no difference.
BY_MASS = [
    name
    for name in supporting("prior")
    if name
    not in {
        *("biased_softmax", "dense_hinge", "kobayashi", "label_smoothing", "ldam", "logit_norm"),
        *("max_hinge", "max_softplus", "rival_divergence", "soft_hinge"),
        "adacos",  # its scale is made from the number of classes
    }
]


@pytest.mark.parametrize("name", ON_LOGITS)
def test_it_is_a_shift_of_the_logits(name):
    problem = random_problem(SIZES, seed=90)
    shift = torch.log(torch.tensor(COUNTS).double() / sum(COUNTS))
    logits = problem.features @ problem.prototypes.T + problem.bias
    for targets in (problem.labels, problem.soft):
        want = build(name, problem, reduction="none")(logits + shift, targets)
        loss = build(name, problem, reduction="none", prior=COUNTS)
        assert_close(loss(logits, targets), want, 1e-12, "logits")
        assert_close(call(loss, problem, targets), want, 1e-12, "features")


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        (lm.CosFace(scale=25.0, margin=0.2, prior=[1e-30, 1.0]), 55.0),
        (lm.NormFace(scale=25.0, prior=[1e-30, 1.0]), 50.0),
        (lm.LMSoftmax(scale=25.0, prior=[1e-30, 1.0]), 50.0),
    ],
    ids=["CosFace", "NormFace", "LMSoftmax"],
)
def test_a_class_that_is_all_but_absent_has_a_finite_loss(loss, size):
    """exp(119) is no float32 number."""
    prototypes = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    value = loss(prototypes[1:], prototypes, torch.tensor([0]))
    factor = 25 if isinstance(loss, lm.LMSoftmax) else 1
    assert float(value) * factor == pytest.approx(size + 30 * np.log(10))


@pytest.mark.parametrize("similarity", ["dot", "cosine", "cosine_prototypes", "euclidean"])
def test_it_is_not_scaled(similarity):
    problem = random_problem(SIZES, seed=91)
    form = {"similarity": similarity, "scale": 5.0}
    logits = LF.similarity_logits(problem.features, problem.prototypes, **form)
    want = softmax_family.balanced_softmax(logits.numpy(), problem.labels, class_counts=COUNTS)
    for impl in ("dense", "chunked"):
        loss = lm.LogitAdjustment(COUNTS, impl=impl, reduction="none", **form).double()
        value = loss(problem.features, problem.prototypes, problem.labels)
        assert_close(value, want, 1e-12, impl)


@pytest.mark.parametrize("name", BY_MASS)
def test_a_count_is_a_class_so_many_times(name):
    problem = random_problem(SIZES, seed=92)
    repeats = torch.tensor(COUNTS)
    labels = torch.zeros_like(problem.labels)  # the class that is there once
    many = problem.but(
        prototypes=problem.prototypes.repeat_interleave(repeats, 0),
        bias=problem.bias.repeat_interleave(repeats),
        log_variances=problem.log_variances.repeat_interleave(repeats, 0),
    )
    want = call(build(name, many, reduction="none"), many, labels)
    for impl in implementations(name):
        loss = build(name, problem, reduction="none", prior=COUNTS, impl=impl)
        assert_close(call(loss, problem, labels), want, 1e-12, impl)


def test_logit_norm_adds_it_to_the_normalised_logits():
    logits = random_problem(SIZES, seed=93).prototypes @ torch.randn(3, 4).double()
    labels = torch.tensor([0, 1, 2, 3])
    unit = logits / (0.5 * (logits.norm(dim=1, keepdim=True) + 1e-7))
    want = softmax_family.balanced_softmax(unit.numpy(), labels, class_counts=COUNTS)
    loss = lm.LogitNorm(temperature=0.5, prior=COUNTS, reduction="none").double()
    assert_close(loss(logits, labels), want, 1e-12)


def test_balanced_softmax_is_tau_one():
    problem = random_problem(SIZES, seed=94)
    logits = problem.features @ problem.prototypes.T
    want = softmax_family.balanced_softmax(logits.numpy(), problem.labels, class_counts=COUNTS)
    loss = lm.LogitAdjustment(COUNTS, reduction="none").double()
    assert_close(loss(logits, problem.labels), want, 1e-12)
    with pytest.raises(AttributeError, match="LogitAdjustment"):
        lm.BalancedSoftmax  # noqa: B018


def test_functions_equal_their_modules_and_the_post_hoc_form_undoes_the_shift():
    problem = random_problem(SIZES, seed=95)
    call = (problem.features, problem.prototypes, problem.labels)
    for function, module in ((LF.logit_adjustment, lm.LogitAdjustment), (LF.vs_loss, lm.VSLoss)):
        module = module(COUNTS, tau=1.3, reduction="none").double()
        for form in ({}, {"similarity": "euclidean", "bias": problem.bias, "scale": 2.0}):
            own = {key: value for key, value in form.items() if key != "bias"}
            module.similarity, module.scale = own.get("similarity"), own.get("scale")
            want = module(*call, bias=form.get("bias"))
            assert_close(function(*call, class_counts=COUNTS, tau=1.3, **form), want, 1e-12)
    logits = problem.features @ problem.prototypes.T
    shifted = logits + 1.3 * torch.log(torch.tensor(COUNTS).double())
    plain = LF.logit_adjusted(shifted, COUNTS, tau=1.3).softmax(1)
    assert_close(plain, logits.softmax(1), 1e-12)


def test_a_model_predicts_without_it():
    torch.manual_seed(0)
    for objective in (
        lm.LogitAdjustment(COUNTS),
        lm.VSLoss(COUNTS),
        lm.CosFace(margin=0.35, scale=8.0, prior=COUNTS) + 0.5 * lm.ZeroCentroid(),
    ):
        plain, adjusted = (torch.nn.Linear(3, 4, bias=False) for _ in range(2))
        adjusted.load_state_dict(plain.state_dict())
        model = torch.nn.Sequential(adjusted)
        criterion = lm.attach(model, objective)
        x, y = torch.randn(5, 3), torch.arange(5) % 4
        outputs = model(x)
        head = criterion.head
        want = LF.similarity_logits(x, plain.weight, similarity=head.similarity, scale=head.scale)
        assert_close(outputs, want, 1e-6)
        value = criterion(outputs, y)
        value.backward()
        if not isinstance(objective, lm.VSLoss):
            lowered = 0.0 if isinstance(objective, lm.LogitAdjustment) else 8 * 0.35
            shifted = outputs.detach() + torch.log(torch.tensor(COUNTS))
            shifted[torch.arange(5), y] -= lowered
            term = next(iter(criterion.terms.values()))
            assert_close(term, nn.functional.cross_entropy(shifted, y), 1e-6)
        assert bool(torch.isfinite(criterion.layer.weight.grad).all())


def test_head_logits_are_used_again():
    """The product of a cosine head is not made a second time, nor its result changed."""
    problem = random_problem(SIZES, seed=96, dtype=torch.float32)
    head = lm.ClassHead(3, 4, similarity="cosine", scale=8.0)
    model = torch.nn.Sequential(head)
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale=8.0, prior=COUNTS))
    value = criterion(model(problem.features), problem.labels)
    loss = lm.CosFace(margin=0.2, scale=8.0, prior=COUNTS)
    assert_close(value, loss(problem.features, head.weight, problem.labels), 1e-6)


@pytest.mark.parametrize("name", supporting("prior"))
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([1, 0, 3, 4], r"prior must be positive.*class 1 has 0"),
        ({0: 1, 1: 2}, "one number per class"),
        ([3.0], "at least 2"),
    ],
)
def test_wrong_priors(name, prior, message):
    with pytest.raises(LargeMarginError, match=message):
        build(name, random_problem(SIZES), prior=prior)


def test_a_prior_of_another_length():
    problem = random_problem(SIZES)
    with pytest.raises(LargeMarginError, match="prior"):
        call(build("cosface", problem, prior=COUNTS[:3]), problem)
    features = problem.features, problem.prototypes, problem.labels
    with pytest.raises(LargeMarginError, match="log_prior"):
        LF.cosface(*features, log_prior=torch.zeros(3))
    with pytest.raises(LargeMarginError, match="class_counts must be positive"):
        lm.LogitAdjustment([1, 0])


def test_only_losses_without_logits_refuse_it():
    refusing = set(NAMES) - set(supporting("prior"))
    counted = {name for name in NAMES if "class_counts" in signature(name)}
    assert {name for name in refusing if LOSSES[name].takes_logits} == {
        "logit_adjustment",
        "vs_loss",
    }
    assert {"logit_adjustment", "vs_loss"} <= counted
    assert all(ZOO[name].oracle is not None for name in supporting("prior"))


def signature(name):
    return inspect.signature(LOSSES[name].__init__).parameters


def test_tiny_probabilities_have_finite_gradients():
    """The slope of p^q is infinite at p = 0; its logarithm is not."""
    logits = torch.tensor([[-1e4, 1e4], [-200.0, 0.0], [1e4, -1e4]], requires_grad=True)
    labels = torch.zeros(3, dtype=torch.long)
    for loss in (
        lm.GeneralizedCrossEntropy(q=0.01, reduction="none"),
        lm.SymmetricCrossEntropy(reduction="none"),
    ):
        values = loss(logits, labels)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert bool(torch.isfinite(values).all() and torch.isfinite(gradient).all())
    gce = LF.generalized_cross_entropy(logits, labels)
    np.testing.assert_allclose(gce.detach().numpy(), [1 / 0.7, 1 / 0.7, 0.0], rtol=1e-6)


@pytest.mark.parametrize("counts", ["abc", [None, 1], [1, "2"], [1, 2j], [10**400, 1]])
@pytest.mark.parametrize(
    "made",
    [
        lambda counts: lm.LDAM(counts),
        lambda counts: lm.VSLoss(counts),
        lambda counts: lm.CosFace(class_counts=counts),
        lambda counts: lm.CrossEntropy(prior=counts),
        lambda counts: lm.CrossEntropy(weight=counts),
        lambda counts: LF.balanced_weights(counts),
    ],
)
def test_counts_that_are_no_numbers(made, counts):
    with pytest.raises(
        LargeMarginError, match=r"numbers, one per class|must be floating point|dtype"
    ):
        made(counts)
