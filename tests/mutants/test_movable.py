"""Which hyper-parameters of a loss can be moved, how far, and after somebody else moved them."""

import math

import pytest

import largemargin as lm
from largemargin.integrations.objective_text import objective_for
from largemargin.losses.base.settings import WEIGHT, find_setting, settings_of

SHARE = {"at_least": 0, "at_most": 1}
RADIANS = {"at_least": 0, "below": math.pi}
LIMITS = {
    **{
        key: {"margin": {}}
        for key in ("biased_softmax", "dense_hinge", "max_hinge", "max_softplus")
    },
    "adaface": {"margin": RADIANS, "concentration": {"above": 0}},
    **{key: {"margin": RADIANS} for key in ("arcface", "curricularface", "elasticface")},
    "center": {"rate": SHARE},
    "cosface": {"margin": {"at_least": 0, "below": 3 / 2}},
    "generalized_cross_entropy": {"q": {"at_least": 1e-15, "at_most": 1}},
    "gm_softmax": {key: {} for key in ("alpha1", "beta1", "alpha2", "beta2")},
    "label_smoothing": {"smoothing": SHARE},
    "ldam": {"max_margin": {"at_least": 0, "below": 3 / 2}},
    "logit_norm": {"temperature": {"at_least": 1e-15, "at_most": 1e15}},
    "magface": {key: {"above": 0} for key in ("min_norm", "max_norm")}
    | dict.fromkeys(("min_margin", "max_margin"), RADIANS),
    "margin_distribution": {"mu": {"above": 0, "at_most": 1}},
    "margin_hinge": {"threshold": {}},
    "symmetric_cross_entropy": {"log_zero": {"below": 0}},
    "unified_margin": {"m1": {"above": 0}, "m2": RADIANS},
}
"""What hyper-parameters may become, with three classes; others are >= 0."""
COMMON = {"scale": {"above": 0}, "label_smoothing": SHARE}


def without_hint(limits):
    return {key: value for key, value in limits.items() if key != "hint"}


def names(loss):
    return [setting.name for setting in settings_of(lm.Objective(t=loss))]


def test_numbers_that_say_how_something_is_computed_are_not_moved():
    assert "eps" not in names(lm.MarginHinge())
    assert not {"eps", "p"} & set(names(lm.LayerMargin()))
    assert "label_smoothing" not in names(lm.CentroidMargin())  # refused
    for loss in (lm.CosFace(), lm.UnifiedMargin(), lm.Discriminative(2, 2)):
        assert len(names(loss)) == len(set(names(loss)))


def test_whole_numbers_are_moved_too():
    setting = find_setting(lm.Objective(face=lm.CosFace(scale=64)), "scale")
    setting.move(32.0)
    assert setting.value == 32


def test_a_number_set_by_hand_is_moved_again():
    setting = find_setting(lm.Objective(face=lm.CosFace(margin=0.4)), "margin")
    setting.move(0.2)
    setting.loss.margin = 0.3
    setting.move(0.2)
    assert setting.value == 0.2
    assert setting.built == 0.3


@pytest.mark.parametrize(
    ("loss", "name", "num_classes", "limits"),
    [
        (lm.CosFace(), "margin", None, {"at_least": 0, "below": 2}),
        (lm.CosFace(), "margin", 1, {"at_least": 0, "below": 1}),
        (lm.CosFace(), "margin", 5, {"at_least": 0, "below": 1.25}),
        (lm.LDAM([3, 2, 1]), "max_margin", 9, {"at_least": 0, "below": 1.5}),
        (lm.MaxHinge(), "margin", None, {}),
        (lm.DenseHinge(), "margin", None, {}),
        (lm.MaxSoftplus(), "margin", None, {}),
        (lm.BiasedSoftmax(), "margin", None, {}),
    ],
    ids=str,
)
def test_limits_of_margins(loss, name, num_classes, limits):
    assert without_hint(loss.setting_limits(name, num_classes)) == limits


@pytest.mark.parametrize("name", lm.LOSSES)
def test_limits_of_every_hyper_parameter(name):
    objective = objective_for(name, class_counts=[3, 2, 1])(3, 2)
    loss = next(term for term in objective.terms.values() if type(term) is lm.LOSSES[name])
    expected = COMMON | LIMITS.get(name, {})
    for key in expected.keys() | (set(names(loss)) - {WEIGHT}):
        limits = without_hint(loss.setting_limits(key, 3))
        assert limits == expected.get(key, {"at_least": 0}), key


def test_weights_of_terms_have_no_limits():
    find_setting(lm.Objective(face=lm.CosFace()), "face.weight").check("end", -1.0)
