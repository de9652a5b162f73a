"""Writes the golden files of the items in ``CASES``: ``python tests/oracles/write_golden.py``.

Values are the oracles'. Gradients are differences of eighth order of them, exact to about 1e-11
for the smooth functions with gentle scales that have gradients here.
"""

import json
from pathlib import Path

import numpy as np

from oracles.golden_items import ITEMS

FOLDER = Path(__file__).parents[1] / "golden"
STENCIL = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}
STEP = 2e-3

draw = np.random.default_rng(26)


def batch(samples, classes, dim, *, length=1.0, centers=None):
    """Features near their class vectors, which are (classes, centers, dim) where asked for."""
    shape = (classes, dim) if centers is None else (classes, centers, dim)
    W, y = draw.normal(size=shape), draw.integers(classes, size=samples)
    own = W[y] if centers is None else W[y, 0]
    q = length * (0.7 * own + draw.normal(size=(samples, dim)))
    return {"q": q, "W": W, "y": y}


def exact(name, inputs, params, *, notes="", tags=(), gradients=("q", "W")):
    return {"name": name, "inputs": inputs, "params": params, "notes": notes} | {
        "tags": list(tags),
        "gradients": gradients,
    }


def adaface():
    gentle = {"m": 0.4, "h": 0.333, "s": 6.0, "mu": 2.0, "sigma": 0.5}
    small, other = batch(6, 4, 3), batch(5, 3, 4)
    yield exact("qualities", small, gentle, notes="qualities of both signs, some clipped")
    yield exact("wide_margin", other, {**gentle, "m": 1.1, "h": 0.9})
    yield exact("average", small, {**gentle, "sigma": 1e6}, notes="all of average quality: CosFace")
    yield exact("defaults", batch(6, 5, 8), {}, gradients=(), notes="the start of the statistics")
    yield exact(
        "moved", other, {**gentle, "rate": 0.25}, notes="one training batch moves mu, sigma"
    )
    yield exact("one_sample", batch(1, 3, 2), {**gentle, "rate": 0.25}, notes="sigma stays")


def magface():
    gentle = {"l_a": 1.0, "u_a": 4.0, "l_m": 0.2, "u_m": 0.9, "lam": 3.0, "s": 6.0}
    small = batch(6, 4, 3)
    for mode in ("easy", "hard", "none"):
        yield exact(mode, small, {**gentle, "mode": mode})
    yield exact("clipped_norms", batch(5, 3, 4, length=9.0), gentle, notes="norms above u_a")
    yield exact("defaults", batch(6, 5, 8, length=12.0), {}, gradients=())


def elastic():
    small, other = batch(6, 4, 3), batch(5, 3, 4)
    arc = {"m": 0.5, "sigma": 0.2, "form": "arc", "s": 6.0}
    cos = {"m": 0.35, "sigma": 0.1, "form": "cos", "s": 6.0}
    for name, rows, params in (("arc", small, arc), ("cos", other, cos)):
        noisy = {**rows, "eps": draw.normal(size=len(rows["y"]))}
        yield exact(f"{name}_mean", rows, params, notes="no draws: the margin is m")
        yield exact(name, noisy, {**params, "plus": False})
        yield exact(f"{name}_plus", noisy, {**params, "plus": True})
    yield exact("defaults", batch(6, 5, 8), {}, gradients=())


def curricular():
    small = batch(6, 5, 3)
    yield exact("early", small, {"m": 0.5, "s": 6.0}, notes="t = 0")
    yield exact("late", small, {"m": 0.5, "s": 6.0, "t": 0.75})
    yield exact("moved", batch(5, 4, 3), {"m": 0.3, "s": 6.0, "rate": 0.25})
    yield exact("defaults", batch(6, 5, 8), {}, gradients=())


def adacos():
    far = batch(6, 7, 3)
    far["y"] = (far["y"] + 1) % 7
    yield exact("far", far, {}, notes="the median angle is cut off at 45 degrees")
    near = batch(8, 12, 4)
    near["q"] = near["W"][near["y"]] + 0.3 * near["q"]
    yield exact("near", near, {}, notes="a median angle below 45 degrees")


def sub_centers():
    arc, small = {"loss": "ZHO-ARCFACE", "m": 0.5, "s": 6.0}, batch(7, 4, 3, centers=3)
    yield exact("arcface", small, arc)
    yield exact("cosface", small, {"loss": "ZHO-COSFACE", "m": 0.35, "s": 6.0})
    yield exact("lm_softmax", batch(6, 5, 4, centers=2), {"loss": "ZHO-LM", "s": 6.0})
    yield exact("one_center", batch(5, 3, 3, centers=1), arc)


def dynamic_margins():
    yield exact("defaults", {"counts": np.array([5000, 200, 10, 1])}, {}, gradients=())
    params = {"a": 1.0, "b": 0.1, "lam": 0.5}
    yield exact("other", {"counts": np.array([100, 4])}, params, gradients=())


CASES = {
    "BAS-ADACOS": ("AdaCos: fixed scale, and one step of the dynamic one", adacos),
    "BAS-ADAFACE": ("AdaFace; mu and sigma are params, moved where a rate is given", adaface),
    "BAS-CURRICULAR": ("CurricularFace; t is a param, moved where a rate is given", curricular),
    "BAS-DYNAMIC": ("margins by class size", dynamic_margins),
    "BAS-ELASTIC": ("ElasticFace; the draws are inputs", elastic),
    "BAS-MAGFACE": ("MagFace with its regularizer", magface),
    "BAS-SUBCENTER": ("losses on sub-centers, and the dominant ones", sub_centers),
}


def encode(value):
    if not isinstance(value, np.ndarray):
        return value
    return {"dtype": str(value.dtype), "shape": list(value.shape), "data": value.ravel().tolist()}


def gradient(function, x):
    found = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        for steps, weight in STENCIL.items():
            for sign in (1, -1):
                moved = x.copy()
                moved[index] += sign * steps * STEP
                found[index] += sign * weight * function(moved) / STEP
    return found


def written(item, case):
    inputs, params, names = case["inputs"], case["params"], case.pop("gradients")
    expected = ITEMS[item](inputs, params, inputs)
    slopes = {
        name: gradient(
            lambda x, n=name: ITEMS[item]({**inputs, n: x}, params, inputs)["value"], inputs[name]
        )
        for name in names
    }
    case["inputs"] = {name: encode(value) for name, value in inputs.items()}
    case["expected"] = {name: encode(value) for name, value in expected.items()}
    case["grads"] = {"value": {name: encode(s) for name, s in slopes.items()}} if slopes else {}
    return case


if __name__ == "__main__":
    for item, (title, cases) in CASES.items():
        found = [written(item, case) for case in cases()]
        entry = {"format": 1, "item": item, "title": title, "cases": found}
        (FOLDER / f"{item}.json").write_text(json.dumps(entry, indent=1) + "\n")
