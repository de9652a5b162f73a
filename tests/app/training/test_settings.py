"""Settings: YAML files, objectives as text, learning rates as the papers print them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from largemargin.app.data import DataConfig
from largemargin.app.training import (
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    from_dict,
    read_config,
    to_dict,
    write_config,
)
from largemargin.app.training.objective import needs_of, objective_of, parse_objective
from largemargin.app.training.step import LearningRate, make_optimizer
from largemargin.errors import LargeMarginError


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = RunConfig(
        name="größer: ja",
        objective=ObjectiveConfig("cosface", {"margin": 0.1}, layers=("a", "b")),
        optimizer=OptimizerConfig(milestones=(60, 120), clip_norm=None),
        ema=0.99,
    )
    write_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config
    assert from_dict(to_dict(config)) == config
    assert from_dict({}) == RunConfig()


def test_yaml_may_write_small_numbers_without_a_point(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optimizer: {lr: 1e-4, weight_decay: 0}\n")
    optimizer = read_config(tmp_path / "a.yaml").optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-4, 0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, r"epoch is no setting\. Closest: epochs"),
        ({"data": {"nme": "x"}}, r"data\.nme is no setting\. Closest: name"),
        ({"data": 3}, "data must be a group of settings, but 3 was given"),
        ({"epochs": "three"}, r"epochs must be a int, but 'three' \(str\) was given"),
        ({"epochs": True}, "epochs must be a int"),
        ({"compile": 1}, "compile must be a bool"),
        ({"optimizer": {"lr": "fast"}}, r"optimizer\.lr must be a float, but 'fast'"),
        ({"optimizer": {"milestones": 60}}, r"optimizer\.milestones must be a list"),
        ({"optimizer": {"milestones": ["x"]}}, r"optimizer\.milestones\[0\] must be a int"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, but 'fp8'"),
        ({"objective": {"settings": [1]}}, r"objective\.settings must be a group of settings"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        from_dict(values)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text"])
def test_files_that_are_no_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(LargeMarginError, match=r"a\.yaml"):
        read_config(tmp_path / "a.yaml")
    with pytest.raises(LargeMarginError, match="cannot read"):
        read_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "settings", "terms"),
    [
        ("softmax", {}, [("cross_entropy", 1.0, {})]),
        ("cosface", {"margin": 0.1}, [("cosface", 1.0, {"margin": 0.1})]),
        (
            "discriminative",
            {"margin": 3},
            [("cross_entropy", 1.0, {}), ("discriminative", 1.0, {"margin": 3})],
        ),
        (
            "arcface + 0.5*sample_margin+1e+1 * zero_centroid",
            {"arcface": {"margin": 0.2}},
            [
                ("arcface", 1.0, {"margin": 0.2}),
                ("sample_margin", 0.5, {}),
                ("zero_centroid", 10.0, {}),
            ],
        ),
        (
            "0.5*sample_margin",
            {"softmax": {"label_smoothing": 0.1}, "sample_margin": {}},
            [("cross_entropy", 1.0, {"label_smoothing": 0.1}), ("sample_margin", 0.5, {})],
        ),
    ],
)
def test_objectives_as_text(name: str, settings: dict[str, Any], terms: list[Any]) -> None:
    assert parse_objective(ObjectiveConfig(name, settings)) == terms


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("", {}, "empty term"),
        ("cosface +", {}, "empty term"),
        ("cosface - arcface", {}, "cannot read the term 'cosface - arcface'"),
        ("x*cosface", {}, "cannot read the term"),
        ("1.2.3*cosface", {}, "cannot read the term"),
        ("cosfase", {}, "Closest: cosface"),
        ("cosface + cosface", {}, "cosface twice"),
        ("cosface + center", {"margin": 1}, r"Group settings by term: \{cosface: \{\.\.\.\}\}"),
    ],
)
def test_objectives_that_cannot_be_read(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        parse_objective(ObjectiveConfig(name, settings))


def test_objectives_are_filled_in_with_what_the_data_say() -> None:
    built = objective_of(ObjectiveConfig("ldam + 0.1*discriminative"), [9, 3, 1])(3, 4)
    assert list(built.terms) == ["ldam", "discriminative"]
    assert built.weights == {"ldam": 1.0, "discriminative": 0.1}
    margins = built.terms["ldam"].margins
    assert margins.argmax() == 2
    assert needs_of(ObjectiveConfig("stability")) >= {"noisy"}
    assert "noisy" not in needs_of(ObjectiveConfig("cosface"))


def rates(epochs: int, steps: int = 4, **settings: Any) -> list[float]:
    rate = LearningRate(OptimizerConfig(**settings), epochs=epochs, steps_per_epoch=steps)
    return [rate.at(step) for step in range(epochs * steps)]


def test_the_papers_learning_rates() -> None:
    # LMD and ROB: 1e-3, divided by 5 at epochs 60, 120, 160.
    lmd = rates(200, schedule="steps", lr=1e-3, factor=0.2, milestones=(60, 120, 160), by="epoch")
    expected = {0: 1e-3, 59: 1e-3, 60: 2e-4, 119: 2e-4, 120: 4e-5, 160: 8e-6, 199: 8e-6}
    for epoch, value in expected.items():
        assert lmd[4 * epoch] == lmd[4 * epoch + 3] == pytest.approx(value)
    # LMS: 0.1 * 10^(-3 e / 49) over 50 epochs.
    lms = rates(50, schedule="log_linear", lr=0.1, final_lr=1e-4, by="epoch")
    for epoch in range(50):
        assert lms[4 * epoch + 2] == pytest.approx(0.1 * 10 ** (-3 * epoch / 49))


def test_rates_that_change_every_step() -> None:
    cosine = rates(3, lr=1.0, schedule="cosine", warmup_epochs=1)
    assert cosine[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert cosine[4] == 1.0
    assert cosine[-1] == pytest.approx(0.0)
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    cycle = rates(5, lr=1.0, schedule="one_cycle")
    assert cycle[0] == pytest.approx(0.04)
    assert max(cycle) == pytest.approx(1.0, abs=0.02)
    assert cycle[-1] == pytest.approx(1e-4)
    assert rates(2, lr=0.3, schedule="constant") == [0.3] * 8
    falling = {"schedule": "log_linear", "lr": 1.0, "final_lr": 1e-3}
    assert rates(2, steps=2, **falling) == pytest.approx([1.0, 0.1, 0.01, 1e-3])


def test_rates_rise_to_the_given_one_and_fall_to_the_last() -> None:
    falling: dict[str, Any] = {"schedule": "log_linear", "lr": 0.5, "final_lr": 0.005}
    by_epoch = rates(4, steps=3, warmup_epochs=1, by="epoch", **falling)
    assert by_epoch[:3] == pytest.approx([0.125, 0.25, 0.375])
    assert by_epoch[3:] == pytest.approx([0.5] * 3 + [0.05] * 3 + [0.005] * 3)
    # A warm-up that ends within an epoch: the rest of it has the full rate, as the next one.
    half = rates(3, steps=4, warmup_epochs=0.5, by="epoch", **falling)
    assert half[2:] == pytest.approx([0.5] * 6 + [0.005] * 4)
    cosine = rates(1, steps=5, lr=1.0, final_lr=0.2, schedule="cosine")
    assert [cosine[0], cosine[2], cosine[4]] == pytest.approx([1.0, 0.6, 0.2])


def test_one_cycle_rises_in_a_fifth_of_the_steps() -> None:
    cycle = rates(1, steps=21, lr=1.0, schedule="one_cycle")
    assert cycle[:5] == sorted(cycle[:5])
    assert [cycle[0], cycle[2], cycle[4]] == pytest.approx([0.04, 0.52, 1.0])
    assert [cycle[12], cycle[20]] == pytest.approx([(1 + 1e-4) / 2, 1e-4])


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle"])
def test_rates_of_a_single_step_and_after_the_last(schedule: Any) -> None:
    (only,) = rates(1, steps=1, lr=0.5, schedule=schedule)
    assert only == pytest.approx(0.5 if schedule == "cosine" else 0.02)
    config = OptimizerConfig(schedule=schedule, final_lr=0.01)
    rate = LearningRate(config, epochs=2, steps_per_epoch=3)
    assert rate.at(9) == rate.at(6) == rate.at(5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_take_their_settings(name: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    config = OptimizerConfig(name, lr=0.1, weight_decay=0.01)
    optimizer = make_optimizer(config, [weight, frozen])
    group = optimizer.param_groups[0]
    assert type(optimizer).__name__.lower() == name
    assert group["params"] == [weight]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert isinstance(group["lr"], float)
    rate = LearningRate(config, epochs=2, steps_per_epoch=2)
    assert rate.set(optimizer, 3) == group["lr"] == rate.at(3)
    assert not group["fused"]  # such kernels are for accelerators


@pytest.mark.parametrize(
    ("settings", "nesterov"),
    [({}, True), ({"nesterov": False}, False), ({"momentum": 0.0}, False)],
)
def test_nesterov_needs_momentum(settings: dict[str, Any], nesterov: bool) -> None:
    config = OptimizerConfig("sgd", **settings)
    (group,) = make_optimizer(config, [torch.nn.Parameter(torch.ones(3))]).param_groups
    assert (group["momentum"], group["nesterov"]) == (settings.get("momentum", 0.9), nesterov)


def test_a_rate_on_the_device_is_changed_in_place() -> None:
    """A CUDA graph reads the tensor it was captured with."""
    config = OptimizerConfig("sgd", lr=0.5, clip_norm=None, schedule="cosine")
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = make_optimizer(config, weights, on_device=True)
    kept = optimizer.param_groups[0]["lr"]
    assert (kept.dtype, kept.item()) == (torch.float32, 0.5)
    LearningRate(config, epochs=1, steps_per_epoch=3).set(optimizer, 1)
    assert optimizer.param_groups[0]["lr"] is kept
    assert kept.item() == 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, r"optimizer\.lr must be"),
        ({"weight_decay": -1.0}, r"optimizer\.weight_decay must be"),
        ({"weight_decay": 1e308}, r"below 3.4e\+38 as all of float32, but 1e\+308"),
        ({"momentum": -1.0}, r"optimizer\.momentum must be"),
        ({"momentum": 1.0}, r"optimizer\.momentum must be"),
        ({"clip_norm": 0.0}, r"optimizer\.clip_norm must be"),
    ],
)
def test_optimizers_refuse_what_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        make_optimizer(OptimizerConfig(**settings), [torch.nn.Parameter(torch.ones(3))])
    make_optimizer(OptimizerConfig(clip_norm=0.5), [torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(LargeMarginError, match="milestones is empty"):
        LearningRate(OptimizerConfig(schedule="steps"), epochs=2, steps_per_epoch=2)
    for name, value in (("final_lr", -1.0), ("factor", 0.0), ("warmup_epochs", -1.0)):
        with pytest.raises(LargeMarginError, match=name):
            LearningRate(OptimizerConfig(**{name: value}), epochs=2, steps_per_epoch=2)
    with pytest.raises(LargeMarginError, match="final_lr above 0"):
        LearningRate(OptimizerConfig(schedule="log_linear"), epochs=2, steps_per_epoch=2)


def test_later_settings_are_written_only_where_they_are_set(tmp_path: Path) -> None:
    """What older releases wrote about runs, studies and plans stays equal to what is written."""
    assert "test" not in to_dict(RunConfig())["data"]
    config = RunConfig(data=DataConfig(test=0.2))
    assert to_dict(config)["data"]["test"] == 0.2
    for each in (config, RunConfig()):
        write_config(each, tmp_path / "config.yaml")
        assert read_config(tmp_path / "config.yaml") == each
