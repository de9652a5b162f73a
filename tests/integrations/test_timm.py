"""timm: optimizers, EMA, mixup and checkpoints around ``MarginTask``."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.learned import Learned
from torch import Tensor, nn

import largemargin as lm
from largemargin.errors import LargeMarginError

timm = pytest.importorskip("timm", reason="timm is not installed")

from timm.data import Mixup  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.task import TrainingTask, load_task_ema_checkpoint, resume_task_checkpoint  # noqa: E402
from timm.utils import ModelEmaV3  # noqa: E402

from largemargin.integrations.timm import MarginTask  # noqa: E402

CLASSES = 4


def vit() -> nn.Module:
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=8,
        patch_size=4,
        in_chans=1,
        embed_dim=12,
        depth=2,
        num_heads=2,
        num_classes=CLASSES,
    )
    return model


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1, 8, 8), torch.arange(rows) % CLASSES


def cosface(classes: int, dim: int) -> lm.Loss:
    return lm.CosFace(scale=8.0)


def discriminative(classes: int, dim: int) -> lm.Objective:
    return lm.Objective(
        softmax=lm.CrossEntropy(), lmd=0.1 * lm.Discriminative(classes, dim, margin=2.0)
    )


def learned(classes: int, dim: int) -> lm.Loss:
    return Learned()


def make(objective: Callable[[int, int], Any] = cosface) -> MarginTask:
    model = vit()
    return MarginTask(model, lm.attach(model, objective), verbose=False)


def held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def check_same(got: nn.Module, wanted: nn.Module) -> None:
    """Equal to the last bit: tensors, and the plain values of extra state."""
    one, other = got.state_dict(), wanted.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = (
            torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        )
        assert same, name


def step(
    task: MarginTask, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    optimizer.zero_grad()
    task(images, labels)["loss"].backward()
    optimizer.step()


def test_a_task_gives_loss_output_and_terms() -> None:
    task = make(discriminative)
    assert isinstance(task, TrainingTask)
    images, labels = batch()
    result = task(images, labels)
    assert result["loss"].dim() == 0
    assert result["loss"].requires_grad
    assert result["output"].shape == (8, CLASSES)
    terms = {"softmax_loss", "lmd.compact_loss", "lmd.margin_loss", "lmd.reg_loss"}
    assert set(result) == {"loss", "output"} | terms
    assert not any(result[name].requires_grad for name in terms)
    torch.testing.assert_close(
        result["softmax_loss"], nn.functional.cross_entropy(result["output"], labels)
    )


def test_mixup_gives_soft_targets() -> None:
    task = make()
    images, labels = batch()
    mixed, targets = Mixup(mixup_alpha=1.0, num_classes=CLASSES)(images, labels)
    assert targets.shape == (8, CLASSES)
    result = task(mixed, targets)
    head = task.criterion.head
    features = task.criterion.read(result["output"]).features
    each = lm.CosFace(scale=8.0, reduction="none")
    values = [each(features, head.weight, torch.full((8,), c)) for c in range(CLASSES)]
    wanted = (torch.stack(values, 1) * targets).sum(1).mean()
    torch.testing.assert_close(result["loss"], wanted)
    with pytest.raises(LargeMarginError, match="soft"):
        make(discriminative)(mixed, targets)


@pytest.mark.parametrize("objective", [cosface, learned])
def test_an_optimizer_of_the_task_holds_everything(objective: Any) -> None:
    task = make(objective)
    wanted = {
        id(each) for each in (*task.trainable_module.parameters(), *task.criterion.parameters())
    }
    plain = create_optimizer_v2(task, opt="sgd", lr=0.1)
    decayed = create_optimizer_v2(task, opt="adamw", lr=0.1, weight_decay=0.1)
    layered = create_optimizer_v2(task, opt="adamw", lr=0.1, weight_decay=0.1, layer_decay=0.5)
    assert held(plain) == held(decayed) == held(layered) == wanted
    # The model's own rules hold inside the task as they do outside.
    alone = create_optimizer_v2(task.trainable_module, opt="adamw", lr=0.1, weight_decay=0.1)

    def free(optimizer: torch.optim.Optimizer) -> set[int]:
        groups = [group for group in optimizer.param_groups if group["weight_decay"] == 0]
        return {id(each) for group in groups for each in group["params"]}

    own = {id(each) for each in task.criterion.parameters()}
    assert id(task.trainable_module.pos_embed) in free(decayed)
    assert free(decayed) - own == free(alone)
    scale = {id(p): group["lr_scale"] for group in layered.param_groups for p in group["params"]}
    body = create_optimizer_v2(
        task.trainable_module, opt="adamw", lr=0.1, weight_decay=0.1, layer_decay=0.5
    )
    for group in body.param_groups:
        for parameter in group["params"]:
            assert scale[id(parameter)] == pytest.approx(group["lr_scale"])
    assert all(scale[each] == max(scale.values()) for each in own)


def test_parameters_of_the_loss_are_trained_and_clipped() -> None:
    task = make(learned)
    own = list(task.criterion.parameters())
    before = [each.detach().clone() for each in own]
    step(task, create_optimizer_v2(task, opt="sgd", lr=0.1), *batch())
    assert not any(torch.equal(old, new) for old, new in zip(before, own, strict=True))
    everything = {id(each) for each in task.get_clip_parameters()}
    assert everything == {id(each) for each in task.parameters()}
    without = {id(each) for each in task.get_clip_parameters(exclude_head=True)}
    assert everything - without == {id(each) for each in task.criterion.layer.parameters()}


@pytest.mark.parametrize("made", ["by the task", "by hand"])
def test_averaged_models_have_the_same_head(made: str) -> None:
    task = make()
    optimizer = create_optimizer_v2(task, opt="sgd", lr=0.1)
    model = task.get_eval_model()
    average = task.setup_ema(decay=0.5) if made == "by the task" else ModelEmaV3(model, decay=0.5)
    images, labels = batch()
    old = model.head.weight.detach().clone()
    step(task, optimizer, images, labels)
    if made == "by the task":
        task.update_ema()
    else:
        average.update(model)
    head = average.module.head
    assert isinstance(head, lm.ClassHead)
    assert (head.similarity, head.scale) == ("cosine", 8.0)
    torch.testing.assert_close(head.weight, (old + model.head.weight) / 2)
    average.set(model)
    model.eval()
    torch.testing.assert_close(average.module(images), model(images))
    # A pass of the average does not pass for one of the model.
    with pytest.raises(LargeMarginError, match="needs an attach of its own"):
        task.criterion(average.module(images + 1), labels)


@pytest.mark.parametrize("objective", [cosface, discriminative, learned])
def test_a_resumed_run_equals_an_uninterrupted_one(objective: Any, tmp_path: Path) -> None:
    batches = [batch() for _ in range(4)]

    def start() -> tuple[MarginTask, torch.optim.Optimizer]:
        torch.manual_seed(0)
        task = make(objective)
        optimizer = create_optimizer_v2(task, opt="adamw", lr=0.01)
        task.setup_ema(decay=0.5)
        return task, optimizer

    def run(task: MarginTask, optimizer: torch.optim.Optimizer, part: slice) -> None:
        for each in batches[part]:
            step(task, optimizer, *each)
            task.update_ema()

    straight, optimizer = start()
    run(straight, optimizer, slice(0, 4))
    half, optimizer = start()
    run(half, optimizer, slice(0, 2))
    file = tmp_path / "last.pth"
    state = half.get_checkpoint_state() | half.get_checkpoint_state(ema=True)
    assert "task_state_ema" not in state
    torch.save({**state, "optimizer": optimizer.state_dict(), "epoch": 1, "version": 2}, file)

    resumed, optimizer = start()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.add_(1.0)
    assert resume_task_checkpoint(resumed, file, optimizer, log_info=False) == 2
    load_task_ema_checkpoint(resumed, file)
    assert resumed.criterion.steps == 2
    run(resumed, optimizer, slice(2, 4))
    check_same(resumed, straight)


def test_wrong_parts_are_refused() -> None:
    model = vit()
    with pytest.raises(LargeMarginError, match=r"MarginTask needs the criterion that lm\.attach"):
        MarginTask(model, lm.CosFace())  # type: ignore[arg-type]
    criterion = lm.attach(vit(), lm.CosFace(scale=8.0))
    with pytest.raises(LargeMarginError, match="attached to another model"):
        MarginTask(model, criterion)


def test_state_of_another_task_is_refused_unless_told_otherwise() -> None:
    task = make(discriminative)
    foreign = {"projection": {}}
    with pytest.raises(LargeMarginError, match=r"holds \['projection'\]"):
        task.load_task_state(foreign)
    task.load_task_state(foreign, strict=False)
    task.load_task_state(None)  # a checkpoint of plain training
    task.load_task_state(make(discriminative).get_task_state(), ema=True)
    assert task.criterion.steps == 0


# Dynamo asks every tensor for its gradient and hides the warning; here warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_task_gives_the_same_loss() -> None:
    task = make()
    eager = copy.deepcopy(task)
    images, labels = batch()
    task.compile(backend="eager")
    got, wanted = task(images, labels), eager(images, labels)
    torch.testing.assert_close(got, wanted)
    # Names in checkpoints are those of the model, whatever wraps it.
    assert (
        task.get_checkpoint_state()["state_dict"].keys()
        == eager.get_eval_model().state_dict().keys()
    )
