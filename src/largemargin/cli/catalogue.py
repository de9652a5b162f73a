"""What the docstrings and signatures of the losses say, as data for ``largemargin list``."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import largemargin as lm
from largemargin.cli.equations import as_text
from largemargin.integrations.objectives import PENALTIES

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
    kind = lm.LOSSES[name]
    parents = kind.__mro__[1 : kind.__mro__.index(lm.Loss)]
    texts = [inspect.getdoc(each) or "" for each in (kind, *_functions(name, kind))]
    above = [each.__doc__ or "" for each in parents]
    refers = ":func:" in texts[0].split("\n\n")[0] and len(texts) > 1
    first = texts[1] if refers else texts[0]
    helps = [*texts, *map(inspect.cleandoc, above)]
    what = _plain(first.split("\n\n")[0])
    return LossEntry(
        name=name,
        module=kind.__name__,
        what=what,
        paper=_paper(" ".join(text.split("\n\n")[0] for text in texts)),
        equations=next(filter(None, map(_equations, texts)), ()),
        settings=_settings(kind),
        helps={key: text for each in reversed(helps) for key, text in _arguments(each).items()},
        kind=_kind(name, kind),
    )


def _functions(name: str, kind: type[lm.Loss]) -> list[Any]:
    """The pure function a module is made of: the one it names first, or the one called alike."""
    named = re.search(r":func:`(\w+)`", inspect.getdoc(kind) or "")
    names = [named[1] if named else "", name, f"{name}_loss"]
    return [getattr(lm.functional, each) for each in names if hasattr(lm.functional, each)][:1]


def _kind(name: str, kind: type[lm.Loss]) -> str:
    if name in PENALTIES:
        return "a penalty, comes with cross_entropy"
    if kind.head_similarity == "cosine":
        return 'on cosines, by name with scale="auto"'
    return "on " + " and ".join(need for need in kind.needs if need != "labels")


def _settings(kind: type[lm.Loss]) -> dict[str, Any]:
    common = inspect.signature(lm.Loss).parameters
    return {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
        and name not in FILLED_IN
        and name not in common
    }


def _paper(text: str) -> str:
    tags = re.findall(r"\b(NGY|NGR|ZHO|KOB|ODN|BAS)-", text)
    names = re.findall(rf"\b({'|'.join(PAPERS)})\b", text)
    return ", ".join(dict.fromkeys([*(KEYS[tag] for tag in tags), *names]))


def _equations(text: str) -> tuple[str, ...]:
    """The displayed equations, or else the ones in the first paragraph."""
    blocks = re.findall(r"\.\. math::(.*?)(?=\n\n|\Z)", text, re.DOTALL)
    first = text.split("\n\n")[0]
    return tuple(map(as_text, blocks or re.findall(r":math:`([^`]*)`", first)))


def _arguments(text: str) -> dict[str, str]:
    """The Args of a docstring; ``a, b: text`` says the same of both."""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = (
        re.findall(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", found[1], re.S | re.M) if found else []
    )
    return {
        name.strip(): _plain(meaning).rstrip(".")
        for names, meaning in entries
        for name in names.split(",")
    }


def _plain(text: str) -> str:
    text = re.sub(r":math:`([^`]*)`", lambda found: as_text(found[1]), " ".join(text.split()))
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return text.replace("``", "").replace("**", "")
