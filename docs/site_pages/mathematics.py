"""Equations as MathML when the site is built: every browser draws it, without a script.

The letters are those of STIX Two Math, which the package ziamath brings: without a mathematical
font roots and brackets do not grow with what they hold, and few Linux desktops have one.
"""

import html
import re
from importlib.resources import files

from latex2mathml.converter import convert

FONT = "assets/STIXTwoMath-Regular.ttf"

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)

# What the converter does not know, in words that it does.
INSTEAD = (
    (r"\\arg(?![a-z])", r"\\mathrm{arg}\\,"),
    (r"\\operatorname\{([^}]*)\}", r"\\mathrm{\1}"),
    (r"\\[Bb]igl\\\|", r"\\left\\| "),
    (r"\\[Bb]igr\\\|", r"\\right\\| "),
    (r"\\([Bb]ig)[lr](?![a-z])", r"\\\1"),
    (r"\\texttt\{([^}]*)\}", lambda found: rf"\texttt{{{found[1].replace(chr(92) + '_', '_')}}}"),
)


def mathml(latex: str, display: str = "inline") -> str:
    """An equation as a ``<math>`` element."""
    for pattern, instead in INSTEAD:
        latex = re.sub(pattern, instead, latex)
    made = convert(latex.strip(), display=display)
    if re.search(r"\\[a-zA-Z]", made):
        raise ValueError(f"the equation {latex!r} has a command that cannot be drawn: {made}")
    return _spaced(made)


def font() -> bytes:
    return (files("ziamath.fonts") / "STIXTwoMath-Regular.ttf").read_bytes()


WORD = r"<mi>(?:arccos|cos|cot|log|ln|sin)</mi>"
SIGNED = r"<mo[^>]*>(?:&#x0003D;|&#x00028;|&#x0005B;|&#x0002C;|&#x02264;|&#x02265;)</mo>"
"""What a minus sign comes after, where it is not a difference."""
SPACE = '<mspace width="0.167em"/>'


def _spaced(made: str) -> str:
    """A thin space around names of functions and none after a sign, as TeX sets them."""
    made = re.sub(rf"({SIGNED})<mo>&#x02212;</mo>", r'\1<mo form="prefix">&#x02212;</mo>', made)
    made = re.sub(rf"(</(?:mi|mn|msub|msup|msubsup|mrow)>)(?={WORD})", rf"\1{SPACE}", made)
    return re.sub(rf"({WORD})(?=<(?:mi|mn|msub|msup|mfrac|msubsup)\b)", rf"\1{SPACE}", made)


def parts(latex: str) -> list[str]:
    """Equations that are written beside each other, apart.

    >>> parts(r"a = b,\\quad c = \\frac{d\\quad e}{f}")
    ['a = b,', 'c = \\\\frac{d\\\\quad e}{f}']
    """
    depth, start, found = 0, 0, []
    for place in re.finditer(r"\\begin|\\end|\\left|\\right(?!a)|\\[{}]|[{}]|\\q?quad", latex):
        step = {"{": 1, "}": -1, r"\begin": 1, r"\end": -1, r"\left": 1, r"\right": -1}
        depth += step.get(place[0], 0)
        if "quad" in place[0] and depth == 0:
            found.append(latex[start : place.start()].strip())
            start = place.end()
    return [part for part in [*found, latex[start:].strip()] if part]


def with_mathml(page: str) -> str:
    """HTML of a page with its equations drawn."""

    def block(found: re.Match[str]) -> str:
        # Parts wrap on narrow screens; what is still too wide scrolls, also with the keyboard.
        made = "".join(mathml(part, "block") for part in parts(html.unescape(found[1])))
        return f'<div class="equation" tabindex="0">{made}</div>'

    page = BLOCK.sub(block, page)
    return INLINE.sub(lambda found: mathml(html.unescape(found[1])), page)
