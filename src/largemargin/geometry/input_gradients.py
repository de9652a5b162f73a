"""Per-sample derivatives of a loss with respect to the inputs, at frozen parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_logits, check_number, check_same_device
from largemargin.geometry.evaluation_mode import evaluation_mode
from largemargin.geometry.pairs import blocks
from largemargin.ops.matmul import without_autocast
from largemargin.ops.norms import promote
from largemargin.shapes import Labels

Model: TypeAlias = Callable[[Tensor], Tensor]
"""Inputs (N, ...) to outputs (N, C); each row of the result depends on its own row only."""

PerSampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) to (N,) losses, unreduced."""

PRECISIONS = {"highest": "ieee", "high": "tf32"}
"""By the names of ``torch.set_float32_matmul_precision``."""

SEARCHED_PASSES = 8
"""From so many passes of one shape on, cuDNN tries its algorithms and keeps the fastest."""

DIRECTION_NUMBERS = 2**26
"""Numbers in the directions held at a time: 256 MiB in float32."""


class InputGradient(NamedTuple):
    """Loss and its input gradient, per sample: see :func:`input_gradient`."""

    loss: Tensor
    gradient: Tensor


@contextmanager
def evaluation(model: Model, inputs: Tensor, precision: str = "highest") -> Iterator[None]:
    """Evaluation mode, gradients on, parameters frozen, products exact; all restored afterwards.

    Finite differences and second derivatives mean nothing under dropout, batch statistics, half
    precision or TensorFloat-32 products. Frozen parameters spare the memory of what only their
    gradients need, and compiled models the gradients themselves.
    """
    with (
        evaluation_mode(model, frozen=True),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_autocast(inputs),
        _products(inputs.device, precision),
    ):
        yield


@contextmanager
def _products(device: torch.device, precision: str) -> Iterator[None]:
    """Float32 products as they are ("highest") or by TensorFloat-32 ("high"), whatever is set.

    torch's default is TensorFloat-32 for convolutions. Its error, about 1e-3 of a gradient, is
    divided by the step of a difference.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    places: tuple[Any, ...] = (cudnn.conv, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = PRECISIONS[precision]
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


@contextmanager
def searched(device: torch.device, passes: int) -> Iterator[None]:
    """Let cuDNN search, where that many passes of one shape pay for it.

    Its guess need not be the fastest. torch stays with the algorithm of the first pass of a shape,
    so that pass has to be among those. Where results have to be the same bit for bit it is left
    alone: which algorithm is the fastest may change from run to run.
    """
    cudnn = torch.backends.cudnn
    exact = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    before = cudnn.benchmark
    try:
        if device.type == "cuda" and passes >= SEARCHED_PASSES and not exact:
            cudnn.benchmark = True
        yield
    finally:
        cudnn.benchmark = before


def prepare(model: Model, inputs: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Check a batch and return copies of it, the inputs detached and in float32 or float64."""
    _check_batch(model, inputs, labels)
    # Copies made outside inference mode can take part in gradients, whatever made the originals.
    with torch.inference_mode(False):
        labels = labels.detach().clone()
        counted = not (labels.is_floating_point() or labels.dtype == torch.bool)
        return promote(inputs.detach().clone()), labels.long() if counted else labels


def _check_batch(model: Model, inputs: Tensor, labels: Labels) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2:
        given = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        dtype = f" of {inputs.dtype}" if isinstance(inputs, Tensor) else ""
        raise LargeMarginError(
            f"inputs must be a floating point batch of shape (N, ...), but {given}{dtype} was "
            "given. Add a batch dimension with x[None]; scale bytes to [0, 1]."
        )
    _check_labels(labels, inputs)
    check_same_device(inputs=inputs, labels=labels)
    if isinstance(model, nn.Module):
        half = {p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16}
        if half:
            raise LargeMarginError(
                f"the model must be float32 or float64, but holds {half.pop()} parameters: "
                "differences of gradients drown in half precision. Call .float() on a copy."
            )


def _check_labels(labels: Labels, inputs: Tensor) -> None:
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.shape[0] != inputs.shape[0]:
        given = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise LargeMarginError(
            f"labels must have one entry per sample, {inputs.shape[0]} in all, but {given} was "
            "given."
        )


def in_double(model: nn.Module) -> Model:
    """The model's function with its parameters and buffers in float64; the model is untouched."""
    # By module, not by name: torch would exchange the tensors of a module with two names twice, and
    # put the exchanged ones back in the end.
    tensors = {
        f"{path}.{name}" if path else name: tensor.detach().double()
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_floating_point()
    }

    def call(inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, tensors, (inputs,), tie_weights=False)
        return outputs

    return call


def losses_and_gradient(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    loss: PerSampleLoss | None,
    *,
    create_graph: bool = False,
) -> tuple[Tensor, Tensor]:
    """(N,) losses and (N, ...) input gradients; ``inputs`` must require gradients.

    Summing the losses keeps each sample's gradient its own; a mean would divide it by N.
    """
    outputs = model(inputs)
    if loss is None:
        check_logits(outputs, labels)
        losses = F.cross_entropy(outputs, labels, reduction="none")
    else:
        losses = loss(outputs, labels)
    if losses.shape != (inputs.shape[0],):
        raise LargeMarginError(
            f"loss must return one value per sample, shape ({inputs.shape[0]},), but its shape is "
            f'{tuple(losses.shape)}. Pass an unreduced loss, reduction="none".'
        )
    if not losses.requires_grad:
        return losses, torch.zeros_like(inputs)
    (gradient,) = torch.autograd.grad(
        losses.sum(), inputs, create_graph=create_graph, materialize_grads=True
    )
    return losses, gradient


def hessian_of(
    model: Model, inputs: Tensor, labels: Labels, loss: PerSampleLoss | None
) -> Callable[[Tensor], Tensor]:
    """A function from (N, ...) vectors to the products of each sample's input Hessian with its own.

    The graph is made once; every product is one pass through it.
    """
    inputs = inputs.detach().requires_grad_()
    _, gradient = losses_and_gradient(model, inputs, labels, loss, create_graph=True)

    def product(vectors: Tensor) -> Tensor:
        if not gradient.requires_grad:
            return torch.zeros_like(inputs)
        (found,) = torch.autograd.grad(
            gradient, inputs, vectors, retain_graph=True, materialize_grads=True
        )
        return found

    return product


class Directions:
    """Directions for each sample, given by the caller or drawn one sample at a time.

    Drawing sample by sample makes the numbers independent of how the work is cut into chunks.
    """

    def __init__(
        self,
        name: str,
        given: Tensor | None,
        count: int,
        inputs: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        shape = inputs.shape[1:]
        self.given, self.generator = given, generator
        if given is None:
            check_number(f"num_{name}", count, at_least=1)
            self.count = count
            return
        shared = given.dim() == inputs.dim() and given.shape[1:] == shape
        own = given.dim() == inputs.dim() + 1 and given.shape[2:] == shape
        if not (shared or (own and given.shape[0] == inputs.shape[0])) or 0 in given.shape:
            sample = ", ".join(str(size) for size in shape)
            raise LargeMarginError(
                f"{name} must have shape (K, {sample}), the same for every sample, or "
                f"({inputs.shape[0]}, K, {sample}), but its shape is {tuple(given.shape)}."
            )
        self.given = given[None].expand(inputs.shape[0], *given.shape) if shared else given
        self.count = self.given.shape[1]

    def of(self, samples: slice, inputs: Tensor) -> Tensor:
        """(n, K, ...) directions of ``inputs``, the samples of that slice, in order."""
        if self.given is not None:
            return self.given[samples].to(inputs)
        device = inputs.device if self.generator is None else self.generator.device
        shape = (self.count, *inputs.shape[1:])
        drawn = [
            torch.randn(shape, generator=self.generator, device=device, dtype=inputs.dtype)
            for _ in range(inputs.shape[0])
        ]
        return torch.stack(drawn).to(inputs.device)


def repeat_rows(x: Tensor, times: int) -> Tensor:
    """Every row ``times`` times in a row, to pair with directions flattened to (n K, ...)."""
    return x.repeat_interleave(times, dim=0)


def sample_chunks(num_samples: int, count: int, chunk_size: int) -> Iterator[slice]:
    """Slices of samples whose (sample, direction) rows fit into one chunk, if one sample's do."""
    check_number("chunk_size", chunk_size, at_least=1)
    return blocks(num_samples, max(1, chunk_size // count))


def sample_groups(inputs: Tensor, count: int, chunk_size: int) -> Iterator[slice]:
    """Slices of up to ``chunk_size`` samples, fewer where all their directions would not fit.

    The rows of a full group make ``count`` full chunks, so that no pass is smaller than asked.
    """
    check_number("chunk_size", chunk_size, at_least=1)
    held = DIRECTION_NUMBERS // max(1, count * inputs.shape[1:].numel())
    return blocks(len(inputs), max(1, min(chunk_size, held)))


def input_gradient(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    loss: PerSampleLoss | None = None,
    chunk_size: int = 256,
) -> InputGradient:
    r"""Loss of each sample and its gradient :math:`\nabla_x l` with respect to the input.

    A module is put in evaluation mode for the call and every submodule's mode restored after it;
    no parameter receives a ``.grad``.

    Args:
        model: maps (N, ...) inputs to (N, C) outputs, rows independent.
        inputs: (N, ...), in the units in which noise is injected, before normalisation (O6).
        labels: (N,) class indices, or whatever ``loss`` takes.
        loss: maps (outputs, labels) to (N,); default cross entropy.
        chunk_size: samples per forward and backward pass; memory only.

    Returns:
        ``loss`` (N,) and ``gradient`` (N, ...), detached.

    Example:
        >>> input_gradient(lambda x: x, torch.zeros(1, 2), torch.tensor([0])).gradient
        tensor([[-0.5000,  0.5000]])
    """
    inputs, labels = prepare(model, inputs, labels)
    with evaluation(model, inputs):
        values, gradients = inputs.new_empty(len(inputs)), torch.empty_like(inputs)
        for rows in sample_chunks(len(inputs), 1, chunk_size):
            x = inputs[rows].requires_grad_()
            found, gradient = losses_and_gradient(model, x, labels[rows], loss)
            values[rows], gradients[rows] = found.detach(), gradient
    return InputGradient(values, gradients)
