"""The page about presets: its Python runs, and what it says of the long tail is so."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone

import largemargin as lm
from largemargin.app.training.files import read_json
from largemargin.app.training.presets import FILE
from largemargin.integrations.scikit_learn import LargeMarginClassifier

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "presets.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    assert torch.isfinite(names["loss"])
    assert "source      papers/benchmark/" in capsys.readouterr().out
    # The class weights of the end, which nothing but the schedule sets.
    assert names["chosen"].scheduled
    weights = [term.weight for term in names["criterion"].objective.terms.values()]
    assert any(each is not None and len(each.unique()) == 3 for each in weights)
    alone = lm.attach(torch.nn.Sequential(torch.nn.Linear(16, 3)), names["chosen"], schedule=())
    assert all(term.weight is None for term in alone.objective.terms.values())


def test_the_page_names_what_there_is() -> None:
    from largemargin.app.cli.command import parser_of

    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in read_json(FILE))
    known = parser_of("train").format_help()
    assert all(option in known for option in re.findall(r"--\w+", text))


def test_a_preset_brings_its_schedule_to_scikit_learn() -> None:
    y = np.repeat([0, 1, 2], [60, 20, 8])
    X = np.random.default_rng(0).normal(size=(88, 4)) + y[:, None]
    chosen = lm.preset("long_tail", class_counts=[60, 20, 8])
    model = LargeMarginClassifier(chosen, epochs=2, batch_size=44).fit(X, y)
    # The class weights of the last steps, which nothing but the schedule sets.
    assert [type(each).__name__ for each in model.criterion_.schedules] == ["DeferredReweighting"]
    assert model.criterion_.objective.terms["ldam"].weight is not None
    alone = LargeMarginClassifier(chosen, epochs=2, batch_size=44, schedule=()).fit(X, y)
    assert alone.criterion_.objective.terms["ldam"].weight is None


def test_a_preset_takes_the_counts_of_fit() -> None:
    y = np.repeat(["a", "b", "c"], [60, 20, 8])
    X = np.random.default_rng(0).normal(size=(88, 4))
    model = LargeMarginClassifier(lm.preset("long_tail"), epochs=1).fit(X, y)
    assert model.criterion_.objective.terms["ldam"].class_counts == [60, 20, 8]
    again = clone(model).fit(X[20:], y[20:])  # another fit counts again
    assert again.criterion_.objective.terms["ldam"].class_counts == [40, 20, 8]
    own = lm.preset("long_tail", class_counts=[50, 4, 3])
    told = LargeMarginClassifier(own, epochs=1).fit(X, y).criterion_
    assert told.objective.terms["ldam"].class_counts == [50, 4, 3]
    with pytest.raises(lm.LargeMarginError, match=r"class_counts=torch\.bincount\(labels\)"):
        lm.attach(torch.nn.Sequential(torch.nn.Linear(4, 3)), lm.preset("long_tail"), schedule=())
