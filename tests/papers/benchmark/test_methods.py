"""Every method of the protocol trains, for a moment, on made-up images."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("yaml", reason="the protocol is a YAML file")

from largemargin_papers.benchmark import Job, Protocol, Situation, read_protocol
from largemargin_papers.benchmark.assess import assess
from largemargin_papers.benchmark.halving import job
from largemargin_papers.benchmark.images import Images
from largemargin_papers.benchmark.run_benchmark import reweight, trained

from largemargin.app.training.parallel_runs import TrainingJob, TrainingOutcome, iter_finished
from largemargin.app.training.trainer import Trainer
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


def ran(each: Job, images: Images, folder: Path, device: str) -> Iterator[TrainingOutcome]:
    """The outcome of a run, while its model is there; it may have diverged."""
    jobs = partial(next, iter([each]), None)
    for ended, outcome in trained(jobs, images, folder=folder, device=device, side_by_side=1):
        assert ended is each
        assert outcome.error is None or outcome.divergence is not None, outcome.error
        yield outcome


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), CASES)
def test_every_method_trains(name: str, method: str, images: Images, tmp_path: Path) -> None:
    situation = small(name)
    for trial in (0, 2):
        each = job(PROTOCOL, situation, method, None, trial, 0)
        ends = 0
        for outcome in ran(each, images, tmp_path, "cpu"):
            ends += 1
            if outcome.divergence is not None:
                continue
            assert outcome.trainer is not None
            model, judged = outcome.trainer.evaluated(), images.task(situation, 0, "test").judged
            scores = assess(model, judged, score=situation.score, split="test", precision="fp32")
            assert 0 <= scores["score"] <= 1
            if name == "cifar10_corrupted":
                parts = [scores[key] for key in ("accuracy", "gaussian 16/255", "occlusion")]
                assert scores["score"] == pytest.approx(sum(parts) / 3)
        assert ends == 1
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
    seen: list[bool] = []

    def before_step(trainer: Trainer) -> None:
        (loss,) = trainer.criterion.objective.terms.values()
        if trainer.done:
            seen.append(loss.weight is not None)
        reweight(0.8, trainer)

    config = replace(each.config, device=device)
    training = TrainingJob(config, folder / "run", data=lambda: data, before_step=before_step)
    for outcome in iter_finished([training]):
        assert outcome.error is None
        assert outcome.trainer is not None
        (loss,) = outcome.trainer.criterion.objective.terms.values()
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
    assert (
        len(list(ran(job(PROTOCOL, situation, "odn", None, 0, 0), images, tmp_path, "cuda"))) == 1
    )
