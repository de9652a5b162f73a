"""Draws docs/figures/margin-light.svg and margin-dark.svg: what a margin is, on the digits.

The same small network is trained twice on five digits of scikit-learn, with two numbers as features
so that they can be drawn: once with cross entropy, once with CosFace. Run ``python
docs/make_margin_figure.py``; the numbers of the caption go to docs/figures/margin.json.
"""

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc
from sklearn.datasets import load_digits
from torch import Tensor, nn

import largemargin as lm
from largemargin import geometry

FOLDER = Path(__file__).parent / "figures"
DIGITS = 5
STEPS = 400
# After Okabe and Ito: told apart by colour-blind readers; brighter ones on dark pages.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
DARK = ("#56b4e9", "#ff7f3f", "#2fc79c", "#e39bc5", "#f0c93a")
LOSSES = {
    "Cross entropy": lambda: lm.CrossEntropy(),
    "CosFace": lambda: lm.CosFace(margin=0.3, scale="auto"),
}


class Trained(NamedTuple):
    """What is drawn of a trained network, of test images."""

    features: Tensor
    labels: Tensor
    prototypes: Tensor
    margins: Tensor
    class_margin: float
    accuracy: float


def train(loss: lm.Loss, seed: int = 0) -> Trained:
    digits = load_digits(n_class=DIGITS)
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, fit = order[:300], order[300:]
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
        *(nn.Linear(64, 2), nn.Linear(2, DIGITS, bias=False)),
    )
    criterion = lm.attach(model, loss, warn=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    for _ in range(STEPS):
        rows = fit[torch.randint(len(fit), (128,))]
        optimizer.zero_grad()
        criterion(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(x[test])
        features = model[:-1](x[test])
    prototypes = criterion.head.weight.detach()
    margins = geometry.sample_margins(features, prototypes, y[test], similarity="cosine")
    accuracy = (outputs.argmax(1) == y[test]).double().mean().item()
    angle = float(geometry.class_margin(prototypes, degrees=True))
    return Trained(features, y[test], prototypes, margins, angle, accuracy)


def draw(trained: dict[str, Trained], dark: bool) -> Figure:
    ink, faint = ("#e6e6ea", "#ffffff40") if dark else ("#26262b", "#00000033")
    colours = DARK if dark else LIGHT
    style = {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    with mpl.rc_context({**style, "axes.edgecolor": faint, "font.size": 10}):
        figure = Figure(figsize=(9.0, 6.2), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(2.6, 1))
        shared: Axes | None = None
        for column, (name, each) in enumerate(trained.items()):
            plane(figure.add_subplot(grid[0, column]), name, each, ink, faint, colours)
            axes = figure.add_subplot(grid[1, column], sharex=shared, sharey=shared)
            shared = shared or axes
            histogram(axes, each, ink, colours, first=column == 0)
    return figure


def plane(
    axes: Axes, name: str, trained: Trained, ink: str, faint: str, colours: tuple[str, ...]
) -> None:
    """Features as points, class vectors as arrows, the class margin as an angle."""
    size = torch.quantile(trained.features.norm(dim=1), 0.98)
    points = trained.features / size
    units = lm.functional.normalize(trained.prototypes)
    axes.add_patch(mpl.patches.Circle((0, 0), 1, fill=False, color=faint, linewidth=0.8))
    for digit in range(DIGITS):
        mine = points[trained.labels == digit]
        axes.scatter(mine[:, 0], mine[:, 1], s=9, color=colours[digit], alpha=0.6, linewidths=0)
        end = units[digit] * 1.16
        axes.annotate(
            "", end.tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": ink, "lw": 1.4}
        )
        axes.text(*(units[digit] * 1.27).tolist(), str(digit), ha="center", va="center")
    mark_angle(axes, units, trained.class_margin, ink)
    axes.set_title(f"{name}\n{100 * trained.accuracy:.1f} % of the test images right", color=ink)
    axes.set_aspect("equal")
    axes.set_xlim(-1.4, 1.4)
    axes.set_ylim(-1.4, 1.4)
    axes.axis("off")


def mark_angle(axes: Axes, units: Tensor, angle: float, ink: str) -> None:
    """An arc between the two class vectors that are nearest to each other."""
    directions = np.degrees(np.arctan2(units[:, 1].numpy(), units[:, 0].numpy()))
    order = np.argsort(directions)
    gaps = np.diff(np.append(directions[order], directions[order[0]] + 360))
    start = directions[order[int(np.argmin(gaps))]]
    axes.add_patch(Arc((0, 0), 0.8, 0.8, theta1=start, theta2=start + angle, color=ink, lw=1.6))
    middle = math.radians(start + angle / 2)
    axes.text(
        0.56 * math.cos(middle),
        0.56 * math.sin(middle),
        f"{angle:.0f}°",
        ha="center",
        va="center",
        fontsize=11,
        fontweight="bold",
    )


def histogram(
    axes: Axes, trained: Trained, ink: str, colours: tuple[str, ...], first: bool
) -> None:
    edges = np.linspace(-0.6, 1.2, 46)
    axes.hist(trained.margins.numpy(), edges, color=colours[0])
    axes.axvline(0, color=ink, linewidth=1)
    median = float(trained.margins.median())
    axes.axvline(median, color=colours[1], linewidth=1.6, linestyle="--")
    place = {"transform": axes.transAxes, "va": "top", "ha": "right", "color": colours[1]}
    axes.text(0.99, 0.97, f"median {median:.2f}", **place)
    axes.set_xlabel("sample margin, cosine (negative: another arrow is nearer)")
    if first:
        axes.set_ylabel("test images")
    axes.spines[["top", "right"]].set_visible(False)


def numbers(trained: dict[str, Trained]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "accuracy": round(100 * each.accuracy, 2),
            "class_margin": round(each.class_margin, 1),
            "median": round(float(each.margins.median()), 2),
            "lowest_tenth": round(float(torch.quantile(each.margins, 0.1)), 2),
        }
        for name, each in trained.items()
    }


def main() -> None:
    trained = {name: train(loss()) for name, loss in LOSSES.items()}
    FOLDER.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "largemargin"}):
        for name in ("light", "dark"):
            figure = draw(trained, dark=name == "dark")
            file = FOLDER / f"margin-{name}.svg"
            figure.savefig(file, transparent=True, metadata={"Date": None})
    text = json.dumps(numbers(trained), indent=1)
    (FOLDER / "margin.json").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote the figure; {text}\n")


if __name__ == "__main__":
    main()
