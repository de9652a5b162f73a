"""Methods of a comparison: names, YAML, and softmax among them in any case."""

import pytest

from largemargin import LargeMarginError
from largemargin.app.config import RunConfig
from largemargin.app.training.comparison import Method, read_methods


def titles(given: object) -> list[str]:
    return [method.title for method in read_methods(given)]  # type: ignore[arg-type]


def test_softmax_is_always_among_them_and_first() -> None:
    assert titles("cosface,kobayashi") == ["cross_entropy", "cosface", "kobayashi"]
    assert titles("cosface, cross_entropy") == ["cross_entropy", "cosface"]
    assert titles("softmax,cosface") == ["softmax", "cosface"]


def test_another_cross_entropy_is_not_the_baseline() -> None:
    smoothed = {"name": "cross_entropy", "label": "smooth", "settings": {"label_smoothing": 0.1}}
    assert titles([smoothed]) == ["cross_entropy", "smooth"]


def test_sums_and_yaml_lists() -> None:
    assert titles("cross_entropy + 0.5*sample_margin")[1] == "cross_entropy + 0.5*sample_margin"
    assert titles("[cosface, {name: cosface, label: wide}]")[1:] == ["cosface", "wide"]


def test_own_settings_reach_the_run() -> None:
    method = read_methods(
        [{"name": "cosface", "settings": {"margin": 0.2}, "optimizer": {"lr": 0.3}}]
    )[1]
    config = method.config(RunConfig())
    assert config.objective.name == "cosface"
    assert config.objective.settings == {"margin": 0.2}
    assert (config.optimizer.lr, config.optimizer.momentum) == (0.3, 0.9)


def test_folders_get_plain_names() -> None:
    assert Method("cross_entropy + 0.5*sample_margin").slug == "cross_entropy_0.5_sample_margin"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cross_entropy", "beside softmax"),
        ("cosface,cosface", "two methods are called 'cosface'"),
        ([{"nam": "cosface"}], "group of settings with a name"),
        ([{"name": "cosface", "lable": "x"}], "label"),
        ([3], "a method is the name"),
        ("[cosface", "not YAML"),
    ],
)
def test_wrong_methods_are_refused(given: object, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        read_methods(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Method("cosfase"), "cosface"),
        (Method("cosface", optimizer={"lrr": 1}), "cosface: optimizer.lrr"),
        (Method("cosface", optimizer={"lr": "fast"}), "lr"),
    ],
)
def test_wrong_settings_are_refused_before_training(method: Method, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        method.config(RunConfig())
