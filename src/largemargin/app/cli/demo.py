"""``largemargin demo``: four losses, one small network, one table.

A small CNN is trained on scikit-learn's bundled digits (1797 real 8 x 8 images, no download) with
the same split, initial weights, batch order, number of epochs and optimizer for every loss. Only
the loss and its learning rate differ; the rates come from one grid, tried alike for each loss on
images taken from the training part (``--tune`` repeats that search).
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonargparse

from largemargin.app.cli.run_options import add_options, show_progress, study_folder
from largemargin.exceptions import LargeMarginError

HELP = "train a small CNN on digits with four losses and show one table (< 2 minutes)"

DESCRIPTION = """\
Train a small CNN on scikit-learn's digits with softmax and three large-margin losses, each with
the learning rate that suits it, and show accuracy and geometry side by side. No download, no GPU,
under two minutes."""

EXAMPLES = """\
Examples:
  largemargin demo
  largemargin demo --quick     a look in seconds, not a result
  largemargin demo --seed 1    is it luck?
  largemargin demo --tune      repeat the search for the learning rates"""

EPOCHS, QUICK_EPOCHS = 20, 6
CLOSER, QUICK_CLOSER = 100, 20
"""Test images that are attacked, and around which the curvature of the loss is measured."""

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
TUNING_SEEDS = (0, 1, 2)
TUNING_SHARE = 0.3
NOISE = 0.2


@dataclass(frozen=True)
class DemoMethod:
    """A loss as the demo trains it."""

    title: str
    objective: str
    rate: float
    settings: dict[str, Any] = field(default_factory=dict)


# Learning rates: the best of RATES by `--tune`, ties to the smaller. Loss parameters: the papers'
# defaults, except LM-Softmax's scale (16 for 10 classes instead of 64 for thousands of faces) and
# the discriminative margin (3, the value of the sequel's road images, instead of 6).
METHODS = (
    DemoMethod("softmax", "cross_entropy", 0.1),
    DemoMethod(
        "softmax + LMD", "cross_entropy + discriminative", 0.03, {"discriminative": {"margin": 3.0}}
    ),
    DemoMethod("LM-Softmax", "lm_softmax", 1.0, {"scale": 16.0}),
    DemoMethod("Kobayashi", "kobayashi", 0.3, {"strength": 0.3}),
)


@dataclass(frozen=True)
class Row:
    """One line of the table; everything is measured on the test images."""

    title: str
    accuracy: float
    noisy: float
    class_margin: float
    ceiling: float
    mean_margin: float
    min_margin: float
    dispersion: float
    relative_dispersion: float
    seconds: float
    folder: str


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("epochs", int | None, None, f"epochs for each loss (default {EPOCHS})"),
        ("batch_size", int, 64, "images per step"),
        ("seed", int, 0, "of initial weights and batch order"),
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_EPOCHS} epochs, unless --epochs is given"
    )
    parser.add_argument("--tune", action="store_true", help="search for the learning rates")
    add_options(
        parser,
        ("out", str, "runs", "folder of all runs"),
        ("folder", str, argparse.SUPPRESS, "folder of this demo; default a new one in --out"),
    )


def run(options: Any) -> int:
    epochs = options.epochs
    if epochs is None:
        epochs = QUICK_EPOCHS if options.quick else EPOCHS
    if epochs < 1 or options.batch_size < 2:
        raise LargeMarginError(
            "--epochs must be at least 1 and --batch_size at least 2, but "
            f"{epochs} and {options.batch_size} were given."
        )
    base = base_config(epochs=epochs, batch_size=options.batch_size, seed=options.seed)
    with one_thread():
        if options.tune:
            tune_rates(base)
            return 0
        return _show(base, Path(study_folder(options, replace(base, out=options.out), "demo")))


def base_config(*, epochs: int, batch_size: int, seed: int) -> Any:
    """What all methods have in common; no images are held out, the last epoch counts."""
    from largemargin.app.config import DataConfig, OptimizerConfig, RunConfig

    return RunConfig(
        data=DataConfig("digits", validation=0.0),
        optimizer=OptimizerConfig(schedule="one_cycle", clip_norm=5.0),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        device="cpu",
        gradients_every=20,
        checkpoint_every=epochs,
    )


def config_of(method: DemoMethod, base: Any) -> Any:
    from largemargin.app.config import ObjectiveConfig

    objective = ObjectiveConfig(method.objective, method.settings)
    optimizer = replace(base.optimizer, lr=method.rate)
    return replace(base, name=method.title, objective=objective, optimizer=optimizer)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain little from a second thread and lose much when it has to wait."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _show(base: Any, folder: Path) -> int:
    from largemargin.app.data.load import load_data

    data = load_data(base.data)
    assert data.test is not None
    print(
        f"Training a small CNN on {len(data.train)} digits, {base.epochs} epochs for each of "
        f"{len(METHODS)} losses; the table is measured on {len(data.test)} others.",
        flush=True,
    )
    rows = compare_losses(base, folder, data)
    print(f"\n{table(rows)}\n")
    print(EXPLANATION.format(noise=NOISE, image=100 / len(data.test)))
    print("\nRuns:")
    for row in rows:
        print(f"  {row.title:<14} {row.folder}")
    print(f"\n{NEXT.format(run=rows[-1].folder)}")
    _report(rows, folder, data, QUICK_CLOSER if base.epochs <= QUICK_EPOCHS else CLOSER)
    return 0


def _report(rows: list[Row], folder: Path, data: Any, closer: int) -> None:
    """One page to look at, last, so that its path is what the eye falls on."""
    missing = [name for name in ("jinja2", "plotly") if find_spec(name) is None]
    if missing:
        listed = ", ".join(missing)
        print(f"\nFor a report to look at: pip install 'largemargin[report]' (no {listed} here)")
        return
    from largemargin.app.report.page import report

    for row in rows:
        _look_closer(Path(row.folder), data, closer)
    made = report({row.title: row.folder for row in rows}, folder / "report.html")
    print(f"\nReport: {made}")


def _look_closer(folder: Path, data: Any, samples: int) -> None:
    """What `largemargin evaluate` and `largemargin measure --curvature true` would find."""
    from largemargin.app.data.load import samples_text
    from largemargin.app.data.samples import Batches
    from largemargin.app.training.runs import Run
    from largemargin.evaluation_config import EvaluationConfig
    from largemargin.measuring.evaluate import evaluate
    from largemargin.measuring.measure import measure

    model = Run.open(folder).model()
    config = EvaluationConfig(
        draws=3 if samples >= CLOSER else 1,
        gaussian=(0.05, 0.1, 0.15, 0.2, 0.25),
        attacks=("fgsm", "pgd"),
        linf=(0.02, 0.04, 0.08),
        attack_samples=samples,
    )
    found = evaluate(model, data.test, class_names=data.classes, config=config, progress=False)
    found.save(folder / "evaluation.json")
    geometry = measure(
        model,
        Batches(data.test, 256, shuffle=False),
        pairwise=True,
        curvature=True,
        bounds=True,
        max_samples=samples,
        data_name=samples_text(data, "test", data.test),
        class_names=data.classes,
    )
    geometry.save(folder / "geometry.json")


def compare_losses(base: Any, folder: Path, data: Any) -> list[Row]:
    """Train every method of ``METHODS`` on the same data and measure it."""
    from largemargin.app.training.engine import Interrupted, train

    rows = []
    for method in METHODS:
        place = folder / method.objective.replace(" ", "").replace("+", "-")
        try:
            done = train(config_of(method, base), folder=place, data=data, progress=show_progress())
        except Interrupted:
            raise KeyboardInterrupt from None  # the demo is over sooner than it is resumed
        rows.append(measured(method, done, data))
    return rows


def measured(method: DemoMethod, done: Any, data: Any) -> Row:
    """A finished run as a line of the table."""
    from largemargin.measuring.robust.perturbations import Perturbation
    from largemargin.measuring.robust_accuracy import perturbed_accuracy

    geometry = done.geometry()
    cosine = geometry.margins["cosine"].overall
    noise = {"noise": Perturbation(sigma=NOISE)}
    noisy = perturbed_accuracy(done.model("last"), data.test, noise, draws=10)["noise"]
    compact = geometry.compactness
    centers = [
        distance for at, row in enumerate(geometry.centers.distances) for distance in row[at + 1 :]
    ]
    return Row(
        title=method.title,
        accuracy=done.result["test"]["accuracy"],
        noisy=noisy.accuracy,
        class_margin=geometry.prototypes.class_margin,
        ceiling=geometry.prototypes.ceiling,
        mean_margin=cosine.mean,
        min_margin=cosine.minimum,
        dispersion=compact.largest_dispersion,
        relative_dispersion=compact.largest_dispersion / statistics.fmean(centers),
        seconds=done.result["seconds"],
        folder=str(done.folder),
    )


def tune_rates(base: Any) -> None:
    """Try every rate of ``RATES`` for every method; the test images are never looked at."""
    from largemargin.app.data.load import load_data
    from largemargin.app.training.engine import train

    data = replace(load_data(replace(base.data, validation=TUNING_SHARE)), test=None)
    # The last epoch counts, as it does in the demo.
    base = replace(base, measure=False)
    for method in METHODS:
        for rate in RATES:
            accuracies = []
            for seed in TUNING_SEEDS:
                config = config_of(replace(method, rate=rate), replace(base, seed=seed))
                with TemporaryDirectory() as folder:
                    done = train(config, folder=Path(folder) / "run", data=data, progress=False)
                    accuracies.append(done.metrics("epoch")[-1]["validation"]["accuracy"])
            each = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
            mean = 100 * statistics.fmean(accuracies)
            used = "  <- used" if rate == method.rate else ""
            print(f"{method.title:<14} rate {rate:<5} {mean:6.2f} % ({each}){used}", flush=True)


COLUMNS = (
    ("", "method", 14, "{.title}"),
    ("test", "accuracy", 9, "{.accuracy:.2%}"),
    ("noisy", "accuracy", 9, "{.noisy:.2%}"),
    ("class", "margin", 8, "{.class_margin:.1f}°"),
    ("", "ceiling", 8, "{.ceiling:.1f}°"),
    ("mean", "margin", 8, "{.mean_margin:.3f}"),
    ("minimum", "margin", 8, "{.min_margin:.3f}"),
    ("largest", "dispersion", 11, "{.dispersion:.2f}"),
    ("relative", "dispersion", 11, "{.relative_dispersion:.2f}"),
    ("", "seconds", 8, "{.seconds:.1f}"),
)
"""Two lines of a heading, the width and how the number of a row is written."""


def table(rows: Sequence[Row]) -> str:
    first, second, widths, forms = zip(*COLUMNS, strict=True)
    cells = [[form.format(row).replace("%", " %") for form in forms] for row in rows]
    lines = [
        f"{line[0]:<{widths[0]}}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in (first, second, *cells)
    ]
    lines.insert(2, "-" * max(map(len, lines)))
    return "\n".join(lines)


EXPLANATION = """\
noisy accuracy       with Gaussian noise of standard deviation {noise} on pixels in [0, 1]
class margin         smallest angle between two class prototypes; its ceiling is arccos(-1/(C-1))
mean, minimum margin cosine to the own prototype minus that to the nearest rival; < 0: rival nearer
largest dispersion   largest distance between two test images of one class, in feature units
relative dispersion  the same divided by the mean distance of two class centres: compare this one,
                     because losses on the angle leave the scale of the features free

One test image is {image:.2f} points of accuracy and this is one seed: read small differences as
noise, the geometry as the point."""

NEXT = """\
Try next:
  largemargin measure {run}     the whole geometry of one of these runs
  largemargin evaluate {run}    occlusion, stripes, attacks, calibration
  largemargin compare --methods kobayashi,lm_softmax --seeds 5    which differences are noise?
  largemargin train --data YOUR_FOLDER --objective kobayashi      one folder of images per class"""
