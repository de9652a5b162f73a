"""torchvision's resnet18 on real images through ``attach``: it learns, predicts, saves, resumes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models import resnet18

import largemargin as lm

CLASSES, BATCH = 10, 64


def images() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits as 32 x 32 images with three channels."""
    digits = load_digits()
    x = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    x = F.interpolate(x, size=32, mode="bilinear", align_corners=False)
    return x.expand(-1, 3, -1, -1).contiguous(), torch.as_tensor(digits.target)


OBJECTIVES: dict[str, Callable[[], object]] = {
    "softmax": lm.CrossEntropy,
    "cosface": lambda: lm.CosFace(margin=0.2, scale=16.0),
    "arcface": lambda: lm.ArcFace(margin=0.2, scale=16.0),
    "kobayashi": lambda: lm.Kobayashi(strength=0.3),
    "lm_softmax": lambda: lm.Objective(lm=lm.LMSoftmax(scale=16.0), zero=lm.ZeroCentroid()),
    "softmax + lmd": lambda: (
        lambda classes, dim: lm.Objective(
            softmax=lm.CrossEntropy(), lmd=0.1 * lm.Discriminative(classes, dim, margin=3.0)
        )
    ),
}


@dataclass
class Run:
    model: nn.Module
    criterion: lm.Criterion
    optimizer: torch.optim.Optimizer
    order: torch.Generator
    steps: int = 0

    def state(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "criterion": self.criterion.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
        }

    def load(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])
        self.criterion.load_state_dict(state["criterion"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])

    def train(self, x: Tensor, y: Tensor, steps: int) -> list[float]:
        self.model.train()
        losses = []
        for _ in range(steps):
            batch = torch.randint(len(y), (BATCH,), generator=self.order)
            loss = self.criterion(self.model(x[batch]), y[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        self.model.eval()
        return self.model(x)


def new_run(name: str) -> Run:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = resnet18(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # before attach
    criterion = lm.attach(model, OBJECTIVES[name]())
    return Run(model, criterion, optimizer, torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_saved_and_resumed_training_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    x, y = images()
    straight = new_run(name)
    first = straight.train(x, y, 3)
    torch.save(straight.state(), tmp_path / "checkpoint.pt")
    before = straight.predict(x[:32])
    second = straight.train(x, y, 3)

    resumed = new_run(name)
    resumed.load(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert torch.equal(resumed.predict(x[:32]), before)
    assert resumed.train(x, y, 3) == second
    assert torch.equal(resumed.predict(x[:32]), straight.predict(x[:32]))
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_resnet18_learns_digits(name: str) -> None:
    x, y = images()
    run = new_run(name)
    losses = run.train(x[:1400], y[:1400], 100)  # after 60 it still jumps by 0.1
    assert sum(losses[-5:]) < sum(losses[:5])
    logits = run.predict(x[1400:])
    accuracy = (logits.argmax(1) == y[1400:]).float().mean().item()
    assert accuracy > 0.8, accuracy

    head = run.criterion.head
    run.model(x[1400:1464])  # the head's logits are those of its features and geometry
    with torch.no_grad():
        seen = run.criterion.read(run.model(x[1400:1464]))
        assert torch.allclose(head(seen.features), logits[:64], atol=1e-4)
    cosine = name in ("cosface", "arcface", "lm_softmax")
    assert head.similarity == ("cosine" if cosine else "dot")

    frozen = copy.deepcopy(run.model)
    run.criterion.undo()
    assert isinstance(run.model.fc, nn.Linear)
    assert run.model.fc.weight.equal(frozen.fc.weight)
