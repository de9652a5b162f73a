"""Every loss of class statistics takes (C, K, D) prototypes: the nearest of each class counts."""

import pytest
import torch
from oracles.cosine_family import nearest_centers

from contract.problems import Sizes, assert_close, call, random_problem, value_and_gradients
from contract.zoo import OF_SAMPLES, build, implementations
from largemargin import LargeMarginError
from largemargin.losses import LOSSES

SIZES, CENTERS = Sizes(7, 5, 3), 3
REFUSE = {"lsoftmax"}
TAKING = [name for name in OF_SAMPLES if "prototypes" in LOSSES[name].needs and name not in REFUSE]
OTHERS = sorted(
    name for name in LOSSES if "prototypes" in LOSSES[name].needs and name not in TAKING
)
PER_SAMPLE = {"alpha1": 1.2, "beta1": -0.2, "alpha2": 0.7, "beta2": 0.1, "scale": 6.0}


def centers_of(problem):
    """Sub-centers around the prototypes, of unequal lengths."""
    draw = torch.Generator().manual_seed(5)
    noise = torch.randn(SIZES.classes, CENTERS, SIZES.dim, generator=draw, dtype=torch.float64)
    return (problem.prototypes[:, None] + noise) * torch.tensor([0.5, 1.0, 2.0])[:, None].double()


def make(name, problem, **options):
    hyper = PER_SAMPLE if name == "gm_softmax" else None
    return build(name, problem, hyper, reduction="none", **options).eval()


def similarity_of(loss):
    """That of the logits the loss makes, and so of the maximum over sub-centers."""
    named = loss.head_similarity or getattr(loss, "similarity", None)
    form = loss.head_form(SIZES.classes) if named is None else None
    return named or (form.similarity if form else "dot" if loss.takes_logits else "cosine")


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("name", TAKING)
def test_each_sample_sees_its_nearest_sub_centers(name, soft):
    problem = random_problem(SIZES, seed=170)
    labels = problem.soft if soft else problem.labels
    centers = centers_of(problem)
    for impl in ["dense"] if soft else implementations(name):
        options = {} if impl == "auto" else {"impl": impl}
        loss = make(name, problem, **options)
        given = problem.but(prototypes=centers)
        value, gradients = value_and_gradients(loss, given, labels)
        chosen = nearest_centers(problem.features.numpy(), centers.numpy(), similarity_of(loss))
        wanted = torch.zeros_like(centers)
        for n, nearest in enumerate(torch.as_tensor(chosen)):
            row = slice(n, n + 1)
            index = torch.arange(SIZES.classes), nearest
            one = problem.rows(row).but(prototypes=centers[index])
            want, slopes = value_and_gradients(loss, one, labels[row])
            assert_close(value[row], want, 1e-12, f"{name} {impl}, sample {n}")
            assert_close(gradients["features"][row], slopes["features"], 1e-11, "features")
            wanted[index] += slopes["prototypes"]
        assert_close(gradients["prototypes"], wanted, 1e-11, f"{name} {impl}: sub-centers")


@pytest.mark.parametrize("name", TAKING)
def test_one_sub_center_is_the_prototype(name):
    problem = random_problem(SIZES, seed=171)
    one = problem.but(prototypes=problem.prototypes[:, None])
    loss = make(name, problem)
    assert_close(call(loss, one), call(loss, problem), 1e-13, name)


@pytest.mark.parametrize("name", OTHERS)
def test_losses_that_need_one_vector_per_class_say_so(name):
    problem = random_problem(SIZES, seed=172)
    with pytest.raises(LargeMarginError, match=r"prototypes.*\(5, 3, 3\).*SubCenterHead.dominant"):
        call(build(name, problem), problem.but(prototypes=centers_of(problem)))


def test_the_sine_near_a_sub_center_is_that_of_the_nearest():
    """Within 1e-5 radians the cosine has no digits: the chord to the right row is what is left."""
    problem = random_problem(SIZES, seed=173)
    centers = centers_of(problem)
    nearby = centers[problem.labels, 1] + 1e-5 * problem.features
    loss = LOSSES["arcface"](scale=8.0, reduction="none")
    want = loss(nearby, centers[:, 1], problem.labels)
    assert torch.equal(loss(nearby, centers[:, 1:2], problem.labels), want)
    value = loss(nearby, centers, problem.labels)
    assert_close(loss(nearby.float(), centers.float(), problem.labels), value, 1e-5, "float32")
    for n, nearest in enumerate(nearest_centers(nearby.numpy(), centers.numpy())):
        row, rows = slice(n, n + 1), centers[torch.arange(SIZES.classes), torch.as_tensor(nearest)]
        assert_close(value[row], loss(nearby[row], rows, problem.labels[row]), 1e-12, f"{n}")
