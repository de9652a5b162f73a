"""Per-sample derivatives of a loss with respect to the inputs, at frozen parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_logits,
    check_number,
    check_same_device,
)
from largemargin.geometry.pairs import blocks
from largemargin.ops.rows import promote
from largemargin.shapes import Labels

Model: TypeAlias = Callable[[Tensor], Tensor]
"""Inputs (N, ...) to outputs (N, C); each row of the result depends on its own row only."""

PerSampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) to (N,) losses, unreduced."""


class InputGradient(NamedTuple):
    """Loss and its input gradient, per sample: see :func:`input_gradient`."""

    loss: Tensor
    gradient: Tensor


@contextmanager
def evaluation(model: Model, inputs: Tensor) -> Iterator[None]:
    """Evaluation mode, gradients on and autocast off inside; every module's mode is restored.

    Finite differences and second derivatives mean nothing under dropout, batch statistics or half
    precision products.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        if isinstance(model, nn.Module):
            model.eval()
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(inputs.device.type, enabled=False),
        ):
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def prepare(model: Model, inputs: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Check a batch and return copies of it, the inputs detached and in float32 or float64."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2:
        given = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        dtype = f" of {inputs.dtype}" if isinstance(inputs, Tensor) else ""
        raise LargeMarginError(
            f"inputs must be a floating point batch of shape (N, ...), but {given}{dtype} was "
            "given. Add a batch dimension with x[None]; scale bytes to [0, 1]."
        )
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.shape[0] != inputs.shape[0]:
        given = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise LargeMarginError(
            f"labels must have one entry per sample, {inputs.shape[0]} in all, but {given} was "
            "given."
        )
    check_same_device(inputs=inputs, labels=labels)
    if isinstance(model, nn.Module):
        half = {p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16}
        if half:
            raise LargeMarginError(
                f"the model must be float32 or float64, but holds {half.pop()} parameters: "
                "differences of gradients drown in half precision. Call .float() on a copy."
            )
    # Copies made outside inference mode can take part in gradients, whatever made the originals.
    with torch.inference_mode(False):
        labels = labels.detach().clone()
        counted = not (labels.is_floating_point() or labels.dtype == torch.bool)
        return promote(inputs.detach().clone()), labels.long() if counted else labels


def in_double(model: nn.Module) -> Model:
    """The model's function with its parameters and buffers in float64; the model is untouched."""
    tensors = {
        name: tensor.detach().double() if tensor.is_floating_point() else tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }

    def call(inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, tensors, (inputs,))
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


def hessian_products(
    model: Model, inputs: Tensor, labels: Labels, vectors: Tensor, loss: PerSampleLoss | None
) -> Tensor:
    """(N, ...) products of each sample's input Hessian with its own vector."""
    inputs = inputs.detach().requires_grad_()
    _, gradient = losses_and_gradient(model, inputs, labels, loss, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(inputs)
    (product,) = torch.autograd.grad((gradient * vectors).sum(), inputs, materialize_grads=True)
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
