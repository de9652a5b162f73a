"""Hugging Face Trainer: exact gradient accumulation, checkpoints, pretrained heads, errors."""

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.learned import Learned
from torch import Tensor, nn
from torch.utils.data import Dataset

import largemargin as lm
from largemargin.dropin.find_head import find_layer
from largemargin.errors import LargeMarginError, MarginWarning
from largemargin.losses.base.schedules import Schedule
from largemargin.measuring.probe import Probe

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed")

from largemargin.integrations.hugging_face import (  # noqa: E402
    CriterionCallback,
    compute_loss_func,
    record_head,
    restore_head,
)

# The Trainer pins memory by default, also where there is no accelerator.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

CLASSES = 4
CHECKPOINTING = (  # its name up to transformers 5.22
    "activation_checkpointing"
    if hasattr(transformers.TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate, on which the Trainer stands, keeps its settings for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Images(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = 10, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(rows, 1, 8, 8, generator=generator)
        self.labels = torch.arange(rows) % CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class Scaling(Schedule):
    """The scale grows by one per step."""

    def apply(self, objective: lm.Objective, step: int) -> None:
        objective.terms["cosface"].scale = 8.0 + step


def vit(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=CLASSES,
            initializer_range=0.2,
        )
    )


def penalised(classes: int, dim: int) -> lm.Objective:
    return lm.Objective(
        kobayashi=lm.Kobayashi(), even=0.5 * lm.ZeroCentroid(), margin=0.2 * lm.SampleMargin()
    )


def trainer_of(
    model: Any, criterion: lm.Criterion, folder: Path, callback: Any = None, **options: Any
) -> Any:
    parts = {
        name: options.pop(name)
        for name in ("optimizers", "train_dataset", "eval_dataset", "data_collator")
        if name in options
    }
    settings = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_strategy": "no",
        **options,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **settings),
        compute_loss_func=compute_loss_func(criterion),
        callbacks=[callback or CriterionCallback(criterion)],
        **{"train_dataset": Images(), "eval_dataset": Images(6, seed=1), **parts},
    )


def check_same(got: nn.Module, wanted: nn.Module) -> None:
    """Equal to the last bit: tensors, and the plain values of extra state."""
    one, other = got.state_dict(), wanted.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = (
            torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        )
        assert same, name


@pytest.mark.parametrize("objective", [lambda c, d: lm.CosFace(scale=8.0), penalised])
def test_ragged_micro_batches_have_the_gradient_of_the_large_batch(objective: Any) -> None:
    model = vit().double()
    criterion = lm.attach(model, objective)
    loss = compute_loss_func(criterion)
    data = Images(9)
    images, labels = data.images.double(), data.labels.clone()
    labels[[1, 7]] = -100
    criterion(model(images), labels).backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()

    total = torch.tensor(7)
    values = []
    for part in (slice(0, 2), slice(2, 6), slice(6, 9)):
        value = loss(model(images[part]), labels[part], num_items_in_batch=total)
        value.backward()
        values.append(value.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(sum(values), criterion(model(images), labels).detach())


def test_soft_labels_are_counted_as_the_trainer_counts_them() -> None:
    model = vit()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    images = Images(6).images
    soft = torch.rand(6, CLASSES).softmax(1)
    counted = sum(each.ne(-100).sum() for each in soft.split([4, 2]))
    loss = compute_loss_func(criterion)
    parts = zip(images.split([4, 2]), soft.split([4, 2]), strict=True)
    got = sum(loss(model(x), y, num_items_in_batch=counted) for x, y in parts)
    torch.testing.assert_close(got, criterion(model(images), soft))


def test_without_a_count_it_is_the_mean_and_with_nothing_to_count_zero() -> None:
    model = vit()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    loss, data = compute_loss_func(criterion), Images(4)
    assert torch.equal(
        loss(model(data.images), data.labels), criterion(model(data.images), data.labels)
    )
    ignored = torch.full((4,), -100)
    assert loss(model(data.images), ignored, num_items_in_batch=torch.tensor(0)).item() == 0


@pytest.mark.parametrize("objective", [lambda c, d: lm.CosFace(scale=8.0), penalised])
def test_the_trainer_accumulates_exactly(objective: Any, tmp_path: Path) -> None:
    """Ten samples as 4 + 4 + 2 and as one batch: the same step."""
    weights, logged = [], []
    for size, parts in ((10, 1), (4, 3)):
        model = vit()
        criterion = lm.attach(model, objective)
        trainer = trainer_of(
            model,
            criterion,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            num_train_epochs=2,
            logging_strategy="steps",
            logging_steps=1,
        )
        trainer.train()
        assert trainer.state.global_step == criterion.steps == 2
        weights.append(model.state_dict())
        logged.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        names = {key for entry in trainer.state.log_history for key in entry}
        assert {f"loss_{name}" for name in criterion.terms} <= names
    start = vit().state_dict()
    assert not torch.equal(weights[0]["classifier.weight"], start["classifier.weight"])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)


@pytest.mark.parametrize(
    ("objective", "option"),
    [(lm.CrossEntropy(), "bf16"), (lm.CosFace(scale=8.0), CHECKPOINTING)],
)
def test_options_of_the_trainer(objective: lm.Loss, option: str, tmp_path: Path) -> None:
    losses = []
    for options in ({}, {option: True}):
        model = vit()
        criterion = lm.attach(model, copy.deepcopy(objective))
        trainer = trainer_of(model, criterion, tmp_path, max_steps=3, **options)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.05 if option == "bf16" else 1e-5)


def test_evaluation_is_the_mean_in_evaluation_mode(tmp_path: Path) -> None:
    model = vit()
    criterion = lm.attach(model, lambda c, d: lm.Discriminative(c, d, margin=2.0))
    trainer = trainer_of(model, criterion, tmp_path, per_device_eval_batch_size=6)
    data = trainer.eval_dataset
    found = trainer.evaluate()["eval_loss"]
    assert not criterion.banks[0].seen.any()
    with torch.no_grad():
        wanted = criterion(model.eval()(data.images), data.labels)
    assert found == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cosface", "discriminative"])
def test_a_resumed_run_equals_an_uninterrupted_one(loss: str, tmp_path: Path) -> None:
    def start(folder: Path, epochs: int, model: Any) -> tuple[Any, Any, Any]:
        if loss == "cosface":
            criterion = lm.attach(model, lm.CosFace(scale=8.0), schedule=Scaling())
        else:
            criterion = lm.attach(
                model, lambda c, d: lm.Discriminative(c, d, margin=2.0), accumulate=2
            )
        trainer = trainer_of(
            model,
            criterion,
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            save_strategy="epoch",
        )
        return model, criterion, trainer

    straight, wanted, trainer = start(tmp_path / "straight", 4, vit())
    trainer.train()
    _, _, trainer = start(tmp_path / "half", 2, vit())
    trainer.train()
    assert (tmp_path / "half" / "checkpoint-4" / "criterion.pt").exists()

    def load() -> Any:
        return restore_head(transformers.ViTForImageClassification.from_pretrained(saved))

    saved = tmp_path / "half" / "checkpoint-4"
    resumed, criterion, trainer = start(tmp_path / "half", 4, load())
    trainer.train(resume_from_checkpoint=True)
    assert criterion.steps == wanted.steps == 8
    check_same(resumed, straight)
    check_same(criterion, wanted)
    for bank in criterion.banks:
        assert int(bank.counts.sum()) == 4 * len(Images())  # the ragged steps included

    moved, criterion, trainer = start(tmp_path / "other", 4, load())
    with pytest.raises(LargeMarginError, match=r"resumes at step 4.*resume_from=folder"):
        trainer.train(resume_from_checkpoint=str(saved))
    moved, criterion, trainer = start(tmp_path / "other", 4, load())
    trainer.pop_callback(CriterionCallback)
    trainer.add_callback(CriterionCallback(criterion, resume_from=saved))
    trainer.train(resume_from_checkpoint=str(saved))
    check_same(moved, straight)


def test_a_saved_model_predicts_with_its_head(tmp_path: Path) -> None:
    model = vit()
    criterion = lm.attach(model, lm.CosFace(scale=8.0), schedule=Scaling())
    trainer = trainer_of(
        model, criterion, tmp_path, max_steps=2, save_strategy="steps", save_steps=2
    )
    trainer.train()
    images = Images(5, seed=3).images
    wanted = model.eval()(images).logits
    model.save_pretrained(tmp_path / "final")
    for folder in (tmp_path / "final", tmp_path / "checkpoint-2"):
        loaded = transformers.ViTForImageClassification.from_pretrained(folder)
        assert restore_head(loaded) is loaded
        head = loaded.classifier
        assert (head.similarity, head.scale, head.bias) == ("cosine", 10.0, None)
        torch.testing.assert_close(loaded.eval()(images).logits, wanted)
        assert restore_head(loaded).classifier is head
    again = lm.attach(loaded, lm.CosFace(scale=10.0))  # training goes on from there
    assert again.layer is head


def gpt2(seed: int = 0) -> Any:
    """Its head has no bias, so that a plain one takes the weight without complaint."""
    torch.manual_seed(seed)
    return transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(
            vocab_size=20,
            n_positions=8,
            n_embd=8,
            n_layer=1,
            n_head=2,
            num_labels=CLASSES,
            pad_token_id=0,
            initializer_range=0.5,
        )
    )


def roberta() -> Any:
    """Its head lies in a module without a configuration."""
    torch.manual_seed(0)
    return transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(
            vocab_size=20,
            max_position_embeddings=10,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=CLASSES,
            initializer_range=0.5,
        )
    )


@pytest.mark.parametrize("kind", ["with bias", "without", "inside", "deeper"])
def test_save_pretrained_takes_the_form_along(kind: str, tmp_path: Path) -> None:
    """Without callback or record_head; also of a model in another one, and of a copy."""
    model = {"without": gpt2, "deeper": roberta}.get(kind, vit)()
    words = kind in ("without", "deeper")
    x = torch.randint(2, 20, (5, 6)) if words else Images(5, seed=3).images
    ramp = lm.schedules.Ramp("cosface.scale", 2.0, 9.0, steps=3)
    whole = nn.ModuleDict({"net": model}) if kind == "inside" else model
    criterion = lm.attach(whole, lm.CosFace(scale=9.0), schedule=ramp)
    criterion.step()
    criterion.step()
    criterion.step()
    wanted = model.eval()(x).logits
    other = copy.deepcopy(model)
    with pytest.warns(MarginWarning, match=r"from_pretrained will build a plain .*restore_head"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)  # said once
    loaded = type(model).from_pretrained(tmp_path)
    assert not torch.allclose(loaded.eval()(x).logits, wanted)
    with pytest.warns(MarginWarning, match=r"trained with similarity='cosine' and scale=9"):
        Probe(loaded)
    restore_head(loaded)
    torch.testing.assert_close(loaded(x).logits, wanted)
    Probe(loaded)
    if kind != "inside":  # the copy saves its own head
        head = find_layer(other, None)[1]
        head.weight.data.neg_()
        with pytest.warns(MarginWarning, match="from_pretrained"):
            other.save_pretrained(tmp_path / "copy")
        loaded = restore_head(type(model).from_pretrained(tmp_path / "copy"))
        torch.testing.assert_close(loaded.eval()(x).logits, -wanted)
    criterion.undo()
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "plain")
    assert not hasattr(type(model).from_pretrained(tmp_path / "plain").config, "largemargin_head")


def test_a_patched_save_pretrained_is_called_and_comes_back(tmp_path: Path) -> None:
    """Trainers patch it on the model; and a second attach stands on a first."""
    model, calls = vit(), []

    def patched(folder: Any, **options: Any) -> None:
        calls.append(folder)
        type(model).save_pretrained(model, folder, **options)

    model.save_pretrained = patched
    first = lm.attach(model, lm.CosFace(scale=9.0), warn=False)
    second = lm.attach(model, lm.CosFace(scale=5.0), warn=False)
    model.save_pretrained(tmp_path, safe_serialization=True)
    assert calls == [tmp_path]
    assert restore_head(vit().from_pretrained(tmp_path)).classifier.scale == 5.0
    second.undo()
    model.save_pretrained(tmp_path)
    assert restore_head(vit().from_pretrained(tmp_path)).classifier.scale == 9.0
    first.undo()
    assert vars(model)["save_pretrained"] is patched
    copied = pickle.loads(pickle.dumps(vit_attached()))
    with pytest.warns(MarginWarning, match="from_pretrained"):
        copied.save_pretrained(tmp_path / "copy")
    assert restore_head(vit().from_pretrained(tmp_path / "copy")).classifier.scale == 9.0


def vit_attached() -> Any:
    model = vit()
    lm.attach(model, lm.CosFace(scale=9.0))
    return model


def test_another_objective_leaves_no_form_of_the_first(tmp_path: Path) -> None:
    """Cross entropy on a model that was loaded and not restored trains the plain layer."""
    first = vit()
    record_head(first, lm.attach(first, lm.CosFace()))
    first.save_pretrained(tmp_path / "first")
    model = vit().from_pretrained(tmp_path / "first")
    lm.attach(model, lm.CrossEntropy())
    model.save_pretrained(tmp_path / "second")
    again = vit().from_pretrained(tmp_path / "second")
    assert type(restore_head(again).classifier) is nn.Linear


def test_heads_that_cannot_be_restored() -> None:
    model = vit()
    with pytest.raises(LargeMarginError, match="saved with its own head, or as a state dict"):
        restore_head(model)
    record_head(model, lm.attach(model, lm.CrossEntropy()))
    plain = model.classifier
    assert restore_head(model).classifier is plain
    bare = nn.Sequential(nn.Linear(4, 3))
    criterion = lm.attach(bare, lm.CosFace(scale=8.0))
    with pytest.raises(LargeMarginError, match="no config"):
        record_head(bare, criterion)
    wrong = vit()
    wrong.config.largemargin_head = {"layer": "vit", "similarity": "cosine", "scale": 1.0}
    with pytest.raises(LargeMarginError, match="Load the architecture"):
        restore_head(wrong)


def test_parameters_of_the_loss_must_be_in_the_optimizer(tmp_path: Path) -> None:
    model = vit()
    criterion = lm.attach(model, Learned())
    trainer = trainer_of(model, criterion, tmp_path, max_steps=1)
    with pytest.raises(LargeMarginError, match=r"optimizers=\(.*criterion.param_groups"):
        trainer.train()


def test_parameters_of_the_loss_are_trained_as_in_a_plain_loop(tmp_path: Path) -> None:
    """The Trainer clears gradients of the model alone; those of the loss must not pile up."""

    def start() -> tuple[Any, lm.Criterion, torch.optim.Optimizer]:
        model = vit()
        criterion = lm.attach(model, Learned())
        return model, criterion, torch.optim.SGD(criterion.param_groups(model), lr=0.1)

    model, criterion, optimizer = start()
    data = Images()
    for _ in range(3):
        optimizer.zero_grad()
        criterion(model(data.images), data.labels).backward()
        optimizer.step()
    other, trained, optimizer = start()
    trainer = trainer_of(
        other,
        trained,
        tmp_path,
        max_steps=3,
        per_device_train_batch_size=10,
        optimizers=(optimizer, None),
    )
    trainer.train()
    torch.testing.assert_close(
        list(trained.parameters()), list(criterion.parameters()), rtol=1e-5, atol=1e-6
    )


def test_wrong_use_is_told_what_to_do(tmp_path: Path) -> None:
    model = vit()
    with pytest.raises(LargeMarginError, match="compute_loss_func needs the criterion"):
        compute_loss_func(lm.CosFace())  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match="CriterionCallback needs the criterion"):
        CriterionCallback(model)
    with pytest.raises(LargeMarginError, match='Use reduction="mean"'):
        compute_loss_func(lm.attach(vit(), lm.CosFace(scale=8.0, reduction="sum")))
    with pytest.raises(LargeMarginError, match="Mark ignored samples with -100"):
        compute_loss_func(lm.attach(vit(), lm.CosFace(scale=8.0, ignore_index=255)))
    criterion = lm.attach(model, lambda c, d: lm.Discriminative(c, d))
    with pytest.raises(LargeMarginError, match="looks for the key 'labels'"):
        compute_loss_func(criterion)(model(Images().images), None)
    several = SimpleNamespace(n_gpu=2, gradient_accumulation_steps=1)
    with pytest.raises(LargeMarginError, match=r"nn\.DataParallel on 2 GPUs.*torchrun"):
        CriterionCallback(criterion).on_train_begin(several, None, None, model=model)
    with pytest.raises(LargeMarginError, match="attached to another model"):
        trainer_of(vit(), criterion, tmp_path, max_steps=1).train()
    with pytest.raises(LargeMarginError, match="Attach with accumulate=2"):
        trainer_of(model, criterion, tmp_path, max_steps=1, gradient_accumulation_steps=2).train()


def test_only_logs_of_the_loss_get_its_terms() -> None:
    model = vit()
    callback = CriterionCallback(lm.attach(model, lm.CosFace()))
    logs = {"eval_accuracy": 1.0}
    callback.on_log(None, SimpleNamespace(log_history=[logs]), None, logs=logs)
    callback.on_log(None, SimpleNamespace(log_history=[logs]), None)
    assert logs == {"eval_accuracy": 1.0}
    callback.criterion.terms = {"cosface": torch.tensor(2.0)}
    callback.on_log(None, SimpleNamespace(log_history=[logs]), None, logs=logs)
    assert logs == {"eval_accuracy": 1.0}
    logs, kept = {"loss": 3.0}, {"loss": 3.0, "step": 7}
    callback.on_log(None, SimpleNamespace(log_history=[{}, kept]), None, logs=logs)
    assert logs == {"loss": 3.0, "loss_cosface": 2.0}
    assert kept == {"loss": 3.0, "loss_cosface": 2.0, "step": 7}


@pytest.mark.parametrize("step", [1, 7])
def test_a_resumed_run_needs_the_state_of_its_criterion(step: int, tmp_path: Path) -> None:
    model = vit()
    callback = CriterionCallback(lm.attach(model, lm.CosFace()))
    args = SimpleNamespace(output_dir=str(tmp_path), gradient_accumulation_steps=1)
    callback.on_train_begin(args, SimpleNamespace(global_step=0), None, model=model)
    with pytest.raises(LargeMarginError, match=f"resumes at step {step}"):
        callback.on_train_begin(args, SimpleNamespace(global_step=step), None, model=model)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"layer": "classifier"}, "is damaged"),
        ([1], "is damaged"),
        ({"layer": 3, "similarity": "cosine", "scale": 1.0, "bias": False}, "there is none"),
        ({"layer": "none", "similarity": "cosine", "scale": 1.0, "bias": False}, "there is none"),
        ({"layer": "classifier", "similarity": "dot", "scale": 1.0, "bias": 0}, "is damaged"),
        ({"layer": "classifier", "similarity": "cosine", "scale": 0, "bias": False}, "scale must"),
        (
            {"layer": "classifier", "similarity": "?", "scale": 1.0, "bias": False},
            "similarity must",
        ),
    ],
    ids=str,
)
def test_an_edited_form_of_a_head_is_refused(form: Any, said: str, tmp_path: Path) -> None:
    model = vit()
    model.config.largemargin_head = form
    (tmp_path / "largemargin_head.json").write_text(json.dumps(form))
    for folder in (None, tmp_path):
        with pytest.raises(LargeMarginError, match=said):
            restore_head(model, folder)
    assert type(model.classifier) is nn.Linear
