"""Continue with a model trained with pytorch-metric-learning: same loss, same class vectors.

pip install '.[metric-learning]'
"""

import torch
from pytorch_metric_learning.losses import ArcFaceLoss
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import largemargin as lm
from largemargin.integrations.metric_learning import from_pml


def main() -> dict[str, float]:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, random_state=0, stratify=labels)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y, y_test = (torch.tensor(part) for part in parts[2:])

    # Before: the loss holds the class vectors as W (64, 10), and its margin is in degrees.
    embed = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    old = ArcFaceLoss(num_classes=10, embedding_size=64, margin=11.5, scale=16)
    optimizer = torch.optim.Adam([*embed.parameters(), *old.parameters()], lr=1e-3)
    train(20, optimizer, lambda batch: old(embed(x[batch]), y[batch]), len(x))

    # After: the loss, with its margin in radians, and a head (10, 64) that predicts.
    loss, head = from_pml(old)
    with torch.no_grad():
        difference = float(abs(old(embed(x), y) - loss(embed(x), head, y)))

    # Continue training. The head is part of the model now: one optimizer, one checkpoint.
    model = nn.Sequential(embed, head)
    criterion = lm.attach(model, loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(20, optimizer, lambda batch: criterion(model(x[batch]), y[batch]), len(x))
    accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
    print(f"difference {difference:.1e}, accuracy {accuracy:.3f}")
    return {"difference": difference, "accuracy": accuracy}


def train(epochs, optimizer, loss_of, count):
    for _ in range(epochs):
        for batch in torch.randperm(count).split(64):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
