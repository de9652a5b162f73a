"""Losses on linearised margins in input space (ODN)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import LargeMarginError, check_logits, check_matrix, check_number
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range
from largemargin.losses.base.terms import require
from largemargin.ops.class_stats import class_stats_from_logits
from largemargin.ops.norms import promote, safe_norm
from largemargin.shapes import Labels, Logits, PerSample
from largemargin.tracing import exporting

_ONE_PASS = "each class as the target would take a backward pass of its own."
REFUSES = {
    "prior": "the margin is a distance to where the classifier that predicts changes its mind.",
    "soft_targets": _ONE_PASS,
    "label_smoothing": _ONE_PASS,
    "class_margin": "the margin is a distance in input space, one for all classes.",
    "chunked": "it differentiates given logits.",
    "compile": "it differentiates inside its forward pass; compile the model, not the loss.",
}


class InputMargins(NamedTuple):
    """Linearised margins (N,) and the rival class (N,) each is measured against."""

    margins: Tensor
    rival_index: Tensor


class _InputMarginLoss(Loss):
    needs: ClassVar[tuple[str, ...]] = ("logits", "labels", "inputs")
    refuses: ClassVar[dict[str, str]] = REFUSES
    fixed: ClassVar[frozenset[str]] = frozenset({"eps"})

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        differentiable_norm: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        self.eps = eps
        self.differentiable_norm = differentiable_norm

    def forward(  # type: ignore[override]
        self, logits: Tensor, labels: Tensor, inputs: Tensor, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        check_matrix("logits", logits, "(N, C)")
        batch = self._prepare((logits,), labels, logits.shape[1], sample_weight)
        margins = linearized_margins(
            batch.inputs[0],
            batch.targets,
            inputs,
            eps=self.eps,
            differentiable_norm=self.differentiable_norm,
            validate=self.validate,
        ).margins
        values = self.per_sample(margins)
        return self._reduce(values, batch.labels, batch.num_classes, batch.ignored, sample_weight)


class MarginDistribution(_InputMarginLoss):
    r"""Optimal margin distribution loss (ODN-1; ODN eq. 1): margins belong in [r-theta, r+theta].

    .. math:: \ell(\gamma) = \begin{cases}
        (r-\theta-\gamma)/(r-\theta) & \gamma \le r-\theta\\
        0 & r-\theta < \gamma \le r+\theta\\
        \mu(\gamma-r-\theta)^2/(r+\theta)^2 & \gamma > r+\theta\end{cases}

    gamma are the :func:`linearized_margins`; call it ``(logits, labels, inputs)``.

    Args:
        r, theta, mu: (1.2, 0.7, 0.1) without batch norm (default), (30, 0.7, 0.1) with it (ODN
            Table 1). r > theta >= 0, mu in (0, 1].
        squared: square the first branch (appendix A of ODN).
        eps, differentiable_norm: of :func:`linearized_margins`.
        options: those of every :class:`Loss`.

    Departures: erratum D4, the upper branch is scaled by (r+theta)^2 as in eq. 1.

    Example:
        The input is on the boundary, its margin is 0:

        >>> x = torch.tensor([[1.0, 1.0]], requires_grad=True)
        >>> MarginDistribution()(x * 1, torch.tensor([0]), x).item()
        1.0
    """

    key: ClassVar[str] = "margin_distribution"
    limits: ClassVar[Mapping[str, Limits]] = {"mu": {"above": 0, "at_most": 1}}
    # r must stay above theta.
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "r": Range(0.8, 30.0),
        "theta": Range(0.1, 0.79, log=False),
        "mu": Range(0.01, 1.0),
    }

    def __init__(
        self,
        *,
        r: float = 1.2,
        theta: float = 0.7,
        mu: float = 0.1,
        squared: bool = False,
        eps: float = 1e-6,
        differentiable_norm: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(eps=eps, differentiable_norm=differentiable_norm, **options)
        check_distribution(r, theta, mu)
        self.r = r
        self.theta = theta
        self.mu = mu
        self.squared = squared

    def per_sample(self, margins: Tensor) -> Tensor:
        return margin_distribution(
            margins, r=self.r, theta=self.theta, mu=self.mu, squared=self.squared
        )


def margin_distribution(
    margins: PerSample,
    *,
    r: float = 1.2,
    theta: float = 0.7,
    mu: float = 0.1,
    squared: bool = False,
) -> PerSample:
    """Loss of given margins (N,); :class:`MarginDistribution` has equation, arguments and example.

    The margins are usually :func:`linearized_margins`. Returns (N,).
    """
    check_distribution(r, theta, mu)
    margins = promote(margins)
    below = F.relu(r - theta - margins) / (r - theta)
    above = F.relu(margins - r - theta) / (r + theta)
    return (below.square() if squared else below) + mu * above.square()


def check_distribution(r: float, theta: float, mu: float) -> None:
    check_number("theta", theta, at_least=0)
    check_number(
        "r", r, above=theta, hint="r is the middle of the margins and theta half their width."
    )
    check_number("mu", mu, above=0, at_most=1)


class MarginHinge(_InputMarginLoss):
    r"""Hinge on margins (ODN-HINGE), :math:`[\gamma_0 - \gamma]_+`.

    gamma are the :func:`linearized_margins`; call it ``(logits, labels, inputs)``.

    Args:
        threshold: gamma_0. The paper tunes it on a validation split; default 1 (O14).
        eps, differentiable_norm: of :func:`linearized_margins`.
        options: those of every :class:`Loss`.

    Departure: erratum D1; the printed sign would drive margins below the threshold.

    Example:
        >>> x = torch.tensor([[1.0, 1.0]], requires_grad=True)
        >>> MarginHinge(threshold=0.25)(x * 1, torch.tensor([0]), x).item()
        0.25
    """

    key: ClassVar[str] = "margin_hinge"
    limits: ClassVar[Mapping[str, Limits]] = {"threshold": {}}
    search_space: ClassVar[Mapping[str, Dimension]] = {"threshold": Range(0.1, 10.0)}

    def __init__(
        self,
        *,
        threshold: float = 1.0,
        eps: float = 1e-6,
        differentiable_norm: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(eps=eps, differentiable_norm=differentiable_norm, **options)
        check_number("threshold", threshold)
        self.threshold = threshold

    def per_sample(self, margins: Tensor) -> Tensor:
        return margin_hinge(margins, threshold=self.threshold)


def margin_hinge(margins: PerSample, *, threshold: float = 1.0) -> PerSample:
    """Hinge on given margins (N,); :class:`MarginHinge` has equation, arguments and example.

    The margins are usually :func:`linearized_margins`. Returns (N,).
    """
    check_number("threshold", threshold)
    return F.relu(threshold - promote(margins))


def linearized_margins(
    logits: Logits,
    labels: Labels,
    inputs: Tensor,
    *,
    eps: float = 1e-6,
    differentiable_norm: bool = False,
    validate: bool | None = None,
) -> InputMargins:
    r"""Linearised input margin (ODN-G; ODN section 2), one extra backward pass.

    .. math:: \gamma = \frac{f_y - f_{c^*}}{\|\nabla_x f_y - \nabla_x f_{c^*}\|_2 + \epsilon},
              \qquad c^* = \arg\max_{i\ne y} f_i

    The rival is chosen by logit. The exact signed distance for a linear model. Samples must not
    influence each other's logits: use batch norm in evaluation mode, or accept the approximation.

    Args:
        logits: (N, C), computed from ``inputs`` with gradients enabled.
        labels: (N,).
        inputs: (N, ...), with ``requires_grad``.
        eps: default 1e-6 (O14; the paper says "small"). A dead network gives gap/eps.
        differentiable_norm: differentiate the denominator too (second order); default False, a
            constant in backpropagation (ODN 4.1).

    Departures: erratum D5 (norm bars).

    Example:
        >>> x = torch.tensor([[3.0, 1.0]], requires_grad=True)
        >>> linearized_margins(x * 1, torch.tensor([0]), x, eps=0.0).margins
        tensor([1.4142], grad_fn=<DivBackward0>)
    """
    check_number("eps", eps, at_least=0)
    check_logits(logits, labels, validate=validate)
    check_graph(logits, [inputs], "inputs")
    stats = class_stats_from_logits(logits, labels, want=("target", "rival"), validate=validate)
    gap = require(stats.target) - require(stats.rival)
    (gradient,) = torch.autograd.grad(
        gap.sum(), inputs, retain_graph=True, create_graph=differentiable_norm, allow_unused=True
    )
    if gradient is None:
        raise LargeMarginError(
            "the logits do not depend on inputs. Pass the tensor that went into the model, after "
            "inputs.requires_grad_()."
        )
    norm = safe_norm(gradient.flatten(1))
    return InputMargins(gap / (norm + eps), require(stats.rival_index))


def check_graph(logits: Tensor, sources: Sequence[Tensor], name: str) -> None:
    if exporting():
        raise LargeMarginError(
            "a loss on gradients cannot be exported: torch.export records no backward pass. Export "
            "the model, and leave the loss where it is trained."
        )
    for source in sources:
        if not source.requires_grad or not logits.requires_grad:
            raise LargeMarginError(
                f"{name} must require gradients and the logits be computed from them with "
                "gradients enabled. Call inputs.requires_grad_() before model(inputs), outside "
                "torch.no_grad()."
            )
