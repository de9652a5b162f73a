"""Lightning: steps, terms, precision, checkpoints and resuming with a criterion as attribute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.learned import Learned
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.losses.base.schedules import Schedule

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from largemargin.integrations.lightning import MarginSchedule  # noqa: E402

pytestmark = [
    # Raised inside Lightning on new releases of torch.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    # Advice about data loaders and folders that tests need not follow.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

ROWS, BATCH = 40, 8


class Ramp(Schedule):
    """The margin is a hundredth of the step; remembers every step it was applied at."""

    def __init__(self) -> None:
        self.applied: list[int] = []

    def apply(self, objective: lm.Objective, step: int) -> None:
        self.applied.append(step)
        objective.terms["cosface"].margin = 0.01 * step


class Classifier(lightning.LightningModule):
    def __init__(self, loss: str = "cosface", **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        if loss == "cosface":
            objective: Any = lm.CosFace(margin=0.0, scale=8.0)
            options = {"schedule": Ramp(), **options}
        elif loss == "discriminative":
            objective = lambda classes, dim: lm.Discriminative(classes, dim, margin=2.0)  # noqa: E731
        else:
            objective = Learned()
        self.criterion = lm.attach(self.model, objective, **options)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss: Tensor = self.criterion(self.model(batch[0]), batch[1])
        self.last_loss = loss.detach()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.criterion(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(rows: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(rows) % 3
    inputs = torch.randn(rows, 6, generator=generator) + labels[:, None]
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)


def fit(module: Any, folder: Path, epochs: int = 1, ckpt: Any = None, **options: Any) -> Any:
    callbacks = options.pop("callbacks", None) or [MarginSchedule()]
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(module, loader(), loader(BATCH), ckpt_path=ckpt)
    return trainer


def check_same(got: nn.Module, wanted: nn.Module) -> None:
    """Equal to the last bit: tensors, and the plain values of extra state."""
    one, other = got.state_dict(), wanted.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = (
            torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        )
        assert same, name


def test_schedules_count_optimizer_steps_and_terms_are_logged(tmp_path: Path) -> None:
    module = Classifier()
    trainer = fit(module, tmp_path, epochs=2, accumulate_grad_batches=2)
    # Five batches make steps of 2, 2 and 1: three per epoch, which calls alone would not tell.
    assert trainer.global_step == 6
    assert module.criterion.steps == 6
    assert module.criterion.schedules[0].applied == [0, 1, 2, 3, 4, 5, 6]
    assert module.criterion.objective.terms["cosface"].margin == pytest.approx(0.06)
    assert torch.equal(trainer.callback_metrics["train/cosface"], module.last_loss)


def test_a_prefix_of_ones_own_and_gradient_norms(tmp_path: Path) -> None:
    module = Classifier(gradient_norms=True)
    trainer = fit(module, tmp_path, callbacks=[MarginSchedule(log="fit/")])
    assert {"fit/cosface", "fit/gradient_norm/cosface"} <= set(trainer.callback_metrics)
    trainer = fit(Classifier(), tmp_path, callbacks=[MarginSchedule(log=None)])
    assert set(trainer.callback_metrics) == {"val_loss"}


def test_two_criteria_are_told_apart(tmp_path: Path) -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.second = lm.attach(self.model, lm.NormFace(scale=8.0))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            outputs = self.model(batch[0])
            total: Tensor = self.criterion(outputs, batch[1]) + self.second(outputs, batch[1])
            return total

    module = Two()
    trainer = fit(module, tmp_path)
    assert {"train/criterion/cosface", "train/second/normface"} <= set(trainer.callback_metrics)
    assert module.second.steps == module.criterion.steps == 5


def test_banks_write_once_per_step_and_forget_nothing(tmp_path: Path) -> None:
    module = Classifier("discriminative", accumulate=2)
    fit(module, tmp_path, accumulate_grad_batches=2)
    (bank,) = module.criterion.banks
    assert int(bank.counts.sum()) == ROWS  # also those of the last, shorter step
    assert int(bank.pending_steps) == 0


def test_a_bank_that_would_write_too_often_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LargeMarginError, match="Attach with accumulate=2"):
        fit(Classifier("discriminative"), tmp_path, accumulate_grad_batches=2)


def test_a_module_without_criterion_is_told_what_to_do(tmp_path: Path) -> None:
    class Forgetful(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(6, 3)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(LargeMarginError, match=r"no criterion in Forgetful.*self\.criterion ="):
        fit(Forgetful(), tmp_path)


def test_parameters_of_the_loss_are_trained(tmp_path: Path) -> None:
    module = Classifier("learned")
    before = [parameter.detach().clone() for parameter in module.criterion.parameters()]
    assert before
    fit(module, tmp_path)
    after = list(module.criterion.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("loss", ["cosface", "discriminative"])
def test_a_resumed_run_equals_an_uninterrupted_one(loss: str, tmp_path: Path) -> None:
    options = {"accumulate": 2}
    straight = Classifier(loss, **options)
    fit(straight, tmp_path, epochs=4, accumulate_grad_batches=2)

    def saving(module: Classifier, epochs: int, ckpt: Path | None = None) -> Path:
        saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path)
        fit(
            module,
            tmp_path,
            epochs=epochs,
            ckpt=ckpt,
            accumulate_grad_batches=2,
            callbacks=[saver, MarginSchedule()],
            enable_checkpointing=True,
        )
        return Path(saver.best_model_path)

    first, resumed = Classifier(loss, **options), Classifier(loss, **options)
    file = saving(first, 2)
    kept = file.rename(tmp_path / "kept.ckpt")
    saving(resumed, 4, kept)
    assert resumed.criterion.steps == straight.criterion.steps == 12
    check_same(resumed, straight)

    loaded = Classifier.load_from_checkpoint(kept)
    check_same(loaded, first)
    assert loaded.criterion.steps == 6
    inputs = torch.randn(4, 6)
    assert torch.equal(loaded.model(inputs), first.model(inputs))


@pytest.mark.parametrize("loss", ["cosface", "discriminative"])
def test_mixed_precision(loss: str, tmp_path: Path) -> None:
    module = Classifier(loss)
    trainer = fit(module, tmp_path, epochs=3, precision="bf16-mixed")
    exact = Classifier(loss)
    other = fit(exact, tmp_path, epochs=3)
    got, wanted = trainer.callback_metrics["val_loss"], other.callback_metrics["val_loss"]
    assert all(term.dtype == torch.float32 for term in module.criterion.terms.values())
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
