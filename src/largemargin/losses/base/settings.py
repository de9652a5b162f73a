"""Hyper-parameters of an ``Objective`` by name: found, read, checked and moved."""

import inspect
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_number
from largemargin.losses.base.loss import Loss
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.setting_ranges import Limits
from largemargin.ops.scheduled_values import ScheduledValue, scheduled_value_of

WEIGHT = "weight"
"""Of a term in its Objective; class weights, which losses call so, are not moved."""


@dataclass(frozen=True)
class Setting:
    """One hyper-parameter of one term."""

    objective: Objective
    term: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.term}.{self.name}"

    @property
    def loss(self) -> Loss:
        loss = self.objective.terms[self.term]
        assert isinstance(loss, Loss)
        return loss

    @property
    def value(self) -> Any:
        """What it is now: a number, a tensor with one per class, "auto"."""
        if self.name == WEIGHT:
            return self.objective.weights[self.term]
        return getattr(self.loss, self.name)

    @property
    def built(self) -> Any:
        """What it was when the loss was built; a number set by hand since then counts as that."""
        return _as_built(self._host, self._key, self.value)

    def remember(self, value: Any) -> None:
        """Let ``built`` be this."""
        # On the CPU: its largest entry is asked for at every step, and must not stall a device.
        moving = scheduled_value_of(self._host)
        moving.built[self._key] = value.cpu().clone() if isinstance(value, Tensor) else value
        moving.numbers.pop(self._key, None)

    @property
    def size(self) -> float | None:
        """``built`` as one number, the largest where every class has its own; None for "auto"."""
        return _largest(self.built)

    def check(self, what: str, value: float, num_classes: int | None = None) -> None:
        """Refuse what the loss would refuse, before training reaches it."""
        limits = Limits()  # of the weight of a term: any number
        if self.name != WEIGHT:
            limits = self.loss.setting_limits(self.name, num_classes)
        check_number(f"{what} ({self.path})", value, **limits)

    def move(self, value: float) -> None:
        """Set it. Values per class keep their proportions; the largest becomes ``value``."""
        moving, loss, now = scheduled_value_of(self._host), self.loss, self.value
        if moving.numbers.get(self._key) == value and (isinstance(now, Tensor) or now == value):
            return
        if self._key not in moving.built or self.built is not moving.built[self._key]:
            self.remember(self.built)
        built = moving.built[self._key]
        if isinstance(built, Tensor):
            # A new tensor: the old one may wait for a backward pass.
            setattr(loss, self.name, built.to(now) * (value / float(built.max())))
            moving.numbers[self._key] = value
            return
        if self.name == WEIGHT:
            self.objective.weights[self.term] = value
        else:
            setattr(loss, self.name, value)
        if self.name in ("margin", "max_margin") and getattr(loss, "class_counts", None):
            loss._set_largest_margin(value)
        moving.put(self._key, value)

    @property
    def _host(self) -> nn.Module:
        return self.objective if self.name == WEIGHT else self.loss

    @property
    def _key(self) -> str:
        return self.term if self.name == WEIGHT else self.name


def settings_of(objective: Objective) -> list[Setting]:
    """Everything in an objective that can be moved."""
    found = []
    for term, loss in objective.terms.items():
        assert isinstance(loss, Loss)
        names = _float_arguments(type(loss))  # type: ignore[arg-type]  # a class is hashable
        moved = [name for name in names if _is_number(loss, name)]
        found += [Setting(objective, term, name) for name in (*moved, WEIGHT)]
    return found


def settle(objective: Objective, head: nn.Module) -> None:
    """End what schedules did before; what a loss was built with stays known."""
    for setting in settings_of(objective):
        moving = getattr(setting._host, "moving", None)
        if moving is not None and setting.built is not moving.built.get(setting._key):
            moving.built.pop(setting._key, None)  # set by hand since
    for module in (*objective.modules(), *head.modules()):
        if isinstance(module, ScheduledValue):
            module.settle()


def find_setting(objective: Objective, target: str) -> Setting:
    """The setting called "term.name", or "name" where only one term has it."""
    every = settings_of(objective)
    found = [each for each in every if target in (each.path, each.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise LargeMarginError(
            f"{target!r} is in several terms: {', '.join(each.path for each in found)}. Name one "
            "of them."
        )
    raise LargeMarginError(
        f"nothing in the objective is called {target!r}. What can be scheduled: "
        f"{', '.join(each.path for each in every)}."
    )


def size_as_built(loss: Loss, name: str) -> float:
    """The largest number that a hyper-parameter was built with; 0 where it was built with none."""
    return _largest(_as_built(loss, name, getattr(loss, name))) or 0.0


def _as_built(host: nn.Module, key: str, now: Any) -> Any:
    moving = getattr(host, "moving", None)
    if moving is None or key not in moving.built:
        return now
    if not isinstance(now, Tensor) and moving.numbers.get(key, now) != now:
        return now
    return moving.built[key]


def _largest(value: Any) -> float | None:
    if isinstance(value, str):
        return None
    return float(value.max()) if isinstance(value, Tensor) else float(value)


@cache
def _float_arguments(kind: type[Loss]) -> list[str]:
    """Arguments of the constructor that are numbers and can be set later."""
    names: list[str] = []
    for cls in (kind, Loss):
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            kinds = get_args(parameter.annotation) or (parameter.annotation,)
            known = name in names or name in kind.fixed or name in kind.refuses
            read_only = isinstance(getattr(kind, name, None), property)
            if float in kinds and not (known or read_only):
                names.append(name)
    return names


def _is_number(loss: Loss, name: str) -> bool:
    value = getattr(loss, name)
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return value == "auto" or (isinstance(value, int | float) and math.isfinite(value))
