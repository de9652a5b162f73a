"""``weight * loss`` and ``loss + loss``: what an ``Objective`` is made of."""

from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from largemargin.errors import check_number
from largemargin.losses.arguments import check_call

if TYPE_CHECKING:
    from largemargin.losses.loss import Loss
    from largemargin.losses.objective import Objective


class Summand:
    """What can be added up: losses, weighted ones and objectives."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        if args or settings:  # copies are made without any, and filled in afterwards
            check_call(cls, args, settings)
        return super().__new__(cls)

    def __add__(self, other: "Summand") -> "Objective":
        from largemargin.losses.objective import added

        return added(self, other) if isinstance(other, Summand) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return self if other == 0 else NotImplemented  # what sum() begins with


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
