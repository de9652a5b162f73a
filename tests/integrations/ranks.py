"""What each process of ``test_two_processes`` runs: a trainer with its piece of the batch."""

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import largemargin as lm

ROWS, CLASSES, WORLD, MICRO = 16, 4, 2, 2
RATE, STEPS = 0.1, 2


class Learned(lm.CosFace):
    """A loss with a parameter of its own: CosFace times exp(factor)."""

    def __init__(self, scale: float = 8.0) -> None:
        super().__init__(scale=scale)
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return self.factor.exp() * super().forward(*inputs, **options)


class Rows(Dataset[dict[str, Tensor]]):
    """A few labels are to be ignored, unevenly: the pieces of the batch do not weigh the same."""

    def __init__(self, ignored: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(ROWS, 6, generator=generator)
        self.labels = torch.arange(ROWS) % CLASSES
        if ignored:
            self.labels[[0, 1, 2, 5, 15]] = -100

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(inputs))}


def build() -> tuple[Network, lm.Criterion, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network()
    criterion = lm.attach(model, Learned(), layer="head")
    return model, criterion, torch.optim.SGD(criterion.param_groups(model), lr=RATE)


def result(model: nn.Module, criterion: lm.Criterion) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *criterion.named_parameters())
    return {name: parameter.detach().clone() for name, parameter in named}


def one_process(ignored: bool) -> dict[str, Tensor]:
    """The reference: a plain loop on the whole batch."""
    model, criterion, optimizer = build()
    data = Rows(ignored)
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(model(data.inputs), data.labels).backward()
        optimizer.step()
    return result(model, criterion)


def timm_rank(rank: int, folder: str) -> None:
    from largemargin.integrations.timm import MarginTask

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=300),
    )
    model, criterion, optimizer = build()
    task = MarginTask(model, criterion, verbose=False)
    task.prepare_distributed()
    data = Rows(ignored=False)
    pieces = torch.arange(ROWS).chunk(WORLD)[rank].chunk(MICRO)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with task.no_sync():
            (task(data.inputs[pieces[0]], data.labels[pieces[0]])["loss"] / MICRO).backward()
        (task(data.inputs[pieces[1]], data.labels[pieces[1]])["loss"] / MICRO).backward()
        optimizer.step()
    torch.save(result(model, criterion), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def hugging_face_rank(rank: int, folder: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    from transformers import Trainer, TrainingArguments

    from largemargin.integrations.hugging_face import CriterionCallback, compute_loss_func

    model, criterion, optimizer = build()
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            use_cpu=True,
            label_names=["labels"],
            ddp_backend="gloo",
            per_device_train_batch_size=ROWS // WORLD // MICRO,
            gradient_accumulation_steps=MICRO,
            num_train_epochs=STEPS,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Rows(ignored=True),
        compute_loss_func=compute_loss_func(criterion),
        callbacks=[CriterionCallback(criterion)],
        optimizers=(optimizer, None),
    )
    trainer.train()
    torch.save(result(model, criterion), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
