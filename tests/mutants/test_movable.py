"""Which hyper-parameters of a loss can be moved, how far, and after somebody else moved them."""

import pytest

import largemargin as lm
from largemargin.losses.base.settings import _limits, find_setting, settings_of


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
    assert _limits(loss, name, num_classes)[0] == limits
