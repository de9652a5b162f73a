"""Losses on linearised margins in input space (ODN)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_count,
    check_logits,
    check_matrix,
    check_number,
)
from largemargin.heads.centroid_bank import Replay, recomputing
from largemargin.losses.base.loss import Batch, Loss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range
from largemargin.losses.base.terms import require
from largemargin.losses.cross_entropy import cross_entropy
from largemargin.ops.class_stats import class_stats_from_logits
from largemargin.ops.distributed import gather_ragged, world_size
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


def lasting_eps(reach: float) -> float:
    """A tenth of the slope of a gap of one over ``reach``: even a dead input has a slope then."""
    return 0.1 / reach if reach > 0 else 0.1


class _InputMarginLoss(Loss):
    needs: ClassVar[tuple[str, ...]] = ("logits", "labels", "inputs")
    refuses: ClassVar[dict[str, str]] = REFUSES
    fixed: ClassVar[frozenset[str]] = frozenset({"eps"})

    def __init__(
        self,
        *,
        eps: float | None = None,
        differentiable_norm: bool = False,
        per_sample_gradients: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        if eps is not None:
            check_number("eps", eps, at_least=0)
        self.eps = eps
        self.differentiable_norm = differentiable_norm
        self.per_sample_gradients = per_sample_gradients

    def forward(  # type: ignore[override]
        self, logits: Tensor, labels: Tensor, inputs: Tensor, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        check_matrix("logits", logits, "(N, C)")
        batch = self._prepare((logits,), labels, logits.shape[1], sample_weight)
        gap, norm, _ = _gap_and_slope(
            batch.inputs[0],
            batch.targets,
            inputs,
            self.differentiable_norm,
            self.per_sample_gradients,
            self.validate,
        )
        values = self._values(gap, norm, batch)
        return self._reduce(values, batch, sample_weight)

    def _values(self, gap: Tensor, norm: Tensor, batch: Batch) -> Tensor:
        values: Tensor = self.per_sample(gap / (norm + self._eps))
        return values

    @property
    def _eps(self) -> float:
        raise NotImplementedError


Branch: TypeAlias = Literal["below", "inside", "above"]
BRANCHES: tuple[Branch, ...] = ("below", "inside", "above")
SHARE_OF_R = 0.7 / 1.2
"""theta / r as printed for networks without batch norm."""


class MarginDistribution(_InputMarginLoss):
    r"""Optimal margin distribution loss (ODN-1; ODN eq. 1): margins belong in [r-theta, r+theta].

    .. math:: \ell(\gamma) = \begin{cases}
        (r-\theta-\gamma)/(r-\theta) & \gamma \le r-\theta\\
        0 & r-\theta < \gamma \le r+\theta\\
        \mu(\gamma-r-\theta)^2/(r+\theta)^2 & \gamma > r+\theta\end{cases}

    gamma are the :func:`linearized_margins`; call it ``(logits, labels, inputs)``. Below r - theta
    the loss is linear: where no margin comes near that, it trains like a linear loss and training
    accuracy itself stays low. The printed r = 30 for networks with batch norm is a hundred times
    the margins of one trained on CIFAR-10 in [0, 1] pixels, and lost 10 points here (papers/odn).
    Take ``r="auto"``, or set r - theta to one to two times the median training margin of the same
    network trained by cross entropy.

    ``r="auto"``: the first ``measured_steps`` training calls are cross entropy. Each measures the
    median of the positive margins in the batch (the joined batch of all processes, which have to
    call together until then) and the mean norm of the input gradients; ``measured`` keeps their
    running means over about the last 20 calls. From then on r - theta is that median and theta / r
    is 7/12 as printed. A tenth of that norm is added to eps, so that no sample counts more than ten
    times an average one.

    Learning rate: the slope in the logits is 1 / ((r - theta) norm). A network without batch norm
    starts with small input gradients, hence with steps that are orders of magnitude larger than
    those of cross entropy; with the default eps at most ten times as large, also where the gradient
    dies. Clip the gradients of the parameters to norm 1; then the learning rate of cross entropy
    suits it.

    ``observed`` holds the share of the last batch on each branch: below, inside and above the band.
    A criterion shows them beside its terms, and warns when none is inside or all are.

    Args:
        r, theta, mu: default (1.2, 0.7, 0.1), printed for networks without batch norm (ODN Table
            1). r > theta >= 0, mu in (0, 1]. With r="auto" theta is set with it.
        squared: square the first branch (appendix A of ODN).
        measured_steps: training calls that r="auto" measures in, default 100 (ours).
        eps: default 0.1 / (r - theta), a slope at which the loss pulls ten times as hard as cross
            entropy can; 1e-6 with r="auto", which adds to it.
        differentiable_norm, per_sample_gradients: of :func:`linearized_margins`.
        options: those of every :class:`Loss`.

    Departures: erratum D4, the upper branch is scaled by (r+theta)^2 as in eq. 1. r="auto" is ours:
    the paper searched r and theta on held-out images. So is the default of eps, which the paper
    only calls small: with 1e-6, networks whose input gradients die have losses of 1e6.

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

    measured: Tensor
    """Calls measured, r - theta and norm of the input gradient as measured."""

    def __init__(
        self,
        *,
        r: float | Literal["auto"] = 1.2,
        theta: float = 0.7,
        mu: float = 0.1,
        squared: bool = False,
        measured_steps: int = 100,
        eps: float | None = None,
        differentiable_norm: bool = False,
        per_sample_gradients: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(
            eps=eps,
            differentiable_norm=differentiable_norm,
            per_sample_gradients=per_sample_gradients,
            **options,
        )
        check_number("theta", theta)
        check_distribution(1.0 + theta if r == "auto" else r, theta, mu)
        check_count("measured_steps", measured_steps, at_least=1)
        self.r = r
        self.theta = theta
        self.mu = mu
        self.squared = squared
        self.measured_steps = measured_steps
        self.observed: dict[Branch, Tensor] = {}
        self._measures = r == "auto"
        self._replay = Replay()
        if self._measures:
            self.register_buffer("measured", torch.zeros(3))

    @property
    def _eps(self) -> float:
        if self.eps is not None:
            return self.eps
        return 1e-6 if self.r == "auto" else lasting_eps(self.r - self.theta)

    def _values(self, gap: Tensor, norm: Tensor, batch: Batch) -> Tensor:
        if self.r != "auto":
            margins = gap / (norm + self._eps)
            self._observe(margins, self.r, self.theta, batch.ignored)
            return self.per_sample(margins, self.r, self.theta)
        logits = batch.inputs[0]
        state = self._replay.recall(logits, self.measured.shape)
        if state is None:
            state = (self.measured.clone(), torch.tensor(self._measures, device="cpu"))
            # Under activation checkpointing the gradient by the input runs all of this once more.
            if not recomputing():
                self._replay.remember(logits, state)
                if self.training and self._measures:
                    self._measure(gap.detach(), norm.detach(), batch.ignored)
        (count, reach, slope), measuring = state
        margins = gap / (norm + self._eps + 0.1 * slope.to(norm))
        reach = torch.where(reach > 0, reach, 1.0).to(margins.dtype)
        r = reach / (1 - SHARE_OF_R)
        self._observe(margins, r, SHARE_OF_R * r, batch.ignored)
        values = self.per_sample(margins, r, SHARE_OF_R * r)
        if not measuring:
            return values
        softmax = cross_entropy(logits, batch.targets, checked=True, validate=self.validate)
        return torch.where(count >= self.measured_steps, values, softmax)

    @torch.no_grad()
    def _measure(self, gap: Tensor, norm: Tensor, ignored: Tensor | None) -> None:
        """Move the running means by a batch, on the device, until there were enough."""
        found = torch.stack([gap, norm])
        if ignored is not None:
            found = found.masked_fill(ignored, torch.nan)
        if world_size() > 1:
            found = torch.stack([gather_ragged(each, torch.nan) for each in found])
        gap, norm = found
        slope = norm.nanmean()
        reach = (
            (gap / (norm + self._eps + 0.1 * slope)).masked_fill(gap <= 0, torch.nan).nanmedian()
        )
        new = torch.stack([reach, slope]).to(self.measured)
        count, old = self.measured[0], self.measured[1:]
        mixed = torch.lerp(old, new, (1 / (count + 1)).clamp_min(0.05))
        mixed = torch.where(old == 0, new, mixed)
        # No sample is right, or none is there: that says nothing of the reach.
        moved = torch.cat([count[None] + 1, torch.where(new.isfinite(), mixed, old)])
        self.measured.copy_(torch.where(count < self.measured_steps, moved, self.measured))
        if not (gap.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._measures = bool(self.measured[0] < self.measured_steps)

    def _observe(self, margins: Tensor, r: Any, theta: Any, ignored: Tensor | None) -> None:
        found = margins.detach()
        counted = torch.ones_like(found) if ignored is None else (~ignored).to(found.dtype)
        below, above = found <= r - theta, found > r + theta
        total = counted.sum().clamp_min(1)
        each = (below, ~(below | above), above)
        self.observed = {
            name: (counted * held).sum() / total for name, held in zip(BRANCHES, each, strict=True)
        }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.r == "auto":
            self._measures = bool(self.measured[0] < self.measured_steps)

    def per_sample(self, margins: Tensor, r: float | Tensor, theta: float | Tensor) -> Tensor:
        return margin_distribution(margins, r=r, theta=theta, mu=self.mu, squared=self.squared)


def margin_distribution(
    margins: PerSample,
    *,
    r: float | Tensor = 1.2,
    theta: float | Tensor = 0.7,
    mu: float = 0.1,
    squared: bool = False,
) -> PerSample:
    """Loss of given margins (N,); :class:`MarginDistribution` has equation, arguments and example.

    The margins are usually :func:`linearized_margins`. Returns (N,).
    """
    if not (isinstance(r, Tensor) or isinstance(theta, Tensor)):
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
        eps: default 0.1 / threshold, 0.1 where the threshold is not positive (ours).
        differentiable_norm, per_sample_gradients: of :func:`linearized_margins`.
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
        eps: float | None = None,
        differentiable_norm: bool = False,
        per_sample_gradients: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(
            eps=eps,
            differentiable_norm=differentiable_norm,
            per_sample_gradients=per_sample_gradients,
            **options,
        )
        check_number("threshold", threshold)
        self.threshold = threshold

    @property
    def _eps(self) -> float:
        return lasting_eps(self.threshold) if self.eps is None else self.eps

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
    per_sample_gradients: bool = False,
    validate: bool | None = None,
) -> InputMargins:
    r"""Linearised input margin (ODN-G; ODN section 2), one extra backward pass.

    .. math:: \gamma = \frac{f_y - f_{c^*}}{\|\nabla_x f_y - \nabla_x f_{c^*}\|_2 + \epsilon},
              \qquad c^* = \arg\max_{i\ne y} f_i

    The rival is chosen by logit. The exact signed distance for a linear model. The gradient is that
    of the sum over the batch: in training mode batch norm mixes the samples, and the norm is not
    that of a sample's own gradient. Ask for ``per_sample_gradients``, or put the batch norm layers
    into evaluation mode, where both agree.

    Args:
        logits: (N, C), computed from ``inputs`` with gradients enabled.
        labels: (N,).
        inputs: (N, ...), with ``requires_grad``.
        eps: default 1e-6 (O14; the paper says "small"). Where the input has no gradient the margin
            is gap/eps.
        differentiable_norm: differentiate the denominator too (second order); default False, a
            constant in backpropagation (ODN 4.1).
        per_sample_gradients: the gradient of each sample's own gap, in N backward passes for one.

    Departures: erratum D5 (norm bars).

    Example:
        >>> x = torch.tensor([[3.0, 1.0]], requires_grad=True)
        >>> linearized_margins(x * 1, torch.tensor([0]), x, eps=0.0).margins
        tensor([1.4142], grad_fn=<DivBackward0>)
    """
    check_number("eps", eps, at_least=0)
    gap, norm, rival_index = _gap_and_slope(
        logits, labels, inputs, differentiable_norm, per_sample_gradients, validate
    )
    return InputMargins(gap / (norm + eps), rival_index)


def _gap_and_slope(
    logits: Tensor,
    labels: Tensor,
    inputs: Tensor,
    differentiable: bool,
    per_sample: bool,
    validate: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """f_y - f_rival, the norm of its gradient by the input, and the rival's class."""
    check_logits(logits, labels, validate=validate)
    check_graph(logits, [inputs], "inputs")
    stats = class_stats_from_logits(logits, labels, want=("target", "rival"), validate=validate)
    gap = require(stats.target) - require(stats.rival)

    def gradient_of(value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(
            value, inputs, retain_graph=True, create_graph=differentiable, allow_unused=True
        )
        if gradient is None:
            raise LargeMarginError(
                "the logits do not depend on inputs. Pass the tensor that went into the model, "
                "after inputs.requires_grad_()."
            )
        return gradient

    if per_sample and len(gap):
        gradient = torch.stack([gradient_of(own)[row] for row, own in enumerate(gap)])
    else:
        gradient = gradient_of(gap.sum())
    return gap, safe_norm(gradient.flatten(1)), require(stats.rival_index)


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
