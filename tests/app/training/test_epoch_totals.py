"""What the steps of an epoch add up to: as Python numbers, and in the tensors of a device."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from largemargin.app.training.journal import (
    EpochTotals,
    Journal,
    Progress,
    Totals,
    _add_to,
    whole_rows,
)

BOTH = pytest.mark.parametrize("on_host", [True, False], ids=["numbers", "tensors"])
GOOD, BAD = True, False


def new(on_host: bool) -> EpochTotals:
    sums = EpochTotals(torch.device("cpu"))
    sums.on_host = on_host
    return sums


def add(sums: EpochTotals, *outcomes: bool, loss: float = 1.0) -> EpochTotals:
    """Steps of four images; in a bad one the loss and the term b are not finite."""
    for good in outcomes:
        total = torch.tensor(loss if good else math.nan)
        terms = {"a": torch.tensor(loss / 4), "b": total * 3 / 4}
        sums.add(total, terms, torch.tensor(10 * loss), total.isfinite())
        sums.count(4)
    return sums


@BOTH
def test_rows_hold_means_over_the_finite_steps(on_host: bool) -> None:
    sums = add(new(on_host), GOOD, BAD)
    add(sums, GOOD, loss=3.0)
    assert sums.read().row() == {
        "loss": 2.0,
        "terms": {"a": 0.5, "b": 1.5},
        "gradient_norm": 20.0,
        "images": 12,
        "bad_steps": 1,
        "bad_terms": {"b": 1},
    }
    sums.clear()
    add(sums, GOOD, loss=8.0)
    row = {"loss": 8.0, "terms": {"a": 2.0, "b": 6.0}, "gradient_norm": 80.0, "images": 4}
    assert sums.read().row() == row


@BOTH
def test_every_bad_step_of_a_term_is_counted(on_host: bool) -> None:
    assert add(new(on_host), BAD, GOOD, BAD, BAD).read().bad_terms == {"b": 3}


@BOTH
def test_without_a_finite_step_there_are_no_means(on_host: bool) -> None:
    row = add(new(on_host), BAD).read().row()
    means = [row["loss"], row["gradient_norm"], *row["terms"].values()]
    assert len(means) == 4
    assert all(math.isnan(each) for each in means)
    assert (row["images"], row["bad_steps"]) == (4, 1)


@BOTH
def test_the_last_bad_step_is_counted_from_the_first(on_host: bool) -> None:
    """Over good ones and bad ones, in a row or not."""
    assert add(new(on_host), BAD, GOOD, BAD).read().last_bad == 2
    assert add(new(on_host), BAD, GOOD, BAD, GOOD, BAD).read().last_bad == 4


@BOTH
@pytest.mark.parametrize("paused_after", [0, 1, 2, 3, 6])
def test_going_on_from_a_state_changes_nothing(on_host: bool, paused_after: int) -> None:
    """Written as JSON and read by another process: sums of the epoch, and the row it is in."""
    steps = [GOOD, BAD, BAD, BAD, GOOD, BAD]
    before, after = steps[:paused_after], steps[paused_after:]
    state = json.loads(json.dumps(add(new(on_host), *before).state()))
    one, two = new(on_host), new(on_host)
    two.restore(state)
    for sums in (add(one, *before), two):
        add(sums, *after)
    assert asdict(two.read()) == asdict(one.read())
    assert two.state() == one.state()
    for sums in (one, two):
        sums.clear()
        add(sums, BAD)
    assert two.read().bad_in_a_row == one.read().bad_in_a_row == 2


@BOTH
def test_long_epochs_are_added_up_in_double_precision(on_host: bool) -> None:
    sums = add(new(on_host), GOOD)
    sums.restore({**sums.state(), "loss": 2.0**24 + 1})
    assert add(sums, GOOD).read().loss == 2.0**24 + 2


def test_before_the_first_step_there_is_nothing() -> None:
    sums = EpochTotals(torch.device("cpu"))
    assert sums.on_host
    assert sums.read() == Totals()
    assert Totals().last_bad == -1
    assert not EpochTotals(torch.device("meta")).on_host
    assert EpochTotals(torch.device("meta")).state() == {**asdict(Totals()), "row": 0}


def test_rows_name_things_in_their_own_letters(tmp_path: Path) -> None:
    """So that people find them in the file."""
    row = {"kind": "bad_steps", "step": 3, "samples": ["Füße/猫.png"]}
    journal = Journal(tmp_path)
    journal.write(row)
    assert "Füße/猫.png" in journal.path.read_text(encoding="utf-8")
    assert whole_rows(journal.path)[0] == [row]


def test_sums_are_compiled_only_where_they_are_asked_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(torch, "compile", lambda each, **how: compiled.append((each, how)) or each)
    new(on_host=False)
    assert compiled == []
    sums = EpochTotals(torch.device("cpu"), compiled=True)
    sums.on_host = False
    assert compiled == [(_add_to, {"dynamic": False})]
    assert add(sums, GOOD).read().steps == 1


def test_the_bar_shows_images_per_second_since_it_was_last_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tqdm")
    clock = iter([100.0, 104.0, 106.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    bar, said = Progress(total=9), []
    assert bar.bar is not None
    assert (bar.bar.initial, bar.bar.n) == (0, 0)
    monkeypatch.setattr(bar.bar, "set_postfix_str", lambda text, **_: said.append(text))
    for images in (40, 50):
        bar.step(images)
        bar.show(Totals(steps=2, terms={"a": 3.0}))
    bar.bar.close()
    assert said == ["a 1.5, 10 images/s", "a 1.5, 25 images/s"]
