"""Frozen parts, rates of their own for the head, class weights, smoothing: what a step changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.small_runs import STEPS, assert_same, config, digits

from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig, build_model
from largemargin.app.models.build import with_flips
from largemargin.app.training import NoiseConfig, ObjectiveConfig, OptimizerConfig, train
from largemargin.app.training.config_file import from_dict, to_dict
from largemargin.app.training.journal import Journal
from largemargin.app.training.objective import class_weights, needs_of, objective_of
from largemargin.app.training.processes import Processes
from largemargin.app.training.rate_range import RateRange, rate_range
from largemargin.app.training.step import LearningRate, make_optimizer
from largemargin.app.training.trainer import Trainer
from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES

PLAIN: dict[str, Any] = {
    "objective": ObjectiveConfig("cosface"),
    "model": ModelConfig("small_cnn"),
    "noise": NoiseConfig(),
    "gradients_every": 3,
}


def trainer(folder: Path, **changes: Any) -> Trainer:
    settings = config(**{**PLAIN, **changes})
    return Trainer(settings, digits(), Journal(folder), processes=Processes(settings))


def changed(made: Trainer, steps: int = STEPS) -> set[str]:
    """Names of what the first steps change in the model, buffers as well."""
    before = {name: each.clone() for name, each in made.bare.state_dict().items()}
    for _, _ in zip(range(steps), made.steps(), strict=False):
        pass
    after = made.bare.state_dict()
    return {name for name, each in before.items() if not torch.equal(each, after[name])}


def test_a_frozen_backbone_keeps_weights_and_statistics(tmp_path: Path) -> None:
    made = trainer(tmp_path, model=ModelConfig("small_cnn", freeze=("backbone",)))
    assert changed(made) == {"head.weight"}
    assert made.bare.head.training
    assert any("random weights" in note for note in made.bare.notes)


def test_random_weights_that_are_frozen_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a file are none; those of a network in Python are its own matter."""
    safetensors = pytest.importorskip("safetensors.torch")

    def notes(name: str, **settings: Any) -> tuple[str, ...]:
        return build_model(ModelConfig(name, **settings), 3, size=(8, 8)).notes

    (told,) = notes("small_cnn", freeze=("backbone",))
    assert "what is frozen has random weights" in told
    assert notes("small_cnn") == ()
    weights = build_model(ModelConfig("small_cnn"), 3, size=(8, 8)).state_dict()
    safetensors.save_file(weights, tmp_path / "w.safetensors")
    file = str(tmp_path / "w.safetensors")
    assert notes("small_cnn", freeze=("backbone",), weights=file) == ()
    (tmp_path / "own_layers.py").write_text(
        "from torch.nn import Flatten, Linear, Sequential\n"
        "def net(): return Sequential(Flatten(), Linear(192, 4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("largemargin.app.models.library_networks._trusted", [True])
    assert notes("own_layers.net", freeze=("backbone",)) == ()


def test_a_part_may_be_frozen(tmp_path: Path) -> None:
    made = trainer(tmp_path, model=ModelConfig("small_cnn", freeze=("backbone.0", "backbone.1")))
    found = changed(made)
    first = {
        name for name in made.bare.state_dict() if name.startswith(("backbone.0.", "backbone.1."))
    }
    assert first
    assert not first & found
    assert any(name.startswith("backbone.") for name in found)


def test_statistics_alone_may_be_frozen(tmp_path: Path) -> None:
    """The weights of batch normalisation learn on; its mean and variance stay."""
    free = changed(trainer(tmp_path))
    found = changed(trainer(tmp_path, model=ModelConfig("small_cnn", freeze_batch_norm=True)))
    lost = {name.rpartition(".")[2] for name in free - found}
    assert lost == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig("small_cnn", freeze=("backbne",)), "but 'backbne' was given. There are"),
        (ModelConfig("small_cnn", freeze=("head",)), "must name the backbone or modules in it"),
        (ModelConfig("mlp", freeze_batch_norm=True), "has no batch normalisation"),
        (ModelConfig("small_cnn", head="simplex", freeze=("backbone",)), None),
    ],
)
def test_what_cannot_be_frozen(tmp_path: Path, model: ModelConfig, message: str | None) -> None:
    if message is None:  # the simplex learns a scale
        trainer(tmp_path, model=model, objective=ObjectiveConfig())
        return
    with pytest.raises(LargeMarginError, match=message):
        trainer(tmp_path, model=model)


def test_nothing_left_to_train_is_refused() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(LargeMarginError, match="nothing to train"):
        make_optimizer(OptimizerConfig(), [frozen])


@pytest.mark.parametrize("on_device", [False, True])
def test_the_head_has_a_rate_of_its_own_on_the_same_schedule(on_device: bool) -> None:
    below, above = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    settings = OptimizerConfig(lr=0.01, head_lr=0.5, schedule="cosine")
    optimizer = make_optimizer(settings, [below, above], head=[above], on_device=on_device)
    rate = LearningRate(settings, epochs=2, steps_per_epoch=5)
    for step in range(10):
        rate.set(optimizer, step)
        low, high = (float(group["lr"]) for group in optimizer.param_groups)
        assert low == pytest.approx(rate.at(step))
        assert high == pytest.approx(50 * low)
    assert [group["params"] for group in optimizer.param_groups] == [[below], [above]]


def test_the_rate_of_the_head_is_that_of_all_above_the_backbone(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        model=ModelConfig("small_cnn", feature_dim=5),
        optimizer=OptimizerConfig(lr=0.01, head_lr=0.1),
        objective=ObjectiveConfig("cosface + center"),
    )
    _, above = made.optimizer.param_groups
    own = {id(each) for each in [*made.bare.feature_layer.parameters(), made.criterion.head.weight]}
    own |= {id(each) for each in made.criterion.parameters()}
    assert {id(each) for each in above["params"]} == own
    for _, _ in zip(range(2), made.steps(), strict=False):
        pass
    assert above["lr"] == pytest.approx(10 * made.optimizer.param_groups[0]["lr"])


NEW: dict[str, Any] = {
    "data": DataConfig(fraction=0.3, mixup=0.3, cutmix=1.0),
    "model": ModelConfig("small_cnn", freeze=("backbone.0",), freeze_batch_norm=True),
    "objective": ObjectiveConfig("cosface", class_weights="effective", label_smoothing=0.1),
    "optimizer": OptimizerConfig("adamw", lr=0.001, head_lr=0.01),
}


@pytest.mark.slow
def test_a_run_with_all_of_it_is_resumed_exactly(tmp_path: Path) -> None:
    from faults.test_paused import stopped_and_resumed

    settings = config(epochs=2, **NEW)
    whole = train(settings, folder=tmp_path / "whole", data=digits(), progress=False)
    resumed = stopped_and_resumed(settings, tmp_path / "run", digits(), (1, STEPS + 4))
    assert_same(whole, resumed)


def test_settings_are_written_where_they_are_set() -> None:
    """So that runs, studies and plans of older releases are described as they were."""
    plain, given = to_dict(config()), to_dict(config(**NEW))
    for group, names in {
        "data": {"mixup", "cutmix"},
        "model": {"freeze", "freeze_batch_norm"},
        "objective": {"class_weights", "label_smoothing"},
        "optimizer": {"head_lr"},
    }.items():
        assert not names & plain[group].keys()
        assert names <= given[group].keys()
    assert from_dict(given) == config(**NEW)


def test_smoothing_and_weights_are_those_of_terms_that_classify(tmp_path: Path) -> None:
    settings = ObjectiveConfig("cosface + center", class_weights="balanced", label_smoothing=0.2)
    made = objective_of(settings, [10, 30], ["cat", "dog"])(2, 4)
    cosface, center = made.terms["cosface"], made.terms["center"]
    assert (cosface.label_smoothing, cosface.weight.tolist()) == (0.2, [1.5, 0.5])
    assert (center.label_smoothing, center.weight) == (0.0, None)
    own = ObjectiveConfig("cosface", {"label_smoothing": 0.4}, label_smoothing=0.2)
    assert objective_of(own, [1, 1])(2, 4).terms["cosface"].label_smoothing == 0.4


def test_class_weights(tmp_path: Path) -> None:
    counts, names = [100, 10000], ["cat", "7"]
    balanced = class_weights("balanced", counts, names)
    assert balanced[0] / balanced[1] == pytest.approx(100)
    effective = class_weights("effective", counts, names)
    expected = (1 - 0.9999**10000) / (1 - 0.9999**100)
    assert effective[0] / effective[1] == pytest.approx(expected, rel=1e-5)
    assert sum(balanced) == pytest.approx(2)
    assert sum(effective) == pytest.approx(2)
    file = tmp_path / "weights.yaml"
    file.write_text("7: 0.5\ncat: 2\n")
    assert class_weights(str(file), counts, names) == [2.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat: 1\n", "dog is missing"),
        ("cat: 1\ndog: 2\nbird: 3\n", "bird is no class"),
        ("cat: 1\ndog: -2\n", "the weight of dog in .* must be"),
        ("cat: 1\ndog: much\n", "the weight of dog in .* must be"),
        ("cat: 0\ndog: 0.0\n", "gives every class the weight 0"),
        ("class,weight\ncat,1\n", "must hold a line for every class, as cat: 1.5, but holds"),
    ],
)
def test_files_of_class_weights_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "weights.yaml"
    file.write_text(text)
    with pytest.raises(LargeMarginError, match=message):
        class_weights(str(file), [1, 1], ["cat", "dog"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": DataConfig(mixup=0.2), "objective": ObjectiveConfig("discriminative")},
            r"data\.mixup gives every image two classes, which the term \w+ cannot",
        ),
        (
            {"data": DataConfig(cutmix=1.0), "objective": ObjectiveConfig("margin_distribution")},
            r"data\.cutmix gives every image two classes",
        ),
        (
            {"objective": ObjectiveConfig(class_weights="blanced")},
            "must be balanced, effective .* no such file",
        ),
        (
            {"objective": ObjectiveConfig("ldam", schedule="preset", class_weights="balanced")},
            "re-weights the classes of ldam late in training",
        ),
        (
            {"objective": ObjectiveConfig("margin_distribution", label_smoothing=0.1)},
            "It does not support label_smoothing",
        ),
        ({"optimizer": OptimizerConfig(head_lr=0.0)}, r"optimizer\.head_lr must be"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LargeMarginError, match=message):
        trainer(tmp_path, **changes)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_learns_from_mixed_labels_or_is_refused_at_the_beginning(
    tmp_path: Path, name: str
) -> None:
    settings = ObjectiveConfig(name, layers=("backbone.1",) if name == "layer_margin" else ())
    use = "pair" if "noisy" in needs_of(settings) else "none"
    changes = {"data": DataConfig(mixup=0.3), "noise": NoiseConfig(use), "objective": settings}
    if "soft_targets" in LOSSES[name].refuses and "labels" in LOSSES[name].needs:
        with pytest.raises(LargeMarginError, match=r"^data\.mixup gives every image two classes"):
            trainer(tmp_path, model=ModelConfig("mlp"), **changes)
        return
    made = trainer(tmp_path, model=ModelConfig("mlp"), **changes)
    next(made.steps())
    assert made.totals.read().steps == 1


def test_penalties_on_class_vectors_do_not_mind_mixed_labels(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        data=DataConfig(mixup=0.2),
        objective=ObjectiveConfig("cosface + 0.1*zero_centroid"),
    )
    next(made.steps())
    assert made.totals.read().steps == 1


def _noted(folders: list[Path]) -> Callable[..., None]:
    """The constructor of a journal, which notes its folder."""
    real = Journal.__init__

    def made(journal: Journal, folder: Path, **options: Any) -> None:
        folders.append(folder)
        real(journal, folder, **options)

    return made


def test_a_range_test_finds_rates_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept: list[Path] = []
    monkeypatch.setattr(Journal, "__init__", _noted(kept))
    settings = config(**PLAIN | {"objective": ObjectiveConfig()})
    found = rate_range(settings, data=digits(), steps=150, highest=1e6)
    assert found.diverged
    assert len(found.rates) < 150
    assert 1e-3 <= found.suggestion <= 1
    assert f"suggestion  --lr {found.suggestion:g}" in str(found)
    assert list(tmp_path.iterdir()) == []
    assert kept
    assert not kept[0].exists()
    again = rate_range(settings, data=digits(), steps=150, highest=1e6)
    assert again == found


def test_a_range_test_that_never_diverges_says_so() -> None:
    found = RateRange((0.001, 0.01, 0.1), (2.0, 1.5, 1.0))
    assert not found.diverged
    assert "the loss never diverges" in str(found)
    assert found.suggestion == 0.1
    assert RateRange((0.001, 0.01, 0.1, 0.5), (2.0, 1.1, 1.0, 5.0)).suggestion == 0.01
    for steps in (16, 17, 200):
        losses = tuple(2.0 - each / steps for each in range(steps))
        _, *curve = str(RateRange(tuple(range(1, steps + 1)), losses)).splitlines()[:-2]
        assert 8 <= len(curve) <= 16
        assert len(curve[0]) <= 20 + 40


def test_a_range_test_suggests_the_head_s_rate_too(tmp_path: Path) -> None:
    """In the ratio in which it was tried: the rate of the backbone alone would not train alike."""
    settings = config(**PLAIN | {"optimizer": OptimizerConfig(lr=0.001, head_lr=0.1)})
    found = rate_range(settings, data=digits(), steps=3)
    assert found.head == pytest.approx(100)
    lower = replace(found, rates=(0.001, 0.002, 0.3), losses=(2.0, 1.0, 2.0))
    assert "suggestion  --lr 0.002 --head_lr 0.2, to begin with" in str(lower)
    assert "head_lr" not in str(replace(lower, head=None))


def test_flips_average_the_features_of_an_image_and_its_mirror_image() -> None:
    model = build_model(ModelConfig("small_cnn"), 4, channels=1, size=(8, 8)).eval()
    images = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        mean = (model.features(images) + model.features(images.flip(3))) / 2
        flipped = with_flips(model)
        torch.testing.assert_close(flipped(images), model.head(mean))
        torch.testing.assert_close(flipped(images), flipped(images.flip(3)))
        assert not torch.allclose(flipped(images), model(images))
    assert not flipped.training
