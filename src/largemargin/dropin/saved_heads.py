"""What is saved of a head beside its weight, where others save the model.

A state dict says nothing of a head's form, and a plain layer that takes the weight predicts
something else. ``save_pretrained`` of Hugging Face's models therefore writes the form into their
configuration, that of PEFT's a file beside the adapter, and who saves a weight that a plain layer
takes without complaint is told, once.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from largemargin.dropin.find_head import ancestors
from largemargin.errors import LargeMarginError, warn_user
from largemargin.heads.class_head import ClassHead

CONFIG_KEY = "largemargin_head"
"""Where a configuration of Hugging Face holds the form of the head."""
FORM_FILE = "largemargin_head.json"
"""Where it stands beside an adapter of PEFT, which has no configuration of the model."""

_kept: ContextVar[bool] = ContextVar("the form is kept", default=False)


@contextmanager
def form_is_kept() -> Iterator[None]:
    """Around state dicts that are saved together with the head's form."""
    token = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(token)


def loading() -> bool:
    """Whether the model is being saved or loaded together with the head's form."""
    return _kept.get()


FORM = {"layer": str, "similarity": str, "scale": int | float, "bias": bool}


def check_form(form: Any) -> None:
    """Refuse a form that was not read as it is written: files can be edited."""
    if not isinstance(form, dict) or any(
        not isinstance(form.get(name), kind) for name, kind in FORM.items()
    ):
        raise LargeMarginError(
            f"{CONFIG_KEY} is damaged: it must hold layer, similarity, scale and bias of the head, "
            f"but holds {str(form)[:200]}. Attach the objective the model was trained with instead."
        )


def is_plain(form: dict[str, Any]) -> bool:
    """Whether an ``nn.Linear`` on the same weight and bias gives the same logits."""
    return (form["similarity"], form["scale"]) == ("dot", 1.0)


def is_adapted(model: Any) -> bool:
    """Whether it is a ``PeftModel``, which saves an adapter and not the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def record_form(model: Any, head: nn.Module) -> dict[str, Any]:
    """How the head makes its logits, also into ``model.config``, which is saved with the model."""
    base = model.get_base_model() if is_adapted(model) else model
    name = next(name for name, module in base.named_modules() if module is head)
    form = {
        "layer": name.split(".modules_to_save.")[0],
        "similarity": getattr(head, "similarity", "dot"),
        "scale": getattr(head, "scale", 1.0),
        "bias": getattr(head, "bias", None) is not None,
    }
    if base is model:
        setattr(model.config, CONFIG_KEY, form)
    return form


def check_restored(model: nn.Module, head: nn.Module) -> None:
    """Warn of a plain head whose configuration says that it was trained in another form."""
    for module in ancestors(model, head):
        form = getattr(getattr(module, "config", None), CONFIG_KEY, None)
        if form:
            check_form(form)
        if form and not is_plain(form) and not hasattr(head, "similarity"):
            warn_user(
                f"the head of this {type(module).__name__} was trained with similarity="
                f"{form['similarity']!r} and scale={form['scale']:g}, as its config says, but is a "
                "plain linear layer now. Call largemargin.integrations.hugging_face.restore_head("
                "model) after from_pretrained."
            )
            return


@dataclass(eq=False)
class SavePretrained:
    """``save_pretrained`` of an attached model, which takes the head's form along."""

    model: Any
    hooks: Any
    told: bool
    previous: Any
    """What the model itself, not its class, had under this name: others patch it, too."""

    def __call__(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        form = record_form(self.model, self.hooks.follow())
        adapted = is_adapted(self.model)
        if not (self.told or is_plain(form)):
            self.told = True
            after = "restore_head(model) after loading."
            if adapted:
                after = "restore_head(base_model, folder) before PeftModel.from_pretrained."
            warn_user(
                f"from_pretrained will build a plain linear layer on the weight of the head "
                f"{form['layer']!r}, which predicts otherwise. Its form is saved, too: call "
                f"largemargin.integrations.hugging_face.{after}"
            )
        with form_is_kept():
            saved = self._inner()(save_directory, *args, **options)
        if adapted and Path(save_directory).is_dir():
            (Path(save_directory) / FORM_FILE).write_text(json.dumps(form), encoding="utf-8")
        return saved

    def _inner(self) -> Any:
        inner = self.previous
        while isinstance(inner, SavePretrained):  # of an attach before this one
            inner = inner.previous
        return inner or MethodType(type(self.model).save_pretrained, self.model)

    def remove(self) -> None:
        if vars(self.model).get("save_pretrained") is self:
            del self.model.save_pretrained
            if self.previous is not None:
                self.model.save_pretrained = self.previous
        config = getattr(self.model, "config", None)
        if hasattr(config, CONFIG_KEY):
            delattr(config, CONFIG_KEY)


@dataclass(eq=False)
class StateDictNotice:
    """Called by ``state_dict`` of a head that has another form than a plain layer.

    It speaks where a plain layer takes the weight without complaint, and where PEFT saves a copy
    of the head in an adapter, which says nothing of the form.
    """

    bias_free: bool
    """Whether the layer had no bias before either."""
    told: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateDictNotice":
        return self  # once, also of copies

    def __call__(
        self, head: ClassHead, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        if self.told or not prefix or _kept.get() or not head.shaped_by_attach:
            return  # also of the head alone, as PEFT asks for it
        adapted = {"modules_to_save", "original_module"} & {*prefix.split(".")}
        if not (adapted or self.bias_free):
            return
        self.told = True
        said = (
            "the model as it was before attach takes it without complaint and predicts otherwise. "
            "Save with lm.export.save, or attach the same objective when you load it"
        )
        if adapted:
            said = (
                "an adapter with it fits no base model with a plain head. Call largemargin."
                "integrations.hugging_face.record_head(peft_model, criterion) before you save it, "
                "or attach the same objective to the base model before you load it"
            )
        warn_user(
            f"this state dict holds the weight of the head but not its form (similarity="
            f"{head.similarity!r}, scale={head.scale:g}): {said} (attach(..., warn=False) does not "
            "say this)."
        )


def keep_form(hooks: Any, *, bias_free: bool, warn: bool) -> list[Callable[[], None]]:
    """Let the head's form be saved with the model, or say that it is not; what undoes that.

    Args:
        bias_free: the layer had no bias before either, so that its state dict is the head's.
    """
    undo = []
    head = hooks.layer
    for module in hooks.around:
        config: Any = getattr(module, "config", None)
        if not callable(getattr(type(module), "save_pretrained", None)):
            continue
        if config is None and not is_adapted(module):
            continue
        if isinstance(head, ClassHead) or hasattr(config, CONFIG_KEY):
            undo.append(take_form_along(module, hooks, told=not warn).remove)
    if warn and (
        bias_free or (isinstance(head, ClassHead) and not any(map(is_adapted, hooks.around)))
    ):
        head.register_state_dict_post_hook(StateDictNotice(bias_free))
    return undo


def take_form_along(model: nn.Module, hooks: Any, *, told: bool) -> SavePretrained:
    """Let ``model.save_pretrained`` save the head's form, too."""
    save = SavePretrained(model, hooks, told, vars(model).get("save_pretrained"))
    model.save_pretrained = save  # type: ignore[assignment]
    record_form(model, hooks.follow())
    return save
