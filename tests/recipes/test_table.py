"""How numbers of a table are written."""

import pytest

from largemargin.recipes.table import Line, text_of
from largemargin.recipes.verdicts import Sample


@pytest.mark.parametrize(
    ("value", "reported", "text"),
    [
        (1.203e-05, None, "1.2e-05"),
        (0.0151, None, "0.02"),
        (0.0, None, "0.00"),
        (5778.96, None, "5778.96"),
        (0.0012, 0.5, "0.00"),
        (0.0012, 0.2621, "0.0012"),
    ],
)
def test_small_numbers_beside_nothing_are_not_rounded_away(
    value: float, reported: float | None, text: str
) -> None:
    line = Line({}, "value", "", reported, None, Sample((value,)), None, "")
    assert text_of(value, None, line) == text
