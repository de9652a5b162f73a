"""What ``tune`` may change, and within which limits; each loss says its own (``search_space``)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from largemargin.app.config import ObjectiveConfig, RunConfig
from largemargin.app.training.objective import objective_of, parse_objective
from largemargin.errors import LargeMarginError
from largemargin.integrations.objective_text import Term
from largemargin.losses import LOSSES
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.scale import auto_scale
from largemargin.losses.base.setting_ranges import Choice, Dimension, Range
from largemargin.losses.base.settings import WEIGHT, Setting, settings_of

DIGITS = 4
"""Significant digits of a drawn number: enough, and readable in a YAML file."""


OPTIMIZER: dict[str, dict[str, Dimension]] = {
    "sgd": {"lr": Range(1e-3, 1.0), "weight_decay": Range(1e-6, 1e-2)},
    "adam": {"lr": Range(1e-5, 1e-2), "weight_decay": Range(1e-6, 1e-2)},
    "adamw": {"lr": Range(1e-5, 1e-2), "weight_decay": Range(1e-4, 0.3)},
}
CLIPPING = Choice((None, 1.0, 5.0, 20.0))

WEIGHT_OF_A_TERM = Range(0.05, 5.0)


def search_space(
    config: RunConfig, *, class_counts: Sequence[int], changes: Mapping[str, Any] | None = None
) -> tuple[dict[str, Dimension], dict[str, Any]]:
    """What is searched, and the values the configuration has now, which are tried first.

    Names are those of the settings: ``optimizer.lr``, and ``objective.cosface.margin`` for the
    argument of a term, ``objective.sample_margin.weight`` for its weight in the sum.

    Args:
        config: of the run that is tuned.
        class_counts: training images of every class.
        changes: ranges by name: ``[low, high]``, a list of more values to choose from, or None to
            leave the setting as it is.

    Example:
        >>> space, now = search_space(RunConfig(), class_counts=[10, 10])
        >>> space["optimizer.lr"], now["optimizer.lr"]
        (Range(low=0.001, high=1.0, log=True), 0.05)
    """
    optimizer = config.optimizer
    space: dict[str, Dimension] = {
        f"optimizer.{name}": each for name, each in OPTIMIZER[optimizer.name].items()
    }
    space["optimizer.clip_norm"] = CLIPPING
    now: dict[str, Any] = {
        "optimizer.lr": optimizer.lr,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_norm": optimizer.clip_norm,
    }
    for path, dimension, value in _of_losses(config.objective, class_counts):
        space[path], now[path] = dimension, value
    for path, change in (changes or {}).items():
        _change(space, now, path, change)
    return {path: each.holding(now[path]) for path, each in space.items()}, now


def _of_losses(
    config: ObjectiveConfig, class_counts: Sequence[int]
) -> list[tuple[str, Dimension, Any]]:
    terms = parse_objective(config)
    # The dimension of the features does not enter any range, and neither do class weights.
    plain = replace(config, class_weights=None)
    objective = objective_of(plain, class_counts)(len(class_counts), 2)
    names = {LOSSES[term.name].term: term.name for term in terms}
    settings = settings_of(objective)
    found: list[tuple[str, Dimension, Any]] = []
    for setting in settings:
        term = names[setting.term]
        own = any(hasattr(setting.loss, name) for name in ("strength", "alpha", "noise_weight"))
        if setting.name == WEIGHT and (own or term == terms[0].name):
            continue  # that of the first term is a matter of the learning rate
        dimension = dimension_of(term, setting.name)
        value = _number(setting, len(class_counts))
        if dimension is not None and value is not None:
            found.append((f"objective.{term}.{setting.name}", dimension, value))
    return found + _integers(objective, names, {setting.path for setting in settings})


def _integers(
    objective: Objective, names: dict[str, str], scheduled: set[str]
) -> list[tuple[str, Dimension, Any]]:
    """Settings that schedules cannot move but tuning can."""
    return [
        (f"objective.{names[name]}.{argument}", dimension, value)
        for name, loss in objective.terms.items()
        for argument, dimension in getattr(loss, "search_space", {}).items()
        if isinstance(value := getattr(loss, argument, None), int)
        and f"{name}.{argument}" not in scheduled
    ]


def dimension_of(loss: str, name: str) -> Dimension | None:
    """Where a setting of a loss is searched; None where it is not tuned."""
    return WEIGHT_OF_A_TERM if name == WEIGHT else LOSSES[loss].search_space.get(name)


def _number(setting: Setting, num_classes: int) -> float | None:
    value = setting.value
    if value == "auto":
        aligned = setting.loss.aligned_cosine()
        return float(auto_scale(num_classes, aligned))
    if isinstance(value, Tensor):
        return None  # one per class: they came from counts
    return float(value)


def _change(space: dict[str, Dimension], now: dict[str, Any], path: str, change: Any) -> None:
    if path not in space:
        close = get_close_matches(path, space, n=3, cutoff=0.4) or sorted(space)
        raise LargeMarginError(f"{path!r} is nothing that can be tuned here: {', '.join(close)}.")
    if change is None:
        del space[path], now[path]
    else:
        space[path] = _dimension(path, change)


def _dimension(path: str, change: Any) -> Dimension:
    """A range or a choice, as a user writes it."""
    if not isinstance(change, list | tuple) or len(change) < 2:
        raise LargeMarginError(
            f"the range of {path} must be [low, high], a list of more values, or null to leave it "
            f"as it is, but {change!r} was given."
        )
    if len(change) > 2 or None in change:
        return Choice(tuple(change))
    low, high = (float(each) for each in change)
    if not (math.isfinite(low) and low < high):
        raise LargeMarginError(f"the range of {path} must be [low, high], but got {change!r}.")
    return Range(low, high, log=low > 0 and high / low >= 10)


def rounded(value: Any) -> Any:
    """A drawn number as it is trained with and written down."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values, named as in :func:`search_space`.

    Example:
        >>> tuned = with_values(RunConfig(), {"optimizer.lr": 0.1})
        >>> tuned.optimizer.lr, tuned.objective.name
        (0.1, 'cross_entropy')
    """
    optimizer = {
        name.removeprefix("optimizer."): value
        for name, value in values.items()
        if name.startswith("optimizer.")
    }
    of_losses = {name: value for name, value in values.items() if name not in optimizer}
    return replace(
        config,
        optimizer=replace(config.optimizer, **optimizer),
        objective=_objective_with(config.objective, of_losses),
    )


def _objective_with(config: ObjectiveConfig, values: Mapping[str, Any]) -> ObjectiveConfig:
    terms = parse_objective(config)
    changed: list[Term] = []
    for term in terms:
        prefix = f"objective.{term.name}."
        mine = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        weight = mine.pop(WEIGHT, term.weight)
        changed.append(Term(term.name, weight, {**term.settings, **mine}))
    if changed == terms:
        return config
    name = " + ".join(t.name if t.weight == 1 else f"{t.weight!r}*{t.name}" for t in changed)
    settings = {term.name: term.settings for term in changed if term.settings}
    if len(changed) == 1:
        settings = changed[0].settings
    return replace(config, name=name, settings=settings)
