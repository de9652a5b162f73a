"""From ``cross_entropy + 0.5*sample_margin`` to what ``attach`` takes."""

from collections.abc import Callable, Sequence

from largemargin.app.config import ObjectiveConfig
from largemargin.integrations.objective_text import Term, loss_named, parse_sum, sum_builder
from largemargin.losses.base.objective import Objective


def parse_objective(config: ObjectiveConfig) -> list[Term]:
    """The terms of an objective; a sum of penalties gets a cross entropy.

    Example:
        >>> parse_objective(ObjectiveConfig("0.5*sample_margin"))
        [Term(name='cross_entropy', weight=1.0, settings={}),
         Term(name='sample_margin', weight=0.5, settings={})]
    """
    return parse_sum(config.name, config.settings)


def objective_of(
    config: ObjectiveConfig, class_counts: Sequence[int]
) -> Callable[[int, int], Objective]:
    """The function ``(num_classes, dim) -> Objective`` that ``attach`` calls."""
    return sum_builder(parse_objective(config), class_counts)


def needs_of(config: ObjectiveConfig) -> set[str]:
    """What the objective looks at beside features: "noisy", "inputs", "layers"."""
    return {need for term in parse_objective(config) for need in loss_named(term.name).needs}
