"""Colours that stay apart for colour-blind readers, on white and on dark paper.

Made of the colours of Okabe and Ito (2008), each darkened until it has a contrast of 3 : 1 on
white, or lightened for dark paper. Where there are more classes than colours, symbols tell them
apart: class c has colour c mod 8 and symbol c div 8, in every figure of every run.
"""

LIGHT = (
    "#0072b2",
    "#d55e00",
    "#00805e",
    "#b0478a",
    "#8a6d00",
    "#3b2f8f",
    "#2b86b5",
    "#7a4b2a",
)
DARK = (
    "#4fb0eb",
    "#f5793a",
    "#2fc79a",
    "#e58fc2",
    "#e6c229",
    "#a59bf5",
    "#9adcf7",
    "#d2a679",
)
NEUTRAL_LIGHT, NEUTRAL_DARK = "#5b6470", "#aab3bf"

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
MARKERS = ("o", "s", "D", "^", "P", "X", "*", "v")
"""The same for matplotlib."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

SCALE = "Viridis"
"""Of heat maps: even in lightness, so it also works in grey."""


def light(place: int | None) -> str:
    return NEUTRAL_LIGHT if place is None else LIGHT[place % len(LIGHT)]
