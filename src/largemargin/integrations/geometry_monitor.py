"""Lightning: the geometry of a model, measured and logged as it trains."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from largemargin.dropin import Criterion
from largemargin.errors import LargeMarginError, check_number
from largemargin.measuring import Geometry, measure

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from largemargin.integrations.lightning import Callback


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
        options: those of :func:`largemargin.measure`, as ``pairwise=True``.
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
    """One loader, whatever form validation loaders have."""
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
