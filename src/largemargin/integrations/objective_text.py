"""Objectives by name or class, filled in with what the data say: classes, width, counts."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from inspect import Parameter
from typing import Any, NamedTuple

from torch import nn

from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES
from largemargin.losses.base.constructor_arguments import (
    arguments_of,
    constructor_arguments,
    method_called,
    wrong_arguments,
)
from largemargin.losses.base.loss import Loss, Weighted
from largemargin.losses.base.objective import Objective
from largemargin.losses.cross_entropy import CrossEntropy

SOFTMAX = CrossEntropy.term
"""Another name for cross entropy, and the name of its term."""

TERM = re.compile(r"^(?:(?P<weight>[0-9.eE+-]+)\s*\*\s*)?(?P<name>[A-Za-z_][A-Za-z_0-9]*)$")


class Term(NamedTuple):
    """A loss of a sum that is given as text."""

    name: str
    weight: float
    settings: dict[str, Any]


def objective_for(
    given: Any, params: Mapping[str, Any] | None = None, class_counts: Sequence[int] | None = None
) -> Any:
    """What ``lm.attach`` takes, from names of ``lm.LOSSES``, a class, a module or a function.

    Modules are copied, so that a fit leaves the given one as it was. Names and classes are built
    when the number of classes C and the feature dimension are known: ``num_classes`` and ``dim``
    are filled in; ``class_counts="auto"`` (also LDAM's default here) and ``prior="auto"`` get
    ``class_counts``. By name, alone or in a sum as ``"cosface + 0.5*sample_margin"``, penalties
    come with a cross entropy.
    """
    settings = dict(params or {})
    if isinstance(given, str):
        return sum_builder(parse_sum(given, settings), class_counts)
    if isinstance(given, type) and issubclass(given, Loss):
        return lambda num_classes, dim: build_loss(given, settings, num_classes, dim, class_counts)
    if isinstance(given, nn.Module):
        return rebuilt(given, settings) if settings else deepcopy(given)
    if callable(given):
        return _builder(given, settings, class_counts)
    raise LargeMarginError(
        "objective must be a name of lm.LOSSES, a loss or Objective, or a function (num_classes, "
        f"dim) that makes one, but {given!r} was given."
    )


def _builder(given: Any, settings: dict[str, Any], class_counts: Sequence[int] | None) -> Any:
    """A function of the user's, or a preset, with its settings or the counts it wants."""
    if settings:
        return lambda num_classes, dim: given(num_classes, dim, **settings)
    # As it is: a preset also tells attach about its schedule.
    counted = getattr(given, "with_counts", None)
    return given if counted is None or class_counts is None else counted(class_counts)


def rebuilt(given: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """A loss, weighted loss or objective built again with other settings.

    Args:
        settings: of the loss; of one term of several as ``cosface__margin``.
    """
    if isinstance(given, Weighted):
        return Weighted(rebuilt(given.loss, settings), given.weight)  # type: ignore[arg-type]
    if isinstance(given, Objective):
        return _rebuilt_objective(given, settings)
    if not isinstance(given, Loss) or not settings.keys() <= arguments_of(type(given)).keys():
        raise wrong_arguments(type(given), settings)
    try:
        made = type(given)(**{**constructor_arguments(given, Loss), **settings})
    except AttributeError as error:
        raise LargeMarginError(
            f"the settings {sorted(settings)} of this {type(given).__name__} cannot be changed: it "
            f"cannot be built again from its attributes ({error}). Give its class."
        ) from error
    return made.train(given.training)


def _rebuilt_objective(given: Objective, settings: Mapping[str, Any]) -> Objective:
    by_term: dict[str, dict[str, Any]] = {name: {} for name in given.terms}
    for name, value in settings.items():
        term, _, setting = name.partition("__")
        if len(by_term) == 1 and not setting:
            term, setting = next(iter(by_term)), name
        if term not in by_term or not setting:
            first, wanted = next(iter(by_term)), setting or name
            if not wanted.isidentifier() or wanted in by_term:
                wanted = "SETTING"  # what was meant is none of the first term
            raise LargeMarginError(
                f"the settings of the objective have {name!r}, but its terms are "
                f"{', '.join(by_term)}. Name one: objective__{first}__{wanted}."
            )
        by_term[term][setting] = value
    losses = {
        name: rebuilt(loss, by_term[name]) if by_term[name] else deepcopy(loss)
        for name, loss in given.terms.items()
    }
    weights = given.weights
    return Objective(**{name: Weighted(loss, weights[name]) for name, loss in losses.items()})  # type: ignore[arg-type]


def parse_sum(text: str, settings: Mapping[str, Any]) -> list[Term]:
    """The terms of a sum of names; one of penalties gets a cross entropy.

    Args:
        text: names of ``lm.LOSSES``, with a weight before them if wanted.
        settings: of the only term, or of each by its name.
    """
    terms = [_term(part, text) for part in _parts(text)]
    names = [name for name, _ in terms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LargeMarginError(f"the objective {text!r} has {twice[0]} twice.")
    by_term = _settings_by_term(text, settings, names)
    if all(LOSSES[name].is_penalty for name in names):
        terms.insert(0, (CrossEntropy.key, 1.0))
    return [Term(name, weight, by_term.get(name, {})) for name, weight in terms]


def _parts(text: str) -> list[str]:
    # A plus between terms, not that of an exponent as in 1e+2*cosface.
    parts = [part.strip() for part in re.split(r"(?<![eE])\+", text)]
    if not all(parts):
        raise LargeMarginError(
            f"the objective {text!r} has an empty term. Write, for example, "
            "'cross_entropy + 0.5*sample_margin'."
        )
    return parts


def _term(part: str, whole: str) -> tuple[str, float]:
    match = TERM.match(part)
    try:
        weight = float(match["weight"] or 1.0) if match else 0.0
    except ValueError:
        match = None
    if match is None:
        raise LargeMarginError(
            f"cannot read the term {part!r} of the objective {whole!r}. A term is a name of "
            "`largemargin list`, with a weight before it if wanted: '0.5*sample_margin'."
        )
    name = key_of(match["name"])
    loss_named(name)
    return name, weight


def _settings_by_term(
    text: str, settings: Mapping[str, Any], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Settings are those of the only term, or grouped by term: ``{cosface: {margin: 0.2}}``."""
    given = {key_of(name): value for name, value in settings.items()}
    known = {*names, CrossEntropy.key}
    grouped = {key for key, value in given.items() if key in known and isinstance(value, Mapping)}
    if grouped == given.keys():
        return {name: dict(value) for name, value in given.items()}
    if len(names) == 1 and not grouped:
        return {names[0]: given}
    wrong = sorted(given.keys() - grouped)[0]
    raise LargeMarginError(
        f"the settings of the objective have {wrong!r}, but {text!r} has the terms "
        f"{', '.join(names)}. Group settings by term: {{{names[0]}: {{...}}}}."
    )


def sum_builder(
    terms: Sequence[Term], class_counts: Sequence[int] | None
) -> Callable[[int, int], Objective]:
    """The function ``(num_classes, dim) -> Objective`` that ``attach`` calls."""

    def build(num_classes: int, dim: int) -> Objective:
        built: dict[str, Any] = {}
        for term in terms:
            kind = loss_named(term.name)
            loss = build_loss(kind, term.settings, num_classes, dim, class_counts)
            built[kind.term] = loss if term.weight == 1.0 else term.weight * loss
        return Objective(**built)

    return build


def needs_counts(kind: type[Loss]) -> bool:
    """Whether a loss cannot be built without the number of training samples of every class."""
    counts = arguments_of(kind).get("class_counts")
    return counts is not None and counts.default is Parameter.empty


def build_loss(
    kind: type[Loss],
    settings: Mapping[str, Any],
    num_classes: int,
    dim: int,
    class_counts: Sequence[int] | None,
) -> Loss:
    """``kind(**settings)`` with the number of classes, the dimension and counts filled in."""
    known = arguments_of(kind)
    if not settings.keys() <= known.keys():
        raise wrong_arguments(kind, settings)
    filled = dict(settings)
    for name, value in (("num_classes", num_classes), ("dim", dim)):
        if name in known:
            filled.setdefault(name, value)
    if needs_counts(kind):
        filled.setdefault("class_counts", "auto")
    for name in ("class_counts", "prior"):
        asked = filled.get(name)
        if isinstance(asked, str):
            if asked != "auto" or class_counts is None:
                why = ', not "auto"' if class_counts else " and there are no labels to count"
                raise LargeMarginError(
                    f"{name} of {kind.__name__} must be the number of training samples of each "
                    f"class, but {asked!r} was given{why}. Pass them: "
                    f"{name}=torch.bincount(labels).tolist()."
                )
            filled[name] = list(class_counts)
    return kind(**filled)


def key_of(name: str) -> str:
    """The name in ``lm.LOSSES`` of what a term is called: they differ for cross entropy alone."""
    return CrossEntropy.key if name == SOFTMAX else name


def loss_named(name: str) -> type[Loss]:
    """A loss class by its name in ``lm.LOSSES``; a wrong name is answered with close ones."""
    if name not in LOSSES:
        meant = [key for key, kind in LOSSES.items() if kind.__name__ == method_called(name)]
        close = meant or get_close_matches(name, LOSSES, n=3, cutoff=0.4) or sorted(LOSSES)
        raise LargeMarginError(
            f"objective {name!r} is no loss. Closest: {', '.join(close)}. All of them: lm.LOSSES, "
            "or largemargin list."
        )
    return LOSSES[name]
