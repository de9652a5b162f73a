"""Classifiers on frozen embeddings: ours, LogisticRegression and LinearSVC with cross-validated C.

Each data file is an ``.npz`` with ``x_train``, ``y_train``, ``x_test``, ``y_test`` and, to measure
detection, ``x_ood`` with inputs of no class (``make_embeddings.py`` writes such files). Of the
training set each draw keeps the given number of labels a class; all methods see the same ones. The
baselines choose C and one of three preprocessings (none, standardised, rows of unit length) by the
accuracy of stratified cross-validation. Rows go to ``results/embeddings.json``; those that exist
are not measured again.

    python benchmarks/embeddings.py clinc=clinc.npz trec=trec.npz
    python benchmarks/embeddings.py clinc=clinc.npz --labels 5 --timing 3
"""

import argparse
import json
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import RESULTS, Row, environment, interleaved, write
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler
from sklearn.svm import LinearSVC

from largemargin.integrations.scikit_learn import LargeMarginClassifier

Data = dict[str, np.ndarray]
PREPARED = {"raw": FunctionTransformer(), "standard": StandardScaler(), "unit": Normalizer()}
LOGISTIC_C = np.logspace(-4, 4, 9)
SVC_C = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
BINS = 15
"""Of the calibration error, of equal width."""


def folds(per_class: int) -> StratifiedKFold:
    return StratifiedKFold(5 if per_class <= 10 else 3, shuffle=True, random_state=0)


def preparations(x: np.ndarray) -> list[str]:
    """Names of what is tried; rows that have unit length already are not scaled again."""
    unit = np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-3)
    return [name for name in PREPARED if name != "unit" or not unit]


def logistic(x: np.ndarray, y: np.ndarray, per_class: int) -> tuple[Any, Row]:
    """The best preprocessing with the C that ``LogisticRegressionCV`` found for it."""
    found: list[tuple[float, str, float]] = []
    for name in preparations(x):
        search = LogisticRegressionCV(
            Cs=LOGISTIC_C,
            cv=folds(per_class),
            scoring="accuracy",
            max_iter=1000,
            refit=False,
            l1_ratios=(0.0,),
            use_legacy_attributes=True,
        ).fit(PREPARED[name].fit_transform(x), y)
        scores = np.mean(list(search.scores_.values()), axis=0)
        means = scores.reshape(-1, len(LOGISTIC_C)).mean(0)
        found.append((means.max(), name, LOGISTIC_C[means.argmax()]))
    score, name, c = max(found, key=lambda each: each[0])
    model = Pipeline([("prepare", PREPARED[name]), ("fit", LogisticRegression(C=c, max_iter=1000))])
    return model.fit(x, y), {"prepared": name, "C": float(c), "cv_accuracy": float(score)}


def svc(x: np.ndarray, y: np.ndarray, per_class: int) -> tuple[Any, Row]:
    """C in units of the inverse mean squared length; wide data are not standardised.

    Liblinear takes minutes per fit on standardised wide data, and with large C on any wide data.
    """
    del per_class
    wide = x.shape[1] > 64
    found: list[tuple[float, str, float]] = []
    for name in preparations(x):
        if wide and name == "standard":
            continue
        prepared = PREPARED[name].fit_transform(x)
        unit = 1 / np.square(prepared).sum(1).mean()
        grid = {"C": [unit * each for each in ((0.1, 1, 10) if wide else SVC_C)]}
        cv = StratifiedKFold(3, shuffle=True, random_state=0)
        search = GridSearchCV(LinearSVC(random_state=0), grid, cv=cv, refit=False)
        search.fit(prepared, y)
        found.append((search.best_score_, name, search.best_params_["C"]))
    score, name, c = max(found, key=lambda each: each[0])
    model = Pipeline([("prepare", PREPARED[name]), ("fit", LinearSVC(C=c, random_state=0))])
    return model.fit(x, y), {"prepared": name, "C": float(c), "cv_accuracy": float(score)}


def ours(x: np.ndarray, y: np.ndarray, per_class: int) -> tuple[Any, Row]:
    model = LargeMarginClassifier(hidden_sizes=(), folds=folds(per_class).n_splits, random_state=0)
    return model.fit(x, y), {"penalties_tried": len(model.history_["penalty"])}


def default(x: np.ndarray, y: np.ndarray, per_class: int) -> tuple[Any, Row]:
    """No setting at all: a linear head or a network, as X looks."""
    del per_class
    model = LargeMarginClassifier(random_state=0).fit(x, y)
    return model, {"linear": hasattr(model, "held_out_margins_")}


METHODS: dict[str, Callable[[np.ndarray, np.ndarray, int], tuple[Any, Row]]] = {
    "logistic": logistic,
    "svc": svc,
    "largemargin": ours,
    "largemargin default": default,
}


def calibration_error(probabilities: np.ndarray, right: np.ndarray) -> float:
    """Mean distance of confidence and accuracy over equally wide bins of confidence."""
    sure = probabilities.max(1)
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs((sure - right)[bins == each].sum()) for each in range(BINS)]
    return float(sum(gaps) / len(right))


def ood_scores(model: Any, x: np.ndarray) -> dict[str, np.ndarray]:
    """Scores that are high on inputs of a known class."""
    logits = model.decision_function(x)
    found = {"largest_logit": logits.max(1)}
    if hasattr(model, "held_out_margins_"):
        found["score_samples"] = model.score_samples(x)
    if hasattr(model, "predict_proba"):
        found["largest_probability"] = model.predict_proba(x).max(1)
        found["energy"] = logsumexp(logits, axis=1)
    return found


def measured(model: Any, data: Data) -> Row:
    """Accuracy, calibration and detection on the test set."""
    x, y = data["x_test"], data["y_test"]
    right = model.predict(x) == y
    row: Row = {"accuracy": float(right.mean())}
    if hasattr(model, "predict_proba"):
        probabilities = model.predict_proba(x).astype("float64")
        probabilities /= probabilities.sum(1, keepdims=True)
        row["nll"] = float(log_loss(y, probabilities, labels=model.classes_))
        row["ece"] = calibration_error(probabilities, right)
    if "x_ood" in data:
        known, other = ood_scores(model, x), ood_scores(model, data["x_ood"])
        labels = np.repeat([1, 0], [len(x), len(data["x_ood"])])
        row["auroc"] = {
            name: float(roc_auc_score(labels, np.concatenate([known[name], other[name]])))
            for name in known
        }
    return row


def timed(name: str, per_class: int, x: np.ndarray, y: np.ndarray, times: int) -> list[Row]:
    """CPU seconds of both searches, one after the other, so that other load counts for neither."""
    found = interleaved(
        {
            "logistic": lambda: logistic(x, y, per_class),
            "largemargin": lambda: ours(x, y, per_class),
        },
        repetitions=times,
        warm_up=0,
        clock=time.process_time,
    )
    same = {"data": name, "labels": per_class, "samples": len(y), "repetitions": times}
    return [
        same | {"timed": method, "cpu_seconds": round(statistics.median(seconds), 3)}
        for method, seconds in found.items()
    ]


def draw(data: Data, per_class: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng, y = np.random.default_rng(seed), data["y_train"]
    kept = [rng.permutation(np.flatnonzero(y == each))[:per_class] for each in np.unique(y)]
    index = np.concatenate(kept)
    return data["x_train"][index], y[index]


def load(path: Path) -> Data:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="+", metavar="NAME=FILE.npz")
    parser.add_argument("--labels", type=int, nargs="+", default=[5, 10, 50], help="a class")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timing", type=int, default=0, help="repetitions; CPU seconds of fits")
    parser.add_argument("--out", default="embeddings", help="name of the rows in results/")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", ConvergenceWarning)
    warnings.simplefilter("ignore", FutureWarning)
    path = RESULTS / f"{given.out}.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    key = ("data", "labels", "draw", "method")
    done = {tuple(row[name] for name in key) for row in rows if "method" in row}
    common = environment(given.threads)
    named = " ".join(re.sub("=.*/", "=", each) for each in given.data)
    common["command"] = f"python benchmarks/embeddings.py {named} --labels {given.labels}"
    common["versions"] = {"torch": torch.__version__} | _versions()
    for per_class in given.labels:
        for seed in range(given.draws):
            for name, file in (each.split("=", 1) for each in given.data):
                data = load(Path(file))
                x, y = draw(data, per_class, seed)
                if given.timing:
                    rows += [row | common for row in timed(name, per_class, x, y, given.timing)]
                    write(given.out, rows, {})
                    continue
                for method in given.methods:
                    if (name, per_class, seed, method) in done:
                        continue
                    start = time.perf_counter()
                    model, chosen = METHODS[method](x, y, per_class)
                    seconds = time.perf_counter() - start
                    row = dict(zip(key, (name, per_class, seed, method), strict=True))
                    row |= {"samples": len(y), "fit_seconds": round(seconds, 3), "chosen": chosen}
                    row |= measured(model, data)
                    rows.append(row | common)
                    write(given.out, rows, {})
                    print(row, flush=True)


def _versions() -> Row:
    import scipy
    import sklearn

    return {
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "scikit-learn": sklearn.__version__,
    }


if __name__ == "__main__":
    main()
