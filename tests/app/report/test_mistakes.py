"""Which classes are taken for which, and what stands beside the hardest samples."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from app.report.made import HOSTILE, geometry
from app.report.reading import Page

from largemargin.app.report.charts import Cards, Chart
from largemargin.app.report.page import render
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.report.sample_views import Neighbour, SampleViews, neighbours_of
from largemargin.app.report.sections.mistakes import CELLS, PAIRS, mistakes_section, wrong_pairs
from largemargin.app.report.sections.robustness import robustness_section
from largemargin.measuring.accuracy import wilson
from largemargin.measuring.calibration import calibration

COUNTS = ((5, 2, 0), (0, 4, 1), (7, 0, 3))
NAMES = ("cat", "dog", "owl")


def confused(name: str, counts: tuple[tuple[int, ...], ...]) -> ReportModel:
    names = tuple(str(label) for label in range(len(counts)))
    return ReportModel(name, None, names, views=SampleViews(confusion=counts))


def maps(*models: ReportModel) -> list[Chart]:
    return [
        each for each in mistakes_section(ReportModels(models)).blocks if isinstance(each, Chart)
    ]


def test_confusions_come_most_frequent_first() -> None:
    assert wrong_pairs(COUNTS) == [(2, 0, 7), (0, 1, 2), (1, 2, 1)]


def test_a_map_shows_mistakes_and_its_table_all_counts() -> None:
    few = ((9, 1, 0), (0, 9, 0), (0, 0, 9))
    first, second = maps(confused("a", COUNTS), confused("b", few))
    assert first.title == "a: 10 of 22 wrong"
    assert second.title == "b: 1 of 28 wrong"
    assert first.heat is not None
    assert second.heat is not None
    assert first.heat.values == ((None, 2, 0), (0, None, 1), (7, 0, None))
    # One scale for all models: what is dark in one is dark in the other.
    assert first.heat.high == second.heat.high == 7
    assert first.table is not None
    rows = [[cell.text for cell in row] for row in first.table.rows]
    assert rows == [["0", "5", "2", "0"], ["1", "0", "4", "1"], ["2", "7", "0", "3"]]


def test_of_many_classes_the_most_mistaken_are_shown() -> None:
    count = CELLS + 8
    wrong = {(1, 39): 50, (39, 2): 20, (5, 6): 3}
    counts = tuple(
        tuple(wrong.get((a, b), 9 * (a == b)) for b in range(count)) for a in range(count)
    )
    (chart,) = maps(confused("many", counts))
    assert chart.heat is not None
    assert len(chart.heat.classes) == CELLS
    assert {1, 2, 5, 6, 39} <= set(chart.heat.classes)
    assert f"the {CELLS} most mistaken of {count} classes" in chart.note
    assert chart.table is not None
    assert len(chart.table.rows) == len(wrong) < PAIRS
    assert [cell.text for cell in chart.table.rows[0]] == ["1", "39", "50"]


def test_what_was_not_counted_names_its_command() -> None:
    section = mistakes_section(ReportModels((ReportModel("bare", None, NAMES),)))
    commands = [getattr(block, "command", "") for block in section.blocks]
    assert commands[0] == "largemargin evaluate RUN"


def test_neighbours_are_the_closest_others() -> None:
    degrees = torch.deg2rad(torch.tensor([0.0, 10.0, 40.0, 350.0, 180.0, 90.0]))
    unit = torch.stack([degrees.cos(), degrees.sin()], 1)
    index, labels = torch.tensor([3, 5, 7, 8, 9, 11]), torch.tensor([0, 0, 1, 1, 2, 2])
    found = neighbours_of([3, 9], unit, index, labels)
    assert [each.index for each in found[3]][2:] == [7, 11]
    assert {each.index for each in found[3]} == {5, 8, 7, 11}
    assert [round(each.angle) for each in found[3]] == [10, 10, 40, 90]
    assert found[9][0] == Neighbour(11, 2, pytest.approx(90, abs=1e-3))


def test_cards_tell_neighbours_of_other_classes(tmp_path: Path) -> None:
    found = geometry()
    sample = replace(found.worst[0], label=0, predicted=1, rival=1)
    near = (Neighbour(7, 1, 3.0), Neighbour(8, 0, 12.5))
    views = SampleViews(
        neighbours={sample.index: near}, near_pictures={7: "data:image/png;base64,AAAA"}
    )
    right = replace(found.worst[1], label=2, predicted=2, rival=1)
    model = ReportModel("m", replace(found, worst=(sample, right)), HOSTILE[:3], views=views)
    section = mistakes_section(ReportModels((model,)))
    (cards,) = [block for block in section.blocks if isinstance(block, Cards)]
    wrong, fine = cards.cards
    assert (wrong["what"], wrong["other"]) == ("predicted", HOSTILE[1])
    assert (fine["what"], fine["other"], fine["near"]) == ("rival", HOSTILE[1], [])
    assert [each["other"] for each in wrong["near"]] == [True, False]
    assert wrong["near"][1]["title"] == "sample 8, 12.50°"
    path = tmp_path / "page.html"
    path.write_text(render(ReportModels((model,)), [section], "t"), encoding="utf-8")
    page = Page(path)
    assert [
        image["src"] for image in page.named("img") if image.get("alt", "").startswith("sample")
    ]
    assert not any(image.get("src") == "x" for image in page.named("img"))


def test_a_reliability_diagram_says_how_sure_it_is() -> None:
    confidence = torch.tensor([0.95] * 40 + [0.55] * 3)
    correct = torch.arange(43) < 30
    found = replace(geometry(), calibration=calibration(confidence, correct))
    section = robustness_section(ReportModels((ReportModel("m", found, NAMES),)))
    (chart,) = [each for each in section.blocks if getattr(each, "key", "") == "calibration"]
    assert isinstance(chart, Chart)
    _, curve = chart.series
    assert list(curve.y) == [0.75]  # three samples are too few for a point, not for the table
    assert (curve.low[0], curve.high[0]) == pytest.approx(wilson(30, 40))
    assert chart.table is not None
    assert [row[3].text for row in chart.table.rows] == ["3", "40"]
