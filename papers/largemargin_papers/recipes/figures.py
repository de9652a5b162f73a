"""Figures of what was measured, drawn by matplotlib from the files in ``measured/``."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from largemargin.app.training.files import write_text
from largemargin.errors import MissingPackage
from largemargin_papers.recipes.figure_data import FAILED
from largemargin_papers.recipes.figure_store import read_sketches
from largemargin_papers.recipes.measured import read_measured

BIAS = "bias"
"""The figure that needs no sketch: runs that measured their geometry after every epoch."""

CAPTIONS = {
    "stages": "t-SNE of test images after every group of blocks and before the head. Colours are "
    "classes; the number is the variance between classes over that within, in the plane.",
    "planes": "t-SNE of the features before the head. Colours are classes; the number is the "
    "variance between classes over that within, in the plane.",
    "margin_density": "Kernel density of the linearised margins in input space.",
    "curvature": "Curvature of the loss in input space: of the images of lowest curvature (box: "
    "quartiles; whiskers: 1.5 times their distance at most), accuracy under noise on the images of "
    "lowest curvature, and mean curvature by the number of noisy copies that are right.",
    BIAS: "The bias that softmax adds to the margin, mean over images after every epoch; bands "
    "are the range over seeds.",
}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "largemargin",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
DOTS = 100
"""Per inch, of the points of an embedding: they are a picture inside the drawing."""


class Picture(NamedTuple):
    """A figure that can be drawn.

    Args:
        path: of the file.
        protocol: of the runs it shows.
        kind: a key of :data:`CAPTIONS`.
        cells: what is drawn, by the name of the cell.
    """

    path: Path
    protocol: str
    kind: str
    cells: Mapping[str, Any]


def pictures_of(recipe_path: Path) -> list[Picture]:
    """What can be drawn of a recipe: its sketches, and curves over the epochs."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in read_sketches(recipe_path):
        sketch = entry["sketch"]
        if FAILED not in sketch:
            place = found.setdefault((entry["protocol"], sketch["kind"]), {})
            place.setdefault(entry["cell"], sketch)
    for protocol, cells in read_measured(recipe_path).items():
        for name, runs in cells.items():
            curves = [run["curves"] for run in runs if "curves" in run]
            if curves:
                found.setdefault((protocol, BIAS), {})[name] = curves
    protocols = list(dict.fromkeys(protocol for protocol, _ in found))
    pictures = []
    for (protocol, kind), shown in found.items():
        number = protocols.index(protocol)
        name = f"{recipe_path.stem}-{kind}{f'-{number + 1}' if number else ''}.svg"
        pictures.append(Picture(recipe_path.parent / "measured" / name, protocol, kind, shown))
    return pictures


def write_figures(recipe_path: Path) -> list[Path]:
    """All figures of a recipe, as SVG files in ``measured/``; none where nothing was kept."""
    pictures = pictures_of(recipe_path)
    if not pictures:
        return []
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackage(
            f"the figures of {recipe_path.name} need matplotlib. Install it: "
            "pip install 'largemargin[report]'"
        ) from None
    from largemargin_papers.recipes.figure_panels import DRAW

    for picture in pictures:
        with mpl.rc_context(STYLE):
            figure = Figure(layout="constrained")
            DRAW[picture.kind](figure, picture.cells)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None}, dpi=DOTS)
        # matplotlib ends some lines with blanks.
        lines = [line.rstrip() for line in file.getvalue().splitlines()]
        write_text(picture.path, "\n".join(lines) + "\n")
    return [picture.path for picture in pictures]
