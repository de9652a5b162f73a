"""Writes docs/losses.md from the code: what each loss is, and which options it has.

Run ``python docs/make_tables.py``; a test fails when the committed page is out of date.
"""

import inspect
import re
import sys
from pathlib import Path

import largemargin as lm
from largemargin.losses import Loss

sys.path.insert(0, str(Path(__file__).parent))
from site_pages.docstrings import without_marks
from site_pages.sources import FAMILIES, PAPERS

PAGE = Path(__file__).parent / "losses.md"
OPTIONS = {
    "weight": "class weights",
    "prior": "prior",
    "sample_weight": "sample weights",
    "ignore_index": "ignore_index",
    "soft_targets": "soft targets",
    "label_smoothing": "label smoothing",
    "class_margin": "margin per class",
    "reduction": "reduction",
    "chunked": "chunked",
    "compile": "compile",
}
NO_MARGIN = "it has no margin to vary."
MARK = re.compile(r"\b(NGY|NGR|ZHO|KOB|ODN|BAS)-[\w.]+")


def family(name: str) -> str:
    """The group of ``FAMILIES`` that a loss belongs to, by the mark of its equation."""
    mark = MARK.search(inspect.getdoc(lm.LOSSES[name]) or "")
    letters = mark[1] if mark else "BAS"
    return next(group for group, known in FAMILIES.items() if known == letters)


def signature(loss: type[Loss]) -> str:
    """Constructor arguments without the common options."""
    shown = []
    for name, parameter in inspect.signature(loss.__init__).parameters.items():
        if name == "self" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = parameter.default
        shown.append(name if default is parameter.empty else f"{name}={default!r}")
    common = set(inspect.signature(Loss.__init__).parameters)
    return f"`{loss.__name__}({', '.join(s for s in shown if s.split('=')[0] not in common)})`"


def takes_class_margin(loss: type[Loss]) -> bool:
    parameters = inspect.signature(loss.__init__).parameters
    return "class_counts" in parameters or any(
        "Tensor" in str(parameters[name].annotation)
        for name in ("margin", "m2", "m3")
        if name in parameters
    )


def reason(loss: type[Loss], option: str) -> str | None:
    """Why a loss lacks an option; None when it has it."""
    if option in loss.refuses:
        return loss.refuses[option]
    if option == "class_margin" and not takes_class_margin(loss):
        return NO_MARGIN
    return None


def summary(loss: type[Loss]) -> str:
    first = (inspect.getdoc(loss) or "").split("\n\n")[0].replace("\n", " ")
    first = re.sub(r":(?:func|class|meth):`(\w+)`", r"`\1`", without_marks(first))
    return re.sub(r":math:`([^`]*)`", r"$\1$", first).replace("``", "`")


def page() -> str:
    lines = [
        "# Losses and their options",
        "",
        "Every loss by name. On the web pages (`make docs`) each has its own page with equation,",
        "paper, source of every default, a curve of value and slope, errata and cost;",
        "`help(largemargin.CosFace)` and `largemargin list cosface` show the same in a terminal.",
        "(This page is made by `docs/make_tables.py` from the code; do not edit it by hand.)",
        "",
        "| name | module | called with | what it is |",
        "|---|---|---|---|",
    ]
    for name, loss in lm.LOSSES.items():
        called = ", ".join(loss.needs)
        if loss.takes_logits:
            called += " *or* logits, labels"
        lines.append(f"| {name} | {signature(loss)} | {called} | {summary(loss)} |")
    lines += ["", "## By paper", "", "| paper | losses |", "|---|---|"]
    for group, letters in FAMILIES.items():
        named = [f"`{loss.__name__}`" for name, loss in lm.LOSSES.items() if family(name) == group]
        source = PAPERS.get(letters)
        paper = f"{source.tag}: *{source.title}*" if source else group
        lines.append(f"| {paper} | {', '.join(named)} |")
    lines += [
        "",
        "## Options",
        "",
        "Every loss also takes fp16 and bf16 inputs and autocast (it computes in float32), and",
        "empty or ragged batches; it has `sync` for distributed means, `state_dict`, pickling, and",
        "a `repr` that rebuilds it.",
        "Class weights are an argument, `CosFace(weight=[1.0, 2.0, ...])`, and so are",
        "`prior=[...]` (class counts: logit adjustment), `ignore_index=`, `label_smoothing=`,",
        '`reduction=` and `impl="chunked"`. For margins per',
        "class pass a tensor of C numbers as `margin=`, or `class_counts=[...]`. Sample weights",
        "come with the batch, `sample_weight=`; soft targets are (N, C) labels.",
        "A number in brackets is the reason below the table.",
        "",
        "| loss | " + " | ".join(OPTIONS.values()) + " |",
        "|---" * (len(OPTIONS) + 1) + "|",
    ]
    reasons: list[str] = []
    for name, loss in lm.LOSSES.items():
        cells = []
        for option in OPTIONS:
            why = reason(loss, option)
            if why is None:
                cells.append("yes")
                continue
            if why not in reasons:
                reasons.append(why)
            cells.append(f"no ({reasons.index(why) + 1})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Reasons:", ""]
    lines += [f"{number}. {why[0].upper()}{why[1:]}" for number, why in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
