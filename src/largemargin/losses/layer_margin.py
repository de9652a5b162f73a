"""Large-margin loss at several layers (Elsayed et al. 2018)."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_logits,
    check_matrix,
    check_number,
)
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.base.terms import check_setting
from largemargin.losses.input_margin import REFUSES, check_graph, lasting_eps
from largemargin.ops.norms import promote, safe_norm
from largemargin.shapes import Labels, Logits, PerSample
from largemargin.tracing import transformed

Norm: TypeAlias = Literal[1, 2] | float
Aggregate: TypeAlias = Literal["max", "sum"]
NORMS = (1, 2, math.inf)
AGGREGATES: tuple[Aggregate, ...] = ("max", "sum")
BLOCK_NUMBERS = 2**24
"""Numbers that the directions and gradients of the rivals worked on at a time hold: 64 MiB."""


class LayerMargin(Loss):
    r"""Large-margin loss at several layers (BAS-ELSAYED; Elsayed et al. 2018).

    .. math:: \sum_\ell\ \mathcal A_{i\ne y}\Bigl[\gamma_\ell +
        \frac{f_i - f_y}{\epsilon + \|\nabla_{h_\ell} f_i - \nabla_{h_\ell} f_y\|_q}\Bigr]_+,
        \qquad \tfrac1p + \tfrac1q = 1

    Call it ``(logits, labels, layers)``: layers are activations h (N, ...), the inputs among them
    if wanted, and the logits are computed from them with gradients enabled. Rivals compete by
    normalised distance, so every rival's gradient is needed: a batched backward pass of ``topk``
    directions for all layers together, in blocks of rivals where they are many. Memory is then
    bounded; the time still grows with C, which ``topk`` stops.

    Args:
        gamma: margin per layer, one number for all or one each. Default 1.
        p: norm in which distance is measured: 1, 2 (default) or inf; the gradient is taken in the
            dual norm.
        aggregate: over rivals: "max" (default) or "sum".
        topk: only the k rivals with the largest logits; None takes all.
        eps: default 0.1 / gamma, with which an activation without a gradient survives (ours); the
            original has 1e-6.
        differentiable_norm: differentiate the denominator too; default False, as the original.
        options: those of every :class:`Loss`.

    Example:
        The margin of the input is 1.4142:

        >>> x = torch.tensor([[3.0, 1.0]], requires_grad=True)
        >>> LayerMargin(gamma=2.0, eps=0.0)(x * 1, torch.tensor([0]), [x]).detach()
        tensor(0.5858)
    """

    key: ClassVar[str] = "layer_margin"
    fixed: ClassVar[frozenset[str]] = frozenset({"eps", "p"})
    search_space: ClassVar[Mapping[str, Dimension]] = {"gamma": Range(0.1, 10.0)}
    needs: ClassVar[tuple[str, ...]] = ("logits", "labels", "layers")
    refuses: ClassVar[dict[str, str]] = REFUSES

    def __init__(
        self,
        *,
        gamma: float | Sequence[float] = 1.0,
        p: Norm = 2,
        aggregate: Aggregate = "max",
        topk: int | None = None,
        eps: float | None = None,
        differentiable_norm: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_choice("p", p, NORMS)
        check_choice("aggregate", aggregate, AGGREGATES)
        self.gamma = gamma
        self.p = p
        self.aggregate: Aggregate = aggregate
        self.topk = topk
        self.eps = eps
        self.differentiable_norm = differentiable_norm

    def forward(  # type: ignore[override]
        self,
        logits: Tensor,
        labels: Tensor,
        layers: Sequence[Tensor],
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        check_matrix("logits", logits, "(N, C)")
        batch = self._prepare((logits,), labels, logits.shape[1], sample_weight)
        values = layer_margin(
            batch.inputs[0],
            batch.targets,
            layers,
            gamma=self.gamma,
            p=self.p,
            aggregate=self.aggregate,
            topk=self.topk,
            eps=self.eps,
            differentiable_norm=self.differentiable_norm,
            validate=self.validate,
        )
        return self._reduce(values, batch, sample_weight)


def layer_margin(
    logits: Logits,
    labels: Labels,
    layers: Sequence[Tensor],
    *,
    gamma: float | Sequence[float] = 1.0,
    p: Norm = 2,
    aggregate: Aggregate = "max",
    topk: int | None = None,
    eps: float | None = None,
    differentiable_norm: bool = False,
    validate: bool | None = None,
) -> PerSample:
    """Layer margin loss per sample; :class:`LayerMargin` has equation, arguments and example.

    Logits (N, C) computed with gradients enabled from the ``layers``, activations (N, ...); labels
    (N,). Returns (N,).
    """
    check_choice("p", p, NORMS)
    check_choice("aggregate", aggregate, AGGREGATES)
    if eps is not None:
        check_number("eps", eps, at_least=0)
    check_logits(logits, labels, validate=validate)
    if not layers:
        raise LargeMarginError("layers must hold at least one activation, but it is empty.")
    check_graph(logits, layers, "layers")
    gamma = gamma.tolist() if isinstance(gamma, Tensor) else gamma
    gammas = list(gamma) if isinstance(gamma, Sequence) else [gamma] * len(layers)
    if len(gammas) != len(layers):
        raise LargeMarginError(
            f"gamma must be one number or one per layer, but {len(gammas)} were given for "
            f"{len(layers)} layers."
        )
    num_classes = logits.shape[1]
    if topk is not None:
        check_number("topk", topk, at_least=1)
    rivals = min(topk or num_classes - 1, num_classes - 1)
    labels = labels.long()
    index = labels.clamp(0, num_classes - 1)[:, None]
    outside = ((labels < 0) | (labels >= num_classes))[:, None]
    values = promote(logits)
    chosen = values.detach().scatter(1, index, -torch.inf).topk(rivals, dim=1).indices
    gap = values.gather(1, chosen) - values.gather(1, index).masked_fill(outside, torch.nan)
    step = max(1, BLOCK_NUMBERS // max(1, logits.numel() + sum(layer.numel() for layer in layers)))
    blocks = [
        _norms(logits, layers, chosen[:, first : first + step], index, p, differentiable_norm)
        for first in range(0, rivals, step)
    ]
    total = torch.zeros_like(gap[:, 0])
    for each, *parts in zip(gammas, *blocks, strict=True):
        norm = torch.cat(parts, 1)
        check_setting("gamma", each)
        hinge = F.relu(each + gap / (norm + (lasting_eps(each) if eps is None else eps)))
        total = total + (hinge.max(1).values if aggregate == "max" else hinge.sum(1))
    return total


def _norms(
    logits: Tensor,
    layers: Sequence[Tensor],
    chosen: Tensor,
    index: Tensor,
    p: float,
    create_graph: bool,
) -> list[Tensor]:
    """Norms (N, K) at every layer of the gradients of K rivals' logits less the target's."""
    rivals = torch.arange(chosen.shape[1], device=logits.device)
    rows = torch.arange(logits.shape[0], device=logits.device)
    directions = logits.new_zeros(len(rivals), *logits.shape)
    directions[rivals[:, None], rows, chosen.T] = 1
    directions[:, rows, index.squeeze(1)] -= 1
    norms = []
    gradients = _all_gradients(logits, layers, directions, create_graph)
    for gradient, layer in zip(gradients, layers, strict=True):
        if gradient is None:
            raise LargeMarginError(
                f"the logits do not depend on a layer of shape {tuple(layer.shape)}. Take layers "
                "from the forward pass that made these logits."
            )
        norms.append(dual_norm(promote(gradient).flatten(2), p).T)
    return norms


def _all_gradients(
    logits: Tensor, layers: Sequence[Tensor], directions: Tensor, create_graph: bool
) -> list[Tensor | None]:
    """Gradients (K, N, ...) at every layer along K directions of the logits."""

    def along(direction: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            logits,
            list(layers),
            grad_outputs=direction,
            is_grads_batched=batched,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )

    if not transformed():
        try:
            return list(along(directions, True))
        except RuntimeError:
            pass  # compiled models and some custom functions have no batched backward pass
    each = [along(direction, False) for direction in directions]
    columns = zip(*each, strict=True)
    return [None if c[0] is None else torch.stack(c) for c in columns]


def dual_norm(gradient: Tensor, p: float) -> Tensor:
    """Norm dual to l_p over the last dimension."""
    if p == 2:
        return safe_norm(gradient)
    return gradient.abs().sum(-1) if p == math.inf else gradient.abs().amax(-1)
