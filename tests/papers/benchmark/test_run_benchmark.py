"""The driver: halving, choice, recording, stopping and going on, on the digits."""

import json
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the protocol is a YAML file")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

from largemargin_papers.benchmark import Protocol, next_jobs, read_records, run_situations
from largemargin_papers.benchmark.halving import (
    chosen_method,
    final_jobs,
    finalist,
    is_complete,
    job,
    rung_jobs,
    trial_scores,
)
from largemargin_papers.benchmark.images import Images
from largemargin_papers.benchmark.records import merge
from largemargin_papers.record_lines import append_record
from papers.benchmark.tiny import TINY, tiny_protocol

from largemargin import LargeMarginError
from largemargin.app.training.parallel_runs import TrainingOutcome
from largemargin.app.training.run_scores import Diverged

NAME = "digits_few"


def fake_records(protocol: Protocol, scores: dict[str, list[float | None]]) -> dict[str, Any]:
    """Records as if every run had been made; ``scores`` are those of a method's trials."""
    records: dict[str, Any] = {}
    situation = protocol.situations[NAME]
    while jobs := list(next_jobs(protocol, situation, records)):
        for each in jobs:
            records[each.key] = {"score": scores[each.method][each.trial], "method": each.method}
    return records


def steady(value: float) -> list[float | None]:
    return [value, value, value]


def test_the_best_trials_go_on_and_the_first_of_equals(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    situation = protocol.situations[NAME]
    scores = {
        "softmax": [0.5, 0.7, 0.6],
        "label_smoothing": [0.5, 0.5, 0.5],
        "cosface": [None, 0.1, None],
        "kobayashi": [0.2, 0.1, 0.3],
    }
    records = fake_records(protocol, scores)
    kept = {
        name: [each.trial for each in rung_jobs(protocol, situation, name, records, 1) or []]
        for name in situation.methods
    }
    assert kept == {"softmax": [1], "label_smoothing": [0], "cosface": [1], "kobayashi": [2]}
    assert is_complete(protocol, situation, records)


def test_a_score_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    """NaN would be neither above nor below another, and its place in an order by chance."""
    protocol = tiny_protocol(tmp_path)
    situation = protocol.situations[NAME]
    methods = {name: steady(0.5) for name in situation.methods}
    records = fake_records(protocol, {**methods, "softmax": [math.nan, 0.1, math.nan]})
    first = rung_jobs(protocol, situation, "softmax", records, 0) or []
    assert trial_scores(first, records) == {0: -math.inf, 1: 0.1, 2: -math.inf}
    assert finalist(protocol, situation, "softmax", records) == (1, 0.1)


def test_runs_that_no_test_is_about_are_made_when_asked_for(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    situation = protocol.situations[NAME]
    records = fake_records(protocol, {name: steady(0.5) for name in situation.methods})
    assert list(next_jobs(protocol, situation, records)) == []
    others = list(next_jobs(protocol, situation, records, everyone=True))
    assert {each.method for each in others} == {"kobayashi"}
    assert [each.seed for each in others] == list(protocol.seeds)


def test_a_job_is_a_run_of_its_epochs_seed_and_name(tmp_path: Path) -> None:
    """With one checkpoint, at its end; a small share of few epochs is one."""
    short_rung = {**TINY["rungs"][0], "epochs": 0.1}
    protocol = tiny_protocol(tmp_path, rungs=[short_rung, TINY["rungs"][1]])
    situation = protocol.situations[NAME]
    short, long = (job(protocol, situation, "cosface", stage, 1, 7) for stage in (0, None))
    assert (short.epochs, short.stage, short.split) == (1, "rung1", "validation")
    assert (long.epochs, long.stage, long.split) == (2, "final", "test")
    found = long.config
    assert (found.epochs, found.checkpoint_every, found.seed, found.name) == (2, 2, 7, "cosface")


def test_a_margin_method_is_chosen_on_validation_scores_and_never_a_baseline(
    tmp_path: Path,
) -> None:
    protocol = tiny_protocol(tmp_path)
    situation = protocol.situations[NAME]
    for cosface, kobayashi, expected in (
        (0.4, 0.3, "cosface"),
        (0.3, 0.4, "kobayashi"),
        (0.3, 0.3, "cosface"),
    ):
        scores = {
            "softmax": steady(0.9),
            "label_smoothing": steady(0.95),
            "cosface": steady(cosface),
            "kobayashi": steady(kobayashi),
        }
        records = fake_records(protocol, scores)
        assert chosen_method(protocol, situation, records) == expected
        last = final_jobs(protocol, situation, records)
        assert last is not None
        assert {each.method for each in last} == {"softmax", "label_smoothing", expected}
        assert {each.split for each in last} == {"test"}


def test_nothing_is_tested_before_all_is_tuned(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    situation = protocol.situations[NAME]
    records = fake_records(protocol, {name: steady(0.5) for name in situation.methods})
    tuning = {key: each for key, each in records.items() if "/final/" not in key}
    missing = next(key for key in tuning if "/kobayashi/rung2/" in key)
    del tuning[missing]
    assert final_jobs(protocol, situation, tuning) is None
    assert [each.key for each in next_jobs(protocol, situation, tuning)] == [missing]
    assert chosen_method(protocol, situation, tuning) is None


def test_several_seeds_of_the_last_rung_are_averaged(tmp_path: Path) -> None:
    situation = {**TINY["situations"][NAME], "choice_seeds": 2}
    protocol = tiny_protocol(tmp_path, situations={NAME: situation})
    records = fake_records(protocol, {name: steady(0.5) for name in situation["methods"]})
    for key, each in records.items():
        if "/rung2/" in key:
            high = {"cosface": (0.6, 0.2), "kobayashi": (0.45, 0.46)}.get(
                each["method"], (0.5, 0.5)
            )
            each["score"] = high[key.endswith("seed103")]
    assert chosen_method(protocol, protocol.situations[NAME], records) == "kobayashi"


def test_validation_and_test_images_stay_out_of_training(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    images, situation = Images(), protocol.situations[NAME]
    task = images.task(situation, 101, "validation")
    assert task.data.validation is None
    assert task.data.test is None
    assert len(task.data.train) == 100
    assert task.data.train.labels.bincount().tolist() == [10] * 10
    assert not set(task.data.train.ids) & set(task.judged.ids)
    other = images.task(situation, 102, "test")
    assert set(other.data.train.ids) != set(task.data.train.ids)
    assert {each.split("/")[0] for each in other.judged.ids} == {"test"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Protocol, dict[str, Any]]:
    """A benchmark that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    protocol = tiny_protocol(folder)
    done = run_situations(protocol, [NAME], out=folder, device="cpu", say=lambda line: None)
    assert done == {NAME: True}
    return protocol, read_records([folder / f"{NAME}.jsonl"])


def test_records_say_what_was_run(whole: tuple[Protocol, dict[str, Any]]) -> None:
    protocol, records = whole
    assert len(records) == 22
    for key, each in records.items():
        assert each["status"] == "finished"
        assert 0 <= each["score"] <= 1
        assert each["judged_on"] == ("test" if "/final/" in key else "validation")
        assert ("rejection_by_margin" in each) == ("/final/" in key)
        assert each["device"].startswith("cpu")
    assert list(next_jobs(protocol, protocol.situations[NAME], records)) == []


def test_interrupted_and_continued_equals_uninterrupted(
    whole: tuple[Protocol, dict[str, Any]], tmp_path: Path
) -> None:
    protocol, expected = whole
    file = tmp_path / f"{NAME}.jsonl"

    class Killed(Exception):
        pass

    def stop_after(count: int) -> Any:
        left = iter(range(count))

        def say(line: str) -> None:
            if next(left, None) is None:
                raise Killed

        return say

    for count in (5, 9):
        with pytest.raises(Killed):
            run_situations(protocol, [NAME], out=tmp_path, device="cpu", say=stop_after(count))
        with open(file, "a") as handle:
            handle.write('{"key": "half a li')  # what a killed process leaves
    assert run_situations(protocol, [NAME], out=tmp_path, device="cpu", say=lambda line: None)[NAME]
    found = read_records([file])
    assert found.keys() == expected.keys()
    assert {key: each["score"] for key, each in found.items()} == {
        key: each["score"] for key, each in expected.items()
    }


def test_time_is_up(whole: tuple[Protocol, dict[str, Any]], tmp_path: Path) -> None:
    protocol, _ = whole
    hours = iter(range(0, 10**6, 3600))
    said: list[str] = []
    done = run_situations(
        protocol,
        [NAME],
        out=tmp_path,
        minutes=9,
        device="cpu",
        say=said.append,
        clock=lambda: next(hours),
    )
    assert done == {NAME: False}
    assert said == []


def test_known_lines_are_read_and_new_ones_go_elsewhere(
    whole: tuple[Protocol, dict[str, Any]], tmp_path: Path
) -> None:
    protocol, records = whole
    known, out = tmp_path / "known", tmp_path / "out"
    *most, last = records.values()
    for each in most:
        append_record(known / f"{NAME}.jsonl", each)
    done = run_situations(
        protocol, [NAME], out=out, known=[known], device="cpu", say=lambda line: None
    )
    assert done[NAME]
    assert list(read_records([out / f"{NAME}.jsonl"])) == [last["key"]]
    assert merge(out / f"{NAME}.jsonl", known / f"{NAME}.jsonl") == 1
    assert merge(out / f"{NAME}.jsonl", known / f"{NAME}.jsonl") == 0
    assert read_records([known / f"{NAME}.jsonl"]).keys() == records.keys()


def test_a_run_that_diverges_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {**TINY["methods"]}
    situation = {**TINY["situations"][NAME], "epochs": 60}
    run = {**TINY["run"], "max_bad_steps": 1, "optimizer": {"lr": 1e18, "clip_norm": None}}
    protocol = tiny_protocol(tmp_path, run=run, methods=methods, situations={NAME: situation})
    first: list[str] = []

    def only_first(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return (each for each in list(next_jobs(*args, **kwargs))[:1] if not first)

    monkeypatch.setattr(
        import_module("largemargin_papers.benchmark.run_benchmark"), "next_jobs", only_first
    )
    run_situations(protocol, [NAME], out=tmp_path, device="cpu", say=first.append)
    (record,) = read_records([tmp_path / f"{NAME}.jsonl"]).values()
    assert (record["status"], record["score"]) == ("diverged", None)
    assert "diverged" in first[0]


def test_a_run_that_cannot_be_made_is_no_result(tmp_path: Path) -> None:
    methods = {**TINY["methods"], "cosface": {"objective": "robust_discriminative", "margin": True}}
    protocol = tiny_protocol(tmp_path, methods=methods)
    said: list[str] = []
    assert run_situations(protocol, [NAME], out=tmp_path, device="cpu", say=said.append) == {
        NAME: False
    }
    failed = [line for line in said if "FAILED" in line]
    assert len(failed) == 3
    assert "pairs of clean and noisy" in failed[0]
    assert not any("/cosface/" in key for key in read_records([tmp_path / f"{NAME}.jsonl"]))


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"key": "a"}\n{"other": 1}\n')
    with pytest.raises(LargeMarginError, match="line 2"):
        read_records([file])


def test_lines_are_plain_json(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    append_record(file, {"key": "ä", "score": None})
    assert json.loads(file.read_text()) == {"key": "ä", "score": None}
    with pytest.raises(ValueError, match="JSON"):
        append_record(file, {"key": "b", "score": float("nan")})
    assert len(read_records([file])) == 1


def test_another_situation_fills_lanes_that_wait_for_a_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = TINY["situations"][NAME]
    protocol = tiny_protocol(tmp_path, situations={NAME: one, "other": one})
    lanes, under_way, idle = 5, [], []

    def instantly(next_job: Any, **_: Any) -> Iterator[TrainingOutcome]:
        """Runs that diverge at once and end in the order in which they began."""
        trainer: Any = SimpleNamespace(done=1, seconds=1.0, journal=SimpleNamespace(bad_steps=1))
        while True:
            while len(under_way) < lanes and (given := next_job()) is not None:
                under_way.append(given)
            if not under_way:
                return
            idle.append(lanes - len(under_way))
            error = Diverged("1 step in a row was not finite")
            yield TrainingOutcome(under_way.pop(0), None, error, trainer, 1.0)

    monkeypatch.setattr(
        import_module("largemargin_papers.benchmark.run_benchmark"), "iter_finished", instantly
    )
    said: list[str] = []
    done = run_situations(protocol, [NAME, "other"], out=tmp_path, device="cpu", say=said.append)
    assert done == {NAME: True, "other": True}
    order = [line.split("/")[0] for line in said]
    assert order.count(NAME) == order.count("other") == 22
    # The first is done first, the second begins before its end, and no lane is idle until then.
    last = len(order) - order[::-1].index(NAME)
    assert "other" in order[:last]
    assert last < order.index("other") + 22
    assert not any(idle[:last])
    for name in (NAME, "other"):
        assert len(read_records([tmp_path / f"{name}.jsonl"])) == 22
