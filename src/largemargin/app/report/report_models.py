"""What a report is about: runs, comparisons of runs, or geometries, read into one form."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from largemargin.app.config import RunConfig
from largemargin.app.report.class_rivals import Rivals, rivals_in
from largemargin.app.report.sample_views import Observed
from largemargin.app.training.comparison import RESULT as COMPARISON
from largemargin.app.training.comparison import RUNS, Comparison
from largemargin.app.training.config_file import to_dict
from largemargin.app.training.files import read_json
from largemargin.app.training.objective import parse_objective
from largemargin.app.training.runs import DATA, ENVIRONMENT, METRICS, Run
from largemargin.errors import LargeMarginError
from largemargin.measuring.accuracy import Correct
from largemargin.measuring.evaluate import Evaluation
from largemargin.measuring.geometry_result import Geometry

EVALUATION = "evaluation.json"

Given: TypeAlias = Geometry | Run | str | Path
Reportable: TypeAlias = Given | Sequence[Given] | Mapping[str, Given]
"""A geometry, a run, a folder of either kind, several of them, or several by name."""


@dataclass(frozen=True)
class Subject:
    """One model of the report; what is not known of it is None or empty."""

    name: str
    geometry: Geometry | None
    classes: tuple[str, ...]
    run: Run | None = None
    config: RunConfig | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = ()
    result: dict[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    data: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    color: int | None = 0
    observed: Observed | None = None
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name} (baseline)" if self.baseline else self.name

    @property
    def where(self) -> str:
        """What to type for the run in a command."""
        return "RUN" if self.run is None else shlex.quote(str(self.run.folder))

    def class_name(self, label: int) -> str:
        return self.classes[label] if 0 <= label < len(self.classes) else f"class {label}"

    def epochs(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("kind") == "epoch"]

    @property
    def skipped_steps(self) -> tuple[int, int]:
        """Steps of training that were not finite and were left out, of how many."""
        rows = self.epochs()
        steps = max((int(row.get("step") or 0) for row in rows), default=0)
        return sum(int(row.get("bad_steps") or 0) for row in rows), steps

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
        except (TypeError, KeyError, AttributeError, ValueError):  # damaged: one does without
            return None
        return found if same else None

    @property
    def class_accuracy(self) -> tuple[float, ...]:
        if self.evaluation is not None:
            return self.evaluation.clean.per_class
        return () if self.observed is None else self.observed.class_accuracy

    @property
    def rivals(self) -> Rivals | None:
        """Nearest classes; a geometry of very many has no angles, but a model has class vectors."""
        angles = None if self.geometry is None else self.geometry.prototypes.angles
        if angles is not None and len(angles) > 1:
            return rivals_in(angles)
        return None if self.observed is None else self.observed.rivals

    @property
    def data_key(self) -> str:
        """The same for runs on the same test images."""
        return (self.tested_on or self.name)[:16]

    @property
    def tested_on(self) -> str | None:
        """Digest of the test images of a run, or else of its validation images."""
        digests = self.data.get("record", {}).get("digests", {})
        found = digests.get("test") or digests.get("validation")
        return None if found is None else str(found)


@dataclass(frozen=True)
class Subjects:
    """All models of a report, and the comparison they are of, if any."""

    each: tuple[Subject, ...]
    comparison: Comparison | None = None

    @property
    def baseline(self) -> Subject | None:
        return next((each for each in self.each if each.baseline), None)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes where all models have the same, else none."""
        first = self.each[0].classes
        return first if all(each.classes == first for each in self.each) else ()


def read_subjects(given: Reportable) -> Subjects:
    """Everything the report is about, in the order given, with names that differ."""
    named = _named(given)
    if not named:
        raise LargeMarginError("a report needs at least one run or geometry, but none was given.")
    comparison: Comparison | None = None
    found: list[Subject] = []
    for name, each in named:
        if isinstance(each, str | Path) and (Path(each) / COMPARISON).is_file():
            comparison = Comparison.load(Path(each) / COMPARISON)
            found += [_run(run, method) for method, run in _runs(comparison, Path(each))]
        else:
            found.append(_subject(each, name))
    return Subjects(tuple(_marked(found)), comparison)


def _named(given: Reportable) -> list[tuple[str | None, Given]]:
    if isinstance(given, Mapping):
        return [(str(name), each) for name, each in given.items()]
    if isinstance(given, Geometry | Run | str | Path):
        return [(None, given)]
    if isinstance(given, Sequence):
        return [(None, each) for each in given]
    raise LargeMarginError(
        "a report is about a Geometry, a Run, the folder of one, or several of them, but "
        f"{type(given).__name__} was given."
    )


def _runs(comparison: Comparison, place: Path) -> list[tuple[str, Run]]:
    """The run of the first seed of every method, also where the comparison was moved."""
    found = []
    for each in comparison.methods:
        for folder in each.folders[:1]:
            moved = place / RUNS / Path(folder).name
            found.append((each.method, Run.open(folder if Path(folder).is_dir() else moved)))
    return found


def _subject(given: Given, name: str | None) -> Subject:
    if isinstance(given, Geometry):
        return Subject(name or "model", given, _classes_of(given))
    if isinstance(given, Run):
        return _run(given, name)
    if not isinstance(given, str | Path):
        raise LargeMarginError(
            "a report is about geometries and runs, but "
            f"{type(given).__name__} was given among them."
        )
    path = Path(given)
    if path.is_file():
        return _subject(Geometry.load(path), name or path.stem)
    if not path.exists():
        raise LargeMarginError(
            f"there is no {given}. Pass the folder of a run, as runs/20250101-120000-name, that of "
            "a comparison, or a geometry.json."
        )
    return _run(Run.open(path), name)


def _run(run: Run, name: str | None = None) -> Subject:
    notes: list[str] = []
    config = run.config
    facts = _json(run.folder / DATA, notes) or {}
    geometry: Geometry | None = None
    evaluation: Evaluation | None = None
    try:
        geometry = run.geometry()
    except LargeMarginError as error:
        notes.append(str(error))
    if (run.folder / EVALUATION).is_file():
        try:
            evaluation = _result(Evaluation.load(run.folder / EVALUATION), facts, notes)
        except LargeMarginError as error:
            notes.append(str(error))
    classes = tuple(str(each) for each in facts.get("classes", ()))
    if not classes and geometry is not None:
        classes = _classes_of(geometry)
    if not run.finished:
        notes.append("training is not finished: the report shows it as far as it came")
    if run.failure is not None:
        notes.append(f"the run diverged: {run.failure}")
    return Subject(
        name=name or config.name,
        geometry=geometry,
        classes=classes,
        run=run,
        config=config,
        settings=to_dict(config),
        rows=tuple(_metrics(run, notes)),
        result=run.result if run.finished else {},
        evaluation=evaluation,
        data=facts,
        environment=_json(run.folder / ENVIRONMENT, notes) or {},
        baseline=is_softmax(config),
        notes=tuple(notes),
    )


def _classes_of(geometry: Geometry) -> tuple[str, ...]:
    """Names of the classes, or else their numbers."""
    return geometry.class_names or tuple(str(label) for label in range(geometry.classes))


def _result(found: Evaluation, facts: dict[str, Any], notes: list[str]) -> Evaluation | None:
    """The evaluation, unless it is of other images than the result of the run."""
    again = "it is left out. Run largemargin evaluate on the run for its own"
    if found.origin is not None:
        if found.origin.usual:
            return found
        notes.append(f"{EVALUATION} is of {found.origin}: {again}")
        return None
    # Files of earlier versions do not say what they are of, but how much of it there was.
    images = facts.get("record", {}).get("images", {})
    order = ("test", "validation", *(("train",) if "query" in images else ()))
    split = next((name for name in order if images.get(name)), None)
    seen = found.clean.samples + found.clean.skipped
    if split is None or images[split] == seen:
        return found
    notes.append(
        f"{EVALUATION} is of {seen:,} images, but the run has {images[split]:,} {split} images: "
        f"{again}"
    )
    return None


def is_softmax(config: RunConfig) -> bool:
    """Plain cross entropy on clean images: what the others are compared with."""
    terms = parse_objective(config.objective)
    return [term.name for term in terms] == ["cross_entropy"] and config.noise.use == "none"


def _json(path: Path, notes: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except LargeMarginError as error:
        notes.append(str(error))
        return None


def _metrics(run: Run, notes: list[str]) -> list[dict[str, Any]]:
    path = run.folder / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # a crash cut it short
            notes.append(f"metrics.jsonl cannot be read to its end: {error}")
            break
    return rows


def _marked(found: list[Subject]) -> list[Subject]:
    """Different names and colours; one baseline at most, the first."""
    from dataclasses import replace

    names: dict[str, int] = {}
    marked, place, has_baseline = [], 0, False
    several = len(found) > 1
    for each in found:
        seen = names.get(each.name, 0) + 1
        names[each.name] = seen
        name = each.name if seen == 1 else f"{each.name} #{seen}"
        baseline = each.baseline and several and not has_baseline
        has_baseline = has_baseline or baseline
        color = None if baseline else place
        place += not baseline
        marked.append(replace(each, name=name, baseline=baseline, color=color))
    return marked
