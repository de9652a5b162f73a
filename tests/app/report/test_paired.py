"""What changed against the baseline, image by image where it is known which ones are right."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from app.report.reading import Page

from largemargin.app.report.charts import Note
from largemargin.app.report.judgements import difference, paired
from largemargin.app.report.page import report
from largemargin.app.report.report_models import ReportModel, ReportModels, read_models
from largemargin.app.report.sections.verdicts import against, compared
from largemargin.app.training import Run
from largemargin.measuring import Correct, paired_interval

BY_IMAGE = "It compares the models image by image (Newcombe 1998, for paired data)"
APART = "treats the images of the two models as independent samples (Newcombe 1998)"


def right_about(name: str, right: int, **changes: object) -> ReportModel:
    """The first images of a thousand."""
    bits = Correct.of(torch.arange(1000) < right, "abc").to_dict()
    result = {"test": {"accuracy": right / 1000}, "correct": bits}
    data = {"record": {"images": {"test": 1000}, "digests": {"test": "abc"}}}
    return ReportModel(name, None, ("a", "b"), result=result, data=data, **changes)  # type: ignore[arg-type]


def said(*models: ReportModel) -> str:
    (note,) = compared(ReportModels(models))
    assert isinstance(note, Note)
    return note.text


def test_a_difference_on_the_same_images_is_paired() -> None:
    """Ten images of a thousand, which the baseline has wrong: clear, and was not before."""
    base, given = right_about("softmax", 900, baseline=True), right_about("wide", 910)
    assert paired(given, base) == (900, 10, 0, 90)
    assert difference(given, base) == paired_interval(900, 10, 0, 90)
    assert difference(given, base)[0] > 0
    assert against(given, base).detail.endswith(", more accurate")
    assert against(given, base).strong
    assert BY_IMAGE in said(base, given)
    assert APART not in said(base, given)


@pytest.mark.parametrize(
    "change",
    [
        {"correct": None},
        {"correct": {"digest": "abc", "samples": 1000, "bits": "AAAA"}},
        {"correct": Correct.of(torch.arange(1000) < 500, "abc").to_dict()},
        {"correct": Correct.of(torch.arange(999) < 910, "abc").to_dict()},
        {"correct": Correct.of(torch.arange(1000) < 910, "abd").to_dict()},
        {"correct": ["wrong"]},
    ],
    ids=["none", "damaged", "other accuracy", "other number", "other images", "nonsense"],
)
def test_otherwise_it_is_not(change: dict[str, object]) -> None:
    base, given = right_about("softmax", 900, baseline=True), right_about("wide", 910)
    given = replace(given, result={**given.result, **change})
    assert paired(given, base) is None
    low, high = difference(given, base)
    assert low < 0 < high
    assert against(given, base).detail.endswith(", no clear difference")
    assert not against(given, base).strong
    assert APART in said(base, given)
    assert BY_IMAGE not in said(base, given)
    third = right_about("third", 920)
    assert f"{BY_IMAGE}, but for wide it {APART}" in said(base, given, third)


def test_runs_keep_what_it_takes(softmax: Run, cosface: Run, tmp_path: Path) -> None:
    """With an evaluation, and with what is left of a run that has none."""
    page = Page(report([softmax, cosface], tmp_path / "one.html", features="none"))
    assert BY_IMAGE in page.text
    first, second = read_models([softmax, cosface])
    counts = paired(second, first)
    assert counts is not None
    assert sum(counts) == first.samples
    copies = []
    for run in (softmax, cosface):
        folder = Path(shutil.copytree(run.folder, tmp_path / run.folder.parent.name))
        (folder / "evaluation.json").unlink()
        copies.append(folder)
    again = read_models(copies)
    assert paired(again[1], again[0]) == counts
    for folder in copies:
        path = folder / "result.json"
        found = json.loads(path.read_text())
        del found["correct"]
        path.write_text(json.dumps(found))
    page = Page(report(copies, tmp_path / "two.html", features="none"))
    assert APART in page.text
