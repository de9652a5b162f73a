"""timm

`MarginTask` is a timm training task: optimizer, EMA, Mixup, clipping and task checkpoints work as
with timm's own tasks. Attach before the EMA copy is made, so that it has the same head.
"""

import tempfile
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.task import resume_task_checkpoint

import largemargin as lm
from largemargin.integrations.timm import MarginTask


def build() -> tuple[MarginTask, torch.optim.Optimizer]:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=8,
        patch_size=2,
        in_chans=1,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=10,
    )
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale=16.0))
    task = MarginTask(model, criterion, verbose=False)
    optimizer = create_optimizer_v2(task, opt="adamw", lr=3e-3, weight_decay=0.05)
    task.setup_ema(decay=0.95)
    return task, optimizer


def train_epoch(
    task: MarginTask,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    mixup: Mixup,
) -> dict[str, torch.Tensor]:
    task.train()
    for batch in torch.randperm(len(labels)).split(32)[:-1]:  # Mixup needs even batches
        result = task(*mixup(images[batch], labels[batch]))
        optimizer.zero_grad()
        result["loss"].backward()
        torch.nn.utils.clip_grad_norm_(task.get_clip_parameters(), 1.0)
        optimizer.step()
        task.update_ema()
    return result


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


def main() -> dict[str, object]:
    timm.utils.random_seed(0)
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(digits.target)
    train, test = (images[:1300], labels[:1300]), (images[1300:], labels[1300:])
    mixup = Mixup(mixup_alpha=0.1, label_smoothing=0.05, num_classes=10)

    task, optimizer = build()
    for _ in range(3):
        train_epoch(task, optimizer, *train, mixup)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last.pth"
        state = task.get_checkpoint_state() | task.get_checkpoint_state(ema=True)
        torch.save(state | {"optimizer": optimizer.state_dict(), "epoch": 2}, file)
        task, optimizer = build()
        resume_task_checkpoint(task, file, optimizer, log_info=False)
        timm.task.load_task_ema_checkpoint(task, file)

    for _ in range(3):
        result = train_epoch(task, optimizer, *train, mixup)
    return {
        "accuracy": accuracy(task.get_eval_model(), *test),
        "accuracy of the average": accuracy(task.get_eval_model(ema=True), *test),
        "terms": {name: value.item() for name, value in result.items() if name != "output"},
    }


if __name__ == "__main__":
    print(main())
