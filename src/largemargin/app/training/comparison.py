"""``compare``: several objectives under equal conditions, against softmax, with a paired test.

First the methods (objectives with their own settings, from text or YAML), then :func:`compare`.
"""

import math
import re
import shlex
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from largemargin.app.config import ObjectiveConfig, RunConfig
from largemargin.app.data.load import Data, load_data
from largemargin.app.training.comparison_result import (
    RESULT,
    RUNS,
    Comparison,
    MethodResult,
    PairedTest,
    holm,
    paired_test,
    verdict,
)
from largemargin.app.training.config_file import (
    load_yaml,
    read_yaml,
    settings_from,
    to_dict,
    yaml_reader,
)
from largemargin.app.training.engine import Interrupted, rehearsed
from largemargin.app.training.engine import train as train_run
from largemargin.app.training.files import remove_drafts, write_text
from largemargin.app.training.objective import parse_objective
from largemargin.app.training.processes import pick_device
from largemargin.app.training.run_scores import TOLD
from largemargin.app.training.runs import CONFIG, Run
from largemargin.app.training.tuning import checked_search, optuna_module, tune
from largemargin.errors import LargeMarginError, check_number
from largemargin.integrations.objective_text import SOFTMAX

BASELINE = "cross_entropy"
HELD_OUT = 0.2
"""Share of the training images that is the test of tuned methods where the data has none."""
PLAN, TABLE, TUNING = "plan.yaml", "table.txt", "tuning"


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
    parts = _split_text(given) if isinstance(given, str) else list(given)
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


def _split_text(text: str) -> list[Any]:
    """Names between commas; what looks like YAML is read as YAML."""
    if text.lstrip().startswith(("[", "{")):
        try:
            loaded = load_yaml(text)
        except yaml_reader().YAMLError as error:
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


def compare(
    config: RunConfig,
    methods: Sequence[Method],
    *,
    folder: str | Path,
    seeds: Sequence[int] = (0, 1, 2),
    trials: int = 0,
    space: dict[str, Any] | None = None,
    data: Data | None = None,
    progress: bool = True,
    train: Callable[..., Any] = train_run,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Train every method with every seed and test the differences to softmax.

    All methods share data, network, seeds and the number of tuning trials; they differ in the
    objective and in the settings that were given or tuned for it. Tuning sees the validation
    images only, with the first seed; the test images are used once, by the final runs. Called
    again with the same folder it continues.

    Args:
        config: what the methods have in common.
        methods: from :func:`read_methods`; the first one is the baseline.
        folder: of the comparison: ``plan.yaml``, ``compare.json``, ``table.txt``, runs, tuning.
        seeds: of initial weights, batch order and noise; the same for all methods.
        trials: of tuning per method; 0 trains with the settings as they are.
        space, data, progress, train, say: as of :func:`tune`.
    """
    configs, split, loaded = checked_plan(
        config, methods, seeds=seeds, trials=trials, space=space, data=data
    )
    config = replace(config, data=configs[0].data)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    _write_plan(place, config, methods, seeds, trials, space)
    tried = [_Tried(*each) for each in zip(methods, configs, strict=True)]
    for each in tried if trials else ():
        say(f"tuning {each.title}: {trials} trials")
        tuned = tune(
            replace(each.config, seed=seeds[0]),
            folder=place / TUNING / each.method.slug,
            trials=trials,
            space=_own_space(space, each.config),
            data=loaded,
            progress=progress,
            train=train,
            say=lambda line: say(f"  {line}"),
        )
        if tuned.best is None:
            raise LargeMarginError(
                f"none of the {trials} trials of {each.title} came to its end. Widen the "
                "search space, raise trials, or leave the method out."
            )
        each.config = tuned.best
        each.trials, each.tuning_seconds = len(tuned.finished), tuned.seconds
    _refuse_unequal(tried)
    # Seed by seed, so that a comparison that is cut short has pairs.
    for seed in seeds:
        for each in tried:
            name = f"{each.method.slug}-seed{seed}"
            wanted = replace(each.config, seed=seed, name=name, out=str(place / RUNS))
            try:
                run = _train_once(wanted, place / RUNS / name, loaded, progress, train)
            except Interrupted:
                raise
            except LargeMarginError as error:
                raise LargeMarginError(f"{each.title}, seed {seed}: {error}") from error
            each.runs.append(run)
            each.accuracies.append(float(run.result[split]["accuracy"]))
            say(f"{each.title}, seed {seed}: {split} {100 * each.accuracies[-1]:.2f} %")
    samples = loaded.test if split == "test" else loaded.validation
    result = Comparison(split, len(samples or ()), tuple(seeds), _tested(tried))
    result.save(place / RESULT)
    write_text(place / TABLE, f"{result}\n")
    return result


@dataclass
class _Tried:
    """A method with the settings it is trained with, what tuning them took, and its runs."""

    method: Method
    config: RunConfig
    trials: int = 0
    tuning_seconds: float = 0.0
    runs: list[Any] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.method.title


def checked_plan(
    config: RunConfig,
    methods: Sequence[Method],
    *,
    seeds: Sequence[int],
    trials: int,
    space: dict[str, Any] | None,
    data: Data | None = None,
) -> tuple[list[RunConfig], str, Data]:
    """The settings of every method, the split that :func:`compare` would use, and the data.

    Where methods are tuned and the data has no test part, ``data.test`` of the settings is set.

    Raises:
        LargeMarginError: where it could not begin; nothing is written.
    """
    _check(methods, seeds, trials)
    pick_device(config.device)
    config, loaded = _with_data(config, data, trials)
    configs = [method.config(config) for method in methods]
    spaces = [_own_space(space, each) for each in configs]
    _refuse_unused(space or {}, spaces)
    split = _split(loaded, trials)
    if trials:
        for each, own in zip(configs, spaces, strict=True):
            checked_search(each, trials=trials, space=own, data=loaded)
    for method, each in zip(methods, configs, strict=True):
        try:
            with warnings.catch_warnings(action="ignore"), rehearsed(each, loaded):
                pass
        except LargeMarginError as error:
            raise LargeMarginError(f"{method.title}: {error}") from error
    return configs, split, loaded


def _with_data(config: RunConfig, data: Data | None, trials: int) -> tuple[RunConfig, Data]:
    """The data, with a part held out as the test of tuned methods where it has none."""
    loaded = data or load_data(config.data)
    if trials and not loaded.test and data is None and config.data.test == 0:
        config = replace(config, data=replace(config.data, test=HELD_OUT))
        loaded = load_data(config.data)
    return config, loaded


def _refuse_unused(space: dict[str, Any], spaces: Sequence[dict[str, Any]]) -> None:
    """What is to be searched must be in the space of a method."""
    unused = [path for path in space if not any(path in own for own in spaces)]
    if unused:
        raise LargeMarginError(
            f"the search space names {unused[0]!r}, which no method has. Names are optimizer.lr, "
            "or objective.cosface.margin for a method with cosface in it."
        )


def _check(methods: Sequence[Method], seeds: Sequence[int], trials: int) -> None:
    check_number("trials", trials, at_least=0)
    if trials:
        optuna_module()
    if not seeds or len(set(seeds)) != len(seeds):
        raise LargeMarginError(f"seeds must be different numbers, but {list(seeds)} was given.")
    if len(methods) < 2 or not methods[0].is_baseline:
        raise LargeMarginError("the first of at least two methods must be softmax, the baseline.")
    own = {method.title: method.trials for method in methods if method.trials is not None}
    unequal = {title: count for title, count in own.items() if count != trials}
    if unequal:
        title, count = next(iter(unequal.items()))
        raise LargeMarginError(
            f"{title} asks for {count} tuning trials, but the comparison has {trials} per method. "
            "Unequal budgets make unfair comparisons: give all methods the same trials."
        )


def _own_space(space: dict[str, Any] | None, config: RunConfig) -> dict[str, Any]:
    """Changes that are about the optimizer, or about a term of this method."""
    terms = [f"objective.{term.name}." for term in parse_objective(config.objective)]
    return {
        path: change
        for path, change in (space or {}).items()
        if path.startswith(("optimizer.", *terms))
    }


def _refuse_unequal(tried: Sequence[_Tried]) -> None:
    if len({each.trials for each in tried}) > 1:
        listed = ", ".join(f"{each.title} {each.trials}" for each in tried)
        raise LargeMarginError(
            f"the methods were tuned with unequal budgets (trials: {listed}). Raise trials to the "
            "largest number, so that all reach it, or start in another folder."
        )


def _write_plan(
    folder: Path,
    config: RunConfig,
    methods: Sequence[Method],
    seeds: Sequence[int],
    trials: int,
    space: dict[str, Any] | None,
) -> None:
    """Write the plan, or check that it is the one this folder was begun with."""
    import yaml

    common = {k: v for k, v in to_dict(config).items() if k not in ("objective", "seed")}
    described = {
        "methods": [to_dict(method) for method in methods],
        "seeds": list(seeds),
        "trials": trials,
        "space": dict(space or {}),
        **common,
    }
    text = yaml.safe_dump(described, sort_keys=False, allow_unicode=True)
    plan, path = yaml.safe_load(text), folder / PLAN
    known = read_yaml(path) if path.exists() else plan
    for name in plan:
        # Where it lies does not matter, and more seeds may be added to a comparison.
        if name in ("out", "name", "device") or (
            name == "seeds" and set(known[name]) <= set(plan[name])
        ):
            continue
        if known.get(name) != plan[name]:
            raise LargeMarginError(
                f"{folder} holds a comparison with other settings: {name} is {known.get(name)!r} "
                f"there and {plan[name]!r} here. Choose another folder, or continue it as it is: "
                f"largemargin compare --resume {shlex.quote(str(folder))}"
            )
    write_text(path, text)


def _split(data: Data, trials: int) -> str:
    if data.test:
        return "test"
    if trials or not data.validation:
        raise LargeMarginError(
            "the data has no test images to compare methods on"
            + (": the validation images are used up by tuning" if trials else "")
            + ". Put images it has not seen into a folder test/ beside the training images in "
            "train/, one folder per class in both"
            + (", or set data.test, for example to 0.2." if trials else ", or set data.validation.")
        )
    return "validation"


def _train_once(
    config: RunConfig, folder: Path, data: Data, progress: bool, train: Callable[..., Any]
) -> Any:
    """The finished run in this folder: as it is, continued, or begun."""
    begun = (folder / CONFIG).is_file()
    if begun:
        known = Run.open(folder).config
        if replace(known, out=config.out) != config:
            raise LargeMarginError(
                f"{folder} was trained with other settings. Choose another folder for the "
                "comparison, or delete this one."
            )
    elif folder.exists():
        remove_drafts(folder)  # killed before its settings were written: nothing to continue
    run = train(config, folder=folder, resume=begun, data=data, progress=progress)
    if run.failure is not None:
        raise LargeMarginError(f"{TOLD}: {run.failure}")
    return run


def _tested(tried: Sequence[_Tried]) -> tuple[MethodResult, ...]:
    """The result of every method; the first one is what the others are tested against."""
    baseline, *others = tried
    tests = [paired_test(each.accuracies, baseline.accuracies) for each in others]
    corrected = holm([test.t_test for test in tests])
    compared = (_result(*each) for each in zip(others, tests, corrected, strict=True))
    return (_result(baseline), *compared)


def _result(
    tried: _Tried, test: PairedTest | None = None, corrected: float | None = None
) -> MethodResult:
    found = [run.result for run in tried.runs]
    geometries = [result.get("geometry") or {} for result in found]
    margins = [each.get("class_margin_degrees", math.nan) for each in geometries]
    values = tried.accuracies
    return MethodResult(
        method=tried.title,
        folders=tuple(str(run.folder) for run in tried.runs),
        accuracies=tuple(values),
        mean=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else math.nan,
        seconds=statistics.fmean(result["seconds"] for result in found),
        trials=tried.trials,
        tuning_seconds=tried.tuning_seconds,
        class_margin=statistics.fmean(margins),
        test=test,
        corrected=corrected,
        verdict="baseline" if test is None or corrected is None else verdict(test, corrected),
    )
