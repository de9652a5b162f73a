"""Figures as tables: the numbers of the curves, few enough to read."""

import pytest

from largemargin.app.report.charts import Chart, Heat, Series, Table
from largemargin.app.report.page import MATRIX, ROWS, numbers, thinned


def texts(table: Table | None) -> list[list[str]]:
    assert table is not None
    return [[cell.text for cell in row] for row in table.rows]


def test_a_curve_is_a_column() -> None:
    first = Series("a", [1, 2, 3], [0.5, None, 0.25])
    second = Series("b", [2, 3, 4], [1.0, 2.0, 3.0])
    found = numbers(Chart("k", "t", (first, second), x="epoch"))
    assert found is not None
    assert found.columns == ("epoch", "a", "b")
    assert texts(found) == [
        ["1", "0.5", "–"],
        ["2", "–", "1"],
        ["3", "0.25", "2"],
        ["4", "–", "3"],
    ]


def test_faint_series_are_left_out_and_shares_are_percent() -> None:
    shown, faint = Series("a", [0.1], [0.5]), Series("b", [0.1], [9.0], faint=True)
    found = numbers(Chart("k", "t", (shown, faint), percent_y=True))
    assert texts(found) == [["0.1", "50.00 %"]]


def test_points_beside_a_name_belong_to_it() -> None:
    series = tuple(
        Series(str(shift), [at + shift for at in range(3)], [at * 1.0 for at in range(3)])
        for shift in (-0.24, 0.24)
    )
    found = numbers(Chart("k", "t", series, names=("x", "y", "z")))
    assert texts(found) == [["x", "0", "0"], ["y", "1", "1"], ["z", "2", "2"]]


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    found = texts(numbers(Chart("k", "t", (Series("a", range(1000), range(1000)),))))
    assert len(found) == ROWS
    assert [found[0][0], found[-1][0]] == ["0", "999"]
    assert thinned([1, 2, 3], 5) == [1, 2, 3]


def test_matrices() -> None:
    matrix = Heat(((None, 1.5), (2.5, None)), ("a", "b"))
    assert texts(numbers(Chart("k", "t", heat=matrix))) == [["a", "–", "1.5"], ["b", "2.5", "–"]]


@pytest.mark.parametrize("changes", [{"equal": True}, {"solid": True}, {"series": ()}])
def test_maps_of_samples_have_no_numbers(changes: dict) -> None:  # type: ignore[type-arg]
    settings = {"series": (Series("a", [1], [2]),), **changes}
    assert numbers(Chart("k", "t", **settings)) is None


def test_large_matrices_have_no_numbers() -> None:
    names = tuple(str(at) for at in range(MATRIX + 1))
    heat = Heat(tuple(tuple(1.0 for _ in names) for _ in names), names)
    assert numbers(Chart("k", "t", heat=heat)) is None
