"""The NumPy oracles against the golden vectors: values to 1e-9, finite differences to 1e-5.

The oracles are the independent reference of the other tests, so they are checked first, and
nothing of the library takes part.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
from oracles import LOGIT_ORACLES, ORACLES, options
from oracles.golden import FOLDER, decode, read_cases, steps_of
from oracles.golden_items import ITEMS
from oracles.numgrad import numerical_gradient

VALUE_TOLERANCE = 1e-9
GRADIENT_TOLERANCE = 1e-5
# Metrics, bounds, estimators, perturbations, class profiles and rejected calls.
NOT_LOSSES = {
    *("NGY-D4", "ZHO-MC", "ZHO-MS", "ZHO-RIESZ", "ODN-VAR", "NGR-7.3"),
    *("NGY-P4.4", "NGY-5", "NGY-6.1", "NGR-T6.1", "ZHO-T5", "ZHO-LMJ"),
    *("ODN-BOUND", "ODN-SPEC", "ODN-PAC", "NGR-21", "NGR-PERT", "BAS-IMB", "ERR"),
}
SOURCES = sorted((Path(__file__).parent / "oracles").glob("*.py"))

CASES = [pytest.param(i, c, id=f"{i}/{c['name']}") for i, c in read_cases()]
GRADIENT_CASES = [
    pytest.param(i, c, id=f"{i}/{c['name']}")
    for i, c in read_cases()
    if "finite_grad" not in c["tags"] and (c.get("grads") or "steps" in c)
]


def assert_close(got, want, tolerance, what):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if want.dtype != np.float64:
        assert np.array_equal(got, want), f"{what}: {got}, expected {want}"
        return
    error = np.abs(got - want) / (1.0 + np.abs(want))
    assert np.all(error <= tolerance), f"{what}: off by {error.max():.3g}\n{got}\n{want}"


def without_derivative(item, params, name, x):
    """Entries where the loss jumps and the specification sets the gradient to 0 by rule N4."""
    jumps = np.zeros(x.shape, dtype=bool)
    if item == "OPS-STATS" and params["similarity"] == "cosine" and name == "q":
        jumps[np.all(x == 0.0, axis=1)] = True
    return jumps


@pytest.mark.parametrize(("item", "case"), CASES)
def test_value(item, case):
    for inputs, params, expected, _ in steps_of(item, case):
        outputs = ITEMS[item](inputs, params, inputs)
        assert expected
        for name, want in expected.items():
            assert_close(outputs[name], want, VALUE_TOLERANCE, name)


@pytest.mark.parametrize(("item", "case"), GRADIENT_CASES)
def test_gradient(item, case):
    # Rounding of a difference is about |f| 1e-16 / h: statistics of 1e5 need the larger step.
    h = 1e-5 if "large_logits" in case["tags"] else 1e-6
    for inputs, params, _, grads in steps_of(item, case):
        assert grads
        for output, by_input in grads.items():
            for name, entry in by_input.items():

                def summed(x, output=output, name=name, inputs=inputs, params=params):
                    return np.sum(ITEMS[item]({**inputs, name: x}, params, inputs)[output])

                want = decode(entry)
                jumps = without_derivative(item, params, name, inputs[name])
                got = np.where(jumps, 0.0, numerical_gradient(summed, inputs[name], h))
                assert_close(got, want, GRADIENT_TOLERANCE, f"d {output} / d {name}")


@pytest.fixture
def batch():
    draw = np.random.default_rng(0)
    return draw.normal(size=(5, 3)), draw.normal(size=(4, 3)), np.array([0, 3, 1, 1, 2])


@pytest.mark.parametrize("name", ORACLES)
def test_one_hot_targets_equal_hard_labels(name, batch):
    features, prototypes, labels = batch
    oracle = ORACLES[name]
    hard = oracle(features, prototypes, labels)
    assert hard.shape == (5,)
    assert_close(oracle(features, prototypes, np.eye(4)[labels]), hard, 1e-15, name)


@pytest.mark.parametrize("name", LOGIT_ORACLES)
def test_logit_losses_take_logits_or_features(name, batch):
    features, prototypes, labels = batch
    logits = features @ prototypes.T
    oracle = LOGIT_ORACLES[name]
    assert_close(oracle(logits, labels), oracle(features, prototypes, labels), 1e-12, name)


@pytest.mark.parametrize("name", ORACLES)
def test_soft_targets_agree_with_the_generic_rule(name, batch):
    features, prototypes, _ = batch
    targets = np.random.default_rng(1).dirichlet(np.ones(4), size=5)
    oracle = ORACLES[name]
    of_class = options.loss_of_class(oracle, features, prototypes, num_classes=4)
    generic = options.apply_options(of_class, targets, 4, reduction="none")
    assert_close(oracle(features, prototypes, targets), generic, 1e-14, name)


def test_every_golden_loss_has_an_oracle():
    without = {path.stem for path in FOLDER.glob("*.json")} - set(ITEMS)
    assert without == NOT_LOSSES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_oracles_are_independent(source):
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported <= {"dataclasses", "json", "math", "numpy", "oracles", "pathlib"}
