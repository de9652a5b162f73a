"""``class_stats``: five numbers per sample that nearly every logit loss is a function of."""

from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_inputs,
    check_length,
    check_logits,
)
from largemargin.ops.chunked import chunked_stats
from largemargin.ops.dense import dense_limit
from largemargin.ops.eager_gradients import (
    cosine_logits,
    launches,
    logit_stats,
    target_and_rival,
)
from largemargin.ops.matmul import Precision, resolve_precision, without_autocast
from largemargin.ops.norms import promote
from largemargin.ops.sharded import sharded_stats
from largemargin.ops.shards import cut_like, is_shared
from largemargin.ops.similarity import (
    SIMILARITIES,
    HeadLogits,
    affine_form,
    check_scale,
    count_vectors,
    dense_logits,
    scaled,
)
from largemargin.ops.triton.op import missing, tile_stats
from largemargin.shapes import Features, Labels, Logits, Prototypes
from largemargin.tracing import plain_eager

Statistic: TypeAlias = Literal["target", "rival", "rest", "spread", "mean"]
Impl: TypeAlias = Literal["auto", "dense", "chunked", "triton"]
STATISTICS: tuple[Statistic, ...] = ("target", "rival", "rest", "spread", "mean")
IMPLS: tuple[Impl, ...] = ("auto", "dense", "chunked", "triton")


class ComputeOptions(TypedDict, total=False):
    """How a loss is computed, never what it means; every loss passes these on to the operator."""

    made: HeadLogits | None
    log_prior: Tensor | None
    impl: Impl
    precision: Precision | None
    validate: bool | None
    check_finite: bool
    checked: bool


class ClassStats(NamedTuple):
    """Statistics of the logits of each sample; those that were not wanted are ``None``.

    Shape (N,) for hard labels. For soft targets (N, C): column c holds the statistics with class
    c as the target.
    """

    target: Tensor | None
    rival: Tensor | None
    rival_index: Tensor | None
    rest: Tensor | None
    spread: Tensor | None
    mean: Tensor | None


def class_stats(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    want: tuple[Statistic, ...] = STATISTICS,
    impl: Impl = "auto",
    precision: Precision | None = None,
    validate: bool | None = None,
    check_finite: bool = False,
    checked: bool = False,
    made: HeadLogits | None = None,
    log_prior: Tensor | None = None,
    relative: bool = False,
) -> ClassStats:
    r"""Statistics of the logits :math:`l_j = s(\mathrm{sim}(q, W_j) + b_j)` around class y.

    .. math::
        \mathrm{target} = l_y,\quad
        \mathrm{rival} = \max_{j\ne y} l_j,\quad
        \mathrm{rest} = \log\sum_{j\ne y} e^{l_j},\quad
        \mathrm{spread} = \sum_{j\ne y} q_j l_j,\quad
        \mathrm{mean} = \frac{1}{C-1}\sum_{j\ne y} l_j

    with :math:`q` the softmax over the classes other than y. They are ordered: mean <= spread <=
    rival <= rest <= rival + log(C-1). Cross entropy is softplus(rest - target), LM-Softmax
    (rest - target)/s, Kobayashi's term (spread - mean)/2, the sample margin target - rival.

    The gradient of ``rival`` goes to one maximising class (the first). A label out of range gives
    NaN where values are not checked (see ``validate``).

    Args:
        features: (N, D).
        prototypes: (C, D), C >= 2, or (C, K, D) with K sub-centers of a class, of which the nearest
            to a sample makes its logit (Deng et al. 2020). A DTensor cut along the classes gives
            the same statistics; every process of its mesh has to call, each with its own samples
            (any number).
        labels: (N,) class indices, or (N, C) soft targets, whose values are not used here: then
            every class is taken as the target in turn.
        bias: (C,), added after the similarity.
        similarity: "dot", "cosine", "cosine_prototypes" or "euclidean". Distances keep their digits
            far from the origin too, with impl="triton" only near it.
        scale: s > 0, a number or a 0-dim tensor.
        want: the statistics to compute.
        impl: "dense" keeps the (N, C) logits and is twice differentiable; "chunked" goes over the
            classes in blocks, saves no (N, C) buffer and recomputes them in the backward pass;
            "triton" does so in fused kernels, on a GPU. "auto" takes "dense" up to 4 million logits
            (on a GPU 134 million, 34 where products are bfloat16), for soft targets and under
            ``torch.func`` transforms; else "triton" on a GPU where products are bfloat16, else
            "chunked". It never changes the result beyond rounding.
        precision: of the matrix products: "highest", "tf32", "bf16", or None for that of the
            inputs (bfloat16 under autocast). Statistics are float32 or float64.
        validate: check label values. None: only in eager mode on the CPU.
        check_finite: also raise when an input holds NaN or infinity (synchronises).
        checked: the caller has checked all arguments, as the modules do; they are not checked
            again.
        made: logits that a head has made of these features and prototypes; taken where they fit.
        log_prior: (C,) numbers a. The statistics are then those of :math:`l_j + a_j - a_y`: the
            target stays :math:`l_y`, so that margins on its similarity keep their meaning.
        relative: leave out of distances what all statistics of a sample have in common, for losses
            made of differences: of features far from 0 it would round them away.

    Example:
        >>> s = class_stats(torch.tensor([[2.0, 1.0]]), torch.eye(2), torch.tensor([0]))
        >>> s.target, s.rival
        (tensor([2.]), tensor([1.]))
    """
    check_scale(scale)
    if not checked:
        _check_names(similarity, impl, want)
        check_inputs(
            *(features, prototypes, labels),
            bias=bias,
            sub_centers=True,
            validate=validate,
            check_finite=check_finite,
        )
    form: Any = {"bias": bias, "similarity": similarity, "scale": scale}
    if log_prior is not None:
        how: Any = {"want": want, "impl": impl, "precision": precision, "validate": validate}
        how["relative"] = relative
        return _with_prior(features, prototypes, labels, log_prior, made, form, how)
    if is_shared(prototypes):
        form |= {"want": want, "impl": impl, "precision": precision}
        found = sharded_stats(class_stats, features, prototypes, labels, **form)
        return ClassStats(*(found.get(name) for name in ClassStats._fields))
    resolved = resolve_precision(precision, features, prototypes)
    if impl == "auto":
        impl = _choose(features, prototypes, labels.dim() == 2, resolved)
    elif impl != "dense":
        _check_impl(impl, features, prototypes, labels)
    how = want, impl, resolved, validate, relative
    return _plain_stats(features, prototypes, labels, form, made, *how)


def _plain_stats(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    form: dict[str, Any],
    made: HeadLogits | None,
    want: tuple[Statistic, ...],
    impl: Impl,
    precision: str | None,
    validate: bool | None,
    relative: bool,
) -> ClassStats:
    """Statistics of prototypes that are in one place, without a prior."""
    if impl == "dense" and _by_hand(labels, want, **form):
        known = labels.is_cpu if validate is None else validate
        scale = float(form["scale"])
        return _of_cosines(features, prototypes, labels, scale, want, made, precision, known)
    with without_autocast(features):
        if made is not None and impl == "dense" and made.times(**form) == 1:
            return ClassStats(*logit_stats(made.logits, labels, want))
        keep: Any = {"keep_columns": impl == "triton", "relative": relative}
        affine = affine_form(features, prototypes, precision=precision, **keep, **form)
        if impl == "dense":
            return ClassStats(*logit_stats(dense_logits(affine), labels, want))
        kernel = tile_stats if impl == "triton" else chunked_stats
        return ClassStats(*kernel(affine, labels, want))


def _of_cosines(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    scale: float,
    want: tuple[Statistic, ...],
    made: HeadLogits | None,
    precision: str | None,
    known: bool,
) -> ClassStats:
    """Target and rest or rival of scaled cosines, of those that a head has made where they fit."""
    factor = None
    if made is not None:
        factor = made.times(bias=None, similarity="cosine", scale=scale)
    if made is None or factor is None or ("rest" in want and factor != 1):
        logits, factor = cosine_logits(features, prototypes, scale, precision), 1.0
    else:
        logits = made.logits
    return _two_stats(logits, labels.long(), want, factor, known)


def _with_prior(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    log_prior: Tensor,
    made: HeadLogits | None,
    form: dict[str, Any],
    how: dict[str, Any],
) -> ClassStats:
    """Statistics with a prior, which is a column bias that the scale does not multiply."""
    check_length("log_prior", log_prior, prototypes.shape[0], "one number per class")
    shift = cut_like(prototypes, log_prior / form["scale"])
    shifted = shift if form["bias"] is None else form["bias"] + shift
    if made is not None:
        fits = made.times(**form) == 1
        made = made._replace(logits=made.logits + log_prior, bias=shifted) if fits else None
    form = {**form, **how, "bias": shifted, "checked": True, "made": made}
    return _less(class_stats(features, prototypes, labels, **form), log_prior, labels)


def _less(stats: ClassStats, log_prior: Tensor, labels: Tensor) -> ClassStats:
    """Statistics relative to the own class's entry of the prior."""
    own = log_prior
    if labels.dim() == 1:
        own = log_prior[labels.long().clamp(0, len(log_prior) - 1)]
    index, stats = stats.rival_index, stats._replace(rival_index=None)
    relative = ClassStats(*(None if each is None else each - own for each in stats))
    return relative._replace(rival_index=index)


def _two_stats(
    logits: Tensor, labels: Tensor, want: tuple[str, ...], factor: float, known: bool
) -> ClassStats:
    """Target and rest, or target and rival times ``factor``, of cosine logits."""
    if factor == 1 and launches(logits):
        return ClassStats(*logit_stats(logits, labels, want))
    rest = "rest" in want
    target, second, index = target_and_rival(logits, labels, rest, known)
    if factor != 1:
        target, second = target * factor, second * factor
    rival = None if rest else second
    return ClassStats(target, rival, index, second if rest else None, None, None)


def _by_hand(
    labels: Tensor,
    want: tuple[Statistic, ...],
    bias: Tensor | None,
    similarity: str,
    scale: float | Tensor,
) -> bool:
    """Whether cosine logits are all that is needed for what has a backward pass by hand."""
    plain = similarity == "cosine" and bias is None and not isinstance(scale, Tensor)
    two = want in (("target", "rest"), ("target", "rival"))
    return plain and two and labels.dim() == 1 and plain_eager()


def _choose(features: Tensor, prototypes: Tensor, soft: bool, precision: str | None) -> Impl:
    limit = dense_limit(features.device.type, precision)
    if soft or features.shape[0] * count_vectors(prototypes) <= limit or _transformed():
        return "dense"
    fast = features.is_cuda and precision == "bf16" and missing(features, prototypes) is None
    return "triton" if fast else "chunked"


def _transformed() -> bool:
    """Under ``torch.func``, which differentiates what is made of torch's own operations alone."""
    return not (torch.compiler.is_compiling() or plain_eager())


def _check_impl(impl: Impl, features: Tensor, prototypes: Tensor, labels: Tensor) -> None:
    """Refuse "chunked" and "triton" where they cannot be had."""
    if labels.dim() == 2:
        raise LargeMarginError(
            f'impl="{impl}" was asked for with soft targets, which are an (N, C) matrix '
            'themselves, as are those of label_smoothing. Pass impl="auto" or "dense", or hard '
            "labels; lm.LabelSmoothing smooths those of cross entropy without a matrix."
        )
    if _transformed():
        raise LargeMarginError(
            f'impl="{impl}" was asked for under a torch.func transform (grad, vmap, jacrev, ...), '
            'which cannot look into it. Pass impl="auto" or "dense", or use torch.autograd.grad.'
        )
    reason = missing(features, prototypes) if impl == "triton" else None
    if reason is not None:
        raise LargeMarginError(
            f'impl="triton" was asked for, but {reason}. Pass impl="auto", which takes the kernels '
            'where they run, or "chunked", which saves as much memory.'
        )


def class_stats_from_logits(
    logits: Logits,
    labels: Labels,
    *,
    scale: float | Tensor = 1.0,
    want: tuple[Statistic, ...] = STATISTICS,
    validate: bool | None = None,
    check_finite: bool = False,
) -> ClassStats:
    """:func:`class_stats` of given (N, C) logits, multiplied by ``scale``.

    Example:
        >>> class_stats_from_logits(torch.tensor([[2.0, 1.0]]), torch.tensor([1])).rival_index
        tensor([0])
    """
    return stats_from_logits(
        logits, labels, scale, want, validate=validate, check_finite=check_finite
    )


def stats_from_logits(
    logits: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    want: tuple[Statistic, ...],
    *,
    relative: bool = False,
    validate: bool | None = None,
    check_finite: bool = False,
    checked: bool = False,
) -> ClassStats:
    """:func:`class_stats_from_logits`; ``relative`` is less one number per sample.

    That is for losses made of differences: with logits of size 1e4 ``rest`` is rounded to 5e-4 in
    float32, and so would be a loss that takes the target off it.
    """
    check_scale(scale)
    if not checked:
        _check_names("dot", "auto", want)
        check_logits(logits, labels, validate=validate, check_finite=check_finite)
    with without_autocast(logits):
        logits = scaled(promote(logits), scale)
        return ClassStats(*logit_stats(logits, labels, want, relative=relative))


def _check_names(similarity: str, impl: str, want: tuple[Statistic, ...]) -> None:
    check_choice("similarity", similarity, SIMILARITIES)
    check_choice("impl", impl, IMPLS)
    for name in want:
        check_choice("want", name, STATISTICS)
