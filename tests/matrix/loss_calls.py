"""Every loss of ``LOSSES`` built and called in one way, on one small problem."""

from typing import Any

import torch
from torch import Tensor, nn

from largemargin import LOSSES, CrossEntropy, Discriminative, Loss, Objective

CLASSES, DIM, SAMPLES = 5, 4, 12

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "adacos": (CLASSES,),
    "center": (CLASSES, DIM),
    "discriminative": (CLASSES, DIM),
    "gaussian_mixture": (CLASSES, DIM),
    "ldam": ([50, 20, 10, 5, 2],),
    "logit_adjustment": ([50, 20, 10, 5, 2],),
    "robust_discriminative": (CLASSES, DIM),
    "stable_discriminative": (CLASSES, DIM),
    "vs_loss": ([50, 20, 10, 5, 2],),
}
# The defaults of SphereFace and L-Softmax are fine too; a small scale keeps float32 comparisons
# away from saturated exponentials, where every implementation agrees for free.
_OPTIONS: dict[str, dict[str, Any]] = {
    name: {"scale": 8.0}
    for name in (
        *("arcface", "cosface", "curricularface", "gm_softmax", "ldam", "lm_softmax"),
        "normface",
    )
} | {
    "adaface": {"scale": 8.0, "norm_mean": 2.0, "norm_std": 0.5, "rate": 0.2},
    # Compiled code draws other numbers than eager code: here they make no difference.
    "elasticface": {"scale": 8.0, "std": 0.0},
    "gaussian_mixture": {"learn_variances": True},
    "logit_norm": {"temperature": 0.5},
    "magface": {"scale": 8.0, "min_norm": 1.0, "max_norm": 4.0},
    "unified_margin": {"m1": 1.2, "m2": 0.2, "m3": 0.1, "scale": 8.0},
}


def build(name: str, **options: Any) -> Loss:
    """The loss called ``name`` for the small problem, in training mode."""
    return LOSSES[name](*_ARGUMENTS.get(name, ()), **{**_OPTIONS.get(name, {}), **options})


def problem(
    seed: int = 0,
    *,
    samples: int = SAMPLES,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Leaves with gradient, and labels; the same numbers on every device and in every dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return numbers.to(device, dtype).requires_grad_()

    return {
        "features": normal(samples, DIM),
        "prototypes": normal(CLASSES, DIM),
        "noisy": normal(samples, DIM),
        "bias": normal(CLASSES),
        "labels": torch.randint(CLASSES, (samples,), generator=generator).to(device),
    }


def arguments(loss: Loss, given: dict[str, Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
    """What ``loss`` takes of a problem: positional arguments by its ``needs``, and the bias."""
    available: dict[str, Any] = dict(given)
    if "logits" in loss.needs:
        # A small network whose input and hidden layer the loss differentiates by.
        hidden = torch.tanh(given["features"])
        available |= {
            "inputs": given["features"],
            "layers": [given["features"], hidden],
            "logits": hidden @ given["prototypes"].T,
        }
    options = {"bias": given["bias"]} if loss.uses_bias else {}
    return [available[name] for name in loss.needs], options


def leaves(loss: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything a gradient may reach."""
    return {k: v for k, v in given.items() if v.requires_grad} | dict(loss.named_parameters())


def value_and_gradients(
    loss: Loss, given: dict[str, Tensor], function: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The value of ``function`` (the loss itself by default) and its gradient at every leaf."""
    positional, options = arguments(loss, given)
    value = (loss if function is None else function)(*positional, **options)
    reached = leaves(loss, given)
    found = torch.autograd.grad(value, list(reached.values()), allow_unused=True)
    return value.detach(), {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(reached.items(), found, strict=True)
    }


class Trainer(nn.Module):
    """Cross entropy + the discriminative loss over a linear body; one whole step's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 10)
        self.objective = Objective(
            softmax=CrossEntropy(), lmd=Discriminative(10, 8, margin=2.0, momentum=0.9)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = self.objective(self.body(x), self.head, labels).total
        return total
