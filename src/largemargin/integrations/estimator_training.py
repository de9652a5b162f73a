"""What the scikit-learn estimator trains, and how: network, samples, optimizer, epochs."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError, MissingPackage, check_choice, check_number

PREDICTED = 1024
"""Samples that go through the network at a time when nothing is trained."""


class Standardize(nn.Module):
    """(x - mean) / scale of each feature, or of each channel of images."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.scale


class EstimatorNetwork(nn.Module):
    """``head(backbone(standardize(x)))``; the head is a linear layer, or what replaced it.

    A criterion is attached to ``classifier``, so that losses on inputs see standardised ones: their
    distances are in standard deviations, whatever the units of x.
    """

    def __init__(self, standardize: nn.Module, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.standardize = standardize
        self.classifier = nn.Sequential(OrderedDict(backbone=backbone, head=head))

    def features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.classifier[0](self.standardize(inputs))
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.standardize(inputs))
        return logits


def build_network(
    backbone: nn.Module | Callable[[tuple[int, ...]], nn.Module] | None,
    inputs: Tensor,
    weights: Tensor | None,
    num_classes: int,
    *,
    hidden_sizes: Sequence[int],
    standardize: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> EstimatorNetwork:
    """A network for ``inputs`` (N, D) or (N, C, H, W); a given module is copied, not used up."""
    shape = tuple(inputs.shape[1:])
    made: Any = backbone
    if backbone is None:
        made = convolutions(shape) if len(shape) == 3 else perceptron(shape, hidden_sizes)
    elif isinstance(backbone, nn.Module):
        made = deepcopy(backbone)
    elif callable(backbone) and not isinstance(backbone, type):
        made = backbone(shape)
    if not isinstance(made, nn.Module):
        raise LargeMarginError(
            "backbone must be None, an nn.Module, or a function of the input shape that returns "
            f"one, but {made!r} was given. It maps {('N', *shape)} to features (N, dim)."
        )
    first: nn.Module = nn.Identity()
    if standardize:
        mean, scale = statistics(inputs, weights, per_channel=len(shape) == 3)
        first = Standardize(mean.to(dtype), scale.to(dtype))
    made = made.to(device=device, dtype=dtype)
    first = first.to(device)
    head = nn.Linear(_width(first, made, inputs[:2].to(device, dtype)), num_classes)
    return EstimatorNetwork(first, made, head.to(device=device, dtype=dtype))


def _width(first: nn.Module, backbone: nn.Module, sample: Tensor) -> int:
    """How many features the backbone gives: one small batch tells, and wakes lazy layers."""
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        features: Any = backbone(first(sample))
    backbone.train(training)
    if not isinstance(features, Tensor) or features.dim() != 2:
        given = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise LargeMarginError(
            f"backbone must turn inputs {tuple(sample.shape)} into features (N, dim), but it "
            f"returned {given}. End it with pooling and nn.Flatten(), and without a "
            "classification layer: the head is put on top."
        )
    return int(features.shape[1])


def perceptron(shape: tuple[int, ...], hidden_sizes: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between them, none after the last: features point everywhere."""
    sizes = (prod(shape), *hidden_sizes)
    for size in hidden_sizes:
        check_number("each of hidden_sizes", size, at_least=1)
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    for index, (before, after) in enumerate(pairwise(sizes)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)


def convolutions(shape: tuple[int, ...]) -> nn.Module:
    """Three convolutions with batch normalisation, pooled to 2 x 2, and a linear layer."""
    channels, height, side = shape
    pools = [nn.MaxPool2d(2) if min(height, side) >= least else nn.Identity() for least in (16, 8)]
    return nn.Sequential(
        *_convolution(channels, 32),
        pools[0],
        *_convolution(32, 64),
        pools[1],
        *_convolution(64, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 64, 64),
    )


def _convolution(before: int, after: int) -> tuple[nn.Module, ...]:
    # The bias of a convolution is removed again by the batch mean that follows it.
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return layer, nn.BatchNorm2d(after), nn.ReLU()


CHUNK = 4096
"""Rows converted at a time when statistics are taken of the whole training set."""


def statistics(inputs: Tensor, weights: Tensor | None, per_channel: bool) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over samples, in float64; a constant gets 1.

    (N, ...) gives (...), or (C, 1, 1) for images (N, C, H, W) with ``per_channel``.
    """
    share = torch.ones(len(inputs)).double() if weights is None else weights.double()
    share = share / share.sum()
    axes = (0, *range(2, inputs.dim())) if per_channel else (0,)
    places = prod(inputs.shape[2:]) if per_channel else 1

    def average(of: Callable[[Tensor], Tensor]) -> Tensor:
        summed: Tensor | float = 0.0
        for start in range(0, len(inputs), CHUNK):
            rows, part = inputs[start : start + CHUNK], share[start : start + CHUNK]
            weight = part.reshape(-1, *[1] * (inputs.dim() - 1))
            summed = summed + (of(rows.double()) * weight).sum(axes, keepdim=True)[0] / places
        assert isinstance(summed, Tensor)
        return summed

    mean = average(lambda rows: rows)
    spread = average(lambda rows: (rows - mean).square()).sqrt()
    # A spread of rounding noise is a constant feature: dividing by it would blow the noise up.
    constant = spread <= 1e-12 * mean.abs().clamp_min(1e-300)
    return mean, torch.where(constant, 1.0, spread)


@dataclass
class TensorSamples:
    """A data set in host memory; batches are moved and converted as they are taken."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor | None
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        weights = None if self.weights is None else self.weights[index].to(self.device, self.dtype)
        return (
            self.inputs[index].to(self.device, self.dtype),
            self.labels[index].to(self.device),
            weights,
        )

    def subset(self, index: Tensor) -> "TensorSamples":
        weights = None if self.weights is None else self.weights[index]
        return TensorSamples(
            self.inputs[index], self.labels[index], weights, self.device, self.dtype
        )

    def batches(self, size: int, shuffle: bool) -> Iterator[Tensor]:
        """Indices of batches of nearly equal length, so that none is too small to normalise."""
        count = max(math.ceil(len(self) / size), 1)
        order = torch.randperm(len(self)) if shuffle and count > 1 else torch.arange(len(self))
        return iter(order.tensor_split(count))


def choose_device(given: Any) -> torch.device:
    """ "auto" is the current CUDA device where there is one, otherwise the CPU."""
    if isinstance(given, str) and given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as unknown:
        raise LargeMarginError(
            f'device must be "auto" or a torch device such as "cuda:0", but {given!r} was given.'
        ) from unknown


def choose_dtype(given: str, inputs: Tensor, cheap: bool) -> torch.dtype:
    """ "auto" is the precision of ``inputs`` (float64 for integers) where that is ``cheap``."""
    check_choice("dtype", given, ("auto", "float32", "float64"))
    if given == "auto":
        single = inputs.dtype in (torch.float32, torch.float16)
        given = "float64" if cheap and not single else "float32"
    return torch.float64 if given == "float64" else torch.float32


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
}


def make_optimizer(
    given: Any, groups: list[dict[str, Any]], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """By name with ``lr`` and ``weight_decay``, or by a function of the parameter groups."""
    if callable(given):
        made = given(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise LargeMarginError(
                "optimizer must return a torch optimizer when called with parameter groups, but "
                f"it returned {type(made).__name__}. For example functools.partial("
                "torch.optim.SGD, lr=0.1)."
            )
        return made
    check_choice("optimizer", given, OPTIMIZERS)
    check_number("lr", lr, above=0)
    check_number("weight_decay", weight_decay, at_least=0)
    return OPTIMIZERS[given](groups, lr=lr, weight_decay=weight_decay)


@dataclass
class Average:
    """Means of named numbers, kept on the device until they are read."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    count: float = 0.0

    def add(self, numbers: dict[str, Tensor], count: float) -> None:
        for name, number in numbers.items():
            value = number.detach() * count
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.count += count

    def read(self) -> dict[str, float]:
        return {name: float(value) / self.count for name, value in self.sums.items()}


class Fitting:
    """A network, its criterion and its optimizer: what training continues with."""

    def __init__(
        self,
        network: EstimatorNetwork,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        *,
        noise: float = 0.0,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.optimizer = optimizer
        self.noise = noise
        needs = {name for loss in criterion.objective.terms.values() for name in loss.needs}  # type: ignore[union-attr]
        self.needs_noise = "noisy" in needs
        self.needs_graph = bool(needs & {"inputs", "layers"})
        if self.needs_noise and noise <= 0:
            raise LargeMarginError(
                "a term of the objective compares features with those of noised inputs. Say how "
                "much noise: noise=0.1 (in standard deviations of the inputs)."
            )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def set_rate(self, lr: float) -> None:
        """The learning rate to go on with."""
        for group in self.optimizer.param_groups:
            group["initial_lr"] = lr

    def train(
        self, samples: TensorSamples, batch_size: int, factors: Iterator[float]
    ) -> dict[str, float]:
        """One epoch; means of the loss and its terms. ``factors`` of the learning rate, by step."""
        self.network.train()
        seen = Average()
        usual = None if samples.weights is None else float(samples.weights.mean())
        for index in samples.batches(batch_size, shuffle=True):
            inputs, labels, weights = samples.take(index)
            factor = next(factors)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            loss = self._loss(inputs, labels, weights)
            if weights is not None and usual is not None:
                # The criterion divides by this batch's weight; heavy batches count for more.
                loss = loss * (weights.mean() / usual)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            seen.add({"loss": loss, **self._terms()}, len(index))
        found = seen.read()
        if not math.isfinite(found["loss"]):
            raise LargeMarginError(
                f"the loss became {found['loss']} while training. Lower lr, or use an objective "
                "that is stable at it; standardize=True keeps inputs in range."
            )
        return found

    def validate(self, samples: TensorSamples) -> tuple[float, float]:
        """Loss and accuracy on samples that are not trained on."""
        self.network.eval()
        seen = Average()
        with nullcontext() if self.needs_graph else torch.no_grad():
            for index in samples.batches(PREDICTED, shuffle=False):
                inputs, labels, weights = samples.take(index)
                outputs = self.network(inputs)
                loss = self._loss(inputs, labels, weights, outputs)
                right = (outputs.argmax(1) == labels).to(samples.dtype)
                counts = torch.ones_like(right) if weights is None else weights
                accuracy = (right * counts).sum() / counts.sum()
                seen.add({"loss": loss, "accuracy": accuracy}, float(counts.sum()))
        found = seen.read()
        return found["loss"], found["accuracy"]

    def state(self) -> dict[str, Any]:
        return deepcopy(
            {"network": self.network.state_dict(), "criterion": self.criterion.state_dict()}
        )

    def restore(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.criterion.load_state_dict(state["criterion"])

    def to(self, device: torch.device) -> None:
        """Move everything, also the optimizer's moments; parameters stay the same objects."""
        self.network.to(device)
        self.criterion.to(device)
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _loss(
        self,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        outputs: Tensor | None = None,
    ) -> Tensor:
        outputs = self.network(inputs) if outputs is None else outputs
        noisy = self.network(self._noised(inputs)) if self.needs_noise else None
        loss: Tensor = self.criterion(outputs, labels, noisy=noisy, sample_weight=weights)
        return loss

    def _noised(self, inputs: Tensor) -> Tensor:
        scale = getattr(self.network.standardize, "scale", 1.0)
        return inputs + self.noise * scale * torch.randn_like(inputs)

    def _terms(self) -> dict[str, Tensor]:
        return {f"terms.{name}": value for name, value in self.criterion.terms.items()}


def fit_epochs(
    fitting: Fitting,
    samples: TensorSamples,
    valid: TensorSamples | None,
    *,
    epochs: int,
    batch_size: int,
    decay: str,
    patience: int,
    verbose: bool,
    history: dict[str, list[float]],
) -> int:
    """Train for ``epochs``, or until ``valid`` has not improved for ``patience`` of them.

    Then the best epoch's state is restored. Appends to ``history``; returns the epochs run.
    """
    steps = epochs * max(math.ceil(len(samples) / batch_size), 1)
    factors = rate_factors(decay, steps)
    best, best_epoch, best_state = math.inf, 0, None
    bar = _bar(range(1, epochs + 1), verbose)
    epoch = 0
    for epoch in bar:
        found = fitting.train(samples, batch_size, factors)
        if valid is not None:
            found["valid_loss"], found["valid_accuracy"] = fitting.validate(valid)
        for name, value in found.items():
            history.setdefault(name, []).append(value)
        if verbose:
            shown = ("loss", "valid_loss", "valid_accuracy")
            bar.set_postfix({name: f"{found[name]:.4g}" for name in shown if name in found})  # type: ignore[attr-defined]
        if valid is not None:
            if found["valid_loss"] < best:
                best, best_epoch, best_state = found["valid_loss"], epoch, fitting.state()
            elif epoch - best_epoch >= patience:
                break
    if best_state is not None:
        fitting.restore(best_state)
    return epoch


def rate_factors(decay: str, steps: int) -> Iterator[float]:
    """Factors of the learning rate: constant, or half a cosine from 1 to 0 over ``steps``."""
    check_choice("decay", decay, ("cosine", "constant"))
    for step in range(steps):
        yield 0.5 * (1 + math.cos(math.pi * step / steps)) if decay == "cosine" else 1.0


def _bar(epochs: Iterable[int], verbose: bool) -> Iterable[int]:
    if not verbose:
        return epochs
    try:
        from tqdm.auto import tqdm
    except ImportError as missing:
        raise MissingPackage(
            "verbose=True shows a progress bar by tqdm, which is not installed. Install it: "
            "pip install 'largemargin[sklearn]'."
        ) from missing
    bar: Iterable[int] = tqdm(epochs, desc="LargeMarginClassifier", unit="epoch")
    return bar


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Everything random inside depends on ``seed``; the global generators are left as they were."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # Not torch.manual_seed, which would seed every accelerator too.
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
