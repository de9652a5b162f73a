"""The papers' protocols, typed from the papers and their specification, not from the recipes.

Every function takes the key of a cell and gives all its settings and all hyper-parameters of its
loss. What is not mentioned has the value of ``PLAIN``.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Key = Mapping[str, str]
Terms = dict[str, tuple[float, dict[str, Any]]]


class Expected(NamedTuple):
    settings: dict[str, Any]
    terms: Terms
    runs: int = 1


PLAIN = {
    "data.validation": 0.0,
    "data.fraction": 1.0,
    "data.label_noise": 0.0,
    "data.imbalance": "none",
    "data.size": None,
    "data.width": None,
    "data.classes": None,
    "data.normalize": "auto",
    "model.feature_dim": None,
    "model.feature_activation": "relu",
    "model.head": "linear",
    "model.dropout": None,
    "model.batch_norm": None,
    "model.weights": None,
    "model.options": {},
    "objective.schedule": "none",
    "objective.layers": (),
    "noise.use": "none",
    "noise.kind": "gaussian",
    "noise.clip": False,
    "optimizer.warmup_epochs": 0.0,
    "ema": None,
    "patience": None,
    "precision": "fp32",
    "select": "accuracy",
}

SOFTMAX: Terms = {"softmax": (1.0, {"similarity": None, "label_smoothing": 0.0})}

LMD_PARTS = {
    "alpha": 1.0,
    "beta": 1.0,
    "gamma_reg": 1e-3,
    "radius": 0.5,
    "compact_power": 2,
    "margin_power": 1,
    "aggregate": "max",
    "strategy": "partial",
    "first_seen": "scaled",
    "detach_classifier": False,
}


def sgd(lr: float, momentum: float, nesterov: bool, decay: float, **rest: Any) -> dict[str, Any]:
    optimizer = {"name": "sgd", "lr": lr, "momentum": momentum, "nesterov": nesterov}
    optimizer |= {"weight_decay": decay, "clip_norm": None, **rest}
    return {f"optimizer.{name}": value for name, value in optimizer.items()}


def steps(*milestones: int, factor: float) -> dict[str, Any]:
    return {"schedule": "steps", "milestones": milestones, "factor": factor, "by": "epoch"}


NGUYEN = sgd(1e-3, 0.9, True, 5e-4, **steps(60, 120, 160, factor=1 / 5)) | {
    "data.augment": "crop_flip",
    "model.name": "resnet18",
    "model.options": {"initial": "torch"},
    "epochs": 200,
}
SETS = {"CIFAR10": "cifar10", "SVHN": "svhn"}


def with_discriminative(**changes: Any) -> Terms:
    return SOFTMAX | {"discriminative": (1.0, LMD_PARTS | {"momentum": 0.99} | changes)}


def lmd(key: Key) -> dict[str, Any]:
    return NGUYEN | {
        "model.feature_dim": 30,
        "batch_size": 128,
        "data.name": SETS[key["dataset"]],
        "data.fraction": int(key["train_percent"]) / 100,
    }


def lmd_table1(key: Key) -> Expected:
    return Expected(lmd(key), with_discriminative(margin=float(key["delta_d"])))


def lmd_table2(key: Key) -> Expected:
    strategy = key["strategy"].removesuffix(" momentum").replace("no", "none")
    return Expected(lmd(key), with_discriminative(margin=6.0, strategy=strategy))


def lmd_table3(key: Key) -> Expected:
    ours = key["method"] == "ours"
    return Expected(lmd(key), with_discriminative(margin=6.0) if ours else SOFTMAX)


def lmd_figure1(key: Key) -> Expected:
    alpha, beta = {"margin": (0, 1), "compactness": (1, 0), "both": (1, 1)}[key["terms"]]
    return Expected(lmd(key), with_discriminative(margin=1.5, alpha=alpha, beta=beta))


def lmd_table4(key: Key) -> Expected:
    networks = {"MobileNetV3": "mobilenet_v3_large", "EfficientNet-b0": "efficientnet_b0"}
    settings = {
        "data.name": "rscd",
        "data.augment": "perspective_flip",
        "data.size": 224,
        "model.name": f"torchvision/{networks[key['model']]}",
        "model.weights": "IMAGENET1K_V1",
        "optimizer.name": "adam",
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": None,
        "optimizer.schedule": "constant",
        "epochs": 20,
        "batch_size": 128,
    }
    if key["loss"] == "softmax":
        return Expected(settings, SOFTMAX)
    momentum = float(key["momentum"])
    strategy = "partial" if momentum else "none"
    return Expected(settings, with_discriminative(margin=6.0, momentum=momentum, strategy=strategy))


def robust_method(name: str, margin: float) -> tuple[str, Terms]:
    """What noise is used for, and the loss, by a word of the method's name."""
    name = name.lower()
    if "ours" in name:
        more = {"noise_weight": 1.0, "softmax_weight": 1.0, "margin": margin, "momentum": 0.9}
        return "pair", {"robust_discriminative": (1.0, LMD_PARTS | more)}
    if "stability" in name:
        return "pair", SOFTMAX | {"stability": (1.0, {"strength": 1.0, "squared": False})}
    if "normal" in name:
        return "none", SOFTMAX
    return ("clean_and_noisy" if " and " in name else "noisy"), SOFTMAX


def robust_small(data: str, level: float) -> Callable[[Key], Expected]:
    def expected(key: Key) -> Expected:
        use, terms = robust_method(key["method"], 5.0)
        settings = NGUYEN | {
            "model.feature_dim": 128,
            "batch_size": 64,
            "data.name": data,
            "noise.use": use,
            "noise.level": level,
        }
        return Expected(settings, terms)

    return expected


def robust_road(key: Key) -> Expected:
    use, terms = robust_method(key["method"], 3.0)
    settings = {
        "data.name": "folder",
        "data.size": 400,
        "data.width": 500,
        "data.validation": 0.2,
        "data.augment": "road",
        "model.name": "torchvision/mobilenet_v3_large",
        "model.weights": "IMAGENET1K_V1",
        "noise.use": use,
        "noise.level": 40 / 255,
        "optimizer.name": "adam",
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": None,
        "optimizer.schedule": "steps",
        "optimizer.milestones": (50,),
        "optimizer.factor": 0.1,
        "optimizer.by": "epoch",
        "epochs": 70,
        "batch_size": 32,
    }
    return Expected(settings, terms)


def robust_table5(key: Key) -> Expected:
    settings = NGUYEN | {
        "model.feature_dim": 128,
        "batch_size": 64,
        "data.name": SETS[key["dataset"]],
    }
    parts = {name: float(key[name]) for name in ("alpha", "beta", "gamma_reg")}
    return Expected(settings, with_discriminative(margin=5.0, momentum=0.9, **parts))


ZHOU = sgd(0.1, 0.9, False, 1e-4, schedule="cosine", final_lr=0.0, by="epoch") | {
    "optimizer.clip_norm": 5.0,
    "batch_size": 256,
}


def ltlm_terms(method: str, scale: float, zero_centroid: bool = False) -> Terms:
    name = method.split(" ")[0]
    terms = {
        "CE": SOFTMAX,
        "Focal": {"focal": (1.0, {"gamma": 1.0, "alpha": None})},
        "CosFace": {"cosface": (1.0, {"margin": 0.1, "scale": scale})},
        "ArcFace": {
            "arcface": (1.0, {"margin": 0.1, "scale": scale, "mode": "hard", "gradient": "exact"})
        },
        "NormFace": {"normface": (1.0, {"scale": scale})},
        "LDAM": {"ldam": (1.0, {"max_margin": 0.5, "scale": 30.0})},
        "LM-Softmax": {"lm_softmax": (1.0, {"scale": scale})},
    }[name]
    if method.endswith("0.5 R_sm"):
        terms = terms | {"sample_margin": (0.5, {"normalize": True})}
    if zero_centroid:
        terms = terms | {"zero_centroid": (1.0, {"strength": 1.0, "normalize": True})}
    return terms


def scale_in(method: str) -> float:
    return float(method.partition("s=")[2].partition(")")[0] or 1)


def ltlm_table1(key: Key) -> Expected:
    data, augment, network, epochs = {
        "MNIST": ("mnist", "none", "mnist_cnn", 100),
        "CIFAR-10": ("cifar10", "crop_flip", "resnet18", 200),
        "CIFAR-100": ("cifar100", "crop_flip", "resnet34", 200),
    }[key["dataset"]]
    settings = ZHOU | {
        "data.name": data,
        "data.augment": augment,
        "model.name": network,
        "epochs": epochs,
    }
    return Expected(settings, ltlm_terms(key["method"], scale_in(key["method"])))


def ltlm_table2(key: Key) -> Expected:
    data, network = {"CIFAR-10": ("cifar10", "resnet18"), "CIFAR-100": ("cifar100", "resnet34")}[
        key["dataset"]
    ]
    settings = ZHOU | {
        "data.name": data,
        "data.augment": "crop_flip",
        "data.imbalance": {"long-tailed": "exp", "step": "step"}[key["imbalance"]],
        "data.imbalance_ratio": float(key["ratio"]),
        "model.name": network,
        "epochs": 200,
    }
    return Expected(settings, ltlm_terms(key["method"], 10.0, key["zero_centroid"] == "1"))


def ltlm_table3(key: Key) -> Expected:
    settings = ZHOU | {
        "data.name": {"Market-1501": "market1501", "DukeMTMC": "dukemtmc"}[key["dataset"]],
        "data.augment": "crop_flip",
        "model.name": "torchvision/resnet50",
        "model.weights": "IMAGENET1K_V1",
        "epochs": 120,
    }
    return Expected(settings, ltlm_terms(key["method"], scale_in(key["method"])))


def ltlm_tammes(key: Key) -> Expected:
    settings = ZHOU | {
        "data.name": "mnist",
        "data.augment": "none",
        "data.classes": tuple("01234567"),
        "model.name": "mnist_cnn",
        "model.feature_dim": 3,
        "epochs": 100,
    }
    return Expected(settings, ltlm_terms(key["method"], 64.0))
