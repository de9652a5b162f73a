"""``Loss``: the module around a pure per-sample function, with the options all losses share.

What is particular about a loss stands in its class: the attributes and methods of ``Loss`` are
what attach, schedules, tuning, reports and the command line ask it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Never,
    Self,
    TypeAlias,
    TypedDict,
    Unpack,
)

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_choice,
    check_classifier,
    check_labels,
    check_length,
    check_matrix,
    check_num_classes,
    check_number,
    check_same_device,
    check_sample_weight,
    check_sizes,
    check_weights,
    has_sub_centers,
    refuse_script,
    warn_user,
    whole_number,
)
from largemargin.heads.centroid_bank import exact_buffers
from largemargin.heads.head_spec import HeadSpec
from largemargin.losses.base.class_counts import check_counts, ldam_margins
from largemargin.losses.base.constructor_arguments import (
    check_call,
    constructor_repr,
    wrong_arguments,
)
from largemargin.losses.base.scale import auto_scale
from largemargin.losses.base.setting_ranges import SHARE, Dimension, Limits, Range
from largemargin.losses.base.terms import class_vector, drawn_matrix, require
from largemargin.ops.class_stats import IMPLS, ComputeOptions, Impl
from largemargin.ops.dense import dense_limit
from largemargin.ops.distributed import all_reduce_sum, world_size
from largemargin.ops.eager_gradients import cosine_logits, dot_logits, launches
from largemargin.ops.matmul import PRECISIONS, Precision, resolve_precision
from largemargin.ops.norms import promote
from largemargin.ops.row_values import RowLoss, row_values
from largemargin.ops.scheduled_values import current
from largemargin.ops.shards import is_shared
from largemargin.ops.similarity import SIMILARITIES, HeadLogits
from largemargin.tracing import made_for_inference, plain_eager, value_range, values_are_checked

if TYPE_CHECKING:
    from largemargin.losses.base.objective import Objective

Reduction: TypeAlias = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")


class LossOptions(TypedDict, total=False):
    """Keyword options of every loss; :class:`largemargin.Loss` says what they mean."""

    weight: Tensor | Sequence[float] | None
    prior: Tensor | Sequence[float] | None
    ignore_index: int | None
    label_smoothing: float
    reduction: Reduction
    sync: bool
    impl: Impl
    precision: Precision | None
    validate: bool | None
    check_finite: bool


class LossValue(NamedTuple):
    """A loss and the named terms it is the weighted sum of."""

    total: Tensor
    terms: dict[str, Tensor]

    def backward(self) -> None:
        """Of the total, for loops that call it on whatever a loss returns."""
        self.total.backward()  # type: ignore[no-untyped-call]


class Batch(NamedTuple):
    """Inputs of a loss that have been checked, and the labels in both their forms."""

    inputs: tuple[Tensor, ...]
    """Features and prototypes, or logits alone; ignored rows are 0."""
    labels: Tensor
    """(N,) classes, 0 where ignored, or (N, C) soft targets: as they were given."""
    targets: Tensor
    """The same, or (N, C) soft targets with label smoothing and class weights."""
    num_classes: int
    ignored: Tensor | None
    """(N,), which rows do not count; None where all do."""


class MarginCeiling(NamedTuple):
    """A margin of a loss, and the widest there can be."""

    name: str
    margin: float | Tensor
    widest: float


class Summand:
    """What can be added up: losses, weighted ones and objectives."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        if args or settings:  # copies are made without any, and filled in afterwards
            check_call(cls, args, settings)
        return super().__new__(cls)

    def __add__(self, other: "Summand") -> "Objective":
        from largemargin.losses.base.objective import added

        return added(self, other) if isinstance(other, Summand) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return self if other == 0 else NotImplemented  # what sum() begins with


class Loss(Summand, nn.Module):
    r"""A per-sample loss :math:`\ell(x_n, c)` with weights, targets and a reduction around it.

    Call it as ``loss(features, prototypes, labels)``; losses that only see logits also as
    ``loss(logits, labels)``. ``prototypes`` is a (C, D) tensor or a module that holds one as
    ``weight``: an ``nn.Linear``, a ``ClassHead``. Labels are (N,) integers, or (N, C) soft targets
    t, for which :math:`\ell_n = \sum_c t_{nc}\,\ell(x_n, c)`: a margin applies to every class as
    the target in turn.

    Args:
        weight: (C,) class weights. Hard labels: the mean is
            :math:`\sum w_{y_n}\ell_n / \sum w_{y_n}`; soft targets: the weights multiply the
            targets and the mean divides by N. These are torch's rules.
        prior: (C,) training samples of each class, or their shares :math:`\pi`: the loss is that of
            :math:`l_j + \log\pi_j` (logit adjustment, also beside a margin; for another tau pass
            ``counts**tau``). The head predicts without it. See :class:`LogitAdjustment`.
        ignore_index: rows with this label contribute nothing, to no value, gradient, count or
            denominator. Default -100, as in torch; None ignores nothing.
        label_smoothing: :math:`\epsilon \in [0, 1]`; targets become
            :math:`(1-\epsilon)t + \epsilon/C`.
        reduction: "mean", "sum", or "none" for the weighted (N,) values.
        sync: under torch.distributed, in training mode, sum numerator and denominator over the
            processes with gradient, so that ragged or weighted batches give exactly the mean over
            the joined batch. With equal batches and no weights DDP's averaging does that already.
        impl: how the class statistics are computed: "auto", "dense", "chunked" or "triton".
        precision: of the matrix products: "highest", "tf32", "bf16" or None.
        validate: check label values; None means in eager mode on the CPU only.
        check_finite: raise on NaN or infinity in inputs, in the value and in its gradients.

    ``forward`` also takes ``sample_weight`` (N,): the mean then divides by the weights' sum. When
    every row is ignored or the weights sum to 0, the value is 0 with zero gradients.
    """

    key: ClassVar[str] = ""
    """Its name in ``LOSSES``, in objective texts and on the command line; the class's otherwise."""

    term: ClassVar[str] = ""
    """Its name as the term of a sum; ``key`` otherwise."""

    __call__: Callable[..., Tensor]

    uses_bias: ClassVar[bool] = False
    """Whether the head's bias enters the loss."""

    needs: ClassVar[tuple[str, ...]] = ("features", "prototypes", "labels")
    """What ``forward`` takes, in order; an ``Objective`` supplies these by name."""

    takes_logits: ClassVar[bool] = False
    """Whether ``loss(logits, labels)`` is a call too."""

    reads_head_logits: ClassVar[bool] = False
    """Whether ``per_sample`` takes ``made``, the logits that a head has made of the features."""

    counts_rows: ClassVar[bool] = False
    """Whether ``per_sample`` takes ``kept``, (N,) which rows count or None: for its statistics."""

    draws: ClassVar[bool] = False
    """Whether training draws random numbers, from torch's generator of the features' device."""

    head_similarity: ClassVar[str | None] = None
    """How a classifier trained with this loss predicts; None: as its head does already."""

    refuses: ClassVar[dict[str, str]] = {}
    """Options this loss does not have, each with the reason: the docs' table is made from it."""

    defaults: ClassVar[dict[str, Any]] = {}
    """Common options whose default this loss changes."""

    is_penalty: ClassVar[bool] = False
    """Whether it shapes features but does not classify: by name it comes with a cross entropy."""

    has_target_curve: ClassVar[bool] = False
    """Whether it is a softmax over angles in which the logit of the own class alone is changed."""

    widens_margins: ClassVar[bool] = False
    """Whether it asks for a margin between the classes, which a report then need not advise."""

    gathers_classes: ClassVar[bool] = False
    """Whether it pulls samples to their class, likewise."""

    # The tables below are those of this class on top of its base classes' (``__init_subclass__``).
    limits: ClassVar[Mapping[str, Limits]] = {"scale": {"above": 0}, "label_smoothing": SHARE}
    """What hyper-parameters may become during training; others are >= 0."""

    search_space: ClassVar[Mapping[str, Dimension]] = {
        "scale": Range(4.0, 64.0),
        "strength": Range(0.01, 3.0),
    }
    """Where tuning looks for hyper-parameters."""

    not_tuned: ClassVar[Mapping[str, str]] = {
        "label_smoothing": "it is another method, and every loss has it"
    }
    """Hyper-parameters that tuning leaves alone, each with the reason."""

    fixed: ClassVar[frozenset[str]] = frozenset()
    """Numbers that say how something is computed: no schedule moves them."""

    # A module takes longest over attributes that it does not have, so all losses have these.
    named_terms: Any = None
    """A method in place of ``forward`` where the value has several terms."""

    part_weights: Any = None
    """What those are multiplied by in the total."""

    observed: Any = MappingProxyType({})
    """Numbers shown beside the terms."""

    per_sample: Callable[..., Tensor]
    """The pure function, (N,) values of ``(*inputs, targets)``; every loss defines it."""

    weight: Tensor | None
    prior: Tensor | None
    class_margins: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own, base = vars(cls), super(cls, cls)
        if "key" not in own:
            cls.key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        if "term" not in own:
            cls.term = cls.key
        if "per_sample" in own and "reads_head_logits" not in own:
            cls.reads_head_logits = False  # what it does to the features the head has not done
        if "row_loss" not in own and ("per_sample" in own or "forward" in own):
            cls.row_loss = Loss.row_loss  # type: ignore[method-assign]
        for table in ("limits", "search_space", "not_tuned"):
            setattr(cls, table, {**getattr(base, table), **own.get(table, {})})

    def __init__(
        self,
        *,
        weight: Tensor | Sequence[float] | None = None,
        prior: Tensor | Sequence[float] | None = None,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        sync: bool = False,
        impl: Impl = "auto",
        precision: Precision | None = None,
        validate: bool | None = None,
        check_finite: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            raise wrong_arguments(type(self), unknown)
        check_choice("reduction", reduction, REDUCTIONS)
        check_choice("impl", impl, IMPLS)
        if precision is not None:
            check_choice("precision", precision, PRECISIONS)
        check_number("label_smoothing", label_smoothing, at_least=0, at_most=1)
        ignore_index = whole_number("ignore_index", ignore_index)
        self._refuse("weight", weight is not None)
        self._refuse("prior", prior is not None)
        self._refuse("label_smoothing", label_smoothing > 0)
        self._refuse("ignore_index", ignore_index not in (-100, None))
        self._refuse("reduction", reduction != "mean")
        self._refuse("chunked", impl in ("chunked", "triton"))
        weights = None if weight is None else class_vector("weight", weight)
        if weights is not None:
            check_weights("weight", weights, validate)
        self.register_buffer("weight", weights)
        self._keep_prior(prior)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.sync = sync
        self.impl: Impl = impl
        self.precision: Precision | None = precision
        self.validate = validate
        self.check_finite = check_finite
        self._looks_for_zeros = True
        if check_finite:
            watch(self)

    def forward(
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        if labels is None:
            return self._of_logits(features, prototypes, bias, sample_weight)
        matrix, options = self._unpack_prototypes(prototypes, bias)
        bias, made = options.get("bias"), getattr(prototypes, "made", None)
        self._look_for_zeros(matrix)
        if made is None:
            check_classifier(features, matrix, bias, sub_centers=has_sub_centers(matrix))
        if sample_weight is None and self._has_rows(features, matrix, labels, made):
            rows = self._row_logits(features, matrix, options)
            value = self._of_rows(rows, features, matrix, labels)
            if value is not None:
                return value
        made = self._readable(made, labels)
        batch = self._prepare(
            (features, matrix), labels, matrix.shape[0], sample_weight, bias, made
        )
        if made is not None and (batch.ignored is None or not made.logits.is_cpu):
            options["made"] = made
        if self.counts_rows:
            options["kept"] = _counting(batch)
        values = self.per_sample(*batch.inputs, batch.targets, **options)
        return self._reduce(values, batch, sample_weight)

    def _of_logits(
        self,
        logits: Tensor,
        labels: Tensor | nn.Module,
        bias: Tensor | None,
        sample_weight: Tensor | None,
    ) -> Tensor:
        """The value of a call with two arguments."""
        if not self.takes_logits or not isinstance(labels, Tensor):
            raise LargeMarginError(
                f"{type(self).__name__} is called with (features, prototypes, labels), but "
                "two of them were given. Prototypes are the class vectors: the last nn.Linear "
                "of the model, an lm.ClassHead or a (C, D) tensor. lm.attach(model, loss) "
                "makes a criterion of (outputs, labels)."
            )
        if bias is not None:
            raise LargeMarginError(
                "bias was given beside logits, which contain it already. Pass (features, "
                "prototypes, labels, bias=...) or leave bias out."
            )
        check_matrix("logits", logits, "(N, C)")
        batch = self._prepare((logits,), labels, logits.shape[1], sample_weight)
        values = self.per_sample(*batch.inputs, batch.targets)
        return self._reduce(values, batch, sample_weight)

    def _prepare(
        self,
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        num_classes: int,
        sample_weight: Tensor | None = None,
        bias: Tensor | None = None,
        made: HeadLogits | None = None,
    ) -> Batch:
        """The batch with everything checked, ignored rows zeroed and labels as targets."""
        first = inputs[0]
        # What a head has multiplied already fits each other.
        weighted = self.weight is not None or sample_weight is not None
        if made is None or weighted or not _are_classes_of(first, labels):
            self._check(inputs, labels, num_classes, sample_weight, bias)
        ignored = None
        if labels.dim() == 1:
            inputs, labels, ignored = self._drop_ignored(inputs, labels, num_classes, made)
        if self.check_finite:
            check_all_finite(**self._named(inputs), bias=bias)
        if self.prior is not None:
            name = "class_counts" if "prior" in self.refuses else "prior"
            check_length(name, self.prior, num_classes, "one number per class")
        targets = labels
        if self.label_smoothing or self.weight is not None:
            targets = self._targets(labels, num_classes, inputs[0])
        return Batch(inputs, labels, targets, num_classes, ignored)

    def _look_for_zeros(self, matrix: Tensor) -> None:
        """Once: prototypes that are zero have no angle, and so no gradient of one."""
        if not (self._looks_for_zeros and torch.is_grad_enabled() and plain_eager()):
            return
        self._looks_for_zeros = False
        if not matrix.requires_grad or matrix.dim() < 2 or not values_are_checked(matrix, None):
            return
        rows = matrix.detach().flatten(0, -2)  # of sub-centers, too
        zeros = int((~rows.bool().any(1)).sum())
        if zeros and self._sees_angles(len(matrix)):
            warn_user(
                f"{zeros} of the {len(rows)} prototypes are zero, where "
                f"{type(self).__name__} has no gradient: they will never move. Draw them, "
                "torch.nn.init.normal_(prototypes), or take those of lm.ClassHead; lm.attach does "
                "so for a head of zeros."
            )

    def _sees_angles(self, num_classes: int) -> bool:
        form = None
        with suppress(LargeMarginError):  # what a head cannot be is no matter here
            form = self.head_form(num_classes)
        angles = form is not None and form.similarity.startswith("cosine")
        return angles or bool(getattr(self, "normalize", False))

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        """The loss of a row of the head's logits, where one kernel serves it; None otherwise."""
        return None

    def _has_rows(
        self, features: Tensor, matrix: Tensor, labels: Tensor, made: HeadLogits | None
    ) -> bool:
        """Whether ``row_loss`` serves this call, by logits other than those of a head."""
        if type(self).row_loss is Loss.row_loss or not self._has_usual_options():
            return False
        if not (plain_eager() and _are_plain(features, matrix) and is_hard(labels, features)):
            return False
        if made is not None and self.row_loss(made, features, matrix) is not None:
            return False
        if labels.is_cuda:
            return not self.check_finite  # of rows that count, which a kernel does not tell apart
        return all_count(value_range(labels), matrix.shape[0], self.ignore_index)

    def _row_logits(
        self, features: Tensor, matrix: Tensor, options: dict[str, Any]
    ) -> HeadLogits | None:
        """The logits that this loss sees, if cosines or plain products and not too many."""
        if self.check_finite:
            check_all_finite(features=features, prototypes=matrix, bias=options.get("bias"))
        bias, form = options.get("bias"), self._row_form(matrix.shape[0], options)
        if form is None or (bias is not None and features.is_cpu and not _is_wide(bias, matrix)):
            return None
        precision = resolve_precision(None, features, matrix)
        few = len(features) * len(matrix) <= dense_limit(features.device.type, precision)
        if few and form[0] == "cosine" and bias is None:
            return HeadLogits(cosine_logits(features, matrix, form[1], precision), *form, bias)
        if few and form == ("dot", 1.0):
            return HeadLogits(dot_logits(features, matrix, bias, precision), *form, bias)
        return None

    def _row_form(self, num_classes: int, options: dict[str, Any]) -> tuple[str, float] | None:
        """Similarity and scale of those logits; None where they are no plain names and numbers.

        None also where a setting is wrong: the long way says what.
        """
        similarity, scale = options.get("similarity", "dot"), options.get("scale", 1.0)
        try:
            if self.head_similarity == "cosine" or getattr(self, "normalize", False):
                similarity, scale = "cosine", self.scale_for(num_classes)
            plain = num_classes >= 2 and not isinstance(scale, Tensor)
            return (similarity, float(scale)) if plain else None
        except (LargeMarginError, TypeError, ValueError, OverflowError, RuntimeError):
            return None

    def _of_rows(
        self,
        made: HeadLogits | None,
        features: Tensor,
        matrix: Tensor,
        labels: Tensor,
        label_range: tuple[float, float] | None = None,
    ) -> Tensor | None:
        """The value by rows of logits, where it is one of them and all labels count."""
        loss = None if made is None else self.row_loss(made, features, matrix)
        if made is None or loss is None:
            return None
        if label_range and not all_count(label_range, len(matrix), self.ignore_index):
            return None
        vectors, ignored = (features, matrix), self.ignore_index
        return row_values(made.logits, labels, True, loss, vectors, mean=True, ignore=ignored)

    def scale_of(self, made: HeadLogits) -> float | None:
        """The scale of a loss on cosines, where the head's logits are cosines times it."""
        if made.similarity != "cosine" or made.bias is not None:
            return None
        scale: Any = self.scale
        if isinstance(scale, str):
            scale = self.scale_for(made.logits.shape[1])
        return float(scale) if scale == made.scale else None

    def is_usual(self) -> bool:
        """Whether no option asks for more than the mean of what ``row_loss`` says."""
        hooks = self._forward_hooks or self._forward_pre_hooks
        return not hooks and not self.check_finite and self._has_usual_options()

    def _has_usual_options(self) -> bool:
        own, buffers = vars(self), self._buffers
        return (
            "per_sample" not in own
            and buffers["weight"] is None
            and buffers["prior"] is None
            and not own["label_smoothing"]
            and own["reduction"] == "mean"
            and not own["sync"]
            and own["impl"] in ("auto", "dense")
            and own["precision"] is None
            and own["validate"] is None
        )

    def _readable(self, made: HeadLogits | None, labels: Tensor) -> HeadLogits | None:
        """The head's logits where they are as good as those that this loss would make."""
        if made is None or not self.reads_head_logits or labels.dim() != 1:
            return None
        if made.logits.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            return None
        asked = self.label_smoothing or self.precision is not None or self.check_finite
        relative = made.similarity == "euclidean"  # as those of a loss are
        return None if asked or relative or self.impl not in ("auto", "dense") else made

    def _check(
        self,
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        num_classes: int,
        sample_weight: Tensor | None,
        bias: Tensor | None = None,
    ) -> None:
        """Labels, devices and sample weights; values of labels are checked where some are ignored.

        Features and prototypes were checked against each other where they came in.
        """
        soft = isinstance(labels, Tensor) and labels.dim() == 2
        self._refuse("soft_targets", soft)
        named = self._named(inputs)
        check_same_device(
            **named,
            labels=labels,
            bias=bias,
            sample_weight=sample_weight,
            weight=self.weight,
            prior=self.prior,
        )
        first = next(iter(named))
        if len(inputs) == 1:
            check_matrix(first, inputs[0], "(N, C)" if first == "logits" else "(N, D)")
        check_num_classes(num_classes)
        validate = self.validate if soft else False
        check_labels(labels, inputs[0].shape[0], num_classes, of=first, validate=validate)
        if sample_weight is not None:
            self._refuse("sample_weight", True)
            check_sample_weight(sample_weight, inputs[0].shape[0], self.validate)

    def _named(self, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The inputs under the names that messages call them by."""
        alone = "logits" if self.takes_logits or "logits" in self.needs else "features"
        names = ("features", "prototypes") if len(inputs) == 2 else (alone,)
        return dict(zip(names, inputs, strict=True))

    def _unpack_prototypes(
        self, prototypes: Tensor | nn.Module, bias: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The matrix inside a prototype module, and what its logits look like."""
        matrix = prototypes if isinstance(prototypes, Tensor) else drawn_matrix(prototypes)
        if self.takes_logits:
            return matrix, self._logit_options(prototypes, bias)
        if bias is not None:
            raise LargeMarginError(
                f"{type(self).__name__} has no bias: its logits are similarities of features "
                "and prototypes alone. Leave bias out."
            )
        return matrix, {}

    def _logit_options(self, prototypes: Tensor | nn.Module, bias: Tensor | None) -> dict[str, Any]:
        """What logits look like: as a prototype module says, and above it this loss."""
        options: dict[str, Any] = {"bias": bias}
        if not isinstance(prototypes, Tensor):
            for name in ("similarity", "scale"):
                if hasattr(prototypes, name):
                    options[name] = getattr(prototypes, name)
            if bias is None:
                options["bias"] = getattr(prototypes, "bias", None)
            if "similarity" in options:
                check_choice("similarity", options["similarity"], SIMILARITIES)
        own = {name: current(self, name) for name in ("similarity", "scale")}
        return options | {name: value for name, value in own.items() if value is not None}

    def _drop_ignored(
        self,
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        num_classes: int,
        made: HeadLogits | None,
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """Zero the ignored rows, so that not even a NaN in them reaches a gradient.

        The labels that count must be classes. Where they are not read, ignored rows of logits that
        a head has made get the gradient 0, as those of any layer do.
        """
        labels, index = labels.long(), self.ignore_index
        if labels.is_cpu and plain_eager():
            held = value_range(labels)
            if all_count(held, num_classes, index):
                return inputs, labels, None
            index = index if index is not None and held[0] <= index <= held[1] else None
        ignored = None
        if index is not None:
            ignored = labels == index
            if made is not None and not labels.is_cpu:
                return inputs, labels, ignored
            inputs = (inputs[0].masked_fill(ignored[:, None], 0), *inputs[1:])
            labels = labels.masked_fill(ignored, 0)
        check_labels(labels, labels.shape[0], num_classes, validate=self.validate)
        return inputs, labels, ignored

    def _check_class_weights(self, weight: Tensor, num_classes: int) -> None:
        check_length("weight", weight, num_classes, "one number per class")
        check_weights("weight", weight, self.validate)

    def _targets(self, labels: Tensor, num_classes: int, like: Tensor) -> Tensor:
        """Hard labels where they suffice, otherwise (N, C) smoothed, class-weighted targets."""
        if self.weight is not None:
            self._check_class_weights(self.weight, num_classes)
        soft = labels.dim() == 2
        if not self.label_smoothing and not (soft and self.weight is not None):
            return labels
        if not soft:
            index = labels.long().clamp(0, num_classes - 1)[:, None]
            outside = (labels < 0) | (labels >= num_classes)
            hot = promote(like[:0]).new_zeros(labels.shape[0], num_classes)
            labels = hot.scatter(1, index, 1.0).masked_fill(outside[:, None], torch.nan)
        targets = (1 - self.label_smoothing) * labels + self.label_smoothing / num_classes
        return targets if self.weight is None else targets * self.weight

    def _reduce(self, values: Tensor, batch: Batch, sample_weight: Tensor | None) -> Tensor:
        """Weigh the (N,) values and add them up, by the rules of :class:`Loss`."""
        ignored, synced = batch.ignored, self._synced
        values, share = self._weigh(values, batch, sample_weight)
        as_they_are = share is None and ignored is None and not synced
        if as_they_are and self.reduction == "mean" and values.shape[0]:
            return values.mean()
        if ignored is not None:
            values = values.masked_fill(ignored, 0)
        return values if self.reduction == "none" else self._total(values, share, ignored, synced)

    def _weigh(
        self, values: Tensor, batch: Batch, sample_weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Values times their weights, and those weights; None where there are none."""
        share: Tensor | None = None
        if self.weight is not None and batch.labels.dim() == 1:
            index = batch.labels.long().clamp(0, batch.num_classes - 1)
            share = self.weight.to(values.dtype)[index]
            values = values if self.label_smoothing else values * share
        if sample_weight is not None:
            values = values * sample_weight.to(values.dtype)
            share = sample_weight.to(values.dtype) * (1 if share is None else share)
        return values, share

    @property
    def _synced(self) -> bool:
        return self.sync and self.training and world_size() > 1

    def _total(
        self, values: Tensor, share: Tensor | None, ignored: Tensor | None, synced: bool
    ) -> Tensor:
        """The sum of weighted values, or their mean: divided by the weights' sum, or the count."""
        total = values.sum()
        if synced:
            total = all_reduce_sum(total)
        if self.reduction == "sum":
            return total
        if share is not None:
            count = (share if ignored is None else share.masked_fill(ignored, 0)).sum()
        elif ignored is not None:
            count = (~ignored).sum()
        else:
            count = total.new_tensor(float(values.shape[0]))
        if synced:
            count = all_reduce_sum(count.to(total.dtype))
        if share is None:
            return total / count.clamp_min(1)
        nothing = count == 0
        return (total / torch.where(nothing, 1, count)).masked_fill(nothing, 0)

    def _keep(self, name: str, value: float | Tensor | Sequence[float] | None) -> None:
        """Store a hyper-parameter; a tensor becomes a buffer, so that it moves and is saved."""
        if not isinstance(value, Tensor | int | float | None):
            # A list or an array, one number per class.
            value = class_vector(name, value).to(torch.get_default_dtype())
            check_sizes(name, value)
        if isinstance(value, Tensor):
            self.register_buffer(name, value.detach().clone())
        else:
            setattr(self, name, value)

    def _keep_prior(self, prior: Tensor | Sequence[float] | None) -> None:
        dtype = torch.get_default_dtype()
        counts = None if prior is None else check_counts(prior, "prior").to(dtype, copy=True)
        self.register_buffer("prior", counts)

    def _count_margins(
        self, class_counts: Sequence[int] | Tensor | None, largest: float | Tensor
    ) -> None:
        """Margins per class from how many samples each has, or none."""
        self.class_counts: list[int] | None = None
        self._largest_margin, margins = largest, None
        if class_counts is not None:
            margins = ldam_margins(class_counts, max_margin=largest)
            self.class_counts = torch.as_tensor(class_counts).tolist()
        self.register_buffer("class_margins", margins)

    def _set_largest_margin(self, largest: float | Tensor) -> None:
        """Margins per class again, for another largest one."""
        self._largest_margin = largest
        shares = ldam_margins(self.class_counts or [], max_margin=1.0, dtype=torch.float64)
        self.class_margins = (largest * shares).to(require(self.class_margins))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Loss":
        with exact_buffers(self):  # class weights and margins too
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if getattr(self, "class_margins", None) is not None and self.class_counts is not None:
            # Made again rather than converted: float64 gets all its digits.
            self._set_largest_margin(self._largest_margin)
        return self

    def head_form(self, num_classes: int) -> HeadSpec | None:
        """How a head must make its logits to predict as this loss trains; None: any way."""
        similarity = self.head_similarity or getattr(self, "similarity", None)
        if similarity is None:
            return None
        bias = self.takes_logits and similarity == "dot"
        return HeadSpec(similarity, self.scale_for(num_classes), bias)

    def scale_for(self, num_classes: int) -> float:
        """The scale as a number: ``"auto"`` resolved for so many classes, 1 where there is none."""
        scale: float | str | None = getattr(self, "scale", None)
        automatic = isinstance(scale, str)
        return float(auto_scale(num_classes, self.aligned_cosine()) if automatic else scale or 1)

    def setting_limits(self, name: str, num_classes: int | None = None) -> Limits:
        """What a hyper-parameter may become during training."""
        return self.limits.get(name, {"at_least": 0})

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        """Its margins, and how wide they can be where no C prototypes are all wider apart."""
        return []

    def usual_schedule(self, term: str, total_steps: int) -> Sequence[Any]:
        """The schedules (``lm.schedules``) that ``schedule="preset"`` means for this term."""
        return ()

    def aligned_cosine(self) -> float | Tensor:
        """What the margin leaves of the cosine of a feature on its prototype: psi(0)."""
        return 1.0

    def log_prior(self) -> Tensor:
        """What a prior adds to the logits, (C,)."""
        prior = require(self.prior)
        return torch.log(prior / prior.sum())

    @property
    def how(self) -> ComputeOptions:
        """The options a pure function passes on to the operator; the module checks the inputs."""
        prior: ComputeOptions = {} if self.prior is None else {"log_prior": self.log_prior()}
        return {
            **prior,
            "impl": self.impl,
            "precision": self.precision,
            "validate": self.validate,
            "check_finite": self.check_finite,
            "checked": True,
        }

    def _refuse(self, option: str, asked: bool) -> None:
        if asked and option in self.refuses:
            name = type(self).__name__
            raise LargeMarginError(f"{name} does not support {option}: {self.refuses[option]}")

    def __mul__(self, weight: float) -> "Weighted":
        return Weighted(self, weight)

    __rmul__ = __mul__
    __prepare_scriptable__ = refuse_script

    def __repr__(self) -> str:
        return constructor_repr(self, Loss)


class LogitLoss(Loss):
    """A loss that only sees logits: called with (logits, labels) or (features, prototypes, labels).

    Args:
        similarity, scale: how logits are made from features; None takes them from the prototype
            module if it has them (a ``ClassHead``), otherwise dot products with scale 1.
        options: those of every :class:`Loss`.
    """

    takes_logits: ClassVar[bool] = True
    uses_bias: ClassVar[bool] = True

    def __init__(
        self,
        *,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        if similarity is not None:
            check_choice("similarity", similarity, SIMILARITIES)
        self.similarity = similarity
        self.scale = scale

    def has_form(self, made: HeadLogits) -> bool:
        """Whether the head's logits are those that this loss sees."""
        return (
            self.similarity in (None, made.similarity)
            and self.scale in (None, made.scale)
            and made.similarity != "euclidean"  # those of a loss are relative
        )


class Weighted(Summand, nn.Module):
    """``weight * loss``, as an ``Objective`` takes it."""

    def __init__(self, loss: "Loss", weight: float) -> None:
        super().__init__()
        check_number("the weight of a loss", weight)
        self.loss = loss
        self.weight = weight

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """The loss times its weight, called as the loss is."""
        value: Tensor = self.loss(*inputs, **options)
        return self.weight * value

    def __mul__(self, factor: float) -> "Weighted":
        check_number("the weight of a loss", factor)
        return Weighted(self.loss, factor * self.weight)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{self.weight!r} * {self.loss!r}"


SCANNED = 8192
"""Labels up to which every row of a kernel counts for itself how many are ignored."""


def is_hard(labels: Tensor, rows: Tensor) -> bool:
    """Whether labels are one class for each row, as kernels take them."""
    return (
        isinstance(labels, Tensor)
        and labels.dtype is torch.int64
        and labels.layout is torch.strided
        and labels.shape == rows.shape[:1]
        and labels.device == rows.device
        and 0 < labels.shape[0] <= SCANNED
        and not labels.is_inference()
    )


def all_count(labels: tuple[float, float], num_classes: int, ignored: int | None) -> bool:
    """Whether labels of this range are classes, and none of them is the one to ignore."""
    low, high = labels
    return low >= 0 and high < num_classes and (ignored is None or not low <= ignored <= high)


def _is_wide(features: Tensor, matrix: Tensor) -> bool:
    """Whether products of these need no other dtype."""
    wide = matrix.dtype in (torch.float32, torch.float64)
    return wide and features.dtype == matrix.dtype and features.device == matrix.device


def _are_plain(features: Tensor, matrix: Tensor) -> bool:
    """Whether these are plain matrices that logits are made of as they are, or by kernels."""
    if type(matrix) not in (Tensor, nn.Parameter) or is_shared(matrix):
        return False
    if features.dim() != 2 or matrix.dim() != 2 or features.is_inference() or matrix.is_inference():
        return False
    return _is_wide(features, matrix) if features.is_cpu else launches(features, matrix)


def _are_classes_of(rows: Tensor, labels: Tensor) -> bool:
    """Whether labels are of the usual kind and beside the rows."""
    usual = labels.dtype is torch.int64 and labels.shape == rows.shape[:1]
    return usual and labels.device == rows.device and not made_for_inference(rows, labels)


def _counting(batch: Batch) -> Tensor | None:
    """Which rows are of a class and not ignored; None for soft targets, where all are."""
    labels = batch.labels
    if labels.dim() == 2:
        return None
    inside = (labels >= 0) & (labels < batch.num_classes)
    return inside if batch.ignored is None else inside & ~batch.ignored


WATCHED = ("features", "prototypes", "noisy", "logits", "bias")
"""Arguments that gradients go to. Inputs and layers belong to a network: it has its own graph."""


def watch(loss: nn.Module) -> None:
    """From now on this loss raises where its value or a gradient it sends back is not finite.

    Finite inputs may be too large for their dtype: a product of two float32 numbers of 1e20 is
    infinite. Looks at values after every call, which waits for the device; not in compiled code.
    """
    loss.register_forward_pre_hook(_watched, with_kwargs=True)
    loss.register_forward_hook(_checked, with_kwargs=True)


def _argument_names(loss: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, ...]:
    """What the arguments of this call are called."""
    by_name = sum(name in options for name in loss.needs)
    alone = loss.takes_logits and len(given) + by_name < len(loss.needs)
    return ("logits", "labels") if alone else tuple(loss.needs)


def _watched(
    loss: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling() or "logits" in loss.needs:
        return None
    names = _argument_names(loss, given, options)
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
                f"though the loss is. {_numbers_end(given)}"
            )

    view.register_hook(look)  # type: ignore[no-untyped-call]
    return view


def _checked(loss: Any, given: tuple[Any, ...], options: dict[str, Any], value: Tensor) -> None:
    if torch.compiler.is_compiling() or bool(torch.isfinite(value).all()):
        return
    named = {**dict(zip(_argument_names(loss, given, options), given, strict=False)), **options}
    sizes = ", ".join(
        f"{name} {float(each.detach().abs().max()):.3g}"
        for name, each in named.items()
        if name in WATCHED and isinstance(each, Tensor) and each.numel()
    )
    raise LargeMarginError(
        f"{type(loss).__name__} is not finite, though its inputs are: the largest entries are "
        f"{sizes or 'in the parameters'}. {_numbers_end(value)}"
    )


def _numbers_end(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    wider = "float64" if tensor.dtype in (torch.float32, torch.float64) else "float32"
    return (
        f"Numbers of {kind} end at {torch.finfo(tensor.dtype).max:.3g}. Normalise or scale the "
        f"features, lower the learning rate, or compute in {wider}."
    )
