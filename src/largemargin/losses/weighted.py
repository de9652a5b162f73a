"""``weight * loss``, as an ``Objective`` takes it."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from largemargin.errors import check_number

if TYPE_CHECKING:
    from largemargin.losses.loss import Loss


class Weighted(nn.Module):
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

    def __repr__(self) -> str:
        return f"{self.weight!r} * {self.loss!r}"
