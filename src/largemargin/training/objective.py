"""From ``cross_entropy + 0.5*sample_margin`` to what ``attach`` takes."""

from collections.abc import Callable, Sequence

import largemargin as lm
from largemargin.integrations.objectives import SOFTMAX as SOFTMAX
from largemargin.integrations.objectives import Term as Term
from largemargin.integrations.objectives import loss_named, parse_sum, sum_builder
from largemargin.training.config import ObjectiveConfig


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
) -> Callable[[int, int], lm.Objective]:
    """The function ``(num_classes, dim) -> Objective`` that ``attach`` calls."""
    return sum_builder(parse_objective(config), class_counts)


def needs_of(config: ObjectiveConfig) -> set[str]:
    """What the objective looks at beside features: "noisy", "inputs", "layers"."""
    return {need for term in parse_objective(config) for need in loss_named(term.name).needs}
