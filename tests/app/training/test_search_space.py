"""What tuning may change: every number of every loss has limits or a reason to have none."""

import inspect

import pytest

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.app.config import ObjectiveConfig, OptimizerConfig, RunConfig
from largemargin.app.training.objective import objective_of, parse_objective
from largemargin.app.training.tuning import (
    dimension_of,
    rounded,
    search_space,
    with_values,
)
from largemargin.losses.base.setting_ranges import Choice, Range
from largemargin.losses.base.settings import settings_of

COUNTS = [30] * 5


def config(objective: str, **settings: object) -> RunConfig:
    return RunConfig(objective=ObjectiveConfig(objective, settings))


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_every_number_of_a_loss_has_limits_or_a_reason(name: str) -> None:
    objective = objective_of(ObjectiveConfig(name), COUNTS)(len(COUNTS), 2)
    loss = name if name != "cross_entropy" else "softmax"
    for setting in settings_of(objective):
        if setting.term == loss:
            known = dimension_of(name, setting.name) or setting.name in lm.LOSSES[name].not_tuned
            assert known, setting.path


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_the_tables_of_a_loss_name_settings_that_exist(name: str) -> None:
    kind = lm.LOSSES[name]
    taken = set().union(*(inspect.signature(each).parameters for each in kind.__mro__[:-1]))
    for table in ("search_space", "limits", "not_tuned"):
        own = getattr(kind, table).keys() - getattr(lm.Loss, table).keys()
        assert own <= taken, table
    assert kind.fixed <= taken


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_the_corners_of_the_space_build(name: str) -> None:
    base = config(name)
    space, now = search_space(base, class_counts=COUNTS)
    assert space.keys() == now.keys()
    for corner in ("low", "high"):
        values = {
            path: getattr(each, corner) if isinstance(each, Range) else each.values[-1]
            for path, each in space.items()
        }
        tuned = with_values(base, values)
        objective_of(tuned.objective, COUNTS)(len(COUNTS), 2)
        again, tuned_now = search_space(tuned, class_counts=COUNTS)
        assert again.keys() == space.keys()
        assert tuned_now == pytest.approx({path: values[path] for path in space}, abs=1e-12)


def test_values_as_they_are_change_nothing_that_matters() -> None:
    base = config("cosface", margin=0.2)
    _, now = search_space(base, class_counts=COUNTS)
    tuned = with_values(base, now)
    assert tuned.optimizer == base.optimizer
    assert tuned.objective.settings["margin"] == 0.2
    # "auto" became the number it stands for.
    assert tuned.objective.settings["scale"] == pytest.approx(now["objective.cosface.scale"])


def test_weights_of_terms_are_tuned_but_not_the_first_one() -> None:
    base = config("cross_entropy + 0.5*sample_margin")
    space, now = search_space(base, class_counts=COUNTS)
    assert now["objective.sample_margin.weight"] == 0.5
    assert "objective.cross_entropy.weight" not in space
    tuned = with_values(base, {"objective.sample_margin.weight": 0.25})
    assert tuned.objective.name == "cross_entropy + 0.25*sample_margin"


def test_a_penalty_keeps_its_cross_entropy() -> None:
    tuned = with_values(config("compactness", radius=1.0), {"objective.compactness.radius": 0.3})
    names = [term.name for term in parse_objective(tuned.objective)]
    assert names == ["cross_entropy", "compactness"]
    assert parse_objective(tuned.objective)[1].settings == {"radius": 0.3}


def test_a_range_stretches_to_the_given_value() -> None:
    base = RunConfig(optimizer=OptimizerConfig(lr=3.0, weight_decay=0.0, clip_norm=2.0))
    space, _ = search_space(base, class_counts=COUNTS)
    assert space["optimizer.lr"] == Range(1e-3, 3.0)
    assert space["optimizer.weight_decay"] == Range(0.0, 1e-2, log=False)
    assert isinstance(space["optimizer.clip_norm"], Choice)
    assert 2.0 in space["optimizer.clip_norm"].values


def test_changes_of_the_space() -> None:
    changes = {"optimizer.lr": [0.01, 0.5], "optimizer.clip_norm": None}
    space, now = search_space(RunConfig(), class_counts=COUNTS, changes=changes)
    assert space["optimizer.lr"] == Range(0.01, 0.5)
    assert "optimizer.clip_norm" not in space
    assert "optimizer.clip_norm" not in now
    choices, _ = search_space(
        RunConfig(), class_counts=COUNTS, changes={"optimizer.lr": [0.1, 0.2, 0.05]}
    )
    assert choices["optimizer.lr"] == Choice((0.1, 0.2, 0.05))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.lrr": [0, 1]}, "optimizer.lr"),
        ({"optimizer.lr": 0.1}, "must be \\[low, high\\]"),
        ({"optimizer.lr": [0.5, 0.1]}, "must be \\[low, high\\]"),
        ({"optimizer.lr": [0.1, 0.1]}, "must be \\[low, high\\]"),
        ({"objective.cosface.margin": [0.1, 0.2]}, "nothing that can be tuned here"),
    ],
)
def test_wrong_changes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        search_space(RunConfig(), class_counts=COUNTS, changes=changes)


def test_drawn_numbers_are_short() -> None:
    assert rounded(0.0123456789) == 0.01235
    assert rounded(None) is None
    assert rounded(3) == 3


def test_class_weights_and_smoothing_of_a_run_stay_while_its_loss_is_tuned() -> None:
    """A file of weights is for the names of the classes, which no range depends on."""
    objective = ObjectiveConfig("cosface", class_weights="names.yaml", label_smoothing=0.2)
    space, _ = search_space(RunConfig(objective=objective), class_counts=COUNTS)
    assert "objective.cosface.margin" in space
    assert not [path for path in space if "label_smoothing" in path]
    tuned = with_values(RunConfig(objective=objective), {"objective.cosface.margin": 0.3})
    assert tuned.objective.class_weights == "names.yaml"
    assert tuned.objective.label_smoothing == 0.2
