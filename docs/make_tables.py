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

PAGE = Path(__file__).parent / "losses.md"
OPTIONS = {
    "weight": "class weights",
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
    first = _first(loss)
    function = re.match(r"Module form of :func:`(\w+)`", first)
    if function:
        first = _first(getattr(lm.functional, function[1]))
    first = re.sub(r":(?:func|class|meth):`(\w+)`", r"`\1`", without_marks(first))
    return re.sub(r":math:`([^`]*)`", r"$\1$", first).replace("``", "`")


def _first(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def page() -> str:
    lines = [
        "# Losses and their options",
        "",
        "Every loss by name. Its page has the equation, the paper, the source of every default, a",
        "curve of its value and slope, errata and cost; `help(largemargin.functional.cosface)` and",
        "`largemargin list cosface` say the same without the site. (This page is made by",
        "`docs/make_tables.py` from the code; do not edit it by hand.)",
        "",
        "| name | module | called with | what it is |",
        "|---|---|---|---|",
    ]
    for name, loss in lm.LOSSES.items():
        called = ", ".join(loss.needs)
        if loss.takes_logits:
            called += " *or* logits, labels"
        lines.append(f"| {name} | {signature(loss)} | {called} | {summary(loss)} |")
    lines += [
        "",
        "## Options",
        "",
        "All losses also have fp16/bf16 inputs and autocast (computed in float32), empty and",
        "ragged batches, `sync` for distributed means, `state_dict`, pickling and a `repr` that",
        "rebuilds them.",
        "Class weights are `CosFace(weight=[1.0, 2.0, ...])`, margins per class `margin=` a tensor",
        "of C numbers or `class_counts=[...]`; `ignore_index=`, `label_smoothing=`, `reduction=`",
        'and `impl="chunked"` are arguments of the loss too. Sample weights are given with a',
        "batch, `sample_weight=`, soft targets as (N, C) labels.",
        "A number points to the reason below the table.",
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
