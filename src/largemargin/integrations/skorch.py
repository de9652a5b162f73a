"""``LargeMarginNet``: skorch's classifier with a loss that reads features and the head."""

from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.integrations.objective_text import objective_for
from largemargin.losses.cosface import CosFace

try:
    import numpy as np
    from skorch import NeuralNetClassifier
    from skorch.utils import to_numpy
except ImportError as missing:
    raise MissingPackage(
        "LargeMarginNet needs skorch 1.1 or newer. Install it: pip install 'largemargin[skorch]'."
    ) from missing


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of the classes, the last axis."""
    return torch.softmax(logits, dim=-1)


def counts_of(y: Any) -> list[int] | None:
    """How many samples every class has, where y holds them as numbers."""
    labels = None if y is None else np.asarray(to_numpy(y))
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size:
        return None
    counted: list[int] = np.bincount(labels).tolist() if labels.min() >= 0 else []
    return counted or None


class LargeMarginNet(NeuralNetClassifier):  # type: ignore[misc]
    """skorch's ``NeuralNetClassifier`` for modules that return logits, and any objective.

    skorch makes module and criterion independently and calls ``criterion(y_pred, y_true)``. A
    large-margin loss also needs features and prototypes, so here the criterion is
    ``lm.attach(module_, objective)``. Everything else is skorch: callbacks, checkpoints, grid
    search, ``criterion__margin=0.2``. (Losses on logits alone, ``criterion=lm.Kobayashi``, work
    with ``NeuralNetClassifier`` itself, given ``predict_nonlinearity=softmax``: skorch takes the
    outputs of a criterion it does not know for probabilities.)

    Args:
        module: class or instance that returns logits, its last linear layer being the head. An
            instance is copied, so that it stays as it is.
        criterion: a loss class with settings as ``criterion__scale=16.0``, a loss or
            ``lm.Objective``, a name of ``lm.LOSSES``, or a function ``(num_classes, dim)``, as an
            ``lm.preset``. Class counts that ``LDAM``, ``criterion__class_counts="auto"`` or a
            preset ask for are those of ``y`` in ``fit``.
        attach_params: further arguments of ``lm.attach``, such as ``{"layer": "fc"}`` or
            ``{"total_steps": 500}`` for a preset with a schedule.
        args, kwargs: those of ``NeuralNetClassifier``.

    ``criterion_.terms`` holds the terms of the last batch, ``criterion_.head`` the prototypes.
    Parameters and centroid banks of losses are trained, moved, saved (``f_criterion``) and
    re-initialised by skorch.
    """

    criterion_: Criterion
    module_: nn.Module

    def __init__(
        self,
        module: Any,
        *args: Any,
        criterion: Any = CosFace,
        predict_nonlinearity: Any = softmax,
        attach_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            module, *args, criterion=criterion, predict_nonlinearity=predict_nonlinearity, **kwargs
        )
        self.attach_params = attach_params

    def fit(self, X: Any, y: Any, **fit_params: Any) -> Self:
        """As skorch does; ``y`` is also counted, for losses that want to know how it is spread."""
        self._class_counts = counts_of(y)
        super().fit(X, y, **fit_params)
        return self

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None, **fit_params: Any) -> Self:
        """As skorch does; what it begins with is counted as in :meth:`fit`."""
        if not self.initialized_:
            self._class_counts = counts_of(y)
        super().partial_fit(X, y, classes, **fit_params)
        return self

    def initialize_module(self) -> Self:
        """The module; a given instance is copied, because ``attach`` may replace its head."""
        super().initialize_module()
        if self.module_ is self.module:
            self.module_ = deepcopy(self.module)
        return self

    def initialize_criterion(self) -> Self:
        """Attach the objective to the module; what was attached to it before is taken off."""
        before = getattr(self, "criterion_", None)
        if isinstance(before, Criterion):
            before.undo()
        criterion = self.criterion
        if isinstance(criterion, nn.Module) and self.get_params_for("criterion"):
            criterion = type(criterion)  # skorch's rule: settings make a new one of its class
        if not isinstance(criterion, str) and not callable(criterion):
            raise LargeMarginError(
                f"criterion must be a loss, its class or its name, but {criterion!r} was given."
            )
        params = self.attach_params or {}
        length_known = not params.keys().isdisjoint(("total_steps", "schedule"))
        if getattr(criterion, "scheduled", False) and not length_known:
            raise LargeMarginError(
                "criterion has a schedule, which has to know how long training is: pass "
                'attach_params={"total_steps": max_epochs * batches_per_epoch}, or '
                '{"schedule": ()} to go without it.'
            )
        counts = getattr(self, "_class_counts", None)
        objective = objective_for(criterion, self.get_params_for("criterion"), counts)
        self.criterion_ = attach(self.module_, objective, **params)
        return self
