"""``tune``: a search for good settings on the validation images, with optuna.

Below it: what it may change, and within which limits; each loss says its own (``search_space``).
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from largemargin.app.config import ObjectiveConfig, RunConfig
from largemargin.app.data.load import Data, load_data
from largemargin.app.training.config_file import from_dict, to_dict, write_config
from largemargin.app.training.engine import Interrupted, refuse_used
from largemargin.app.training.engine import train as train_run
from largemargin.app.training.files import write_text
from largemargin.app.training.objective import objective_of, parse_objective
from largemargin.app.training.processes import pick_device
from largemargin.app.training.run_scores import Diverged
from largemargin.app.training.runs import CONFIG
from largemargin.errors import LargeMarginError, check_choice, check_number, optional_module
from largemargin.integrations.objective_text import Term
from largemargin.losses import LOSSES
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.scale import auto_scale
from largemargin.losses.base.setting_ranges import Choice, Dimension, Range
from largemargin.losses.base.settings import WEIGHT, Setting, settings_of
from largemargin.measuring.predictions import as_csv

COUNTED = ("complete", "pruned", "diverged")
"""States of trials that count towards a budget."""

Pruner: TypeAlias = Literal["median", "asha", "none"]
PRUNERS: tuple[Pruner, ...] = ("median", "asha", "none")
UNTRIED = 5
"""Trials before the median says anything."""

STUDY, BEST, TRIALS, FOLDERS = "study.log", "best.yaml", "trials.csv", "trials"


@dataclass(frozen=True)
class Trial:
    """One try: what was set, how far it came, what it cost."""

    number: int
    state: str
    """complete, pruned (stopped early), diverged, interrupted or running."""
    value: float | None
    """The validation result, as ``RunConfig.select`` says."""
    epochs: int
    seconds: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class Tuning:
    """What a search found."""

    folder: Path
    select: str
    trials: tuple[Trial, ...]
    best: RunConfig | None
    """The settings of the best trial, ready for training; None while no trial is complete."""

    @property
    def finished(self) -> tuple[Trial, ...]:
        """Trials that count towards the budget."""
        return tuple(each for each in self.trials if each.state in COUNTED)

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    @property
    def best_trial(self) -> Trial | None:
        done = [each for each in self.trials if each.state == "complete" and each.value is not None]
        sign = -1 if self.select == "loss" else 1
        return max(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def __str__(self) -> str:
        """How many trials there were, and what the best one is."""
        counts = {state: sum(t.state == state for t in self.trials) for state in COUNTED}
        spent = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        lines = [f"{len(self.finished)} trials ({spent}) in {self.seconds:.0f} s of training"]
        best, first = self.best_trial, self.trials[0] if self.trials else None
        if best is None:
            return "\n".join([*lines, "No trial is complete, so there is no best one."])
        lines.append(f"best: trial {best.number}, validation {_score(self.select, best.value)}")
        lines += [f"  {path:<32} {shown(value)}" for path, value in best.settings.items()]
        if first is not None and first.value is not None and first is not best:
            lines.append(
                f"as given (trial {first.number}): validation {_score(self.select, first.value)}"
            )
        return "\n".join(lines)


def tune(
    config: RunConfig,
    *,
    folder: str | Path,
    trials: int = 20,
    study: str = "largemargin",
    storage: str | None = None,
    space: Mapping[str, Any] | None = None,
    pruner: Pruner = "median",
    data: Data | None = None,
    progress: bool = True,
    train: Callable[..., Any] = train_run,
    say: Callable[[str], None] = print,
) -> Tuning:
    """Try settings until ``trials`` of them are finished, and write the best to ``best.yaml``.

    The first trial is the configuration as it is. Trials that look worse than others at the same
    epoch are stopped early and count. The test images are taken away before the first trial. A
    search that was interrupted continues when it is called again with the same folder.

    Args:
        config: what is tuned; its ``select`` says what a good validation result is.
        folder: of the study: ``study.log``, ``trials.csv``, ``best.yaml``, runs in ``trials``.
        trials: finished trials to reach, those of earlier calls included.
        study: name of the study in its storage.
        storage: URL of a database that many machines share, as ``postgresql://...``; default the
            file ``study.log`` in the folder.
        space: changes of the search space, see :func:`search_space`.
        pruner: median, asha (asynchronous successive halving) or none.
        data: loaded already; default ``load_data(config.data)``.
        progress: show a progress bar for every trial.
        train: the function that trains.
        say: where a line about every trial goes.
    """
    searched, now, loaded = checked_search(
        config, trials=trials, space=space, pruner=pruner, data=data
    )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    search = _Search(config, place, searched, loaded, progress, train)
    opened = search.open(study, storage, pruner)
    tried = [trial for trial in opened.trials if _state(trial) in (*COUNTED, "waiting")]
    if not any(trial.user_attrs.get("given") for trial in tried):
        opened.enqueue_trial(now, user_attrs={"given": True})
    while sum(_state(trial) in COUNTED for trial in opened.trials) < trials:
        opened.optimize(search, n_trials=1)
        found = search.write(opened)
        last = found.trials[-1]
        told = f"{len(found.finished):>4} of {trials}, trial {last.number}"
        say(f"{told}: {line(last, config.select)}")
    return search.write(opened)


def checked_search(
    config: RunConfig,
    *,
    trials: int,
    space: Mapping[str, Any] | None,
    pruner: Pruner = "median",
    data: Data | None = None,
) -> tuple[dict[str, Dimension], dict[str, Any], Data]:
    """What :func:`tune` would search, where it would begin, and the data without its test images.

    Raises:
        LargeMarginError: where it could not begin; nothing is written.
    """
    check_number("trials", trials, at_least=1)
    check_choice("pruner", pruner, PRUNERS)
    optuna_module()
    pick_device(config.device)
    loaded = without_test(data or load_data(config.data))
    counts = torch.bincount(loaded.train.labels, minlength=len(loaded.classes)).tolist()
    return *search_space(config, class_counts=counts, changes=space), loaded


def optuna_module() -> Any:
    return optional_module("optuna", "tuning needs optuna", extra="tune")


def without_test(data: Data) -> Data:
    """The same data with nothing in it that a search must not see."""
    if not data.validation:
        raise LargeMarginError(
            "tuning compares settings on validation images, but there are none. Set "
            "data.validation, for example to 0.1."
        )
    return replace(data, test=None, query=None, gallery=None)


@dataclass
class _Search:
    """A study with its files; called by optuna with every trial."""

    config: RunConfig
    folder: Path
    space: dict[str, Dimension]
    data: Data
    progress: bool
    train: Callable[..., Any]

    def __call__(self, trial: Any) -> float:
        from optuna import TrialPruned

        values = {path: rounded(_suggest(trial, path, each)) for path, each in self.space.items()}
        config = replace(
            with_values(self.config, values), name=f"trial-{trial.number:04d}", measure=False
        )
        trial.set_user_attr("config", to_dict(config))
        folder = self.folder / FOLDERS / f"{trial.number:04d}"
        if (folder / CONFIG).is_file():  # of a trial whose study is gone
            shutil.rmtree(folder, ignore_errors=True)
        refuse_used(folder)
        started = time.perf_counter()

        def after_epoch(row: dict[str, Any]) -> None:
            epochs = row["epoch"] + 1
            trial.report(row["validation"][self.config.select], row["epoch"])
            trial.set_user_attr("epochs", epochs)
            if epochs < config.epochs and trial.should_prune():
                raise TrialPruned

        try:
            run = self.train(
                config, folder=folder, data=self.data, progress=self.progress, on_epoch=after_epoch
            )
            value = float(run.result["validation"][self.config.select])
            if run.failure is None and value == value:
                return value
        except Interrupted:
            trial.set_user_attr("interrupted", True)
            raise
        except Diverged:
            pass
        finally:
            trial.set_user_attr("seconds", time.perf_counter() - started)
            # A study of a hundred trials need not fill the disk: best.yaml trains it again.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        trial.set_user_attr("diverged", True)
        raise TrialPruned

    def open(self, name: str, storage: str | None, pruner: Pruner) -> Any:
        """The study, made or found; one that searches something else is refused."""
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        config, space, folder = self.config, self.space, self.folder
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        opened = optuna.create_study(
            study_name=name,
            storage=storage or JournalStorage(JournalFileBackend(str(folder / STUDY))),
            direction="minimize" if config.select == "loss" else "maximize",
            pruner=_pruner(optuna, pruner, config.epochs),
            load_if_exists=True,
        )
        # A seeded sampler that starts anew would draw what it drew before.
        opened.sampler = optuna.samplers.TPESampler(seed=config.seed + len(opened.trials))
        # Where runs lie and how they are shown need not agree between calls.
        compared = to_dict(replace(config, out="", name="", trackers=(), device="auto"))
        described = {"config": compared, "space": {key: repr(space[key]) for key in space}}
        known = opened.user_attrs.get("tunes")
        if known is None:
            opened.set_user_attr("tunes", described)
        elif known != described:
            raise LargeMarginError(
                f"the study {name!r} in {storage or folder} searches something else: "
                f"{_first_difference(known, described)}. Trials of one study must be comparable; "
                "choose another folder or another --study name."
            )
        return opened

    def write(self, opened: Any) -> Tuning:
        """``trials.csv`` and ``best.yaml`` of the study as it is now."""
        config, folder = self.config, self.folder
        rows = tuple(
            Trial(
                number=trial.number,
                state=_state(trial),
                value=trial.intermediate_values.get(trial.last_step)
                if trial.value is None
                else trial.value,
                epochs=trial.user_attrs.get("epochs", 0),
                seconds=trial.user_attrs.get("seconds", 0.0),
                settings={path: rounded(value) for path, value in trial.params.items()},
            )
            for trial in opened.trials
            if _state(trial) != "waiting"
        )
        tuning = Tuning(folder, config.select, rows, None)
        best = tuning.best_trial
        if best is not None:
            found: RunConfig = from_dict(opened.trials[best.number].user_attrs["config"])
            found = replace(
                found,
                name=config.name,
                measure=config.measure,
                out=config.out,
                device=config.device,
            )
            tuning = replace(tuning, best=found)
            write_config(found, folder / BEST)
        write_csv(folder / TRIALS, tuning)
        return tuning


def _suggest(trial: Any, path: str, dimension: Dimension) -> Any:
    if isinstance(dimension, Choice):
        return trial.suggest_categorical(path, list(dimension.values))
    return trial.suggest_float(path, dimension.low, dimension.high, log=dimension.log)


def _pruner(optuna: Any, name: Pruner, epochs: int) -> Any:
    if name == "median":
        # The first tenth of a run says little about its end.
        return optuna.pruners.MedianPruner(n_startup_trials=UNTRIED, n_warmup_steps=epochs // 10)
    if name == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, epochs // 9))
    return optuna.pruners.NopPruner()


def _first_difference(known: Any, given: Any, path: str = "") -> str:
    if isinstance(known, dict) and isinstance(given, dict):
        for key in {**known, **given}:
            if known.get(key) != given.get(key):
                return _first_difference(known.get(key), given.get(key), f"{path}.{key}".strip("."))
    name = path.removeprefix("config.").removeprefix("space.")
    return f"{name} is {known!r} there and {given!r} here"


def _state(trial: Any) -> str:
    if trial.user_attrs.get("diverged"):
        return "diverged"
    name: str = trial.state.name.lower()
    return {"fail": "interrupted"}.get(name, name)


def write_csv(path: Path, tuning: Tuning) -> None:
    names = list(dict.fromkeys(name for trial in tuning.trials for name in trial.settings))
    heads = ["trial", "state", f"validation_{tuning.select}", "epochs", "seconds", *names]
    rows = []
    for trial in tuning.trials:
        found = (trial.settings.get(name) for name in names)
        plain = (each if isinstance(each, int | float | None) else str(each) for each in found)
        seconds = f"{trial.seconds:.2f}"
        rows.append([trial.number, trial.state, trial.value, trial.epochs, seconds, *plain])
    write_text(path, as_csv(heads, rows))


def _score(select: str, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{select} {value:.4f}" if select == "loss" else f"{select} {100 * value:.2f} %"


def line(trial: Trial, select: str) -> str:
    """A trial in a line: how it ended, and with what settings."""
    ends = {"complete": "", "pruned": ", stopped early", "diverged": ", diverged"}
    end = ends.get(trial.state, f", {trial.state}")
    settings = ", ".join(
        f"{path.removeprefix('optimizer.').removeprefix('objective.')} {shown(value)}"
        for path, value in trial.settings.items()
    )
    epochs = f"{trial.epochs} epoch{'' if trial.epochs == 1 else 's'}"
    return f"{_score(select, trial.value)} after {epochs}{end} ({settings})"


def shown(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


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
    searched: dict[str, Dimension] = {**OPTIMIZER[optimizer.name], "clip_norm": CLIPPING}
    space = {f"optimizer.{name}": each for name, each in searched.items()}
    now: dict[str, Any] = {f"optimizer.{name}": getattr(optimizer, name) for name in searched}
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
