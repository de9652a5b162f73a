"""Hugging Face Accelerate

`prepare` takes model, optimizer and loader as usual. The criterion is not prepared: it follows its
model's device and precision. Register it for checkpointing, so that `save_state` and `load_state`
keep its centroids and schedules.
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import largemargin as lm

MICRO_BATCHES = 2


def data() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(digits.target)
    train = TensorDataset(images[:1300], labels[:1300])
    test = TensorDataset(images[1300:], labels[1300:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=256)


def main() -> dict[str, object]:
    set_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES)
    train_loader, test_loader = data()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # Attach before prepare. `accumulate` tells centroid banks how many micro-batches make a step;
    # with stepping="manual" schedules count optimizer steps, also if an epoch ends early.
    criterion = lm.attach(
        model,
        lambda classes, dim: lm.Objective(
            softmax=lm.CrossEntropy(), lmd=0.1 * lm.Discriminative(classes, dim, margin=3.0)
        ),
        accumulate=MICRO_BATCHES,
        stepping="manual",
    )
    optimizer = torch.optim.SGD(criterion.param_groups(model), lr=0.1, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    accelerator.register_for_checkpointing(criterion)

    def train_epoch() -> None:
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = criterion(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                criterion.step()

    train_epoch()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        train_epoch()
        accelerator.load_state(folder)  # restores model, optimizer and criterion
    for _ in range(3):
        train_epoch()

    model.eval()
    right = []
    with torch.no_grad():
        for images, labels in test_loader:
            predicted, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            right.append(predicted == labels)
    return {
        "accuracy": torch.cat(right).float().mean().item(),
        "terms": {name: term.item() for name, term in criterion.terms.items()},
        "steps": criterion.steps,
    }


if __name__ == "__main__":
    print(main())
