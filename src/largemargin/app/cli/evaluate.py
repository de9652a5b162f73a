"""``largemargin evaluate``: accuracy, robustness, calibration, strangers and retrieval of a run."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import jsonargparse

from largemargin.app.cli.run_options import (
    add_data,
    add_flips,
    add_ood,
    add_run,
    add_temperature,
    number_or,
    output_file,
    show_progress,
)
from largemargin.evaluation_config import EvaluationConfig
from largemargin.exceptions import LargeMarginError

if TYPE_CHECKING:
    from largemargin.app.cli.open_run import ChosenImages, OpenRun

HELP = "test a trained model: noise, occlusion, attacks, calibration, other data"

DESCRIPTION = """\
Test a trained model on its test images or on other data of the same classes: accuracy with its
interval, by class and balanced, confusion, calibration, every perturbation of the robustness
papers, attacks, detection of other data and retrieval. The result is printed and written to
evaluation.json in the folder of the run; that of other images, or of --which last, to a file
beside it."""

EXAMPLES = """\
Examples:
  largemargin evaluate runs/20260101-120000-run
  largemargin evaluate RUN --attacks [] --draws 3          faster
  largemargin evaluate RUN --gaussian [0.05,0.1] --perturbations none
  largemargin evaluate RUN --data new_photos/ --out new.json
  largemargin evaluate RUN --ood other_photos/             or a data set: --ood svhn:~/svhn"""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin evaluate RUN [options]"
    add_run(parser)
    add_flips(parser)
    add_ood(parser)
    parser.add_argument(
        "-o", "--out", type=str, help="JSON file; default evaluation.json in the run, or beside it"
    )
    add_temperature(
        parser,
        "report calibration with logits divided by it, too",
        fitted=" of the run; for other data only if it was before",
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these settings")
    parser.add_class_arguments(EvaluationConfig)
    for group in parser._action_groups:
        if group.title and group.title.startswith("Which parts"):
            group.title = "What to test"
    add_data(parser)


def run(options: Any) -> int:
    from largemargin.app.cli.open_run import chosen_images, ood_samples, open_run
    from largemargin.measuring.evaluate import Search, evaluate

    names = [field.name for field in fields(EvaluationConfig)]
    config = EvaluationConfig(**{name: options[name] for name in names})
    opened = open_run(options)
    path = output_file(options.out or opened.run.folder / "evaluation.json")
    chosen = chosen_images(options, opened)
    if options.out is None:
        path = path.with_name(chosen.origin.file_name)
    query, gallery = chosen.data.query, chosen.data.gallery
    search = None if query is None or gallery is None else Search(query, gallery)
    found = evaluate(
        opened.model,
        chosen.samples,
        class_names=opened.classes,
        config=config,
        ood=None if options.ood is None else ood_samples(options.ood, opened),
        search=search,
        temperature=_temperature(options, opened, chosen),
        device=opened.device,
        progress=show_progress(),
    )
    replace(found, origin=chosen.origin).save(path)
    print(f"{opened.run.folder}, {chosen.what} images\n{found}\n\nwritten to {path}")
    if not chosen.origin.usual:
        print(f"These are {chosen.origin}, not the result of the run: the report leaves them out.")
    return 0


def _temperature(options: Any, opened: "OpenRun", chosen: "ChosenImages") -> Any:
    from largemargin.app.cli.open_run import CalibrationCache, cached_temperature
    from largemargin.measuring.calibrate import Temperature

    given = number_or("temperature", options.temperature)
    if given != "auto":
        return None if given == "none" else given
    cache = CalibrationCache(opened, say=False)  # the table does
    if not chosen.origin.own:
        return cache.kept(Temperature, "temperature")  # the run's own data may not be here
    if chosen.origin.split == "validation":
        return None  # it would be judged on what it was fitted to
    cache.images = chosen.data.validation  # which need not be read again
    try:
        return cached_temperature(cache)
    except LargeMarginError:
        return None  # nobody asked for it
