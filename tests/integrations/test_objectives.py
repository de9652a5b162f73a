"""Objectives as text, for scikit-learn and skorch as for the command line."""

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is an extra")

from sklearn.datasets import load_iris

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.integrations.objective_text import objective_for
from largemargin.integrations.scikit_learn import LargeMarginClassifier


def test_a_sum_is_trained_with_its_weights_and_settings() -> None:
    X, y = load_iris(return_X_y=True)
    model = LargeMarginClassifier(
        "cosface + 0.5*sample_margin", objective_params={"cosface": {"margin": 0.1}}, epochs=2
    ).fit(X, y)
    objective = model.criterion_.objective
    assert objective.weights == {"cosface": 1.0, "sample_margin": 0.5}
    assert objective.terms["cosface"].margin == 0.1
    assert {"terms.cosface", "terms.sample_margin"} <= model.history_.keys()


def test_penalties_come_with_a_cross_entropy() -> None:
    built = objective_for("0.5*sample_margin + zero_centroid")(3, 4)
    assert built.weights == {"softmax": 1.0, "sample_margin": 0.5, "zero_centroid": 1.0}
    assert isinstance(built.terms["softmax"], lm.CrossEntropy)


@pytest.mark.parametrize(
    ("text", "params", "message"),
    [
        ("cosface + ", {}, "empty term"),
        ("cosface + cosface", {}, "cosface twice"),
        ("half*cosface", {}, r"cannot read the term 'half\*cosface'"),
        ("cosface + nothing", {}, "'nothing' is no loss"),
        ("cosface + sample_margin", {"margin": 0.1}, "Group settings by term: {cosface: {...}}"),
    ],
)
def test_sums_that_cannot_be_read(text: str, params: dict[str, float], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        objective_for(text, params)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("am_softmax", "cosface"), ("gce", "generalized_cross_entropy"), ("VSLoss", "vs_loss")],
)
def test_names_of_other_libraries_are_answered(name: str, ours: str) -> None:
    with pytest.raises(LargeMarginError, match=rf"{name}' is no loss\. Closest: {ours}\. "):
        objective_for(name)


@pytest.mark.parametrize("name", ["prior", "class_counts"])
def test_counts_are_taken_from_the_labels(name: str) -> None:
    """For every loss that has them, also one of several terms."""
    text, settings = "cosface + 0.1*zero_centroid", {"cosface": {name: "auto"}}
    built = objective_for(text, settings, [40, 20, 8])(3, 4)
    kept = getattr(built.terms["cosface"], name)
    assert (kept.tolist() if name == "prior" else kept) == [40, 20, 8]
    for given, counts in (("counted", [40, 20, 8]), ("auto", None)):
        with pytest.raises(LargeMarginError, match=rf"{name} of CosFace must be .* but '{given}'"):
            objective_for("cosface", {name: given}, counts)(3, 4)


def test_a_loss_with_counts_of_its_own_has_no_second_prior() -> None:
    with pytest.raises(LargeMarginError, match="its prior is made from class_counts"):
        objective_for("logit_adjustment", {"prior": "auto"}, [40, 20, 8])(3, 4)
