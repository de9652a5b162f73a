"""timm: ``MarginTask``, a training task around a model and its criterion."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.integrations.trainer_duties import (
    average_gradients,
    check_belongs,
    check_criterion,
)

try:
    from timm.models import group_parameters
    from timm.task import ClassificationTask
    from timm.utils import unwrap_model
except ImportError as error:
    raise MissingPackage(
        "largemargin.integrations.timm needs timm 1.0.30 or newer. Install it: "
        "pip install 'largemargin[timm]'"
    ) from error

STATE_KEY = "criterion"


class MarginTask(ClassificationTask):  # a TrainingTask
    """A timm training task: ``task(images, targets)`` gives the loss, the logits and the terms.

    Optimizer, EMA, clipping, compiling, distributed wrapping and checkpoints work as with timm's
    own tasks:

    - ``create_optimizer_v2(task, ...)`` trains the model and the loss's own parameters, with the
      model's rules for weight decay and layer decay. ``create_optimizer_v2(model, ...)`` is the
      same where the loss has none. Make it before ``setup_ema``.
    - Attach before ``setup_ema`` or ``ModelEmaV3(model)``, so that the copy has the same head.
    - The criterion's state (centroids, schedules) is ``task_state`` in checkpoints.
    - Soft targets of Mixup and CutMix go to every loss that takes soft targets.

    Args:
        model: the model given to ``attach``.
        criterion: what ``attach`` returned.
        device, dtype, verbose: as in timm.
    """

    criterion: Criterion

    def __init__(
        self, model: nn.Module, criterion: Criterion, *, verbose: bool = True, **options: Any
    ) -> None:
        check_criterion(criterion, "MarginTask")
        check_belongs(criterion, model)
        super().__init__(model, criterion, verbose=verbose, **options)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """``loss``, ``output`` (logits), and each term as ``<term>_loss``, detached."""
        output = self.trainable_module(input)
        loss = self.criterion(output, target)
        terms = {f"{name}_loss": term for name, term in self.criterion.terms.items()}
        return {"loss": loss, "output": output, **terms}

    def prepare_distributed(self, device_ids: list[int] | None = None, **options: Any) -> Any:
        super().prepare_distributed(device_ids=device_ids, **options)
        average_gradients(self.criterion)
        return self

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The criterion's state; the averaged model has none of its own."""
        return {} if ema else {STATE_KEY: self.criterion.state_dict()}

    def load_task_state(
        self,
        state: dict[str, Any] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        if ema or not state:
            return  # a checkpoint of another task: the criterion starts from the beginning
        if STATE_KEY not in state:
            if strict:
                raise LargeMarginError(
                    f"the checkpoint's task_state holds {sorted(state)}, but no {STATE_KEY!r}: it "
                    "was written by another task. Load with strict=False to start the criterion "
                    "from the beginning."
                )
            return
        self.criterion.load_state_dict(state[STATE_KEY], strict=strict)

    def get_clip_parameters(self, exclude_head: bool = False) -> list[nn.Parameter]:
        """Parameters to clip: of the model, without its head on request, and of the loss."""
        head = {id(each) for each in self.criterion.layer.parameters()} if exclude_head else set()
        model = [each for each in self.trainable_module.parameters() if id(each) not in head]
        return [*model, *self.criterion.parameters()]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters ``create_optimizer_v2(task, ...)`` does not decay."""
        inner = unwrap_model(self.trainable_module)
        names = inner.no_weight_decay() if hasattr(inner, "no_weight_decay") else ()
        return {f"{self._prefix}{name}" for name in names}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int] | dict[str, Any]:
        """Layers for layer decay: the model's own; the loss's parameters belong to the last."""
        inner = unwrap_model(self.trainable_module)
        if not hasattr(inner, "group_matcher"):
            return {}
        layers = group_parameters(inner, inner.group_matcher(coarse=coarse), reverse=True)
        last = max(layers.values(), default=0)
        prefix = self._prefix
        return lambda name: layers.get(name.removeprefix(prefix), last)

    @property
    def _prefix(self) -> str:
        """How names of the model's parameters start in the task's, inside whatever wraps it."""
        inner = unwrap_model(self.trainable_module)
        (name,) = [name for name, each in self.named_modules() if each is inner][:1]
        return f"{name}."
