"""``to_exported_program``: a trained model as a graph of plain torch operators."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from largemargin.errors import LargeMarginError
from largemargin.export.plain_model import Deployed, HeadFacts, Outputs, deployed

Example: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]

TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed differences where the model computes in half precision; otherwise 1e-5."""


def to_exported_program(
    model: nn.Module,
    example: Example,
    *,
    dynamic_batch: bool = True,
    outputs: Outputs = "logits",
    temperature: float = 1.0,
    layer: str | None = None,
    strict: bool = False,
    verify: bool = True,
    tolerance: float | None = None,
) -> ExportedProgram:
    """The trained model with its head as a ``torch.export`` program that needs no largemargin.

    Works on a copy in evaluation mode: the given model keeps its hooks, mode and head. Heads of
    this library become linear layers with constants computed once (normalised, scaled class
    vectors), so the program holds plain aten operators only, in float32 or the model's own dtype.
    Save it with ``torch.export.save``, run it with ``torch.export.load(path).module()(x)``.

    Args:
        model: attached or not, in DDP or compiled or not; its head is found as by ``attach``.
        example: inputs of one call: a tensor, several in a tuple, or a dict of keyword arguments.
            The program takes them as positional arguments in this order.
        dynamic_batch: let the first dimension of the inputs have any size.
        outputs: what the program returns. "logits" is the head's output; "probabilities" its
            softmax; "features" the head's input. One tensor in any case, also where the model
            returns a tuple or a dict.
        temperature: what logits are divided by for "probabilities", from
            :func:`largemargin.measuring.calibrate_temperature`.
        layer: name of the head where it is not the last linear layer.
        strict: trace with TorchDynamo instead of running the Python code.
        verify: compare with the model on the example, and on another batch size if that is free.
        tolerance: largest difference accepted, over ``max(1, largest output)``. Default 1e-5, for
            half precision models 1e-2 (float16) and 5e-2 (bfloat16).

    Example:
        >>> from largemargin import CosFace, attach
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> criterion = attach(model, CosFace(scale=8.0))
        >>> program = to_exported_program(model, torch.randn(2, 4))
        >>> program.module()(torch.randn(5, 4)).shape
        torch.Size([5, 3])
    """
    program, _, checks = trace(
        model,
        example,
        dynamic_batch=dynamic_batch,
        outputs=outputs,
        temperature=temperature,
        layer=layer,
        strict=strict,
        verify=verify,
    )
    run = program.module()
    for inputs, expected in checks:
        check_equal("the exported program", run(*inputs), expected, model, tolerance)
    return program


Check: TypeAlias = tuple[tuple[Tensor, ...], Tensor]


def trace(
    model: nn.Module,
    example: Example,
    *,
    dynamic_batch: bool,
    strict: bool,
    verify: bool,
    device: str | None = None,
    **options: Any,
) -> tuple[ExportedProgram, HeadFacts, list[Check]]:
    """The program, what its head is, and inputs with the outputs the model itself gives.

    ``options``: those of :func:`deployed`.
    """
    inputs, keywords = _inputs(example, device)
    copied, facts = deployed(model, keywords=keywords, device=device, **options)
    batch = inputs[0].shape[0]
    if batch == 0:
        raise LargeMarginError("example must hold at least one sample, but its batch is empty.")
    if dynamic_batch and batch == 1:
        inputs = _rows(inputs, batch, [0, 0])  # torch.export takes a size of 1 for a constant
        batch = 2
    checks: list[Check] = []
    with torch.no_grad():
        if verify:
            checks = [(inputs, copied(*inputs))]
            if dynamic_batch:
                checks.append(_other_batch(copied, inputs, batch))
        copied.make_plain()
        program = _export(copied, inputs, batch if dynamic_batch else None, strict)
    program.graph.eliminate_dead_code()  # what the model does after its head
    program.graph_module.recompile()
    return program, facts, checks


def _inputs(example: Example, device: str | None) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Tensors in order, and the names of those that are keyword arguments."""
    keywords = tuple(example) if isinstance(example, Mapping) else ()
    given = _values(example)
    if not given or not all(isinstance(value, Tensor) for value in given):
        kind = type(example).__name__
        if isinstance(example, Mapping | tuple | list):
            kind += f" of {[type(value).__name__ for value in given]}"
        raise LargeMarginError(
            "example must hold the inputs of one call: a tensor, a tuple of tensors or a dict of "
            f"them, but {kind} was given. Bind other arguments beforehand, for instance in a small "
            "nn.Module around the model."
        )
    if any(value.dim() == 0 for value in given):
        raise LargeMarginError("example must hold batches, but one of its tensors is 0-dim.")
    return tuple(value.detach().to(device=device) for value in given), keywords


def _values(example: object) -> tuple[Any, ...]:
    """The inputs in order; none where the example is no collection of them."""
    if isinstance(example, Tensor):
        return (example,)
    if isinstance(example, Mapping):
        return tuple(example.values())
    if isinstance(example, Sequence) and not isinstance(example, str):
        return tuple(example)
    return ()


def _rows(inputs: tuple[Tensor, ...], batch: int, rows: list[int]) -> tuple[Tensor, ...]:
    """Other batches of the same samples; inputs without the batch dimension stay."""
    return tuple(each[rows] if each.shape[0] == batch else each for each in inputs)


def _other_batch(model: Deployed, inputs: tuple[Tensor, ...], batch: int) -> Check:
    """One sample more, and what the model makes of it."""
    more = _rows(inputs, batch, [*range(batch), 0])
    try:
        return more, model(*more)
    except RuntimeError as error:
        raise LargeMarginError(
            f"the model takes the example's {batch} samples but not {batch + 1}: {error} Pass "
            "dynamic_batch=False."
        ) from error


def _export(
    model: Deployed, inputs: tuple[Tensor, ...], batch: int | None, strict: bool
) -> ExportedProgram:
    shapes: Any = None
    if batch is not None:
        free = Dim("batch")
        shapes = {"args": tuple({0: free} if t.shape[0] == batch else None for t in inputs)}
    try:
        with warnings.catch_warnings():
            # The list in which Deployed holds the head's output is one, and emptied again.
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
            return torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict)
    except Exception as error:
        hint = "with dynamic_batch=False, or " if batch is not None else ""
        raise LargeMarginError(
            f"torch.export could not trace the model: {str(error).splitlines()[0]} Try "
            f"{hint}strict={not strict}. Code that branches on values of tensors cannot be traced."
        ) from error


def check_equal(
    what: str, got: Tensor, expected: Tensor, model: nn.Module, tolerance: float | None
) -> None:
    """Raise where outputs differ from the model's by more than the tolerance allows."""
    if tolerance is None:
        kinds = {each.dtype for each in model.parameters()}
        tolerance = max((TOLERANCES.get(kind, 1e-5) for kind in kinds), default=1e-5)
    got, expected = got.double().cpu(), expected.double().cpu()
    if got.shape != expected.shape:
        raise LargeMarginError(
            f"{what} returned shape {tuple(got.shape)} where the model returns "
            f"{tuple(expected.shape)}. Export with dynamic_batch=False."
        )
    size = max(1.0, float(expected.abs().max()))
    difference = float((got - expected).abs().max()) / size
    if not difference <= tolerance:
        raise LargeMarginError(
            f"{what} differs from the model by {difference:.2e} of its largest output "
            f"{size:.3g}, on {expected.shape[0]} samples; {tolerance:.0e} is allowed. If the model "
            "is meant to be random or that difference does not matter, pass a larger tolerance or "
            "verify=False."
        )
