"""Items on the small networks of the vectors: input margins, curvature, the scaling transform."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

from .case import CannotRun, Case, Item, Outputs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "elu": F.elu,
    "linear": nn.Identity(),
    "identity": nn.Identity(),
}
DISTRIBUTION = {name: name for name in ("r", "theta", "mu")}
LAYERS = {name: name for name in ("gamma", "p", "topk", "eps")} | {"agg": "aggregate"}


class Network(nn.Module):
    """hidden = act(A x + a), logits = W hidden + b; without A the inputs are the hidden layer."""

    def __init__(
        self,
        first: tuple[Tensor | None, Tensor | None],
        head: tuple[Tensor, Tensor | None],
        activation: str | None,
    ) -> None:
        super().__init__()
        if first[0] is not None and activation not in ACTIVATIONS:
            raise CannotRun(f"unknown activation {activation!r}")
        self.activation = activation
        for name, tensor in zip("AaWb", (*first, *head), strict=True):
            self.register_buffer(name, tensor)

    def hidden(self, inputs: Tensor) -> Tensor:
        if self.A is None:
            return inputs
        return ACTIVATIONS[self.activation](F.linear(inputs, self.A, self.a))

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.W, self.b)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.hidden(inputs))


def network(case: Case, weight: str = "A", shift: str = "a") -> Network:
    first = case.get(weight), case.get(shift)
    return Network(first, (case.need("W"), case.get("b")), case.param("activation"))


def input_margins(case: Case, way: str) -> Outputs:
    net, inputs, labels = network(case), case.need("x"), case.need("y")
    eps = {"eps": 1e-6, **case.options({"eps": "eps"})}
    hyper = case.options(DISTRIBUTION)
    threshold = case.options({"gamma0": "threshold"})

    def margins() -> Any:
        return LF.linearized_margins(net(inputs), labels, inputs, **eps)

    def loss(module: type[lm.Loss], **options: Any) -> Tensor:
        return module(ignore_index=None, **eps, **options)(net(inputs), labels, inputs)

    def ratio(field: str) -> Tensor:
        return getattr(geometry.margin_ratio(margins().margins), field)

    return {
        "gamma": lambda: margins().margins,
        "runner_up": lambda: margins().rival_index,
        "odn": lambda: loss(lm.MarginDistribution, **hyper),
        "odn_full_second_order": lambda: loss(
            lm.MarginDistribution, differentiable_norm=True, **hyper
        ),
        "hinge": lambda: loss(lm.MarginHinge, **threshold),
        **{field: lambda field=field: ratio(field) for field in ("mean", "std", "ratio")},
    }


def layer_margin(case: Case, way: str) -> Outputs:
    net, inputs, labels = network(case), case.need("x"), case.need("y")
    chosen, hyper = case.param("layer", 0), {"eps": 1e-6, **case.options(LAYERS)}
    chosen = chosen if isinstance(chosen, list) else [chosen]

    def value(**options: Any) -> Tensor:
        hidden = net.hidden(inputs)
        layers = [(inputs, hidden)[index] for index in chosen]
        loss = lm.LayerMargin(ignore_index=None, **hyper, **options)
        return loss(net.head(hidden), labels, layers)

    return {
        "value": value,
        "value_full_second_order": lambda: value(differentiable_norm=True),
    }


def one_sample(case: Case) -> tuple[Tensor, Tensor]:
    """The input and its class as a batch of one."""
    if not case.has("y"):
        raise CannotRun("param 'y' is missing")
    return case.need("x")[None], torch.tensor([case.param("y")])


def input_curvature(case: Case, way: str) -> Outputs:
    net, directions = network(case), case.need("eps").detach()
    inputs, labels = one_sample(case)
    step = case.options({"t": "step"})

    @cache
    def exact() -> geometry.ExactCurvature:
        return geometry.exact_curvature(net, inputs, labels, num_directions=len(directions))

    def gradient() -> geometry.InputGradient:
        return geometry.input_gradient(net, inputs, labels)

    return {
        "estimate": lambda: geometry.curvature(net, inputs, labels, directions=directions, **step)[
            0
        ],
        "limit_estimate": lambda: geometry.curvature_limit(
            net, inputs, labels, directions=directions
        )[0],
        "grad": lambda: gradient().gradient[0],
        "loss": lambda: gradient().loss[0],
        "eigenvalues": lambda: exact().eigenvalues[0],
        "exact_sum_sq": lambda: exact().sum_of_squares[0],
        "exact_sum_abs": lambda: exact().sum_of_absolutes[0],
        "estimator_variance": lambda: exact().estimator_variance[0],
    }


def curvature_bounds(case: Case, way: str) -> Outputs:
    net, noise = network(case), case.need("eps").detach()
    inputs, labels = one_sample(case)
    hyper = case.options({"sigma": "sigma", "delta": "radius", "k_max": "logit_bound"})

    @cache
    def bounds() -> geometry.CurvatureBounds:
        return geometry.curvature_bounds(
            net.hidden, net.W, inputs, labels, bias=net.b, noise=noise, **hyper
        )

    per_sample = ("eta", "l_out", "loss", "grad_sq", "upper", "lower", "lhs_upper", "lhs_lower")
    return {
        "w_2inf": lambda: bounds().w_2inf,
        **{name: lambda name=name: getattr(bounds(), name)[0] for name in per_sample},
    }


def scaling(case: Case, way: str) -> Outputs:
    before = network(case, "Wm", "bm")
    inputs, labels, num_classes = case.need("x"), case.need("y"), len(before.W)
    factor = case.options({"alpha": "factor"})
    rescaled = geometry.rescale_network(before.A, before.a, before.b, **factor)
    after = Network(
        (rescaled.weight, rescaled.bias), (before.W, rescaled.head_bias), before.activation
    )

    def dispersion(net: Network) -> Tensor:
        return geometry.largest_dispersion(net.hidden(inputs), labels, num_classes)

    def margin(net: Network) -> Tensor:
        features = net.hidden(inputs)
        return geometry.boundary_margins(features, net.W, labels, bias=net.b).smallest

    def softmax(net: Network) -> Tensor:
        return lm.CrossEntropy()(net.hidden(inputs), net.W, labels, bias=net.b)

    def prediction(net: Network) -> Tensor:
        logits = LF.similarity_logits(net.hidden(inputs), net.W, bias=net.b)
        return logits.argmax(1)

    measures = {"dispersion": dispersion, "margin": margin, "softmax_loss": softmax}
    return {
        "pred": lambda: prediction(after),
        **{f"{name}_before": lambda m=m: m(before) for name, m in measures.items()},
        **{f"{name}_after": lambda m=m: m(after) for name, m in measures.items()},
    }


ITEMS = {
    "ODN-G": Item(input_margins),
    "BAS-ELSAYED": Item(layer_margin),
    "NGR-21": Item(input_curvature),
    "NGR-T6.1": Item(curvature_bounds),
    "NGY-P4.4": Item(scaling),
}
