"""Random problems, and how any loss is called on them: by what it says it needs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

IGNORED = -100


class Sizes(NamedTuple):
    samples: int
    classes: int
    dim: int


@dataclass
class Problem:
    """Inputs of every kind, and the state a loss may hold (bank, centers, log-variances)."""

    features: torch.Tensor
    prototypes: torch.Tensor
    bias: torch.Tensor
    noisy: torch.Tensor
    labels: torch.Tensor
    soft: torch.Tensor
    bank: torch.Tensor
    seen: torch.Tensor
    log_variances: torch.Tensor

    @property
    def sizes(self):
        return Sizes(len(self.features), *self.prototypes.shape)

    def but(self, **changes):
        return replace(self, **changes)

    def to(self, dtype):
        """Inputs in ``dtype``; the state stays as it is."""
        names = ("features", "prototypes", "bias", "noisy", "soft")
        return self.but(**{name: getattr(self, name).detach().to(dtype) for name in names})

    def rows(self, index):
        """The problem restricted to some samples."""
        names = ("features", "noisy", "labels", "soft")
        return self.but(**{name: getattr(self, name)[index] for name in names})

    def arrays(self):
        """The same as NumPy arrays, for the oracles."""
        return SimpleNamespace(
            **{name: value.detach().numpy().copy() for name, value in vars(self).items()}
        )

    def leaves(self, loss):
        """Copy with gradients required, and the tensors that ``loss`` can send them to."""
        names = [name for name in ("features", "prototypes", "noisy") if name in loss.needs]
        if "logits" in loss.needs:
            names = ["features", "prototypes"]
        if loss.uses_bias or "logits" in loss.needs:
            names.append("bias")
        fresh = {name: getattr(self, name).detach().clone().requires_grad_() for name in names}
        return self.but(**fresh), fresh


def random_problem(sizes, *, dtype=torch.float64, seed=0):
    """Features near their prototypes in direction but not on them; one class has no history."""
    draw = torch.Generator().manual_seed(1000 + seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    samples, classes, dim = sizes
    labels = torch.randint(classes, (samples,), generator=draw)
    prototypes = normal(classes, dim)
    features = 0.6 * prototypes[labels] + normal(samples, dim)
    seen = torch.arange(classes) != classes - 1
    problem = Problem(
        features=features,
        prototypes=prototypes,
        bias=0.5 * normal(classes),
        noisy=features + 0.4 * normal(samples, dim),
        labels=labels,
        soft=torch.softmax(1.5 * normal(samples, classes), 1),
        bank=0.6 * prototypes + 0.3 * normal(classes, dim),
        seen=seen,
        log_variances=0.3 * normal(classes, dim),
    )
    return problem.to(dtype)


def arguments(loss, problem, labels=None):
    """What ``loss`` is called with. Logits are those of a small network, tanh and a linear head."""
    given = {
        "features": problem.features,
        "prototypes": problem.prototypes,
        "noisy": problem.noisy,
        "labels": problem.labels if labels is None else labels,
    }
    if "logits" in loss.needs:
        with torch.enable_grad():
            inputs = problem.features
            inputs = inputs if inputs.requires_grad else inputs.detach().requires_grad_()
            hidden = torch.tanh(inputs)
            given["logits"] = hidden @ problem.prototypes.T + problem.bias
        given |= {"inputs": inputs, "layers": [inputs, hidden]}
    return [given[name] for name in loss.needs]


def call(loss, problem, labels=None, **options):
    """The loss on the problem, with its bias where the loss has one."""
    if loss.uses_bias:
        options.setdefault("bias", problem.bias)
    if not loss.draws:
        return loss(*arguments(loss, problem, labels), **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # every call draws the same, and leaves the generator as it was
        return loss(*arguments(loss, problem, labels), **options)


def restore(loss, problem):
    """Put the problem's state into the loss: bank, centers, log-variances."""
    state = {
        "centroids": problem.bank,
        "seen": problem.seen,
        "centers": problem.bank,
        "log_variances": problem.log_variances,
    }
    with torch.no_grad():
        for name, tensor in [*loss.named_buffers(), *loss.named_parameters()]:
            if name.rpartition(".")[2] in state:
                tensor.copy_(state[name.rpartition(".")[2]])
    return loss


def value_and_gradients(loss, problem, labels=None, **options):
    """The value, detached, and its gradients by input name (None where it does not depend)."""
    problem, leaves = problem.leaves(loss)
    value = call(loss, problem, labels, **options)
    names = list(leaves)
    gradients = torch.autograd.grad(
        value.sum(), [leaves[name] for name in names], allow_unused=True
    )
    return value.detach(), dict(zip(names, gradients, strict=True))


def assert_close(got, want, tolerance, what=""):
    got, want = (
        got.detach(),
        want.detach() if isinstance(want, torch.Tensor) else torch.as_tensor(np.asarray(want)),
    )
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    error = (got.double() - want.double()).abs() / (1 + want.double().abs())
    assert bool((error <= tolerance).all()), (
        f"{what}: off by {error.max():.3g}\n{got}\ninstead of\n{want}"
    )


def assert_finite(value, gradients, what=""):
    assert bool(torch.isfinite(value).all()), f"{what}: value {value}"
    for name, gradient in gradients.items():
        if gradient is not None:
            assert bool(torch.isfinite(gradient).all()), f"{what}: gradient of {name}\n{gradient}"


def targets_of(loss, problem):
    """Hard labels, and soft targets (one-hot ones among them) where the loss takes them."""
    yield problem.labels
    if "soft_targets" not in loss.refuses:
        yield problem.soft
        yield F.one_hot(problem.labels, problem.sizes.classes).to(problem.soft)
