"""Runs handed out as they end."""

import inspect
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from largemargin import LargeMarginError
from largemargin.app.data import DataConfig, load_data
from largemargin.app.training import (
    ObjectiveConfig,
    OptimizerConfig,
    Run,
    RunConfig,
    parallel_runs,
    train_many,
)
from largemargin.app.training.parallel_runs import TrainingJob, iter_finished

pytest.importorskip("sklearn", reason="digits are scikit-learn's")

CONFIG = RunConfig(
    data=DataConfig(fraction=0.2), epochs=1, measure=False, device="cpu", geometry_samples=0
)
WILD = replace(
    CONFIG, max_bad_steps=0, optimizer=OptimizerConfig(lr=1e30, clip_norm=None, warmup_epochs=0)
)


def test_one_that_fails_ends_alone(tmp_path: Path) -> None:
    data = load_data(CONFIG.data)
    wrong = replace(CONFIG, objective=ObjectiveConfig("nothing"))
    configs = [WILD, CONFIG, wrong, replace(CONFIG, seed=1)]
    jobs = [
        TrainingJob(each, tmp_path / str(n), data=lambda: data) for n, each in enumerate(configs)
    ]
    began = time.perf_counter()
    ended = list(iter_finished(jobs))
    assert [each.job for each in ended] == jobs
    assert [each.run is None for each in ended] == [True, False, True, False]
    assert "not finite" in str(ended[0].error)
    assert "nothing" in str(ended[2].error)
    assert [each.divergence is None for each in ended] == [False, True, True, True]
    assert all(each.trainer is None for each in ended)  # each was there until the next came
    assert ended[1].error is None
    assert isinstance(ended[1].run, Run)
    assert ended[1].run.finished
    assert 0 < ended[1].seconds <= time.perf_counter() - began
    with pytest.raises(LargeMarginError, match="nothing"):
        train_many([wrong], folders=[tmp_path / "again"], data=data, progress=False)


def test_data_are_loaded_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where they are given."""
    loads: list[DataConfig] = []
    data = load_data(CONFIG.data)
    monkeypatch.setattr(parallel_runs, "load_data", lambda config: loads.append(config) or data)
    wrong = replace(CONFIG, objective=ObjectiveConfig("nothing"))
    for configs, given, loaded in (([wrong], data, []), ([CONFIG, wrong], None, [CONFIG.data])):
        folders = [tmp_path / f"{len(configs)}-{number}" for number in range(len(configs))]
        with pytest.raises(LargeMarginError, match="nothing"):
            train_many(configs, folders=folders, data=given, progress=False)
        assert loads == loaded


def test_three_runs_share_a_gpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []
    seen: list[int] = []

    class Lane:
        """As of a run on a GPU that takes three steps."""

        def __init__(self, job: int) -> None:
            self.job, self.stream, self.left = job, object(), 3

        def begin(self, progress: bool) -> None:
            under_way.append(self.job)

        def advance(self) -> bool:
            self.left -= 1
            seen.append(len(under_way))
            return self.left >= 0

        def outcome(self) -> Any:
            return SimpleNamespace(job=self.job, trainer=None)

        def close(self) -> None:
            under_way.remove(self.job)

    monkeypatch.setattr(parallel_runs, "_Lane", Lane)
    for most, asked in ((3, {}), (2, {"side_by_side": 2})):
        seen.clear()
        jobs: Any = range(7)
        assert sorted(each.job for each in iter_finished(jobs, **asked)) == [*range(7)]
        assert max(seen) == most
    assert inspect.signature(train_many).parameters["side_by_side"].default == 3


def test_a_function_gives_jobs_and_sees_what_came_before(tmp_path: Path) -> None:
    """As the benchmark does, whose next run depends on the outcomes of others."""
    steps: list[int] = []

    def next_job() -> TrainingJob | None:
        number = len(steps)
        return (
            TrainingJob(replace(CONFIG, seed=number), tmp_path / str(number))
            if number < 2
            else None
        )

    for outcome in iter_finished(next_job):
        assert outcome.trainer is not None
        steps.append(outcome.trainer.done)
    assert len(steps) == 2
    seen: list[int] = []
    job = TrainingJob(CONFIG, tmp_path / "3", before_step=lambda trainer: seen.append(trainer.done))
    (outcome,) = iter_finished([job])
    assert outcome.error is None
    assert seen == list(range(steps[0] + 1))  # also before it is found that there is no other step


def test_jobs_are_asked_for_one_by_one_until_it_stops(tmp_path: Path) -> None:
    asked: list[int] = []

    def jobs() -> Iterator[TrainingJob]:
        for number in range(5):
            asked.append(number)
            yield TrainingJob(replace(CONFIG, seed=number), tmp_path / str(number))

    ended = []
    for each in iter_finished(jobs(), stop=lambda: len(ended) == 2):
        ended.append(each)
    assert len(ended) == 2
    assert asked == [0, 1]
    # What was under way can be gone on with; a finished run is handed out as it is.
    (again,) = iter_finished([TrainingJob(CONFIG, tmp_path / "0", resume=True)])
    assert again.run is not None
    assert again.run.result == ended[0].run.result
