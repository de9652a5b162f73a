"""Checks of tensors, and the names of ``exceptions.py`` beside them.

Shapes, dtypes and Python numbers are checked always: they cost nothing. Values inside tensors are
checked in eager mode on the CPU; elsewhere only with ``validate=True``, because reading a value
back from an accelerator stalls it and a traced graph cannot branch on it.
"""

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from largemargin.exceptions import LargeMarginError as LargeMarginError
from largemargin.exceptions import MarginWarning as MarginWarning
from largemargin.exceptions import MissingPackage as MissingPackage
from largemargin.exceptions import check_choice as check_choice
from largemargin.exceptions import check_number as check_number
from largemargin.exceptions import optional_module as optional_module
from largemargin.tracing import made_for_inference, transformed, value_range, values_are_checked

LARGEST = 1e15
"""Numbers that a loss is set to end here, and begin at its inverse: float32 holds their squares."""

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def refuse_script(module: object) -> NoReturn:
    """``__prepare_scriptable__`` of our modules, which torch.jit.script calls before anything."""
    raise LargeMarginError(
        f"torch.jit.script cannot compile {type(module).__name__}: it reads a part of Python that "
        "has no keyword arguments with defaults. Compile training with torch.compile; hand a model "
        "on with torch.export, torch.jit.trace, or to_exported_program and to_onnx of lm.export."
    )


def refuse_transform(module: Any) -> None:
    """A state that moves while ``torch.func`` differentiates would be none of the result."""
    if module.training and transformed():
        raise LargeMarginError(
            f"{type(module).__name__} moves its state in training mode, which a torch.func "
            "transform (grad, vmap, hessian, ...) does not allow. Call .eval() on the loss first."
        )


def check_sizes(name: str, value: float | Tensor) -> None:
    """Check that a number, or all of a tensor, can be computed with: see ``LARGEST``."""
    least = most = value
    if isinstance(value, Tensor):
        check_layout(name, value)
        if not value.is_floating_point():
            return
        check_floating(name, value)
        if not values_are_checked(value, None):
            return
        least, most = value_range(value)
    if not (least >= -LARGEST and most <= LARGEST):
        given = value.tolist() if isinstance(value, Tensor) else value
        raise LargeMarginError(
            f"{name} must be finite and lie between {-LARGEST:g} and {LARGEST:g}, but {given} was "
            "given: float32 cannot compute with larger numbers."
        )


def check_count(
    name: str, value: int, *, at_least: int, at_most: int | None = None, hint: str = ""
) -> None:
    """Check a whole number, also one of NumPy, against closed limits."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise LargeMarginError(
            f"{name} must be a whole number, but {value!r} was given.{' ' + hint if hint else ''}"
        )
    check_number(name, int(value), at_least=at_least, at_most=at_most, hint=hint)


def whole_number(name: str, value: int | Tensor | None) -> int | None:
    """A label as a plain number, of whatever kind of whole number; None is none."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral) or abs(value) >= 2**63:
        raise LargeMarginError(
            f"{name} must be one whole number of 64 bits or None, but {value!r} was given. Give "
            f"all samples to skip the same label: labels[skip] = -100."
        )
    return int(value)


def check_matrix(name: str, tensor: Tensor, axes: str) -> None:
    """Check that ``tensor`` is a floating point matrix; ``axes`` says of what, as "(N, D)"."""
    if not isinstance(tensor, Tensor):
        raise LargeMarginError(
            f"{name} must be a tensor of shape {axes}, but {type(tensor).__name__} was given. "
            "Convert arrays with torch.as_tensor; of a layer pass its weight."
        )
    check_layout(name, tensor)
    if tensor.dim() != 2:
        raise LargeMarginError(
            f"{name} must have shape {axes}, but its shape is {tuple(tensor.shape)}. "
            + _to_matrix(name, tensor)
        )
    check_floating(name, tensor)


def check_layout(name: str, tensor: Tensor) -> None:
    """Check that a tensor is a plain one: few operations take sparse or nested ones."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"
        to_plain = "to_padded_tensor(0.0)" if tensor.is_nested else "to_dense()"
        raise LargeMarginError(
            f"{name} must be a dense tensor, but {kind} was given. Call .{to_plain} on it."
        )


def check_floating(name: str, tensor: Tensor) -> None:
    """Check for a dtype that can be computed in; those of 8 bits are for storage."""
    if tensor.dtype not in FLOATING:
        raise LargeMarginError(
            f"{name} must be floating point, but its dtype is {tensor.dtype}. Call .float() on it."
            if not tensor.is_floating_point()
            else f"{name} must be of 16 bits at least, but its dtype is {tensor.dtype}, in which "
            "torch computes nothing. Call .float() on it."
        )


def _to_matrix(name: str, tensor: Tensor) -> str:
    if tensor.dim() == 3 and name in ("prototypes", "weight"):
        return (
            "Sub-centers (C, K, D) go to losses on class statistics; for anything else keep one "
            "vector of each class, as SubCenterHead.dominant does."
        )
    if tensor.dim() > 2:
        return (
            "Flatten every extra dimension into the first one; of feature maps (N, D, H, W), with "
            "one label each, pool or .flatten(1) to one row per sample."
        )
    if name == "prototypes":
        return "The order is features, prototypes, labels."
    if not tensor.is_floating_point():
        rest = "labels" if name == "logits" else "prototypes, labels"
        return f"These look like labels; the order is {name}, {rest}."
    return "One sample is a batch of one: x[None]."


def check_same_device(**tensors: Tensor | None) -> None:
    """Check that tensors of a call can be computed with together."""
    first = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if made_for_inference(tensor):
            _check_inference(name, tensors.values())
        first = tensor.device if first is None else first
        if tensor.device != first:
            given = {name: each for name, each in tensors.items() if isinstance(each, Tensor)}
            listed = ", ".join(f"{name} on {each.device}" for name, each in given.items())
            raise LargeMarginError(
                f"all tensors must be on one device, but got {listed}. Move them with .to(device)."
            )


def _check_inference(name: str, tensors: Iterable[Tensor | None]) -> None:
    """torch refuses a gradient wherever a tensor made in inference mode takes part."""
    wanted = any(isinstance(each, Tensor) and each.requires_grad for each in tensors)
    if wanted and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        raise LargeMarginError(
            f"{name} were made under torch.inference_mode(), so no gradient can be computed with "
            "them. Make them under torch.no_grad(), or pass their .clone(); to look at a loss, "
            "call it under torch.no_grad()."
        )


def check_labels(
    labels: Tensor,
    num_samples: int,
    num_classes: int,
    *,
    of: str = "features",
    soft: bool = True,
    reason: str = "",
    skip: str = "pass ignore_index={value}",
    validate: bool | None = None,
) -> None:
    """Check hard labels (N,) or, where ``soft`` allows them, soft targets (N, C)."""
    if not isinstance(labels, Tensor):
        raise LargeMarginError(
            f"labels must be a tensor, but {type(labels).__name__} was given. "
            "Convert them with torch.as_tensor."
        )
    check_layout("labels", labels)
    if labels.dim() == 2 and labels.is_floating_point():
        if not soft:
            raise LargeMarginError(
                f"labels must be class indices of shape (N,), but soft targets of shape "
                f"{tuple(labels.shape)} were given. {reason or 'Pass labels.argmax(1).'}"
            )
        _check_soft_targets(labels, num_samples, num_classes, of)
        check_weights("labels given as soft targets", labels, validate)
        return
    _check_hard_labels(labels, num_samples, num_classes, of)
    if validate is not False and values_are_checked(labels, validate):
        _check_label_values(labels.long(), num_classes, skip)


def _check_hard_labels(labels: Tensor, num_samples: int, num_classes: int, of: str) -> None:
    if labels.dim() != 1:
        raise LargeMarginError(
            "labels must be class indices of shape (N,) or floating point soft targets of shape "
            f"(N, C), but got shape {tuple(labels.shape)} with dtype {labels.dtype}."
            + _to_labels(labels, num_classes)
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LargeMarginError(
            f"labels of shape (N,) must be integers, but their dtype is {labels.dtype}. "
            "Call .long() on them."
        )
    if labels.shape[0] != num_samples:
        raise LargeMarginError(
            f"labels must have one entry per row of {of}, but {of} have {num_samples} rows and "
            f"{labels.shape[0]} labels were given."
            + (" The order is features, prototypes, labels." if of == "features" else "")
        )


def _check_soft_targets(labels: Tensor, num_samples: int, num_classes: int, of: str) -> None:
    check_floating("labels given as soft targets", labels)
    if tuple(labels.shape) != (num_samples, num_classes):
        raise LargeMarginError(
            f"labels given as soft targets must have shape (N, C) = ({num_samples}, "
            f"{num_classes}) to match {of}, but theirs is {tuple(labels.shape)}."
            + (_to_labels(labels, num_classes) if labels.shape[1] == 1 else "")
        )


def _check_label_values(labels: Tensor, num_classes: int, skip: str) -> None:
    low, high = value_range(labels)
    if low < 0 or high >= num_classes:
        row = int(((labels < 0) | (labels >= num_classes)).int().argmax())
        value = int(labels[row])
        raise LargeMarginError(
            f"labels must lie in [0, {num_classes}) but row {row} holds {value}. "
            f"If {value} marks samples to skip, {skip.format(value=value)}."
            + (" Classes count from 0." if value == num_classes else "")
        )


def _to_labels(labels: Tensor, num_classes: int) -> str:
    if labels.dim() == 0:
        return " One label is a batch of one: labels[None]."
    if labels.dim() == 2 and labels.shape[1] == 1:
        return " Make one column a vector: labels.squeeze(1).long()."
    if labels.dim() == 2 and labels.shape[1] == num_classes:
        return " Of rows with a 1 at the class take labels.argmax(1)."
    return ""


def check_inputs(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    soft: bool = True,
    reason: str = "",
    sub_centers: bool = False,
    validate: bool | None = None,
    check_finite: bool = False,
) -> None:
    """Check the arguments of a ``(features, prototypes, labels)`` function against each other."""
    check_classifier(
        features, prototypes, bias, sub_centers=sub_centers and has_sub_centers(prototypes)
    )
    check_num_classes(prototypes.shape[0])
    check_same_device(features=features, prototypes=prototypes, labels=labels, bias=bias)
    check_labels(
        labels, features.shape[0], prototypes.shape[0], soft=soft, reason=reason, validate=validate
    )
    if check_finite:
        check_all_finite(features=features, prototypes=prototypes, bias=bias)


def has_sub_centers(prototypes: object) -> bool:
    """Whether prototypes are (C, K, D), and no matrix with a dimension too many."""
    if not isinstance(prototypes, Tensor) or prototypes.is_nested:
        return False
    return prototypes.dim() == 3 and len(prototypes) > 1


def check_classifier(
    features: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    *,
    name: str = "features",
    sub_centers: bool = False,
) -> None:
    """Check points, prototypes and bias against each other; ``name`` is that of the points.

    ``sub_centers`` says whether prototypes may be (C, K, D).
    """
    check_matrix(name, features, "(N, D)")
    several = sub_centers and isinstance(prototypes, Tensor) and prototypes.dim() == 3
    several = several and not prototypes.is_nested
    check_matrix("prototypes", prototypes[:, 0] if several else prototypes, "(C, D)")
    if features.shape[1] != prototypes.shape[-1]:
        raise LargeMarginError(
            f"{name} and prototypes must share their second dimension D, but {name} have "
            f"shape {tuple(features.shape)} and prototypes {tuple(prototypes.shape)}. Prototypes "
            "are (C, D), one row per class, like nn.Linear.weight; transpose them if they are "
            "(D, C); of logits, head(features), pass the head itself."
        )
    if bias is not None and not isinstance(bias, Tensor):
        raise LargeMarginError(
            f"bias must be a tensor of shape (C,), but {type(bias).__name__} was given. Convert it "
            "with torch.as_tensor."
        )
    if bias is not None and tuple(bias.shape) != (prototypes.shape[0],):
        raise LargeMarginError(
            f"bias must have shape (C,) = ({prototypes.shape[0]},), but its shape is "
            f"{tuple(bias.shape)}."
        )


def check_logits(
    logits: Tensor, labels: Tensor, *, validate: bool | None = None, check_finite: bool = False
) -> None:
    """Check the arguments of a ``(logits, labels)`` function against each other."""
    check_matrix("logits", logits, "(N, C)")
    check_num_classes(logits.shape[1])
    check_same_device(logits=logits, labels=labels)
    check_labels(labels, logits.shape[0], logits.shape[1], of="logits", validate=validate)
    if check_finite:
        check_all_finite(logits=logits)


def check_num_classes(num_classes: int) -> None:
    if num_classes < 2:
        raise LargeMarginError(
            f"at least 2 classes are needed, but {num_classes} was given: a margin is a distance "
            "to another class. Two classes are a head of two outputs and labels 0 and 1."
        )


def check_all_finite(**tensors: Tensor | None) -> None:
    """Raise for the first tensor that holds NaN or infinity, naming the row (synchronises)."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        bad = ~torch.isfinite(tensor)
        if bool(bad.any()):
            row = int(bad.reshape(tensor.shape[0], -1).any(dim=1).int().argmax())
            raise LargeMarginError(
                f"{name} must be finite, but row {row} holds NaN or infinity. Look at the layers "
                "before it, lower the learning rate or clip gradients."
            )


def check_length(name: str, tensor: Tensor | Sequence[float], length: int, meaning: str) -> None:
    """Check a vector such as class weights against C or sample weights against N."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else (len(tensor),)
    if shape != (length,):
        raise LargeMarginError(f"{name} must have shape ({length},), {meaning}, but got {shape}.")


def check_sample_weight(weight: Tensor | None, samples: int, validate: bool | None = None) -> None:
    """Check weights of samples, where there are any: one for each."""
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise LargeMarginError(
            f"sample_weight must be a tensor of shape ({samples},), one per sample, but "
            f"{type(weight).__name__} was given. Convert it with torch.as_tensor."
        )
    check_length("sample_weight", weight, samples, "one per sample")
    check_weights("sample_weight", weight, validate)


def check_weights(name: str, weights: Tensor, validate: bool | None = None) -> None:
    """Check that what others are multiplied by is finite and not negative."""
    check_layout(name, weights)
    if weights.is_complex() or weights.is_floating_point():
        check_floating(name, weights)
    if not values_are_checked(weights, validate):
        return
    low, high = value_range(weights)
    if low >= 0 and high < math.inf:
        return
    bad = ~((weights >= 0) & (weights < math.inf))
    row = int(bad.reshape(len(weights), -1).any(1).int().argmax())
    raise LargeMarginError(
        f"{name} must hold finite numbers >= 0, but entry {row} is {weights[row].tolist()}. Look "
        "at what they are computed from; 0 leaves out what it stands for."
    )


def warn_user(message: str) -> None:
    """Warn where the user's code called, in one process only."""
    process = torch.distributed
    if process.is_available() and process.is_initialized() and process.get_rank() != 0:
        return
    ours = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    level, frame = 2, sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, MarginWarning, stacklevel=level)
