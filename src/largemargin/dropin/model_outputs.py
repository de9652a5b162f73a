"""What models return, and what users pass beside it: finding tensors, rows, labels."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from largemargin.errors import LargeMarginError


def tensors_in(outputs: Any) -> list[Tensor]:
    """Tensors of nested outputs: tuples, lists, mappings (ModelOutput is one), dataclasses."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts: list[Any] = []
    if isinstance(outputs, (dict, Mapping)):
        parts = list(outputs.values())
    elif isinstance(outputs, (tuple, list)):
        parts = list(outputs)
    elif hasattr(outputs, "__dataclass_fields__"):
        parts = [getattr(outputs, name) for name in outputs.__dataclass_fields__]
    return [tensor for part in parts for tensor in tensors_in(part)]


def named_logits(outputs: Any) -> Tensor | None:
    """Outputs that are a tensor, or what is called "logits" in them; None where nothing is."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "logits", None) if found is None else found
    return found if isinstance(found, Tensor) else None


def nodes_behind(start: Any, most: int) -> Iterator[Any]:
    """Nodes of the autograd graph from one on, the nearest first; so many are looked at."""
    front = [start]
    while front and most:
        node, most = front.pop(0), most - 1
        if node is not None:
            yield node
            front += [following for following, _ in node.next_functions]


def has_gradient(outputs: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(outputs))


def rows(tensor: Tensor) -> Tensor:
    """(..., D) as (N, D)."""
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor


def named_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Features of a named module as one row per row of the head's input ``like``."""
    if tensor.shape[:-1] == like.shape[:-1]:
        return rows(tensor)
    if like.dim() == 2 and tensor.shape[:1] == like.shape[:1]:
        return tensor.flatten(1)
    raise LargeMarginError(
        f"the module named as features returned the shape {tuple(tensor.shape)}, which has no row "
        f"for each of those of the head's input, {tuple(like.shape)}. Name a module that returns "
        "one vector per sample."
    )


def flat_beside(labels: Tensor, features: Tensor) -> Tensor:
    """Labels or weights of a sequence head, (N, T), in the order of its flattened features."""
    if not isinstance(labels, Tensor):
        return labels  # refused where their kind is looked at
    if features.dim() > 2 and labels.shape[: features.dim() - 1] == features.shape[:-1]:
        return labels.flatten(0, features.dim() - 2)
    return labels


def check_rows(features: Tensor, labels: Tensor, *, half: bool) -> None:
    """One label for each of the features; ``half``: of those, whose second half was cut off."""
    if not isinstance(labels, Tensor):
        raise LargeMarginError(
            f"labels must be a tensor, but {type(labels).__name__} was given. Convert them with "
            "torch.as_tensor; names are numbered first. The order is criterion(outputs, labels)."
        )
    if labels.dim() > 0 and labels.shape[0] != features.shape[0]:
        if half:
            raise LargeMarginError(
                f'with noisy="second half" the labels are those of the first half, '
                f"{features.shape[0]}, but {labels.shape[0]} were given."
            )
        raise LargeMarginError(
            f"{features.shape[0]} samples went through the head but {labels.shape[0]} labels were "
            "given. Pass the labels of the batch that made these outputs; for "
            'model(torch.cat([x, x_noisy])) pass noisy="second half".'
        )


def first_half(noisy: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of ``model(torch.cat([x, x_noisy]))``."""
    if noisy != "second half" or tensor.shape[0] % 2:
        raise LargeMarginError(
            'noisy must be what model(x_noisy) returned, or "second half" of an even number of '
            f"samples, but {noisy!r} was given with {tensor.shape[0]} samples."
        )
    clean, others = tensor.chunk(2)
    return clean, others
