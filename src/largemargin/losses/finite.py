"""``check_finite`` beyond the inputs: no value and no gradient of a loss is NaN or infinite."""

from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError

WATCHED = ("features", "prototypes", "noisy", "logits", "bias")
"""Arguments that gradients go to. Inputs and layers belong to a network: it has its own graph."""


def watch(loss: nn.Module) -> None:
    """From now on this loss raises where its value or a gradient it sends back is not finite.

    Finite inputs may be too large for their dtype: a product of two float32 numbers of 1e20 is
    infinite. Looks at values after every call, which waits for the device; not in compiled code.
    """
    loss.register_forward_pre_hook(_watched, with_kwargs=True)
    loss.register_forward_hook(_checked, with_kwargs=True)


def _named(loss: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, ...]:
    """What the arguments of this call are called."""
    by_name = sum(name in options for name in loss.needs)
    alone = loss.takes_logits and len(given) + by_name < len(loss.needs)
    return ("logits", "labels") if alone else tuple(loss.needs)


def _watched(
    loss: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling() or "logits" in loss.needs:
        return None
    names = _named(loss, given, options)
    seen = [_view(loss, name, each) for name, each in zip(names, given[: len(names)], strict=False)]
    named = {name: _view(loss, name, each) for name, each in options.items()}
    return (*seen, *given[len(names) :]), named


def _view(loss: nn.Module, name: str, given: Any) -> Any:
    """The tensor itself for everybody but the backward pass."""
    if name not in WATCHED or not isinstance(given, Tensor) or not given.requires_grad:
        return given
    if not torch.is_grad_enabled():
        return given
    # A hook on the tensor itself would stay there: parameters live longer than a step.
    view = given.view_as(given)

    def look(gradient: Tensor) -> None:
        bad = ~torch.isfinite(gradient)
        if bool(bad.any()):
            row = int(bad.reshape(len(bad), -1).any(dim=1).int().argmax())
            raise LargeMarginError(
                f"the gradient of {type(loss).__name__} on {name} is not finite in row {row}, "
                f"though the loss is. {_limits(given)}"
            )

    view.register_hook(look)  # type: ignore[no-untyped-call]
    return view


def _checked(loss: Any, given: tuple[Any, ...], options: dict[str, Any], value: Tensor) -> None:
    if torch.compiler.is_compiling() or bool(torch.isfinite(value).all()):
        return
    named = {**dict(zip(_named(loss, given, options), given, strict=False)), **options}
    sizes = ", ".join(
        f"{name} {float(each.detach().abs().max()):.3g}"
        for name, each in named.items()
        if name in WATCHED and isinstance(each, Tensor) and each.numel()
    )
    raise LargeMarginError(
        f"{type(loss).__name__} is not finite, though its inputs are: the largest entries are "
        f"{sizes or 'in the parameters'}. {_limits(value)}"
    )


def _limits(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    wider = "float64" if tensor.dtype in (torch.float32, torch.float64) else "float32"
    return (
        f"Numbers of {kind} end at {torch.finfo(tensor.dtype).max:.3g}. Normalise or scale the "
        f"features, lower the learning rate, or compute in {wider}."
    )
