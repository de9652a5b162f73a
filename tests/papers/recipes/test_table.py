"""How numbers of a table are written."""

import math

import pytest
from largemargin_papers.recipes.table import Line, Table, summary, text_of
from largemargin_papers.recipes.verdicts import Sample


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
    assert text_of(value, math.nan, line) == text  # of one run


def line(method: str, values: tuple[float, ...], verdict: str, draws: float | None = None) -> Line:
    key = {"method": method, "noise": ""}
    return Line(key, "accuracy", "%", 90.5, 0.25, Sample(values, draws), draws, verdict)


def test_a_table_as_text() -> None:
    lines = (
        line("softmax", (90.0, 91.0), "reproduced"),
        line("ours", (92.5,), "better than reported; direction holds", draws=0.125),
        line("theirs", (91.0,), "reproduced; direction holds"),
        line("wild", (), "failed: seed 0: it diverged; lower the rate"),
    )
    table = Table("A table", "as printed", lines, {"wild": "seed 0: it diverged"})
    assert str(table).splitlines() == [
        "A table",
        "Protocol: as printed.",
        "",
        "                   reported        measured        runs  verdict",
        "softmax  accuracy  90.50 ± 0.25 %  90.50 ± 0.71 %  2     reproduced",
        "ours     accuracy  90.50 ± 0.25 %  92.50 ± 0.12 %  1     better than reported; direction "
        "holds",
        "theirs   accuracy  90.50 ± 0.25 %  91.00 %         1     reproduced; direction holds",
        "wild     accuracy  90.50 ± 0.25 %  -                     failed: seed 0: it diverged; "
        "lower the rate",
        "",
        "2 reproduced, 1 better than reported, 2 direction holds, 1 failed.",
        "wild failed: seed 0: it diverged",
    ]
    assert summary(lines)["failed"] == 1  # what is behind it is no verdict
