"""Which oracle answers for which golden item, and under which names.

``ITEMS[item](inputs, params, at)`` returns the outputs of one case by their golden names. ``at``
holds the unperturbed inputs, where stopped gradients are evaluated.
"""

import numpy as np

from oracles import (
    centroid_family,
    cosine_family,
    input_margins,
    options,
    others,
    softmax_family,
    stats,
)


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def renamed(params, names):
    """Golden parameter names to keyword names, for the parameters that are present."""
    return {ours: params[golden] for golden, ours in names.items() if golden in params}


def with_mean(name, losses, per_sample="{}_per_sample"):
    return {name: mean(losses), per_sample.format(name): losses}


def logit_item(oracle, **names):
    def outputs(x, p, at):
        return with_mean("value", oracle(x["f"], x["y"], **renamed(p, names)))

    return outputs


def cosine_item(oracle, **names):
    def outputs(x, p, at):
        losses = oracle(x["q"], x["W"], x["y"], **renamed(p, names))
        return {"value": mean(losses), "per_sample": losses}

    return outputs


def class_statistics(x, p, at):
    head = {"bias": x.get("b"), "similarity": p["similarity"]}
    found = stats.class_stats(x["q"], x["W"], x["y"], **head)
    logits = stats.similarity_logits(x["q"], x["W"], **head)
    return {"logits": logits, **{name: getattr(found, name) for name in stats.STATISTICS}}


OPTION_LOSSES = {
    "NGY-3.3": (softmax_family.cross_entropy, ("q", "W"), {"b": "bias"}),
    "ZHO-COSFACE": (
        cosine_family.cosface,
        ("q", "W"),
        {"s": "scale", "m": "margin", "margin_per_class": "margin"},
    ),
    "ZHO-ARCFACE": (
        cosine_family.arcface,
        ("q", "W"),
        {"s": "scale", "m": "margin", "mode": "mode", "margin_per_class": "margin"},
    ),
    "ZHO-LM": (cosine_family.lm_softmax, ("q", "W"), {"s": "scale"}),
    "KOB-11": (softmax_family.kobayashi, ("f",), {"lam": "strength"}),
}


def option_case(x, p, at):
    oracle, names, hyper = OPTION_LOSSES[p["loss"]]
    classes = x["W"].shape[0] if "W" in x else x["f"].shape[1]
    loss = options.loss_of_class(
        oracle, *(x[name] for name in names), num_classes=classes, **renamed({**x, **p}, hyper)
    )
    labels = x["soft_target"] if "soft_target" in x else x["y"]
    kept = ("ignore_index", "label_smoothing", "reduction")
    value = options.apply_options(
        loss,
        labels,
        classes,
        weight=x.get("class_weight"),
        sample_weight=x.get("sample_weight"),
        **{name: p[name] for name in kept if name in p},
    )
    return {"value": value}


def softmax_item(x, p, at):
    return {"value": mean(softmax_family.cross_entropy(x["q"], x["W"], x["y"], bias=x["b"]))}


CENTROID_NAMES = {
    "alpha": "alpha",
    "beta": "beta",
    "gamma_reg": "gamma_reg",
    "lam": "noise_weight",
    "delta_v": "radius",
    "delta_d": "margin",
    "compact_power": "compact_power",
    "margin_power": "margin_power",
    "agg": "aggregate",
    "strategy": "strategy",
    "gamma": "momentum",
    "first_seen": "first_seen",
    "ignore_index": "ignore_index",
}


def centroid_settings(x, p, at):
    return {
        "bank": x["bank"],
        "seen": x["seen"],
        "bias": x.get("b"),
        "frozen_features": at["q"],
        "frozen_prototypes": at.get("W"),
        **renamed(p, CENTROID_NAMES),
    }


def discriminative_item(x, p, at):
    settings = centroid_settings(x, p, at)
    return vars(centroid_family.discriminative(x["q"], x["W"], x["y"], **settings))


def compactness_item(x, p, at):
    found = centroid_family.discriminative(x["q"], None, x["y"], **centroid_settings(x, p, at))
    return {**vars(found), "value": found.compact}


def noisy_item(x, p, at):
    settings = centroid_settings(x, p, at)
    found = centroid_family.discriminative(x["q"], x["W"], x["y"], noisy=x["q_noisy"], **settings)
    return {**vars(found), "softmax": softmax_item(x, p, at)["value"]}


def robust_item(x, p, at):
    settings = centroid_settings(x, p, at)
    found = centroid_family.robust_discriminative(
        x["q"], x["W"], x["y"], noisy=x["q_noisy"], **settings
    )
    return {"value": found}


def centroid_margin_item(x, p, at):
    names = {"delta_d": "margin", "margin_power": "power", "agg": "aggregate"}
    terms = centroid_family.centroid_margin(
        x["m"],
        x["W"],
        x["classes"],
        bias=x["b"],
        frozen_prototypes=at["W"],
        **renamed(p, names),
    )
    return {"value": mean(terms), "per_class": terms}


def boundary_item(x, p, at):
    signed = centroid_family.signed_boundary_distance(x["m"], x["W"], x["b"])
    return {"signed": signed, "distance": abs(signed)}


def momentum_margin_item(x, p, at):
    settings = centroid_settings(x, p, at)
    margins = {}
    for name, strategy in {"value_naive": "none", "value_momentum": "both"}.items():
        settings["strategy"] = strategy
        found = centroid_family.discriminative(x["q"], x["W"], x["y"], **settings)
        margins[name] = found.margin
    return margins


def max_based_item(x, p, at):
    hinge = softmax_family.max_hinge(x["f"], x["y"], margin=p["rho"])
    smooth = softmax_family.max_softplus(x["f"], x["y"], margin=p["rho"])
    return {**with_mean("hinge", hinge), **with_mean("softplus", smooth)}


def divergence_item(x, p, at):
    kinds = {"d_qu": "rivals_to_uniform", "d_uq": "uniform_to_rivals", "d_sym": "symmetric"}
    outputs = {}
    for name, kind in kinds.items():
        outputs |= with_mean(name, softmax_family.rival_divergence(x["f"], x["y"], kind=kind))
    return outputs


def biased_item(x, p, at):
    plain = softmax_family.biased_softmax(x["f"], x["y"], margin=p["rho"])
    both = softmax_family.biased_softmax(x["f"], x["y"], margin=p["rho"], strength=p["lam"])
    return {**with_mean("value", plain), **with_mean("with_reg", both)}


def arcface_item(x, p, at):
    names = {"s": "scale", "m": "margin", "mode": "mode", "gradient": "gradient"}
    losses = cosine_family.arcface(
        x["q"],
        x["W"],
        x["y"],
        frozen_features=at["q"],
        frozen_prototypes=at["W"],
        **renamed(p, names),
    )
    return {"value": mean(losses), "per_sample": losses}


def sphereface_item(x, p, at):
    if "theta" in x:
        return {"psi": cosine_family.sphereface_psi(x["theta"], p["m"])}
    return cosine_item(cosine_family.sphereface, m="margin", lam="annealing", s="scale")(x, p, at)


def gm_item(x, p, at):
    line = {name: x[name] for name in ("alpha1", "beta1", "alpha2", "beta2")}
    return {"value": mean(cosine_family.gm_softmax(x["q"], x["W"], x["y"], scale=p["s"], **line))}


def ldam_item(x, p, at):
    outputs = {}
    if "max_m" in p:
        outputs["margins"] = cosine_family.ldam_margins(x["counts"], max_margin=p["max_m"])
    if "beta" in p:
        outputs["weights"] = cosine_family.balanced_weights(x["counts"], beta=p["beta"])
    if "q" in x:
        names = {"max_m": "max_margin", "s": "scale"}
        classes = len(x["W"])
        loss = options.loss_of_class(
            cosine_family.ldam,
            x["q"],
            x["W"],
            num_classes=classes,
            class_counts=x["counts"],
            **renamed(p, names),
        )
        weight = x["weight"] if p["weighted"] else None
        outputs["value"] = options.apply_options(loss, x["y"], classes, weight=weight)
    return outputs


def center_item(x, p, at):
    losses = centroid_family.center_loss(x["q"], x["centers"], x["y"], weight=p["lam"])
    after = centroid_family.center_update(x["q"], x["centers"], x["y"], rate=p["alpha"])
    return {"value": getattr(losses, p["reduction"])(), "centers_after": after}


def mixture_item(x, p, at):
    names = {"alpha": "alpha", "lam": "likelihood_weight"}
    losses = others.gaussian_mixture(
        x["q"], x["mu"], x["y"], log_variances=x["logvar"], **renamed(p, names)
    )
    return {"value": mean(losses)}


def symmetry_item(x, p, at):
    return {
        "residual": others.super_symmetry(x["W"]),
        "penalty": others.super_symmetry_penalty(x["W"]),
    }


def stability_item(x, p, at):
    terms = centroid_family.stability(x["q"], x["q_noisy"], squared=p["squared"])
    return {"value": p["alpha"] * mean(terms)}


def zero_centroid_item(x, p, at):
    return {"value": p["lam"] * cosine_family.zero_centroid(x["W"], normalize=p["normalize"])}


def adaface_item(x, p, at):
    names = {"m": "margin", "h": "concentration", "s": "scale"}
    state = renamed(p, {"mu": "norm_mean", "sigma": "norm_std"})
    outputs = {}
    if "rate" in p:
        after = cosine_family.norm_statistics([at["q"]], rate=p["rate"], **state)
        outputs["mu_after"], outputs["sigma_after"] = after
        state = dict(zip(("norm_mean", "norm_std"), after, strict=True))
    hyper = renamed(p, names) | state
    losses = cosine_family.adaface(x["q"], x["W"], x["y"], frozen_features=at["q"], **hyper)
    return {"value": mean(losses), "per_sample": losses, **outputs}


def curricular_item(x, p, at):
    hyper, t = renamed(p, {"m": "margin", "s": "scale"}), p.get("t", 0.0)
    outputs = {}
    if "rate" in p:
        rows = zip(at["q"], at["y"], strict=True)
        own = mean([cosine_family.cosine(at["W"][y], q) for q, y in rows])
        t = outputs["t_after"] = (1 - p["rate"]) * t + p["rate"] * own
    losses = cosine_family.curricularface(x["q"], x["W"], x["y"], progress=t, **hyper)
    return {"value": mean(losses), "per_sample": losses, **outputs}


def elastic_item(x, p, at):
    names = {"m": "margin", "sigma": "std", "form": "form", "plus": "plus", "s": "scale"}
    losses = cosine_family.elasticface(
        x["q"], x["W"], x["y"], noise=x.get("eps"), **renamed(p, names)
    )
    return {"value": mean(losses), "per_sample": losses}


def adacos_item(x, p, at):
    start = cosine_family.adacos_scale(len(x["W"]))
    after = cosine_family.adacos_step(at["q"], at["W"], at["y"], scale=start)
    losses = cosine_family.normface(x["q"], x["W"], x["y"], scale=after)
    return {"fixed": start, "scale_after": after, "value": mean(losses)}


def sub_center_item(x, p, at):
    oracle, names = {
        "ZHO-ARCFACE": (cosine_family.arcface, {"m": "margin", "s": "scale"}),
        "ZHO-COSFACE": (cosine_family.cosface, {"m": "margin", "s": "scale"}),
        "ZHO-LM": (cosine_family.lm_softmax, {"s": "scale"}),
    }[p["loss"]]
    losses = cosine_family.of_sub_centers(
        *(oracle, x["q"], x["W"], x["y"]),
        chosen=cosine_family.nearest_centers(at["q"], at["W"]),
        **renamed(p, names),
    )
    dominant, angles = cosine_family.dominant_centers(x["q"], x["W"], x["y"])
    return {"value": mean(losses), "per_sample": losses, "dominant": dominant, "angles": angles}


def dynamic_margin_item(x, p, at):
    names = {"a": "factor", "b": "offset", "lam": "power"}
    return {"margins": cosine_family.dynamic_margins(x["counts"], **renamed(p, names))}


def focal_item(x, p, at):
    losses = softmax_family.focal(x["f"], x["y"], gamma=p["gamma"], alpha=x.get("alpha"))
    return with_mean("value", losses)


def counted_item(oracle, **names):
    """A loss of the class counts; "adjusted" are the logits of the post-hoc form."""

    def outputs(x, p, at):
        settings = {"class_counts": x["counts"], **renamed(p, names)}
        found = with_mean("value", oracle(x["f"], x["y"], **settings))
        tau = {"tau": p["tau"]} if "tau" in p else {}
        return found | {"adjusted": softmax_family.logit_adjusted(x["f"], x["counts"], **tau)}

    return outputs


def prior_item(x, p, at):
    """A cosine margin beside a prior: the target's cosine is lowered, then the prior added."""
    settings = {"similarity": "cosine", "scale": p["s"]}
    logits = stats.similarity_logits(x["q"], x["W"], **settings)
    for row, y in zip(logits, x["y"], strict=True):
        row[y] -= p["s"] * p["m"]
    losses = softmax_family.logit_adjustment(logits, x["y"], class_counts=x["counts"])
    return with_mean("value", losses)


def distribution_item(x, p, at):
    losses = others.margin_distribution(x["gamma"], **p)
    return {"value": mean(losses), "per_sample": losses}


def network(x, p):
    if "A" not in x:
        logits, jacobian = input_margins.linear_network(x["x"], x["W"], x["b"])
        return logits, [jacobian]
    layers = (x["A"], x["a"], x["W"], x["b"])
    return input_margins.small_network(x["x"], *layers, p["activation"])


def input_margin_item(x, p, at):
    logits, jacobians = network(x, p)
    frozen = network(at, p)[1][0]
    odn = {name: p[name] for name in ("r", "theta", "mu") if name in p}

    def margins(frozen_jacobian):
        return input_margins.linearized_margins(
            logits, x["y"], jacobians[0], eps=p["eps"], frozen_jacobian=frozen_jacobian
        )

    gamma, runner_up = margins(frozen)
    return {
        "gamma": gamma,
        "runner_up": runner_up,
        "odn": mean(others.margin_distribution(gamma, **odn)),
        "odn_full_second_order": mean(others.margin_distribution(margins(None)[0], **odn)),
        "hinge": mean(others.margin_hinge(gamma, threshold=p.get("gamma0", 1.0))),
        "mean": gamma.mean(),
        "std": gamma.std(),
        "ratio": gamma.mean() / gamma.std(),
    }


def layer_margin_item(x, p, at):
    logits, jacobians = network(x, p)
    frozen = network(at, p)[1]
    layer = slice(p["layer"], p["layer"] + 1)
    settings = {
        "gamma": p["gamma"],
        "p": float(p["p"]),
        "aggregate": p["agg"],
        "topk": p["topk"],
        "eps": p["eps"],
    }

    def value(layers):
        return mean(input_margins.layer_margin(logits, x["y"], layers[layer], **settings))

    return {"value": value(frozen), "value_full_second_order": value(jacobians)}


ITEMS = {
    "BAS-ADACOS": adacos_item,
    "BAS-ADAFACE": adaface_item,
    "BAS-CURRICULAR": curricular_item,
    "BAS-DYNAMIC": dynamic_margin_item,
    "BAS-ELASTIC": elastic_item,
    "BAS-MAGFACE": cosine_item(
        cosine_family.magface,
        l_a="min_norm",
        u_a="max_norm",
        l_m="min_margin",
        u_m="max_margin",
        lam="strength",
        s="scale",
        mode="mode",
    ),
    "BAS-SUBCENTER": sub_center_item,
    "OPS-STATS": class_statistics,
    "OPT": option_case,
    "NGY-3.3": softmax_item,
    "NGY-4.3": discriminative_item,
    "NGY-4.4": compactness_item,
    "NGY-4.5": centroid_margin_item,
    "NGY-4.6": boundary_item,
    "NGY-4.7": lambda x, p, at: {"value": mean(centroid_family.centroid_norm(x["m"]))},
    "NGY-P4.3": momentum_margin_item,
    "NGR-12": noisy_item,
    "NGR-13": robust_item,
    "NGR-STAB": stability_item,
    "ZHO-NORMFACE": cosine_item(cosine_family.normface, s="scale"),
    "ZHO-COSFACE": cosine_item(cosine_family.cosface, s="scale", m="margin"),
    "ZHO-ARCFACE": arcface_item,
    "ZHO-ASOFTMAX": sphereface_item,
    "ZHO-UNI": cosine_item(cosine_family.unified_margin, s="scale", m1="m1", m2="m2", m3="m3"),
    "ZHO-GM": gm_item,
    "ZHO-LM": cosine_item(cosine_family.lm_softmax, s="scale"),
    "ZHO-RSM": cosine_item(cosine_family.sample_margin, normalize="normalize"),
    "ZHO-RW": zero_centroid_item,
    "KOB-1": max_based_item,
    "KOB-7": lambda x, p, at: with_mean("bias", softmax_family.implicit_bias(x["f"], x["y"])),
    "KOB-8": divergence_item,
    "KOB-11": logit_item(softmax_family.kobayashi, lam="strength"),
    "KOB-13": logit_item(softmax_family.label_smoothing, lam="smoothing"),
    "KOB-14": logit_item(softmax_family.dense_hinge, rho="margin"),
    "KOB-15": biased_item,
    "KOB-SS": symmetry_item,
    "ODN-1": distribution_item,
    "ODN-G": input_margin_item,
    "ODN-SOFT": logit_item(softmax_family.soft_hinge),
    "BAS-CENTER": center_item,
    "BAS-ELSAYED": layer_margin_item,
    "BAS-FOCAL": focal_item,
    "BAS-GCE": logit_item(softmax_family.generalized_cross_entropy, q="q"),
    "BAS-LDAM": ldam_item,
    "BAS-LOGITADJ": counted_item(softmax_family.logit_adjustment, tau="tau"),
    "BAS-LOGITNORM": logit_item(softmax_family.logit_norm, tau="temperature"),
    "BAS-PRIOR": prior_item,
    "BAS-SCE": logit_item(
        softmax_family.symmetric_cross_entropy, alpha="alpha", beta="beta", A="log_zero"
    ),
    "BAS-VS": counted_item(softmax_family.vs_loss, gamma="gamma", tau="tau"),
    "BAS-LGM": mixture_item,
    "BAS-LSOFTMAX": cosine_item(others.lsoftmax, m="margin", lam="annealing"),
}
