"""What a report is about: runs, comparisons of runs, or geometries, read into one form."""

import itertools
import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from largemargin.app.config import RunConfig
from largemargin.app.report.charts import NOTHING, Cell, Dash, Note, Number, Series, finite
from largemargin.app.report.sample_views import Rivals, SampleViews, rivals_in
from largemargin.app.training.checkpoints import DATA
from largemargin.app.training.comparison_result import RESULT as COMPARISON
from largemargin.app.training.comparison_result import RUNS, Comparison
from largemargin.app.training.config_file import flat, to_dict
from largemargin.app.training.files import read_json
from largemargin.app.training.journal import METRICS, whole_rows
from largemargin.app.training.objective import parse_objective
from largemargin.app.training.runs import ENVIRONMENT, EVALUATION, GEOMETRY, Run, load_record
from largemargin.errors import LargeMarginError
from largemargin.measuring.accuracy import Correct
from largemargin.measuring.calibration import Calibration
from largemargin.measuring.evaluate import Evaluation
from largemargin.measuring.geometry_result import Geometry

ReportSource: TypeAlias = Geometry | Run | str | Path
ReportSources: TypeAlias = ReportSource | Sequence[ReportSource] | Mapping[str, ReportSource]
"""A geometry, a run, a folder of either kind, several of them, or several by name."""


@dataclass(frozen=True)
class ReportModel:
    """One model of the report; what is not known of it is None or empty."""

    name: str
    geometry: Geometry | None
    classes: tuple[str, ...]
    run: Run | None = None
    config: RunConfig | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[dict[str, Any], ...] = ()
    """Rows of metrics.jsonl."""
    result: dict[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    data: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    color: int | None = 0
    views: SampleViews | None = None
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name} (baseline)" if self.baseline else self.name

    def line(
        self,
        x: Sequence[Number],
        y: Sequence[Number],
        style: str = "",
        dash: Dash = "solid",
        **settings: Any,
    ) -> Series:
        """A line of a chart about this model; ``style`` is what it shows of it, if several do."""
        name = settings.pop("name", f"{self.title}, {style}" if style else self.title)
        look: dict[str, Any] = {"color": self.color, "dash": dash, "group": self.title}
        return Series(name, x, y, style=style, **look, **settings)

    def class_name(self, label: int) -> str:
        return self.classes[label] if 0 <= label < len(self.classes) else f"class {label}"

    @property
    def shell_path(self) -> str:
        """What to type for the run in a command."""
        return "RUN" if self.run is None else shlex.quote(str(self.run.folder))

    @property
    def evaluate_command(self) -> str:
        return f"largemargin evaluate {self.shell_path}"

    def measure_command(self, *options: str) -> str:
        """Measure with ``options`` and what was measured before: the file is written anew."""
        before = () if self.geometry is None else _measured_options(self.geometry)
        asked = [*(word for word in before if word not in options), *options]
        words = ["largemargin measure", self.shell_path, *asked]
        return " ".join([*words, f"--out {self.shell_path}/geometry.json"])

    def epochs(self) -> list[dict[str, Any]]:
        return [row for row in self.metrics if row.get("kind") == "epoch"]

    @property
    def skipped_steps(self) -> tuple[int, int]:
        """Steps of training that were not finite and were left out, of how many."""
        rows = self.epochs()
        steps = max((int(row.get("step") or 0) for row in rows), default=0)
        return sum(int(row.get("bad_steps") or 0) for row in rows), steps

    @property
    def train_counts(self) -> list[int]:
        """Training images of each class, by class; empty where they are not known."""
        counts = self.data.get("record", {}).get("counts", {}).get("train", {})
        found = [counts.get(name) for name in self.classes]
        return [int(count) for count in found] if found and None not in found else []

    @property
    def tested_on(self) -> str | None:
        """Digest of the test images of a run, or else of its validation images."""
        digests = self.data.get("record", {}).get("digests", {})
        digest: str | None = digests.get("test") or digests.get("validation")
        return digest

    @property
    def judged_on(self) -> str:
        """What its images are called: test or validation ones, or just images."""
        found = [self.data.get("record", {}).get("digests", {}), self.result]
        names = (name for each in found for name in ("test", "validation") if each.get(name))
        return " ".join((*(name for name in [next(names, None)] if name), "images"))

    @property
    def data_key(self) -> str:
        """The same for runs on the same test images."""
        return (self.tested_on or self.name)[:16]

    @property
    def accuracy(self) -> float | None:
        """On the test images: evaluated, or measured, or at the end of training."""
        if self.evaluation is not None:
            return self.evaluation.clean.accuracy
        if self.geometry is not None:
            return self.geometry.accuracy
        for split in ("test", "validation"):
            if self.result.get(split):
                return float(self.result[split]["accuracy"])
        return None

    @property
    def samples(self) -> int | None:
        if self.evaluation is not None:
            return self.evaluation.clean.samples
        if self.geometry is not None:
            return self.geometry.samples
        images = self.data.get("record", {}).get("images", {})
        split = next((name for name in ("test", "validation") if self.result.get(name)), "")
        return images.get(split) or None

    @property
    def correct(self) -> Correct | None:
        """Which test images are right, where it was kept and is that of :attr:`accuracy`."""
        found = None if self.evaluation is None else self.evaluation.clean.correct
        try:
            if found is None and "correct" in self.result:
                found = Correct.from_dict(self.result["correct"])
            if found is None or self.accuracy is None or self.samples != found.samples:
                return None
            same = int(found.right().sum()) == round(self.accuracy * found.samples)
        except (TypeError, KeyError, AttributeError, ValueError):  # damaged: do without
            return None
        return found if same else None

    @property
    def class_accuracy(self) -> tuple[float, ...]:
        if self.evaluation is not None:
            return self.evaluation.clean.per_class
        return () if self.views is None else self.views.class_accuracy

    @property
    def confusion(self) -> tuple[tuple[int, ...], ...]:
        """Test images by label and prediction; empty where it is not known."""
        if self.evaluation is not None:
            return self.evaluation.clean.confusion or ()
        return () if self.views is None else self.views.confusion

    @property
    def worst_class(self) -> float | None:
        """The lowest accuracy of a class."""
        return min(finite(self.class_accuracy), default=None)

    @property
    def perturbed_accuracy(self) -> float | None:
        """Mean over all perturbations."""
        found = self.evaluation and self.evaluation.perturbed
        return statistics.fmean(result.accuracy for result in found.values()) if found else None

    @property
    def attacked_accuracy(self) -> float | None:
        """Under the strongest attack."""
        found = self.evaluation and self.evaluation.attacked
        return min(result.accuracy for result in found) if found else None

    @property
    def calibration(self) -> Calibration | None:
        """The calibration that was evaluated, or else measured."""
        if self.evaluation is not None:
            return self.evaluation.clean.calibration
        return None if self.geometry is None else self.geometry.calibration

    @property
    def rivals(self) -> Rivals | None:
        """Nearest classes; a geometry of very many has no angles, but a model has class vectors."""
        angles = None if self.geometry is None else self.geometry.prototypes.angles
        if angles is not None and len(angles) > 1:
            return rivals_in(angles)
        return None if self.views is None else self.views.rivals


def number_at(record: Any, path: str) -> float | None:
    """A number by its path, as "margins.cosine.overall.mean"; None where it was not measured."""
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else getattr(record, name, None)
    return None if record is None else float(record)


def _measured_options(geometry: Geometry) -> Iterator[str]:
    """Options of ``largemargin measure`` that give the optional parts of a geometry."""
    for part in ("curvature", "bounds", "input_margins", "sphere"):
        if getattr(geometry, part) is not None:
            yield f"--{part} true"
    for option, names in (
        ("--layers", [layer.name for layer in geometry.layers or ()]),
        ("--layer_margins", list(geometry.layer_margins or ())),
    ):
        if names:
            yield f"{option} {shlex.quote(','.join(names))}"


Measured: TypeAlias = tuple[ReportModel, Geometry]


@dataclass(frozen=True)
class ReportModels:
    """All models of a report, and the comparison they are of, if any."""

    models: tuple[ReportModel, ...]
    comparison: Comparison | None = None

    def __iter__(self) -> Iterator[ReportModel]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: int) -> ReportModel:
        return self.models[index]

    @property
    def measured(self) -> list[Measured]:
        """Models that have a geometry, with it."""
        return [(model, model.geometry) for model in self if model.geometry is not None]

    @property
    def title(self) -> str:
        names = [model.name for model in self]
        shown = ", ".join(names[:4])
        return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"

    @property
    def baseline(self) -> ReportModel | None:
        return next((model for model in self if model.baseline), None)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes where all models have the same, else none."""
        first = self[0].classes
        return first if all(model.classes == first for model in self) else ()


def unknown(
    without: Sequence[ReportModel], words: str, command: Callable[[ReportModel], str]
) -> list[Note]:
    """What was not measured of some models, in one sentence, with the command for the first."""
    names = ", ".join(model.title for model in without)
    return [Note(f"{names}: {words}", command(without[0]))] if without else []


CLASS_COLUMNS = (
    *("model", "class", "samples", "trained on", "accuracy", "mean margin", "5 % margin"),
    *("dispersion", "nearest rival", "angle to it"),
)


def class_rows(model: ReportModel, geometry: Geometry) -> list[tuple[Cell, ...]]:
    """One row for each class."""
    margins, compact = geometry.margins["cosine"].classes, geometry.compactness
    accuracy, trained, rivals = model.class_accuracy, model.train_counts, model.rivals
    return [
        (
            Cell.of(model.title),
            Cell.of(model.class_name(label)),
            Cell.count(margins.counts[label]),
            Cell.count(trained[label] if trained else None),
            Cell.percent(accuracy[label] if label < len(accuracy) else None),
            Cell.number(margins.mean[label]),
            Cell.number(margins.q05[label]),
            Cell.number(None if compact is None else compact.dispersion[label]),
            Cell.of(NOTHING if rivals is None else model.class_name(rivals.nearest[label])),
            Cell.degrees(None if rivals is None else rivals.angle[label]),
        )
        for label in range(geometry.classes)
    ]


def read_models(source: ReportSources) -> ReportModels:
    """Everything the report is about, in the order given, with names that differ."""
    if isinstance(source, Mapping):
        named = list(source.items())
    elif isinstance(source, Geometry | Run | str | Path):
        named = [("", source)]
    elif isinstance(source, Sequence):
        named = [("", each) for each in source]
    else:
        raise LargeMarginError(
            "a report is about a Geometry, a Run, the folder of one, or several of them, but "
            f"{type(source).__name__} was given."
        )
    if not named:
        raise LargeMarginError("a report needs at least one run or geometry, but none was given.")
    comparison: Comparison | None = None
    models: list[ReportModel] = []
    for name, each in named:
        if isinstance(each, str | Path) and (Path(each) / COMPARISON).is_file():
            comparison = load_record(Comparison, Path(each) / COMPARISON)
            models += [_from_run(run, method) for method, run in _runs(comparison, Path(each))]
        else:
            models.append(_read(each, str(name)))
    return ReportModels(tuple(_with_distinct_names(models)), comparison)


def _runs(comparison: Comparison, place: Path) -> list[tuple[str, Run]]:
    """The run of the first seed of every method, also where the comparison was moved."""
    runs = []
    for result in comparison.methods:
        for folder in result.folders[:1]:
            moved = place / RUNS / Path(folder).name
            runs.append((result.method, Run.open(folder if Path(folder).is_dir() else moved)))
    return runs


def _read(source: ReportSource, name: str) -> ReportModel:
    if isinstance(source, Geometry):
        return ReportModel(name or "model", source, _classes_of(source))
    if isinstance(source, Run):
        return _from_run(source, name)
    if not isinstance(source, str | Path):
        raise LargeMarginError(
            "a report is about geometries and runs, but "
            f"{type(source).__name__} was given among them."
        )
    path = Path(source)
    if path.suffix.lower() == ".html" and path.is_file():
        raise LargeMarginError(
            f"{path} is a web page, as this command writes them. Pass the folders of runs; where a "
            f"report lies beside them, {path.parent / '*'}/ with a slash at the end."
        )
    if path.is_file():
        return _read(load_record(Geometry, path), name or path.stem)
    if not path.exists():
        raise LargeMarginError(
            f"there is no {source}. Pass the folder of a run, such as runs/20250101-120000-name, "
            "that of a comparison, or a geometry.json."
        )
    return _from_run(Run.open(path), name)


def _from_run(run: Run, name: str) -> ReportModel:
    notes: list[str] = []
    config = run.config
    facts = _attempt(lambda: run.facts, run.folder / DATA, notes) or {}
    geometry = _attempt(run.geometry, run.folder / GEOMETRY, notes)
    evaluation = _evaluation(run, facts, notes)
    classes = tuple(str(label) for label in facts.get("classes", ()))
    if not classes and geometry is not None:
        classes = _classes_of(geometry)
    if not run.finished:
        notes.append("training is not finished: the report shows it as far as it came")
    if run.failure is not None:
        notes.append(f"the run diverged: {run.failure}")
    file = run.folder / ENVIRONMENT
    return ReportModel(
        name=name or config.name,
        geometry=geometry,
        classes=classes,
        run=run,
        config=config,
        settings=to_dict(config),
        metrics=tuple(_metrics(run, notes)),
        result=run.result if run.finished else {},
        evaluation=evaluation,
        data=facts,
        environment=_attempt(lambda: read_json(file), file, notes) or {},
        baseline=is_softmax(config),
        notes=tuple(notes),
    )


def _classes_of(geometry: Geometry) -> tuple[str, ...]:
    """Names of the classes, or else their numbers."""
    return geometry.class_names or tuple(str(label) for label in range(geometry.classes))


Part = TypeVar("Part")


def _attempt(read: Callable[[], Part], file: Path, notes: list[str]) -> Part | None:
    """What a file of a run holds; None where there is none, and a note where it is damaged."""
    try:
        return read() if file.is_file() else None
    except LargeMarginError as error:
        notes.append(str(error))
        return None


def _evaluation(run: Run, facts: dict[str, Any], notes: list[str]) -> Evaluation | None:
    """The evaluation, unless it is of other images than the result of the run."""
    path = run.folder / EVALUATION
    evaluation = _attempt(lambda: load_record(Evaluation, path), path, notes)
    if evaluation is None:
        return None
    again = "it is left out. Run largemargin evaluate on the run for its own"
    if evaluation.origin is not None:
        if evaluation.origin.usual:
            return evaluation
        notes.append(f"{EVALUATION} is of {evaluation.origin}: {again}")
        return None
    # Files of earlier versions do not say what they are of, but how much of it there was.
    images = facts.get("record", {}).get("images", {})
    order = ("test", "validation", *(("train",) if "query" in images else ()))
    split = next((name for name in order if images.get(name)), None)
    samples = evaluation.clean.samples + evaluation.clean.skipped
    if split is None or images[split] == samples:
        return evaluation
    notes.append(
        f"{EVALUATION} is of {samples:,} images, but the run has {images[split]:,} {split} images: "
        f"{again}"
    )
    return None


def is_softmax(config: RunConfig) -> bool:
    """Plain cross entropy on clean images: what the others are compared with."""
    terms = parse_objective(config.objective)
    return [term.name for term in terms] == ["cross_entropy"] and config.noise.use == "none"


def _metrics(run: Run, notes: list[str]) -> list[dict[str, Any]]:
    path = run.folder / METRICS
    rows, lines = whole_rows(path) if path.is_file() else ([], [])
    if path.is_file() and len(path.read_bytes().splitlines()) > len(lines):
        notes.append(f"metrics.jsonl cannot be read to its end: line {len(lines) + 1} is no row")
    return rows


def _with_distinct_names(models: list[ReportModel]) -> list[ReportModel]:
    """Different names and colours; one baseline at most, the first."""
    baseline = next((model for model in models if model.baseline and len(models) > 1), None)
    seen: dict[str, int] = {}
    colors = itertools.count()
    made = []
    for model in models:
        seen[model.name] = seen.get(model.name, 0) + 1
        name = model.name if seen[model.name] == 1 else f"{model.name} #{seen[model.name]}"
        color = None if model is baseline else next(colors)
        made.append(replace(model, name=name, baseline=model is baseline, color=color))
    return made


IGNORED = ("name", "out")
"""Settings that are no part of the method."""

Rows = list[tuple[str, ...]]
"""A name, and the value of every model."""


def settings_of(runs: list[ReportModel]) -> tuple[Rows, Rows]:
    settings = [flat(model.settings) for model in runs]
    return split([{name: own[name] for name in own if name not in IGNORED} for own in settings])


def split(records: Sequence[dict[str, Any]]) -> tuple[Rows, Rows]:
    """What differs between records, and what does not."""
    differing: Rows = []
    equal: Rows = []
    for name in dict.fromkeys(itertools.chain.from_iterable(records)):
        values = tuple(_shown(own.get(name, "")) for own in records)
        (differing if len(set(values)) > 1 else equal).append((name, *values))
    return differing, equal


def _shown(value: Any) -> str:
    if value in ({}, ""):
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
