"""GM-Softmax: the family with a provable optimum at the simplex (LTLM)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_length
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.scale import Scale, check_scale_setting
from largemargin.losses.base.setting_ranges import Limits
from largemargin.losses.base.terms import check_setting, over_targets, scaled_cosines
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes
from largemargin.tracing import values_are_checked


class GMSoftmax(Loss):
    r"""Generalised margin softmax (ZHO-GM).

    .. math:: \ell_i = -\log\frac{e^{s(\alpha_{i1}\cos\theta_y + \beta_{i1})}}
        {e^{s(\alpha_{i2}\cos\theta_y + \beta_{i2})} + \sum_{j\ne y} e^{s\cos\theta_j}}

    alpha = 1, beta = -m on both lines is CosFace. The loss can be negative when the two lines
    differ. For alpha1 >= 1/2 and alpha2 <= alpha1 its minimum is the simplex (LTLM Thm 5).

    Args:
        alpha1, beta1: numerator, numbers or one per sample (N,). Defaults 1 and 0.
        alpha2, beta2: denominator, likewise. The defaults together are NormFace.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. It multiplies beta too (erratum Z5).
        check: enforce alpha1 >= 1/2 and alpha2 <= alpha1, the conditions of the theorem.
        options: those of every :class:`Loss`.

    Example:
        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> GMSoftmax(beta1=-1.0, beta2=-1.0, scale=8.0)(W[:1], W, torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "gm_softmax"
    widens_margins: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(
        ("alpha1", "beta1", "alpha2", "beta2"), Limits()
    )
    not_tuned: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("alpha1", "alpha2"), "alpha1 and alpha2 are bound to each other"),
        **dict.fromkeys(("beta1", "beta2"), "beta1 and beta2 are bound to each other"),
    }
    head_similarity: ClassVar[str | None] = "cosine"

    refuses: ClassVar[dict[str, str]] = {
        "class_margin": "its margins are per sample: alpha and beta of shape (N,)."
    }
    alpha1: float | Tensor
    beta1: float | Tensor
    alpha2: float | Tensor
    beta2: float | Tensor

    def __init__(
        self,
        *,
        alpha1: float | Tensor = 1.0,
        beta1: float | Tensor = 0.0,
        alpha2: float | Tensor = 1.0,
        beta2: float | Tensor = 0.0,
        scale: Scale = "auto",
        check: bool = True,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        for name, value in (("alpha1", alpha1), ("alpha2", alpha2)):
            check_setting(name, value)
        if check:
            _check_theorem(alpha1, alpha2)
        self._keep("alpha1", alpha1)
        self._keep("beta1", beta1)
        self._keep("alpha2", alpha2)
        self._keep("beta2", beta2)
        check_scale_setting(scale)
        self.scale = scale
        self.check = check

    def aligned_cosine(self) -> float | Tensor:
        return _aligned(self.alpha2, self.beta2)

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return gm_softmax(
            *inputs,
            alpha1=current(self, "alpha1"),
            beta1=current(self, "beta1"),
            alpha2=current(self, "alpha2"),
            beta2=current(self, "beta2"),
            scale=current(self, "scale"),
            check=self.check,
            **self.how,
        )


def gm_softmax(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    alpha1: float | Tensor = 1.0,
    beta1: float | Tensor = 0.0,
    alpha2: float | Tensor = 1.0,
    beta2: float | Tensor = 0.0,
    scale: Scale = "auto",
    check: bool = True,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """GM-Softmax per sample; :class:`GMSoftmax` has equation, arguments and an example."""
    factors = {"alpha1": alpha1, "beta1": beta1, "alpha2": alpha2, "beta2": beta2}
    for name, value in factors.items():
        check_setting(name, value)
    if check:
        _check_theorem(alpha1, alpha2)
    s, target, rest = scaled_cosines(
        features, prototypes, labels, scale, how, _aligned, alpha2, beta2
    )
    numerator = _rows("alpha1", alpha1, labels) * target + s * _rows("beta1", beta1, labels)
    denominator = _rows("alpha2", alpha2, labels) * target + s * _rows("beta2", beta2, labels)
    return over_targets(torch.logaddexp(rest, denominator) - numerator, labels)


# Not inside gm_softmax: dynamo of torch 2.9 cannot trace a function whose annotation has a union.
def _rows(name: str, value: float | Tensor, labels: Tensor) -> Any:
    """A number, or one per sample as the targets want it."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    check_length(name, value, labels.shape[0], "one number per sample")
    return value if labels.dim() == 1 else value[:, None]


def _aligned(alpha2: float | Tensor, beta2: float | Tensor) -> float | Tensor:
    return alpha2 + beta2


def _check_theorem(alpha1: float | Tensor, alpha2: float | Tensor) -> None:
    first, second = torch.as_tensor(alpha1), torch.as_tensor(alpha2)
    if not (values_are_checked(first, None) and values_are_checked(second, None)):
        return
    if bool((first < 0.5).any()) or bool((second > first).any()):
        raise LargeMarginError(
            f"GM-Softmax needs alpha1 >= 1/2 and alpha2 <= alpha1 for its optimum to be the "
            f"simplex (LTLM Theorem 5), but got alpha1 = {alpha1} and alpha2 = {alpha2}. Pass "
            "check=False to compute the loss all the same."
        )
