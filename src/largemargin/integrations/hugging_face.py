"""Hugging Face Trainer: the loss, its state in checkpoints, and heads in ``save_pretrained``.

criterion = lm.attach(model, lm.CosFace(scale=16.0))
trainer = Trainer(
    model, args, ..., compute_loss_func=compute_loss_func(criterion),
    callbacks=[CriterionCallback(criterion)],
)
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from largemargin.dropin.criterion import Criterion
from largemargin.dropin.saved_heads import (
    CONFIG_KEY,
    FORM_FILE,
    SavePretrained,
    check_form,
    is_adapted,
    is_plain,
    record_form,
    take_form_along,
)
from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.heads.class_head import ClassHead
from largemargin.integrations.trainer_duties import (
    average_gradients,
    check_accumulation,
    check_belongs,
    check_criterion,
    check_trained,
)
from largemargin.losses.base.loss import Loss

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingPackage(
        "largemargin.integrations.hugging_face needs transformers. Install it: "
        "pip install 'largemargin[transformers]'"
    ) from error

IGNORED = -100
"""The label the Trainer does not count in ``num_items_in_batch``."""

STATE_FILE = "criterion.pt"
Model = TypeVar("Model", bound=nn.Module)


def compute_loss_func(criterion: Criterion) -> Callable[..., Tensor]:
    r"""The function ``Trainer(compute_loss_func=...)`` takes.

    The Trainer adds up the losses of a step's micro-batches as they are. Each is therefore its sum
    over samples divided by all the samples of the step, on all processes:

    .. math:: L_k = \frac{n_k}{n}\,\mathrm{mean}_k\qquad n = \texttt{num\_items\_in\_batch}

    so that k micro-batches, ragged or not, give the gradient of one large batch. That is exact for
    losses that are means over samples and for penalties on prototypes. Losses that weight classes
    divide by the weights of their own micro-batch, and centroid losses know the centroids of their
    own micro-batch: there it is the average of the micro-batches, weighted by their size.
    """
    check_criterion(criterion, "compute_loss_func")
    for name, loss in criterion.objective.terms.items():
        assert isinstance(loss, Loss)
        if loss.reduction != "mean":
            raise LargeMarginError(
                f"the term {name!r} has reduction={loss.reduction!r}, but compute_loss_func makes "
                'the sum over a step\'s micro-batches from their means. Use reduction="mean".'
            )
        if loss.ignore_index not in (IGNORED, None):
            raise LargeMarginError(
                f"the term {name!r} ignores the label {loss.ignore_index}, but the Trainer counts "
                f"samples by the label {IGNORED}. Mark ignored samples with {IGNORED}."
            )

    def loss_of_outputs(
        outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if labels is None:
            raise LargeMarginError(
                "the Trainer found no labels in the batch: it looks for the key 'labels'. Name the "
                "column so. For a model whose forward takes no labels, say "
                "TrainingArguments(label_names=['labels']), or the Trainer drops the column."
            )
        value: Tensor = criterion(outputs, labels)
        if num_items_in_batch is None:
            return value
        total = torch.as_tensor(num_items_in_batch, device=value.device).clamp_min(1)
        return value * (labels.ne(IGNORED).sum().to(value.dtype) / total)

    return loss_of_outputs


class CriterionCallback(TrainerCallback):
    """Keeps a criterion in step with the Trainer and in its checkpoints.

    - Schedules advance once per optimizer step, whatever the gradient accumulation, and centroid
      banks that collect micro-batches write then: the callback takes the counting over from
      ``attach`` (as with ``stepping="manual"``).
    - ``criterion.pt`` is written into every checkpoint and loaded when training resumes.
    - The head's form is written into ``model.config``, see :func:`restore_head`.
    - Parameters of the loss itself are checked to be in the optimizer, their gradients averaged
      over processes and cleared: the Trainer does both for the model only.
    - The terms are in the training log (``state.log_history`` and the progress bar) as
      ``loss_<term>``.

    To resume, load the model from the checkpoint too:

        model = restore_head(ViTForImageClassification.from_pretrained(checkpoint))
        criterion = lm.attach(model, ...)
        ...
        trainer.train(resume_from_checkpoint=checkpoint)

    By itself the Trainer of transformers 5 leaves out weights that ``save_pretrained`` renames,
    those of a ViT's encoder among them, and only logs it (huggingface/transformers issues 43701 and
    48805).

    Args:
        criterion: what ``attach`` returned.
        resume_from: folder of the checkpoint to resume from where it lies outside ``output_dir``;
            the Trainer does not tell its callbacks.
    """

    def __init__(self, criterion: Criterion, *, resume_from: str | Path | None = None) -> None:
        check_criterion(criterion, "CriterionCallback")
        self.criterion = criterion
        self.resume_from = resume_from
        self._handles: list[Any] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        criterion = self.criterion
        check_belongs(criterion, model)
        if getattr(args, "n_gpu", 1) > 1:
            raise LargeMarginError(
                f"the Trainer would run nn.DataParallel on {args.n_gpu} GPUs, which hides the "
                "features of the copies. Start it with torchrun (one process per GPU), or show it "
                "one GPU: CUDA_VISIBLE_DEVICES=0."
            )
        check_accumulation(
            criterion, args.gradient_accumulation_steps, "gradient_accumulation_steps"
        )
        if kwargs.get("optimizer") is not None:
            check_trained(
                criterion,
                kwargs["optimizer"].param_groups,
                "Pass Trainer(optimizers=(torch.optim.AdamW(criterion.param_groups(model), "
                "lr=...), None)).",
            )
        criterion.automatic = False
        self._handles = average_gradients(criterion)
        if state.global_step > 0:
            file = Path(self.resume_from or _folder(args, state)) / STATE_FILE
            if not file.exists():
                raise LargeMarginError(
                    f"training resumes at step {state.global_step}, but {file} does not exist. If "
                    "the checkpoint lies elsewhere, say where: CriterionCallback(criterion, "
                    "resume_from=folder)."
                )
            criterion.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        self._record(model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.criterion.step()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.criterion.zero_grad()
        self._record(model)  # before the Trainer saves: schedules change the scale

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            torch.save(self.criterion.state_dict(), _folder(args, state) / STATE_FILE)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            terms = {f"loss_{name}": term.item() for name, term in self.criterion.terms.items()}
            logs.update(terms)
            state.log_history[-1].update(terms)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _record(self, model: Any) -> None:
        if hasattr(model, "config"):  # the Trainer takes plain modules too
            record_head(model, self.criterion)


def record_head(model: Any, criterion: Criterion) -> None:
    """Write how the head makes its logits into ``model.config``, which ``save_pretrained`` saves.

    ``attach`` lets ``save_pretrained`` of the model do it, with a warning; this does it now, as
    :class:`CriterionCallback` does, and without one: who calls it knows of :func:`restore_head`.
    """
    check_belongs(criterion, model)
    if not (hasattr(model, "config") or is_adapted(model)):
        raise LargeMarginError(f"{type(model).__name__} has no config to write the head into.")
    save = vars(model).get("save_pretrained")
    if isinstance(save, SavePretrained):
        save.told = True
    elif is_adapted(model):
        take_form_along(model, criterion._hooks, told=True)
    record_form(model, criterion.layer)


def restore_head(model: Model, folder: str | Path | None = None) -> Model:
    """Give a model from ``from_pretrained`` the head it was trained with; returns the model.

    Architectures of transformers build a plain linear layer with bias, whose missing bias
    ``from_pretrained`` reports. This puts a :class:`ClassHead` on the loaded weight, in the form
    :func:`record_head` wrote into the config: ``model(x)`` then equals that of the saved model. A
    head that was a plain linear layer stays one.

    Args:
        folder: of an adapter of PEFT, whose ``save_pretrained`` wrote the form there. Restore the
            head of the base model, then load the adapter: ``PeftModel.from_pretrained(restore_head(
            base, folder), folder)``.
    """
    form = getattr(getattr(model, "config", None), CONFIG_KEY, None)
    if folder is not None:
        form = _form_beside(Path(folder))
    if form is None:
        raise LargeMarginError(
            f"the config of this {type(model).__name__} has no {CONFIG_KEY!r}: the model was saved "
            "with its own head, or as a state dict. Attach with the objective it was trained with "
            "instead."
        )
    named = form.get("layer") if isinstance(form, dict) else None
    layer = dict(model.named_modules()).get(str(named))
    if named is not None and not isinstance(layer, nn.Linear | ClassHead):
        found = "there is none" if layer is None else f"it is a {type(layer).__name__}"
        raise LargeMarginError(
            f"the config says that {named!r} is the head, but {found}. Load the architecture that "
            "was saved."
        )
    check_form(form)
    if isinstance(layer, nn.Linear) and not (
        is_plain(form) and form["bias"] == (layer.bias is not None)
    ):
        head = ClassHead.from_linear(
            layer, similarity=form["similarity"], scale=form["scale"], bias=form["bias"]
        )
        model.set_submodule(form["layer"], head)
    return model


def _form_beside(folder: Path) -> Any:
    try:
        return json.loads((folder / FORM_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LargeMarginError(
            f"{folder} holds no readable {FORM_FILE} ({error}): the adapter was saved without "
            "record_head(peft_model, criterion). Attach the objective it was trained with to "
            "the base model instead."
        ) from error


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
