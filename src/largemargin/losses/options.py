"""The options that every loss has, and what a sum of losses returns."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict

from torch import Tensor

from largemargin.ops.class_stats import Impl
from largemargin.ops.product import Precision

Reduction: TypeAlias = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")


class LossOptions(TypedDict, total=False):
    """Keyword options of every loss; :class:`largemargin.Loss` says what they mean."""

    weight: Tensor | Sequence[float] | None
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
