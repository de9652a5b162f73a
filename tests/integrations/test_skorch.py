"""skorch trains with any objective: attached to its module, searched, saved and copied."""

import importlib
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from torch import nn

import largemargin as lm

pytest.importorskip("skorch", reason="needs skorch, which is not installed")
from skorch import NeuralNetClassifier

from largemargin.integrations.skorch import LargeMarginNet, softmax


class Net(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 8))
        self.fc = nn.Linear(8, 3)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.body(X))
        return logits


class Softened(lm.CrossEntropy):
    """Has a parameter of its own, as a learned temperature would be."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def per_sample(self, *inputs: torch.Tensor, **logits: Any) -> torch.Tensor:
        return super().per_sample(self.factor * inputs[0], *inputs[1:], **logits)


def iris() -> tuple[np.ndarray, np.ndarray]:
    X, y = load_iris(return_X_y=True)
    return ((X - X.mean(0)) / X.std(0)).astype(np.float32), y


net = partial(
    LargeMarginNet,
    Net,
    max_epochs=20,
    lr=0.01,
    optimizer=torch.optim.Adam,
    batch_size=32,
    verbose=0,
)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "class": {"criterion": lm.CosFace, "criterion__scale": 8.0, "criterion__margin": 0.1},
    "loss": {"criterion": lm.ArcFace(scale=8.0, margin=0.1)},
    "name": {"criterion": "normface", "criterion__scale": 8.0},
    "function": {"criterion": lambda classes, dim: lm.GaussianMixture(classes, dim)},
    "class with sizes": {"criterion": lm.GaussianMixture, "criterion__alpha": 0.1},
    "logits": {"criterion": lm.Kobayashi},
    "objective": {
        "criterion": lm.Objective(
            softmax=lm.CrossEntropy(), lmd=0.05 * lm.Discriminative(3, 8, margin=1.0)
        )
    },
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_objectives_train_and_predict(case: str) -> None:
    X, y = iris()
    model = net(**OBJECTIVES[case]).fit(X, y)
    losses = model.history[:, "train_loss"]
    assert losses[-1] < losses[0]
    assert model.history[:, "valid_loss"][-1] < model.history[:, "valid_loss"][0]
    assert model.score(X, y) > 0.85
    with torch.no_grad():
        logits = model.module_(torch.from_numpy(X))
    np.testing.assert_allclose(model.predict_proba(X), logits.softmax(1), rtol=1e-5, atol=1e-6)
    assert np.array_equal(model.predict(X), logits.argmax(1))
    assert model.criterion_.terms.keys()


def test_the_head_has_the_geometry_of_the_loss() -> None:
    X, y = iris()
    model = net(criterion=lm.CosFace, criterion__scale=8.0, max_epochs=1).fit(X, y)
    assert isinstance(model.module_.fc, lm.ClassHead)
    assert (model.module_.fc.similarity, model.module_.fc.scale) == ("cosine", 8.0)


def test_parameters_of_the_loss_are_trained() -> None:
    X, y = iris()
    model = net(criterion=Softened, max_epochs=2).fit(X, y)
    (factor,) = model.criterion_.parameters()
    assert factor != 1.0
    trained = [id(p) for group in model.optimizer_.param_groups for p in group["params"]]
    assert len(trained) == len(set(trained))


def test_validation_leaves_the_centroid_bank_alone() -> None:
    X, y = iris()
    model = net(max_epochs=1, **OBJECTIVES["objective"]).fit(X, y)
    (bank,) = model.criterion_.banks
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    model.validation_step((torch.from_numpy(X), torch.from_numpy(y)))
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())
    model.train_step((torch.from_numpy(X), torch.from_numpy(y)))
    assert not all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())


@pytest.mark.parametrize("given", ["class", "instance"])
def test_fitting_twice_starts_again(given: str) -> None:
    X, y = iris()
    module = Net() if given == "instance" else Net
    model = LargeMarginNet(module, criterion=lm.CosFace(scale=8.0), lr=0.1, verbose=0, max_epochs=3)
    for _ in range(2):
        torch.manual_seed(0)
        model.fit(X, y)
        assert len(model.module_.fc._forward_hooks) == 1
    again = model.history[:, "train_loss"]
    torch.manual_seed(0)
    assert clone(model).fit(X, y).history[:, "train_loss"] == again
    if given == "instance":
        assert isinstance(module.fc, nn.Linear)
        assert not module.fc._forward_hooks


def test_settings_of_the_criterion_can_be_changed() -> None:
    X, y = iris()
    model = net(criterion=lm.CosFace, criterion__scale=8.0, max_epochs=2).fit(X, y)
    weight = model.module_.fc.weight
    model.set_params(criterion__scale=4.0)
    assert model.module_.fc.weight is weight
    assert model.module_.fc.scale == 4.0
    assert len(model.module_.fc._forward_hooks) == 1
    model.set_params(module__hidden=5).partial_fit(X, y)
    assert model.module_.body[0].out_features == 5


def test_grid_search() -> None:
    X, y = iris()
    grid = {"criterion__margin": [0.0, 0.2], "module__hidden": [8]}
    model = net(criterion=lm.CosFace, criterion__scale=8.0, train_split=None, max_epochs=10)
    search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(X, y)
    best = search.best_estimator_
    margin = search.best_params_["criterion__margin"]
    assert best.criterion_.objective.terms["cosface"].margin == margin
    assert search.best_score_ > 0.7


def test_pickles_and_checkpoints(tmp_path: Path) -> None:
    X, y = iris()
    given = {"criterion": lm.CosFace, "criterion__scale": 8.0, "train_split": None}
    model = net(max_epochs=3, **given).fit(X, y)
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.predict_proba(X), model.predict_proba(X))
    copy.partial_fit(X, y)
    assert len(copy.history) == 6
    files = {f"f_{part}": tmp_path / f"{part}.pt" for part in ("params", "optimizer", "criterion")}
    model.save_params(**files)
    fresh = net(**given).initialize()
    fresh.load_params(**files)
    assert np.array_equal(fresh.predict_proba(X), model.predict_proba(X))
    assert fresh.criterion_.steps == model.criterion_.steps > 0


def test_losses_on_logits_work_in_skorchs_own_class() -> None:
    X, y = iris()
    model = NeuralNetClassifier(
        Net,
        criterion=lm.Kobayashi,
        criterion__strength=0.3,
        predict_nonlinearity=softmax,
        optimizer=torch.optim.Adam,
        lr=0.01,
        batch_size=32,
        max_epochs=20,
        verbose=0,
    ).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1, rtol=1e-5)
    assert model.score(X, y) > 0.85


def test_attach_params_and_wrong_criteria() -> None:
    with pytest.raises(lm.LargeMarginError, match="has no layer 'head'"):
        net(attach_params={"layer": "head"}).initialize()
    with pytest.raises(lm.LargeMarginError, match="criterion must be a loss"):
        net(criterion=3).initialize()
    with pytest.raises(lm.LargeMarginError, match="CosFace has no argument 'radius'"):
        net(criterion=lm.CosFace, criterion__radius=1.0).initialize()


@pytest.mark.parametrize(
    ("adapter", "package", "extra"),
    [("skorch", "skorch", "skorch"), ("scikit_learn", "sklearn.base", "sklearn")],
)
def test_a_missing_package_is_named_with_its_extra(
    adapter: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"largemargin.integrations.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'largemargin\[{extra}\]'"):
        importlib.import_module(f"largemargin.integrations.{adapter}")


def long_tail() -> tuple[np.ndarray, np.ndarray]:
    X, y = iris()
    kept = np.r_[0:50, 50:70, 100:108]
    return X[kept], y[kept]


def test_classes_are_counted_in_fit() -> None:
    X, y = long_tail()
    made = net(criterion=lm.LDAM, max_epochs=1).fit(X, y)
    assert made.criterion_.objective.terms["ldam"].class_counts == [50, 20, 8]
    made.set_params(criterion__scale=8.0)  # makes the criterion again
    assert made.criterion_.objective.terms["ldam"].class_counts == [50, 20, 8]
    begun = net(criterion="ldam", max_epochs=1).partial_fit(X, y).partial_fit(X[:60], y[:60])
    assert begun.criterion_.objective.terms["ldam"].class_counts == [50, 20, 8]
    given = net(criterion=lm.CosFace, criterion__class_counts="auto", max_epochs=1)
    assert given.fit(X, torch.from_numpy(y)).criterion_.objective.terms["cosface"].class_counts
    own = net(criterion=lm.LDAM, criterion__class_counts=[9, 9, 1], max_epochs=1).fit(X, y)
    assert own.criterion_.objective.terms["ldam"].class_counts == [9, 9, 1]


def test_a_preset_takes_the_counts_of_fit() -> None:
    X, y = long_tail()
    chosen = lm.preset("long_tail")
    made = net(criterion=chosen, max_epochs=1, attach_params={"total_steps": 3}).fit(X, y)
    assert made.criterion_.objective.terms["ldam"].class_counts == [50, 20, 8]
    assert chosen.class_counts is None
    with pytest.raises(lm.LargeMarginError, match=r'attach_params=\{"total_steps": max_epochs'):
        net(criterion=chosen).fit(X, y)
    with pytest.raises(lm.LargeMarginError, match=r"class_counts=torch\.bincount\(labels\)"):
        net(criterion=chosen, attach_params={"schedule": ()}).initialize()
    with pytest.raises(lm.LargeMarginError, match="no labels to count"):
        net(criterion=lm.LDAM).initialize()
