"""Comparisons: equal conditions, equal budgets, verdicts that know noise, and resuming."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the paired tests are scipy's")
pytest.importorskip("sklearn", reason="the data of these tests come with scikit-learn")

from app.cli.fake_training import FakeTraining
from app.data.pictures import class_folders

from largemargin import LargeMarginError
from largemargin.app.config import DataConfig, RunConfig
from largemargin.app.data import Data, load_data
from largemargin.app.training.comparison import (
    Comparison,
    Method,
    checked_plan,
    compare,
    read_methods,
)
from largemargin.app.training.comparison_result import LEVEL, verdict_text

CONFIG = RunConfig(epochs=2)
METHODS = read_methods("cosface,kobayashi")
GAINS = {"cross_entropy": 0.0, "cosface": 0.03, "kobayashi": 0.0}


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(CONFIG.data)


def learned(config: RunConfig) -> float:
    """CosFace is better by 3 points, Kobayashi is not; every seed has its own luck."""
    luck = (config.seed * 37 % 11) / 1000
    own = (config.seed * 17 + len(config.objective.name)) % 7 / 1000
    return 0.9 + luck + own + GAINS[config.objective.name.split(" ")[0]]


def run(folder: Path, data: Data, train: FakeTraining | None = None, **options: Any) -> Comparison:
    options.setdefault("methods", METHODS)
    options.setdefault("seeds", range(6))
    return compare(
        options.pop("config", CONFIG),
        options.pop("methods"),
        folder=folder,
        data=data,
        train=train or FakeTraining(learned),
        progress=False,
        say=lambda line: None,
        **options,
    )


def test_tells_a_difference_from_noise(tmp_path: Path, data: Data) -> None:
    found = run(tmp_path, data)
    softmax, cosface, kobayashi = found.methods
    assert (softmax.method, softmax.verdict, softmax.test) == ("cross_entropy", "baseline", None)
    assert cosface.verdict == "better"
    assert cosface.test is not None
    assert cosface.test.difference == pytest.approx(0.03, abs=0.003)
    assert kobayashi.verdict == "noise"
    assert cosface.corrected is not None
    assert cosface.corrected >= cosface.test.t_test
    text = str(found)
    assert "mean over 6 seeds; one of the 540 images is 0.19 points" in text
    assert "cosface is better than softmax by 2.9" in text
    assert "kobayashi: no clear difference to softmax (p " in text
    assert kobayashi.test is not None
    reach = 100 * max(-kobayashi.test.low, kobayashi.test.high)
    assert f"); 6 seeds do not exclude one of up to {reach:.2f} points" in text
    assert text.splitlines()[4].endswith("no clear difference")
    assert "noise" not in text
    assert Comparison.load(tmp_path / "compare.json").methods[2].verdict == "noise"  # as ever


def test_what_the_correction_takes_back_is_not_called_noise(tmp_path: Path, data: Data) -> None:
    """p 0.03 of one of two methods is 0.06 after the correction, beside an interval without 0."""
    seeds = [0, 1]

    def accuracy(config: RunConfig) -> float:
        gain = {"cosface": (0.4, 0.445), "kobayashi": (0.01, -0.02)}
        return 0.4 + gain.get(config.objective.name, (0.0, 0.0))[config.seed]

    found = run(tmp_path, data, FakeTraining(accuracy), seeds=seeds)
    _, cosface, kobayashi = found.methods
    assert cosface.test is not None
    assert cosface.corrected is not None
    assert cosface.test.low > 0
    assert cosface.test.t_test < 0.05 < cosface.corrected
    assert (cosface.verdict, kobayashi.verdict) == ("noise", "noise")  # as it is stored
    text = str(found)
    assert "cosface: +42.25 points to softmax are not shown after the correction" in text
    assert "cosface: no clear difference" not in text
    assert "kobayashi: no clear difference to softmax" in text
    assert text.splitlines()[3].endswith("not shown")
    assert verdict_text(replace(cosface, corrected=LEVEL)) == "not shown"


def test_files_hold_the_same(tmp_path: Path, data: Data) -> None:
    found = run(tmp_path, data)
    assert Comparison.load(tmp_path / "compare.json") == found
    assert (tmp_path / "table.txt").read_text() == f"{found}\n"
    stored = json.loads((tmp_path / "compare.json").read_text())
    tuned = [(method["trials"], method["tuning_seconds"]) for method in stored["methods"]]
    assert tuned == [(0, 0.0)] * 3
    assert data.test is not None
    assert found.images == len(data.test)
    assert all(len(method["accuracies"]) == 6 for method in stored["methods"])


def test_everything_but_the_objective_is_equal(tmp_path: Path, data: Data) -> None:
    train = FakeTraining(learned)
    run(tmp_path, data, train, seeds=[0, 5])
    seen = [replace(config, objective=CONFIG.objective, name="") for config, _ in train.calls]
    assert [config.seed for config in seen] == [0, 0, 0, 5, 5, 5]
    assert len({repr(replace(config, seed=0)) for config in seen}) == 1
    assert {config.out for config in seen} == {str(tmp_path / "runs")}
    assert all(given is data for given in train.data)


def test_a_killed_comparison_continues(tmp_path: Path, data: Data) -> None:
    killed = FakeTraining(learned, stop_at=7)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, data, killed)
    train = FakeTraining(learned)
    found = run(tmp_path, data, train)
    assert len(train.calls) == 3 * 6 - 3  # three runs were finished, the fourth is continued
    assert [resumed for _, resumed in train.calls].count(True) == 1
    assert found == run(tmp_path, data, FakeTraining(learned))
    other = run(tmp_path / "uninterrupted", data)
    assert [m.accuracies for m in found.methods] == [m.accuracies for m in other.methods]


def test_a_run_killed_before_it_began_is_begun_again(tmp_path: Path, data: Data) -> None:
    folder = tmp_path / "runs" / "cosface-seed0"
    folder.mkdir(parents=True)
    (folder / ".draft-0123abcd-config.yaml").write_text("epo")
    (folder / "notes.txt").write_text("not of the run")
    train = FakeTraining(learned)
    run(tmp_path, data, train, seeds=[0])
    assert not any(resumed for _, resumed in train.calls)
    assert not list(folder.glob(".draft*"))
    assert (folder / "notes.txt").read_text() == "not of the run"


def test_seeds_may_be_added_but_nothing_else_changes(tmp_path: Path, data: Data) -> None:
    run(tmp_path, data, seeds=[0, 1])
    train = FakeTraining(learned)
    found = run(tmp_path, data, train, seeds=[0, 1, 2])
    assert len(train.calls) == 3
    assert found.seeds == (0, 1, 2)
    turned = FakeTraining(learned)
    assert run(tmp_path, data, turned, seeds=[2, 1, 0]).seeds == (2, 1, 0)
    assert not turned.calls
    run(tmp_path, data, seeds=[0, 1, 2])
    with pytest.raises(LargeMarginError, match=r"seeds is \[0, 1, 2\] there and \[0\] here"):
        run(tmp_path, data, seeds=[0])
    with pytest.raises(LargeMarginError, match="epochs is 2 there and 3 here"):
        run(tmp_path, data, config=RunConfig(epochs=3), seeds=[0, 1, 2])
    with pytest.raises(LargeMarginError, match="methods is"):
        run(tmp_path, data, methods=METHODS[:2], seeds=[0, 1, 2])
    with pytest.raises(LargeMarginError, match="trials is 0 there and 2 here"):
        run(tmp_path, data, trials=2, seeds=[0, 1, 2])


def test_unequal_budgets_are_refused(tmp_path: Path, data: Data) -> None:
    methods = [METHODS[0], Method("cosface", trials=50)]
    with pytest.raises(LargeMarginError, match=r"cosface asks for 50 tuning trials, but .* has 5"):
        run(tmp_path, data, methods=methods, trials=5)


def test_unequal_budgets_of_earlier_searches_are_refused(tmp_path: Path, data: Data) -> None:
    pytest.importorskip("optuna")
    from largemargin.app.training.tuning import tune

    tune(
        METHODS[1].config(CONFIG),
        folder=tmp_path / "tuning" / "cosface",
        trials=4,
        data=data,
        train=FakeTraining(learned),
        say=lambda line: None,
    )
    with pytest.raises(LargeMarginError, match=r"unequal budgets .*cosface 4, kobayashi 2"):
        run(tmp_path, data, trials=2, seeds=[0])


def test_methods_are_tuned_alike_on_validation_images(tmp_path: Path, data: Data) -> None:
    pytest.importorskip("optuna")
    train = FakeTraining(learned)
    began = time.perf_counter()
    found = run(tmp_path, data, train, trials=3, seeds=[4, 5])
    took = time.perf_counter() - began
    assert [method.trials for method in found.methods] == [3, 3, 3]
    assert all(method.tuning_seconds > 0 for method in found.methods)
    assert sum(method.tuning_seconds for method in found.methods) < took
    tested = [(config, seen) for (config, _), seen in zip(train.calls, train.data, strict=True)]
    trials = [(config, seen) for config, seen in tested if config.name.startswith("trial-")]
    finals = [(config, seen) for config, seen in tested if not config.name.startswith("trial-")]
    assert len(trials) == 9
    assert len(finals) == 6
    assert all(seen.test is None for _, seen in trials)
    assert {config.seed for config, _ in trials} == {4}
    assert all(seen.test is not None for _, seen in finals)
    by_method = {config.name.split("-seed")[0]: config.optimizer.lr for config, _ in finals}
    assert len(by_method) == 3
    again = FakeTraining(learned)
    assert run(tmp_path, data, again, trials=3, seeds=[4, 5]) == found
    assert not again.calls


def test_without_test_images(tmp_path: Path, data: Data) -> None:
    without = replace(data, test=None)
    found = run(tmp_path / "validation", without)
    assert found.split == "validation"
    assert "There are no test images" in str(found)
    with pytest.raises(LargeMarginError, match="used up by tuning"):
        run(tmp_path / "tuned", without, trials=2)  # of data that was loaded by the caller
    with pytest.raises(LargeMarginError, match="no test images"):
        run(tmp_path / "none", replace(without, validation=None))


def test_a_fifth_of_the_images_is_held_out_from_tuning(tmp_path: Path) -> None:
    """Of data without test images, unless another share is asked for."""
    photos = DataConfig("folder", str(class_folders(tmp_path, ("a", "b"), 10)))
    for share, images in ((0.0, 4), (0.3, 6)):
        config = RunConfig(data=replace(photos, test=share))
        configs, split, loaded = checked_plan(config, METHODS, seeds=[0], trials=2, space=None)
        assert {each.data.test for each in configs} == {share or 0.2}
        assert split == "test"
        assert loaded.test is not None
        assert len(loaded.test) == images


def test_a_method_that_cannot_be_trained_is_named(tmp_path: Path, data: Data) -> None:
    def accuracy(config: RunConfig) -> float:
        return math.nan if config.objective.name == "kobayashi" else 0.9

    with pytest.raises(LargeMarginError, match="kobayashi, seed 0: 99 steps in a row"):
        run(tmp_path, data, FakeTraining(accuracy))


def test_one_seed_gives_no_verdict(tmp_path: Path, data: Data) -> None:
    found = run(tmp_path, data, seeds=[0])
    assert [method.verdict for method in found.methods[1:]] == ["one seed: no verdict"] * 2
    assert "One seed cannot tell a difference from luck" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": []}, "seeds must be different numbers"),
        ({"seeds": [1, 1]}, "seeds must be different numbers"),
        ({"trials": -1}, "trials"),
        ({"space": {"objective.cosfase.margin": [0, 1]}}, "which no method has"),
        ({"methods": METHODS[1:]}, "must be softmax"),
        ({"methods": METHODS[:1]}, "at least two methods"),
    ],
)
def test_wrong_plans_are_refused(
    tmp_path: Path, data: Data, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LargeMarginError, match=message):
        run(tmp_path, data, **options)
    assert not (tmp_path / "plan.yaml").exists()
