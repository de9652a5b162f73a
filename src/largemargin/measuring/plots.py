"""Plots of measurements: margins, samples in the plane, the loss around an input. By matplotlib.

Everything is drawn on given axes or on a new figure of pyplot's. Nothing is shown, and no setting
of matplotlib is changed.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from largemargin.errors import LargeMarginError, optional_module
from largemargin.measuring.distributions import ClassDistribution, Distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and vermilion of Okabe and Ito (2008), and six more that stay apart for colour-blind readers
# too; all have a contrast of 3 : 1 on white. Where there are more classes than colours, symbols
# tell them apart: class c has colour c mod 8 and symbol c div 8, in every figure.
COLORS = (
    *("#0072b2", "#d55e00", "#1ea596", "#690069"),
    *("#3c3c00", "#a578ff", "#0000c3", "#964b4b"),
)
MARKERS = ("o", "s", "D", "^", "P", "X", "*", "v")
NEUTRAL = "#5b6470"

ROWS = 40
"""Classes that have a row of their own; of more, those of smallest margins."""

NAMED = 20
"""Classes up to which a legend names them."""

REGION = 0.02
"""Share of a loss surface from which on the class predicted there is named."""


def axes_or_new(ax: "Axes | None", width: float, height: float) -> "Axes":
    """The given axes, or those of a new figure of this size, in inches."""
    if ax is None:
        pyplot = optional_module("matplotlib.pyplot", "plots need matplotlib", extra="plot")
        made: Axes = pyplot.subplots(figsize=(width, height), layout="constrained")[1]
        return made
    if not hasattr(ax, "get_xlim"):
        raise LargeMarginError(
            f"ax must be a matplotlib Axes, but {type(ax).__name__} was given. Of several, as "
            "pyplot.subplots(2) makes them, give one."
        )
    return ax


def row_of_axes(
    ax: "Axes | Sequence[Axes] | None", count: int, width: float, height: float
) -> "tuple[Axes, ...]":
    """The given axes, one for each of so many; or those of a new figure, side by side."""
    if ax is None and count > 1:
        pyplot = optional_module("matplotlib.pyplot", "plots need matplotlib", extra="plot")
        size = (width * count, height)
        return tuple(pyplot.subplots(1, count, figsize=size, layout="constrained")[1])
    given = tuple(ax) if isinstance(ax, Iterable) else (ax,) * min(count, 1)
    if len(given) != count:
        raise LargeMarginError(
            f"ax must be one matplotlib Axes for each of {count}, but {len(given)} were given."
        )
    return tuple(axes_or_new(each, width, height) for each in given)


def plot_margins(ax: "Axes | None", margins: Distribution, words: str, label: str | None) -> "Axes":
    """The histogram of the margins of all samples; what is below 0 is darker."""
    if not margins.counts:
        raise _not_measured(words)
    ax = axes_or_new(ax, 6.4, 3.8)
    color = COLORS[sum(each.get_gid() == words for each in ax.patches) % len(COLORS)]
    edges = margins.edges
    heights = [
        n / margins.count / (right - left)
        for n, left, right in zip(margins.counts, edges, edges[1:], strict=False)
    ]
    ax.stairs(heights, edges, fill=True, color=color, alpha=0.25)
    ax.stairs(heights, [min(each, 0.0) for each in edges], fill=True, color=color, alpha=0.5)
    said = f"{margins.count:,} samples"
    if not math.isnan(margins.negative):
        said = f"{_digits(100 * margins.negative)} % of {margins.count:,} below 0"
    said = said if label is None else f"{plain_text(label)}: {said}"
    ax.stairs(heights, edges, color=color, linewidth=1.4, label=said, gid=words)
    ax.plot(
        margins.minimum, 0, color=color, marker="^", linestyle="none", clip_on=False, zorder=4,
        label=f"minimum {_digits(margins.minimum)}",
    )  # fmt: skip
    middle = f"median {_digits(margins.median)}"
    ax.axvline(margins.median, color=color, linestyle="--", linewidth=1.2, label=middle)
    ax.axvline(0, color=NEUTRAL, linewidth=1)
    ax.set(title="Sample margins", xlabel=words, ylabel="density of samples")
    ax.margins(y=0.2)  # room for the legend
    ax.legend(fontsize="small")
    return ax


def plot_class_margins(
    ax: "Axes | None",
    margins: ClassDistribution,
    words: str,
    label: str | None,
    names: Sequence[str] | None,
) -> "Axes":
    """A row for each class, from its smallest margin to its median; the hardest on top."""
    present = [c for c, median in enumerate(margins.median) if math.isfinite(median)]
    if not present:
        raise _not_measured(words)
    hardest = sorted(present, key=margins.q05.__getitem__)[:ROWS]
    low, fifth, middle = (
        [column[c] for c in hardest] for column in (margins.minimum, margins.q05, margins.median)
    )
    ax = axes_or_new(ax, 6.4, max(2.4, 0.2 * len(hardest) + 1.3))
    rows = range(len(hardest))
    ax.hlines(rows, low, middle, color=COLORS[0], linewidth=1)
    ax.hlines(rows, fifth, middle, color=COLORS[0], linewidth=4, alpha=0.35)
    marks = (middle, "o", 6, "median"), (fifth, "|", 9, "5 % quantile"), (low, ".", 6, "minimum")
    for column, marker, size, said in marks:
        ax.plot(column, rows, marker, color=COLORS[0], markersize=size, label=said)
    ax.axvline(0, color=NEUTRAL, linewidth=1)
    shown = [class_name(c, names) for c in hardest]
    ax.set_yticks(rows, shown, fontsize="medium" if len(rows) <= NAMED else "small")
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.locator_params(axis="x", nbins=7)
    count = f"{len(rows)} hardest of {len(present):,}" if len(rows) < len(present) else len(rows)
    title = f"Sample margins of the {count} classes"
    ax.set(title=title if label is None else f"{title}: {plain_text(label)}")
    ax.set(xlabel=words, ylabel="class")
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def plot_samples(
    ax: "Axes | None",
    points: Sequence[tuple[float, float]],
    labels: Sequence[int],
    predicted: Sequence[int],
    names: Sequence[str] | None,
) -> "Axes":
    """Samples in the plane in the colours of their classes; those predicted wrong are ringed."""
    ax = axes_or_new(ax, 6.4, 4.8)
    present = sorted(set(labels))
    named = {c: class_name(c, names) for c in present} if len(present) <= NAMED else {}
    xs, ys = zip(*points, strict=True)
    scatter_classes(ax, (xs, ys), labels, named, size=20)
    guesses = zip(points, labels, predicted or labels, strict=True)
    wrong = [point for point, label, guess in guesses if label != guess]
    if wrong:
        ink = ax.title.get_color()  # of the style in use
        said = f"{len(wrong):,} predicted wrong"
        across, up = zip(*wrong, strict=True)
        ax.scatter(across, up, s=55, facecolors="none", edgecolors=ink, linewidths=0.9, label=said)
    ax.set_aspect("equal", "datalim")
    if ax.get_legend_handles_labels()[1]:
        columns = 2 if len(present) > 12 and named else 1
        ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)
    return ax


def scatter_classes(
    ax: Any,
    columns: Sequence[Sequence[Any]],
    labels: Sequence[int],
    named: dict[int, str],
    *,
    size: float,
) -> None:
    """Points in two or three dimensions in the colour and symbol of their class.

    Classes that have a name are in the legend.
    """
    for c in sorted(set(labels)):
        own = [at for at, label in enumerate(labels) if label == c]
        ax.scatter(
            *([column[at] for at in own] for column in columns),
            s=size,
            linewidths=0,
            color=COLORS[c % len(COLORS)],
            marker=MARKERS[c // len(COLORS) % len(MARKERS)],
            label=named.get(c),
        )


def plot_surface(
    ax: "Axes | None",
    along: Sequence[float],
    across: Sequence[float],
    losses: Sequence[Sequence[float]],
    predicted: Sequence[Sequence[int]],
    names: Sequence[str] | None,
) -> "Axes":
    """Loss as colour, gradient to the right; lines where the predicted class changes."""
    effects = optional_module("matplotlib.patheffects", "plots need matplotlib", extra="plot")
    ax = axes_or_new(ax, 5.6, 4.6)
    halo = [effects.withStroke(linewidth=2.5, foreground="black")]
    image = ax.pcolormesh(along, across, list(zip(*losses, strict=True)), shading="nearest")
    ax.figure.colorbar(image, ax=ax, label="cross entropy")
    classes = list(zip(*predicted, strict=True))  # rows are places across, as pcolormesh has it
    counts = Counter(c for row in classes for c in row)
    for c in counts if len(counts) > 1 else ():
        inside = [[float(each == c) for each in row] for row in classes]
        lines = ax.contour(along, across, inside, levels=[0.5], colors="white", linewidths=1.2)
        lines.set(path_effects=halo)
    for c, count in counts.items():
        if count >= REGION * len(along) * len(across):
            text = ax.annotate(
                class_name(c, names), _middle_of(c, along, across, classes), (0, 9),
                textcoords="offset points", ha="center", va="center", color="white", weight="bold",
            )  # fmt: skip
            text.set(path_effects=halo)
    ax.plot(0, 0, marker="o", color="white", markersize=4, path_effects=halo)
    return ax


def _middle_of(
    c: int, along: Sequence[float], across: Sequence[float], classes: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """The point of a grid predicted as class c that is closest to the mean of all of these."""
    own = [(x, y) for y, row in zip(across, classes, strict=True)
           for x, each in zip(along, row, strict=True) if each == c]  # fmt: skip
    middle = [statistics.fmean(each) for each in zip(*own, strict=True)]
    return min(own, key=lambda at: abs(at[0] - middle[0]) + abs(at[1] - middle[1]))


def class_name(c: int, names: Sequence[str] | None) -> str:
    """What a figure calls a class: its name, or else its number."""
    if names is None:
        return str(c)
    if isinstance(names, str) or c >= len(names):
        raise LargeMarginError(
            f"class_names must name every class, in the order of the labels, but class {c} has no "
            f"name in {names if isinstance(names, str) else list(names[:5])!r}."
        )
    return plain_text(shortened(str(names[c])))


def _digits(value: float) -> str:
    """Three digits, with the minus sign of the axes."""
    return f"{value:.3g}".replace("-", "−")


def shortened(name: str, longest: int = 18) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def plain_text(text: str) -> str:
    """Dollar signs would start mathematics."""
    return str(text).replace("$", r"\$")


def _not_measured(words: str) -> LargeMarginError:
    return LargeMarginError(
        f"there is nothing to plot: no finite {words} was measured. The notes of the result say "
        "why; plot another margin."
    )
