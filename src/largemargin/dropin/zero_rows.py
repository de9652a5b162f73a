"""Class vectors that are zero and would stay so.

Some models begin with a head of zeros (torchvision's vision transformers, timm's fine-tuning). The
softmax loss has a gradient there. A cosine with a zero vector has none: neither the vector nor the
features would ever move. Logits divided by their length (LogitNorm) have one of 1e8.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from largemargin.dropin.criterion import terms_that_need
from largemargin.errors import warn_user
from largemargin.heads.class_head import ClassHead
from largemargin.heads.head_spec import HeadView
from largemargin.losses.base.objective import Objective
from largemargin.ops.shards import is_sharded

PROBED = 8
"""Samples of the batch that tells whether a row gets a gradient."""
STEEPEST = 1e6
"""A gradient beyond it is that of a division by nearly nothing."""


def fill_zero_rows(
    model: nn.Module, path: str, head: nn.Module, objective: Objective, *, same: bool, warn: bool
) -> None:
    """Give rows of the head that the objective cannot move the values that ``ClassHead`` begins
    with, and say so.

    Args:
        same: draw the same on all processes: the model is in DDP already.
    """
    for loss in objective.terms.values():
        loss._looks_for_zeros = False  # type: ignore[assignment]  # what there is to say is below
    weight = head._parameters.get("weight")
    rows = None if weight is None else _zero_rows(weight)
    if weight is None or rows is None:
        return
    slope = _slope(objective, head, weight, rows)
    if slope != 0 and not slope >= STEEPEST:  # also where it is NaN
        return
    names = " + ".join(type(loss).__name__ for loss in objective.terms.values())
    said = (
        f"{len(rows)} of the {len(weight)} rows of the head {path!r} are zero, where {names} has "
    )
    if slope == 0:
        said += "no gradient, so they would never move"
    else:
        said += f"a gradient of {slope:.0e}, so the first step would make them as long"
    others = [p for each in model.modules() if each is not head for p in each._parameters.values()]
    if any(parameter is weight for parameter in others):
        said += ". Another layer uses the same weight, so it is left as it is."
        rows = rows[:0]
    else:
        said += ". They were given random values, as those of lm.ClassHead are."
    weight.data[rows] = _fresh_rows(head, weight, same=same)[rows]
    if warn:
        warn_user(said)


def _fresh_rows(head: nn.Module, weight: Tensor, *, same: bool) -> Tensor:
    """What ``ClassHead`` begins with."""
    with torch.random.fork_rng(devices=[], enabled=same):
        if same:
            torch.default_generator.manual_seed(0)  # and no accelerator's
        similarity = getattr(head, "similarity", "dot")
        fresh = ClassHead(weight.shape[1], len(weight), similarity=similarity, bias=False)
    return fresh.weight.data.to(weight)


def _zero_rows(weight: Tensor) -> Tensor | None:
    """Indices of the rows that are zero; None where there are none, or they cannot be seen."""
    if weight.dim() != 2 or weight.is_meta or is_sharded(weight):
        return None
    rows = (torch.linalg.vector_norm(weight.detach(), torch.inf, dim=1) == 0).nonzero()[:, 0]
    return rows if len(rows) else None


def _slope(objective: Objective, head: nn.Module, weight: Tensor, rows: Tensor) -> float:
    """The largest gradient on these rows, of random features and a copy of the loss.

    1 where something else than the loss of features and rows trains them.
    """
    similarity = getattr(head, "similarity", "dot")
    if any(terms_that_need(objective, each) for each in ("inputs", "layers")):
        return 0.0 if similarity.startswith("cosine") else 1.0  # by the outputs of the layer
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(PROBED, weight.shape[1], generator=draw).to(weight)
    labels = rows[torch.arange(PROBED, device=rows.device) % len(rows)]
    leaf, bias = weight.detach().clone().requires_grad_(), getattr(head, "bias", None)
    view = HeadView(leaf, bias, similarity, getattr(head, "scale", 1.0))
    with torch.enable_grad():
        value = deepcopy(objective).train()(
            prototypes=view,
            labels=labels,
            features=features,
            logits=view(features),
            noisy=features.flip(0),
        )
        if not value.total.requires_grad:
            return 1.0
        (gradient,) = torch.autograd.grad(value.total, leaf, allow_unused=True)
    return 1.0 if gradient is None else float(gradient[rows].abs().max())
