"""The rule by which a measured number is called reproduced."""

import math

import pytest
from largemargin_papers.recipes.schema import Measure
from largemargin_papers.recipes.verdicts import Sample, verdict

HIGHER = Measure("accuracy", tolerance=0.5)


@pytest.mark.parametrize(
    ("values", "reported", "text"),
    [
        ((90.0,), 90.5, "reproduced"),
        ((90.0,), 90.51, "worse than reported"),
        ((91.1,), 90.51, "better than reported"),
        # Standard error 1: twice of it is 2.
        ((89.0, 91.0), 92.0, "reproduced"),
        ((89.0, 91.0), 92.1, "worse than reported"),
        ((), 90.0, "not measured"),
        ((90.0,), None, "nothing reported"),
    ],
)
def test_rule_of_closeness(values: tuple[float, ...], reported: float | None, text: str) -> None:
    assert verdict(HIGHER, reported, Sample(values)) == text


@pytest.mark.parametrize(
    ("values", "base", "text"),
    [
        ((90.0,), (89.0,), "direction holds in one run"),
        ((90.0,), (91.0,), "direction does not hold in one run"),
        ((90.0,), (89.5,), "direction too close to call in one run"),
        ((90.0,), (90.0,), "direction too close to call in one run"),
        ((90.0,), (90.0, 90.0), "direction too close to call in one run"),
        ((90.0,), (89.8, 90.2), "direction is within noise"),
        ((90.0,), (89.4, 89.4), "direction holds in one run"),
        ((90.0, 90.2), (89.9, 90.1), "direction is within noise"),
        ((90.0, 90.2), (88.9, 89.1), "direction holds"),
        ((90.0, 90.0), (90.0, 90.0), "direction is within noise"),
        ((90.0, 90.2), (89.0,), "direction holds in one run"),
        ((90.0, 90.02), (89.7, 89.72), "direction holds"),  # less than the tolerance, but known
        ((90.0,), (), ""),
    ],
)
def test_rule_of_direction(values: tuple[float, ...], base: tuple[float, ...], text: str) -> None:
    found = verdict(HIGHER, 90.0, Sample(values), baseline=(88.0, Sample(base)))
    assert found.partition("; ")[2] == text


def test_draws_of_one_run_are_its_noise() -> None:
    base = (88.0, Sample((89.0,), draws=0.3))
    found = [
        verdict(HIGHER, 90.0, Sample((value,), draws=0.4), baseline=base) for value in (89.9, 90.1)
    ]
    assert found == ["reproduced; direction is within noise", "reproduced; direction holds"]
    assert verdict(HIGHER, 90.0, Sample((90.6,), draws=0.5)) == "better than reported"


def test_a_direction_needs_two_reported_numbers() -> None:
    measured, base = Sample((90.0,)), Sample((80.0,))
    assert verdict(HIGHER, None, measured, baseline=(88.0, base)) == "nothing reported"
    assert verdict(HIGHER, 90.0, measured, baseline=(None, base)) == "reproduced"
    assert verdict(HIGHER, 90.0, measured, baseline=(90.0, base)) == "reproduced"


def test_one_run_has_no_deviation() -> None:
    one = Sample((90.0,))
    assert (one.mean, one.error, math.isnan(one.std)) == (90.0, 0.0, True)


def test_differs_where_neither_is_better() -> None:
    neither = Measure("plane_variance", better="neither", tolerance=1.0)
    assert verdict(neither, 5.0, Sample((9.0,))) == "differs"


@pytest.mark.parametrize("better", ["higher", "lower"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_neither_better_nor_worse(better: str, value: float) -> None:
    """Of a model that diverged: a comparison with NaN is False, which is no verdict."""
    measure = Measure("error", better=better, tolerance=0.5)  # type: ignore[arg-type]
    broken, sound = Sample((90.0, value)), Sample((90.0, 90.1))
    assert math.isnan(broken.std)
    for reported in (80.0, None):
        said = verdict(measure, reported, broken, baseline=(88.0, sound))
        assert said == "failed: what was measured is no number"
    assert verdict(measure, 90.0, sound, baseline=(88.0, broken)) == "reproduced"
    assert verdict(measure, 90.0, sound, baseline=(95.0, broken)) == "reproduced"
