"""The protocol of the benchmark, as typed settings from a YAML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from largemargin.app.config import DataConfig, NoiseConfig, ObjectiveConfig, RunConfig
from largemargin.app.training.config_file import from_dict, read_yaml, settings_from, to_dict
from largemargin.app.training.objective import parse_objective
from largemargin.errors import LargeMarginError, check_number

SCORES = (
    "accuracy",
    "balanced_accuracy",
    "mean_average_precision",
    "corrupted_mean",
    "common_corruptions",
    "ood_auroc",
)
OWN_DATA = ("omniglot", "clinc150", "trec", "letters")
"""Data sets that are known here alone; see ``images``."""


@dataclass(frozen=True)
class MethodSpec:
    """One method of the benchmark.

    Args:
        name: of the method.
        objective: as in ``ObjectiveConfig.name``.
        margin: whether it is one of the methods in question; the others are what they are held
            against.
        noise: settings of ``NoiseConfig`` that it trains with.
        reweight_at: share of the steps after which LDAM's class weights are the balanced ones.
        settings: parameters of its objective that no trial changes, and those of trial 0.
        space: its own parameters: ``[low, high]`` or a list of values, by path.
        run: other settings of ``RunConfig`` that it trains with.
        probe: "start": the head begins as a logistic regression on the features of the network as
            it is given, with the penalty ``probe.penalty``; "only": that is all of it.
        best_epoch: the weights of the epoch that is best on the validation images are judged, not
            the last.
    """

    name: str
    objective: str
    margin: bool = False
    noise: dict[str, Any] = field(default_factory=dict)
    reweight_at: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    probe: Literal["start", "only"] | None = None
    best_epoch: bool = False


@dataclass(frozen=True)
class Rung:
    """A round of successive halving: so many settings, so much of the epochs, these seeds."""

    keep: int
    epochs: float
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Situation:
    """A task on which methods are compared.

    Args:
        name: its key.
        title: how tables call it.
        data: settings of ``DataConfig``; of the data sets that are known here alone the name and
            ``train``, the part that is trained on.
        model: settings of ``ModelConfig``.
        epochs: of a final run.
        batch_size: of all runs.
        score: what is compared: accuracy, balanced_accuracy, mean_average_precision or
            corrupted_mean, common_corruptions or ood_auroc.
        methods: names, in the order that breaks ties.
        images: training images, the same number of every class; default all.
        precision: default that of the protocol.
        baseline: the method to beat.
        beside: another method that gets final runs whatever wins.
        aim: the difference in ``score`` that was hoped for.
        space: ranges that differ from those of the methods.
        choice_seeds: seeds of the last rung, over which the score is averaged.
        chance: the score of guessing, which a final run that diverged counts with.
        baselines: what the chosen method has to be better than, all of them; default the baseline
            alone. Chosen method and each of these are also run with the other's optimizer settings.
        common: the space that all methods have in common, in place of the protocol's.
        run: settings of ``RunConfig`` that differ from the protocol's.
        labels: of the training images, those held out among them: FILE.ARRAY.
        unseen: how many classes the test is about, and the validation, none of them trained on.
        ood: data sets of no known class that the test is about; see ``images``.
        value: what its answer is worth to users, for the order of the runs.
        like: the situation whose tuned settings are tried here, unchanged.
    """

    name: str
    title: str
    data: dict[str, Any]
    model: dict[str, Any]
    epochs: int
    batch_size: int
    score: str
    methods: tuple[str, ...]
    images: int | None = None
    precision: str | None = None
    baseline: str = "softmax"
    beside: str = "label_smoothing"
    aim: float | None = None
    space: dict[str, Any] = field(default_factory=dict)
    choice_seeds: int = 1
    chance: float = 0.1
    baselines: tuple[str, ...] = ()
    common: dict[str, Any] | None = None
    run: dict[str, Any] = field(default_factory=dict)
    labels: str | None = None
    unseen: tuple[int, ...] = ()
    ood: tuple[str, ...] = ()
    value: float = 1.0
    like: str | None = None

    @property
    def against(self) -> tuple[str, ...]:
        """All that the chosen method has to be better than."""
        return self.baselines or (self.baseline,)


@dataclass(frozen=True)
class Protocol:
    """Everything that is fixed before the first run.

    ``own_trials``: the last so many trials of a method draw its own parameters alone, and have the
    optimizer settings that were best among the trials before; 0: each trial draws all together.
    """

    path: Path
    trials: int
    draws_seed: int
    rungs: tuple[Rung, ...]
    seeds: tuple[int, ...]
    level: float
    power: float
    run: dict[str, Any]
    space: dict[str, Any]
    methods: dict[str, MethodSpec]
    situations: dict[str, Situation]
    presets: dict[str, tuple[str, ...]]
    own_trials: int = 0

    def situation(self, name: str) -> Situation:
        if name not in self.situations:
            known = ", ".join(self.situations)
            raise LargeMarginError(f"there is no situation {name!r} in {self.path}, but {known}.")
        return self.situations[name]

    def rung_seeds(self, situation: Situation, stage: int) -> tuple[int, ...]:
        """The seeds that every trial of a rung is run with."""
        last = stage == len(self.rungs) - 1
        return self.rungs[stage].seeds[: situation.choice_seeds if last else None]

    def config(self, situation: Situation, method: MethodSpec) -> RunConfig:
        """A run of the method with the library's defaults, before any trial's values."""
        model = {"model": situation.model}
        base = from_dict(_merged(self.run, model, situation.run, method.run))
        noise = settings_from({**to_dict(base.noise), **method.noise}, NoiseConfig, method.name)
        return replace(
            base,
            objective=ObjectiveConfig(method.objective, method.settings),
            noise=noise,
            epochs=situation.epochs,
            batch_size=situation.batch_size,
            precision=situation.precision or base.precision,  # type: ignore[arg-type]
        )

    @property
    def tests(self) -> int:
        """How many are corrected together: one for each situation that is tuned."""
        return sum(each.like is None for each in self.situations.values())

    def tuned_in(self, situation: Situation) -> Situation:
        """The situation that its settings come from: itself, or the one it is like."""
        return situation if situation.like is None else self.situation(situation.like)

    def common_space(self, situation: Situation) -> dict[str, Any]:
        """What is drawn for every method alike."""
        return self.space if situation.common is None else situation.common

    def own_space(self, situation: Situation, method: MethodSpec) -> dict[str, Any]:
        """The method's own ranges in this situation."""
        changed = {path: each for path, each in situation.space.items() if path in method.space}
        return {**method.space, **changed}


def read_protocol(path: str | Path) -> Protocol:
    """The protocol in a YAML file, checked."""
    file = Path(path)
    values = dict(read_yaml(file))
    optional = ("path", "own_trials")
    missing = [
        each.name
        for each in fields(Protocol)
        if each.name not in optional and each.name not in values
    ]
    if missing:
        raise LargeMarginError(f"{file} lacks {', '.join(missing)}.")
    values["rungs"] = tuple(settings_from(each, Rung, "rungs") for each in values["rungs"])
    values["methods"] = _named(values["methods"], MethodSpec, "methods")
    values["situations"] = _named(values["situations"], Situation, "situations")
    values["presets"] = {name: tuple(each) for name, each in values["presets"].items()}
    values["seeds"] = tuple(values["seeds"])
    protocol = Protocol(path=file, **values)
    _check(protocol)
    return protocol


def _merged(*groups: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by group; of a name in several the last counts."""
    found: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
            found[name] = _merged(found[name], value) if both else value
    return found


def _named(groups: Mapping[str, Any], kind: type[Any], place: str) -> dict[str, Any]:
    return {
        name: settings_from({"name": name, **each}, kind, f"{place}.{name}")
        for name, each in groups.items()
    }


def _check(protocol: Protocol) -> None:
    # All that conclude would stumble over, when days of training are over.
    check_number("trials", protocol.trials, at_least=1)
    if len({*protocol.seeds}) < max(2, len(protocol.seeds)):
        raise LargeMarginError(
            "seeds must be two different numbers or more, for tests of pairs, but they are "
            f"{list(protocol.seeds)}."
        )
    check_number("own_trials", protocol.own_trials, at_least=0, at_most=protocol.trials - 1)
    check_number("level", protocol.level, above=0, below=1)
    check_number("power", protocol.power, above=protocol.level, below=1)
    _check_rungs(protocol)
    for method in protocol.methods.values():
        parse_objective(ObjectiveConfig(method.objective, method.settings))
    for situation in protocol.situations.values():
        _check_situation(protocol, situation)
    for name, used in protocol.presets.items():
        for each in used:
            if each not in protocol.situations:
                raise LargeMarginError(
                    f"the preset {name} follows from the situation {each}, which is not defined."
                )


def _check_rungs(protocol: Protocol) -> None:
    keeps = [rung.keep for rung in protocol.rungs]
    if not keeps or keeps[0] != protocol.trials or keeps[-1] != 1 or keeps != sorted(keeps)[::-1]:
        raise LargeMarginError(
            f"rungs must keep from {protocol.trials} trials down to 1, but they keep {keeps}."
        )
    if set(protocol.seeds) & {seed for rung in protocol.rungs for seed in rung.seeds}:
        raise LargeMarginError("seeds of final runs must not be those of a rung.")
    if not all(rung.seeds for rung in protocol.rungs):
        raise LargeMarginError("every rung needs a seed.")


def _check_situation(protocol: Protocol, situation: Situation) -> None:
    if situation.score not in SCORES:
        raise LargeMarginError(
            f"the score of {situation.name} must be one of {', '.join(SCORES)}, but it is "
            f"{situation.score!r}."
        )
    most = len(protocol.rungs[-1].seeds)
    check_number("choice_seeds", situation.choice_seeds, at_least=1, at_most=most)
    unknown = [name for name in situation.methods if name not in protocol.methods]
    if unknown:
        raise LargeMarginError(
            f"{situation.name} names the method {unknown[0]!r}, which is not defined."
        )
    for name in (situation.baseline, situation.beside, *situation.baselines):
        if name not in situation.methods:
            raise LargeMarginError(f"{situation.name} must have {name} among its methods.")
        if protocol.methods[name].margin:
            raise LargeMarginError(f"{name} cannot be its own baseline in {situation.name}.")
    if situation.beside == situation.baseline:
        raise LargeMarginError(
            f"{situation.beside} is the baseline of {situation.name} already: beside must be "
            "another method."
        )
    if not any(protocol.methods[name].margin for name in situation.methods):
        raise LargeMarginError(
            f"{situation.name} has no method to choose: one of {', '.join(situation.methods)} must "
            "be a margin method (margin: true)."
        )
    if situation.baselines and situation.baseline not in situation.baselines:
        raise LargeMarginError(
            f"the baselines of {situation.name} must have {situation.baseline} among them."
        )
    source = protocol.tuned_in(situation)
    if unknown := [name for name in situation.methods if name not in source.methods]:
        raise LargeMarginError(
            f"{situation.name} takes {unknown[0]} from {source.name}, where it is not tuned."
        )
    if situation.data.get("name") not in OWN_DATA:
        settings_from(situation.data, DataConfig, f"situations.{situation.name}.data")
    for name in situation.methods:
        protocol.config(situation, protocol.methods[name])
