r"""Equations of docstrings, written in LaTeX, as text for a terminal.

\ell = -\log\frac{e^{s\cos\theta_y}}{\sum_j e^{s\cos\theta_j}}
ℓ = -log e^(s cos θ_y) / Σ_j e^(s cos θ_j)
"""

import re

SYMBOLS = {
    "ell": "ℓ",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "Delta": "Δ",
    "theta": "θ",
    "lambda": "λ",
    "mu": "μ",
    "pi": "π",
    "phi": "φ",
    "psi": "ψ",
    "rho": "ρ",
    "sigma": "σ",
    "Sigma": "Σ",
    "tau": "τ",
    "eps": "ε",
    "epsilon": "ε",
    "varepsilon": "ε",
    "partial": "∂",
    "nabla": "∇",
    "infty": "∞",
    "sum": "Σ",
    "cdot": "·",
    "times": "×",
    "ne": "≠",
    "le": "≤",
    "ge": "≥",
    "in": "∈",
    "to": "→",
    "iff": "⇔",
    "propto": "∝",
    "odot": "⊙",
    "ldots": "...",
    "dots": "...",
    "langle": "⟨",
    "rangle": "⟩",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "lVert": "‖",
    "rVert": "‖",
    "prime": "'",
}
SPACES = (r"\quad", r"\qquad", r"\,", r"\;", r"\:", r"\ ", "~")
NOTHING = (
    *(r"\textstyle", r"\displaystyle", r"\left", r"\right", r"\Bigl", r"\Bigr", r"\bigl"),
    *(r"\bigr", r"\Big", r"\big", r"\!", r"\limits"),
)


def as_text(latex: str) -> str:
    """An equation in LaTeX as one line of text.

    Example:
        >>> as_text(r"\\frac{a + b}{2}, x_{j\\ne y}")
        '(a + b) / 2, x_(j≠y)'
    """
    text = re.sub(r"\\begin\{cases\}(.*?)\\end\{cases\}", _cases, " ".join(latex.split()))
    for words, instead in ((NOTHING, ""), (SPACES, " ")):
        for word in words:
            ends = r"(?![a-zA-Z])" if word[-1].isalpha() else ""
            text = re.sub(re.escape(word) + ends, instead, text)
    text = text.replace(r"\|", "‖").replace(r"\{", "⦃").replace(r"\}", "⦄")
    text = re.sub(r"\\(?:mathrm|mathbf|mathbb|text|operatorname)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\mathcal\s*(\w)", r"\1", text)
    text = re.sub(r"\\tilde\s*\{?(\w)\}?", " \\1\u0303", text)
    text = _fractions(text)
    text = _roots(text)
    text = _scripts(text)
    text = re.sub(
        r"\s*\\([a-zA-Z]+)(?=(\s*))",
        lambda found: _symbol(found[1], found[0]),
        text,
    )
    text = text.replace("{", "").replace("}", "").replace("⦃", "{").replace("⦄", "}")
    text = re.sub(r"\s+([,;)\]_^\u0303])", r"\1", re.sub(r"([(\[⟨])\s+", r"\1", text))
    text = re.sub(r"\s*([≠∈])\s*", r"\1", text)
    return re.sub(r"  +", " ", text).strip()


def _symbol(name: str, whole: str) -> str:
    before = " " if whole.startswith(" ") else ""
    if name in SYMBOLS:
        return before + SYMBOLS[name]
    return f"{before or ' '}{name} "  # log, cos, max: words, apart from what follows


def _cases(found: re.Match[str]) -> str:
    rows = [row.split("&") for row in found[1].split(r"\\")]
    return "; ".join(" for ".join(part.strip() for part in row) for row in rows)


def _group(text: str, start: int) -> tuple[str, int]:
    """What stands at ``start``: ``{...}``, a command or one character; and where it ends."""
    while start < len(text) and text[start] == " ":
        start += 1
    if text[start : start + 1] == "{":
        depth = 0
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + 1 : end], end + 1
    command = re.match(r"\\[a-zA-Z]+", text[start:])
    end = start + (command.end() if command else 1)
    return text[start:end], end


def _bracketed(text: str) -> str:
    """In brackets, unless it is one thing."""
    inner = text.strip()
    one = re.fullmatch(r"\\?[\w‖|]+'?", inner) or re.fullmatch(r"\\?\w+_(\w|\{\w+\})", inner)
    return inner if one else f"({inner})"


def _fractions(text: str) -> str:
    while found := re.search(r"\\t?frac(?![a-zA-Z])", text):
        top, middle = _group(text, found.end())
        bottom, end = _group(text, middle)
        made = f"{_bracketed(top)} / {_bracketed(bottom)} "
        text = f"{text[: found.start()]} {made}{text[end:]}"
    return text


def _roots(text: str) -> str:
    while found := re.search(r"\\sqrt(?![a-zA-Z])", text):
        inside, end = _group(text, found.end())
        text = f"{text[: found.start()]}√({inside}){text[end:]}"
    return text


def _scripts(text: str) -> str:
    """Subscripts and powers of more than one thing in brackets, those of one thing without."""
    at = 0
    while found := re.compile(r"[_^]\{").search(text, at):
        inside, end = _group(text, found.start() + 1)
        made = inside if re.fullmatch(r"\\?\w+", inside) and "_" not in inside else f"({inside})"
        text = f"{text[: found.start() + 1]}{made}{text[end:]}"
        at = found.start() + 2
    return text
