"""Presets say what they were measured on, and warn of data that contradicts it."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import largemargin as lm
from largemargin.app.config import DataConfig, ModelConfig, NoiseConfig, ObjectiveConfig, RunConfig
from largemargin.app.training.presets import FAR, SHOWN, TOO_MANY, UNEVEN
from largemargin.errors import MarginWarning
from largemargin.integrations.scikit_learn import LargeMarginClassifier

EVEN = [100] * 10


def said(name: str, *, classes: int = 10, dim: int = 512, counts: list[int] = EVEN) -> str:
    return " ".join(lm.preset(name).contradictions(classes, dim, counts))


def test_a_preset_prints_what_it_was_shown_on() -> None:
    told = str(lm.preset("few_labels"))
    assert "shown on    10 classes (equal), 7 to 250 images a class, from scratch" in told
    told = str(lm.preset("long_tail"))
    assert "shown on    10 classes (ratio 100), 45 to 4500 images a class, from scratch" in told
    for name in ("label_noise", "corruption"):
        assert "shown on    10 classes (equal), 1000 images a class" in str(lm.preset(name))
    assert "shown on    770 classes (equal), 20 images a class" in str(lm.preset("embedding"))


@pytest.mark.parametrize("name", ["few_labels", "label_noise", "corruption"])
def test_nothing_is_said_of_data_like_its_own(name: str) -> None:
    assert said(name) == ""
    assert said(name, counts=[10 * (UNEVEN - 1), *[10] * 9]) == ""


@pytest.mark.parametrize("name", ["few_labels", "label_noise", "corruption", "embedding"])
def test_imbalance(name: str) -> None:
    told = said(name, counts=[10 * UNEVEN, *[10] * 9])
    assert f"the smallest class has 10 images, the largest {10 * UNEVEN}" in told
    assert "Use lm.preset('long_tail', class_counts=...)" in told
    assert ("16 points behind softmax" in told) == (name == "few_labels")


def test_other_contradictions() -> None:
    assert "no tail" in said("long_tail")
    assert said("long_tail", counts=[100, 50, 1]) == ""
    assert "With 1000 no margin method" in said("few_labels", counts=[TOO_MANY] * 10)
    assert said("few_labels", counts=[TOO_MANY - 1] * 10) == ""
    assert "51 classes are far" in said("few_labels", classes=10 * FAR + 1)
    assert said("few_labels", classes=10 * FAR) == ""
    assert "8 features leave 10 classes no room" in said("few_labels", dim=8)
    assert said("few_labels", dim=9) == ""
    pretrained = lm.preset("few_labels").contradictions(10, 512, pretrained=True)
    assert "docs/how-to/fine_tuning.md" in pretrained[0]


@pytest.mark.parametrize("name", ["fine_tuning", "frozen_features"])
def test_what_was_not_measured_says_so(name: str) -> None:
    chosen = lm.preset(name)
    assert chosen.status == "not measured"
    assert chosen.objective.name == "cross_entropy"
    assert "not measured" in str(chosen)
    assert "docs/how-to/" in chosen.doubts[0]
    assert chosen.contradictions(1000, 2, [1, 1000]) == []
    terms = lm.attach(nn.Sequential(nn.Linear(4, 3)), chosen).objective.terms
    assert [type(each).__name__ for each in terms.values()] == ["CrossEntropy"]


def test_attach_warns_of_the_classes() -> None:
    model = nn.Sequential(nn.Linear(4, 200), nn.Linear(200, 100))
    with pytest.warns(MarginWarning, match="Your 100 classes are far"):
        lm.attach(model, lm.preset("few_labels"))


def test_attach_alone_makes_no_noisy_images() -> None:
    corruption = lm.preset("corruption")
    assert corruption.noise.use == "clean_and_noisy"
    pairs = replace(
        corruption, objective=ObjectiveConfig("cross_entropy + stability"), noise=NoiseConfig()
    )
    for chosen in (corruption, pairs):
        said = rf"noisy images too \(noise\.use {chosen.noise.use}, level"
        with pytest.raises(lm.LargeMarginError, match=said):
            lm.attach(nn.Linear(16, 10), chosen)


def test_scikit_learn_warns_of_counts_and_frozen_features() -> None:
    y = np.repeat([0, 1, 2], [60, 20, 8])
    X = np.random.default_rng(0).normal(size=(88, 4))
    with pytest.warns(MarginWarning, match="Yours is imbalanced"):
        LargeMarginClassifier(lm.preset("few_labels"), epochs=1).fit(X, y)
    even = np.arange(88) % 3
    with pytest.warns(MarginWarning, match="features are frozen"):
        LargeMarginClassifier(lm.preset("few_labels"), hidden_sizes=(), epochs=1).fit(X, even)


def run(folder: Path, **changes: object) -> RunConfig:
    data = DataConfig("digits", fraction=0.2)
    base = RunConfig(data=data, model=ModelConfig("mlp"), epochs=1, measure=False, out=str(folder))
    return replace(lm.preset("few_labels").config(base), **changes)  # type: ignore[arg-type]


def test_training_warns_of_an_imbalanced_data_set(tmp_path: Path) -> None:
    long_tail = DataConfig("digits", imbalance="exp", imbalance_ratio=20.0)
    with pytest.warns(MarginWarning, match="Yours is imbalanced"):
        lm.train(run(tmp_path, data=long_tail))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.train(run(tmp_path))


def test_every_measured_preset_says_where() -> None:
    from largemargin.app.training.files import read_json
    from largemargin.app.training.presets import FILE

    assert SHOWN.keys() == read_json(FILE).keys()


@pytest.mark.parametrize("counts", ["abc", [3], [-1, 3], [2.5, 3], [None, 3], np.nan, [np.nan, 3]])
def test_counts_that_are_none(counts: object) -> None:
    for name in ("few_labels", "long_tail", "fine_tuning"):
        with pytest.raises(lm.LargeMarginError, match="class_counts must be how many training"):
            lm.preset(name, class_counts=counts)  # type: ignore[arg-type]


def test_counts_of_another_head_are_refused() -> None:
    with pytest.raises(lm.LargeMarginError, match="with 2 class_counts, but the head has 10"):
        lm.attach(nn.Linear(16, 10), lm.preset("few_labels", class_counts=[100, 50]))


def test_attach_can_be_silent(recwarn: pytest.WarningsRecorder) -> None:
    lm.attach(nn.Sequential(nn.Linear(128, 100)), lm.preset("few_labels"), warn=False)
    assert not recwarn.list
    with pytest.warns(MarginWarning, match="Your 100 classes are far from that"):
        lm.attach(nn.Sequential(nn.Linear(128, 100)), lm.preset("few_labels"))
