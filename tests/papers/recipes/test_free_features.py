"""Eight classes on the sphere with nothing but features and class vectors."""

import pytest
from largemargin_papers.recipes.free_features import free_class_margin, mean_class_margin

from largemargin.app.training import ObjectiveConfig

LOSS = ObjectiveConfig("lm_softmax", {"lm_softmax": {"scale": 10.0}})
FOUR = {"classes": 4, "dim": 3}


def test_classes_are_spread_to_the_corners_of_a_tetrahedron() -> None:
    begun = free_class_margin(LOSS, **FOUR, steps=1, seed=0)
    done = free_class_margin(LOSS, **FOUR, steps=150, seed=0)
    assert begun < 90
    assert done == pytest.approx(109.47, abs=1.0)


def test_the_mean_is_over_starts() -> None:
    settings = {"scale": 10.0}
    mean, std = mean_class_margin("lm_softmax", settings, **FOUR, steps=2, starts=2)
    values = [free_class_margin(LOSS, **FOUR, steps=2, seed=seed) for seed in (0, 1)]
    assert values[0] != values[1]
    assert mean == pytest.approx(sum(values) / 2)
    assert std == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert mean_class_margin("lm_softmax", settings, **FOUR, steps=2, starts=1)[1] is None
