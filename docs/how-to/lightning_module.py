"""Lightning

The criterion is an attribute of the module: it moves with the module, its parameters are in
`self.parameters()`, and its state is in the module's checkpoints. `MarginSchedule` advances the
schedules with the optimizer and logs the terms.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import largemargin as lm
from largemargin.integrations.lightning import MarginSchedule


class Classifier(lightning.LightningModule):
    def __init__(self, total_steps: int = 100) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.criterion = lm.attach(
            self.model,
            lm.ArcFace(margin=0.3, scale=16.0),
            schedule="preset",
            total_steps=total_steps,
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return self.criterion(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val/loss", self.criterion(logits, labels))
        self.log("val/accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(digits.target)
    train = TensorDataset(images[:1300], labels[:1300])
    test = TensorDataset(images[1300:], labels[1300:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=512)


def main() -> dict[str, object]:
    lightning.seed_everything(0, verbose=False)
    train_loader, test_loader = data()
    epochs = 4
    module = Classifier(total_steps=epochs * len(train_loader))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[MarginSchedule()],
        # Also: precision="bf16-mixed"; accumulate_grad_batches=k with attach(..., accumulate=k);
        # trainer.fit(..., ckpt_path=...) to resume.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_loader, test_loader)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {
        "accuracy": metrics["val/accuracy"],
        "terms": {name: value for name, value in metrics.items() if name.startswith("train/")},
        "steps": module.criterion.steps,
    }


if __name__ == "__main__":
    print(main())
