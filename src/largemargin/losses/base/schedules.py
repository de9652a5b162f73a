"""Hyper-parameters that change during training, as plain objects with a state.

A schedule says what a hyper-parameter is at every optimisation step. ``attach(..., schedule=...)``
applies it; ``schedule.apply(objective, step)`` does so by hand. What holds at step n depends on n
alone: a resumed run goes on where it was, and applying twice changes nothing.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.losses.base.loss import Loss
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.settings import find_setting, size_as_built
from largemargin.ops.scheduled_values import scheduled_value_of

__all__ = [
    "Annealing",
    "DeferredReweighting",
    "Move",
    "Ramp",
    "Schedule",
    "check_schedules",
    "preset_schedule",
]

Curve: TypeAlias = Literal["linear", "cosine", "exponential"]
CURVES: tuple[Curve, ...] = ("linear", "cosine", "exponential")


class Schedule:
    """A hyper-parameter of a term as a function of the optimisation step.

    The ones here are built from their ``arguments``; a schedule of your own needs :meth:`apply`.
    """

    arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the constructor's arguments, kept under the same names."""

    def apply(self, objective: Objective, step: int) -> None:
        """Make the objective what it is at this step."""
        raise NotImplementedError

    def check(self, objective: Objective, num_classes: int | None = None) -> None:
        """Refuse an objective that cannot follow this schedule to its end."""

    def moves(self, objective: Objective) -> list[str]:
        """The paths this schedule sets, as "cosface.margin"."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """All it needs to go on elsewhere: plain values and tensors."""
        return {"kind": type(self).__name__, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the schedule that was saved."""
        if state.get("kind") != type(self).__name__:
            raise LargeMarginError(
                f"the checkpoint holds a {state.get('kind')} where this run has a "
                f"{type(self).__name__}. Attach with the same schedules, in the same order."
            )
        for name in self.arguments:
            setattr(self, name, state[name])

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.arguments}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._settings() == self._settings()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}={value!r}" for name, value in self._settings().items())
        return f"{type(self).__name__}({listed})"


class Move(Schedule):
    """A schedule of one number in the objective: :meth:`value` of the step."""

    target: str
    _built: Any = None
    _restored: Any = None

    def value(self, step: int, built: float | None) -> float:
        """The number at a step, for a loss that was built with ``built`` (None: with none)."""
        raise NotImplementedError

    def ends(self, built: float | None) -> dict[str, float]:
        """Its extremes, by the names of the arguments that say them."""
        raise NotImplementedError

    def apply(self, objective: Objective, step: int) -> None:
        setting = find_setting(objective, self.target)
        if self._restored is not None:
            setting.remember(self._restored)
            self._restored = None
        self._built = setting.built
        setting.move(self.value(step, setting.size))

    def check(self, objective: Objective, num_classes: int | None = None) -> None:
        setting = find_setting(objective, self.target)
        size = setting.size
        if isinstance(setting.built, Tensor) and not (size and size > 0):
            raise LargeMarginError(
                f"{setting.path} holds no positive number, so there is nothing to ramp. Build the "
                "loss with the values it should end with."
            )
        for what, number in self.ends(size).items():
            setting.check(what, number, num_classes)

    def moves(self, objective: Objective) -> list[str]:
        return [find_setting(objective, self.target).path]

    def state_dict(self) -> dict[str, Any]:
        built = self._built if self._restored is None else self._restored
        if isinstance(built, Tensor):
            built = built.detach().cpu().clone()
        return {**super().state_dict(), "built": built}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._restored = state["built"]

    def _or_built(self, name: str, given: float | None, built: float | None) -> float:
        if given is not None:
            return given
        if built is None:
            raise LargeMarginError(
                f"{self.target!r} was not built with a number, so {name}=None, which means what "
                f"it was built with, has none to reach. Give {name}=..."
            )
        return built


class Ramp(Move):
    r"""From ``start`` to ``end`` over ``steps`` optimisation steps, constant before and after.

    .. math:: t = \min\left(\max\left(\tfrac{step - begin}{steps}, 0\right), 1\right),\qquad
              v = \begin{cases} a + (b-a)\,t & \text{linear}\\
              a + (b-a)\,\tfrac{1-\cos\pi t}{2} & \text{cosine}\\
              a\,(b/a)^t & \text{exponential}\end{cases}

    Args:
        target: what to move: ``"margin"``, ``"scale"``, ``"alpha"`` ... where one term has it,
            ``"lmd.margin"`` where several do, ``"lmd.weight"`` for the weight of a term.
        start: a.
        end: b; None (default) is what the loss was built with.
        steps: length of the ramp, at least 1.
        begin: where it begins, default 0.
        curve: "linear" (default), "cosine" or "exponential".

    Margins per class (a tensor, or ``class_counts``) keep their proportions: ``start`` and ``end``
    are those of the widest.

    Example:
        >>> ramp, objective = Ramp("margin", 0.0, steps=100), Objective(face=CosFace(margin=0.4))
        >>> ramp.apply(objective, 50); objective.terms["face"].margin
        0.2
        >>> ramp.apply(objective, 100); objective.terms["face"].margin
        0.4
    """

    arguments: ClassVar[tuple[str, ...]] = ("target", "start", "end", "steps", "begin", "curve")

    def __init__(
        self,
        target: str,
        start: float,
        end: float | None = None,
        *,
        steps: int,
        begin: int = 0,
        curve: Curve = "linear",
    ) -> None:
        check_number("start", start)
        if end is not None:
            check_number("end", end)
        check_number("steps", steps, at_least=1)
        check_number("begin", begin, at_least=0)
        check_choice("curve", curve, CURVES)
        self.target = target
        self.start = start
        self.end = end
        self.steps = steps
        self.begin = begin
        self.curve: Curve = curve

    def value(self, step: int, built: float | None = None) -> float:
        end = self._or_built("end", self.end, built)
        t = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        if t in (0.0, 1.0):
            return float(end if t else self.start)
        if self.curve == "exponential":
            return float(self.start * (end / self.start) ** t)
        if self.curve == "cosine":
            t = (1 - math.cos(math.pi * t)) / 2
        return float(self.start + (end - self.start) * t)

    def ends(self, built: float | None) -> dict[str, float]:
        end = self._or_built("end", self.end, built)
        if self.curve == "exponential" and not self.start * end > 0:
            raise LargeMarginError(
                f'curve="exponential" multiplies, so start and end of {self.target!r} must have '
                f"the same sign and not be 0, but they are {self.start} and {end}. Use "
                '"linear", or start from a small number.'
            )
        return {"start": self.start, "end": end}


class Annealing(Move):
    r"""A-Softmax's and L-Softmax's :math:`\lambda`, from the plain softmax loss to the margin.

    .. math:: \lambda = \max\left(\lambda_{\min},\
              \lambda_0\,(1 + \gamma\cdot step)^{-p}\right)

    Args:
        target: default ``"annealing"``, of ``SphereFace`` and ``LSoftmax``.
        start: lambda_0, default 1000 (both originals).
        floor: lambda_min, default 5 (A-Softmax; L-Softmax: 0 on easy data, else 5 or 10). None is
            what the loss was built with.
        rate: gamma, default 0.12 (A-Softmax, for 28,000 steps; scale it with your own:
            :func:`preset` does).
        power: p, default 1 (A-Softmax; L-Softmax 35 with a rate of 2.5e-5 for 30,000 steps).

    Example:
        >>> objective = Objective(sphereface=SphereFace())
        >>> Annealing().apply(objective, 1000); round(objective.terms["sphereface"].annealing, 3)
        8.264
    """

    arguments: ClassVar[tuple[str, ...]] = ("target", "start", "floor", "rate", "power")

    def __init__(
        self,
        target: str = "annealing",
        *,
        start: float = 1000.0,
        floor: float | None = 5.0,
        rate: float = 0.12,
        power: float = 1.0,
    ) -> None:
        check_number("start", start, at_least=0)
        if floor is not None:
            check_number("floor", floor, at_least=0)
        check_number("rate", rate, above=0)
        check_number("power", power, above=0)
        self.target = target
        self.start = start
        self.floor = floor
        self.rate = rate
        self.power = power

    def value(self, step: int, built: float | None = None) -> float:
        floor = self._or_built("floor", self.floor, built)
        return float(max(floor, self.start * (1 + self.rate * max(step, 0)) ** -self.power))

    def ends(self, built: float | None) -> dict[str, float]:
        return {"start": self.start, "floor": self._or_built("floor", self.floor, built)}


class DeferredReweighting(Schedule):
    """LDAM-DRW: from ``step`` on the class weights are the balanced ones, before it none.

    Args:
        step: of the switch; the original takes 80 % of the training (epoch 160 of 200).
        term: name of the :class:`LDAM` term, where there are several. A weight that the loss was
            built with holds before the switch.

    Example:
        >>> objective = Objective(ldam=LDAM([100, 1]))
        >>> DeferredReweighting(800).apply(objective, 800); objective.terms["ldam"].weight
        tensor([0.0199, 1.9801])
    """

    arguments: ClassVar[tuple[str, ...]] = ("step", "term")

    def __init__(self, step: int, *, term: str | None = None) -> None:
        check_number("step", step, at_least=0)
        self.step = step
        self.term = term

    def apply(self, objective: Objective, step: int) -> None:
        loss = self._find(objective)[1]
        built, switched = scheduled_value_of(loss).built, step >= self.step
        before = built.setdefault("weight", loss.weight)
        expected = (
            loss.weight is not None if switched else (loss.weight is None) == (before is None)
        )
        if built.get("reweighted", False) == switched and expected:
            return
        built["reweighted"] = switched
        if switched:
            loss.reweight()
        else:
            loss.weight = None if before is None else before.to(loss.margins.device)

    def check(self, objective: Objective, num_classes: int | None = None) -> None:
        self._find(objective)

    def moves(self, objective: Objective) -> list[str]:
        return [f"{self._find(objective)[0]}.class weights"]

    def _find(self, objective: Objective) -> tuple[str, Any]:
        """The term that re-weights itself, and its name."""
        found = [
            (name, loss)
            for name, loss in objective.terms.items()
            if hasattr(loss, "reweight") and self.term in (None, name)
        ]
        if len(found) == 1:
            return found[0]
        every = ", ".join(f"{n!r} ({type(x).__name__})" for n, x in objective.terms.items())
        raise LargeMarginError(
            f"DeferredReweighting switches the class weights of one LDAM term, but the objective "
            f"has {every}. " + ("Name one of them: term=..." if found else "Add one.")
        )


def check_schedules(
    schedules: Sequence[Schedule], objective: Objective, num_classes: int | None = None
) -> None:
    """Refuse schedules that the objective cannot follow, or that set the same thing."""
    taken: dict[str, Schedule] = {}
    for schedule in schedules:
        if not isinstance(schedule, Schedule):
            raise LargeMarginError(
                f"a schedule must be a Ramp, Annealing, DeferredReweighting or another Schedule, "
                f"but {type(schedule).__name__} was given."
            )
        schedule.check(objective, num_classes)
        for path in schedule.moves(objective):
            if path in taken:
                raise LargeMarginError(
                    f"two schedules set {path}: {taken[path]!r} and {schedule!r}. Keep one."
                )
            taken[path] = schedule


def preset_schedule(objective: Objective, total_steps: int) -> list[Schedule]:
    """The usual schedule of every term, stretched over ``total_steps``; none for the others.

    Each loss says its own, with the source: ``help(lm.CosFace.usual_schedule)``.

    Example:
        >>> preset_schedule(Objective(face=CosFace()), 1500)
        [Ramp(target='face.margin', start=0.0, end=None, steps=200, begin=200, curve='linear')]
    """
    check_number("total_steps", total_steps, at_least=1)
    found: list[Schedule] = []
    for term, loss in objective.terms.items():
        assert isinstance(loss, Loss)
        found += loss.usual_schedule(term, total_steps)
    return found


def margin_warm_up(loss: Loss, term: str, total_steps: int, **starts: float) -> list[Schedule]:
    """No margin for 20/150 of the training, then linearly up over the next 20/150.

    WeSpeaker's VoxCeleb recipe: epochs 20 to 40 of 150. ``starts`` are the margins of the loss, and
    what means none; those that are not wider have nothing to ramp.
    """
    warm = share_of(total_steps, 20 / 150)
    return [
        Ramp(f"{term}.{name}", start, steps=warm, begin=warm)
        for name, start in starts.items()
        if size_as_built(loss, name) > start
    ]


def share_of(total_steps: int, share: float) -> int:
    """So many of the steps, at least one."""
    return max(round(total_steps * share), 1)
