"""What a trainer that owns the loop has to do for a criterion, checked and done in one place."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError
from largemargin.losses.base.classwise import collectors


def check_criterion(criterion: object, user: str) -> None:
    if not isinstance(criterion, Criterion):
        given = "a class" if isinstance(criterion, type) else type(criterion).__name__
        raise LargeMarginError(
            f"{user} needs the criterion that lm.attach(model, objective) returns, but {given} was "
            "given."
        )


def check_belongs(criterion: Criterion, model: nn.Module) -> None:
    """A criterion reads the model it was attached to; of another one it would see nothing."""
    if not any(module is criterion.layer for module in model.modules()):
        raise LargeMarginError(
            f"the criterion is attached to another model than this {type(model).__name__}: its "
            f"head, a {type(criterion.layer).__name__}, is not part of it. Attach to the model "
            "that is trained, before copies or wrappers of it are made."
        )


def check_accumulation(criterion: Criterion, micro_batches: int, option: str) -> None:
    """Centroids move once per optimizer step, so they must be of all its micro-batches."""
    found = collectors(criterion.objective)
    if micro_batches > 1 and any(each.accumulate == 1 for each in found):
        raise LargeMarginError(
            f"{option}={micro_batches}, but the centroid bank of the loss writes at every forward "
            f"pass. Attach with accumulate={micro_batches}, so that it writes once per optimizer "
            "step."
        )


def check_trained(
    criterion: Criterion, groups: Iterable[Mapping[str, Any]], instruction: str
) -> None:
    """Parameters of a loss (centers, variances) must be in the optimizer, or they never move."""
    held = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [
        name
        for name, parameter in criterion.named_parameters()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        raise LargeMarginError(
            f"the loss has parameters of its own that the optimizer does not hold: "
            f"{', '.join(missing)}. {instruction}"
        )


def average_gradients(criterion: Criterion) -> list[RemovableHandle]:
    """Average the gradients of a loss's own parameters over processes: DDP wraps the model alone.

    Runs whenever a gradient has been accumulated. What was averaged before is the same on all
    processes and stays so, hence gradient accumulation needs nothing special.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return []
    return [
        parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]
        for parameter in criterion.parameters()
        if parameter.requires_grad
    ]


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
