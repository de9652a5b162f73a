"""``LargeMarginNet``: skorch's classifier with a loss that reads features and the head."""

from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.integrations.objectives import objective_for

try:
    from skorch import NeuralNetClassifier
except ImportError as missing:
    raise MissingPackage(
        "LargeMarginNet needs skorch 1.1 or newer. Install it: pip install 'largemargin[skorch]'."
    ) from missing


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of the classes, the last axis."""
    return torch.softmax(logits, dim=-1)


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
            ``lm.Objective``, a name of ``lm.LOSSES``, or a function ``(num_classes, dim)``.
        attach_params: further arguments of ``lm.attach``, as ``{"layer": "fc"}``.
        args, kwargs: those of ``NeuralNetClassifier``.

    ``criterion_.terms`` holds the terms of the last batch, ``criterion_.head`` the prototypes.
    Parameters and centroid banks of losses are trained, moved, saved (``f_criterion``) and
    re-initialised by skorch.
    """

    criterion_: lm.Criterion
    module_: nn.Module

    def __init__(
        self,
        module: Any,
        *args: Any,
        criterion: Any = lm.CosFace,
        predict_nonlinearity: Any = softmax,
        attach_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            module,
            *args,
            criterion=criterion,
            predict_nonlinearity=predict_nonlinearity,
            **kwargs,
        )
        self.attach_params = attach_params

    def initialize_module(self) -> Self:
        """The module; a given instance is copied, because ``attach`` may replace its head."""
        super().initialize_module()
        if self.module_ is self.module:
            self.module_ = deepcopy(self.module)
        return self

    def initialize_criterion(self) -> Self:
        """Attach the objective to the module; what was attached to it before is taken off."""
        before = getattr(self, "criterion_", None)
        if isinstance(before, lm.Criterion):
            before.undo()
        criterion = self.criterion
        if isinstance(criterion, nn.Module) and self.get_params_for("criterion"):
            criterion = type(criterion)  # skorch's rule: settings make a new one of its class
        if not isinstance(criterion, str) and not callable(criterion):
            raise LargeMarginError(
                f"criterion must be a loss, its class or its name, but {criterion!r} was given."
            )
        self.criterion_ = lm.attach(
            self.module_,
            objective_for(criterion, self.get_params_for("criterion")),
            **(self.attach_params or {}),
        )
        return self
