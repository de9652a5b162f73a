"""``largemargin predict``: classes of image files, with probability, margin and a flag."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jsonargparse

from largemargin.app.cli.run_options import (
    add_flips,
    add_options,
    add_run,
    add_temperature,
    number_or,
    output_file,
    show_progress,
)
from largemargin.exceptions import LargeMarginError, check_number

if TYPE_CHECKING:
    from largemargin.app.cli.open_run import CalibrationCache

HELP = "predict the classes of image files, and flag those too close to call"

DESCRIPTION = """\
Predict the class of image files. Every image gets a row with its class, the probability, the margin
(distance of its features to the decision boundary, or cosine for losses on angles) and a flag where
the margin is below a threshold. The threshold is calibrated on the validation images of the run, so
that it keeps 95 % of the right predictions; the temperature that makes probabilities mean what they
say is fitted to them, too. Both are kept in the folder of the run. Without validation images
nothing is flagged, and probabilities are the softmax of the logits as they are. An image that
cannot be read gives a row that says why.

In CSV files, texts that a spreadsheet would take for a formula get an apostrophe in front."""

EXAMPLES = """\
Examples:
  largemargin predict runs/20260101-120000-run photos/            CSV to the screen
  largemargin predict RUN a.jpg b.png --out answers.csv           or answers.json
  largemargin predict RUN photos/ --rule accuracy --target 0.99   flag until 99 % are right
  largemargin predict RUN photos/ --threshold 0.3                 or none
  largemargin predict RUN photos/ --temperature none              probabilities as trained"""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin predict RUN IMAGE [IMAGE ...] [options]"
    add_run(parser)
    add_flips(parser)
    parser.add_argument(
        "images", nargs="+", type=str, metavar="IMAGE", help="image files, or folders of them"
    )
    parser.add_argument(
        "-o", "--out", type=str, help="file to write, .csv or .json; default CSV to stdout"
    )
    flag = "margin below which to flag: a number, none, or auto (from the validation images)"
    rule = (
        "auto keeps a share of the right predictions (keep, the default), or flags until the rest "
        "reaches an accuracy (accuracy)"
    )
    target = "that share or accuracy; default 0.95 for keep, 0.99 for accuracy"
    add_options(
        parser,
        ("threshold", str, "auto", flag),
        ("rule", Literal["keep", "accuracy"] | None, None, rule),
        ("target", float | None, None, target),
    )
    add_temperature(parser, "what logits are divided by for the probabilities", fitted="")
    add_options(parser, ("batch_size", int, 64, "images at a time"))


def run(options: Any) -> int:
    from largemargin.app.cli.open_run import CalibrationCache, open_run, temperature_for
    from largemargin.app.predict import predict

    if options.out is not None and Path(options.out).suffix.lower() not in (".csv", ".json"):
        raise LargeMarginError(f"--out must end in .csv or .json, but {options.out!r} was given.")
    threshold = _given_threshold(options)
    path = None if options.out is None else output_file(options.out)
    opened = open_run(options)
    cache = CalibrationCache(opened)
    found = predict(
        opened.model,
        options.images,
        class_names=opened.classes,
        threshold=_calibrated(options, cache) if threshold == "auto" else threshold,
        temperature=temperature_for(options.temperature, cache),
        size=opened.size,
        channels=opened.channels,
        stretch=opened.stretch,
        batch_size=options.batch_size,
        device=opened.device,
        progress=show_progress(),
    )
    if path is None:
        found.write_csv(sys.stdout)
    elif path.suffix.lower() == ".csv":
        found.save_csv(path)
    else:
        found.save_json(path)
    where = "" if path is None else f", written to {path}"
    print(f"{_counts(found)}{where}", file=sys.stderr if path is None else sys.stdout)
    return 1 if found.failed == len(found) else 0


def _counts(found: Any) -> str:
    """How many images there were, flagged and unreadable ones; what probabilities rest on."""
    from largemargin.measuring.calibrate import number_of

    judged = any(row.flag is not None for row in found.rows)
    flagged = f", {found.flagged} flagged" if judged else ""
    failed = f", {found.failed} could not be read" if found.failed else ""
    used = found.temperature
    divided = "" if used is None else f", probabilities with temperature {number_of(used):.6g}"
    return f"{len(found)} image{'' if len(found) == 1 else 's'}{flagged}{failed}{divided}"


def _given_threshold(options: Any) -> Any:
    """--rule and --target say how a threshold is found; one that is given is not looked for."""
    given = number_or("threshold", options.threshold)
    if isinstance(given, float):
        check_number("--threshold", given, hint="Or pass none, or auto.")
    for name in ("rule", "target"):
        if given != "auto" and options[name] is not None:
            raise LargeMarginError(
                f"--{name} {options[name]} is for --threshold auto, but --threshold "
                f"{options.threshold} was given. Leave one of them out."
            )
    return None if given == "none" else given


def _calibrated(options: Any, cache: "CalibrationCache") -> Any:
    from largemargin.measuring.calibrate import Threshold, calibrate_threshold

    rule = options.rule or "keep"
    fit = partial(
        calibrate_threshold,
        cache.opened.model,
        rule=rule,
        target=options.target,
        device=cache.opened.device,
        progress=show_progress(),
    )
    target = "default" if options.target is None else f"{options.target:g}"
    try:
        return cache.get(Threshold, "threshold", fit, detail=f"-{rule}-{target}")
    except LargeMarginError as error:
        if rule != "keep" or options.target is not None:
            raise
        # Nobody asked for this rule: predictions without flags are better than none.
        print(f"Nothing is flagged: {error}", file=sys.stderr)
        return None
