"""What is saved of a head beside its weight, where others save the model.

A state dict says nothing of a head's form, and a plain layer that takes the weight predicts
something else. ``save_pretrained`` of Hugging Face's models therefore writes the form into their
configuration, and who saves a weight that a plain layer takes without complaint is told, once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from largemargin.dropin.find_head import ancestors
from largemargin.errors import warn_user
from largemargin.heads.class_head import ClassHead

CONFIG_KEY = "largemargin_head"
"""Where a configuration of Hugging Face holds the form of the head."""

_kept: ContextVar[bool] = ContextVar("the form is kept", default=False)


@contextmanager
def form_is_kept() -> Iterator[None]:
    """Around state dicts that are saved together with the head's form."""
    token = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(token)


def is_plain(form: dict[str, Any]) -> bool:
    """Whether an ``nn.Linear`` on the same weight and bias gives the same logits."""
    return (form["similarity"], form["scale"]) == ("dot", 1.0)


def record_form(model: Any, head: nn.Module) -> dict[str, Any]:
    """Write into ``model.config`` how the head makes its logits; ``save_pretrained`` saves it."""
    form = {
        "layer": next(name for name, module in model.named_modules() if module is head),
        "similarity": getattr(head, "similarity", "dot"),
        "scale": getattr(head, "scale", 1.0),
        "bias": getattr(head, "bias", None) is not None,
    }
    setattr(model.config, CONFIG_KEY, form)
    return form


def check_restored(model: nn.Module, head: nn.Module) -> None:
    """Warn of a plain head whose configuration says that it was trained in another form."""
    for module in ancestors(model, head):
        form = getattr(getattr(module, "config", None), CONFIG_KEY, None)
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
    head: nn.Module
    told: bool

    def __call__(self, *args: Any, **options: Any) -> Any:
        form = record_form(self.model, self.head)
        if not (self.told or is_plain(form)):
            self.told = True
            warn_user(
                f"from_pretrained will build a plain linear layer on the weight of the head "
                f"{form['layer']!r}, which predicts something else than this one with similarity="
                f"{form['similarity']!r}. Its form is in the config: call "
                "largemargin.integrations.hugging_face.restore_head(model) after loading."
            )
        with form_is_kept():
            return type(self.model).save_pretrained(self.model, *args, **options)

    def remove(self) -> None:
        if vars(self.model).get("save_pretrained") is self:
            del self.model.save_pretrained
        if hasattr(self.model.config, CONFIG_KEY):
            delattr(self.model.config, CONFIG_KEY)


@dataclass(eq=False)
class StateDictNotice:
    """Called by ``state_dict`` of a head whose weight a plain layer takes, too."""

    told: bool = False

    def __call__(
        self, head: ClassHead, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        if self.told or _kept.get() or not head.shaped_by_attach:
            return
        self.told = True
        warn_user(
            f"this state dict holds the weight of the head but not its form (similarity="
            f"{head.similarity!r}, scale={head.scale:g}). The model as it was before attach takes "
            "it without complaint and predicts something else. Save with lm.export.save, or attach "
            "the same objective again before or after loading; to serve it without largemargin, "
            "put head.to_linear() in its place. (attach(..., warn=False) does not say this.)"
        )


def keep_form(
    model: nn.Module, head: nn.Module, undo: list[Callable[[], None]], *, bias_free: bool, warn: bool
) -> None:
    """Let the head's form be saved with the model, or say that it is not.

    Args:
        bias_free: the layer had no bias before either, so that its state dict is the head's.
    """
    pretrained = False
    for module in ancestors(model, head):
        config: Any = getattr(module, "config", None)
        if config is None or not callable(getattr(type(module), "save_pretrained", None)):
            continue
        if isinstance(head, ClassHead) or hasattr(config, CONFIG_KEY):
            pretrained = True
            save = SavePretrained(module, head, told=not warn)
            module.save_pretrained = save  # type: ignore[assignment]
            record_form(module, head)
            undo.append(save.remove)
    if bias_free and warn and not pretrained:
        head.register_state_dict_post_hook(StateDictNotice())  # type: ignore[no-untyped-call]
