"""A queue of runs: planned once, written when they end, gone on with, put into ``measured/``."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from largemargin_papers.recipes import run_queue
from largemargin_papers.recipes.measured import read_measured
from largemargin_papers.recipes.pages import measured_tables, share_runs, take_records, write_pages
from largemargin_papers.recipes.queue import (
    left_of,
    measured_already,
    plan_text,
    seconds_of,
    tasks_of,
)
from largemargin_papers.recipes.records import append_record, read_records
from largemargin_papers.recipes.run_queue import run_missing

from largemargin import LargeMarginError

PAPERS = Path(__file__).resolve().parents[3] / "papers"
RECIPE = """
title: A table
claims: {name}.csv
data_needed: digits are bundled
base: {{epochs: 1, data.name: digits, data.fraction: 0.3, measure: false, geometry_samples: 0}}
grid:
  - column: method
    values:
      softmax: {{objective.name: cross_entropy}}
      ours: {{objective: {{name: cosface, settings: {{margin: 0.2}}}}}}
      wild: {{optimizer.lr: 1.0e+30, optimizer.clip_norm: null, max_bad_steps: 1}}
measures:
  {column}: {{metric: {column}, tolerance: 50}}
baseline: {{method: softmax}}
"""
QUEUE = """
set: {precision: fp32}
entries:
  - {name: first, recipe: paper/table1.yaml, only: [method=softmax], seeds: [0, 1]}
  - {name: second, recipe: paper/table2.yaml}
  - {name: smaller, recipe: paper/table1.yaml, only: [ours], set: {batch_size: 64}}
"""


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    pytest.importorskip("sklearn", reason="digits are scikit-learn's")
    paper = tmp_path / "paper"
    paper.mkdir()
    for name, column in (("table1", "accuracy"), ("table2", "error")):
        (paper / f"{name}.yaml").write_text(RECIPE.format(name=name, column=column))
        (paper / f"{name}.csv").write_text(f"method,{column}\nsoftmax,50\nours,60\nwild,\n")
    path = tmp_path / "queue.yaml"
    path.write_text(QUEUE)
    return path


def quietly(queue: Path, name: str = "out.jsonl", **options: object) -> run_queue.QueueResult:
    options = {"folder": queue.parent / "runs", "device": "cpu", "say": lambda text: None} | options
    return run_missing(queue, out=[queue.parent / name], **options)


def test_a_run_that_tables_share_is_made_once(queue: Path) -> None:
    tasks = tasks_of(queue)
    assert [task.entry for task in tasks] == ["first", "first", "second", "second", "smaller"]
    shared = tasks[0]
    assert [place.recipe for place in shared.places] == ["paper/table1.yaml", "paper/table2.yaml"]
    assert shared.wanted.keys() == {"accuracy", "error"}
    assert tasks[-1].places[0].protocol == "batch_size 64"
    assert len(tasks_of(queue, ["smaller"])) == 1
    assert tasks_of(queue, ["first"])[0].places == shared.places
    with pytest.raises(LargeMarginError, match="It has first, second, smaller"):
        tasks_of(queue, ["third"])


def test_a_shared_run_is_measured_on_one_split(queue: Path) -> None:
    recipe = queue.parent / "paper" / "table2.yaml"
    recipe.write_text(recipe.read_text() + "split: validation\n")
    message = r"softmax is measured on validation images, .* on test images by first\. Put them"
    with pytest.raises(LargeMarginError, match=message):
        tasks_of(queue)


def test_the_plan_counts_images(queue: Path) -> None:
    queue.write_text(
        "entries:\n  - {recipe: lmd/table3.yaml, only: ['dataset=CIFAR10,train_percent=20']}\n"
        "  - {recipe: robust/table1.yaml, epochs_fraction: 0.3, set: {batch_size: 128}}\n"
    )
    for name in ("lmd", "robust"):
        (queue.parent / name).symlink_to(PAPERS / name)
    tasks = tasks_of(queue)
    assert [task.images for task in tasks[:2]] == [2_000_000] * 2
    assert sum(task.images or 0 for task in tasks[2:]) == 24_000_000  # three see noisy ones too
    assert {task.config.optimizer.milestones for task in tasks[2:]} == {(18, 36, 48)}
    assert all((seconds_of(task) or 0) > 10 for task in tasks)
    text = plan_text(tasks, tasks[1:])
    assert text.splitlines()[1].split()[:4] == ["lmd/table3", "2", "1", "2.0"]


def test_work_is_written_taken_and_not_done_again(queue: Path, tmp_path: Path) -> None:
    said: list[str] = []
    done = quietly(queue, say=said.append, commit_name="abc")
    assert (len(done.finished), len(done.failed), done.broken, done.left) == (4, 1, [], [])
    assert said[0] == "5 of 5 runs are missing"
    line = next(text for text in said if text.startswith("second: ours, seed 0: error "))
    assert line.endswith(" images/s")
    assert any("second: wild, seed 0: diverged: " in text for text in said)
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
    record = read_records([tmp_path / "out.jsonl"])[0]
    assert (record["commit"], record["status"], record["seed"]) == ("abc", "finished", 0)
    assert record["settings"]["data"]["fraction"] == 0.3
    assert "path" not in record["settings"]["data"]
    assert quietly(queue) == run_queue.QueueResult()

    assert take_records(tmp_path / "out.jsonl", tmp_path) == 5
    tasks = tasks_of(queue)
    assert left_of(tasks, measured_already(tmp_path, tasks)) == []
    assert quietly(queue, "elsewhere.jsonl") == run_queue.QueueResult()
    tables = {table.protocol: table for table in measured_tables(tmp_path / "paper/table1.yaml")}
    assert tables.keys() == {"as printed", "batch_size 64"}
    softmax = tables["as printed"].lines[0]
    assert softmax.measured.n == 2
    kept = json.loads((tmp_path / "paper/measured/table2.json").read_text())["protocols"]
    (wild,) = kept["as printed"]["wild"]["runs"]
    assert wild["status"] == "diverged"
    assert kept["as printed"]["softmax"]["reported"] == {"error": 50.0}

    (page,) = write_pages(tmp_path)
    shown = page.read_text()
    mean = softmax.measured.mean
    assert f"| softmax | accuracy | 50.00 % | {mean:.2f} ± {softmax.measured.std:.2f} % |" in shown
    assert f"| {mean - 50:+.2f} % | 2 | reproduced |" in shown
    assert "| wild | error | - | - | - | 0 | failed: seed 0: " in shown
    assert "Protocol: batch_size 64." in shown
    before = page.read_text()
    take_records(tmp_path / "out.jsonl", tmp_path)
    write_pages(tmp_path)
    assert page.read_text() == before

    stored = tmp_path / "paper/measured/table2.json"
    whole = json.loads(stored.read_text())
    del kept["as printed"]["softmax"]
    stored.write_text(json.dumps({**whole, "protocols": kept}))
    assert share_runs(queue) == 1
    assert share_runs(queue) == 0
    shared = json.loads(stored.read_text())["protocols"]["as printed"]["softmax"]
    assert shared["reported"] == {"error": 50.0}
    assert [run["seed"] for run in shared["runs"]] == [0]
    assert shared["runs"][0]["numbers"].keys() >= {"error"}


def test_readings_stand_side_by_side(queue: Path, tmp_path: Path) -> None:
    """Runs of another reading are others; their table gets verdicts as the printed one does."""
    recipe = tmp_path / "paper/table1.yaml"
    recipe.write_text(
        recipe.read_text()
        + """
variants:
  their code:
    differs: [Twice the epochs., Another rate.]
    set: {epochs: 2}
    adjust: [{key: {method: ours}, set: {optimizer.lr: 0.01}}]
"""
    )
    chosen = "{recipe: paper/table1.yaml, only: [softmax, ours]"
    read = f"{chosen}, reading: their code"
    queue.write_text(
        f"entries:\n  - {chosen}}}\n  - {read}}}\n  - {read}, set: {{batch_size: 64}}}}\n"
    )
    tasks = tasks_of(queue)
    assert len({task.name for task in tasks}) == 6
    assert [task.config.epochs for task in tasks] == [1, 1, 2, 2, 2, 2]
    assert [task.config.optimizer.lr for task in tasks[2:4]] == [0.05, 0.01]
    assert [task.places[0].protocol for task in tasks[::2]] == [
        "as printed",
        "their code",
        "their code, batch_size 64",
    ]
    quietly(queue)
    take_records(tmp_path / "out.jsonl", tmp_path)
    assert left_of(tasks, measured_already(tmp_path, tasks)) == []
    found = {each.protocol: each.lines[0].verdict for each in measured_tables(recipe)}
    assert found["as printed"] == found["their code"] == "reproduced"
    assert found["their code, batch_size 64"] == "other protocol"
    shown = write_pages(tmp_path)[0].read_text()
    assert "| reported | as printed | their code |" in shown
    row = next(line for line in shown.splitlines() if line.startswith("| ours | accuracy | 60.00"))
    assert row.count(" (1) |") == 2
    assert 'What differs in "their code":\n\n* Twice the epochs.\n* Another rate.' in shown


def test_no_run_begins_that_would_not_end(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_queue, "seconds_of", lambda task: 3600.0 if "ours" in str(task) else 0.0
    )
    done = quietly(queue, entries=["second"], minutes=10)
    assert len(done.finished) == 1
    assert len(done.left) == 1
    assert len(done.failed) == 1
    anyway = quietly(queue, entries=["second"], minutes=10, anyway=True)
    assert (len(anyway.finished), anyway.left) == (1, [])


def test_runs_are_taken_to_be_slower_where_processes_share_the_gpu(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 4 minutes alone would not end in 10 beside two other processes."""
    monkeypatch.setattr(run_queue, "seconds_of", lambda task: 240.0)
    monkeypatch.setattr(run_queue, "measuring_seconds_of", lambda task: 0.0)
    begun: list[int] = []

    def nothing(next_job: Callable[[], object], **options: object) -> Iterator[object]:
        begun.append(sum(next_job() is not None for _ in range(4)))
        return iter(())

    monkeypatch.setattr(run_queue, "iter_finished", nothing)
    for processes in (3, 2):
        quietly(queue, entries=["first"], minutes=10, processes=processes, clock=lambda: 0.0)
    assert begun == [0, 2]


def test_a_run_that_did_not_fit_is_asked_for_again(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that end faster than guessed make room for others."""
    guesses = iter([0.0, 3600.0, 0.0])
    monkeypatch.setattr(run_queue, "seconds_of", lambda task: next(guesses))
    begun: list[bool] = []

    def nothing(next_job: Callable[[], object], **options: object) -> Iterator[object]:
        begun.extend(next_job() is not None for _ in range(4))
        return iter(())

    monkeypatch.setattr(run_queue, "iter_finished", nothing)
    quietly(queue, entries=["first"], minutes=10)
    assert begun == [True, False, True, False]


def test_time_ends_the_work(queue: Path) -> None:
    ticks = iter(range(0, 10_000, 7))  # seconds: over after a handful of steps
    done = quietly(queue, minutes=0.5, clock=lambda: float(next(ticks)))
    assert len(done.left) > 0
    assert quietly(queue).left == []


def test_what_breaks_is_tried_again(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> object:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(run_queue, "measure_run", broken)
        said: list[str] = []
        done = quietly(queue, entries=["first"], say=said.append)
    assert len(done.broken) == len(done.left) == 2
    assert any("broke off: RuntimeError('out of memory')" in text for text in said)
    assert any("Traceback" in text for text in said)
    assert len(quietly(queue, entries=["first"]).finished) == 2
    with monkeypatch.context() as patch:
        patch.setattr(run_queue, "measure_run", broken)
        patch.setattr(run_queue, "BROKEN", 1)
        with pytest.raises(LargeMarginError, match="1 runs broke off one after the other"):
            quietly(queue)


def test_records_are_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    record = {"run": "a", "status": "finished", "places": [], "numbers": {"x": [float("nan"), 1]}}
    append_record(path, record)
    with path.open("a") as file:
        file.write('{"run": "cut sho')  # a process was killed
    assert len(read_records([path])) == 1
    append_record(path, {**record, "run": "b"})
    assert [each["run"] for each in read_records([path, tmp_path / "none"])] == ["a", "b"]
    assert read_records([path])[0]["numbers"] == {"x": [None, 1]}
    path.write_text("{}\n")
    with pytest.raises(LargeMarginError, match=r"line 1 of .* is no record"):
        read_records([path])
    with pytest.raises(LargeMarginError, match="there is no file"):
        take_records(tmp_path / "none", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_loses_no_result(queue: Path, tmp_path: Path, number: int) -> None:
    recipe = tmp_path / "paper/table1.yaml"
    recipe.write_text(recipe.read_text().replace("epochs: 1,", "epochs: 25,"))
    queue.write_text(QUEUE.replace("[0, 1]", "[0, 1, 2]"))
    words = ["--queue", str(queue), "run", "first", "--device", "cpu"]
    words += ["--out", str(tmp_path / "out.jsonl"), "--folder", str(tmp_path / "runs")]
    command = [sys.executable, str(PAPERS / "measure.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(PAPERS.parent / "src")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    out = tmp_path / "out.jsonl"
    end = time.monotonic() + 300
    while not out.is_file() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(number)
    shown = process.communicate(timeout=120)[0]
    before = read_records([out])
    assert 0 < len(before) < 3
    if number == signal.SIGTERM:
        assert "asked to stop by SIGTERM" in shown
        assert process.returncode == 0
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert f"{3 - len(before)} of 3 runs are missing" in again.stdout
    after = read_records([out])
    assert after[: len(before)] == before
    assert sorted(each["seed"] for each in after) == [0, 1, 2]


def test_runs_in_measured_keep_their_names() -> None:
    """A setting that is new must not send measured runs back into the queue (``cells.LATER``)."""
    tasks = tasks_of(PAPERS / "queue.yaml")
    renamed = [
        (task.entry, place.cell)
        for task in tasks
        for place in task.places
        for run in read_measured(PAPERS / place.recipe).get(place.protocol, {}).get(place.cell, ())
        if run["seed"] == task.config.seed and run["run"] != task.name
    ]
    assert renamed == []
    assert len(measured_already(PAPERS, tasks)) > 100
