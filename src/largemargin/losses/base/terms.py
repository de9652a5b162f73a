"""Small pieces the per-sample functions share: statistics by call form, soft targets, margins."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_classifier,
    check_floating,
    check_inputs,
    check_layout,
    check_length,
    check_logits,
    check_matrix,
    check_number,
    check_sizes,
)
from largemargin.losses.base.class_counts import numbers_per_class
from largemargin.losses.base.scale import auto_scale, check_scale_setting
from largemargin.losses.base.setting_ranges import Limits
from largemargin.ops.class_stats import (
    IMPLS,
    ClassStats,
    ComputeOptions,
    Statistic,
    class_stats,
    stats_from_logits,
)
from largemargin.ops.dense import dense_limit
from largemargin.ops.eager_gradients import cosine_logits
from largemargin.ops.matmul import PRECISIONS, resolve_precision
from largemargin.ops.norms import promote
from largemargin.ops.shards import is_shared, refuse_sharded
from largemargin.ops.similarity import (
    SIMILARITIES,
    check_scale,
    count_vectors,
    scaled,
    similarity_logits,
)
from largemargin.tracing import plain_eager, values_are_checked

HOW_MADE = ("bias", "similarity", "scale", "precision")
"""Options of ``similarity_logits``."""


class LogitOptions(ComputeOptions, total=False):
    """How logits are made from features, beside the compute options."""

    bias: Tensor | None
    similarity: str
    scale: float | Tensor


def stats_of(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor | None,
    want: tuple[Statistic, ...],
    options: LogitOptions,
) -> tuple[ClassStats, Tensor]:
    """Statistics and labels of a (features, prototypes, labels) or (logits, labels) call.

    For losses that are made of differences of statistics: those of logits are relative.
    """
    if labels is not None:
        stats = class_stats(features, prototypes, labels, want=want, relative=True, **options)
        return stats, labels
    check_call(features, prototypes, None, options)
    if (impl := options.get("impl", "auto")) in ("chunked", "triton"):
        raise LargeMarginError(
            f'impl="{impl}" was asked for, but logits were given, so the (N, C) matrix exists '
            "already. Pass (features, prototypes, labels) to avoid it."
        )
    log_prior, scale = options.get("log_prior"), options.get("scale", 1.0)
    stats = stats_from_logits(
        features if log_prior is None else _adjusted(promote(features), log_prior / scale),
        prototypes,
        scale,
        want,
        relative=True,
        validate=options.get("validate"),
        checked=True,
    )
    return stats, prototypes


def with_prior(logits: Tensor, options: LogitOptions) -> Tensor:
    """Logits of a loss that makes no statistics of them, adjusted by the prior if there is one."""
    log_prior = options.get("log_prior")
    return logits if log_prior is None else logits + log_prior


def _adjusted(logits: Tensor, log_prior: Tensor) -> Tensor:
    """Logits with a prior, less one number per sample: at 1e4 the prior would be rounded away."""
    return logits - torch.nan_to_num(logits.detach().amax(1, keepdim=True)) + log_prior


def whole_logits(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor | None,
    options: LogitOptions,
    name: str,
    reason: str,
    *,
    relative: bool = False,
) -> tuple[Tensor, Tensor]:
    """The (N, C) logits and the labels of either call form, for a loss that no statistics serve."""
    refuse_sharded(prototypes, name, reason)
    if (impl := options.get("impl")) in ("chunked", "triton"):
        raise LargeMarginError(
            f'{name} cannot be computed with impl="{impl}": {reason} Pass impl="auto".'
        )
    check_call(features, prototypes, labels, options)
    if labels is None:
        return promote(features), prototypes
    named: Any = {key: value for key, value in options.items() if key in HOW_MADE}
    return similarity_logits(features, prototypes, checked=True, relative=relative, **named), labels


def eager_logits(
    features: Tensor, prototypes: Tensor, labels: Tensor | None, options: LogitOptions
) -> tuple[Tensor, Tensor, bool] | None:
    """What ``softmax_values`` takes of a call in plain eager mode; None for all other calls."""
    hard = prototypes if labels is None else labels
    validate, scale = options.get("validate"), options.get("scale", 1.0)
    dense = options.get("impl", "auto") in ("auto", "dense")
    if not (dense and plain_eager() and isinstance(hard, Tensor)) or hard.dim() != 1:
        return None
    check_scale(scale)
    if labels is not None:
        logits = _product(features, prototypes, labels, options)
        if logits is None:
            return None
    else:
        check_call(features, hard, None, options)
        logits = scaled(promote(features), scale)
    if (log_prior := options.get("log_prior")) is not None:
        check_length("log_prior", log_prior, logits.shape[1], "one number per class")
        logits = _adjusted(logits, log_prior)
    return logits, hard.long(), hard.is_cpu if validate is None else validate


def _product(
    features: Tensor, prototypes: Tensor, labels: Tensor, options: LogitOptions
) -> Tensor | None:
    """Logits of features, unless they are too many to keep; those of the head where they fit."""
    made, bias = options.get("made"), options.get("bias")
    similarity, scale = options.get("similarity", "dot"), options.get("scale", 1.0)
    if made is not None and made.times(similarity, scale, bias) == 1:
        return made.logits
    check_call(features, prototypes, labels, options)
    precision = resolve_precision(options.get("precision"), features, prototypes)
    most = dense_limit(features.device.type, precision)
    if is_shared(prototypes) or len(features) * count_vectors(prototypes) > most:
        return None
    if similarity == "cosine" and bias is None and not isinstance(scale, Tensor):
        return cosine_logits(features, prototypes, float(scale), precision)
    form: Any = {"bias": bias, "similarity": similarity, "scale": scale, "precision": precision}
    return similarity_logits(features, prototypes, checked=True, relative=True, **form)


def check_call(
    features: Tensor, prototypes: Tensor, labels: Tensor | None, options: LogitOptions
) -> None:
    """Check a call of either form, unless a module has done so."""
    if options.get("checked", False):
        return
    check_form(options)
    if labels is None:
        check_logits(features, prototypes, **_value_checks(options))
    else:
        checks = {"sub_centers": True, "bias": options.get("bias"), **_value_checks(options)}
        check_inputs(features, prototypes, labels, **checks)


def _value_checks(options: LogitOptions) -> Any:
    return {
        "validate": options.get("validate"),
        "check_finite": options.get("check_finite", False),
    }


def target_and_rest(
    features: Tensor, prototypes: Tensor, labels: Tensor, **options: Unpack[LogitOptions]
) -> tuple[Tensor, Tensor]:
    """The two statistics that most margin losses are functions of."""
    stats = class_stats(features, prototypes, labels, want=("target", "rest"), **options)
    assert stats.target is not None
    assert stats.rest is not None
    return stats.target, stats.rest


def scaled_cosines(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    scale: float | Tensor | str,
    how: ComputeOptions,
    aligned: Callable[..., float | Tensor] | None = None,
    *margins: float | Tensor,
) -> tuple[float | Tensor, Tensor, Tensor]:
    """The scale as a number, and the target and rest of cosines times it."""
    s = scale_of_cosines(scale, features, prototypes, how, aligned, *margins)
    form: Any = {"similarity": "cosine", "scale": s, **how}
    return s, *target_and_rest(features, prototypes, labels, **form)


def scale_of_cosines(
    scale: float | Tensor | str,
    features: Tensor,
    prototypes: Tensor,
    how: ComputeOptions,
    aligned: Callable[..., float | Tensor] | None = None,
    *margins: float | Tensor,
) -> float | Tensor:
    """The scale as a number.

    ``aligned(*margins)`` is psi(0) of :func:`auto_scale`; None where no margin changes it.
    """
    if not isinstance(scale, str):
        return scale
    if not how.get("checked"):
        check_scale_setting(scale)
        check_classifier(features, prototypes, None, sub_centers=True)
    return auto_scale(prototypes.shape[0], aligned(*margins) if aligned else 1.0)


def target_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Clamped target column index, and the target's logit (NaN for a label out of range)."""
    labels = labels.long()
    index = labels.clamp(0, logits.shape[1] - 1)[:, None]
    outside = ((labels < 0) | (labels >= logits.shape[1]))[:, None]
    return index, logits.gather(1, index).masked_fill(outside, torch.nan)


def check_form(options: LogitOptions) -> None:
    """Names that the operator checks, for calls that do not reach it."""
    check_choice("similarity", options.get("similarity", "dot"), SIMILARITIES)
    check_choice("impl", options.get("impl", "auto"), IMPLS)
    if options.get("precision") is not None:
        check_choice("precision", options["precision"], PRECISIONS)


def class_count(features: Tensor, prototypes: Tensor, labels: Tensor | None) -> int:
    """C, from whichever matrix of the two call forms holds it."""
    if labels is None:
        name, matrix, axes, classes = "logits", features, "(N, C)", -1
    else:
        name, matrix, axes, classes = "prototypes", prototypes, "(C, D)", 0
    if not isinstance(matrix, Tensor) or matrix.dim() < 2:
        check_matrix(name, matrix, axes)
    return matrix.shape[classes]


def check_setting(name: str, value: float | Tensor, **limits: Unpack[Limits]) -> None:
    """Limits on a number; a tensor holds one per class, or one that a schedule has checked."""
    if not isinstance(value, Tensor):
        check_number(name, value, **limits)
    elif value.dim() > 1:
        raise LargeMarginError(
            f"{name} must be a number or one per class, but its shape is {tuple(value.shape)}."
        )
    if not isinstance(value, Tensor) or value.dim():
        check_sizes(name, value)


def require(value: Tensor | None) -> Tensor:
    """A statistic that was asked for, hence is there."""
    assert value is not None
    return value


def over_targets(values: Tensor, labels: Tensor) -> Tensor:
    """Values of the labels' classes: themselves, or their mean under soft targets (OPT a)."""
    return values if labels.dim() == 1 else (labels.to(values.dtype) * values).sum(1)


def mean_over_targets(values: Tensor, labels: Tensor) -> Tensor:
    """Values of the labels' classes; of soft targets their mean, whatever those sum to."""
    total = over_targets(values, labels)
    return total if labels.dim() == 1 else total / labels.sum(1)


def at_target(per_class: float | Tensor, labels: Tensor, num_classes: int, name: str) -> Any:
    """A per-class quantity at the target: a number stays one, a (C,) tensor is looked up."""
    if not isinstance(per_class, Tensor) or per_class.dim() == 0:
        return per_class
    check_length(name, per_class, num_classes, "one number per class")
    if labels.dim() == 2:
        return per_class[None, :]
    return per_class[labels.long().clamp(0, num_classes - 1)]


def check_margin(name: str, margin: float | Tensor, limits: Limits) -> None:
    """Limits on a margin given as a number, or as a (C,) tensor (values checked on the CPU)."""
    if type(margin) is float and limits["at_least"] <= margin < limits["below"]:
        return  # in every step
    if not isinstance(margin, Tensor):
        check_number(name, margin, **limits)
    elif values_are_checked(margin, None):
        at_least, below = limits["at_least"], limits["below"]
        bad = ~((margin >= at_least) & (margin < below))
        if bool(bad.any()):
            row = int(bad.reshape(-1).int().argmax())
            raise LargeMarginError(
                f"{name} must hold numbers >= {at_least} and < {below:.6g}, but entry {row} is "
                f"{float(margin.reshape(-1)[row])}. {limits['hint']}"
            )


def matrix_of(prototypes: Tensor | nn.Module) -> Tensor:
    """A (C, D) tensor, or the one a module holds as ``weight``."""
    if isinstance(prototypes, Tensor):
        check_layout("prototypes", prototypes)
        return prototypes
    matrix = getattr(prototypes, "weight", None)
    if not isinstance(matrix, Tensor):
        raise LargeMarginError(
            "prototypes must be a (C, D) tensor or a module whose `weight` is one (nn.Linear, "
            f"ClassHead), but {type(prototypes).__name__} was given. Of a model pass that layer, "
            "of an array torch.as_tensor(array)."
        )
    return matrix


def drawn_matrix(prototypes: Tensor | nn.Module) -> Tensor:
    """:func:`matrix_of`, or what a module that samples its classes draws for one loss value."""
    draw: Callable[[], Tensor] | None = getattr(prototypes, "draw_weight", None)
    matrix = getattr(prototypes, "weight", None) if draw is None else draw()
    return matrix if isinstance(matrix, Tensor) else matrix_of(prototypes)


def class_vector(name: str, values: Tensor | Sequence[float]) -> Tensor:
    """A (C,) floating point copy of per-class numbers."""
    hint = " Make them: lm.functional.balanced_weights(counts)." if name == "weight" else ""
    vector = numbers_per_class(name, values, hint)
    check_layout(name, vector)
    if vector.is_floating_point() or vector.is_complex():
        check_floating(name, vector)
    vector = vector.detach().clone() if vector.is_floating_point() else vector.float()
    if vector.dim() != 1 or not len(vector):
        raise LargeMarginError(
            f"{name} must be a vector of shape (C,), but its shape is {tuple(vector.shape)}."
            + " For a single number pass one of Python: .item()." * (vector.dim() == 0)
        )
    return vector
