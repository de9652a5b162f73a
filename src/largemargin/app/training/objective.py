"""From ``cross_entropy + 0.5*sample_margin`` to what ``attach`` takes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from largemargin.app.config import ObjectiveConfig
from largemargin.app.training.config_file import read_yaml
from largemargin.errors import LargeMarginError, check_number
from largemargin.integrations.objective_text import Term, loss_named, parse_sum, sum_builder
from largemargin.losses.base.class_counts import balanced_weights
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
    config: ObjectiveConfig, class_counts: Sequence[int], class_names: Sequence[str] = ()
) -> Callable[[int, int], Objective]:
    """The function ``(num_classes, dim) -> Objective`` that ``attach`` calls.

    Class weights and label smoothing are those of every term that classifies, unless it has its
    own; penalties are left as they are.
    """
    common: dict[str, Any] = {}
    if config.class_weights is not None:
        common["weight"] = class_weights(config.class_weights, class_counts, class_names)
        _refuse_reweighting(config)
    if config.label_smoothing:
        common["label_smoothing"] = config.label_smoothing
    terms = parse_objective(config)
    if common:
        terms = [
            each
            if loss_named(each.name).is_penalty
            else each._replace(settings={**common, **each.settings})
            for each in terms
        ]
    return sum_builder(terms, class_counts)


def class_weights(
    given: str, class_counts: Sequence[int], class_names: Sequence[str]
) -> list[float]:
    """One weight for each class, 1 on average.

    Args:
        given: balanced, effective or a YAML file of names and weights.
        class_counts: training images of each class.
        class_names: as they stand in the file.

    Example:
        >>> class_weights("balanced", [10, 30], ["cat", "dog"])
        [1.5, 0.5]
    """
    if given in ("balanced", "effective"):
        effective = balanced_weights(class_counts)  # which refuses classes without images
        inverse = [1 / count for count in class_counts]
        share = sum(inverse) / len(inverse)
        return effective.tolist() if given == "effective" else [each / share for each in inverse]
    if not Path(given).is_file():
        raise LargeMarginError(
            "objective.class_weights must be balanced, effective or a YAML file of class names and "
            f"weights, but {given!r} was given, and there is no such file."
        )
    return _weights_in(given, class_names)


def _weights_in(file: str, class_names: Sequence[str]) -> list[float]:
    """The weights of the classes in a YAML file of them."""
    weights = read_yaml(file, f"a line for every class, as {class_names[0]}: 1.5")
    names = {str(name): value for name, value in weights.items()}
    if names.keys() != set(class_names):
        wrong = sorted(names.keys() ^ set(class_names))[0]
        raise LargeMarginError(
            f"{file} must give one weight for each of the {len(class_names)} classes, as "
            f"{class_names[0]}: 1.5, but {wrong} is {'no class' if wrong in names else 'missing'}."
        )
    for name, value in names.items():
        check_number(f"the weight of {name} in {file}", value, at_least=0)
    if not any(names.values()):
        raise LargeMarginError(f"{file} gives every class the weight 0: no class would be learned.")
    return [float(names[name]) for name in class_names]


def _refuse_reweighting(config: ObjectiveConfig) -> None:
    if config.schedule == "preset" and any(
        hasattr(loss_named(each.name), "reweight") for each in parse_objective(config)
    ):
        raise LargeMarginError(
            f"objective.schedule preset re-weights the classes of {config.name} late in training, "
            f"but objective.class_weights {config.class_weights} was given too. Leave one out."
        )


def needs_of(config: ObjectiveConfig) -> set[str]:
    """What the objective looks at beside features: "noisy", "inputs", "layers"."""
    return {need for term in parse_objective(config) for need in loss_named(term.name).needs}


def refuse_soft_targets(objective: Objective, asked: str) -> None:
    """Say at the beginning which term cannot do with the mixed labels of the setting ``asked``."""
    for name, loss in objective.terms.items():
        refused = getattr(loss, "refuses", {}).get("soft_targets")
        if refused is not None and "labels" in getattr(loss, "needs", ()):
            raise LargeMarginError(
                f"{asked} gives every image two classes, which the term {name} cannot learn from: "
                f"{refused} Leave {asked} out, or take an objective without {name}."
            )
