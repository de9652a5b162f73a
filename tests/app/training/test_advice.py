"""Advice from labels: rules, evidence, estimated label noise, and that JSON holds all of it."""

import json
import shlex
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="label noise is estimated by a linear head")

from sklearn.datasets import load_digits

import largemargin as lm
from largemargin.app.training.advice import NoiseEstimate, estimate_label_noise

TOLERANCE = 0.05
"""Of the estimated share of wrong labels on digits."""


def with_wrong_labels(share: float, seed: int = 0) -> tuple[Any, Any, float]:
    """Digits, labels of which a share is another class, and the share that really is."""
    X, y = load_digits(return_X_y=True)
    draw = np.random.default_rng(seed)
    wrong = draw.random(len(y)) < share
    labels = np.where(wrong, (y + draw.integers(1, 10, len(y))) % 10, y)
    return X, labels, float((labels != y).mean())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4])
def test_label_noise_is_estimated(share: float) -> None:
    X, labels, true = with_wrong_labels(share, seed=1)
    found = estimate_label_noise(X, labels)
    assert found.share == pytest.approx(true, abs=TOLERANCE)
    assert not found.frozen


def test_where_a_linear_head_fails_nothing_is_said() -> None:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(400, 2))
    labels = (X[:, 0] * X[:, 1] > 0).astype(int)  # no line separates these
    found = estimate_label_noise(X, labels)
    assert found.share is None or found.share > 0.3
    unlearnable = estimate_label_noise(X, draw.integers(0, 10, 400))
    assert unlearnable.share is None
    assert "cannot tell" in unlearnable.told


def test_few_samples_tell_no_noise() -> None:
    X, labels, _ = with_wrong_labels(0.4)
    for count, said in ((2, "no two samples of a class"), (100, "too few")):
        found = lm.advise(labels[:count], X[:count])
        assert found.data.label_noise is None
        assert said in found.data.noise_from
        assert found.preset == "few_labels"


def test_labels_that_are_chance_are_not_called_noise() -> None:
    draw = np.random.default_rng(0)
    for _ in range(3):
        found = estimate_label_noise(draw.normal(size=(400, 3)), draw.integers(0, 2, 400))
        assert found.share is None
        assert "than chance" in found.told


def held_out(monkeypatch: pytest.MonkeyPatch, wrong: list[float]) -> NoiseEstimate:
    """The estimate where labels held out are contradicted: shares, from the surest part down."""
    one_part = 64
    flags = np.concatenate([np.arange(one_part) < share * one_part for share in wrong])

    class Head:
        held_out_margins_ = np.where(flags, -1.0, 1.0)
        held_out_gaps_ = -np.arange(len(flags), dtype=float)

        def __init__(self, **_: Any) -> None:
            pass

        def fit(self, rows: Any, labels: Any) -> None:
            pass

    monkeypatch.setattr("largemargin.integrations.scikit_learn.LargeMarginClassifier", Head)
    X = np.random.default_rng(0).normal(size=(len(flags), 3))
    return estimate_label_noise(X, np.arange(len(flags)) % 2)


def test_the_share_is_that_of_the_surest_half(monkeypatch: pytest.MonkeyPatch) -> None:
    found = held_out(monkeypatch, [0.25] * 8 + [0.5] * 8)
    assert (found.share, found.told) == (0.25, "a linear head, cross-validated on 1,024 samples")
    # Wrong labels would not become more below the surest ones, but hard samples do.
    mixed = held_out(monkeypatch, [0.0] * 3 + [0.5] + [0.5] * 4 + [0.0] * 8)
    assert mixed.share is None
    said = "at most 12%, as a linear head meets 84% of the labels held out and cannot tell hard"
    assert mixed.told == f"{said} samples from wrong labels"


def test_chance_is_two_deviations_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 labels of two classes: 1/2 + 2 / 64."""
    at_the_limit = held_out(monkeypatch, [30 / 64] * 16)
    assert at_the_limit.told.startswith("a linear head meets no more of the labels held out than")
    better = held_out(monkeypatch, [30 / 64] * 15 + [29 / 64])
    assert better.share == 30 / 64


def test_a_rare_class_that_is_learned_is_no_chance() -> None:
    """Chance is 90 % of the labels here, so that a linear head can be little better."""
    labels = (np.arange(400) % 10 == 0).astype(int)
    X = np.random.default_rng(0).normal(size=(400, 3)) + 20 * labels[:, None]
    found = estimate_label_noise(X, labels)
    assert found.share == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_features_may_be_tensors_of_any_type(dtype: torch.dtype) -> None:
    X, labels, _ = with_wrong_labels(0.0)
    features = torch.from_numpy(X).to(dtype).requires_grad_()
    assert lm.advise(torch.from_numpy(labels), features).data.label_noise == pytest.approx(
        0, abs=0.01
    )


def labels_of(*counts: int) -> list[str]:
    return [f"class {index}" for index, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    ("labels", "settings", "preset"),
    [
        (labels_of(*[20] * 10), {}, "few_labels"),
        (labels_of(*[250] * 10), {}, "few_labels"),
        (labels_of(*[300] * 10), {}, None),
        (labels_of(*[1000] * 10), {}, None),
        (labels_of(100, 50, 20), {}, "long_tail"),
        (labels_of(99, 50, 20), {}, "few_labels"),
        (labels_of(100, 50, 20), {"pretrained": True}, "fine_tuning"),
    ],
)
def test_rules(labels: list[str], settings: dict[str, Any], preset: str | None) -> None:
    found = lm.advise(labels, **settings)
    assert found.preset == preset
    assert found.data.label_noise is None
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    words = shlex.split(found.command)
    first, *others = json.loads(words[words.index("--methods") + 1])
    if preset in (None, "fine_tuning"):
        assert [first, *others] == ["label_smoothing", "cosface"]
    else:
        assert (first["label"], others) == (preset, ["label_smoothing"])
        assert first["name"] == found.objective
    if preset is None:
        assert found.objective == "cross_entropy"
        assert found.evidence == "no measured gain"
    else:
        chosen = lm.preset(preset)
        assert (found.objective, found.source) == (chosen.objective.name, chosen.source)
        assert found.evidence == chosen.evidence()


def test_wrong_labels_come_first() -> None:
    X, labels, _ = with_wrong_labels(0.4)
    found = lm.advise(labels, X, data_name="photos/")
    assert found.preset == "label_noise"
    assert found.command.startswith("largemargin compare --data photos/ --seeds 5 --methods '[")
    lines = str(found).splitlines()
    assert len(lines) <= 16
    assert lines[1].startswith("label noise about 4")
    assert lines[-1] == f"check       {found.command}"


def test_embeddings_are_frozen() -> None:
    draw = np.random.default_rng(0)
    X, labels = draw.normal(size=(60, 200)), np.arange(60) % 3
    X[:, :3] += 8 * np.eye(3)[labels]
    found = lm.advise(labels, X)
    assert found.preset == "frozen_features"
    assert "LargeMarginClassifier(hidden_sizes=())" in found.command
    assert "docs/how-to/embeddings.md" in found.caveats[0]


def test_what_contradicts_the_proposal_is_said() -> None:
    found = lm.advise(labels_of(*[10] * 200))
    assert found.preset == "few_labels"
    assert "Your 200 classes are far from that" in found.caveats[0]


def test_labels_that_are_none() -> None:
    with pytest.raises(lm.LargeMarginError, match="at least 2 classes"):
        lm.advise([3, 3, 3])
    with pytest.raises(lm.LargeMarginError, match="one class for each"):
        lm.advise([])
    for missing in (["a", "b", None], [0.0, 1.0, float("nan")]):
        with pytest.raises(lm.LargeMarginError, match="1 of 3 are missing"):
            lm.advise(missing, np.zeros((3, 4)))
    with pytest.raises(lm.LargeMarginError, match=r"numbers such as 0\.5"):
        lm.advise([0.0, 0.5, 1.0])
    with pytest.raises(lm.LargeMarginError, match="one type, but int and str"):
        lm.advise([0, 1, "a"])
    with pytest.raises(lm.LargeMarginError, match="a row for each of the 3 labels"):
        lm.advise([0, 1, 1], np.zeros((2, 4)))


@pytest.mark.parametrize(
    "features",
    [np.ones((90, 8)), np.full((90, 8), 1e30, dtype=np.float32), np.eye(90, 8)[[0] * 90]],
)
def test_features_that_are_all_equal_tell_no_noise(features: Any) -> None:
    found = lm.advise([0, 1, 2] * 30, features)
    assert found.data.label_noise is None
    assert "no two samples of a class differ" in found.data.noise_from
    assert "nan" not in str(found)


def test_one_sample_a_class_tells_no_noise() -> None:
    assert lm.advise(range(5), np.eye(5)).data.label_noise is None


def test_labels_of_any_type_and_features_that_numpy_has_not() -> None:
    X, y = load_digits(return_X_y=True)
    X, y = X[:300], y[:300]
    wanted = lm.advise(y, X.astype(np.float32)).data
    tensors = torch.tensor(X, dtype=torch.bfloat16, requires_grad=True)
    for labels in (
        [torch.tensor(each) for each in y],
        [*y],
        (each for each in y),
        y.astype(float),
    ):
        assert lm.advise(labels, tensors).data == wanted


@pytest.mark.parametrize(
    ("labels", "features", "said"),
    [
        ("photos/", None, r"\(N,\), but str was given\. The order is advise\(labels, features\)"),
        (None, None, "but NoneType was given"),
        ({0: 1, 1: 1}, None, "but dict was given"),
        (torch.tensor(3), None, "but Tensor was given"),
        (np.eye(3), np.eye(3), "rows of several were given"),
        ([(1, 2), (2, 3)], None, "rows of several were given"),
        ([torch.zeros(2), torch.ones(2)], None, "rows of several were given"),
        ([0, 1] * 9, np.full((18, 3), np.nan), r"features must be finite numbers.* NaN"),
        ([0, 1] * 9, np.ones((18, 3), dtype=object), "features must be finite numbers"),
    ],
)
def test_what_is_no_training_set(labels: Any, features: Any, said: str) -> None:
    with pytest.raises(lm.LargeMarginError, match=said):
        lm.advise(labels, features)
