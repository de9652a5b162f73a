"""The drawings themselves: sketches of several cells on one matplotlib figure. Needs matplotlib."""

import statistics
from collections.abc import Callable, Mapping
from textwrap import fill
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Cells = Mapping[str, Any]
"""What is drawn, by the name of the cell."""

SIDE = 2.0
"""Inches of an embedding."""

APART = 30
"""Medians of boxes that differ by more than this factor are drawn on a logarithmic axis."""


def embeddings(figure: Figure, cells: Cells) -> None:
    """A row of embeddings for every cell, or a column where that is wider than high."""
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell["panels"]))
    pairs = [(cell, name) for cell in cells for name in names]
    turned = len(cells) > len(names)
    rows, columns = (names, list(cells)) if turned else (list(cells), names)
    figure.set_size_inches(SIDE * len(columns) + 0.4, (SIDE + 0.2) * len(rows) + 0.2)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for cell, name in pairs:
        row, column = (name, cell) if turned else (cell, name)
        place: Axes = axes[rows.index(row), columns.index(column)]
        place.set(xticks=[], yticks=[])
        place.spines[:].set_visible(False)
        if column == columns[0]:
            place.set_ylabel(_plain(row))
        panel = cells[cell]["panels"].get(name)
        if panel is None:
            continue
        ratio = "-" if panel["ratio"] is None else f"{panel['ratio']:.3g}"
        heading = f"{column}\n" if row == rows[0] else ""
        place.set_title(_plain(f"{heading}{ratio}"))
        place.scatter(
            panel["x"],
            panel["y"],
            s=5,
            c=[f"C{number % 10}" for number in panel["labels"]],
            linewidths=0,
            alpha=0.8,
            rasterized=True,
        )


def densities(figure: Figure, cells: Cells) -> None:
    """A panel for every group of cells that differ in their last word alone.

    Rows of a table that share their runs have the same curves: one panel, named after the first.
    """
    groups: dict[str, list[str]] = {}
    for name in cells:
        groups.setdefault(name.rpartition(", ")[0], []).append(name)
    drawn: list[list[Any]] = []
    for group, names in list(groups.items()):
        curves = [cells[name] for name in names]
        if curves in drawn:
            del groups[group]
        drawn.append(curves)
    figure.set_size_inches(4.4 * len(groups), 3.2)
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for place, (group, names) in zip(axes, groups.items(), strict=True):
        for number, name in enumerate(names):
            each = cells[name]
            ratio = "-" if each["ratio"] is None else f"{each['ratio']:.2f}"
            told = f"{name.rpartition(', ')[2]}: mean / std {ratio}"
            place.plot(each["at"], each["density"], color=f"C{number}", label=_plain(told))
        place.axvline(0, color="0.6", linewidth=0.8)
        split = cells[names[0]]["split"]
        place.set_title(_plain(group))
        place.set_xlabel(f"margin of {split} images, distance in units of [0, 1] pixels")
        place.set_ylabel("density")
        place.set_ylim(bottom=0)
        place.legend()


def curvatures(figure: Figure, cells: Cells) -> None:
    """A box for every method; below it, noise by noise, accuracy and groups."""
    noises = list(next(iter(cells.values()))["noise"])
    columns = max(1, len(noises))
    figure.set_size_inches(4.4 * columns, 3.0 * (3 if noises else 1))
    grid = figure.add_gridspec(3 if noises else 1, columns)
    _boxes(figure.add_subplot(grid[0, :]), cells)
    for column, noise in enumerate(noises):
        _by_share(figure.add_subplot(grid[1, column]), cells, noise)
        _by_count(figure.add_subplot(grid[2, column]), cells, noise)
    if noises:
        lines, names = figure.axes[1].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=3)


def _boxes(axes: Axes, cells: Cells) -> None:
    stats = [{**each["box"], "label": fill(_plain(name), 20)} for name, each in cells.items()]
    drawn = axes.bxp(stats, showfliers=False, patch_artist=True, widths=0.5)
    for number, box in enumerate(drawn["boxes"]):
        box.set(facecolor=f"C{number}", alpha=0.6)
    for line in drawn["medians"]:
        line.set_color("black")
    medians = [each["med"] for each in stats]
    if min(each["whislo"] for each in stats) > 0 and max(medians) > APART * min(medians):
        axes.set_yscale("log")
    axes.set_ylabel("curvature")
    share = next(iter(cells.values()))["share"]
    axes.set_title(f"{100 * share:g} % of the test images, those of lowest curvature")


def _by_share(axes: Axes, cells: Cells, noise: str) -> None:
    for number, (name, each) in enumerate(cells.items()):
        found = each["noise"][noise]
        known = [
            pair
            for pair in zip(found["shares"], found["accuracy"], strict=True)
            if pair[1] is not None
        ]
        percent, accuracy = [100 * share for share, _ in known], [value for _, value in known]
        axes.plot(percent, accuracy, ".-", color=f"C{number}", label=_plain(name))
    amount = next(iter(cells.values()))["noise"][noise]["amount"]
    axes.set_title(f"{noise} noise, {amount:g}")
    axes.set_xlabel("images of lowest curvature, percent")
    axes.set_ylabel("accuracy under noise, percent")


def _by_count(axes: Axes, cells: Cells, noise: str) -> None:
    """Numbers of right copies that no image has are left out."""
    for number, each in enumerate(cells.values()):
        found = each["noise"][noise]
        correlation = found["correlation"]
        told = "-" if correlation is None else f"{correlation:+.2f}"
        known = [
            (count, value)
            for count, value in enumerate(found["group_curvature"])
            if value is not None
        ]
        counts, values = [count for count, _ in known], [value for _, value in known]
        axes.plot(counts, values, ".-", color=f"C{number}", label=told)
    draws = len(next(iter(cells.values()))["noise"][noise]["group_curvature"]) - 1
    axes.set_xlabel(f"noisy copies of {draws} that are right")
    axes.set_ylabel("mean curvature")
    axes.legend(title="correlation", ncols=2)


def biases(figure: Figure, cells: Cells) -> None:
    """Mean over seeds of the bias, epoch by epoch."""
    figure.set_size_inches(6.4, 3.8)
    axes = figure.subplots()
    for number, (name, curves) in enumerate(cells.items()):
        columns = [
            [value for value in values if value is not None]
            for values in zip(*(each["softmax_bias"] for each in curves), strict=False)
        ]
        shown = [(epoch, values) for epoch, values in enumerate(columns, 1) if values]
        epochs = [epoch for epoch, _ in shown]
        means = [statistics.fmean(values) for _, values in shown]
        axes.plot(epochs, means, color=f"C{number}", label=_plain(name.removesuffix(", -")))
        lowest, highest = ([pick(values) for _, values in shown] for pick in (min, max))
        axes.fill_between(epochs, lowest, highest, color=f"C{number}", alpha=0.2, linewidth=0)
    first = next(iter(cells.values()))[0]
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"bias, mean over {first['samples']} {first['of']} images")
    axes.legend(ncols=2)


DRAW: Mapping[str, Callable[[Figure, Cells], None]] = MappingProxyType(
    {
        "stages": embeddings,
        "planes": embeddings,
        "margin_density": densities,
        "curvature": curvatures,
        "bias": biases,
    }
)


def _plain(text: str) -> str:
    """Dollar signs would start mathematics."""
    return text.replace("$", r"\$")
