"""Golden values of every diagnostic, in both precisions."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles.golden import FOLDER, decode_all

from largemargin import geometry as g
from largemargin.ops import similarity_logits


def net(x, p):
    """hidden = act(A x + a), logits = W hidden + b, as the golden README defines them."""
    act = {"tanh": torch.tanh, "relu": torch.relu}[p["activation"]]

    def backbone(inputs):
        return act(F.linear(inputs, x["A"], x["a"]))

    return backbone, lambda inputs: F.linear(backbone(inputs), x["W"], x["b"])


def dispersion_and_margin(x, p):
    margins = g.boundary_margins(x["q"], x["W"], x["y"], bias=x["b"])
    dispersion = g.class_dispersion(x["q"], x["y"], p["num_classes"])
    return {"dispersion": dispersion, "margin": margins.unsigned, "signed_margin": margins.signed}


def scaling(x, p):
    act = torch.relu if p["activation"] == "relu" else torch.nn.Identity()
    new = g.rescale_network(x["Wm"], x["bm"], x["b"], factor=p["alpha"])
    out = {}
    before, after = (x["Wm"], x["bm"], x["b"]), (new.weight, new.bias, new.head_bias)
    for when, (weight, bias, head_bias) in {"before": before, "after": after}.items():
        q = act(F.linear(x["x"], weight, bias))
        logits = similarity_logits(q, x["W"], bias=head_bias)
        margins = g.boundary_margins(q, x["W"], x["y"], bias=head_bias)
        out[f"dispersion_{when}"] = g.largest_dispersion(q, x["y"], len(x["W"]))
        out[f"margin_{when}"] = margins.smallest
        out[f"softmax_loss_{when}"] = F.cross_entropy(logits, x["y"])
        out["pred"] = logits.argmax(1)
    return out


def generalization(x, p):
    out = {"phi": g.ramp_loss(x["h"], rho=p["rho"])}
    if "N" in p:
        shared = {"rho": p["rho"], "delta": p["delta"], "num_samples": p["N"], "radius": p["r"]}
        linear = g.linear_margin_bound(
            x["h"], weight_norm=p["Gamma"], centroid_norm=p["R"], **shared
        )
        ball = g.ball_bound(x["h"], feature_norm=p["Lambda"], centroid_norm=p["R"], **shared)
        out |= {"emp": linear.empirical, "confidence": linear.confidence}
        out |= {"bound_5_2_fixed": linear.fixed, "bound_5_2_union": linear.union}
        out |= {"bound_5_3": ball.bound}
    return out


def divergences(x, p):
    bound = g.jsd_lower_bound(p["tau"])
    return {
        "jsd": g.jensen_shannon(x["p"], x["q"]),
        "tv": g.total_variation(x["p"], x["q"]),
        "kl_pq": g.kl_divergence(x["p"], x["q"]),
        "bound": bound.paper,
        "bound_tight": bound.tight,
    }


def input_curvature(x, p):
    model = net(x, p)[1]
    batch = x["x"][None], torch.tensor([p["y"]])
    exact = g.exact_curvature(model, *batch, num_directions=len(x["eps"]))
    here = g.input_gradient(model, *batch)
    out = {
        "estimate": g.curvature(model, *batch, directions=x["eps"], step=p["t"]),
        "limit_estimate": g.curvature_limit(model, *batch, directions=x["eps"]),
        "eigenvalues": exact.eigenvalues,
        "exact_sum_sq": exact.sum_of_squares,
        "exact_sum_abs": exact.sum_of_absolutes,
        "estimator_variance": exact.estimator_variance,
        "grad": here.gradient,
        "loss": here.loss,
    }
    return {name: values[0] for name, values in out.items()}


def stability(x, p):
    bounds = g.curvature_bounds(
        net(x, p)[0],
        x["W"],
        x["x"][None],
        torch.tensor([p["y"]]),
        bias=x["b"],
        sigma=p["sigma"],
        radius=p["delta"],
        logit_bound=p["k_max"],
        noise=x["eps"],
    )._asdict()
    return {name: value if value.dim() == 0 else value[0] for name, value in bounds.items()}


def low_curvature(x, p):
    accuracy = g.low_curvature_accuracy(x["curvature"], x["correct"], x["p"])
    groups = g.curvature_by_robustness(x["curvature"], x["count"])
    return {
        "acc_strict": accuracy.strict,
        "acc_weak": accuracy.weak,
        "n_strict": accuracy.size_strict,
        "group_mean": groups.mean,
        "pearson": groups.pearson,
    }


def class_margin(x, p):
    return {"radians": g.class_margin(x["W"]), "degrees": g.class_margin(x["W"], degrees=True)}


def sample_margin(x, p):
    raw = g.sample_margins(x["q"], x["W"], x["y"])
    cosine = g.sample_margins(x["q"], x["W"], x["y"], similarity="cosine")
    summary = g.summarize_margins(cosine, x["y"], len(x["W"]))
    return {
        "raw": raw,
        "cosine": cosine,
        "per_class_min_cosine": summary.class_minimum,
        "gamma_min_cosine": summary.minimum,
        "mean_cosine": summary.mean,
    }


def riesz(x, p):
    return {
        "energy": g.riesz_energy(x["W"], p["t"]),
        "root": g.riesz_root(x["W"], p["t"]),
        "min_distance": g.min_distance(x["W"]),
    }


def simplex(x, p):
    names = ("alpha1", "beta1", "alpha2", "beta2")
    bound = g.gm_softmax_bound(p["C"], scale=p["s"], **{name: p[name] for name in names})
    return {"lower_bound": bound, **g.simplex_optimum(p["C"], scale=p["s"])._asdict()}


def implicit_bias(x, p):
    per_sample = g.implicit_bias(x["f"], x["y"])
    return {"bias_per_sample": per_sample, "bias": per_sample.mean()}


def layers(x):
    return [x[f"W{i}"] for i in range(1, sum(name.startswith("W") for name in x) + 1)]


def cushions(x, p):
    found = g.noise_cushions(layers(x), x["X"])
    terms = g.cushion_complexity(
        found, num_samples=p["m"], r=p["r"], theta=p["theta"], delta=p["delta"]
    )
    out = {f"complexity_{name}": getattr(terms, name) for name in ("printed", "derived")}
    return {**found._asdict(), **out, "ratio_factor": terms.ratio_factor}


def pac_bayes(x, p):
    return g.pac_bayes_quantities(
        x["gamma"],
        x["w"],
        x["layer_cushion"],
        x["minimal_interlayer_cushion"],
        num_samples=p["m"],
        spectral_norm=p["beta"],
        **{name: p[name] for name in ("width", "contraction", "r", "theta", "delta")},
    )._asdict()


ITEMS = {
    "NGY-D4": dispersion_and_margin,
    "NGY-P4.4": scaling,
    "NGY-5": generalization,
    "NGY-6.1": divergences,
    "NGR-21": input_curvature,
    "NGR-T6.1": stability,
    "NGR-7.3": low_curvature,
    "ZHO-MC": class_margin,
    "ZHO-MS": sample_margin,
    "ZHO-RIESZ": riesz,
    "ZHO-T5": simplex,
    "ZHO-LMJ": lambda x, p: g.lm_softmax_inequality(x["q"], x["W"], x["y"], scale=p["s"])._asdict(),
    "KOB-7": implicit_bias,
    "ODN-VAR": lambda x, p: g.variance_split(x["E"], x["y"])._asdict(),
    "ODN-SPEC": lambda x, p: g.spectral_complexity(
        layers(x), reference=p["reference"], norm=p["norm21"]
    )._asdict(),
    "ODN-BOUND": cushions,
    "ODN-PAC": pac_bayes,
}
CASES = [
    pytest.param(item, case, id=f"{item}-{case['name']}")
    for item in ITEMS
    for case in json.loads((FOLDER / f"{item}.json").read_text())["cases"]
]


def as_tensors(arrays, dtype):
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def tolerance(item, params, dtype, gradient=False):
    if dtype == torch.float64:
        return 1e-8 if gradient else 1e-9
    loose = item == "NGR-21" or params.get("s", 0) >= 30
    return 1e-3 if loose else 2e-4 if gradient else 2e-5


def assert_close(got, want, limit, what):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.array(got)
    want = np.array(want)
    assert got.shape == want.shape, what
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= limit * (1 + np.abs(want))
    assert (same | near).all(), f"{what}: got {got}, want {want}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("item", "case"), CASES)
def test_golden_values(item, case, dtype):
    inputs, params = as_tensors(decode_all(case["inputs"]), dtype), decode_all(case["params"])
    outputs = ITEMS[item](inputs, params)
    for name, want in decode_all(case["expected"]).items():
        got = outputs[name]
        if isinstance(got, torch.Tensor) and got.is_floating_point() and inputs:
            assert got.dtype == dtype, name
        assert_close(got, want, tolerance(item, params, dtype), name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("item", "case"), [case for case in CASES if case.values[1].get("grads")])
def test_golden_gradients(item, case, dtype):
    inputs, params = as_tensors(decode_all(case["inputs"]), dtype), decode_all(case["params"])
    for output, wanted in case["grads"].items():
        for name, want in decode_all(wanted).items():
            leaf = inputs[name].clone().requires_grad_()
            ITEMS[item]({**inputs, name: leaf}, params)[output].backward()
            assert_close(leaf.grad, want, tolerance(item, params, dtype, gradient=True), name)


@pytest.mark.parametrize("name", ["mlp_tanh", "mlp_relu"])
def test_margin_ratio_of_golden_margins(name):
    cases = json.loads((FOLDER / "ODN-G.json").read_text())["cases"]
    want = decode_all(next(case for case in cases if case["name"] == name)["expected"])
    found = g.margin_ratio(torch.from_numpy(want["gamma"]))
    for field in ("mean", "std", "ratio"):
        assert math.isclose(getattr(found, field), want[field], rel_tol=1e-12)
