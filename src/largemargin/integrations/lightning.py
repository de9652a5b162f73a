"""Lightning: a criterion is an attribute of the module; ``MarginSchedule`` counts its steps.

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = resnet18(num_classes=10)
            self.criterion = lm.attach(self.model, lm.CosFace(scale=16.0))

As an attribute it moves, is saved and is restored with the module.
"""

import sys
from typing import TYPE_CHECKING, Any

from largemargin.dropin import Criterion
from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.integrations.trainer_duties import check_accumulation

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
    it is part of the module's checkpoint and a resumed run goes on where it stopped.

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
