"""``largemargin list``: the losses, networks and data sets there are.

A loss is described by its docstring and signature; equations in LaTeX become text for a terminal:

\\ell = -\\log\\frac{e^{s\\cos\\theta_y}}{\\sum_j e^{s\\cos\\theta_j}}
ℓ = -log e^(s cos θ_y) / Σ_j e^(s cos θ_j)
"""

import inspect
import json
import re
import sys
import textwrap
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import jsonargparse

from largemargin.exceptions import LargeMarginError

if TYPE_CHECKING:
    from largemargin.losses.base.loss import Loss

_SYMBOLS = """
alpha α  beta β  gamma γ  delta δ  theta θ  lambda λ  mu μ  pi π  phi φ  psi ψ  rho ρ  sigma σ
tau τ  eps ε  epsilon ε  varepsilon ε  Delta Δ  Sigma Σ
ell ℓ  sum Σ  partial ∂  nabla ∇  infty ∞  prime '
cdot ·  times ×  odot ⊙  ne ≠  le ≤  ge ≥  in ∈  to →  iff ⇔  propto ∝  ldots ...  dots ...
langle ⟨  rangle ⟩  lfloor ⌊  rfloor ⌋  lVert ‖  rVert ‖
"""
SYMBOLS: dict[str, str] = dict(re.findall(r"(\S+) (\S+)", _SYMBOLS))
"""Commands of LaTeX that are one sign in a terminal."""
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
    while found := re.search(r"\\t?frac(?![a-zA-Z])", text):
        top, middle = _group(text, found.end())
        bottom, end = _group(text, middle)
        made = f"{_bracketed(top)} / {_bracketed(bottom)} "
        text = f"{text[: found.start()]} {made}{text[end:]}"
    while found := re.search(r"\\sqrt(?![a-zA-Z])", text):
        inside, end = _group(text, found.end())
        text = f"{text[: found.start()]}√({inside}){text[end:]}"
    text = re.sub(r"(\s*)\\([a-zA-Z]+)", _symbol, _scripts(text))
    text = text.replace("{", "").replace("}", "").replace("⦃", "{").replace("⦄", "}")
    text = re.sub(r"\s+([,;)\]_^\u0303])", r"\1", re.sub(r"([(\[⟨])\s+", r"\1", text))
    text = re.sub(r"\s*([≠∈])\s*", r"\1", text)
    return re.sub(r"  +", " ", text).strip()


def _symbol(found: re.Match[str]) -> str:
    before, name = found[1][:1], found[2]
    # log, cos, max: words, apart from what follows
    return before + SYMBOLS[name] if name in SYMBOLS else f" {name} "


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


def _scripts(text: str) -> str:
    """Subscripts and powers of more than one thing in brackets, those of one thing without."""
    at = 0
    while found := re.compile(r"[_^]\{").search(text, at):
        inside, end = _group(text, found.start() + 1)
        made = inside if re.fullmatch(r"\\?\w+", inside) and "_" not in inside else f"({inside})"
        text = f"{text[: found.start() + 1]}{made}{text[end:]}"
        at = found.start() + 2
    return text


PAPERS = {
    "LMD": "Large Margin Discriminative Loss for Classification (Nguyen et al.)",
    "ROB": "Training More Robust Classification Model via Discriminative Loss and Gaussian Noise "
    "Injection (Nguyen et al., TMLR)",
    "LTLM": "Learning Towards the Largest Margins (Zhou et al., ICLR 2022)",
    "LMS": "Large Margin In Softmax Cross-Entropy Loss (Kobayashi, BMVC 2019)",
    "ODN": "Optimal Margin Distribution Network",
    "BAS": "baselines, from their original publications",
}
"""The short names docstrings use."""

KEYS = {"NGY": "LMD", "NGR": "ROB", "ZHO": "LTLM", "KOB": "LMS", "ODN": "ODN", "BAS": "BAS"}
"""Whose equation a tag like NGY-4.3 is."""

FILLED_IN = ("num_classes", "dim", "bank")
"""Arguments that the data and the network decide."""


@dataclass(frozen=True)
class LossEntry:
    """One loss: where its parts come from is said at :func:`describe`."""

    name: str
    module: str
    what: str
    paper: str
    equations: tuple[str, ...]
    settings: dict[str, Any]
    helps: dict[str, str]
    kind: str


def describe(name: str) -> LossEntry:
    """A loss from its signature (settings and defaults) and docstring (everything else)."""
    from largemargin.losses import LOSSES
    from largemargin.losses.base.loss import Loss

    if name not in LOSSES:
        close = ", ".join(get_close_matches(name, LOSSES, n=3, cutoff=0.4))
        meant = f"Closest: {close}." if close else "largemargin list shows them all."
        raise LargeMarginError(f"there is no loss {name!r}. {meant}")
    kind = LOSSES[name]
    text = inspect.getdoc(kind) or ""
    first, settings = text.split("\n\n")[0], _settings(kind)
    # The displayed equations, or else the ones in the first paragraph.
    displayed = re.findall(r"\.\. math::(.*?)(?=\n\n|\Z)", text, re.DOTALL)
    tags = re.findall(r"\b(NGY|NGR|ZHO|KOB|ODN|BAS)-", first)
    papers = re.findall(rf"\b({'|'.join(PAPERS)})\b", first)
    helps: dict[str, str] = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(Loss)]):
        helps |= _arguments(inspect.cleandoc(each.__doc__ or ""))
    return LossEntry(
        name=name,
        module=kind.__name__,
        what=_plain(first),
        paper=", ".join(dict.fromkeys([*(KEYS[tag] for tag in tags), *papers])),
        equations=tuple(map(as_text, displayed or re.findall(r":math:`([^`]*)`", first))),
        settings=settings,
        helps={setting: help for setting, help in helps.items() if setting in settings},
        kind=_kind(kind),
    )


def _kind(kind: "type[Loss]") -> str:
    if kind.is_penalty:
        return "a penalty, comes with cross_entropy"
    if kind.head_similarity == "cosine":
        return "on cosines"
    return "on " + " and ".join(need for need in kind.needs if need != "labels")


def _settings(kind: "type[Loss]") -> dict[str, Any]:
    from largemargin.losses.base.loss import Loss

    common = inspect.signature(Loss).parameters
    return {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
        and name not in FILLED_IN
        and name not in common
    }


def _arguments(text: str) -> dict[str, str]:
    """The Args of a docstring; ``a, b: text`` says the same of both."""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    lines = found[1] if found else ""
    entries = re.findall(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", lines, re.DOTALL | re.MULTILINE)
    return {
        name.strip(): _plain(meaning).rstrip(".")
        for names, meaning in entries
        for name in names.split(",")
    }


def _plain(text: str) -> str:
    text = re.sub(r":math:`([^`]*)`", lambda found: as_text(found[1]), " ".join(text.split()))
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return text.replace("``", "").replace("**", "")


HELP = "show the losses with equation, paper and defaults; networks; data sets"

DESCRIPTION = """\
Show what there is to choose from. Without arguments: every loss in one line. With the name of a
loss: its equation, paper and settings."""

EXAMPLES = """\
Examples:
  largemargin list                    all losses, one line each
  largemargin list cosface kobayashi  two of them in full
  largemargin list --all              all of them in full
  largemargin list --models           networks
  largemargin list --data             data sets
  largemargin list cosface --json     the same for programs"""

WIDTH = 100
LIBRARIES = {
    "torchvision/NAME": "any classification network of torchvision, as torchvision/resnet50",
    "timm/NAME": "any network of timm, as timm/convnext_tiny",
}


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin list [NAME ...] [options]"
    parser.add_argument("names", nargs="*", type=str, metavar="NAME", help="losses to show in full")
    parser.add_argument("--all", action="store_true", help="show every loss in full")
    parser.add_argument("--models", action="store_true", help="show the networks")
    parser.add_argument("--data", action="store_true", help="show the data sets")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Any) -> int:
    if options.models and options.data:
        raise LargeMarginError("--models and --data are two lists. Ask for one at a time.")
    if not (options.models or options.data):
        print(_losses(options.names, in_full=options.all, as_json=options.json))
        return 0
    if options.names:
        raise LargeMarginError(
            f"{options.names[0]!r} is looked up among the losses, but --models or --data was given "
            "too. Leave one of them out."
        )
    from largemargin.app.models.build import list_models

    described = {**list_models(), **LIBRARIES} if options.models else _data()
    print(json.dumps(described, indent=1) if options.json else _two_columns(described))
    return 0


def _losses(names: list[str], *, in_full: bool, as_json: bool) -> str:
    """The losses of these names in full, or all of them."""
    from largemargin.losses import LOSSES

    entries = [describe(name) for name in names or LOSSES]
    if as_json:
        return json.dumps([{"loss": entry.name, **asdict(entry)} for entry in entries], indent=1)
    if names or in_full:
        return "\n\n".join(_in_full(entry) for entry in entries)
    return _overview(entries)


def _overview(entries: list[LossEntry]) -> str:
    """A line each, the papers, and where to go on."""
    papers = ", ".join(entry.paper for entry in entries)
    used = {key: title for key, title in PAPERS.items() if key in papers}
    losses = _two_columns({entry.name: entry.what for entry in entries})
    return (
        f"{losses}\n\nPapers:\n{_two_columns(used)}\n\nIn full: largemargin list NAME. Train with "
        "one: largemargin train --objective NAME, or with a sum:\n--objective 'cross_entropy + "
        "0.5*sample_margin'."
    )


def _in_full(entry: LossEntry) -> str:
    lines = [f"{entry.name}  (lm.{entry.module}, {entry.kind})", *_wrapped(entry.what)]
    for equation in entry.equations:
        lines += ["", *_wrapped(equation, indent=6)]
    if entry.paper:
        papers = "; ".join(f"{key}: {PAPERS[key]}" for key in entry.paper.split(", "))
        lines += ["", *_wrapped(f"paper: {papers}")]
    if entry.settings:
        lines += ["", "  settings, with their defaults:"]
        for name, default in entry.settings.items():
            meaning = entry.helps.get(name, "")
            lines += _wrapped(f"{name} = {default!r}" + (f"  {meaning}" if meaning else ""), 4, 8)
    return "\n".join(lines)


def _data() -> dict[str, str]:
    """What each source or its file says about it, and its terms of use."""
    from largemargin.app.data.sources import SOURCES

    described = {}
    for name, read in SOURCES.items():
        module = sys.modules[read.__module__]
        known = getattr(module, "KNOWN", {}).get(name)
        if known is None:
            text = (read.__doc__ or module.__doc__ or "").split("\n\n")[0].replace("``", "")
            licence = getattr(module, "LICENCES", {}).get(name)
        else:
            text = f"{known.title}, {known.page}. In --data.path: {known.place}."
            licence = known.licence
        described[name] = " ".join(text.split()) + (f" Licence: {licence}." if licence else "")
    return described


def _two_columns(rows: dict[str, str]) -> str:
    width = max(map(len, rows)) + 2
    return "\n".join(
        textwrap.fill(
            f"{name:<{width}}{text}", WIDTH, subsequent_indent=" " * width, break_long_words=False
        )
        for name, text in rows.items()
    )


def _wrapped(text: str, indent: int = 2, hanging: int | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2 if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
