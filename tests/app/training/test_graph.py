"""Captured steps: what must not happen while one is captured. The rest needs a GPU."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.app.config import NoiseConfig
from largemargin.app.data.augment import Augment, Mix
from largemargin.app.data.samples import Batches, Samples
from largemargin.app.training.journal import EpochTotals
from largemargin.app.training.step import WARM_UP, GraphStep, Step, _no_garbage_collection


class Ring:
    """Garbage that only the collector finds, as models, optimizers and graphs are."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_before_and_none_goes_inside() -> None:
    before = weakref.ref(Ring())
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # collect whenever something is made
    try:
        with _no_garbage_collection():
            assert before() is None
            inside = weakref.ref(Ring())
            kept = [Ring() for _ in range(100)]
            assert inside() is not None
        assert gc.isenabled()
        kept.clear()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert inside() is None


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with _no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def graph_step(twice: bool = False, mix: Mix | None = None) -> GraphStep:
    """Of 20 images, 8 at a time."""
    pixels = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    samples = Samples(torch.arange(20) % 2, [str(i) for i in range(20)], pixels)
    batches = Batches(samples, 8, seed=3, augment=Augment("crop_flip"), twice=twice, mix=mix)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = lm.attach(model, lm.CrossEntropy())
    totals = EpochTotals(torch.device("cpu"))
    step = Step(model, criterion, optimizer, noise=NoiseConfig(), clip_norm=None, totals=totals)
    return GraphStep(step, batches)


@pytest.mark.parametrize("mix", [None, Mix(2, mixup=0.5, cutmix=1.0)])
@pytest.mark.parametrize("twice", [False, True])
def test_a_graph_reads_the_images_of_the_batches(twice: bool, mix: Mix | None) -> None:
    """Those that a graph gathers by a counter are those of the plain path, in every epoch."""
    graph = graph_step(twice, mix)
    batches = graph.batches
    for epoch in (2, 0):
        graph.begin(epoch)
        for number, plain in enumerate(batches.epoch(epoch)):
            images, labels = graph.batch(number)
            assert torch.equal(images, plain.images)
            assert torch.equal(labels, plain.labels)
    if not twice:  # plain steps, at first
        assert [graph(number) for number in range(len(batches))] == [8, 8, 4]


def test_every_size_is_captured_once_after_some_plain_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            made.append(self)
            self.replayed = 0

        def replay(self) -> None:
            self.replayed += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    graph = graph_step()
    graph.begin(0)
    for _ in range(WARM_UP):
        assert graph(0) == 8
    assert made == []
    assert [graph(number) for number in (0, 1, 2)] == [8, 8, 4]
    assert [each.replayed for each in made] == [2]
    assert [graph(2) for _ in range(WARM_UP)] == [4] * WARM_UP
    assert [each.replayed for each in made] == [2, 1]
    assert graph.step.totals.read().steps == WARM_UP + 1 + WARM_UP + 1


def test_an_error_inside_turns_it_on_again() -> None:
    with pytest.raises(RuntimeError, match="capture"), _no_garbage_collection():
        raise RuntimeError("capture")
    assert gc.isenabled()
