"""What was measured of runs, as it is taken, kept and written beside the recipe."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from largemargin_papers.recipes import metrics
from largemargin_papers.recipes.measured import Measurements, read_measured, write_measured
from largemargin_papers.recipes.metrics import (
    Subject,
    accuracy,
    best_on_test,
    curvature_correlation,
    noisy_accuracy,
)
from largemargin_papers.recipes.queue import OTHER, STEP, Task, measuring_seconds_of, seconds_of
from largemargin_papers.recipes.schema import Measure, Recipe

from largemargin import LargeMarginError
from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import NoiseConfig, OptimizerConfig, RunConfig, train
from largemargin.geometry.curvature import curvature_limit
from largemargin.measuring.robust import Perturbation

RECIPE = Recipe("A table", "claims.csv", grid=(), measures={}, data_needed="nothing")
ACCURACY = Measure("accuracy")


def run(seed: int | None, name: str = "a", **numbers: float | None) -> dict[str, Any]:
    values = {label: [value, 0.5] for label, value in numbers.items()}
    return {"seed": seed, "run": name, "status": "finished", "numbers": values}


def written(folder: Path, runs: list[dict[str, Any]], protocol: str = "as printed") -> Any:
    reported: dict[str, dict[str, float | None]] = {"ours": {"accuracy": 90.0}}
    path = write_measured(folder / "table1.yaml", RECIPE, protocol, {"ours": runs}, reported)
    assert path == folder / "measured" / "table1.json"
    return json.loads(path.read_text())["protocols"]


def test_numbers_of_the_same_run_stay(tmp_path: Path) -> None:
    written(tmp_path, [run(0, accuracy=1.0, error=2.0), run(1, accuracy=3.0)])
    written(tmp_path, [run(0, accuracy=7.0)], "0.3 of the epochs")
    found = written(tmp_path, [run(0, accuracy=4.0), run(1, "b", error=5.0)])
    assert found.keys() == {"as printed", "0.3 of the epochs"}
    cell = found["as printed"]["ours"]
    assert cell["reported"] == {"accuracy": 90.0}
    # The second is another run with the same seed: what was known is not about it.
    assert [(each["seed"], each["run"], each["numbers"]) for each in cell["runs"]] == [
        (0, "a", {"accuracy": [4.0, 0.5], "error": [2.0, 0.5]}),
        (1, "b", {"error": [5.0, 0.5]}),
    ]
    shorter = found["0.3 of the epochs"]["ours"]
    assert shorter["runs"][0]["numbers"] == {"accuracy": [7.0, 0.5]}
    assert shorter["reported"] == {"accuracy": 90.0}


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    path = write_measured(tmp_path / "table1.yaml", RECIPE, "as printed", {"ours": []}, {})
    assert not path.parent.exists()
    assert read_measured(tmp_path / "table1.yaml") == {}


@pytest.mark.parametrize("text", ["[]", "{}", '{"protocols": {"as printed": {"ours": {}}}}'])
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "table1.json").write_text(text)
    with pytest.raises(LargeMarginError, match=r"table1\.json is damaged .*Move it away"):
        read_measured(tmp_path / "table1.yaml")


def test_a_run_takes_the_place_of_one_with_its_seed() -> None:
    found = Measurements()
    found.take({**run(2), "failure": "it diverged"})
    found.take(run(1, accuracy=80.0))
    found.take(run(None, accuracy=None))
    assert found.failure == "seed 2: it diverged"
    found.take(run(2, accuracy=82.0))
    assert found.failure == ""
    assert [each["seed"] for each in found.runs] == [None, 1, 2]
    values = found.values(ACCURACY)
    assert (values[1], values[2], math.isnan(values[None])) == (80.0, 82.0, True)
    assert found.draws_std(ACCURACY) == 0.5
    assert found.draws_std(Measure("error")) is None
    assert found.values(Measure("error")) == {}


def task(**changes: Any) -> Task:
    config = RunConfig(
        model=ModelConfig("resnet18"),
        data=DataConfig("cifar10", validation=0.0, fraction=0.1),
        epochs=20,
        batch_size=128,
        noise=NoiseConfig(changes.pop("noise", "none")),
    )
    return Task("name", "entry", config, "test", "", **changes)


def test_what_training_is_guessed_to_take() -> None:
    assert (task().images, task(noise="clean_and_noisy").images) == (100_000, 200_000)
    assert seconds_of(task()) == pytest.approx(2.0)  # 50,000 images a second
    tiny = task()
    tiny.config = RunConfig(
        model=ModelConfig("mnist_cnn"),
        data=DataConfig("digits", validation=0.0),
        epochs=10,
        batch_size=10,
    )
    assert seconds_of(tiny) == pytest.approx(10 * 126 * STEP)  # steps, of which the last is short
    tiny.config = RunConfig(data=DataConfig("folder", path="somewhere"))
    assert (tiny.images, seconds_of(tiny)) == (None, None)


def test_what_measuring_is_guessed_to_take() -> None:
    """Noisy accuracies one by one; what is read from the same curvature or stages, once."""
    kinds = ["noisy_accuracy", "noisy_accuracy", "curvature", "curvature_correlation"]
    kinds += ["stage_variance", "stage_variance", "class_margin_degrees"]
    wanted = {str(number): (kind, {}) for number, kind in enumerate(kinds)}
    sketches = {"a": ("stages", {}), "b": ("planes", {})}
    expected = 2 * 1.5 + 9.0 + 1.0 + OTHER
    assert measuring_seconds_of(task(wanted=wanted)) == pytest.approx(expected)
    both = measuring_seconds_of(task(wanted=wanted, sketches=sketches))
    assert both == pytest.approx(expected + OTHER)


def test_the_last_epoch_counts_where_test_images_chose_the_best(tmp_path: Path) -> None:
    """Both are known: ours is the last one, the best one stands beside it."""
    pytest.importorskip("sklearn", reason="digits are scikit-learn's")
    data = DataConfig(fraction=0.2, validation_from="test")
    optimizer = OptimizerConfig(lr=0.3, clip_norm=None, schedule="constant")
    config = RunConfig(data=data, model=ModelConfig("mlp"), optimizer=optimizer, out=str(tmp_path))
    config = replace(config, epochs=3, batch_size=16, measure=False, geometry_samples=0)
    made = train(config, progress=False)
    epochs = [row["validation"]["accuracy"] for row in made.metrics("epoch")]
    assert max(epochs) > epochs[-1]  # or the test could not tell them apart
    subject = Subject(made, lambda: load_data(data), "test", torch.device("cpu"))
    assert accuracy(subject).value == pytest.approx(100 * epochs[-1])
    assert noisy_accuracy(subject, sigma=0, draws=1).value == pytest.approx(100 * epochs[-1])
    assert best_on_test(subject).value == pytest.approx(100 * max(epochs))
    plain = train(replace(config, data=replace(data, validation_from="train")), progress=False)
    with pytest.raises(LargeMarginError, match="did not look at test images"):
        best_on_test(Subject(plain, lambda: load_data(data), "test", torch.device("cpu")))


def test_noise_may_be_clipped_and_come_before_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Perturbation] = []

    def found(model: Any, samples: Any, given: dict[str, Perturbation], **how: Any) -> Any:
        seen.extend(given.values())
        return {"it": SimpleNamespace(accuracy=0.5, std=0.0, runs=(0.5,))}

    monkeypatch.setattr(metrics, "perturbed_accuracy", found)
    subject: Any = SimpleNamespace(model=None, samples=None, device=None)
    subject.data = SimpleNamespace(size=(32, 32))
    noisy_accuracy(subject, sigma="8/255", clip=True)
    metrics.perturbed(subject, kind="occlusion_gaussian", clip=True, mask_last=True)
    metrics.perturbed(subject, kind="occlusion_gaussian")
    assert [(each.clip, each.mask_last) for each in seen] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    assert seen[0].sigma == 8 / 255


def test_groups_of_the_correlation_begin_where_it_is_said() -> None:
    groups = (50.0, 4.0, 3.0, math.nan, 1.0)
    curvature = SimpleNamespace(robustness={"gaussian": SimpleNamespace(group_curvature=groups)})
    subject: Any = SimpleNamespace(curvature=curvature)
    assert curvature_correlation(subject, noise="gaussian", first=1).value == pytest.approx(-1.0)
    # By hand: k = 0, 1, 2, 4 and 50, 4, 3, 1.
    assert curvature_correlation(subject, noise="gaussian").value == pytest.approx(
        -87.5 / math.sqrt(8.75 * 1685)
    )


def test_curvature_may_be_that_of_normalised_images() -> None:
    """Its Hessian is that in pixels times std^2, so that its square is less by std^4."""
    torch.manual_seed(0)
    data = load_data(DataConfig(fraction=0.2))
    std = 0.25
    data = replace(data, mean=(0.5,), std=(std,))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    subject: Any = Subject.__new__(Subject)
    subject.device, subject.split = torch.device("cpu"), "test"
    subject.load, subject.model = (lambda: data), model
    few = subject.part("test").subset(range(40))
    subject.data = replace(data, test=few)
    found = subject.normalized_curvature
    pixels = torch.stack([few.image(i) for i in range(40)])
    wanted = curvature_limit(model, pixels, few.labels, num_directions=400).double() * std**4
    assert found.shape == (40,)
    assert found.mean().item() == pytest.approx(wanted.mean().item(), rel=0.2)
    median = metrics.curvature(subject, of="0.5", share=1.0, normalized=True).value
    assert median == pytest.approx(found.median().item(), rel=0.2)
