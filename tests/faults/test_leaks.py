"""Long runs hold what they held at the start, and threads that ask one model get one answer."""

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.counting import Faults, Took
from torch import nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.app.predict import predict
from largemargin.app.training import NoiseConfig, ObjectiveConfig
from largemargin.app.training.journal import EpochTotals
from largemargin.app.training.objective import objective_of
from largemargin.app.training.step import Step
from largemargin.integrations.scikit_learn import LargeMarginClassifier
from largemargin.measuring import measure

MIB = 2**20
THREADS = 8
DIM, CLASSES = 8, 5
NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not say what memory is used"
)
OBJECTIVES = ("discriminative + center", "arcface + 0.1*compactness")


def used_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def trained_step(objective: str) -> Callable[[], None]:
    """A training step of a small network, on new numbers every time."""
    model = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    criterion = lm.attach(model, objective_of(ObjectiveConfig(objective), [10] * CLASSES))
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    sums = EpochTotals(torch.device("cpu"))
    step = Step(model, criterion, optimizer, noise=NoiseConfig(), clip_norm=1.0, totals=sums)

    def once() -> None:
        labels = torch.randint(CLASSES, (16,))
        step(torch.randn(16, DIM) + labels[:, None], labels)
        criterion.step()

    return once


def growth(objective: str, first: int, steps: int) -> tuple[int, int]:
    """Bytes and objects that there are more of after ``steps`` than after ``first``."""
    once = trained_step(objective)
    for _ in range(first):
        once()
    before, count = used_bytes(), objects()
    for _ in range(steps - first):
        once()
    return used_bytes() - before, objects() - count


@NEEDS_PROC
# Whether ArcFace takes hold of five classes on one line is not the question here.
@pytest.mark.filterwarnings("ignore::largemargin.dropin.MarginWarning")
@pytest.mark.parametrize(
    ("objective", "steps"),
    [
        pytest.param(OBJECTIVES[0], 500, marks=pytest.mark.slow),
        pytest.param(OBJECTIVES[0], 20_000, marks=pytest.mark.slow),
        pytest.param(OBJECTIVES[1], 5_000, marks=pytest.mark.slow),
    ],
)
def test_training_steps_leave_nothing_behind(faults: Faults, objective: str, steps: int) -> None:
    """One forgotten tensor a step would be 500 bytes and several objects each.

    Bytes only after many steps: what an allocator takes at once is more than 500 steps could leak.
    """
    first, started = steps // 5, time.perf_counter()
    grown, more = growth(objective, first, steps)
    faults.attempt("training steps without a leak", steps)
    took = Took(time.perf_counter() - started, grown)
    faults.measure(f"{steps:,} training steps ({objective})", took)
    assert more < (steps - first) // 20, f"{more} objects more"
    if steps >= 20_000:
        assert grown < 16 * MIB + 256 * (steps - first), f"{grown / MIB:.1f} MiB more"


def in_threads(work: Callable[[int], Any], calls: int) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(calls)))


def attached_model(objective: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))
    lm.attach(model, objective_of(ObjectiveConfig(objective), [10] * CLASSES))
    return model


@pytest.mark.parametrize("objective", ["discriminative", "cosface"])
def test_one_model_answers_eight_threads_alike(faults: Faults, objective: str) -> None:
    """Every thread has inputs of its own; an answer of another thread's would be found."""
    model = attached_model(objective).eval()
    inputs = [torch.randn(1 + number % 7, DIM) for number in range(200)]
    with torch.no_grad():
        alone = [model(each) for each in inputs]

    def answer(number: int) -> torch.Tensor:
        with torch.no_grad():
            return model(inputs[number])

    faults.attempt("answers to eight threads at once", len(inputs))
    for mine, theirs in zip(alone, in_threads(answer, len(inputs)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_predict_and_measure_answer_eight_threads_alike(faults: Faults, mode: str) -> None:
    """Also a model that is in training mode when they begin, and then is again."""
    model = attached_model("discriminative").train(mode == "train")
    count, calls = 24, 40
    pixels = torch.rand(count, 1, 1, DIM)
    labels = torch.arange(count) % CLASSES
    samples = Samples(labels, [str(number) for number in range(count)], pixels)
    flat = nn.Sequential(nn.Flatten(), *model).train(mode == "train")
    rows = predict(flat, samples, batch_size=4)
    found = measure(flat, [(pixels, labels)])
    faults.attempt("answers to eight threads at once", calls)

    def both(number: int) -> Any:
        if number % 2:
            return predict(flat, samples, batch_size=4)
        return measure(flat, [(pixels, labels)])

    for number, answer in enumerate(in_threads(both, calls)):
        if number % 2:
            assert list(answer) == list(rows)
        else:
            assert answer.accuracy == found.accuracy
            assert answer.margins["raw"].overall.mean == found.margins["raw"].overall.mean
    assert flat.training == (mode == "train")


def test_a_fitted_classifier_answers_eight_threads_alike(faults: Faults) -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 90)
    table = draw.standard_normal((90, 4)).astype(np.float32) + labels[:, None]
    model = LargeMarginClassifier(epochs=2, random_state=0).fit(table, labels)
    alone = model.predict_proba(table)
    calls = 40
    faults.attempt("answers to eight threads at once", calls)
    for answer in in_threads(lambda number: model.predict_proba(table), calls):
        np.testing.assert_array_equal(answer, alone)
