"""The protocols of the other two papers, and which function speaks of which recipe."""

from collections.abc import Callable
from typing import Any

from papers.recipes import protocols as those
from papers.recipes.protocols import SOFTMAX, Expected, Key, Terms, sgd, steps

KOBAYASHI = sgd(0.1, 0.9, False, 1e-4, schedule="log_linear", final_lr=1e-4, by="epoch") | {
    "data.name": "cifar100",
    "data.augment": "crop_flip",
    "model.name": "cnn13",
    "epochs": 50,
    "batch_size": 128,
}


def ours(strength: float) -> Terms:
    return {"kobayashi": (1.0, {"strength": strength, "similarity": None})}


def kobayashi_table1(key: Key) -> Expected:
    kind = {"D(u||q)": "uniform_to_rivals", "D(q||u)": "rivals_to_uniform"}.get(
        key["regularizer"], "symmetric"
    )
    terms = SOFTMAX | {"rival_divergence": (float(key["lambda"]), {"kind": kind})}
    return Expected(KOBAYASHI, terms, 3)


def kobayashi_table2(key: Key) -> Expected:
    if key["method"] == "Super-symmetry":
        return Expected(KOBAYASHI | {"model.head": "simplex"}, SOFTMAX, 3)
    if key["method"] == "LSR":
        smoothing = {"smoothing": float(key["lambda"])}
        return Expected(KOBAYASHI, {"label_smoothing": (1.0, smoothing)}, 3)
    return Expected(KOBAYASHI, ours(0.3) if key["method"] == "Ours" else SOFTMAX, 3)


def kobayashi_table3(key: Key) -> Expected:
    level = float(key["level"])
    changed = {"data.fraction": level} if key["part"] == "a" else {"data.label_noise": level}
    terms = ours(float(key["lambda"])) if key["method"] == "Ours" else SOFTMAX
    return Expected(KOBAYASHI | changed, terms, 3)


def wide_resnet(data: str, augment: str, dropout: float, **optimizer: Any) -> dict[str, Any]:
    lr = optimizer.pop("lr")
    return sgd(lr, 0.9, True, 5e-4, **optimizer) | {
        "data.name": data,
        "data.augment": augment,
        "model.name": "wrn28_10",
        "model.dropout": dropout,
        "batch_size": 128,
    }


def large(network: str, lr: float = 0.1, decay: float = 1e-4) -> dict[str, Any]:
    return sgd(lr, 0.9, False, decay, **steps(30, 60, factor=0.1)) | {
        "data.name": "folder",
        "data.size": 224,
        "data.augment": "resized_crop",
        "model.name": network,
        "epochs": 90,
        "batch_size": 256,
    }


LARGE = {
    "VGG-16": large("vgg16", 0.01, 5e-4) | {"model.dropout": 0.5, "model.batch_norm": False},
    "VGG-16-mod": large("vgg16_mod") | {"model.batch_norm": True},
    "MobileNet": large("mobilenet"),
    "ResNeXt-50": large("torchvision/resnext50_32x4d"),
}
WIDE = {
    "Cifar10": wide_resnet("cifar10", "crop_flip", 0.0, lr=0.1, **steps(60, 120, 160, factor=0.2))
    | {"epochs": 200},
    "SVHN": wide_resnet("svhn", "none", 0.4, lr=0.01, **steps(80, 120, factor=0.1))
    | {"epochs": 160},
}


def kobayashi_table4(key: Key) -> Expected:
    wide = key["dataset"] in WIDE
    settings = WIDE[key["dataset"]] if wide else LARGE[key["network"]]
    biased = {"margin": 1.0, "similarity": None}
    gaussian = {
        "alpha": 0.3 if wide else 0.01,
        "likelihood_weight": 0.1,
        "learn_variances": False,
    }
    terms: Terms = {
        "Softmax loss": SOFTMAX,
        "Hinge loss (14)": {"dense_hinge": (1.0, {"margin": 1.0, "similarity": None})},
        "Modified loss (15)": {"biased_softmax": (1.0, biased | {"strength": 0.0})},
        "LGM": {"gaussian_mixture": (1.0, gaussian)},
        "LSM": {"lsoftmax": (1.0, {"margin": 4})},
        "Ours (lambda=0.3)": ours(0.3),
        "Modified loss (15) + Ours (lambda=0.3)": {
            "biased_softmax": (1.0, biased | {"strength": 0.3})
        },
    }[key["method"]]
    moving = {"objective.schedule": "preset"} if key["method"] in ("LGM", "LSM") else {}
    return Expected(settings | moving, terms, 3 if wide else 1)


ODN = sgd(0.01, 0.9, False, 0.0, schedule="constant") | {"data.augment": "none", "batch_size": 64}
MNIST = ODN | {
    "data.name": "mnist",
    "data.validation": 5000 / 60000,
    "model.name": "mnist_cnn",
    "model.dropout": 0.0,
    "model.batch_norm": False,
    "epochs": 50,
}
CIFAR = ODN | {
    "data.name": "cifar10",
    "data.validation": 5000 / 50000,
    "model.name": "alexnet",
    "model.dropout": 0.5,
    "model.batch_norm": False,
    "epochs": 100,
}
INPUT = {"eps": 1e-6, "differentiable_norm": False}


def odn_terms(loss: str, r: float = 1.2) -> Terms:
    distribution = INPUT | {"r": r, "theta": 0.7, "mu": 0.1, "squared": False}
    return {
        "Xent": SOFTMAX,
        "Hinge": {"margin_hinge": (1.0, INPUT | {"threshold": 1.0})},
        "Soft Hinge": {"soft_hinge": (1.0, {"similarity": None})},
        "ODN": {"margin_distribution": (1.0, distribution)},
    }[loss]


def odn_table1(key: Key) -> Expected:
    norm = key["batch_norm"] == "1"
    changed = {
        "data.fraction": int(key["train_percent"]) / 100,
        "model.dropout": 0.5 if key["dropout"] == "1" else 0.0,
        "model.batch_norm": norm,
    }
    return Expected(CIFAR | changed, odn_terms(key["loss"], 30.0 if norm else 1.2), 3)


def odn_band(key: Key) -> Expected:
    changed = {
        "data.fraction": 0.05,
        "model.batch_norm": key["batch_norm"] == "1",
        "optimizer.lr": float(key["lr"]),
    }
    terms = SOFTMAX
    if key["loss"] == "ODN":
        r = round(2.4 * float(key["reach"]), 3)  # theta / r stays 7 / 12, so reach = r - theta
        numbers = INPUT | {"r": r, "theta": round(r * 7 / 12, 3), "mu": 0.1, "squared": False}
        terms = {"margin_distribution": (1.0, numbers)}
    return Expected(CIFAR | changed, terms)


def odn_table2(key: Key) -> Expected:
    return Expected(MNIST | {"data.fraction": 0.01}, odn_terms(key["loss"]))


def odn_table3(key: Key) -> Expected:
    return Expected(CIFAR | {"data.fraction": 0.01}, odn_terms(key["loss"]))


def odn_text(key: Key) -> Expected:
    fraction = {"odn_gain_at_0.125_percent": 0.00125, "odn_gain_at_0.5_percent": 0.005}
    changed = {"data.fraction": fraction.get(key["quantity"], 1.0)}
    base = MNIST if key["dataset"] == "MNIST" else CIFAR
    return Expected(base | changed, odn_terms(key["loss"]))


def whole(protocol: Callable[[Key], Expected]) -> Callable[[Key], Expected]:
    """The same with all training images."""
    return lambda key: protocol({**key, "train_percent": "100"})


RECIPES: dict[str, tuple[Callable[[Key], Expected], int, int]] = {
    "lmd/table1": (those.lmd_table1, 90, 90),
    "lmd/table2": (those.lmd_table2, 30, 30),
    "lmd/table3": (those.lmd_table3, 20, 20),
    "lmd/table4": (those.lmd_table4, 10, 11),
    "lmd/figure1": (those.lmd_figure1, 30, 30),
    "lmd/figures4and6": (whole(those.lmd_table3), 4, 20),
    "robust/table1": (those.robust_small("cifar10", 0.06), 5, 30),
    "robust/figures8to10": (those.robust_small("cifar10", 0.06), 5, 80),
    "robust/figures1and12and13": (those.robust_small("cifar10", 0.06), 5, 50),
    "robust/table2": (those.robust_small("svhn", 0.15), 5, 30),
    "robust/table3": (those.robust_road, 5, 25),
    "robust/table4": (those.robust_road, 5, 30),
    "robust/table5": (those.robust_table5, 10, 10),
    "ltlm/table1": (those.ltlm_table1, 56, 60),
    "ltlm/table2": (those.ltlm_table2, 72, 72),
    "ltlm/table3": (those.ltlm_table3, 26, 26),
    "ltlm/figure_tammes": (those.ltlm_tammes, 5, 5),
    "ltlm/figure_free": (those.ltlm_tammes, 5, 5),
    "kobayashi/table1": (kobayashi_table1, 27, 27),
    "kobayashi/table2": (kobayashi_table2, 7, 7),
    "kobayashi/table3": (kobayashi_table3, 40, 40),
    "kobayashi/table4": (kobayashi_table4, 34, 36),
    "odn/table1": (odn_table1, 16, 16),
    "odn/band": (odn_band, 24, 24),
    "odn/table2": (odn_table2, 4, 8),
    "odn/table3": (odn_table3, 4, 8),
    "odn/text": (odn_text, 20, 18),
}
"""By recipe: the protocol of a cell, the number of cells, the number of rows of the claims."""
UNPRINTED = {
    "lmd/figure1",
    "lmd/figures4and6",
    "robust/figures8to10",
    "robust/figures1and12and13",
    "odn/band",
}
"""Figures that print no numbers, and questions of our own."""
