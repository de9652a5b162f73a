"""``LargeMarginClassifier`` is a scikit-learn estimator, and learns at the first try."""

import doctest
import io
import pickle
from functools import partial
from typing import Any

import joblib
import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import largemargin as lm
from largemargin.integrations import scikit_learn
from largemargin.integrations.scikit_learn import LargeMarginClassifier

quick = partial(LargeMarginClassifier, epochs=15, random_state=0)


def split(load: Any, seed: int = 0) -> list[Any]:
    X, y = load(return_X_y=True)
    return train_test_split(X, y, random_state=seed, stratify=y)


def images(channels: str) -> tuple[np.ndarray, np.ndarray]:
    """Four classes of 8 x 8 colour images: which channel and which half is bright."""
    rng = np.random.default_rng(0)
    y = np.arange(80) % 4
    X = rng.integers(0, 100, (80, 3, 8, 8)).astype(np.uint8)
    for image, label in zip(X, y, strict=True):
        image[label // 2, :, 4 * (label % 2) : 4 * (label % 2) + 4] += 120
    return (X if channels == "first" else np.moveaxis(X, 1, -1)), y


@parametrize_with_checks(
    [
        LargeMarginClassifier(epochs=12, lr=0.02, batch_size=256, hidden_sizes=(32, 16)),
        LargeMarginClassifier(hidden_sizes=()),
    ]
)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([LargeMarginClassifier()])
def test_scikit_learn_checks_of_default_settings(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize(
    ("load", "least"), [(load_iris, 0.89), (load_wine, 0.93)], ids=["iris", "wine"]
)
@pytest.mark.parametrize("seed", range(2))
def test_default_settings_learn_small_tables(load: Any, least: float, seed: int) -> None:
    X, X_test, y, y_test = split(load, seed)
    assert LargeMarginClassifier(random_state=seed).fit(X, y).score(X_test, y_test) >= least


def test_the_settings_nobody_gave() -> None:
    found = {key: value for key, value in LargeMarginClassifier().get_params().items() if value}
    assert LargeMarginClassifier().__sklearn_tags__().input_tags.sparse
    assert found == {
        **dict.fromkeys(
            ("objective", "hidden_sizes", "channels", "optimizer", "calibrate", "device", "dtype"),
            "auto",
        ),
        "standardize": True,
        "lr": 0.003,
        "weight_decay": 0.01,
        "decay": "cosine",
        "epochs": 50,
        "batch_size": 64,
        "folds": 5,
        "validation_fraction": 0.1,
        "patience": 10,
    }


def test_fewer_epochs_learn_digits() -> None:
    X, X_test, y, y_test = split(load_digits)
    assert quick().fit(X, y).score(X_test, y_test) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_default_settings_learn_digits(seed: int) -> None:
    X, X_test, y, y_test = split(load_digits, seed)
    rows = LargeMarginClassifier(random_state=seed).fit(X, y)
    assert rows.score(X_test, y_test) >= 0.96
    pixels = LargeMarginClassifier(input_shape=(8, 8), epochs=20, random_state=seed).fit(X, y)
    assert pixels.score(X_test, y_test) >= 0.98


SETTINGS: dict[str, dict[str, Any]] = {
    "layer_margin": {"layers": ["0"]},
    "lsoftmax": {"schedule": "preset"},
    "margin_hinge": {"objective__threshold": 0.3},
    "robust_discriminative": {"noise": 0.1},
    "stability": {"noise": 0.1},
}


# One of every kind; that all losses learn is shown elsewhere, that all have a name here and there.
QUICK = ("arcface", "discriminative", "kobayashi", "ldam", "lm_softmax", "margin_distribution")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK or name in SETTINGS else pytest.mark.slow)
        for name in sorted(lm.LOSSES)
    ],
)
def test_every_loss_learns_by_its_name(name: str) -> None:
    X, X_test, y, y_test = split(load_iris)
    model = LargeMarginClassifier(name, epochs=40, lr=0.01, random_state=0)
    model.set_params(**SETTINGS.get(name, {})).fit(X, y)
    assert model.score(X_test, y_test) >= 0.85
    assert np.isfinite(model.history_["loss"]).all()


def test_labels_of_any_type() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])
    model = quick().fit(X, names[y].tolist())
    assert model.classes_.tolist() == names.tolist()
    assert (model.predict(X) == names[y]).mean() > 0.8


def test_probabilities_are_the_softmax_of_the_head() -> None:
    X, y = load_iris(return_X_y=True)
    model = quick("arcface", objective_params={"scale": 7.0, "margin": 0.1}).fit(X, y)
    head = model.criterion_.head
    assert (head.similarity, head.scale) == ("cosine", 7.0)
    features = torch.from_numpy(model.transform(X))
    cosines = nn.functional.normalize(features) @ nn.functional.normalize(head.weight).t()
    assert model.temperature_ != 1
    expected = (7.0 * cosines / model.temperature_).softmax(1).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-9)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), expected, rtol=1e-9)
    np.testing.assert_allclose(model.decision_function(X), 7.0 * cosines.detach(), rtol=1e-9)


def log_loss_of(model: Any, X: Any, y: Any) -> float:
    return float(-model.predict_log_proba(X)[np.arange(len(y)), y].mean())


@pytest.mark.parametrize("settings", [{}, {"early_stopping": True, "validation_fraction": 0.3}])
def test_probabilities_get_a_temperature_from_samples_held_out(settings: dict[str, Any]) -> None:
    X, X_test, y, y_test = split(load_digits)
    X, y = X[:400], y[:400]
    plain = quick("lm_softmax", calibrate=False, **settings).fit(X, y)
    model = quick("lm_softmax", **settings).fit(X, y)
    assert plain.temperature_ == 1
    assert model.temperature_ < 0.9  # of scales that are small for training
    logits = model.decision_function(X_test)
    np.testing.assert_array_equal(logits, plain.decision_function(X_test))  # the same network
    assert model.history_ == plain.history_
    assert log_loss_of(model, X_test, y_test) < log_loss_of(plain, X_test, y_test) - 0.03


def test_where_there_is_no_temperature() -> None:
    X, _, y, _ = split(load_digits)
    assert quick(epochs=2).fit(X[:90], y[:90]).temperature_ == 1  # too few to tell
    assert quick(epochs=2, early_stopping=True).fit(X[:400], y[:400]).temperature_ == 1
    assert quick("cross_entropy", epochs=2).fit(X[:400], y[:400]).temperature_ == 1
    assert quick("cross_entropy", epochs=2, calibrate=True).fit(X[:90], y[:90]).temperature_ != 1
    own = quick(epochs=2, backbone=lambda shape: nn.Linear(shape[0], 8)).fit(X[:400], y[:400])
    assert own.temperature_ == 1  # which may take long to train
    apart = np.repeat(np.eye(2) * 50, 100, axis=0) + np.arange(200)[:, None] / 200
    model = quick().fit(apart, np.repeat([0, 1], 100))
    assert model.temperature_ == 1  # nothing is wrong: the surest would be the best
    with pytest.raises(lm.LargeMarginError, match="calibrate"):
        quick(calibrate="always").fit(X[:90], y[:90])


def test_a_temperature_is_of_the_last_whole_fit() -> None:
    X, _, y, _ = split(load_digits)
    model = quick(epochs=3, warm_start=True).fit(X[:400], y[:400])
    first = model.temperature_
    assert first != 1
    assert model.fit(X[:400], y[:400]).temperature_ == first
    assert quick(epochs=3).partial_fit(X[:400], y[:400]).temperature_ == 1


def test_the_same_random_state_gives_the_same_bits_and_leaves_the_generators_alone() -> None:
    X, y = load_iris(return_X_y=True)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    settings = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    first = quick().fit(X, y).predict_proba(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]
    after = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    assert after == settings
    torch.rand(1)
    assert np.array_equal(quick().fit(X, y).predict_proba(X), first)
    assert not np.array_equal(quick(random_state=1).fit(X, y).predict_proba(X), first)


def test_history_names_the_terms() -> None:
    X, y = load_iris(return_X_y=True)
    objective = lm.Objective(softmax=lm.CrossEntropy(), center=0.5 * lm.CenterLoss(3, 64))
    model = quick(objective, epochs=4, early_stopping=True).fit(X, y)
    names = {"loss", "terms.softmax", "terms.center", "valid_loss", "valid_accuracy"}
    assert model.history_.keys() == names
    assert {len(values) for values in model.history_.values()} == {4}
    total = np.add(model.history_["terms.softmax"], 0.5 * np.array(model.history_["terms.center"]))
    np.testing.assert_allclose(model.history_["loss"], total)
    assert objective.terms["center"].centers.abs().sum() == 0, "the given objective was trained"


def test_early_stopping_restores_the_best_epoch() -> None:
    X, y = load_iris(return_X_y=True)
    rng = np.random.default_rng(0)
    noisy = np.where(rng.random(150) < 0.3, rng.integers(0, 3, 150), y)
    model = quick(
        "cross_entropy",
        backbone=nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)),
        epochs=200,
        lr=0.02,
        decay="constant",
        early_stopping=True,
        validation_fraction=0.3,
        patience=5,
    ).fit(X, noisy)
    losses = model.history_["valid_loss"]
    best = int(np.argmin(losses))
    assert model.n_iter_ == len(losses) == best + 1 + 5
    assert losses[-1] > losses[best]
    _, held = train_test_split(np.arange(150), test_size=45, random_state=_seed(0), stratify=noisy)
    found = -model.predict_log_proba(X[held])[np.arange(45), noisy[held]].mean()
    assert found == pytest.approx(losses[best], rel=1e-5)


def _seed(random_state: int) -> int:
    return int(np.random.RandomState(random_state).randint(2**31 - 1))


def test_warm_start_goes_on() -> None:
    X, y = load_iris(return_X_y=True)
    model = quick(warm_start=True, epochs=3).fit(X, y)
    network = model.model_
    first = model.history_["loss"][-1]
    model.fit(X, y)
    assert model.model_ is network
    assert len(model.history_["loss"]) == 6
    assert model.history_["loss"][-1] < first
    with pytest.raises(ValueError, match="not among the classes"):
        model.fit(X, y + 1)
    model.set_params(lr=0.0001, decay="constant", epochs=1).fit(X, y)
    assert {group["lr"] for group in model._fitting.optimizer.param_groups} == {0.0001}
    assert len(quick(epochs=3).fit(X, y).fit(X, y).history_["loss"]) == 3


def test_partial_fit_learns_from_a_stream() -> None:
    X, X_test, y, y_test = split(load_iris)
    model = quick(lr=0.01)
    with pytest.raises(ValueError, match=r"not among the classes \['a', 'b'\]"):
        model.partial_fit(X[:2], ["a", "c"], classes=["a", "b"])
    model = quick(lr=0.01)
    for _ in range(20):
        for start in range(0, len(X), 28):
            model.partial_fit(X[start : start + 28], y[start : start + 28], classes=[0, 1, 2])
    assert model.n_iter_ == 80
    assert model.score(X_test, y_test) > 0.9
    with pytest.raises(ValueError, match="balanced"):
        quick(class_weight="balanced").partial_fit(X, y)


def test_sample_weights_count() -> None:
    X = np.zeros((60, 2))
    y = np.repeat([0, 1], 30)
    model = quick("cross_entropy", epochs=60, lr=0.03, weight_decay=0.0)
    model.fit(X, y, sample_weight=np.where(y == 1, 3.0, 1.0))
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], 0.75, atol=0.02)
    kept = quick(epochs=1).fit(np.eye(3), ["a", "b", "c"], sample_weight=[1.0, 2.0, 0.0])
    assert kept.classes_.tolist() == ["a", "b"]
    # Batches of one sample: each is its own weighted mean, so only their weights can tell.
    model.set_params(batch_size=1, class_weight={0: 1.0, 1: 3.0}, epochs=25)
    model.fit(X[20:40], y[20:40])
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], 0.75, atol=0.06)


def test_losses_without_sample_weights_say_so() -> None:
    X, y = load_iris(return_X_y=True)
    weights = np.linspace(1, 2, len(y))
    with pytest.raises(lm.LargeMarginError, match="does not support sample_weight"):
        quick("discriminative").fit(X, y, sample_weight=weights)
    quick("discriminative", epochs=1).fit(X, y, sample_weight=np.full(len(y), 2.0))


@pytest.mark.parametrize("objective", ["cosface", lm.CosFace])
def test_losses_on_cosines_have_the_scale_of_their_classes(objective: Any) -> None:
    X, y = load_iris(return_X_y=True)
    scale = quick(objective, epochs=1).fit(X, y).criterion_.head.scale
    assert scale == pytest.approx(np.log(2 * 9) / (1 - 0.2 + 1 / 2))


@pytest.mark.parametrize(("decay", "last"), [("cosine", 0.0), ("constant", 0.003)])
def test_the_learning_rate_decays(decay: str, last: float) -> None:
    X, y = load_iris(return_X_y=True)
    model = quick(decay=decay, epochs=10).fit(X, y)
    (rate,) = {group["lr"] for group in model._fitting.optimizer.param_groups}
    assert rate == pytest.approx(last, abs=3e-5)


def test_rare_classes_get_their_counts() -> None:
    X, y = load_iris(return_X_y=True)
    X, y = X[:110], y[:110]
    loss = quick("ldam", epochs=1).fit(X, y).criterion_.objective.terms["ldam"]
    assert loss.class_counts == [50, 50, 10]
    model = quick("cosface", objective_params={"class_counts": "auto"}, epochs=1).fit(X, y)
    assert model.criterion_.objective.terms["cosface"].class_counts == [50, 50, 10]


@pytest.mark.parametrize("channels", ["first", "last"])
def test_images(channels: str) -> None:
    X, y = images(channels)
    model = quick(epochs=10).fit(X, y)
    assert model.n_features_in_ == 192
    assert model.score(X, y) > 0.9
    flat = X.reshape(len(X), -1)
    assert np.array_equal(model.predict(flat), model.predict(X))
    rows = quick(epochs=10, input_shape=X.shape[1:]).fit(flat, y)
    assert np.array_equal(rows.predict_proba(flat), model.predict_proba(X))
    with pytest.raises(lm.LargeMarginError, match="was fitted on"):
        model.predict(X[:, :2])


def test_channels_are_the_axis_of_at_most_four_entries() -> None:
    assert not scikit_learn.channels_last((4, 5, 5), "auto")
    assert scikit_learn.channels_last((5, 5, 4), "auto")
    for shape in ((5, 8, 8), (8, 8, 5), (4, 8, 4)):
        with pytest.raises(lm.LargeMarginError, match="may have their channels first or last"):
            scikit_learn.channels_last(shape, "auto")


def test_images_of_bytes_stay_bytes() -> None:
    """In memory they are an eighth of whole numbers."""
    rows = np.arange(12).reshape(2, 6)
    for kind, kept in ((np.uint8, torch.uint8), (np.uint16, torch.int64), (np.int16, torch.int16)):
        tensor = scikit_learn.as_tensor(rows.astype(kind), (2, 3), "auto")
        assert tensor.dtype == kept
        assert tensor.tolist() == rows.reshape(2, 1, 2, 3).tolist()


def test_statistics_are_weighted_and_of_features_or_channels() -> None:
    rng = np.random.default_rng(0)
    X, weights = rng.normal(2, 3, size=(30, 3, 4, 5)), rng.uniform(size=30)
    X[:, 1] = 7.0
    for axes, per_channel in (((0, 2, 3), True), ((0,), False)):
        mean, spread = scikit_learn.statistics(
            torch.from_numpy(X), torch.from_numpy(weights), per_channel
        )
        share = np.broadcast_to(weights[:, None, None, None], X.shape)
        expected = np.average(X, axes, share, keepdims=True)[0]
        squares = np.average((X - expected) ** 2, axes, share, keepdims=True)[0]
        np.testing.assert_allclose(mean, expected)
        np.testing.assert_allclose(spread[[0, 2]], np.sqrt(squares)[[0, 2]])
        assert (spread[1] == 1).all()


def test_images_are_standardised_by_channel_and_have_64_features() -> None:
    X, y = images("first")
    model = quick(epochs=1).fit(X, y)
    mean = X.mean((0, 2, 3), keepdims=True)[0]
    np.testing.assert_allclose(model.model_.standardize.mean, mean, rtol=1e-5)
    assert model.transform(X[:2]).shape == (2, 64)


def test_convolutions_halve_images_that_are_large_enough() -> None:
    for height, width, pools in ((16, 16, 2), (15, 40, 1), (40, 8, 1), (7, 40, 0), (2, 16, 0)):
        made = scikit_learn.convolutions((1, height, width)).eval()
        assert sum(isinstance(each, nn.MaxPool2d) for each in made) == pools
        assert made(torch.zeros(2, 1, height, width)).shape == (2, 64)


def test_lists_of_images_are_images() -> None:
    X, _ = images("last")
    for some in (X[:1, :, :, 0], X[:1], X[:3]):
        flat, shape = scikit_learn.as_rows(list(some))
        np.testing.assert_array_equal(flat, some.reshape(len(some), -1))
        assert shape == some.shape[1:]


@pytest.mark.parametrize("standardize", [True, False])
def test_noise_is_in_standard_deviations_of_the_inputs(
    standardize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are where they are not standardised."""
    X, y = load_iris(return_X_y=True)
    given = []
    network = scikit_learn.EstimatorNetwork
    original = network.forward
    monkeypatch.setattr(
        network, "forward", lambda self, inputs: given.append(inputs) or original(self, inputs)
    )
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    quick("stability", noise=0.1, standardize=standardize, epochs=1, batch_size=150).fit(X, y)
    expected = np.broadcast_to(0.1 * (X.std(0) if standardize else 1.0), X.shape)
    np.testing.assert_allclose(given[1] - given[0], expected, rtol=1e-5)


def test_the_perceptron_has_128_and_64_units() -> None:
    model = quick(epochs=1).fit(*load_iris(return_X_y=True))
    widths = [each.out_features for each in model.model_.modules() if isinstance(each, nn.Linear)]
    assert widths[:2] == [128, 64]


def test_an_average_is_weighted_by_counts() -> None:
    seen = scikit_learn.Average()
    seen.add({"loss": torch.tensor(2.0), "term": torch.tensor(1.0)}, 3)
    seen.add({"loss": torch.tensor(6.0), "term": torch.tensor(5.0)}, 1)
    assert seen.read() == {"loss": 3.0, "term": 2.0}


def test_channels_first_and_last_are_the_same_images() -> None:
    first = quick(epochs=2).fit(*images("first")).predict_proba(images("first")[0])
    last = quick(epochs=2).fit(*images("last")).predict_proba(images("last")[0])
    np.testing.assert_allclose(first, last, rtol=1e-4)
    with pytest.raises(lm.LargeMarginError, match='channels="first" or channels="last"'):
        quick().fit(np.zeros((4, 3, 8, 3)), [0, 1, 0, 1])
    with pytest.raises(lm.LargeMarginError, match=r"one sample has shape \(1, 2, 3, 4\)"):
        quick().fit(np.zeros((4, 1, 2, 3, 4)), [0, 1, 0, 1])
    with pytest.raises(lm.LargeMarginError, match="has 60 entries, but X has 64"):
        quick(input_shape=(6, 10)).fit(np.zeros((4, 64)), [0, 1, 0, 1])


def test_backbones_are_copied() -> None:
    X, y = load_iris(return_X_y=True)
    backbone = nn.Sequential(nn.LazyLinear(16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    model = quick(backbone=backbone, lr=0.02, epochs=30).fit(X, y)
    assert isinstance(backbone[0], nn.LazyLinear)
    assert model.transform(X).shape == (150, 8)
    assert model.transform(X).dtype == np.float32
    assert model.score(X, y) > 0.9
    np.testing.assert_allclose(model.predict_proba(X[:3]), model.predict_proba(X)[:3], rtol=1e-4)
    made = quick(backbone=lambda shape: nn.Linear(shape[0], 5), epochs=30).fit(X, y)
    assert made.get_feature_names_out().tolist() == [f"largemarginclassifier{i}" for i in range(5)]
    assert quick(hidden_sizes=(), epochs=1).fit(X, y).transform(X).shape == X.shape
    with pytest.raises(lm.LargeMarginError, match=r"returned \(2, 4, 8, 8\)"):
        quick(backbone=nn.Conv2d(3, 4, 3, padding=1)).fit(*images("first"))
    with pytest.raises(lm.LargeMarginError, match="backbone must be None"):
        quick(backbone="resnet18").fit(X, y)


@pytest.mark.parametrize("dump", ["pickle", "joblib", "clone"])
def test_copies(dump: str) -> None:
    X, y = load_iris(return_X_y=True)
    objective = lm.Objective(softmax=lm.CrossEntropy(), lmd=0.01 * lm.Discriminative(3, 64))
    model = quick(objective, epochs=3, warm_start=True).fit(X, y)
    file = io.BytesIO()
    if dump == "pickle":
        copy = pickle.loads(pickle.dumps(model))
    elif dump == "joblib":
        joblib.dump(model, file)
        copy = joblib.load(file)
    else:
        copy = clone(model)
        assert not hasattr(copy, "model_")
        copy.fit(X, y)
    assert np.array_equal(copy.predict_proba(X), model.predict_proba(X))
    assert np.array_equal(copy.fit(X, y).predict_proba(X), model.fit(X, y).predict_proba(X))


def test_an_estimator_that_is_not_fitted_can_be_sent_to_another_process() -> None:
    model = LargeMarginClassifier("arcface", epochs=3)
    assert pickle.loads(pickle.dumps(model)).get_params() == model.get_params()


def test_pipelines_and_grid_search() -> None:
    X, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), PCA(3), quick("cosface", lr=0.02, epochs=8))
    grid = {
        "largemarginclassifier__objective__margin": [0.1, 0.3],
        "largemarginclassifier__hidden_sizes": [(16,)],
    }
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, y)
    best = search.best_estimator_[-1]
    margin = search.best_params_["largemarginclassifier__objective__margin"]
    assert best.criterion_.objective.terms["cosface"].margin == margin
    assert best.get_params()["objective__margin"] == margin
    assert search.best_score_ > 0.7


def counted(num_classes: int, dim: int) -> lm.Objective:
    return lm.CosFace(scale=9.0) + 0.5 * lm.CenterLoss(num_classes, dim)


@pytest.mark.parametrize(
    ("objective", "path", "read"),
    [
        (lm.CosFace(scale=9.0), "margin", "cosface"),
        (0.5 * lm.CosFace(scale=9.0), "margin", "cosface"),
        (lm.Objective(face=lm.CosFace(scale=9.0)), "margin", "face"),
        (lm.Objective(face=lm.CosFace(scale=9.0)), "face__margin", "face"),
        (counted(3, 16), "cosface__margin", "cosface"),
    ],
)
def test_a_search_over_settings_of_an_instance(objective: Any, path: str, read: str) -> None:
    """Each fit trains the margin that is searched, and keeps the other settings."""
    X, y = load_iris(return_X_y=True)
    before = repr(objective)
    model = quick(objective, hidden_sizes=(16,), epochs=4, lr=0.02)
    values = [0.05, 0.25]
    search = GridSearchCV(model, {f"objective__{path}": values}, cv=2, error_score="raise")
    search.fit(X, y)
    assert repr(objective) == before
    for margin in values:
        fitted = clone(model).set_params(**{f"objective__{path}": margin}).fit(X, y)
        found = fitted.criterion_.objective
        assert (found.terms[read].margin, found.terms[read].scale) == (margin, 9.0)
        assert found.weights == (
            objective.weights
            if isinstance(objective, lm.Objective)
            else {read: 0.5 if "0.5 *" in before else 1.0}
        )
    assert search.cv_results_["mean_test_score"][0] > 0


def test_an_instance_that_cannot_be_built_again() -> None:
    class Own(lm.CosFace):
        def __init__(self, twice: float = 0.1) -> None:
            super().__init__(margin=2 * twice)

    X, y = load_iris(return_X_y=True)
    with pytest.raises(lm.LargeMarginError, match="cannot be built again from its attributes"):
        quick(Own(), objective_params={"twice": 0.2}).fit(X, y)


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_rows_are_the_dense_ones(kind: Any) -> None:
    X, y = load_iris(return_X_y=True)
    X = np.where(X < 1.5, 0, X)
    dense, sparse = quick().fit(X, y), quick().fit(kind(X), y)
    assert np.array_equal(sparse.predict_proba(kind(X)), dense.predict_proba(X))
    assert np.array_equal(sparse.transform(X), dense.transform(kind(X)))
    held = quick(early_stopping=True, epochs=3)
    assert held.fit(kind(X), y).history_ == held.fit(X, y).history_
    weights = np.arange(150) % 3
    assert np.array_equal(
        quick(epochs=2).fit(kind(X), y, weights).predict_proba(X),
        quick(epochs=2).fit(X, y, weights).predict_proba(X),
    )
    images = np.tile(X, (1, 4))
    shaped = quick(input_shape=(4, 4), epochs=1)
    assert np.array_equal(
        shaped.fit(kind(images), y).predict(images), shaped.fit(images, y).predict(images)
    )


def test_a_wide_sparse_matrix_is_never_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts have a column per word: batches are made dense, not all of them."""
    rows = []
    whole = scipy.sparse.csr_matrix.toarray

    def toarray(self: Any, *args: Any, **options: Any) -> Any:
        rows.append(self.shape[0])
        return whole(self, *args, **options)

    X = scipy.sparse.random(6000, 40, 0.1, format="csr", random_state=0)
    X = scipy.sparse.csr_matrix(X)
    monkeypatch.setattr(scipy.sparse.csr_matrix, "toarray", toarray)
    y = np.arange(6000) % 3
    quick(epochs=1, hidden_sizes=(4,)).fit(X, y).predict(X)
    assert rows
    assert max(rows) == scikit_learn.CHUNK < 6000


def test_a_class_of_one_sample_can_be_held_out_from() -> None:
    X, y = load_iris(return_X_y=True)
    y[0] = 3
    model = quick(early_stopping=True, validation_fraction=0.3, epochs=3).fit(X, y)
    assert model.classes_.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"objective": "cosfac"}, "Closest: cosface"),
        ({"objective": 3}, "must be a name of lm.LOSSES"),
        ({"objective_params": {"radius": 1}}, "CosFace has no argument 'radius'"),
        ({"objective": lm.CosFace(), "objective_params": {"radius": 1}}, "no argument 'radius'"),
        (
            {
                "objective": lm.CosFace() + 0.5 * lm.SampleMargin(),
                "objective_params": {"margin": 0.1},
            },
            "Name one: objective__cosface__margin",
        ),
        (
            {
                "objective": lm.CosFace() + 0.5 * lm.SampleMargin(),
                "objective_params": {"sample_margin": 0.1},
            },
            "Name one: objective__cosface__SETTING",
        ),
        ({"objective": "stability"}, "noise=0.1"),
        ({"objective": "layer_margin"}, "layers="),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": 2.5}, "epochs must be a whole number"),
        ({"hidden_sizes": 16}, r"hidden_sizes must be .* \(\) for a linear head, but 16"),
        ({"hidden_sizes": None}, "hidden_sizes must be .* but None"),
        ({"hidden_sizes": "wide"}, "hidden_sizes must be .* but 'wide'"),
        ({"hidden_sizes": (2.5,)}, "each of hidden_sizes must be a whole number"),
        ({"calibrate": "wide"}, "calibrate must be one of 'auto', True, False"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"optimizer": "lion"}, "optimizer must be one of 'adamw'"),
        ({"optimizer": lambda groups: None}, "returned NoneType"),
        ({"lr": -1.0}, "lr must be"),
        ({"decay": "linear"}, "decay must be"),
        ({"device": "gpu"}, 'device must be "auto"'),
        ({"dtype": "half"}, "dtype must be"),
        ({"early_stopping": True, "validation_fraction": 1.5}, "validation_fraction must be"),
        ({"hidden_sizes": (0,)}, "hidden_sizes must be"),
    ],
)
def test_wrong_settings_are_named(params: dict[str, Any], message: str) -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.raises(lm.LargeMarginError, match=message):
        quick(**params).fit(X, y)


def test_a_diverging_loss_is_an_error() -> None:
    X, y = load_iris(return_X_y=True)
    sgd = partial(torch.optim.SGD, lr=1e30)
    with pytest.raises(lm.LargeMarginError, match="Lower lr"):
        quick("cross_entropy", optimizer=sgd).fit(X, y)


def test_the_progress_bar_shows_the_losses(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = load_iris(return_X_y=True)
    quick(verbose=True, epochs=2, early_stopping=True).fit(X, y)
    shown = capsys.readouterr().err
    assert "LargeMarginClassifier" in shown
    assert "valid_accuracy=" in shown


def test_examples() -> None:
    assert doctest.testmod(scikit_learn).failed == 0


@pytest.mark.gpu
def test_a_cuda_device_trains_and_pickles_for_the_cpu() -> None:
    X, y = load_iris(return_X_y=True)
    before = torch.cuda.get_rng_state()
    model = quick("discriminative", warm_start=True).fit(X, y)
    assert model.criterion_.head.weight.device.type == "cuda"
    assert model.transform(X).dtype == np.float32
    assert torch.equal(torch.cuda.get_rng_state(), before)
    copy = pickle.loads(pickle.dumps(model))
    assert {tensor.device.type for tensor in copy.model_.state_dict().values()} == {"cpu"}
    assert model.criterion_.head.weight.device.type == "cuda"
    np.testing.assert_allclose(copy.predict_proba(X), model.predict_proba(X), atol=1e-4)
    copy.fit(X, y)
    assert copy.criterion_.head.weight.device.type == "cuda"
    assert len(copy.history_["loss"]) == 30
    assert copy.score(X, y) > 0.85
    assert quick(device="cpu", epochs=1).fit(X, y).criterion_.head.weight.device.type == "cpu"


def test_an_estimator_with_a_preset_is_one_line() -> None:
    counts = list(range(1, 1001))
    model = LargeMarginClassifier(lm.preset("long_tail", class_counts=counts), epochs=3)
    assert repr(model) == (
        "LargeMarginClassifier(epochs=3,\n"
        "                      objective=preset('long_tail', class_counts=(1, 2, 3, 4, 5, 6, ...)))"
    )
    assert str(model.objective).startswith("preset long_tail: ldam\nsituation   CIFAR-10")


def test_settings_may_be_numbers_of_numpy() -> None:
    """A grid of np.arange or a list of arrays' entries has them."""
    X, y = (each[:300] for each in load_digits(return_X_y=True))
    plain = {"epochs": 2, "batch_size": 50, "lr": 0.0625, "hidden_sizes": (16,), "calibrate": True}
    wrapped = {
        "epochs": np.int64(2),
        "batch_size": np.int32(50),
        "lr": np.float32(0.0625),
        "hidden_sizes": (np.int64(16),),
        "calibrate": np.bool_(True),
    }
    fitted = [
        LargeMarginClassifier("cosface", random_state=0, **each).fit(X, y)
        for each in (plain, wrapped)
    ]
    assert fitted[0].temperature_ == fitted[1].temperature_ != 1
    np.testing.assert_allclose(*(each.predict_proba(X) for each in fitted), rtol=1e-5)


@pytest.mark.parametrize(("enough", "networks"), [(48, 1), (49, 2), (97, 3)])
def test_no_more_networks_are_trained_than_held_out_samples_are_needed(
    monkeypatch: pytest.MonkeyPatch, enough: int, networks: int
) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(144, 4)), np.arange(144) % 3
    begun = []
    original = LargeMarginClassifier._begin
    monkeypatch.setattr(
        LargeMarginClassifier,
        "_begin",
        lambda self, samples, *rest: begun.append(len(samples)) or original(self, samples, *rest),
    )
    monkeypatch.setattr(scikit_learn, "TOLD", enough)
    quick("cosface", epochs=1, folds=3).fit(X, y)
    assert begun == [144] + [96] * networks


def test_rows_may_be_arrays_or_lists_of_lists_or_tensors() -> None:
    X, y = load_iris(return_X_y=True)
    of_array, of_lists = quick(epochs=2).fit(X, y), quick(epochs=2).fit(X.tolist(), y.tolist())
    of_tensor = quick(epochs=2).fit(torch.tensor(X, requires_grad=True), y)
    for model in (of_array, of_lists, of_tensor):
        for rows in (X, X.tolist(), torch.tensor(X, requires_grad=True)):
            np.testing.assert_allclose(model.predict_proba(rows), of_array.predict_proba(X))
    half = torch.from_numpy(X).bfloat16()
    np.testing.assert_array_equal(of_array.predict(half), of_array.predict(half.float().numpy()))
    assert scikit_learn.as_rows(torch.from_numpy(X))[0].dtype == np.float64
    assert scikit_learn.as_rows(half)[0].dtype == np.float32


def test_no_noise_is_added_unless_it_is_asked_for() -> None:
    assert LargeMarginClassifier().get_params()["noise"] == 0
    X, y = load_iris(return_X_y=True)
    with pytest.raises(lm.LargeMarginError, match=r"noise=0\.1"):
        quick("stability").fit(X, y)
