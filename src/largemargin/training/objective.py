"""From ``cross_entropy + 0.5*sample_margin`` to what ``attach`` takes."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.integrations.objectives import PENALTIES, build_loss, loss_named
from largemargin.training.config import ObjectiveConfig

SOFTMAX = "softmax"
"""Another name for cross entropy, and the name of its term."""

TERM = re.compile(r"^(?:(?P<weight>[0-9.eE+-]+)\s*\*\s*)?(?P<name>[A-Za-z_][A-Za-z_0-9]*)$")


class Term(NamedTuple):
    name: str
    weight: float
    settings: dict[str, Any]


def parse_objective(config: ObjectiveConfig) -> list[Term]:
    """The terms of an objective; a sum of penalties gets a cross entropy.

    Example:
        >>> parse_objective(ObjectiveConfig("0.5*sample_margin"))
        [Term(name='cross_entropy', weight=1.0, settings={}),
         Term(name='sample_margin', weight=0.5, settings={})]
    """
    terms = [_term(part, config.name) for part in _parts(config.name)]
    names = [name for name, _ in terms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LargeMarginError(f"the objective {config.name!r} has {twice[0]} twice.")
    settings = _settings_by_term(config, names)
    if all(name in PENALTIES for name in names):
        terms.insert(0, ("cross_entropy", 1.0))
    return [Term(name, weight, settings.get(name, {})) for name, weight in terms]


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
    name = "cross_entropy" if match["name"] == SOFTMAX else match["name"]
    loss_named(name)
    return name, weight


def _settings_by_term(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings are those of the only term, or grouped by term: ``{cosface: {margin: 0.2}}``."""
    given = {("cross_entropy" if k == SOFTMAX else k): v for k, v in config.settings.items()}
    known = {*names, "cross_entropy"}
    grouped = {key for key, value in given.items() if key in known and isinstance(value, Mapping)}
    if grouped == given.keys():
        return {name: dict(value) for name, value in given.items()}
    if len(names) == 1 and not grouped:
        return {names[0]: given}
    wrong = sorted(given.keys() - grouped)[0]
    raise LargeMarginError(
        f"objective.settings has {wrong!r}, but the objective {config.name!r} has the terms "
        f"{', '.join(names)}. Group settings by term: {{{names[0]}: {{...}}}}."
    )


def objective_of(
    config: ObjectiveConfig, class_counts: Sequence[int]
) -> Callable[[int, int], lm.Objective]:
    """The function ``(num_classes, dim) -> Objective`` that ``attach`` calls."""
    terms = parse_objective(config)

    def build(num_classes: int, dim: int) -> lm.Objective:
        built: dict[str, Any] = {}
        for term in terms:
            kind = loss_named(term.name)
            settings = term.settings
            if kind.head_similarity == "cosine":
                settings = {"scale": "auto", **settings}
            loss = build_loss(kind, settings, num_classes, dim, class_counts)
            label = SOFTMAX if term.name == "cross_entropy" else term.name
            built[label] = loss if term.weight == 1.0 else term.weight * loss
        return lm.Objective(**built)

    return build


def needs_of(config: ObjectiveConfig) -> set[str]:
    """What the objective looks at beside features: "noisy", "inputs", "layers"."""
    return {need for term in parse_objective(config) for need in loss_named(term.name).needs}
