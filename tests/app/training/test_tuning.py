"""The search for settings: what it tries, keeps, stops, resumes, and never looks at."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="the search is optuna's")
pytest.importorskip("sklearn", reason="the data of these tests come with scikit-learn")

from app.cli.fake_training import FakeTraining

from largemargin import LargeMarginError
from largemargin.app.config import ObjectiveConfig, OptimizerConfig, RunConfig
from largemargin.app.data import Data, load_data
from largemargin.app.training.config_file import read_config
from largemargin.app.training.engine import Interrupted
from largemargin.app.training.tuning import Trial, _pruner, line, tune

CONFIG = RunConfig(objective=ObjectiveConfig("cosface"), epochs=4)


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(CONFIG.data)


def best_at_a_tenth(config: RunConfig) -> float:
    """The accuracy of a run that likes a learning rate of 0.1."""
    return 0.9 - 0.2 * abs(math.log10(config.optimizer.lr) + 1)


def search(folder: Path, data: Data, train: FakeTraining, **options: Any) -> Any:
    said: list[str] = []
    options.setdefault("trials", 8)
    config = options.pop("config", CONFIG)
    found = tune(
        config, folder=folder, data=data, train=train, progress=False, say=said.append, **options
    )
    assert len(said) == len({call[0].name for call in train.calls})
    return found


def test_finds_a_better_rate_and_writes_it_down(tmp_path: Path, data: Data) -> None:
    config = replace(CONFIG, name="digits", optimizer=OptimizerConfig(lr=0.002))
    found = search(tmp_path, data, FakeTraining(best_at_a_tenth), trials=15, config=config)
    assert found.best is not None
    assert 0.03 < found.best.optimizer.lr < 0.3
    assert found.trials[0].settings["optimizer.lr"] == 0.002  # as given, first
    assert read_config(tmp_path / "best.yaml") == found.best
    assert found.best.name == "digits"
    assert found.best.measure
    assert found.best.objective.settings.keys() == {"margin", "scale"}
    with open(tmp_path / "trials.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    values = [float(row["validation_accuracy"]) for row in rows if row["state"] == "complete"]
    assert max(values) == pytest.approx(found.best_trial.value)
    best = max(rows, key=lambda row: float(row["validation_accuracy"] or 0))
    assert f"best: trial {best['trial']}, " in str(found)  # its row, and its folder
    assert (tmp_path / "trials" / f"{int(best['trial']):04d}").is_dir()
    assert "as given (trial 0): validation" in str(found)
    assert rows[0]["trial"] == "0"


def test_test_images_are_taken_away(tmp_path: Path, data: Data) -> None:
    assert data.test is not None
    train = FakeTraining(best_at_a_tenth)
    search(tmp_path, data, train, trials=3)
    assert all(seen.test is None for seen in train.data)
    assert all(len(seen.validation) == len(data.validation or ()) for seen in train.data)
    assert not any(config.measure for config, _ in train.calls)


def test_bad_trials_are_stopped_early_and_count(tmp_path: Path, data: Data) -> None:
    train = FakeTraining(best_at_a_tenth)
    found = search(tmp_path, data, train, trials=15)
    stopped = [trial for trial in found.trials if trial.state == "pruned"]
    assert stopped
    assert all(trial.epochs < CONFIG.epochs for trial in stopped)
    assert len(found.finished) == 15
    everything = search(tmp_path / "all", data, FakeTraining(best_at_a_tenth), pruner="none")
    assert {trial.state for trial in everything.trials} == {"complete"}


def test_continues_and_counts_what_is_finished(tmp_path: Path, data: Data) -> None:
    first = search(tmp_path, data, FakeTraining(best_at_a_tenth), trials=4)
    train = FakeTraining(best_at_a_tenth)
    found = search(tmp_path, data, train, trials=7)
    assert len(train.calls) == 3
    assert found.trials[:4] == first.trials
    rates = [trial.settings["optimizer.lr"] for trial in found.trials]
    assert len(set(rates)) == len(rates)  # a new process does not draw the same again
    again = FakeTraining(best_at_a_tenth)
    search(tmp_path, data, again, trials=7)
    assert not again.calls


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("asked to stop")])
def test_an_interrupted_trial_does_not_count(
    tmp_path: Path, data: Data, stop: BaseException
) -> None:
    train = FakeTraining(best_at_a_tenth, stop_at=1, stop_with=stop)
    with pytest.raises(type(stop)):
        tune(CONFIG, folder=tmp_path, trials=2, data=data, train=train, say=lambda line: None)
    found = search(tmp_path, data, FakeTraining(best_at_a_tenth), trials=2)
    assert len(found.finished) == 2
    # The configuration as it was given has its turn again.
    assert found.finished[0].settings["optimizer.lr"] == CONFIG.optimizer.lr


def test_a_diverged_trial_counts_and_is_never_the_best(tmp_path: Path, data: Data) -> None:
    def accuracy(config: RunConfig) -> float:
        return math.nan if config.optimizer.lr > 0.05 else 0.5

    found = search(tmp_path, data, FakeTraining(accuracy), trials=10)
    states = [trial.state for trial in found.trials]
    assert "diverged" in states
    assert found.best is not None
    assert found.best.optimizer.lr <= 0.05
    only = search(tmp_path / "only", data, FakeTraining(lambda config: math.nan), trials=3)
    assert only.best is None
    assert not (tmp_path / "only" / "best.yaml").exists()
    assert "no best" in str(only)


def test_smaller_losses_are_better(tmp_path: Path, data: Data) -> None:
    config = RunConfig(select="loss", epochs=2)
    found = search(tmp_path, data, FakeTraining(best_at_a_tenth), config=config, pruner="none")
    values = [trial.value for trial in found.trials]
    assert found.best_trial.value == min(values)


@pytest.mark.parametrize(("select", "direction"), [("loss", "MINIMIZE"), ("accuracy", "MAXIMIZE")])
def test_a_study_knows_which_way_is_better(
    tmp_path: Path, data: Data, select: Any, direction: str
) -> None:
    """The sampler and the pruner go by that."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    config = RunConfig(select=select, epochs=1)
    search(tmp_path, data, FakeTraining(best_at_a_tenth), config=config, trials=1)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    assert optuna.load_study(study_name=None, storage=storage).direction.name == direction


def test_another_configuration_does_not_join_a_study(tmp_path: Path, data: Data) -> None:
    train = FakeTraining(best_at_a_tenth)
    search(tmp_path, data, train, trials=1)
    other = RunConfig(objective=ObjectiveConfig("cosface"), epochs=5)
    with pytest.raises(LargeMarginError, match="epochs is 4 there and 5 here"):
        search(tmp_path, data, train, config=other)
    with pytest.raises(LargeMarginError, match=r"optimizer\.lr is"):
        search(tmp_path, data, train, space={"optimizer.lr": [0.1, 0.2]})
    second = FakeTraining(best_at_a_tenth)
    search(tmp_path, data, second, config=other, study="five epochs", trials=1)
    assert len(second.calls) == 1


@pytest.mark.parametrize(("epochs", "least"), [(1, 1), (17, 1), (18, 2), (90, 10)])
def test_no_trial_is_stopped_before_a_ninth_of_its_epochs(
    monkeypatch: pytest.MonkeyPatch, epochs: int, least: int
) -> None:
    import optuna

    asked: list[dict[str, int]] = []
    monkeypatch.setattr(
        optuna.pruners, "SuccessiveHalvingPruner", lambda **settings: asked.append(settings)
    )
    _pruner(optuna, "asha", epochs)
    assert asked == [{"min_resource": least}]


def test_a_trial_in_a_line() -> None:
    trial = Trial(3, "complete", 0.91234, 1, 2.0, {"optimizer.lr": 0.01, "objective.margin": None})
    assert line(trial, "accuracy") == "accuracy 91.23 % after 1 epoch (lr 0.01, margin none)"
    assert line(trial, "loss").startswith("loss 0.9123 after 1 epoch (")
    diverged = replace(trial, state="diverged", value=None, epochs=2)
    assert line(diverged, "loss").startswith("none after 2 epochs, diverged (")


@pytest.mark.slow
def test_a_database_takes_the_place_of_the_file(tmp_path: Path, data: Data) -> None:
    pytest.importorskip("sqlalchemy")
    storage = f"sqlite:///{tmp_path}/studies.db"
    here, there = tmp_path / "here", tmp_path / "there"
    search(here, data, FakeTraining(best_at_a_tenth), trials=2, storage=storage)
    train = FakeTraining(best_at_a_tenth)
    found = search(there, data, train, trials=3, storage=storage)
    assert len(train.calls) == 1
    assert len(found.trials) == 3
    assert not (here / "study.log").exists()


def test_without_validation_images_there_is_nothing_to_judge_by(tmp_path: Path, data: Data) -> None:
    with pytest.raises(LargeMarginError, match=r"data\.validation"):
        search(tmp_path, replace(data, validation=None), FakeTraining(best_at_a_tenth))


def test_wrong_settings_of_the_run_are_not_taken_for_divergence(tmp_path: Path, data: Data) -> None:
    def refuse(config: RunConfig, **options: Any) -> Any:
        raise LargeMarginError("batch_size must be a finite number >= 2")

    with pytest.raises(LargeMarginError, match="batch_size"):
        tune(CONFIG, folder=tmp_path, data=data, train=refuse, say=lambda line: None)


@pytest.mark.slow
def test_checkpoints_of_trials_do_not_pile_up(tmp_path: Path, data: Data) -> None:
    config = RunConfig(epochs=1, graph="off", device="cpu", gradients_every=0)
    found = tune(
        config, folder=tmp_path, trials=2, data=data, progress=False, say=lambda line: None
    )
    assert len(found.finished) == 2
    assert (tmp_path / "trials" / "0000" / "result.json").exists()
    assert not list(tmp_path.glob("trials/*/checkpoints"))


def test_what_is_no_trial_is_left_alone(tmp_path: Path, data: Data) -> None:
    """A trial whose study is gone is written anew; a folder of somebody else is not touched."""
    old, foreign = tmp_path / "trials" / "0000", tmp_path / "trials" / "0001"
    for folder, name in ((old, "config.yaml"), (foreign, "checkpoints/mine.txt")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("")
    with pytest.raises(LargeMarginError, match=r"0001 exists already and is not empty"):
        search(tmp_path, data, FakeTraining(best_at_a_tenth), trials=3)
    assert not (old / "config.yaml").exists() or (old / "config.yaml").read_text()
    assert (foreign / "checkpoints" / "mine.txt").is_file()
