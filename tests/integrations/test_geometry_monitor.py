"""The Lightning callback that measures a model as it trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import largemargin as lm

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from largemargin.integrations.lightning import GeometryMonitor  # noqa: E402

pytestmark = [
    # Raised inside Lightning on new releases of torch.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    # Advice about data loaders that tests need not follow.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.criterion = lm.attach(self.network, lm.CosFace(margin=0.1, scale=8.0))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss: Tensor = self.criterion(self.network(batch[0]), batch[1])
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.criterion(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    labels = torch.arange(60) % 3
    noise = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(noise + 2 * labels[:, None], labels), batch_size=16)


def fit(module: nn.Module, monitor: GeometryMonitor, folder: Path, *val: Any) -> Any:
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[monitor],
    )  # fmt: skip
    trainer.fit(module, loader(), *val)
    return trainer


def test_logs_what_measure_finds(tmp_path: Path) -> None:
    module, monitor = Classifier(), GeometryMonitor(pairwise=True)
    trainer = fit(module, monitor, tmp_path, loader())
    assert list(monitor.history) == [0, 1, 2]  # not the sanity check
    again = lm.measure(module.network, loader(), pairwise=True)
    assert monitor.last == again
    logged = trainer.callback_metrics
    assert logged["geometry/accuracy"].item() == pytest.approx(again.accuracy)
    assert logged["geometry/cosine_margin_min"].item() == pytest.approx(
        again.margins["cosine"].overall.minimum
    )
    assert logged["geometry/largest_dispersion"].item() == pytest.approx(
        again.compactness.largest_dispersion
    )
    assert module.network.training or not module.training


def test_logs_hidden_layers(tmp_path: Path) -> None:
    monitor = GeometryMonitor(pairwise=True, layers=["1"])
    logged = fit(Classifier(), monitor, tmp_path, loader()).callback_metrics
    assert monitor.last is not None
    assert monitor.last.layers is not None
    layer = monitor.last.layers[0]
    assert logged["geometry/1/left_out_accuracy"].item() == pytest.approx(layer.left_out_accuracy)
    assert logged["geometry/1/variance_ratio"].item() == pytest.approx(layer.variance.ratio)
    assert layer.collapse is not None
    assert logged["geometry/1/nc1"].item() == pytest.approx(layer.collapse.variability)


def test_measuring_does_not_change_training(tmp_path: Path) -> None:
    watched, alone = Classifier(), Classifier()
    fit(watched, GeometryMonitor(every=2), tmp_path, loader())
    fit(alone, GeometryMonitor(every=100), tmp_path, loader())
    for got, want in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(got, want)


def test_every_other_epoch_on_given_data(tmp_path: Path) -> None:
    given = [(torch.randn(10, 6), torch.arange(10) % 3)]
    monitor = GeometryMonitor(given, every=2, model="network")
    fit(Classifier(), monitor, tmp_path, loader())
    assert list(monitor.history) == [0, 2]
    assert monitor.last is not None
    assert monitor.last.samples == 10


def test_wrong_use_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(lm.LargeMarginError, match="no module 'head' to measure"):
        fit(Classifier(), GeometryMonitor(model="head"), tmp_path, loader())
    with pytest.raises(lm.LargeMarginError, match="every must be"):
        GeometryMonitor(every=0)
