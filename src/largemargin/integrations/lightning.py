"""Lightning: ``MarginSchedule`` steps and logs a criterion, ``GeometryMonitor`` measures the model.

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = resnet18(num_classes=10)
            self.criterion = lm.attach(self.model, lm.CosFace(scale=16.0))

As an attribute the criterion moves, is saved and is restored with the module.
"""

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError, MissingPackage, check_number
from largemargin.integrations.trainer_duties import check_accumulation
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.measure import measure

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # Two packages hold the same code, and a callback of one is none for a trainer of the other.
    old_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    try:
        if old_name:
            from pytorch_lightning import Callback
        else:
            from lightning.pytorch import Callback
    except ImportError as error:
        raise MissingPackage(
            "largemargin.integrations.lightning needs Lightning. Install it: "
            "pip install 'largemargin[lightning]'"
        ) from error


class MarginSchedule(Callback):
    """Steps a criterion's schedules with the optimizer, and logs its terms.

    ``trainer = Trainer(callbacks=[MarginSchedule()])``. Schedules advance once per optimizer step,
    also when gradients are accumulated and the last step of an epoch has fewer micro-batches: the
    callback takes the counting over from ``attach`` (as with ``stepping="manual"``). Centroid banks
    that collect micro-batches write at the same moment. The state itself lies in the criterion, so
    it is part of the module's checkpoint and a resumed run continues where it stopped.

    Args:
        log: prefix of the logged terms; None logs nothing. Gradient norms, where the criterion
            measures them, are logged as ``<prefix>gradient_norm/<term>``. A module with several
            criteria logs each under ``<prefix><attribute>/``.
    """

    def __init__(self, *, log: str | None = "train/") -> None:
        super().__init__()
        if log is not None and not isinstance(log, str):
            raise LargeMarginError(
                f"log must be a prefix such as 'train/', or None, but {log!r} was given."
            )
        self.prefix = log
        self._seen = 0

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        if stage == "fit":
            criteria(pl_module)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._seen = trainer.global_step
        for criterion in criteria(pl_module).values():
            check_accumulation(
                criterion, trainer.accumulate_grad_batches, "accumulate_grad_batches"
            )
            criterion.automatic = False

    def on_train_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        stepped, self._seen = trainer.global_step != self._seen, trainer.global_step
        found = criteria(pl_module)
        for name, criterion in found.items():
            if stepped:
                criterion.step()
            if self.prefix is not None:
                prefix = self.prefix if len(found) == 1 else f"{self.prefix}{name}/"
                norms = {f"gradient_norm/{k}": v for k, v in criterion.gradient_norms.items()}
                for key, value in {**criterion.terms, **norms}.items():
                    pl_module.log(prefix + key, value, on_step=True, on_epoch=False)


def criteria(module: "LightningModule") -> dict[str, Criterion]:
    """The criteria among a module's attributes, by name."""
    found = {name: each for name, each in module.named_modules() if isinstance(each, Criterion)}
    if not found:
        raise LargeMarginError(
            f"MarginSchedule found no criterion in {type(module).__name__}. Make it an attribute "
            "of the module, in __init__ or configure_model: self.criterion = "
            "lm.attach(self.model, objective)."
        )
    return found


class GeometryMonitor(Callback):
    """Measures the model after validation epochs and logs the numbers.

    ``Trainer(callbacks=[GeometryMonitor()])``. One more evaluation pass over the validation data
    each time; ``last`` is the whole :class:`largemargin.Geometry`, ``history`` all of them by
    epoch. Under several processes each measures its part and all log the whole.

    Args:
        loader: the data to measure on; default the (first) validation loader of the trainer.
        every: epochs between measurements, the first at epoch 0.
        model: name of the module's attribute to measure; default the model its criterion was
            attached to, otherwise the module itself.
        log: prefix of the logged numbers.
        options: those of :func:`largemargin.measure`, such as ``pairwise=True``.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        *,
        every: int = 1,
        model: str | None = None,
        log: str = "geometry/",
        **options: Any,
    ) -> None:
        super().__init__()
        check_number("every", every, at_least=1)
        self.loader = loader
        self.every = every
        self.model = model
        self.prefix = log
        self.options = options
        self.history: dict[int, Geometry] = {}

    @property
    def last(self) -> Geometry | None:
        """The latest measurement."""
        return self.history[max(self.history)] if self.history else None

    def on_validation_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if trainer.sanity_checking or trainer.current_epoch % self.every:
            return
        loader = self.loader if self.loader is not None else _first(trainer.val_dataloaders)
        geometry = measure(self._model(pl_module), loader, **self.options)
        self.history[trainer.current_epoch] = geometry
        for name, value in _numbers(geometry).items():
            pl_module.log(self.prefix + name, value)

    def _model(self, module: "LightningModule") -> nn.Module:
        if self.model is not None:
            found = getattr(module, self.model, None)
            if not isinstance(found, nn.Module):
                raise LargeMarginError(
                    f"{type(module).__name__} has no module {self.model!r} to measure. Name an "
                    "attribute that holds the network: GeometryMonitor(model='backbone')."
                )
            return found
        for each in module.modules():
            if isinstance(each, Criterion):
                return each.model
        whole: nn.Module = module
        return whole


def _numbers(geometry: Geometry) -> dict[str, float]:
    """The numbers of a geometry that are worth a curve over the epochs."""
    chosen = {
        "accuracy": geometry.accuracy,
        "class_margin_degrees": geometry.prototypes.class_margin,
        "variance_ratio": geometry.variance.ratio,
        "calibration_error": geometry.calibration.expected_error,
    }
    for name, margins in geometry.margins.items():
        chosen[f"{name}_margin_mean"] = margins.overall.mean
        chosen[f"{name}_margin_min"] = margins.overall.minimum
    if geometry.collapse is not None:
        chosen["collapse_nc1"] = geometry.collapse.variability
    if geometry.compactness is not None:
        chosen["largest_dispersion"] = geometry.compactness.largest_dispersion
        chosen["ideal_ratio"] = geometry.compactness.ideal_ratio
    for layer in geometry.layers or ():
        chosen[f"{layer.name}/variance_ratio"] = layer.variance.ratio
        chosen[f"{layer.name}/nc1"] = (
            math.nan if layer.collapse is None else layer.collapse.variability
        )
        if layer.margins is not None:
            chosen[f"{layer.name}/left_out_accuracy"] = layer.left_out_accuracy
    return chosen


def _first(loaders: Any) -> Iterable[Any]:
    """The first loader of one, a list or a dict of them."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        loaders = loaders[0] if loaders else None
    if loaders is None:
        raise LargeMarginError(
            "there is no validation loader to measure on. Pass one: GeometryMonitor(loader)."
        )
    found: Iterable[Any] = loaders
    return found
