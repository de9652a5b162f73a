"""A plain PyTorch loop

Two lines change: the criterion is attached to the model, and called with the model's outputs.
Evaluation does not change: the model predicts with the head it was trained with. A checkpoint holds
the states of model, criterion and optimizer; loading the three resumes training exactly.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import largemargin as lm


def data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(digits.target)
    train = TensorDataset(images[:1300], labels[:1300])
    test = TensorDataset(images[1300:], labels[1300:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=256)


def build() -> tuple[nn.Module, lm.Criterion, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale=16.0))  # was: nn.CrossEntropyLoss()
    # param_groups: the backbone, the head (here without weight decay), and parameters of the loss,
    # if it has any. torch.optim.SGD(model.parameters(), ...) is fine otherwise.
    groups = criterion.param_groups(model, head={"weight_decay": 0.0})
    return model, criterion, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-4)


def train_epoch(
    model: nn.Module,
    criterion: lm.Criterion,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
) -> None:
    model.train()
    for images, labels in loader:
        loss = criterion(model(images), labels)  # was: the same line
        # Mixed precision: put this line under torch.autocast("cuda", dtype=torch.bfloat16). With
        # float16 use a GradScaler as usual. The loss is computed in float32 either way.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = [model(images).argmax(1) == labels for images, labels in loader]
    return torch.cat(right).float().mean().item()


def main() -> dict[str, object]:
    torch.manual_seed(0)
    train_loader, test_loader = data()
    model, criterion, optimizer = build()
    for _ in range(3):
        train_epoch(model, criterion, optimizer, train_loader)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        parts = {"model": model, "criterion": criterion, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)

        # Resume: build the same objects, then load. Attach before loading the model's state, which
        # is that of the model with its new head.
        model, criterion, optimizer = build()
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        criterion.load_state_dict(saved["criterion"])
        optimizer.load_state_dict(saved["optimizer"])

    for _ in range(3):
        train_epoch(model, criterion, optimizer, train_loader)
    terms = {name: term.item() for name, term in criterion.terms.items()}
    return {"accuracy": accuracy(model, test_loader), "terms": terms}


if __name__ == "__main__":
    print(main())
