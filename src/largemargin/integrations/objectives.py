"""Objectives by name or class, filled in with what the data say: classes, width, counts."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from torch import nn

import largemargin as lm
from largemargin.errors import LargeMarginError

PENALTIES = frozenset(
    {
        "center",
        "centroid_margin",
        "centroid_norm",
        "compactness",
        "discriminative",
        "rival_divergence",
        "sample_margin",
        "stability",
        "stable_discriminative",
        "super_symmetry",
        "zero_centroid",
    }
)
"""Terms that shape features but do not classify: by name they come with a cross entropy."""


def objective_for(
    given: Any,
    params: Mapping[str, Any] | None = None,
    class_counts: Sequence[int] | None = None,
) -> Any:
    """What ``lm.attach`` takes, from a name of ``lm.LOSSES``, a class, a module or a function.

    Modules are copied, so that a fit leaves the given one as it was. Names and classes are built
    when the number of classes C and the feature dimension are known: ``num_classes`` and ``dim``
    are filled in, ``class_counts="auto"`` (and LDAM without counts) gets ``class_counts``. By name,
    a loss on cosines has ``scale="auto"`` instead of the 64 of face recognition, and a penalty
    comes with a cross entropy.
    """
    settings = dict(params or {})
    if isinstance(given, str):
        return _Builder(loss_named(given), settings, class_counts, given)
    if isinstance(given, type) and issubclass(given, lm.Loss):
        return _Builder(given, settings, class_counts)
    if isinstance(given, nn.Module):
        if settings:
            raise LargeMarginError(
                f"objective is a {type(given).__name__} already, so its settings "
                f"{sorted(settings)} cannot be changed. Give its name or class instead, or set "
                "them where it is made."
            )
        return deepcopy(given)
    if callable(given) and not settings:
        return given  # as it is: a preset also tells attach about its schedule
    if callable(given):
        return lambda num_classes, dim: given(num_classes, dim, **settings)
    raise LargeMarginError(
        "objective must be a name of lm.LOSSES, a loss or Objective, or a function (num_classes, "
        f"dim) that makes one, but {given!r} was given."
    )


class _Builder:
    def __init__(
        self,
        kind: type[lm.Loss],
        settings: dict[str, Any],
        class_counts: Sequence[int] | None,
        name: str = "",
    ) -> None:
        self.kind = kind
        self.settings = settings
        self.class_counts = class_counts
        self.name = name

    def __call__(self, num_classes: int, dim: int) -> Any:
        settings = self.settings
        if self.name and self.kind.head_similarity == "cosine":
            settings = {"scale": "auto", **settings}
        loss = build_loss(self.kind, settings, num_classes, dim, self.class_counts)
        if self.name in PENALTIES:
            return lm.Objective(softmax=lm.CrossEntropy(), **{self.name: loss})
        return loss


def build_loss(
    kind: type[lm.Loss],
    settings: Mapping[str, Any],
    num_classes: int,
    dim: int,
    class_counts: Sequence[int] | None,
) -> lm.Loss:
    """``kind(**settings)`` with the number of classes, the dimension and counts filled in."""
    known = _parameters(kind)
    unknown = sorted(set(settings) - known.keys())
    if unknown:
        raise LargeMarginError(
            f"{kind.__name__} has no setting {unknown[0]!r}. It has: {', '.join(known)}."
        )
    filled = dict(settings)
    for name, value in (("num_classes", num_classes), ("dim", dim)):
        if name in known:
            filled.setdefault(name, value)
    if "class_counts" in known:
        required = known["class_counts"].default is Parameter.empty
        asked = filled.get("class_counts", "auto" if required else None)
        if isinstance(asked, str):
            if asked != "auto" or class_counts is None:
                raise LargeMarginError(
                    f"class_counts of {kind.__name__} must be the number of training samples of "
                    f"each class, but {asked!r} was given."
                )
            filled["class_counts"] = list(class_counts)
    return kind(**filled)


def _parameters(kind: type[lm.Loss]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for cls in (kind, lm.Loss):
        for name, parameter in signature(cls).parameters.items():
            if parameter.kind is not Parameter.VAR_KEYWORD:
                found.setdefault(name, parameter)
    return found


def loss_named(name: str) -> type[lm.Loss]:
    """A loss class by its name in ``lm.LOSSES``; a wrong name is answered with close ones."""
    if name not in lm.LOSSES:
        close = get_close_matches(name, lm.LOSSES, n=3, cutoff=0.4) or sorted(lm.LOSSES)
        raise LargeMarginError(
            f"objective {name!r} is no name of lm.LOSSES. Closest: {', '.join(close)}."
        )
    return lm.LOSSES[name]
