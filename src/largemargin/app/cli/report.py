"""``largemargin report``: one HTML file about one run or several."""

from typing import Any, Literal

import jsonargparse

from largemargin.app.cli.run_options import add_options, show_progress
from largemargin.exceptions import LargeMarginError

HELP = "write one HTML file about runs: verdict, margins, features, robustness, provenance"

DESCRIPTION = """\
Write a report about one run, or several side by side, as one HTML file that opens without a
network: verdict and what to try next, mistakes, margins, features, robustness, training, theory
and provenance. What was not measured names the command that measures it."""

EXAMPLES = """\
Examples:
  largemargin report runs/20260101-120000-run
  largemargin report SOFTMAX_RUN COSFACE_RUN -o report.html
  largemargin report COMPARISON                     the folder of largemargin compare
  largemargin report RUN --features pca             faster than t-SNE; none: no model is run
  largemargin report RUN --layers '[backbone,penultimate]' --max_samples 1000
  largemargin report RUN --png figures/             static pictures as well
Everything there is to see of a run, step by step:
  largemargin evaluate RUN --attacks '[fgsm,pgd]' --linf '[0.01,0.02,0.04,0.08]'
  largemargin measure RUN --curvature true --bounds true --max_samples 500 --out RUN/geometry.json
  largemargin report RUN"""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin report RUN... [options]"
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        metavar="RUN",
        help="folder of a run or a comparison, or a geometry.json",
    )
    parser.add_argument("-o", "--out", type=str, default="report.html", help="file to write")
    places, layers = Literal["tsne", "pca", "none"], ("penultimate",)
    add_options(
        parser,
        ("png", str, None, "folder for static pictures", "DIR"),
        ("features", places, "tsne", "how samples are placed in the plane: tsne, pca or none"),
        ("layers", tuple[str, ...], layers, "names of modules to show there"),
        ("max_samples", int, 500, "samples to place there"),
        ("noise", float, 0.06, "of the noisy picture; 0 leaves it out"),
        ("title", str, None, "of the page"),
        ("device", str, "auto", "auto, cpu, cuda or cuda:1"),
    )


def run(options: Any) -> int:
    from pathlib import Path

    from largemargin.app.report.page import report
    from largemargin.app.training.processes import pick_device

    if not options.runs:
        raise LargeMarginError("name at least one run: largemargin report runs/...")
    if show_progress() and options.features != "none":
        print(f"looking at {len(options.runs)} run(s) ...", flush=True)
    path = report(
        options.runs,
        options.out,
        features=options.features,
        layers=tuple(options.layers),
        max_samples=options.max_samples,
        noise=options.noise,
        device=str(pick_device(options.device)),
        title=options.title,
        png=options.png,
    )
    print(f"written to {path} ({path.stat().st_size / 1e6:.1f} MB)")
    if options.png is not None:
        made = len(list(Path(options.png).glob("*.png")))
        print(f"figures in {options.png} ({made} PNG files)")
    return 0
