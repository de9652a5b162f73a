"""Curves as SVG inside a page: colours and letters are the page's, so light and dark both fit."""

import io
import re

import matplotlib as mpl
from matplotlib.figure import Figure

from site_pages.curves import Curve

# Drawn in colours that nothing else has, which then become names that the style sheet sets.
INK, FAINT = "#010203", "#040506"
LINES = ("#070809", "#0a0b0c")
NAMES = {
    INK: "currentColor",
    FAINT: "var(--curve-faint)",
    LINES[0]: "var(--curve-first)",
    LINES[1]: "var(--curve-second)",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "largemargin",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
}


def figure(curve: Curve) -> str:
    """Two drawings beside each other, value and slope, and a caption: HTML for a page."""
    value = _drawing(curve, 0, "loss")
    slope = _drawing(curve, 1, "slope of the loss")
    marks = "".join(
        f'<span class="mark mark-{number}">{name}</span>'
        for number, name in enumerate(curve.lines, 1)
    )
    return (
        f'<figure class="curves"><div>{value}{slope}</div>'
        f"<figcaption>{marks}{curve.told}</figcaption></figure>"
    )


def _drawing(curve: Curve, part: int, name: str) -> str:
    with mpl.rc_context(STYLE):
        canvas = Figure(figsize=(3.9, 2.5))
        # Fixed places: a computed layout takes ten times as long to draw.
        axes = canvas.add_axes((0.12, 0.25, 0.85, 0.64))
        axes.grid(True)
        axes.axhline(0, color=FAINT, linewidth=1)
        lines = list(curve.lines.values())
        # The loss that the page is about last: on top.
        for number in reversed(range(len(lines))):
            axes.plot(
                curve.x,
                lines[number][part],
                color=LINES[number],
                linewidth=2.2 if number == 0 else 1.6,
                linestyle="-" if number == 0 else (0, (4, 2)),
            )
        axes.set_xlabel(_wrapped(curve.axis))
        axes.set_title(name, fontsize=9, color=INK, loc="left")
        axes.margins(x=0)
        axes.locator_params(nbins=5)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _plain(file.getvalue(), f"{name} against {curve.axis}")


def _wrapped(text: str) -> str:
    """On two lines where it would not fit on one."""
    if len(text) < 48:
        return text
    cut = text.find(": ") + 1 or text.find(", ") + 1 or text.rfind(" ", 0, 48)
    return f"{text[:cut].rstrip()}\n{text[cut:].strip()}"


def _plain(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick)_\d+"', "", svg
    )
    svg = re.sub(r"font(?:-family)?: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    for colour, name in NAMES.items():
        svg = svg.replace(colour, name)
    # matplotlib leaves black out, because it is the default.
    svg = re.sub(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', _opening(label), svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).replace("\n\n", "\n").strip()


def _opening(label: str) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        rf'viewBox="\1" role="img" aria-label="{label}">'
    )
