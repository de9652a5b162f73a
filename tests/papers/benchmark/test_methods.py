"""Every method of the protocol trains, for a moment, on made-up images."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("yaml", reason="the protocol is a YAML file")

from largemargin_papers.benchmark import Job, Protocol, Situation, read_protocol
from largemargin_papers.benchmark.assess import assess
from largemargin_papers.benchmark.halving import job
from largemargin_papers.benchmark.images import Images
from largemargin_papers.benchmark.parallel_runs import Outcome, _Lane, outcomes

from largemargin.app.data import Data
from largemargin.losses.base.class_counts import balanced_weights

PROTOCOL = read_protocol(
    Path(__file__).resolve().parents[3] / "papers" / "benchmark" / "protocol.yaml"
)
# Situations that share methods differ in data alone.
CASES = [
    (situation, method)
    for situation in ("mnist_75", "cifar10_long_tail", "cifar10_corrupted", "omniglot")
    for method in PROTOCOL.situations[situation].methods
    if not (situation == "omniglot" and method not in ("softmax", "combined"))
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)

    def pictures(count: int, classes: int, *shape: int) -> dict[str, np.ndarray]:
        labels = np.arange(count) % classes
        light = (labels * (150 // classes)).reshape(-1, *[1] * len(shape))
        return {
            "images": (draw.integers(0, 100, (count, *shape)) + light).astype(np.uint8),
            "labels": labels,
        }

    paths = {}
    for name, shape in (("mnist", (12, 12)), ("cifar10", (32, 32, 3))):
        arrays = {
            f"{split}_{key}": each
            for split, count in (("train", 400), ("test", 60))
            for key, each in pictures(count, 10, *shape).items()
        }
        np.savez(folder / f"{name}.npz", **arrays)
        paths[name] = str(folder / f"{name}.npz")
    names = [f"alphabet{number // 2}/character{number % 2}" for number in range(24)]
    np.savez(
        folder / "omniglot.npz",
        **pictures(96, 24, 12, 12),
        names=np.array(names),
        evaluation=np.arange(24) >= 20,
    )
    return Images(paths | {"omniglot": str(folder / "omniglot.npz")})


def small(name: str) -> Situation:
    situation = PROTOCOL.situations[name]
    data = dict(situation.data)
    if "imbalance_ratio" in data:
        data["imbalance_ratio"] = 5
    return replace(
        situation,
        data=data,
        images=None if situation.images is None else 40,
        model={"name": "small_cnn"},
        epochs=2,
        batch_size=20,
        precision="fp32",
    )


def ran(each: Job, images: Images, folder: Path, device: str) -> Outcome:
    data = images.task(each.task, each.seed, each.split).data
    waiting: Iterator[Job] = iter([each])

    def next_job() -> tuple[Job, Data] | None:
        job = next(waiting, None)
        return None if job is None else (job, data)

    (found,) = outcomes(next_job, folder=folder, device=device, side_by_side=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), CASES)
def test_every_method_trains(name: str, method: str, images: Images, tmp_path: Path) -> None:
    situation = small(name)
    for trial in (0, 2):
        each = job(PROTOCOL, situation, method, None, trial, 0)
        found = ran(each, images, tmp_path, "cpu")
        assert found.facts["status"] in ("finished", "diverged"), found.facts
        if found.model is None:
            continue
        judged = images.task(situation, 0, "test").judged
        scores = assess(found.model, judged, score=situation.score, split="test", precision="fp32")
        assert 0 <= scores["score"] <= 1
        if name == "cifar10_corrupted":
            parts = [scores[key] for key in ("accuracy", "gaussian 16/255", "occlusion")]
            assert scores["score"] == pytest.approx(sum(parts) / 3)
    assert list(tmp_path.iterdir()) == []


def test_alphabets_of_omniglot_do_not_meet(images: Images) -> None:
    situation = small("omniglot")
    task = images.task(situation, 0, "validation")
    trained = {name.split("/")[0] for name in task.data.classes}
    assert len(trained) == 4  # of ten, six held out
    assert len(task.judged) == 12 * 4
    assert len(images.task(situation, 0, "test").judged) == 4 * 4
    other = images.task(situation, 1, "validation")
    assert {name.split("/")[0] for name in other.data.classes} != trained


def deferred(
    protocol: Protocol, images: Images, device: str, folder: Path, method: str = "ldam_drw"
) -> list[bool]:
    """Whether the loss had class weights, after every step of a run."""
    situation = replace(small("cifar10_long_tail"), epochs=5)
    each = replace(job(protocol, situation, method, None, 0, 0), late_weights=0.8)
    data = images.task(situation, 0, "test").data
    counts = data.train.labels.bincount().tolist()
    lane = _Lane(each, data, folder=folder, device=device, on_gpu=device == "cuda")
    seen = []
    with ExitStack() as stack:
        stack.callback(lane.close)
        assert lane.begin()
        assert lane.session is not None
        (loss,) = lane.session.trainer.criterion.objective.terms.values()
        while lane.advance():
            seen.append(loss.weight is not None)
        assert lane.failure == ""
        assert loss.weight is not None
        torch.testing.assert_close(loss.weight.cpu(), balanced_weights(counts))
    return seen


@pytest.mark.parametrize("method", ["ldam_drw", "softmax"])
def test_class_weights_come_in_the_last_fifth(images: Images, tmp_path: Path, method: str) -> None:
    seen = deferred(PROTOCOL, images, "cpu", tmp_path, method)
    switch = round(0.8 * len(seen))
    assert seen == [False] * switch + [True] * (len(seen) - switch)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ldam_drw", "softmax"])
def test_captured_steps_follow_the_class_weights(
    images: Images, tmp_path: Path, method: str
) -> None:
    seen = deferred(PROTOCOL, images, "cuda", tmp_path, method)
    assert seen[-1]
    assert not seen[0]


@pytest.mark.gpu
def test_captured_linearised_margins(images: Images, tmp_path: Path) -> None:
    situation = replace(small("mnist_75"), epochs=6)
    found = ran(job(PROTOCOL, situation, "odn", None, 0, 0), images, tmp_path, "cuda")
    assert found.facts["status"] in ("finished", "diverged"), found.facts
