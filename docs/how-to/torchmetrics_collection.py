"""torchmetrics: margins beside accuracy

The geometry of a model as metrics that update batch by batch, in any loop and over any number of
processes. One collection takes features, labels and the head; its metrics share their common state.
In a LightningModule make the collection an attribute, update it in `validation_step` and call
`self.log_dict(self.geometry.compute())` at the end of the epoch.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import largemargin as lm
from largemargin.integrations.torchmetrics import (
    ClassMargin,
    Dispersion,
    MarginRejectionAUROC,
    SampleMargin,
    VarianceSplit,
)


def data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(digits.target)
    train = TensorDataset(images[:1300], labels[:1300])
    test = TensorDataset(images[1300:], labels[1300:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=100)


def geometry() -> MetricCollection:
    return MetricCollection(
        {
            "class_margin": ClassMargin(),
            "cosine_margin": SampleMargin("cosine", "mean"),
            "cosine_margin_q05": SampleMargin("cosine", 0.05),
            "boundary_distance": SampleMargin("distance", "minimum"),
            "dispersion": Dispersion(10),
            "variance_ratio": VarianceSplit(10, "ratio"),
            "rejection_auroc": MarginRejectionAUROC("cosine"),
        }
    )


def main() -> dict[str, object]:
    torch.manual_seed(0)
    train_loader, test_loader = data()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale=16.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accuracy, metrics = MulticlassAccuracy(10, average="micro"), geometry()
    found: dict[str, object] = {}
    for _ in range(4):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                logits = model(images)
                accuracy.update(logits, labels)
                # The criterion has read the features at the head's input. Without a criterion:
                # features=backbone(images), head=model.fc.
                features = criterion.read(logits).features
                metrics.update(features=features, labels=labels, head=criterion)
        numbers = {"accuracy": accuracy.compute(), **metrics.compute()}
        found = {name: value.item() for name, value in numbers.items()}
        accuracy.reset()
        metrics.reset()
    return found


if __name__ == "__main__":
    print(main())
