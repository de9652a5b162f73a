"""A page per loss, from its class and the results that name it."""

import inspect
import re
from functools import cache

import griffe
import make_tables

import largemargin as lm
from largemargin import functional
from largemargin.losses import Loss
from site_pages import api, drawing, results
from site_pages.curves import curve
from site_pages.docstrings import OPEN_POINT, to_markdown
from site_pages.sources import ORIGINALS, PAPERS, Paper

LINEAR = (
    "One product of features and class vectors, O(N C D), as in a linear head, and O(N C) for the "
    'rest. `impl="dense"` keeps the (N, C) logits for the backward pass; `impl="chunked"` keeps '
    "nothing of that size and computes the product again."
)
COSTS = {
    "center": "O(N D), and a (C, D) buffer for the centers.",
    "centroid_norm": "O(N D).",
    "compactness": "O(N D).",
    "layer_margin": "One more backward pass with `topk` (default C - 1) directions per sample, "
    "batched.",
    "margin_distribution": "One more backward pass to the inputs, and a second derivative through "
    "it only with `differentiable_norm=True`.",
    "stability": "O(N D), and a second forward pass for the noisy inputs in the training loop.",
    "super_symmetry": "O(C² D) and a (C, C) matrix.",
    "zero_centroid": "O(C D).",
    "dense_hinge": "O(N C D); the (N, C) logits are kept, since every rival counts by itself.",
    "centroid_margin": "O(N D) for the centroids and O(K C D) for the nearest boundaries of the K "
    "classes of the batch; the search runs in blocks without gradient, with no (C, C) array.",
}
SAME_COST = {
    "margin_hinge": "margin_distribution",
    "soft_hinge": "dense_hinge",
    "discriminative": "centroid_margin",
    "stable_discriminative": "centroid_margin",
    "robust_discriminative": "centroid_margin",
}


def pages() -> dict[str, str]:
    return {f"losses/{name}.md": page(name) for name in lm.LOSSES}


def page(name: str) -> str:
    """Markdown of the page of one loss."""
    loss = lm.LOSSES[name]
    sections = _sections(loss)
    opening, definition = _text(sections)
    parts = [
        f"# {loss.__name__}",
        opening,
        _signature(loss),
        _called(name),
        "## Definition",
        definition,
        "## Value and slope",
        drawing.figure(curve(name)),
        _arguments(loss),
        "## Source and errata",
        _source(name),
        "## Options",
        _options(loss),
        "## Cost",
        _cost(name),
        "## Measured",
        results.of_loss(name),
        _example(sections),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _function(name: str) -> str | None:
    """The name of the pure function of a loss, where it has one."""
    return next((each for each in (name, f"{name}_loss") if hasattr(functional, each)), None)


def _sections(loss: type[Loss]) -> list[griffe.DocstringSection]:
    """The parts of a class's docstring, as Markdown."""
    text = _linked(to_markdown(inspect.getdoc(loss) or "", api.links()))
    return griffe.Docstring(text).parse("google", warnings=False)


def _linked(text: str) -> str:
    """Marks of errata and open points lead to their explanation, as does the automatic scale."""
    text = text.replace("`auto_scale`", "[chosen by C](../how-to/schedules.md)")

    def errata(found: re.Match[str]) -> str:
        return re.sub(r"[NRZKD]\d+", lambda mark: _to_erratum(mark[0]), found[0])

    text = re.sub(r"(?:[Ee]rrat(?:um|a) )[NRZKD]\d+(?:(?:, | and )[NRZKD]\d+)*", errata, text)
    text = re.sub(r"\((Z\d+)\)", lambda found: f"({_to_erratum(found[1])})", text)
    return OPEN_POINT.sub(lambda found: f"([{found[1]}](../errata.md#{found[1].lower()})", text)


def _to_erratum(mark: str) -> str:
    return f"[{mark}](../errata.md#{mark.lower()})"


def _text(sections: list[griffe.DocstringSection]) -> tuple[str, str]:
    """First sentence, and the rest; an equation that stands only in the first is shown again."""
    texts = [section.value for section in sections if section.kind.value == "text"]
    opening, *rest = [block for text in texts for block in text.split("\n\n")]
    inline = re.search(r"\$([^$]+)\$", opening)
    if inline and not any("$$" in block for block in rest):
        rest = [f"$$\n{inline[1]}\n$$", *rest]
    return opening, "\n\n".join(rest)


def _signature(loss: type[Loss]) -> str:
    """The call that makes it, on several lines where it is long."""
    name, _, inside = make_tables.signature(loss).strip("`").partition("(")
    arguments = [*re.split(r", (?=\w+(?:=|,|$))", inside[:-1]), "**options"]
    arguments = [each for each in arguments if each]
    line = f"lm.{name}({', '.join(arguments)})"
    if len(line) > 88:
        line = "\n    ".join([f"lm.{name}(", *(f"{each}," for each in arguments)]) + "\n)"
    return f"```python\n{line}\n```"


def _called(name: str) -> str:
    loss = lm.LOSSES[name]
    called = f"`loss({', '.join(loss.needs)})`"
    if loss.takes_logits:
        called += " or `loss(logits, labels)`"
    found = [f"[`lm.{loss.__name__}`][{api.links()[loss.__name__]}]"]
    function = _function(name)
    if function is not None:
        found.append(f"[`functional.{function}`][{api.links()[function]}]")
    return f"Call it as {called}; on the command line it is `{name}`. API: {', '.join(found)}."


def _arguments(loss: type[Loss]) -> str:
    """What the constructor takes, with the defaults' sources; a class may leave it to its base."""
    taken = inspect.signature(loss.__init__).parameters
    told: dict[str, str] = {}
    for each in loss.__mro__[::-1]:
        for section in _sections(each) if issubclass(each, Loss) else ():
            if section.kind.value == "parameters":
                told.update({entry.name: entry.description for entry in section.value})
    common = set(inspect.signature(Loss.__init__).parameters)
    lines = [
        "## Arguments",
        "",
        "| argument | default | meaning, and where the default comes from |",
    ]
    lines.append("|---|---|---|")
    used: set[str] = set()
    for argument, parameter in taken.items():
        if argument in common or parameter.kind is parameter.VAR_KEYWORD:
            continue
        entry = next((key for key in told if argument in re.split(r",\s*| and ", key)), "")
        meaning = " ".join(told.get(entry, "").split())
        if entry in used:
            meaning = f"with `{re.split(', ', entry)[0]}` above"
        used.add(entry or argument)
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        cell = re.sub(r"(?<!\\)\|", r"\|", meaning)
        lines.append(f"| `{argument}` | {default} | {cell} |")
    return "\n".join(lines) if len(lines) > 4 else ""


def _source(name: str) -> str:
    lines = []
    if name in ORIGINALS:
        lines.append(f"- Proposed by: {ORIGINALS[name]}.")
    told = inspect.getdoc(lm.LOSSES[name]) or ""
    marks = {found[1] for found in make_tables.MARK.finditer(told)}
    for mark in sorted(marks & set(PAPERS)):
        paper = PAPERS[mark]
        lines.append(f"- As in: {citation(paper)}.")
    if not lines:
        lines.append("- The softmax loss, the baseline of every comparison.")
    found = sorted(set(re.findall(r"\b[NRZKD]\d{1,2}\b", told) if marks & set(PAPERS) else []))
    known = [mark for mark in found if mark in errata()]
    if known:
        lines.append("- Errata that concern it:")
        lines += [f"    - {_to_erratum(mark)}: {errata()[mark]}" for mark in known]
    else:
        lines.append("- No erratum concerns it.")
    return "\n".join(lines)


def citation(paper: Paper) -> str:
    venue = f", {paper.venue}" if paper.venue else ""
    return f"{paper.authors}: *{paper.title}*{venue} ({paper.tag})"


@cache
def errata() -> dict[str, str]:
    """First sentence of every erratum by its mark, from the errata page."""
    text = (api.ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    found = re.findall(r"(?m)^### ([NRZKD]\d+) · (.*) \{", text)
    return dict(found)


def _options(loss: type[Loss]) -> str:
    reasons = {
        shown: make_tables.reason(loss, option) for option, shown in make_tables.OPTIONS.items()
    }
    has = ", ".join(shown for shown, why in reasons.items() if why is None)
    lines = [f"Supported: {has}."]
    if any(reasons.values()):
        lines += ["", "Not supported:", ""]
        for why in dict.fromkeys(why for why in reasons.values() if why is not None):
            alike = [shown for shown, said in reasons.items() if said == why]
            lines.append(f"- {', '.join(alike)}: {why}")
    changed = ", ".join(f"`{key}={value!r}`" for key, value in loss.defaults.items())
    note = f"\n\nDefaults that differ from other losses: {changed}." if changed else ""
    return (
        "\n".join(lines)
        + note
        + f"\n\nMeaning of the options: [`lm.Loss`][{api.links()['Loss']}]; options of all losses: "
        "[losses and their options](../losses.md)."
    )


def _cost(name: str) -> str:
    told = COSTS.get(SAME_COST.get(name, name), LINEAR)
    return f"{told}\n\n{results.cost_of_loss(name)}"


def _example(sections: list[griffe.DocstringSection]) -> str:
    for section in sections:
        if section.kind.value == "examples":
            parts = []
            for kind, text in section.value:
                is_code = kind.value == "examples"
                parts.append(f"```pycon\n{text}\n```" if is_code else text)
            return "## Example\n\n" + "\n\n".join(parts)
    return ""
