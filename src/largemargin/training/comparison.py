"""``compare``: several objectives under equal conditions, against softmax, with a paired test."""

import math
import shlex
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from largemargin.data import Data, load_data
from largemargin.errors import LargeMarginError, MissingPackage, check_number
from largemargin.measuring.records import Record
from largemargin.training.config import RunConfig
from largemargin.training.config_file import read_yaml, to_dict
from largemargin.training.divergence import TOLD
from largemargin.training.engine import Interrupted
from largemargin.training.engine import train as train_run
from largemargin.training.files import write_text
from largemargin.training.methods import Method
from largemargin.training.objective import parse_objective
from largemargin.training.runs import CONFIG, Run, pick_device
from largemargin.training.significance import PairedTest, holm, paired_test, verdict
from largemargin.training.tuning import MISSING, checked_search, tune

PLAN, RESULT, TABLE, RUNS, TUNING = "plan.yaml", "compare.json", "table.txt", "runs", "tuning"


@dataclass(frozen=True)
class MethodResult(Record):
    """One method: its runs, what tuning it cost, how it differs from softmax."""

    method: str
    folders: tuple[str, ...]
    accuracies: tuple[float, ...]
    """On the test images, by seed; on the validation images where there are no others."""
    mean: float
    std: float
    """Of a sample (n - 1), NaN with one seed."""
    seconds: float
    """Mean of a run's training."""
    trials: int
    tuning_seconds: float
    class_margin: float
    """Mean smallest angle between class vectors, degrees; NaN where it was not measured."""
    test: PairedTest | None
    """Against softmax; None for softmax itself."""
    corrected: float | None
    """p of the paired t-test after Holm's correction over the methods."""
    verdict: str


@dataclass(frozen=True)
class Comparison(Record):
    """What :func:`compare` found; prints as a table."""

    split: str
    images: int
    seeds: tuple[int, ...]
    methods: tuple[MethodResult, ...]
    format: int = 1

    def __str__(self) -> str:
        from largemargin.training.comparison_table import table

        return table(self)


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
        space: changes of the search space, see ``search_space``.
        data: loaded already; default ``load_data(config.data)``.
        progress: show a progress bar for every run.
        train: the function that trains.
        say: where a line about every run goes.
    """
    configs, split, loaded = checked_plan(
        config, methods, seeds=seeds, trials=trials, space=space, data=data
    )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    _agree(place, config, methods, seeds, trials, space)
    spent = {method.slug: (0, 0.0) for method in methods}
    if trials:
        for at, method in enumerate(methods):
            say(f"tuning {method.title}: {trials} trials")
            tuned = tune(
                replace(configs[at], seed=seeds[0]),
                folder=place / TUNING / method.slug,
                trials=trials,
                space=_own_space(space, configs[at]),
                data=loaded,
                progress=progress,
                train=train,
                say=lambda line: say(f"  {line}"),
            )
            if tuned.best is None:
                raise LargeMarginError(
                    f"none of the {trials} trials of {method.title} came to its end. Widen the "
                    "search space, raise trials, or leave the method out."
                )
            spent[method.slug] = len(tuned.finished), tuned.seconds
            configs[at] = tuned.best
        _refuse_unequal(methods, spent)
    runs: dict[str, list[Any]] = {method.slug: [] for method in methods}
    # Seed by seed, so that a comparison that is cut short has pairs.
    for seed in seeds:
        for method, each in zip(methods, configs, strict=True):
            name = f"{method.slug}-seed{seed}"
            wanted = replace(each, seed=seed, name=name, out=str(place / RUNS))
            try:
                run = _trained(wanted, place / RUNS / name, loaded, progress, train)
            except Interrupted:
                raise
            except LargeMarginError as error:
                raise LargeMarginError(f"{method.title}, seed {seed}: {error}") from error
            say(f"{method.title}, seed {seed}: {split} {100 * _accuracy(run, split):.2f} %")
            runs[method.slug].append(run)
    samples = loaded.test if split == "test" else loaded.validation
    found = _conclude(methods, runs, spent, split, len(samples or ()), tuple(seeds))
    found.save(place / RESULT)
    write_text(place / TABLE, f"{found}\n")
    return found


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

    Raises:
        LargeMarginError: where it could not begin; nothing is written.
    """
    _check(methods, seeds, trials)
    configs = [method.config(config) for method in methods]
    _check_space(space, configs)
    pick_device(config.device)
    loaded = data or load_data(config.data)
    split = _split(loaded, trials)
    for each in configs if trials else ():
        checked_search(each, trials=trials, space=_own_space(space, each), data=loaded)
    return configs, split, loaded


def _check(methods: Sequence[Method], seeds: Sequence[int], trials: int) -> None:
    check_number("trials", trials, at_least=0)
    if trials and find_spec("optuna") is None:
        raise MissingPackage(MISSING)
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


def _check_space(space: dict[str, Any] | None, configs: Sequence[RunConfig]) -> None:
    used = {path for config in configs for path in _own_space(space, config)}
    unused = [path for path in space or {} if path not in used]
    if unused:
        raise LargeMarginError(
            f"the search space names {unused[0]!r}, which no method has. Names are optimizer.lr, "
            "or objective.cosface.margin for a method with cosface in it."
        )


def _refuse_unequal(methods: Sequence[Method], spent: dict[str, tuple[int, float]]) -> None:
    counts = {method.title: spent[method.slug][0] for method in methods}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{title} {count}" for title, count in counts.items())
        raise LargeMarginError(
            f"the methods were tuned with unequal budgets (trials: {listed}). Raise trials to the "
            "largest number, so that all reach it, or start in another folder."
        )


def _agree(
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
    plan = {
        "methods": [to_dict(method) for method in methods],
        "seeds": list(seeds),
        "trials": trials,
        "space": dict(space or {}),
        **common,
    }
    path = folder / PLAN
    if not path.exists():
        write_text(path, yaml.safe_dump(plan, sort_keys=False, allow_unicode=True))
        return
    known = read_yaml(path)
    for name in plan:
        # Where it lies does not matter, and more seeds may be added to a comparison.
        if name in ("out", "name", "device") or (
            name == "seeds" and set(known[name]) <= set(plan[name])
        ):
            continue
        if known.get(name) != yaml.safe_load(yaml.safe_dump(plan[name])):
            raise LargeMarginError(
                f"{folder} holds a comparison with other settings: {name} is {known.get(name)!r} "
                f"there and {plan[name]!r} here. Choose another folder, or continue it as it is: "
                f"largemargin compare --resume {shlex.quote(str(folder))}"
            )
    write_text(path, yaml.safe_dump(plan, sort_keys=False, allow_unicode=True))


def _split(data: Data, trials: int) -> str:
    if data.test is not None and len(data.test):
        return "test"
    if trials or data.validation is None or len(data.validation) == 0:
        raise LargeMarginError(
            "the data has no test images to compare methods on"
            + (": the validation images are used up by tuning" if trials else "")
            + ". Put images it has not seen into a folder test/ beside the training images in "
            "train/, one folder per class in both"
            + (", or compare without --trials." if trials else ", or set data.validation.")
        )
    return "validation"


def _trained(
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
        shutil.rmtree(folder)  # killed before its settings were written: nothing to continue
    run = train(config, folder=folder, resume=begun, data=data, progress=progress)
    if run.failure is not None:
        raise LargeMarginError(f"{TOLD}: {run.failure}")
    return run


def _accuracy(run: Any, split: str) -> float:
    return float(run.result[split]["accuracy"])


def _conclude(
    methods: Sequence[Method],
    runs: dict[str, list[Any]],
    spent: dict[str, tuple[int, float]],
    split: str,
    images: int,
    seeds: tuple[int, ...],
) -> Comparison:
    accuracies = {slug: [_accuracy(run, split) for run in each] for slug, each in runs.items()}
    baseline = accuracies[methods[0].slug]
    tests = [paired_test(accuracies[method.slug], baseline) for method in methods[1:]]
    corrected = holm([test.t_test for test in tests])
    results = []
    for at, method in enumerate(methods):
        values, done = accuracies[method.slug], runs[method.slug]
        test = tests[at - 1] if at else None
        results.append(
            MethodResult(
                method=method.title,
                folders=tuple(str(run.folder) for run in done),
                accuracies=tuple(values),
                mean=statistics.fmean(values),
                std=statistics.stdev(values) if len(values) > 1 else math.nan,
                seconds=statistics.fmean(run.result["seconds"] for run in done),
                trials=spent[method.slug][0],
                tuning_seconds=spent[method.slug][1],
                class_margin=statistics.fmean(_class_margin(run) for run in done),
                test=test,
                corrected=corrected[at - 1] if at else None,
                verdict=verdict(test, corrected[at - 1]) if test else "baseline",
            )
        )
    return Comparison(split, images, seeds, tuple(results))


def _class_margin(run: Any) -> float:
    geometry = run.result.get("geometry") or {}
    return float(geometry.get("class_margin_degrees", math.nan))
