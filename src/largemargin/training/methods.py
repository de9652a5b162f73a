"""Methods of a comparison: objectives with their own settings, from text or YAML."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from largemargin.errors import LargeMarginError
from largemargin.training.config import ObjectiveConfig, RunConfig
from largemargin.training.config_file import settings_from, to_dict, yaml_reader
from largemargin.training.objective import SOFTMAX, parse_objective

BASELINE = "cross_entropy"


@dataclass(frozen=True)
class Method:
    """One objective of a comparison, and what it needs to be trained well.

    Args:
        name: names of ``largemargin list`` with optional weights, as in ``ObjectiveConfig``.
        label: how tables call it; default its name.
        settings: arguments of the loss.
        schedule: preset or none.
        layers: modules whose outputs go to a loss on hidden layers.
        optimizer: settings of the optimizer that differ from the common ones: ``{lr: 0.1}``.
        noise: settings of the noise that differ.
        trials: of its tuning; must be the same for all methods.
    """

    name: str
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: Literal["none", "preset"] = "none"
    layers: tuple[str, ...] = ()
    optimizer: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    trials: int | None = None

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def slug(self) -> str:
        """A name for its folders."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", self.title).strip("_.") or "method"

    @property
    def is_baseline(self) -> bool:
        return self.name in (BASELINE, SOFTMAX) and not self.settings and not self.noise

    def config(self, base: RunConfig) -> RunConfig:
        """The run of this method."""
        objective = ObjectiveConfig(self.name, self.settings, self.schedule, self.layers)
        parse_objective(objective)
        return replace(
            base,
            objective=objective,
            optimizer=_changed(base.optimizer, self.optimizer, f"{self.title}: optimizer"),
            noise=_changed(base.noise, self.noise, f"{self.title}: noise"),
        )


def _changed(settings: Any, changes: Mapping[str, Any], place: str) -> Any:
    return settings_from({**to_dict(settings), **changes}, type(settings), place)


def read_methods(given: str | Sequence[Any]) -> tuple[Method, ...]:
    """Methods from ``"cosface,kobayashi"`` or a list of names and settings; softmax comes first.

    Example:
        >>> [method.title for method in read_methods("cosface, 0.5*sample_margin")]
        ['cross_entropy', 'cosface', '0.5*sample_margin']
    """
    parts = _split(given) if isinstance(given, str) else list(given)
    methods = [_method(part) for part in parts if part != ""]
    if not any(method.is_baseline for method in methods):
        methods.insert(0, Method(BASELINE))
    methods.sort(key=lambda method: not method.is_baseline)  # stable: the others keep their order
    for name in ("title", "slug"):
        seen = [getattr(method, name) for method in methods]
        twice = [each for each in seen if seen.count(each) > 1]
        if twice:
            raise LargeMarginError(
                f"two methods are called {twice[0]!r}. Give each its own label in YAML: "
                "{name: ..., label: ...}."
            )
    if len(methods) == 1:
        raise LargeMarginError(
            "a comparison needs a method beside softmax. Name some: --methods cosface,kobayashi"
        )
    return tuple(methods)


def _split(text: str) -> list[Any]:
    """Names between commas; what looks like YAML is read as YAML."""
    if text.lstrip().startswith(("[", "{")):
        yaml = yaml_reader()
        try:
            loaded = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise LargeMarginError(f"methods {text!r} is not YAML: {error}.") from error
        return list(loaded) if isinstance(loaded, list) else [loaded]
    return [part.strip() for part in text.split(",")]


def _method(given: Any) -> Method:
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        return Method(given)
    if isinstance(given, Mapping) and "name" in given:
        return settings_from(given, Method, "methods")
    known = ", ".join(each.name for each in fields(Method))
    raise LargeMarginError(
        f"a method is the name of a loss or a group of settings with a name ({known}), but "
        f"{given!r} was given."
    )
