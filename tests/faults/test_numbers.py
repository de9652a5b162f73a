"""Every loss on numbers of any size: finite, or an error in words; half precision near float64."""

import math
import zlib

import pytest
import torch
import torch.nn.functional as F
from contract.problems import Problem, Sizes, random_problem, value_and_gradients
from contract.zoo import NAMES, ZOO, build
from faults.counting import Faults
from faults.number_cases import (
    Case,
    cases,
    evaluate,
    nearby,
    setting_of,
    state_dtype,
)
from hypothesis import given, seed, settings

import largemargin as lm
import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES
from largemargin.ops.norms import EPS

# That is said of a loss once, and looked at here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*prototypes are zero")

QUICK, FULL = 15, 295
"""Cases of each loss: more than 500 and 10,000 over all."""

UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
}
"""Rounding errors of a product."""
BUDGET = 64
"""Rounding errors of the inputs that may have the effect that the error of a result has."""


def carried_out(name: str, count: int, faults: Faults) -> None:
    @seed(zlib.crc32(name.encode()))
    @settings(max_examples=count, database=None, derandomize=False)
    @given(cases(name))
    def check(case: Case) -> None:
        faults.attempt("a loss on generated numbers")
        faults.attempt(f"{str(case.dtype).removeprefix('torch.')} inputs of a loss")
        finite_or_explained(name, case, faults)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_finite_or_explained_and_near_float64(name: str, faults: Faults) -> None:
    carried_out(name, QUICK, faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_finite_or_explained_and_near_float64_often(name: str, faults: Faults) -> None:
    carried_out(name, FULL, faults)


def finite_or_explained(name: str, case: Case, faults: Faults) -> None:
    problem = case.problem()
    try:
        value, gradients = evaluate(name, case, problem, state_dtype(case.dtype), check_finite=True)
    except LargeMarginError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert not case.ordinary or beyond_float16(name, case, problem), f"{name}: {refused}"
        assert "finite" in refused
        assert "Look at the layers" in refused or "Normalise or scale" in refused
        faults.attempt("overflow of a loss explained")
        return
    assert torch.isfinite(value).all()
    network = "logits" in LOSSES[name].needs
    for key, gradient in gradients.items():
        assert gradient.dtype == case.dtype
        # Gradients inside a network are not the loss's to check.
        inside = network and (not case.ordinary or case.dtype == torch.float16)
        assert inside or torch.isfinite(gradient).all(), f"{name}: gradient of {key}"
    if case.ordinary and case.dtype != torch.float64 and not network:
        near_float64(name, case, problem, value, gradients)


def beyond_float16(name: str, case: Case, problem: Problem) -> bool:
    """Prototypes that nearly coincide have boundaries with steep gradients."""
    if case.dtype != torch.float16:
        return False
    _, slopes = evaluate(name, case, problem.to(torch.float64), torch.float64)
    return max(float(slope.abs().max()) for slope in slopes.values()) > 2.0**14


def near_float64(
    name: str,
    case: Case,
    problem: Problem,
    value: torch.Tensor,
    gradients: dict[str, torch.Tensor],
) -> None:
    """As near as if the inputs had been rounded: what nearby inputs give says how near that is."""
    exact, unit = problem.to(torch.float64), UNITS[case.dtype]
    want, slopes = evaluate(name, case, exact, torch.float64)
    away = rounding(name, case, exact, unit)
    moved = [evaluate(name, case, nearby(exact, away, k), torch.float64) for k in range(2)]
    reach = max(float((other - want).abs().max()) for other, _ in moved)
    error = float((value.double() - want).abs().max())
    allowed = BUDGET * (reach + unit * (1 + float(want.abs().max())))
    allowed += 4 * UNITS[torch.float32] * largest_logit(name, case, exact)
    if name in ANGULAR and case.targets_are_soft:
        scale = build(name, exact, setting_of(name, case)).scale_for(len(exact.prototypes))
        allowed += 2 * scale * wrong_angle(exact, UNITS[torch.float32])
    assert error <= allowed, f"{name}: {value} instead of {want}: {error / allowed:.3g} budgets"
    steep = steepness(name, exact, slopes, want)
    for key, slope in slopes.items():
        size = float(slope.norm())
        reach = max(float((other[key] - slope).norm()) for _, other in moved)
        off = float((gradients[key].double() - slope).norm())
        bound = BUDGET * (reach + unit * (size + steep))
        assert off <= bound, (
            f"{name}: gradient of {key}: {off} of {size}: {off / bound:.3g} budgets"
        )


ANGULAR = ("adaface", "arcface", "curricularface", "elasticface", "magface", "unified_margin")
"""Losses that take the sine of an angle, that of soft targets from its cosine."""


def rounding(name: str, case: Case, problem: Problem, unit: float) -> float:
    """Relative error of the inputs that the arithmetic of a loss amounts to."""
    angular = name in ANGULAR and case.targets_are_soft
    return wrong_angle(problem, unit) if angular else unit


def wrong_angle(problem: Problem, unit: float) -> float:
    """How wrong an angle is that is taken from its cosine: the cosine's error over the sine."""
    rows, columns = (F.normalize(x, eps=1e-30) for x in (problem.features, problem.prototypes))
    nearest = float((rows @ columns.T).abs().max())
    sine = math.sqrt(max(0.0, 1 - nearest**2))
    return unit / max(sine, math.sqrt(unit))


def largest_logit(name: str, case: Case, problem: Problem) -> float:
    """Statistics of logits are float32 numbers of their size, also where only differences count."""
    if not LOSSES[name].takes_logits:
        return 0.0
    setting = setting_of(name, case)
    options = {key: setting[key] for key in ("similarity", "scale") if setting.get(key)}
    options["bias"] = problem.bias if LOSSES[name].uses_bias else None
    logits = LF.similarity_logits(problem.features, problem.prototypes, **options)
    return float(logits.abs().max())


def steepness(
    name: str, problem: Problem, slopes: dict[str, torch.Tensor], want: torch.Tensor
) -> float:
    """Size of the terms that a gradient is the sum of, which may be much more than its own.

    The gradient of a cosine is what is left when its part along the row is taken away, that of a
    penalty which ignores the size of a matrix when its part along the matrix is.
    """
    if ZOO[name].kind == "prototypes":
        return max(1.0, 4 * float(want.max()) / max(float(problem.prototypes.norm()), EPS))
    given = [getattr(problem, key) for key in slopes]
    largest = max(float(x.abs().max()) for x in given)
    norms = torch.cat([x.norm(dim=1) for x in given if x.dim() == 2])
    shortest = float(norms[norms > EPS].min()) if (norms > EPS).any() else 1.0
    of_cosine = 64 / shortest if LOSSES[name].head_similarity == "cosine" else 0.0
    if name == "sphereface":
        # At 0 and 180 degrees, which is all that one dimension has, cos(4 angle) has 16 times the
        # slope of the cosine.
        of_cosine = 16 * 64 / shortest
    return max(1.0, largest, of_cosine)


@pytest.mark.parametrize("name", NAMES)
def test_looking_for_infinity_changes_no_bit(name: str) -> None:
    problem = random_problem(Sizes(6, 4, 3), seed=60)
    found = [
        value_and_gradients(build(name, problem, check_finite=looks), problem)
        for looks in (False, True)
    ]
    (value, gradients), (same, others) = found
    assert torch.equal(value, same)
    for key, gradient in gradients.items():
        assert (gradient is None) == (others[key] is None)
        assert gradient is None or torch.equal(gradient, others[key])


def test_overflow_names_the_loss_the_sizes_and_the_way_out() -> None:
    features = torch.full((2, 3), 1e25, requires_grad=True)
    prototypes = torch.tensor([[1e20, 0, 0], [0, -1e20, 0]], requires_grad=True)
    labels = torch.tensor([1, 0])
    loss = lm.CrossEntropy(check_finite=True)
    with pytest.raises(
        LargeMarginError,
        match=r"CrossEntropy is not finite, though its inputs are: the largest entries are "
        r"features 1e\+25, prototypes 1e\+20\. Numbers of float32 end at 3\.4e\+38\. "
        r"Normalise or scale the features, lower the learning rate, or compute in float64",
    ):
        loss(features, prototypes, labels)
    assert torch.isfinite(loss(features.double(), prototypes.double(), labels))


def test_a_gradient_that_overflows_names_its_row_when_it_is_made() -> None:
    features = torch.tensor([[1.0, 0], [1e-4, 0]], dtype=torch.float16, requires_grad=True)
    prototypes = torch.tensor([[0, 1.0], [0, -1]], dtype=torch.float16)
    loss = lm.CosFace(scale=64.0, check_finite=True)
    value = loss(features, prototypes, torch.tensor([0, 0]))
    with pytest.raises(
        LargeMarginError,
        match=r"gradient of CosFace on features is not finite in row 1, though the loss is\. "
        r"Numbers of float16 end at 6\.55e\+04.*compute in float32",
    ):
        value.backward()
    assert not features._backward_hooks  # a parameter would collect one every step
