"""Stability training: features must not move under noise (Zheng et al. 2016; ROB 7.1)."""

from typing import ClassVar, Unpack

from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_matrix,
    check_number,
    check_same_device,
    check_sample_weight,
)
from largemargin.losses.base.loss import Batch, Loss, LossOptions
from largemargin.ops.norms import promote, safe_norm
from largemargin.shapes import Features, PerSample

_NO_LABELS = "it compares two feature sets and sees no labels."


class Stability(Loss):
    r"""Stability term (NGR-STAB), :math:`\|f(x_n) - f(x_n + \varepsilon_n)\|`; gradient to both.

    Call it with ``(features, noisy)``: features (N, D) of clean inputs, and of the noised inputs,
    row by row.

    Args:
        strength: a; ROB prints none, the original uses 0.01; default 1 (O8).
        squared: square the norm; default False (ROB).
        options: those of every :class:`Loss` that needs no labels.

    Departures: none; an identical pair has gradient 0.

    Example:
        >>> Stability()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]))
        tensor(5.)
    """

    key: ClassVar[str] = "stability"
    is_penalty: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("features", "noisy")
    refuses: ClassVar[dict[str, str]] = {
        "weight": _NO_LABELS,
        "prior": "it has no logits.",
        "ignore_index": _NO_LABELS,
        "soft_targets": _NO_LABELS,
        "label_smoothing": _NO_LABELS,
        "class_margin": _NO_LABELS,
        "chunked": "it has no logits.",
    }

    def __init__(
        self, *, strength: float = 1.0, squared: bool = False, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        check_number("strength", strength, at_least=0)
        self.strength = strength
        self.squared = squared

    def forward(  # type: ignore[override]
        self, features: Tensor, noisy: Tensor, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        values = self.strength * stability(features, noisy, squared=self.squared)
        check_same_device(features=features, sample_weight=sample_weight)
        if self.check_finite:
            check_all_finite(features=features, noisy=noisy)
        check_sample_weight(sample_weight, values.shape[0], self.validate)
        everyone = values.new_zeros(values.shape[0]).long()
        batch = Batch((features,), everyone, everyone, 1, None)
        return self._reduce(values, batch, sample_weight)


def stability(features: Features, noisy: Features, *, squared: bool = False) -> PerSample:
    """Distance of clean and noisy features (N, D), row by row, (N,); see :class:`Stability`."""
    check_noisy(features, noisy)
    difference = promote(features) - promote(noisy)
    return difference.square().sum(1) if squared else safe_norm(difference)


def check_noisy(features: Tensor, noisy: Tensor) -> None:
    """Clean and noisy features must be matrices of one shape on one device."""
    check_matrix("features", features, "(N, D)")
    check_matrix("noisy", noisy, "(N, D)")
    check_same_device(features=features, noisy=noisy)
    if noisy.shape != features.shape:
        raise LargeMarginError(
            f"noisy must hold the features of the noised inputs, shape {tuple(features.shape)} "
            f"like features, but its shape is {tuple(noisy.shape)}."
        )
