"""``largemargin measure``: the geometry of a trained run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from largemargin.app.cli.run_options import (
    add_data,
    add_ood,
    add_options,
    add_run,
    output_file,
    show_progress,
)
from largemargin.exceptions import LargeMarginError

if TYPE_CHECKING:
    from largemargin.app.cli.open_run import ChosenImages, OpenRun
    from largemargin.measuring.input_curvature import CurvatureSettings

HELP = "measure the geometry of a trained model: margins, compactness, collapse"

DESCRIPTION = """\
Measure how a trained model places its classes: margins of samples in logits, cosines and distance
to the decision boundary, angles of class vectors, compactness, neural collapse, calibration. With
--out RUN/geometry.json the report of the run shows it."""

EXAMPLES = """\
Examples:
  largemargin measure runs/20260101-120000-run
  largemargin measure RUN --against OTHER_RUN          two models side by side, on the same images
  largemargin measure RUN --curvature true --bounds true --max_samples 500 --out RUN/geometry.json
  largemargin measure RUN --sphere true --out RUN/geometry.json       a model with 3 features
  largemargin measure RUN --curvature true --sigma 0.06               Theorem 6.1, too
  largemargin measure RUN --layers blocks                             layer by layer, too
  largemargin measure RUN --layers backbone.9,backbone.10           those of these names
  largemargin measure RUN --split train --out geometry.json"""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin measure RUN [options]"
    add_run(parser)
    add_options(parser, ("against", str, None, "a second run; the change is from it", "RUN"))
    parser.add_argument("-o", "--out", type=str, help="JSON file to write the result to")
    layers = (
        "layers to measure in the same pass, by class means: names of modules with commas between "
        "them, or blocks for those of the network"
    )
    margins = (
        "layers at which to measure linearised margins, input for the image: a backward pass for "
        "every class"
    )
    add_options(
        parser,
        ("pairwise", bool, True, "dispersions, separation and NC4, whose time grows with N^2"),
        (
            "input_margins",
            bool,
            False,
            "linearised margins in input space: a backward pass a batch",
        ),
        (
            "curvature",
            bool,
            False,
            "input-loss curvature and how it goes with robustness: 21 passes",
        ),
        ("bounds", bool, False, "generalization quantities, with what each assumes"),
        (
            "sphere",
            bool,
            False,
            "features and class vectors on a sphere, where there are 3 features",
        ),
        ("layers", str, "none", layers, "NAMES"),
        ("layer_margins", str, "none", margins, "NAMES"),
        ("num_directions", int, 20, "random directions of a sample's curvature"),
        ("step", float, 0.01, "of the differences that give it, in units of [0, 1] pixels"),
        ("noise", float, 0.06, "strength of the noise it is held against"),
        ("draws", int, 10, "noisy copies of each sample"),
        ("sigma", float | None, None, "noise of Theorem 6.1 about it; none leaves it out"),
        ("radius", float, 0.5, "delta_v: share of samples within it, Prop. 4.1, Theorem 6.1"),
        ("max_samples", int | None, None, "of input_margins, curvature and bounds; default all"),
        ("batch_size", int, 256, "images at a time"),
    )
    add_ood(parser)
    add_data(parser)


def run(options: Any) -> int:
    from largemargin.app.cli.open_run import chosen_images, open_run
    from largemargin.measuring.geometry_result import compare_geometry

    path = None if options.out is None else output_file(options.out)
    opened = open_run(options)
    chosen = chosen_images(options, opened)
    _refuse_as_result(path, options, chosen)
    if options.against is None:
        found: Any = _measured(options, opened, chosen)
    else:
        also = options.clone()
        also.run = options.against
        other = open_run(also)
        theirs = _same_images(options, chosen, opened, other)
        # The change is that of the run against the other one, as in a report against softmax.
        names = (other.run.folder.name, opened.run.folder.name)
        both = (_measured(options, other, theirs), _measured(options, opened, chosen))
        found = compare_geometry(*both, names)
    print(f"{opened.run.folder}, {chosen.what} images\n{found}")
    if path is not None:
        found.save(path)
        print(f"\nwritten to {path}")
    return 0


def _refuse_as_result(path: Path | None, options: Any, chosen: "ChosenImages") -> None:
    """The report shows geometry.json of a run as that of its best model on its test images."""
    if path is None or (chosen.origin.usual and options.against is None):
        return
    from largemargin.app.training.runs import GEOMETRY

    folders = [Path(each).resolve() for each in (options.run, options.against) if each]
    if path.name == GEOMETRY and path.parent.resolve() in folders:
        what = f"{chosen.origin}" if options.against is None else "a comparison of two runs"
        raise LargeMarginError(
            f"--out {path} is where the report looks for the geometry of the run's own "
            f"test images, but this is of {what}. Choose another file."
        )


def _same_images(
    options: Any, chosen: "ChosenImages", opened: "OpenRun", other: "OpenRun"
) -> "ChosenImages":
    """The same images for the second run, at the size of its model."""
    from largemargin.app.cli.open_run import chosen_images
    from largemargin.measuring.batches import digest

    if other.classes != opened.classes:
        raise LargeMarginError(
            f"{options.run} and {options.against} were trained on different classes, so their "
            "geometries do not compare."
        )
    theirs = chosen_images(options, other)
    if digest(theirs.samples) != digest(chosen.samples):
        raise LargeMarginError(
            f"the {chosen.what} images of {options.run} ({len(chosen.samples):,}) are not those of "
            f"{options.against} ({len(theirs.samples):,}), so their geometries do not compare. "
            "Give both the same images: --data FOLDER, FILE or NAME."
        )
    return theirs


def named_layers(option: str, given: str) -> tuple[str, ...]:
    """Names with commas between them, in brackets or not; none is none.

    Example:
        >>> named_layers("--layers", "[layer3, layer4]")
        ('layer3', 'layer4')
    """
    from largemargin.measuring.layers import BLOCKS

    words = given.strip().removeprefix("[").removesuffix("]").strip()
    if words in ("none", ""):
        return ()
    names = tuple(each.strip().strip("'\"") for each in words.split(","))
    if "" in names or (BLOCKS in names and len(names) > 1):
        raise LargeMarginError(
            f"{option} takes names of layers with commas between them, as backbone.3,backbone.4, "
            f"or {BLOCKS} alone, but {given!r} was given."
        )
    return names


def _curvature(options: Any) -> "CurvatureSettings | bool":
    from largemargin.measuring.input_curvature import CurvatureSettings

    if not options.curvature:
        if options.sigma is not None:
            raise LargeMarginError("--sigma is about curvature. Add --curvature true.")
        return False
    return CurvatureSettings(
        step=options.step,
        num_directions=options.num_directions,
        noise=dict.fromkeys(CurvatureSettings().noise, options.noise),
        draws=options.draws,
        sigma=options.sigma,
        radius=2 * options.radius,
    )


def _measured(options: Any, opened: "OpenRun", chosen: "ChosenImages") -> Any:
    from largemargin.app.cli.open_run import ood_samples
    from largemargin.app.data.load import samples_text
    from largemargin.app.data.samples import Batches
    from largemargin.measuring.layers import BLOCKS
    from largemargin.measuring.measure import measure

    def batches(split: Any) -> Batches:
        return Batches(split, options.batch_size, device=opened.device, shuffle=False)

    layers = named_layers("--layers", options.layers)
    return measure(
        opened.model,
        batches(chosen.samples),
        layers=BLOCKS if layers == (BLOCKS,) else layers,
        layer_margins=named_layers("--layer_margins", options.layer_margins),
        pairwise=options.pairwise,
        input_margins=options.input_margins,
        curvature=_curvature(options),
        bounds=options.bounds,
        sphere=options.sphere,
        radius=options.radius,
        max_samples=options.max_samples,
        ood=None if options.ood is None else batches(ood_samples(options.ood, opened)),
        progress=show_progress(),
        data_name=samples_text(chosen.data, chosen.origin.split, chosen.samples),
        class_names=opened.classes,
    )
